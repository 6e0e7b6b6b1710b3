"""Arithmetic is in float32 inside, whatever comes in and goes out."""

import jax.numpy as jnp
from jaxtyping import Array


def widen(array: Array) -> Array:
    """Half precision becomes float32; float32 and float64 stay as they are.

    Example:
        >>> import jax.numpy as jnp
        >>> widen(jnp.ones(2, jnp.bfloat16)).dtype
        dtype('float32')
    """
    return array if jnp.finfo(array.dtype).bits >= 32 else array.astype(jnp.float32)
