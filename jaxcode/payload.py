"""What a message is made of: fragments of arrays, and one flat message for the wire.

A payload is any pytree of arrays: gradients dense or in factors, the loss value, metrics. Encoding
is linear in the floating-point arrays and treats each by itself. Integers (row indices) travel
whole: a linear combination of row numbers means nothing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8


def is_coded(array: Any) -> bool:
    """Whether an array of a payload takes part in the code: whether it is floating-point."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def fragment(array: Array, num_fragments: int) -> Array:
    """Cut an array in m fragments, the last one padded with zeros: (m, ...).

    One fragment is the array as it is, (1, *shape); several are flat, (m, ceil(size / m)).

    Example:
        >>> import jax.numpy as jnp
        >>> fragment(jnp.arange(5.0), 2).tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
    """
    if num_fragments == 1:
        return array[None]
    flat = jnp.pad(array.reshape(-1), (0, -array.size % num_fragments))
    return flat.reshape(num_fragments, -1)


def join(fragments: Array, shape: tuple[int, ...]) -> Array:
    """Put the fragments of an array of ``shape`` together again.

    Example:
        >>> import jax.numpy as jnp
        >>> join(fragment(jnp.arange(5.0), 2), (5,)).tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if fragments.shape == (1, *shape):  # leaves a sharding of the array alone
        return fragments[0]
    return fragments.reshape(-1)[: math.prod(shape)].reshape(shape)


def num_bytes(payload: Any) -> int:
    """Bytes of a payload, packed; works on shapes too."""
    leaves = jax.tree.leaves(payload)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def pack(payload: Any) -> UInt8[Array, " bytes"]:
    """Flatten a payload, or a coded one, to one message: its arrays' bytes, one after the other.

    Bytes keep every dtype as it is, where one vector of numbers would widen bfloat16 to the widest
    leaf or round row indices.

    Raises:
        ValueError: a leaf is not an array of plain numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> pack({"b": jnp.ones(2), "w": jnp.zeros((2, 3), jnp.bfloat16)}).shape
        (20,)
    """
    flat = [_to_bytes(x) for x in jax.tree.leaves(payload)]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, jnp.uint8)


def unpack(message: UInt8[Array, " bytes"], like: Any) -> Any:
    """Undo `pack`, given a payload of the same structure, or its shapes.

    Raises:
        ValueError: the message does not have the bytes of ``like``.

    Example:
        >>> import jax.numpy as jnp
        >>> payload = {"b": jnp.ones(2), "w": jnp.zeros((2, 3), jnp.bfloat16)}
        >>> unpack(pack(payload), payload)["w"].dtype
        dtype(bfloat16)
    """
    if message.shape != (num_bytes(like),) or message.dtype != jnp.uint8:
        raise ValueError(
            f"`unpack` needs a message of {num_bytes(like):,} bytes, got {message.dtype} of shape "
            f"{message.shape}: "
            "pass as `like` the payload that the message was packed from, or its shapes"
        )
    arrays, treedef = jax.tree.flatten(like)
    ends = np.cumsum([num_bytes(x) for x in arrays], dtype=int)
    parts = [
        _from_bytes(part, x.shape, jnp.dtype(x.dtype))
        for part, x in zip(jnp.split(message, ends[:-1]), arrays, strict=False)
    ]
    return jax.tree.unflatten(treedef, parts)


def _to_bytes(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    given = getattr(leaf, "dtype", array.dtype)
    plain = jnp.issubdtype(given, jnp.floating) or jnp.issubdtype(given, jnp.integer)
    if array.dtype != given or not plain or jnp.dtype(given).name.endswith("int4"):
        raise ValueError(
            f"`pack` needs arrays of real numbers in a dtype that JAX holds here, got {given}: "
            "convert the leaf (bool to uint8, a PRNG key by `jax.random.key_data`, a complex "
            "number to its two parts), or enable x64"
        )
    return jax.lax.bitcast_convert_type(array.reshape(-1), jnp.uint8).reshape(-1)


def _from_bytes(flat: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    shaped = flat.reshape(shape if dtype.itemsize == 1 else (*shape, dtype.itemsize))
    return jax.lax.bitcast_convert_type(shaped, dtype)
