"""Encoding and decoding: two linear maps on payloads, under vmap, shard_map and pmap alike.

`encode` is what one worker does before it sends; `decode` what everybody does with what arrived.
Messages are stacked on a leading axis: all n of them on one device, or one device's own, with the
rest behind a named axis. Which workers arrived is in the decoding weights, an array like any other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcode.codes import Code
from jaxcode.jaxprs import varying_axes
from jaxcode.lowrank import IndexedRows, LowRank, is_structured
from jaxcode.payload import fragment, is_coded, join
from jaxcode.precision import widen

_CHUNK = 16  # terms of a sum that are written out


def encode(gradient: Any, code: Code, worker: Any, *, wire_dtype: Any = None) -> Any:
    """Code one worker's payload: ``message_i = sum_{p,j} B[i,p,j] fragment_j(g_p)``.

    Args:
        gradient: the payload of the worker's partition; with a load d > 1, leaves have a leading
            axis of d partitions. Leaves may be `LowRank` or `IndexedRows` if the load is 1.
        code: the code.
        worker: the worker's index i, a number or an array: ``jax.lax.axis_index`` under a map.
        wire_dtype: dtype of the message; default is each leaf's own. A narrow one suits block codes
            only: others amplify its rounding.

    Returns:
        The coded payload, each floating-point array 1/m as long; integers travel whole.

    Raises:
        ValueError: the gradient was already summed over the workers: inside `jax.shard_map`, the
            gradient of parameters that are the same on every worker is their sum.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(4, 1, num_fragments=2)
        >>> encode({"w": jnp.ones((3, 2))}, code, worker=0)["w"].shape
        (3,)
    """
    _check_not_summed(gradient, worker)
    return encode_unchecked(gradient, code, worker, wire_dtype)


def encode_unchecked(gradient: Any, code: Code, worker: Any, wire_dtype: Any) -> Any:
    """`encode` for a gradient that is known to be the worker's own, constants included."""
    table = jnp.asarray(code.coefficients, jnp.result_type(float))
    coefficients = table[worker] if code.load > 1 else table[worker, 0]

    with jax.named_scope("encode"):
        partial = jax.tree.map(lambda x: _combine(x, coefficients, code), gradient)
        return jax.tree.map(
            lambda x, like: x.astype(wire_dtype or like.dtype) if is_coded(x) else x,
            partial,
            gradient,
        )


def _combine(array: Array, coefficients: Array, code: Code) -> Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"`encode` needs real floating-point numbers, got {array.dtype}: keep the real and "
            "the imaginary part of a parameter as two leaves"
        )
    if not is_coded(array):
        return array
    if code.load == 1:
        fragments = widen(fragment(array, code.num_fragments))
    else:
        fragments = widen(jax.vmap(lambda x: fragment(x, code.num_fragments))(array))
    return jnp.tensordot(
        coefficients.astype(fragments.dtype),
        fragments,
        axes=coefficients.ndim,
        precision=jax.lax.Precision.HIGHEST,
    )


def _check_not_summed(gradient: Any, worker: Any) -> None:
    axes = varying_axes(worker) if isinstance(worker, jax.Array) else frozenset()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        missing = axes - varying_axes(leaf)
        if missing:
            names = ", ".join(map(repr, sorted(map(str, missing))))
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"`encode` needs each worker's own gradient; got {where or 'an array'} "
                f"that is the same over the mesh axis {names}, so it is already summed over the "
                "workers: cast the parameters with `jax.lax.pcast(params, axis, to='varying')` "
                "before differentiating"
            )


class Decoder:
    """Weighted sums of stacked messages, over the devices' workers and a named axis."""

    def __init__(self, code: Code, weights: Any, workers: Any, axis_name: Any):
        """Prepare for ``weights`` (m, n) and the ``workers`` whose messages are on this device."""
        self._code = code
        self._axis = axis_name
        self._spread = axis_name is not None
        self._workers = workers
        self.weights = widen(jnp.asarray(weights))
        if code.block is not None:
            self.scale, self.recovered = self._blocks()

    def _blocks(self) -> tuple[Array, Array]:
        """Per block, by what the weights multiply its payload, and whether they recover it.

        ``D B`` restricted to a block is ``c I`` if its payload comes back c times: c is 1 or, for
        the mean over recovered examples, more. Fewer answers than fragments give no multiple of I.
        """
        code = self._code
        m = code.num_fragments
        per_worker = jnp.einsum(
            "jn,nl->njl",
            self.weights,
            jnp.asarray(code.coefficients[:, 0], self.weights.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
        products = jax.ops.segment_sum(per_worker, jnp.asarray(code.block), code.num_partitions)
        scale = jnp.trace(products, axis1=1, axis2=2) / m
        off = products - scale[:, None, None] * jnp.eye(m, dtype=products.dtype)[None]
        # A missing answer costs a whole dimension, so the distance is then of the order of c.
        # (Weights that are not numbers are neither, and show in the result.)
        recovered = ~(jnp.sum(off**2, axis=(1, 2)) >= 0.01 * scale**2)
        return scale, recovered

    def total(self, message: Array, shape: tuple[int, ...], *, drop: bool = False) -> Array:
        """Decode a sum: ``fragment_j(sum_p g_p) = sum_i D[j,i] message_i``.

        Args:
            message: (workers here, ...) coded arrays.
            shape: of the decoded array.
            drop: leave out the blocks that are not recovered, as factors must.
        """
        weights = self.weights
        if drop:
            weights = jnp.where(self.recovered[self._code.block][None], weights, 0)
        weights = weights[:, self._workers]
        terms = _sum_terms(lambda i: _term(weights[:, i], message[i]), len(message))
        return join(self._reduce(terms), shape)

    def blocks(self, message: Array, shape: tuple[int, ...], *, scaled: bool) -> Array:
        """Decode each block's payload by itself: (k, *shape), zeros where it is not recovered."""
        undo = jnp.ones_like(self.scale) if scaled else jnp.where(self.recovered, self.scale, 1)
        factor = jnp.where(self.recovered, 1 / undo, 0)[self._code.block][None]
        weights = jnp.where(factor != 0, self.weights * factor, 0)
        return jax.vmap(lambda part: join(part, shape))(self._per_block(message, weights))

    def first(self, integers: Array) -> Array:
        """Each block's integers, from its first worker that counts: (k, ...)."""
        n, k, block = self._code.num_workers, self._code.num_partitions, self._code.block
        counts = jnp.any(self.weights != 0, axis=0)
        first = jax.ops.segment_min(jnp.where(counts, jnp.arange(n), n), jnp.asarray(block), k)
        chosen = (first[block] == jnp.arange(n)).astype(integers.dtype)
        return jnp.squeeze(self._per_block(integers, chosen[None]), axis=1)

    def _per_block(self, message: Array, weights: Array) -> Array:
        """Weighted sums over each block's workers: (k, m, ...), from weights (m, n)."""
        code = self._code
        if not self._spread:
            members = _members(code)
            weights = jnp.pad(weights, ((0, 0), (0, 1)))  # a missing member counts for nothing
            rows = np.minimum(members, code.num_workers - 1)

            def term(j: Any) -> Array:
                return jax.vmap(_term)(weights.T[_column(members, j)], message[_column(rows, j)])

            return _sum_terms(term, members.shape[1])
        own = (
            jnp.asarray(code.block)[None, self._workers] == jnp.arange(code.num_partitions)[:, None]
        )
        weights = jnp.where(own[:, None], weights[None, :, self._workers], 0)
        terms = _sum_terms(lambda i: _term(weights[..., i], message[i]), len(message))
        return self._reduce(terms)

    def _reduce(self, partial: Array) -> Array:
        return jax.lax.psum(partial, self._axis) if self._spread else partial


def _term(weights: Array, message: Array) -> Array:
    """One worker's ``weights x message``, (*weights.shape, *message.shape); 0 for a straggler."""
    message = widen(message) if is_coded(message) else message
    columns = weights.astype(message.dtype).reshape(*weights.shape, *[1] * message.ndim)
    row = message.reshape(*[1] * weights.ndim, *message.shape)
    # A straggler's buffer may hold anything, and 0 times NaN is NaN.
    return jnp.where(columns != 0, columns * row, 0)


def _sum_terms(term: Callable[[Any], Array], count: int) -> Array:
    """``term(0) + ... + term(count - 1)``, in one pass over what the terms read.

    Written out, because a sum over a leading axis is not: on a CPU, XLA adds element by element
    across the rows, at a twentieth of the speed of the memory. Chunks bound the program's size.
    """
    head = (count - 1) % _CHUNK + 1
    total = term(0)
    for i in range(1, head):
        total = total + term(i)

    def chunk(j: Any, total: Array) -> Array:
        for i in range(_CHUNK):
            total = total + term(head + j * _CHUNK + i)
        return total

    chunks = (count - head) // _CHUNK
    return jax.lax.fori_loop(0, chunks, chunk, total) if chunks else total


def _column(table: np.ndarray, j: Any) -> Any:
    return table[:, j] if isinstance(j, int) else jnp.asarray(table)[:, j]


def _members(code: Code) -> np.ndarray:
    """The workers of each block, (k, largest group); n where a group is smaller."""
    n, k, block = code.num_workers, code.num_partitions, code.partitions[:, 0]
    order = np.argsort(block, kind="stable")
    sizes = np.bincount(block, minlength=k)
    table = np.full((k, sizes.max()), n)
    table[np.arange(sizes.max()) < sizes[:, None]] = order
    return table


def decode(
    messages: Any,
    code: Code,
    weights: Any,
    *,
    like: Any,
    axis_name: Any = None,
    workers: Any = None,
) -> Any:
    """Decode the sum of all partitions' payloads from stacked messages.

    Args:
        messages: coded payload (see `encode`), leaves with a leading axis: all n workers, or under
            a named axis the workers of this device.
        code: the code.
        weights: D (m, n), from ``code.decoding_weights(survivors)``. A message whose weights are 0
            is not touched, whatever it holds.
        like: the payload before encoding, or its shapes, with parameters' shapes for structured
            leaves; the result has its shapes and dtypes.
        axis_name: the mapped axis (or axes) the workers are spread over, if any.
        workers: indices of the workers on this device, needed with ``axis_name``.

    Returns:
        A pytree of dense arrays like ``like``.

    Raises:
        ValueError: the weights are not (m, n), or the payload is in factors and the code has no
            blocks: factors do not add.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(4, 1)
        >>> messages = jax.vmap(lambda i: encode(jnp.ones(3), code, i))(jnp.arange(4))
        >>> weights = code.decoding_weights(jnp.array([True, False, True, True]))
        >>> decode(messages, code, weights, like=jnp.ones(3)).tolist()
        [2.0, 2.0, 2.0]
    """
    n, m = code.num_workers, code.num_fragments
    if jnp.shape(weights) != (m, n):
        raise ValueError(
            f"`decode` needs weights of shape (num_fragments, num_workers) = {(m, n)}, got "
            f"{jnp.shape(weights)}: pass `code.decoding_weights(survivors)` of one step"
        )
    here = n if workers is None else len(workers)
    if any(jnp.shape(x)[:1] != (here,) for x in jax.tree.leaves(messages)):
        raise ValueError(
            f"`decode` needs messages stacked on a leading axis of {here} workers, got shapes "
            f"{jax.tree.map(jnp.shape, messages)}: pass `coded.messages(params, batch)`, or its "
            "`.grads`, and not a gradient"
        )
    structured = any(map(is_structured, jax.tree.leaves(messages, is_leaf=is_structured)))
    if structured and code.block is None:
        raise ValueError(
            f"`decode` needs a block code for gradients in factors, got {code!r}: factors do not "
            "add; use `fractional_repetition`, or dense gradients"
        )
    workers = np.arange(n) if workers is None else workers
    with jax.named_scope("decode"):
        decoder = Decoder(code, weights, workers, axis_name)
        leaf = _leaf_decoder(decoder, drop=structured)
        return jax.tree.map(leaf, messages, like, is_leaf=is_structured)


def _leaf_decoder(decoder: Decoder, *, drop: bool) -> Callable[[Any, Any], Any]:
    def decoded(message: Any, like: Any) -> Any:
        if isinstance(message, LowRank):
            P_shape, Q_shape = message.factor_shapes
            P = decoder.blocks(message.P, P_shape, scaled=False)
            Q = decoder.blocks(message.Q, Q_shape, scaled=True)
            return message.sum_of_products(P, Q)
        if isinstance(message, IndexedRows):
            indices = decoder.first(message.indices)
            shape = (indices.shape[1], *message.shape[1:])
            rows = decoder.blocks(message.rows, shape, scaled=True)
            rows = rows.reshape(-1, *message.shape[1:])
            return IndexedRows(indices.reshape(-1), rows, message.shape, message.dtype).to_dense()
        return decoder.total(message, tuple(like.shape), drop=drop).astype(like.dtype)

    return decoded
