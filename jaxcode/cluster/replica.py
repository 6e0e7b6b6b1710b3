"""One worker's copy of the training: its messages, and the update that all copies apply alike.

Nothing here knows of Ray. A replica computes the message of its partitions, and from the messages
of the survivors it makes the next state, which it takes over only when it is told to: so that all
replicas take the same step, or none does.
"""

import dataclasses
import functools
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcode.cluster import wire
from jaxcode.code import Code
from jaxcode.coding import combine, decode, encode_unchecked
from jaxcode.leaves import shapes_where
from jaxcode.lowrank import to_dense
from jaxcode.worker import Method, Worker


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained: all that a worker needs besides the code, and the same on all of them.

    Attributes:
        loss: as of `jaxcode.coded_value_and_grad`; with a `seed` also given a key.
        data: ``data(block, step)`` returns that partition's batch, the same wherever it is called.
        params: the first parameters, NumPy arrays.
        optimizer: an Optax transformation.
        method: "factors" or "dense".
        has_aux: whether the loss returns ``(value, aux)``.
        trainable: which leaves get a gradient.
        wire_dtype: of messages.
        normal_form: whether factors may be brought into normal form.
        seed: of the keys given to the loss, or None.
    """

    loss: Callable[..., Any]
    data: Callable[[int, int], Any]
    params: Any
    optimizer: Any
    method: Method = "dense"
    has_aux: bool = False
    trainable: Any = None
    wire_dtype: Any = None
    normal_form: bool = True
    seed: int | None = None


class State(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


class Computed(NamedTuple):
    """What a worker tells of its step; the message itself stays with it.

    Attributes:
        numbers: the message's bytes, without header.
        values: per partition the number of examples, and sums over them of the loss and of each
            auxiliary output.
        integers: checksum of the payload's integers, on which replicas must agree to be mixed.
        finite: whether the message is.
    """

    numbers: bytes
    values: dict[int, tuple[int, float, Any]]
    integers: int
    finite: bool


class Replica:
    """A copy of the training on this host.

    Args:
        training: what is trained.
        code: who computes what.
        rows: examples of the largest partition; the others are padded to it.
    """

    def __init__(self, training: Training, code: Code, rows: int):
        self.training = training
        arrays = jax.tree.map(jnp.asarray, training.params)
        self.state = State(arrays, jax.jit(training.optimizer.init)(arrays))
        self.step = 0
        self._staged: tuple[tuple[int, int], State] | None = None
        self._spare: State | None = None
        self._payload_of = jax.jit(self._payload, static_argnames="padded")
        self.configure(code, rows)

    def configure(self, code: Code, rows: int) -> None:
        """Change the code, and with it who computes what: the loss is not compiled anew."""
        self.code, self.rows = code, rows
        t = self.training
        self._worker = Worker(
            t.loss, code, t.method, t.has_aux, t.trainable, t.wire_dtype, t.normal_form
        )
        self._encode = jax.jit(self._encoded)
        batch, share, padded = self.partition(0, 0)
        args = (self.state.params, batch, share, self._key(0, 0))
        payload = jax.eval_shape(functools.partial(self._payload, padded=padded), *args)
        self._like = shapes_where(payload.grads, self.state.params)
        stacked = [payload.grads] * code.load
        message = jax.eval_shape(self._encoded, stacked, jnp.zeros((), jnp.int32))
        self.message_tree = jax.tree.structure(message)
        self.layout = wire.Layout.of(jax.tree.leaves(message))
        everyone = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((code.num_workers, *x.shape), x.dtype), message
        )
        weights = jax.ShapeDtypeStruct((code.num_fragments, code.num_workers), np.float32)
        recovered = jax.eval_shape(self._recovered, everyone, weights)
        self.recovered_tree = jax.tree.structure(recovered)
        self.recovered_layout = wire.Layout.of(jax.tree.leaves(recovered))
        self._recover = jax.jit(self._recovered)
        self._decode = _writing_over(self._decoded)
        self._finish = _writing_over(self._finished)
        self._old_grads: Any = None
        self._buffers = [
            np.zeros((code.num_workers, *shape), dtype)
            for shape, dtype in zip(self.layout.shapes, self.layout.types, strict=True)
        ]

    def partition(self, block: int, step: int) -> tuple[Any, np.ndarray, bool]:
        """A partition's batch, padded to `rows`; each example's share; whether there is padding."""
        batch = self.training.data(int(block), int(step))
        count = num_rows(batch, block, step)
        if count > self.rows:
            raise ValueError(
                f"`data({block}, {step})` needs at most the {self.rows} examples that the largest "
                f"block has at step 0; got {count}: return smaller batches, or the largest first"
            )
        share = np.zeros(self.rows, np.float32)
        share[:count] = 1 / self.rows  # and not 1: sums could leave the range of half precision
        if count == self.rows:
            return batch, share, False
        index = np.minimum(np.arange(self.rows), count - 1)
        return jax.tree.map(lambda x: np.asarray(x)[index], batch), share, True

    def compute(self, worker: int) -> Computed:
        """The message of one worker at this step, and what its partitions' losses were."""
        values, grads = {}, []
        for block in map(int, self.code.partitions[worker]):
            batch, share, padded = self.partition(block, self.step)
            key = self._key(self.step, block)
            payload = self._payload_of(self.state.params, batch, share, key, padded=padded)
            aux = jax.tree.map(lambda x: np.asarray(x) * self.rows, payload.aux)
            count = int(np.count_nonzero(share))
            values[block] = (count, float(payload.value) * self.rows, aux)
            grads.append(payload.grads)
        self._grads = grads
        arrays = self._message(worker)
        whole = [x for x in arrays if np.issubdtype(x.dtype, np.integer)]
        integers = zlib.crc32(b"".join(x.tobytes() for x in whole))
        return Computed(self.layout.join(arrays), values, integers, wire.all_finite(arrays))

    def message_of(self, other: int) -> bytes:
        """The message that another worker of the same partitions computes at this step."""
        return self.layout.join(self._message(other))

    def _message(self, worker: int) -> list[np.ndarray]:
        message = self._encode(self._grads, jnp.asarray(worker, jnp.int32))
        return [np.asarray(x) for x in jax.tree.leaves(message)]

    def stage(
        self, token: tuple[int, int], messages: dict[int, Any], weights: np.ndarray
    ) -> tuple[float, float]:
        """Make the next state from survivors' numbers, to take over at `commit`.

        Args:
            token: names this state: the step and which attempt at it.
            messages: numbers by worker; those of others are not read.
            weights: D (m, n), divided by the number of examples in multiples of `rows`.

        Returns:
            Seconds of decoding, and of the optimizer.

        Raises:
            Rejected: the new parameters are not finite.
        """
        started = time.perf_counter()
        arguments = self._stack(messages), weights.astype(np.float32)
        return self._keep(token, started, self._decode, arguments)

    def stage_recovered(self, token: tuple[int, int], numbers: Any) -> tuple[float, float]:
        """As `stage`, from what `recover` made of the messages."""
        started = time.perf_counter()
        leaves = self.recovered_layout.split(numbers)
        recovered = jax.tree.unflatten(self.recovered_tree, leaves)
        return self._keep(token, started, self._finish, (recovered,))

    def recover(self, messages: dict[int, Any], weights: np.ndarray) -> bytes:
        """The decoded payload, in factors where it is: what a master sends back."""
        recovered = self._recover(self._stack(messages), weights.astype(np.float32))
        return self.recovered_layout.join([np.asarray(x) for x in jax.tree.leaves(recovered)])

    def _keep(
        self, token: tuple[int, int], started: float, decode: Any, arguments: tuple[Any, ...]
    ) -> tuple[float, float]:
        self._discard()
        params = self.state.params
        # Written over: fresh memory for every step would cost as much time as the numbers in it.
        old, self._old_grads = self._old_grads, None
        grads = decode(_room_for(params) if old is None else old, params, *arguments)
        jax.block_until_ready(grads)
        decoded = time.perf_counter()
        spare, self._spare = self._spare, None
        state, finite = self._apply(
            _room_for(self.state) if spare is None else spare, self.state, grads
        )
        self._old_grads = grads
        self._staged = (token, state)
        if not finite:
            self._discard()
            raise wire.Rejected("not finite", "the new parameters")
        return decoded - started, time.perf_counter() - decoded

    def _discard(self) -> None:
        """Give up what is staged; its memory serves the next."""
        if self._staged is not None and self._staged[1] is not self.state:
            self._spare = self._staged[1]
        self._staged = None

    def skip(self, token: tuple[int, int]) -> None:
        """Stage the state as it is: a step without an update."""
        self._discard()
        self._staged = (token, self.state)

    def commit(self, token: tuple[int, int] | None) -> None:
        """Take over the state that was staged under this token; again is no harm."""
        if token is not None and self._staged is not None and self._staged[0] == token:
            old, self.state, self.step = self.state, self._staged[1], token[0] + 1
            self._staged = None
            if old is not self.state:
                self._spare = old

    def load(self, leaves: list[np.ndarray], step: int) -> None:
        """Take over another replica's state."""
        like = jax.tree.leaves(self.state)
        arrays = [
            jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(old))
            if is_key(old)
            else jnp.array(x)
            for x, old in zip(leaves, like, strict=True)
        ]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), arrays)
        self.step, self._staged, self._spare = step, None, None

    def leaves(self) -> list[np.ndarray]:
        """The state's arrays on the host, to be copied before the next step; keys as their data."""
        return [
            np.asarray(jax.random.key_data(x) if is_key(x) else x)
            for x in jax.tree.leaves(self.state)
        ]

    def warm_up(self, worker: int, *, master: bool) -> None:
        """Compile what a worker runs, and leave the state as it is."""
        self.compute(worker)
        token, messages, weights = (self.step, -1), self._nothing(), self._no_weights()
        if master:
            self.stage_recovered(token, self.recover(messages, weights))
        else:
            self.stage(token, messages, weights)
        self._discard()

    def warm_up_master(self) -> None:
        """Compile what a master runs."""
        self.recover(self._nothing(), self._no_weights())

    def _nothing(self) -> dict[int, bytes]:
        return dict.fromkeys(range(self.code.num_workers), bytes(self.layout.nbytes))

    def _no_weights(self) -> np.ndarray:
        return np.zeros((self.code.num_fragments, self.code.num_workers))

    def _stack(self, messages: dict[int, Any]) -> Any:
        for worker, numbers in messages.items():
            for buffer, array in zip(self._buffers, self.layout.split(numbers), strict=True):
                buffer[worker] = array
        # Rows of others hold what they held: their weights are 0, and they are not read.
        return jax.tree.unflatten(self.message_tree, self._buffers)

    def _key(self, step: int, block: int) -> Any:
        if self.training.seed is None:
            return None
        return jax.random.fold_in(jax.random.fold_in(self._root, step), block)

    @functools.cached_property
    def _root(self) -> Any:
        return jax.random.key(self.training.seed or 0)

    def _payload(self, params: Any, batch: Any, share: Any, key: Any, *, padded: bool) -> Any:
        return self._worker.payload(params, batch, share, key, padded=padded)

    def _encoded(self, grads: list[Any], worker: Any) -> Any:
        load = self.code.load
        tree = grads[0] if load == 1 else jax.tree.map(lambda *x: jnp.stack(x), *grads)
        return encode_unchecked(tree, self.code, worker, self.training.wire_dtype)

    def _recovered(self, stacked: Any, weights: Any) -> Any:
        return decode(stacked, self.code, weights, like=self._like, combined=False)

    def _decoded(self, params: Any, stacked: Any, weights: Any) -> Any:
        return self._finished(params, self._recovered(stacked, weights))

    def _finished(self, params: Any, recovered: Any) -> Any:
        return to_dense(combine(recovered, self._like), params)

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        def apply(state: State, grads: Any) -> tuple[State, Any]:
            # Some of Optax's rules raise an integer to a float, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                optimizer = self.training.optimizer
                updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
                params = optax.apply_updates(state.params, updates)
            new = State(params, opt_state)
            # What passes unchanged must not share memory with the old state, which is written over.
            kept = {id(x) for x in jax.tree.leaves(state)}
            new = jax.tree.map(lambda x: x.copy() if id(x) in kept else x, new)
            return new, _finite(params)

        return _writing_over(apply)


def _writing_over(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function(*args)`` into one of ``(old, *args)`` whose result takes old's memory."""

    def replacing(old: Any, *args: Any) -> Any:
        del old
        return function(*args)

    compiled = jax.jit(replacing, donate_argnums=0, keep_unused=True)

    def run(old: Any, *args: Any) -> Any:
        with warnings.catch_warnings():  # arrays that pass unchanged leave their place unused
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return compiled(old, *args)

    return run


def _room_for(tree: Any) -> Any:
    """Arrays of the same shapes, with nothing in particular in them."""

    def like(leaf: Any) -> Any:
        if is_key(leaf):
            zeros = jnp.zeros_like(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(leaf))
        return jnp.zeros_like(leaf)

    return jax.tree.map(like, tree)


def num_rows(batch: Any, block: int, step: int) -> int:
    """The common length of a batch's arrays.

    Raises:
        ValueError: there is none, or it is 0.
    """
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            f"`data({block}, {step})` needs to return arrays with one common leading axis of at "
            f"least one example; got shapes {jax.tree.map(np.shape, batch)}: put what is not per "
            "example into the loss, or the parameters"
        )
    return int(lengths.pop()[0])


def is_key(leaf: Any) -> bool:
    """Tell a typed PRNG key from an array."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _finite(tree: Any) -> Any:
    flags = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if _is_float(x)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), bool)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
