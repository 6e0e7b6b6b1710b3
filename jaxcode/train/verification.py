"""The same training without stragglers and without a code, to compare parameters with.

And its control: what becomes of the parameters when the missing workers' data are dropped instead,
which is what the difference would be if the code did nothing.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxcode.aggregate import coded_value_and_grad
from jaxcode.codes import uncoded
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
