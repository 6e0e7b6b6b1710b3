"""Encoding and decoding: two linear maps on payloads, under vmap, shard_map and pmap alike.

`encode` is what one worker does before it sends; `decode` what everybody does with what arrived.
Messages are stacked on a leading axis: all n of them on one device, or one device's own, with the
rest behind a named axis. Which workers arrived is in the decoding weights, an array like any other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcode.agreement import agreed_weights
from jaxcode.codes import Code
from jaxcode.decoder import Decoder
from jaxcode.jaxprs import varying_axes
from jaxcode.lowrank import IndexedRows, LowRank, NormalForm, is_structured
from jaxcode.payload import fragment, is_coded
from jaxcode.precision import widen


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


def decode(
    messages: Any,
    code: Code,
    weights: Any,
    *,
    like: Any,
    axis_name: Any = None,
    workers: Any = None,
    combined: bool = True,
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
        combined: False leaves what is structured in factors, stacked over the k blocks, for
            `combine`: that is far shorter where it has to be sent on.

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
        leaves = jax.tree.leaves(messages, is_leaf=is_structured)
        if forms := [leaf for leaf in leaves if isinstance(leaf, NormalForm)]:
            decoder = Decoder(code, agreed_weights(decoder, forms), workers, axis_name)
        recovered = jax.tree.map(
            _recover(decoder, drop=structured), messages, like, is_leaf=is_structured
        )
        return combine(recovered, like) if combined else recovered


def combine(recovered: Any, like: Any) -> Any:
    """The dense sum of what `decode` recovered with ``combined=False``, in the shapes of ``like``.

    Example:
        >>> import jax.numpy as jnp
        >>> one = LowRank(jnp.ones((3, 1)), jnp.ones((4, 1)))
        >>> both = replace(one, P=jnp.stack([one.P, one.P]), Q=jnp.stack([one.Q, one.Q]))
        >>> float(combine(both, jnp.zeros((3, 4)))[0, 0])
        2.0
    """

    def dense(leaf: Any, like: Any) -> Any:
        if isinstance(leaf, NormalForm):
            leaf = leaf.factors()
        if isinstance(leaf, LowRank):
            return leaf.sum_of_products(leaf.P, leaf.Q)
        return leaf.to_dense() if isinstance(leaf, IndexedRows) else leaf.astype(like.dtype)

    return jax.tree.map(dense, recovered, like, is_leaf=is_structured)


def _recover(decoder: Decoder, *, drop: bool) -> Callable[[Any, Any], Any]:
    def recovered(message: Any, like: Any) -> Any:
        if isinstance(message, LowRank):
            P_shape, Q_shape = message.factor_shapes
            P = decoder.blocks(message.P, P_shape, scaled=False)
            Q = decoder.blocks(message.Q, Q_shape, scaled=True)
            return replace(message, P=P, Q=Q)
        if isinstance(message, NormalForm):
            X_shape, rows_shape = message.part_shapes
            X = decoder.blocks(message.X, X_shape, scaled=False)
            rows = decoder.blocks(message.rows, rows_shape, scaled=True)
            return NormalForm(decoder.first(message.pivots), X, rows, message.place)
        if isinstance(message, IndexedRows):
            indices = decoder.first(message.indices)
            shape = (indices.shape[1], *message.shape[1:])
            rows = decoder.blocks(message.rows, shape, scaled=True)
            rows = rows.reshape(-1, *message.shape[1:])
            return IndexedRows(indices.reshape(-1), rows, message.shape, message.dtype)
        return decoder.total(message, tuple(like.shape), drop=drop)

    return recovered
