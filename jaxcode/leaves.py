"""The arguments of a loss: which leaves get a gradient, which are traced, which are neither.

Real parameter trees hold more than floating-point arrays: step counters, flags, activation
functions, frozen weights. `Call` sorts them once, for the dense gradient and the factored one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of any kind, or stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf of the parameters can have a gradient: a floating or complex number."""
    if not is_array(leaf):
        return isinstance(leaf, float | complex)
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _trained(params: Any, trainable: Any) -> list[bool]:
    """Per leaf of ``params``: does it get a gradient?"""
    leaves = jax.tree.leaves(params)
    mask = trainable(params) if callable(trainable) else trainable
    if mask is None:
        chosen = [True] * len(leaves)
    else:
        try:
            whole = jax.tree.map(
                lambda keep, part: jax.tree.map(lambda _: keep, part), mask, params
            )
            chosen = jax.tree.leaves(whole)
        except ValueError as error:
            raise ValueError(
                "`trainable` needs a tree of bools that is a prefix of the parameters, or a "
                f"function that returns one; got {mask!r}: give a bool for each leaf or subtree "
                f"({error})"
            ) from error
    if not all(isinstance(keep, bool | np.bool_) for keep in chosen):
        raise ValueError(f"`trainable` needs bools for leaves; got {mask!r}: use True or False")
    return [
        bool(keep) and is_differentiable(leaf) for keep, leaf in zip(chosen, leaves, strict=True)
    ]


def as_pair(out: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Take a loss's result apart: its value, and auxiliary outputs or None."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            "`has_aux=True` needs a loss that returns a pair (value, aux); got "
            f"{type(out).__name__}: return the pair, or leave has_aux out"
        )
    return out if has_aux else (out, None)


def _scalar(out: Any, *, has_aux: bool) -> tuple[Any, Any]:
    value, aux = as_pair(out, has_aux=has_aux)
    if not jax.tree_util.all_leaves([value]) or jnp.shape(value) != ():
        raise ValueError(
            "`loss` needs to return a scalar; got shape "
            f"{jax.tree.map(jnp.shape, value)}: take the mean or the sum, and return what else "
            "there is as auxiliary outputs, with has_aux=True"
        )
    return value, aux


@dataclass(frozen=True)
class Call:
    """The arguments of a loss, flat: parameters first, each with its role.

    A role is "trained" (gets a gradient), "array" (traced) or "static" (a flag or a function, which
    stays the Python value it is).
    """

    leaves: list[Any]
    roles: list[str]
    params: Any
    rest: Any

    @classmethod
    def of(cls, params: Any, args: Any, kwargs: Any, trainable: Any) -> "Call":
        """Sort the leaves of ``loss(params, *args, **kwargs)``."""
        leaves, params_tree = jax.tree.flatten(params)
        rest, rest_tree = jax.tree.flatten((args, kwargs))
        flat = [*leaves, *rest]
        trained = [*_trained(params, trainable), *[False] * len(rest)]
        roles = [
            "trained" if train else "array" if is_array(leaf) else "static"
            for leaf, train in zip(flat, trained, strict=True)
        ]
        return cls(flat, roles, params_tree, rest_tree)

    @property
    def inputs(self) -> tuple[list[Any], list[Any]]:
        """The trained leaves and the other arrays."""
        trained, arrays = (
            [leaf for leaf, role in zip(self.leaves, self.roles, strict=True) if role == wanted]
            for wanted in ("trained", "array")
        )
        return trained, arrays

    def merge(self, trained: list[Any], arrays: list[Any]) -> tuple[Any, Any, Any]:
        """Put ``(params, args, kwargs)`` together again from `inputs`."""
        sources = {"trained": iter(trained), "array": iter(arrays)}
        flat = [
            leaf if role == "static" else next(sources[role])
            for leaf, role in zip(self.leaves, self.roles, strict=True)
        ]
        cut = self.params.num_leaves
        args, kwargs = jax.tree.unflatten(self.rest, flat[cut:])
        return jax.tree.unflatten(self.params, flat[:cut]), args, kwargs

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        """A function of `inputs` that returns ``((value, aux), grads of the trained leaves)``."""

        def scalar(trained: list[Any], arrays: list[Any]) -> tuple[Any, Any]:
            params, args, kwargs = self.merge(trained, arrays)
            return _scalar(loss(params, *args, **kwargs), has_aux=has_aux)

        return jax.value_and_grad(scalar, has_aux=True)

    def full(self, grads: list[Any]) -> Any:
        """Gradients of the trained leaves, in a tree like the parameters with None elsewhere."""
        found = iter(grads)
        roles = self.roles[: self.params.num_leaves]
        return jax.tree.unflatten(
            self.params, [next(found) if role == "trained" else None for role in roles]
        )


@dataclass(frozen=True)
class Static:
    """What is left of a tree when its arrays are taken out; hashable if the rest is."""

    tree: Any
    rest: tuple[Any, ...]

    def merge(self, arrays: list[Any]) -> Any:
        """Put the tree together again."""
        source = iter(arrays)
        return jax.tree.unflatten(
            self.tree, [next(source) if x is _ARRAY else x for x in self.rest]
        )


_ARRAY = object()


def split_arrays(tree: Any) -> tuple[list[Any], Static]:
    """Take the arrays and floats out of a tree: what jit can trace, apart from the rest.

    Flags and counts stay what they are, for the loss may branch on them.
    """
    leaves, treedef = jax.tree.flatten(tree)
    traced = [is_array(x) or isinstance(x, float | complex) for x in leaves]
    arrays = [x for x, t in zip(leaves, traced, strict=True) if t]
    rest = tuple(_ARRAY if t else x for x, t in zip(leaves, traced, strict=True))
    return arrays, Static(treedef, rest)


def eval_shape(function: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape` that lets leaves that are not arrays pass as they are."""
    arrays, static = split_arrays(args)
    return jax.eval_shape(lambda arrays: function(*static.merge(arrays)), arrays)


def shapes_where(grads: Any, params: Any) -> Any:
    """The parameters' shapes and dtypes, and None where ``grads`` has None."""

    def shape(param: Any, grad: Any) -> Any:
        if grad is None:
            return None
        return jax.ShapeDtypeStruct(jnp.shape(param), jnp.result_type(param))

    return jax.tree.map(shape, params, grads, is_leaf=lambda x: x is None)


def is_key(leaf: Any) -> bool:
    """Tell a typed PRNG key from an array."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
