"""The gradient of a step from whichever workers answer: `coded_value_and_grad`.

Each worker computes the payload of its partitions (the loss, the gradient, metrics), encodes it and
sends it; the survivors' messages are decoded to the mean over the whole batch. One per-worker
program serves three executors: all workers on one device, workers spread over a mesh, and the
workers of a map that the caller owns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcode.codes import Code
from jaxcode.coding import decode
from jaxcode.factors import LeafSummary, Summary
from jaxcode.jaxprs import varying_axes
from jaxcode.leaves import Static, eval_shape, shapes_where, split_arrays
from jaxcode.lowrank import NormalForm, is_structured, to_dense
from jaxcode.partitions import Partitions, assign, digest
from jaxcode.payload import is_coded, num_bytes
from jaxcode.worker import Method, Payload, Worker


class MessageSummary(NamedTuple):
    """What one worker sends in one step; ``str()`` makes a table of it.

    Attributes:
        rows: per leaf of the parameters its path, shape, kind, numbers in the message, reason.
        numbers: numbers in the whole message, with the loss value and auxiliary outputs.
        message_bytes: bytes of it.
        dense_bytes: bytes of an uncoded dense gradient, loss value and auxiliary outputs included.
        reduced_bytes: bytes of the all-reduce that stands for the messages on one mesh: float32,
            with a place for every block's factors.
    """

    rows: tuple[LeafSummary, ...]
    numbers: int
    message_bytes: int
    dense_bytes: int
    reduced_bytes: int

    def __str__(self) -> str:
        """One line a leaf, and the total."""
        table = str(Summary(self.rows)).rsplit("\n", 1)[0]
        share = self.message_bytes / self.dense_bytes
        return (
            f"{table}\n{self.message_bytes:,} bytes a message, {share:.3f} of dense "
            f"(on one mesh, an all-reduce of {self.reduced_bytes:,})"
        )


@dataclass(frozen=True, eq=False)
class CodedGradient:
    """Computes a loss and its gradient through a code; see `coded_value_and_grad`."""

    worker: Worker
    mesh: Mesh | None
    axis_name: Any

    def __call__(self, params: Any, batch: Any, weights: Any, *, key: Any = None) -> Any:
        """Return ``(value, grads)``, or ``((value, aux), grads)`` with ``has_aux``.

        Args:
            params: the parameters.
            batch: the global batch, leaves (N, ...), or what `assign` made of it. With an
                ``axis_name`` and no mesh, one worker's part of what `assign` made.
            weights: D (m, n) from ``code.decoding_weights(survivors)``.
            key: a PRNG key for the step. If given, the loss is called as ``loss(params, examples,
                key)`` with the key folded with the partition's index.
        """
        if weights is None:
            raise ValueError(
                "`coded_value_and_grad` needs decoding weights, got None: pass "
                "`code.decoding_weights(survivors)`"
            )
        weights = jnp.asarray(weights, jnp.result_type(float))
        arrays, static = split_arrays((params, batch, weights, key))
        return self._compiled(static, arrays)

    def messages(self, params: Any, batch: Any, *, key: Any = None) -> Payload:
        """All workers' messages ``(value, aux, grads)``, stacked on a leading axis of n workers.

        They are computed on one device, whatever the mesh. ``grads`` is what `decode_gradients`
        takes in an Optax chain.
        """
        arrays, static = split_arrays((params, batch, key))
        return self._compiled_messages(static, arrays)

    def summary(self, params: Any, batch: Any, *, key: Any = None) -> MessageSummary:
        """What one worker sends, from shapes alone: per leaf, and in bytes."""
        return _summarise(self.worker, params, batch, key)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        def run(static: Static, arrays: list[Any]) -> Any:
            params, batch, weights, key = static.merge(arrays)
            if self.mesh is not None:
                return self._on_mesh(params, batch, weights, key)
            if self.axis_name is not None and isinstance(batch, Partitions):
                return self._in_map(params, batch, weights, key)
            workers = np.arange(self.worker.code.num_workers)
            return self._decoded(params, self._parts(batch), weights, key, workers, None)

        return jax.jit(run, static_argnums=0)

    @cached_property
    def _compiled_messages(self) -> Callable[..., Any]:
        def run(static: Static, arrays: list[Any]) -> Payload:
            params, batch, key = static.merge(arrays)
            workers = np.arange(self.worker.code.num_workers)
            return self._messages(params, self._parts(batch), key, workers)[0]

        return jax.jit(run, static_argnums=0)

    def _parts(self, batch: Any) -> Partitions:
        return _parts(batch, self.worker.code)

    def _messages(
        self, params: Any, parts: Partitions, key: Any, workers: Any
    ) -> tuple[Payload, Payload]:
        """Messages of the workers here, stacked, and the shapes of one partition's payload."""
        seen: list[Payload] = []

        def one(part: Partitions, worker: Any) -> Payload:
            message, shapes = self.worker.message(params, part, worker, key)
            seen.append(shapes)
            return message

        if len(workers) == 1:  # no batching of the loss where there is nothing to batch
            message = one(jax.tree.map(lambda x: x[0], parts), workers[0])
            return jax.tree.map(lambda x: x[None], message), seen[0]
        return jax.vmap(one)(parts, jnp.asarray(workers)), seen[0]

    def _decoded(
        self, params: Any, parts: Partitions, weights: Any, key: Any, workers: Any, axis: Any
    ) -> Any:
        messages, shapes = self._messages(params, parts, key, workers)
        like = shapes._replace(grads=shapes_where(shapes.grads, params))
        result = decode(
            messages, self.worker.code, weights, like=like, axis_name=axis, workers=workers
        )
        grads = to_dense(result.grads, params)
        return ((result.value, result.aux) if self.worker.has_aux else result.value), grads

    def _on_mesh(self, params: Any, batch: Any, weights: Any, key: Any) -> Any:
        mesh, axis = self.mesh, self.axis_name
        assert mesh is not None
        here = self.worker.code.num_workers // mesh.shape[axis]
        shared, static = split_arrays((params, weights, key))
        if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Explicit:
            shared = [_replicated(x, mesh, axis) for x in shared]
            if not isinstance(batch, Partitions):
                batch = jax.sharding.reshard(batch, NamedSharding(mesh, PartitionSpec()))
            by_worker = NamedSharding(mesh, PartitionSpec(axis))
            parts = jax.sharding.reshard(self._parts(batch), by_worker)
        else:
            parts = self._parts(batch)

        def body(shared: list[Any], parts: Partitions) -> Any:
            params, weights, key = static.merge(shared)
            workers = jax.lax.axis_index(axis) * here + jnp.arange(here)
            # Differentiating what is the same on every device would sum over the devices.
            return self._decoded(_varying(params, axis), parts, weights, key, workers, axis)

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axis)),
            out_specs=PartitionSpec(),
            axis_names={axis},
        )(shared, parts)

    def _in_map(self, params: Any, part: Partitions, weights: Any, key: Any) -> Any:
        axis = self.axis_name
        try:
            worker = jax.lax.axis_index(axis)
        except NameError as error:
            raise ValueError(
                "`coded_value_and_grad` with an `axis_name` and no mesh needs to be called inside "
                f"your own map over that axis, one worker's part each; {axis!r} is not mapped "
                "here: pass `mesh=`, or the whole batch"
            ) from error
        n, size = self.worker.code.num_workers, jax.lax.axis_size(axis)
        if size != n:
            raise ValueError(
                f"`coded_value_and_grad` inside your own map needs one worker a place, {n} along "
                f"{axis!r}; got {size}: map over an axis of {n}, or pass `mesh=`, which puts "
                "several workers on a device"
            )
        part = _parts(part, self.worker.code)
        if varying_axes(worker):
            params = _varying(params, axis)
        parts = jax.tree.map(lambda x: x[None], part)
        return self._decoded(params, parts, weights, key, worker[None], axis)


def _parts(batch: Any, code: Code) -> Partitions:
    if not isinstance(batch, Partitions):
        return assign(batch, code)
    if batch.held != digest(code):
        raise ValueError(
            f"`coded_value_and_grad` needs partitions assigned for its own code, {code!r}; got "
            "another's: call `assign(batch, code)` with this code"
        )
    return batch


def _varying(params: Any, axis: Any) -> Any:
    """Mark parameters as each device's own, so that their gradients are."""

    def cast(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or axis in varying_axes(leaf):
            return leaf
        return jax.lax.pcast(leaf, axis, to="varying")

    return jax.tree.map(cast, params)


def _replicated(array: Any, mesh: Mesh, axis: Any) -> Any:
    """Undo a sharding over the workers' axis, and leave those over others alone."""
    spec = jax.typeof(array).sharding.spec
    used = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if axis not in used:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


def _summarise(worker: Worker, params: Any, batch: Any, key: Any) -> MessageSummary:
    """Trace one worker's message and count what is in it."""
    code = worker.code
    parts = eval_shape(lambda batch: _parts(batch, code), batch)
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    seen: list[Payload] = []

    def send(params: Any, part: Partitions, key: Any) -> Payload:
        message, shapes = worker.message(params, part, 0, key)
        seen.append(shapes)
        return message

    message = eval_shape(send, params, part, key)
    counts: list[int] = []
    jax.tree.map(lambda _, leaf: counts.append(_numbers(leaf)), params, message.grads)
    rows = tuple(
        row._replace(numbers=count)
        for row, count in zip(worker.summary(params, parts, key), counts, strict=True)
    )
    payload = seen[0]
    dense = payload._replace(grads=shapes_where(payload.grads, params))
    leaves = jax.tree.leaves(payload, is_leaf=is_structured)
    reduced = sum(_reduced_numbers(leaf, code) for leaf in leaves)
    if any(isinstance(leaf, NormalForm) for leaf in leaves):
        reduced += 2 * code.num_workers  # a digest of pivots, and whether they agree
    numbers, dense_bytes = _numbers(message), num_bytes(dense)
    return MessageSummary(rows, numbers, num_bytes(message), dense_bytes, 4 * reduced)


def _reduced_numbers(leaf: Any, code: Code) -> int:
    """Numbers in the all-reduce of one leaf of a payload: its fragments, for every block."""
    m = code.num_fragments
    arrays = jax.tree.leaves(leaf)
    if isinstance(leaf, NormalForm):
        arrays.append(leaf.pivots)  # twice: to compare with, and with what is decoded
    sizes = [math.prod(x.shape) for x in arrays]
    padded = [
        -(-size // m) * m if is_coded(x) else size for x, size in zip(arrays, sizes, strict=True)
    ]
    return sum(padded) * (code.num_partitions if is_structured(leaf) else 1)


def _numbers(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def coded_value_and_grad(
    loss: Callable[..., Any],
    code: Code,
    *,
    method: Method = "dense",
    mesh: Mesh | None = None,
    axis_name: Any = None,
    has_aux: bool = False,
    trainable: Any = None,
    wire_dtype: Any = None,
    normal_form: bool = True,
) -> CodedGradient:
    """Make a function that returns a loss and its gradient, decoded from the workers that answered.

    With at most s stragglers the result is the mean over the whole batch, as ``jax.value_and_grad``
    gives it, whoever is missing; with more, it is what the weights make of the rest. Stragglers are
    in the weights, which are data: one compilation serves every pattern.

    Args:
        loss: ``loss(params, examples)``, or ``loss(params, examples, key)``, on one partition's
            examples. Returns their mean, or one value an example, (b,): then batches need not
            divide by the number of partitions. Losses that look across examples (batch norm) see
            one partition at a time.
        code: who computes what, and how it is coded.
        method: "dense" sends gradients as they are. "factors" sends a weight's gradient as
            ``x^T, delta`` where that is fewer numbers: try it when a partition has few rows
            (examples times positions) against the layers' widths. Needs a block code.
        mesh: spread the workers over this mesh; n must be a multiple of the axis's size. Axes of
            either type, and further axes, are fine. Default: all workers on one device.
        axis_name: the mesh's axis for the workers; may be left out if there is only one. Without a
            mesh, the axis of your own vmap, `jax.pmap` or `jax.shard_map`, inside which the result
            is called on one worker's part: ``jax.pmap(coded, axis_name, in_axes=(None, 0, None))(
            params, assign(batch, code), weights)``.
        has_aux: the loss returns ``(value, aux)``; floating-point outputs, averaged like the loss.
        trainable: which leaves get a gradient; see `factored_value_and_grad`. The others are not
            sent, and get zeros, so that Optax leaves them as they are.
        wire_dtype: dtype of the messages, for instance ``jnp.bfloat16``; default is each leaf's.
            float16 has a narrow range: gradients below 6e-8 vanish in it, and a loss above 65504
            overflows, as in any training without loss scaling.
        normal_form: with "factors", bring a leaf into normal form where that is more than 10 %
            shorter than factors and dense: for ranks from about a tenth of p + q up to nearly
            full. It costs a decomposition of ``x^T`` in every worker.

    Returns:
        A `CodedGradient`: ``coded(params, batch, weights, key=None) -> (value, grads)``. Gradients
        are dense and have the parameters' structure, shapes and dtypes. The value and auxiliary
        outputs are float32 (or wider). ``coded.summary(params, batch)`` tells what a message holds.

    Raises:
        ValueError: the method, mesh or axis does not fit; later, at trace time, the batch, the loss
            or the weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(num_workers=4, num_stragglers=1)
        >>> loss = lambda params, batch: jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
        >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.arange(4.0)}
        >>> coded = coded_value_and_grad(loss, code)
        >>> weights = code.decoding_weights([True, False, False, True])
        >>> value, grads = coded(jnp.zeros(3), batch, weights)
        >>> float(value), grads.tolist()
        (3.5, [-3.0, -3.0, -3.0])
    """
    if method not in ("dense", "factors"):
        raise ValueError(
            f'`coded_value_and_grad` needs method="dense" or method="factors", got {method!r}'
        )
    if method == "factors" and code.block is None:
        raise ValueError(
            f'`coded_value_and_grad` needs a block code for method="factors", got {code!r}: '
            'factors do not add; use `fractional_repetition`, or method="dense"'
        )
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise ValueError(
            "`coded_value_and_grad` needs a floating-point wire_dtype, got "
            f"{jnp.dtype(wire_dtype)}: use jnp.bfloat16, or None for each leaf's own"
        )
    if mesh is not None:
        axis_name = _worker_axis(mesh, axis_name, code)
    worker = Worker(loss, code, method, has_aux, trainable, wire_dtype, normal_form)
    return CodedGradient(worker, mesh, axis_name)


def _worker_axis(mesh: Mesh, axis_name: Any, code: Code) -> Any:
    if axis_name is None and len(mesh.axis_names) == 1:
        axis_name = mesh.axis_names[0]
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"`coded_value_and_grad` needs the mesh axis that the workers are on, one of "
            f"{mesh.axis_names}, got {axis_name!r}: pass `axis_name=`"
        )
    if code.num_workers % mesh.shape[axis_name]:
        raise ValueError(
            f"`coded_value_and_grad` needs a number of workers that is a multiple of the mesh "
            f"axis's size, got {code.num_workers} workers and {mesh.shape[axis_name]} devices "
            f"along {axis_name!r}: use a smaller mesh, or a code for more workers"
        )
    return axis_name
