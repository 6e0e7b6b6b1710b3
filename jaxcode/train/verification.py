"""The same training without stragglers and without a code, to compare parameters with.

And its control: what becomes of the parameters when the missing workers' data are dropped instead,
which is what the difference would be if the code did nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxcode.aggregate import coded_value_and_grad
from jaxcode.code import Code
from jaxcode.codes import uncoded
from jaxcode.partitions import num_examples
from jaxcode.train.problem import Problem
from jaxcode.train.training import State, Trainer


class Difference(NamedTuple):
    """The largest difference between two trees of parameters.

    Attributes:
        absolute: of two numbers.
        relative: that, over the largest number of the reference.
    """

    absolute: float
    relative: float


class Differences(NamedTuple):
    """How far a run's parameters are from those of other trainings on the same batches.

    Attributes:
        exact: from the training without stragglers and without a code.
        control: from that to the training which drops the missing workers' data; None where nobody
            is missing.
    """

    exact: Difference
    control: Difference | None


def difference(params: PyTree, reference: PyTree) -> Difference:
    """Compare parameters.

    Args:
        params: of one run.
        reference: of another, of the same model.

    Returns:
        The largest `Difference` over all leaves.

    Example:
        >>> difference({"w": np.array([1.0, 2.5])}, {"w": np.array([1.0, 2.0])})
        Difference(absolute=0.5, relative=0.25)
    """
    ours, theirs = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (params, reference)
    )
    absolute = float(np.abs(ours - theirs).max())
    return Difference(absolute, absolute / float(np.abs(theirs).max()))


def without_stragglers(trainer: Trainer, until: int) -> Iterator[State]:
    """Train from step 0 with everyone present: plain `jax.value_and_grad` of the batch's mean loss.

    With dropout, each partition has its own key. One uncoded worker then takes each partition.

    Args:
        trainer: the run to repeat.
        until: number of steps.

    Yields:
        The state after each step.
    """
    if not trainer.config.dropout:
        everyone = np.ones(trainer.config.batch_size, np.float32)
        yield from _plain(trainer, until, lambda step: everyone)
        return
    code = uncoded(trainer.code.num_partitions)
    gradient = coded_value_and_grad(trainer.loss, code, method="dense")
    weights = code.decoding_weights(np.ones(code.num_workers, bool)).astype(np.float32)

    @jax.jit
    def step_function(state: State, batch: Any) -> State:
        _, grads = gradient(state.params, batch, weights, **trainer.keywords(state))
        return trainer.update(state, grads)

    state = trainer.initial_state()
    for step in range(until):
        state = step_function(state, trainer.batch(step))
        yield state


def dropping_data(trainer: Trainer, until: int) -> Iterator[State]:
    """Train from step 0 with an nth of each batch at each worker, leaving out who is missing.

    Args:
        trainer: the run whose stragglers to take.
        until: number of steps.

    Yields:
        The state after each step.
    """
    n, size = trainer.config.workers, trainer.config.batch_size
    worker = np.concatenate(
        [np.full(len(part), i) for i, part in enumerate(np.array_split(np.arange(size), n))]
    )
    return _plain(
        trainer, until, lambda step: trainer.round(step).survivors[worker].astype(np.float32)
    )


def _plain(trainer: Trainer, until: int, share: Any) -> Iterator[State]:
    """Train uncoded on the examples that `share(step)` marks with 1."""

    @jax.jit
    def step_function(state: State, batch: Any, present: Any) -> State:
        def mean(params: PyTree) -> Any:
            losses = trainer.loss(params, batch, **trainer.keywords(state))
            return jnp.sum(losses * present) / jnp.maximum(jnp.sum(present), 1)

        _, grads = jax.value_and_grad(mean)(state.params)
        return trainer.update(state, grads)

    state = trainer.initial_state()
    for step in range(until):
        state = step_function(state, trainer.batch(step), share(step))
        yield state


def ordinary(problem: Problem, num_blocks: int, until: int) -> Iterator[PyTree]:
    """Train a cluster's problem in this process: plain `jax.grad`, no code and nobody missing.

    Args:
        problem: from its first parameters on.
        num_blocks: k; their batches together are the step's.
        until: number of steps.

    Yields:
        The parameters after each step.

    Example:
        >>> toy = Problem("toy", {"w": np.zeros(2, np.float32)}, lambda p, x: x @ p["w"],
        ...               lambda block, step: np.ones((3, 2), np.float32), optax.sgd(1.0))
        >>> [params["w"].tolist() for params in ordinary(toy, 2, 2)]
        [[-1.0, -1.0], [-2.0, -2.0]]
    """
    yield from _blockwise(problem, num_blocks, until, lambda step, block, rows: np.arange(rows))


def without_absent(
    problem: Problem, code: Code, absent: Sequence[Collection[int]]
) -> Iterator[PyTree]:
    """As `ordinary`, but with each block dealt out to its group, and without whom was absent.

    Args:
        problem: what the cluster trained.
        code: a block code; the cluster's.
        absent: workers to leave out, for each step.

    Yields:
        The parameters after each step.
    """
    groups = [np.flatnonzero(code.block == block) for block in range(code.num_partitions)]

    def present(step: int, block: int, rows: int) -> np.ndarray:
        parts = np.array_split(np.arange(rows), len(groups[block]))
        kept = [p for i, p in zip(groups[block], parts, strict=True) if i not in absent[step]]
        return np.concatenate([np.arange(0), *kept])

    yield from _blockwise(problem, code.num_partitions, len(absent), present)


def _blockwise(problem: Problem, num_blocks: int, until: int, present: Any) -> Iterator[PyTree]:
    """Train on those rows of each block that `present(step, block, rows)` returns."""
    root = None if problem.seed is None else jax.random.key(problem.seed)

    @jax.jit
    def gradient(params: PyTree, batch: Any, step: Any, block: Any) -> PyTree:
        """The sum of a block's gradients."""
        step_key = [] if root is None else [jax.random.fold_in(root, step)]
        keys = [jax.random.fold_in(key, block) for key in step_key]

        def total(params: PyTree) -> Any:
            value = problem.loss(params, batch, *keys)
            return jnp.mean(value[0] if problem.has_aux else value) * num_examples(batch)

        grads = jax.grad(total, allow_int=True)(params)
        # Integers have no gradient: for Optax it is zero.
        return jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g, grads, params
        )

    @jax.jit
    def update(params: PyTree, opt_state: Any, grads: list[PyTree], examples: Any) -> Any:
        mean = jax.tree.map(lambda *g: (sum(g) / examples).astype(g[0].dtype), *grads)
        updates, opt_state = problem.optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.asarray, problem.params)
    opt_state = problem.optimizer.init(params)
    # Optax raises integers to floats, and so does the mean: strict promotion refuses that.
    with jax.numpy_dtype_promotion("standard"):
        for step in range(until):
            grads, examples = [], 0
            for block in range(num_blocks):
                batch = problem.data(block, step)
                rows = num_examples(batch)
                kept = present(step, block, rows)
                if len(kept) < rows:
                    batch = jax.tree.map(lambda x, kept=kept: np.asarray(x)[kept], batch)
                if len(kept):
                    grads.append(gradient(params, batch, step, block))
                    examples += len(kept)
            if grads:
                params, opt_state = update(params, opt_state, grads, float(examples))
            yield params
