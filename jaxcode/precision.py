"""Arithmetic is in float32 inside, whatever comes in and goes out."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def widen(array: Array) -> Array:
    """Half precision becomes float32; float32 and float64 stay as they are.

    Example:
        >>> import jax.numpy as jnp
        >>> widen(jnp.ones(2, jnp.bfloat16)).dtype
        dtype('float32')
    """
    return array if jnp.finfo(array.dtype).bits >= 32 else array.astype(jnp.float32)


def alike(arrays: list[Array]) -> list[Array]:
    """Arrays in the narrowest dtype that holds all of theirs.

    Example:
        >>> import jax.numpy as jnp
        >>> [x.dtype for x in alike([jnp.ones(2), jnp.ones(3, jnp.bfloat16)])]
        [dtype('float32'), dtype('float32')]
    """
    # Unlike `jnp.promote_types`, NumPy's works where a user has made JAX's promotion strict.
    dtype = functools.reduce(np.promote_types, [x.dtype for x in arrays])
    return [x.astype(dtype) for x in arrays]
