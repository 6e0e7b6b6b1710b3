"""Memory that is used again: what a step makes is written over what the last one made."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcode.leaves import is_key


def writing_over(function: Callable[..., Any]) -> Callable[..., Any]:
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


def room_for(tree: Any) -> Any:
    """Arrays of the same shapes, with nothing in particular in them."""

    def like(leaf: Any) -> Any:
        if is_key(leaf):
            zeros = jnp.zeros_like(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(leaf))
        return jnp.zeros_like(leaf)

    return jax.tree.map(like, tree)
