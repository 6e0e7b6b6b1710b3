"""One worker's copy of the training: its messages, and the update that all copies apply alike.

Nothing here knows of Ray. A replica computes the message of its partitions, and from the messages
of the survivors it makes the next state, which it takes over only when it is told to: so that all
replicas take the same step, or none does.
"""

import dataclasses
import functools
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcode.cluster import wire
from jaxcode.cluster.buffers import room_for, writing_over
from jaxcode.cluster.decoding import Begun, Decoding
from jaxcode.code import Code
from jaxcode.coding import encode_unchecked
from jaxcode.leaves import is_key, shapes_where
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
        self.decoding = Decoding(code, message, self._like)
        self.layout, self.recovered_layout = self.decoding.layout, self.decoding.recovered_layout

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
        return self.decoding.arrays(message)

    def begin(self, weights: np.ndarray, worker: int) -> Begun:
        """Begin to decode at this worker: what it need not fetch comes first."""
        block = self.code.block
        return self.decoding.begin(weights, 0 if block is None else int(block[worker]))

    def stage(
        self,
        token: tuple[int, int],
        messages: dict[int, Any],
        weights: np.ndarray,
        begun: Begun | None = None,
    ) -> tuple[float, float]:
        """Make the next state from survivors' numbers, to take over at `commit`.

        Args:
            token: names this state: the step and which attempt at it.
            messages: numbers by worker; those of others are not read.
            weights: D (m, n), divided by the number of examples in multiples of `rows`.
            begun: where these messages were decoded in part, with these weights.

        Returns:
            Seconds of decoding, as far as it was left to do, and of the optimizer.

        Raises:
            Rejected: the new parameters are not finite.
        """
        started = time.perf_counter()
        begun = self.decoding.begin(weights) if begun is None else begun
        return self._keep(token, started, begun.finish(messages))

    def stage_recovered(self, token: tuple[int, int], numbers: Any) -> tuple[float, float]:
        """As `stage`, from what `recover` made of the messages."""
        started = time.perf_counter()
        return self._keep(token, started, jax.block_until_ready(self.decoding.finish(numbers)))

    def recover(self, messages: dict[int, Any], weights: np.ndarray) -> bytes:
        """The decoded payload, in factors where it is: what a master sends back."""
        return self.decoding.recover(messages, weights)

    def _keep(
        self, token: tuple[int, int], started: float, gradient: list[list[Any]]
    ) -> tuple[float, float]:
        self._discard()
        decoded = time.perf_counter()
        spare, self._spare = self._spare, None
        state, finite = self._apply(
            room_for(self.state) if spare is None else spare, self.state, gradient
        )
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

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        def apply(state: State, gradient: list[list[Any]]) -> tuple[State, Any]:
            sums = [functools.reduce(jnp.add, terms) for terms in gradient]
            leaves = jax.tree.unflatten(jax.tree.structure(self._like), sums)
            grads = to_dense(leaves, state.params)
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

        return writing_over(apply)


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


def _finite(tree: Any) -> Any:
    """Whether all numbers are: 0 x is 0 if x is and else NaN, and XLA adds quicker than it asks."""
    tree = jax.lax.optimization_barrier(tree)  # else XLA makes the numbers anew, to look at them
    sums = [jnp.sum(x * 0) for x in jax.tree.leaves(tree) if _is_float(x)]
    return jnp.all(jnp.isfinite(jnp.stack(sums))) if sums else jnp.ones((), bool)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
