"""The table of models and programs whose gradients are compared with those of `jax.grad`.

Adding a case is adding a line. ``kinds`` says how the gradient of each parameter is stored, by the
last component of its path that is listed: ``kernel="factors"`` speaks of every leaf called kernel.
Sizes are such that no activation has as many numbers as a factored weight, or as one an example.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

LINEN, NNX, EQUINOX, PLAIN = "Flax Linen", "Flax NNX", "Equinox", "plain JAX"
CORNER = "corner"  # not in the support table
TOLERANCE = 1e-5  # float32, relative to a leaf's norm
Problem = tuple[Callable[..., Any], Any, tuple[Any, ...]]  # loss, parameters, other arguments


class Case(NamedTuple):
    """What to differentiate, built when a test needs it.

    ``wide`` is the same problem in float32, for one that computes in half precision.
    """

    name: str
    group: str
    build: Callable[[], Problem]
    kinds: dict[str, str]
    has_aux: bool = False
    wide: Callable[[], Problem] | None = None


CASES: dict[str, Case] = {}


def every(keep):
    """Parametrize a test with the cases that ``keep`` chooses."""
    chosen = [case for case in CASES.values() if keep(case)]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: f"{case.group}: {case.name}")


def add(case):
    """Add a case to the table, once."""
    assert (case.group, case.name) not in CASES, case.name
    CASES[case.group, case.name] = case


def case(name, group=CORNER, *, has_aux=False, **kinds):
    """Add the decorated builder to the table."""

    def register(build):
        add(Case(name, group, build, kinds, has_aux))
        return build

    return register


def half(name, group, dtype, **kinds):
    """Add a builder that takes the dtype to compute in."""

    def register(build):
        add(Case(name, group, lambda: build(dtype), kinds, wide=lambda: build(jnp.float32)))
        return build

    return register


def normal(*shape, seed=0):
    """Seeded float32 numbers, others for each shape."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def perturbed(params):
    """Parameters with no zeros among them, as biases and LoRA's B have at first."""
    return jax.tree.map(lambda x: x + 0.1 * normal(*x.shape, seed=1).astype(x.dtype), params)


def score(outputs):
    """A scalar that depends nonlinearly on every number of a model's outputs."""

    def one(x):
        x = jnp.abs(x) if jnp.iscomplexobj(x) else x
        return jnp.sum(jnp.sin(x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)))

    return sum(map(one, jax.tree.leaves(outputs)))


def linen(name, module, *inputs, **kinds):
    """A Linen module, applied to its parameters."""

    @case(name, LINEN, **kinds)
    def _build():
        params = perturbed(module.init(jax.random.key(0), *inputs))
        return (lambda params, *x: score(module.apply(params, *x))), params, inputs


def network(name, make, *inputs, **kinds):
    """An NNX module, split into the state of its parameters and the rest."""

    @case(name, NNX, **kinds)
    def _build():
        graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        loss = lambda params, rest, *x: score(nnx.merge(graph, params, rest)(*x))  # noqa: E731
        return loss, perturbed(params), (rest, *inputs)


def equinox(name, make, *inputs, **kinds):
    """An Equinox module as it is, with functions among its leaves, mapped over examples."""

    @case(name, EQUINOX, **kinds)
    def _build():
        module = make(jax.random.key(0))
        return (lambda module, *x: score(jax.vmap(module)(*x))), module, inputs


def plain(name, shapes, model, *inputs, group=PLAIN, **kinds):
    """A function of a dict of parameters of the given shapes."""

    @case(name, group, **kinds)
    def _build():
        params = {key: jnp.asarray(normal(*shape)) for key, shape in shapes.items()}
        return (lambda params, *x: score(model(params, *x))), params, inputs


def kind(case, path):
    """The kind of a leaf, by the last component of its path that the case lists."""
    names = [
        str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", "")))) for part in path
    ]
    return next(case.kinds[name] for name in [*reversed(names), ""] if name in case.kinds)
