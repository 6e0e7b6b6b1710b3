"""Train a Flax classifier with workers missing at every step, and measure what that cost.

One compiled function takes a step: the coded gradient from whoever answered, then Adam. Batches and
survivors come from `jaxcode.train.schedule`; a step whose numbers are not finite is never accepted,
so the state that the caller holds is always one to go on from.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxcode.aggregate import coded_value_and_grad
from jaxcode.codes import fractional_repetition
from jaxcode.load import lower_bound
from jaxcode.train.datasets import Dataset
from jaxcode.train.schedule import batch_indices, round_at

# With Adam's usual 1e-8, a gradient of nothing but rounding error would move a parameter by up to
# the learning rate: two exact ways to compute one gradient would then part.
EPSILON = 1e-5
# Every number of this trainer's models is a float32.
BYTES = 4

Batch = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """What decides the numbers of a run, and so what a checkpoint is checked against.

    Attributes:
        data: path of an ``.npz`` file, or None for scikit-learn's digits.
        workers: n.
        stragglers: s, missing at every step.
        fragments: m, each message is 1/m of the payload.
        method: "factors" or "dense".
        straggler_model: a name in `jaxcode.train.schedule.MODELS`.
        hidden: width of each hidden layer.
        dropout: rate after each hidden layer.
        learning_rate: Adam's.
        batch_size: examples in one global batch.
        seed: of parameters, split, batches, dropout and stragglers.

    Example:
        >>> Config(workers=4).stragglers
        1
    """

    data: str | None = None
    workers: int = 8
    stragglers: int = 1
    fragments: int = 1
    method: Literal["factors", "dense"] = "factors"
    straggler_model: str = "uniform"
    hidden: tuple[int, ...] = (256, 256)
    dropout: float = 0.0
    learning_rate: float = 1e-3
    batch_size: int = 64
    seed: int = 0


class State(NamedTuple):
    """All that changes from step to step: a checkpoint holds this and nothing else.

    Attributes:
        params: the model's parameters.
        opt_state: Adam's state.
        step: steps taken.
        key: the run's PRNG key; a step folds its number into it.
    """

    params: PyTree
    opt_state: PyTree
    step: Int[Array, ""] | Int[np.ndarray, ""]
    key: Key[Array, ""]


class Record(NamedTuple):
    """What one accepted step reports.

    Attributes:
        step: from 1.
        loss: mean over the global batch.
        survivors: who answered.
        waited: simulated seconds until the last survivor.
        waited_all: simulated seconds until the last worker.
        seconds: wall time of the step on this machine.
    """

    step: int
    loss: float
    survivors: Bool[np.ndarray, " workers"]
    waited: float
    waited_all: float
    seconds: float


class Traffic(NamedTuple):
    """Bytes that one worker sends in one step.

    Attributes:
        message: of this run.
        dense: of the whole gradient, as uncoded and repetition schemes send it.
        ye_abbe: of 1/m of the gradient (Ye and Abbe, 2018).
        lower_bound: some worker must send at least so much under this assignment; None where
            there are fewer examples than partitions.
    """

    message: int
    dense: int
    ye_abbe: float
    lower_bound: float | None


class Diverged(ArithmeticError):
    """A step's loss, gradient or parameters were not finite.

    Example:
        >>> raise Diverged(7, float("nan"))
        Traceback (most recent call last):
        ...
        jaxcode.train.training.Diverged: step 7: the loss is nan: try a smaller --learning-rate
    """

    def __init__(self, step: int, loss: float):
        what = "the gradient is not finite" if np.isfinite(loss) else f"the loss is {loss}"
        super().__init__(f"step {step}: {what}: try a smaller --learning-rate")
        self.step = step


class Classifier(nn.Module):
    """A multilayer perceptron: each hidden layer is Dense, GELU and dropout.

    GELU and not ReLU, at whose kink a rounding error in the last digit switches a unit on or off.

    Attributes:
        hidden: widths.
        num_classes: width of the output.
        dropout: rate.

    Example:
        >>> model = Classifier(hidden=(8,), num_classes=3)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
        >>> {name: layer["kernel"].shape for name, layer in params.items()}
        {'Dense_0': (4, 8), 'Dense_1': (8, 3)}
    """

    hidden: tuple[int, ...]
    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "..."], *, train: bool = False) -> Float[Array, "..."]:
        """Return the logits; `train` asks for dropout."""
        for width in self.hidden:
            x = nn.gelu(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Each example's cross entropy, as an object that other processes can be sent.

    In full float32: products in an accelerator's shorter types would differ between two exact ways
    to compute one gradient.

    Attributes:
        model: whose logits to take; with a key, under dropout.

    Example:
        >>> model = Classifier(hidden=(8,), num_classes=3)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
        >>> Loss(model)(params, (np.zeros((2, 4), np.float32), np.array([0, 2]))).shape
        (2,)
    """

    model: Classifier

    def __call__(self, params: PyTree, batch: Batch, key: Any = None) -> Float[Array, " examples"]:
        """Return the loss of every example of a batch."""
        x, y = batch
        rngs = {} if key is None else {"dropout": key}
        with jax.default_matmul_precision("highest"):
            logits = self.model.apply(
                {"params": params}, jnp.asarray(x), train=key is not None, rngs=rngs
            )
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)


class Trainer:
    """The compiled step of one configuration, and what goes with it.

    Args:
        config: the run.
        data: its data set.

    Example:
        >>> from jaxcode.train.datasets import load
        >>> trainer = Trainer(Config(hidden=(16,)), load())
        >>> state = trainer.initial_state()
        >>> for state, record in trainer.steps(state, 3):
        ...     assert record.survivors.sum() == 7
        >>> int(state.step)
        3
    """

    def __init__(self, config: Config, data: Dataset):
        self.config = config
        self.data = data
        self.code = fractional_repetition(
            config.workers, config.stragglers, num_fragments=config.fragments
        )
        self.mesh = worker_mesh(config.workers)
        self.model = Classifier(config.hidden, data.num_classes, config.dropout)
        self.loss = Loss(self.model)
        self.optimizer = optax.adam(config.learning_rate, eps=EPSILON)
        self.coded = coded_value_and_grad(
            self.loss, self.code, method=config.method, mesh=self.mesh
        )
        self.compile_seconds = 0.0
        self._program: Callable[..., Any] | None = None

    def initial_state(self) -> State:
        """Return the state before the first step."""
        return jax.jit(self._initial_state)(jax.random.key(self.config.seed))

    def expected_state(self) -> State:
        """Return a state's shapes and types, and a key: nothing is computed."""
        key = jax.random.key(self.config.seed)
        return jax.eval_shape(self._initial_state, key)._replace(key=key)

    def _initial_state(self, key: Any) -> State:
        init_key, key = jax.random.split(key)
        x = jnp.zeros((1, self.data.x_train.shape[1]), jnp.float32)
        params = self.model.init(init_key, x)["params"]
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32), key)

    def place(self, state: State) -> State:
        """Copy a state to every device of the mesh, where the step leaves it too."""
        if self.mesh is None:
            return jax.device_put(state, jax.devices()[0])
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return jax.device_put(state, replicated)

    def batch(self, step: int) -> Batch:
        """Return the features and classes of one step's batch."""
        indices = batch_indices(
            len(self.data.y_train), self.config.batch_size, seed=self.config.seed, step=step
        )
        return self.data.x_train[indices], self.data.y_train[indices]

    def round(self, step: int) -> Any:
        """Return who answers in one step."""
        config = self.config
        return round_at(
            config.straggler_model,
            config.workers,
            config.stragglers,
            seed=config.seed,
            step=step,
        )

    def weights(
        self, survivors: Bool[np.ndarray, " workers"]
    ) -> Float[np.ndarray, "fragments workers"]:
        """Return how to decode from these survivors."""
        return self.code.decoding_weights(survivors).astype(np.float32)

    def keywords(self, state: State) -> dict[str, Key[Array, ""]]:
        """Return the step's key where the loss draws random numbers."""
        return {"key": jax.random.fold_in(state.key, state.step)} if self.config.dropout else {}

    def update(self, state: State, grads: PyTree) -> State:
        """Apply Adam to a gradient."""
        # Adam's bias correction raises a float to an integer, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1, state.key)

    def compiled(self, state: State) -> Callable[..., Any]:
        """Return the step as one program, which serves every set of survivors.

        Args:
            state: from `place`.

        Returns:
            A function of a state, a batch and decoding weights.
        """
        if self._program is None:
            started = time.perf_counter()
            everyone = self.weights(np.ones(self.config.workers, bool))
            lowered = jax.jit(self._coded_step).lower(state, self.batch(0), everyone)
            self._program = lowered.compile()
            self.compile_seconds = time.perf_counter() - started
        return self._program

    def _coded_step(self, state: State, batch: Batch, weights: Any) -> tuple[State, Any, Any]:
        """Take one step; the flag says whether everything in the new state is finite."""
        value, grads = self.coded(state.params, batch, weights, **self.keywords(state))
        new = self.update(state, grads)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads, new.params))]
        return new, value, jnp.all(jnp.stack(finite))

    def steps(self, state: State, until: int) -> Iterator[tuple[State, Record]]:
        """Take steps up to a number of steps, yielding each new state.

        Args:
            state: where to go on from.
            until: the step to stop after.

        Yields:
            The state after each step and the step's record.

        Raises:
            Diverged: a number is not finite; the state yielded last is the last good one.
        """
        state = self.place(state)
        program = self.compiled(state)
        for step in range(int(state.step), until):
            started = time.perf_counter()
            arrived = self.round(step)
            new, loss, finite = program(state, self.batch(step), self.weights(arrived.survivors))
            if not finite:
                raise Diverged(step + 1, float(loss))
            state = new
            record = Record(
                step=step + 1,
                loss=float(loss),
                survivors=arrived.survivors,
                waited=float(arrived.elapsed),
                waited_all=float(arrived.latency.max()),
                seconds=time.perf_counter() - started,
            )
            yield state, record

    def accuracy(self, params: PyTree) -> float:
        """Return the share of held-out examples whose class is predicted."""
        apply = jax.jit(self.model.apply)
        logits = apply({"params": jax.device_get(params)}, self.data.x_test)
        return float(np.mean(np.argmax(np.asarray(logits), axis=-1) == self.data.y_test))

    def traffic(self, params: PyTree) -> Traffic:
        """Return what one worker sends in a step, and what it would send under other schemes.

        The bound takes a matrix's gradient to have the rank that a partition's examples allow, in
        the smallest partition; vectors count in full.
        """
        summary = self.summary(params)
        leaves = jax.tree.leaves(params)
        rows = self.config.batch_size // self.code.num_partitions
        shapes = [leaf.shape if leaf.ndim == 2 else (leaf.size, 1) for leaf in leaves]
        ranks = [rows if leaf.ndim == 2 else None for leaf in leaves]
        return Traffic(
            message=summary.message_bytes,
            dense=summary.dense_bytes,
            ye_abbe=summary.dense_bytes / self.config.fragments,
            lower_bound=BYTES * lower_bound(self.code, shapes, ranks) if rows else None,
        )

    def summary(self, params: PyTree) -> Any:
        """Return what is sent for each parameter."""
        key = jax.random.key(0) if self.config.dropout else None
        return self.coded.summary(params, self.batch(0), key=key)


def worker_mesh(num_workers: int) -> jax.sharding.Mesh | None:
    """Return a mesh of as many devices as divide the workers evenly; None where that is one.

    Args:
        num_workers: n.

    Returns:
        A mesh with the axis "workers".

    Example:
        >>> worker_mesh(1) is None
        True
    """
    devices = jax.devices()
    size = max(d for d in range(1, len(devices) + 1) if num_workers % d == 0)
    if size == 1:
        return None
    return jax.make_mesh(
        (size,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:size]
    )
