"""What else a tree of parameters can hold: other leaves than arrays, other dtypes, nothing."""

import jax.numpy as jnp
import numpy as np
from case_table import CORNER, PLAIN, case, half, normal, score
from jax import lax

X, IDS = normal(5, 31), np.array([[3, 0, 3], [18, 7, 8]])
FACTORS, DENSE, ROWS = {"w": "factors"}, {"w": "dense"}, {"w": "rows"}


def corner(name, params, model, *inputs, group=CORNER, **kinds):
    case(name, group, **kinds)(lambda: (lambda p, *x: score(model(p, *x)), params, inputs))


MIXED = {
    "w": normal(31, 23),
    "steps": np.int32(3),
    "flag": np.array([True]),
    "none": None,
    "count": 7,
}
corner(
    "integer, bool and None leaves",
    MIXED,
    lambda p, x: x @ p["w"] * p["count"] * jnp.where(p["steps"] > 2, 1.0, 0.0),
    X,
    **FACTORS,
    steps="none",
    flag="none",
    count="none",
)
corner(
    "Python numbers",
    {"w": normal(31, 23), "scale": 0.5, "power": 2},
    lambda p, x: (x @ p["w"] * p["scale"]) ** p["power"],
    X,
    **FACTORS,
    scale="dense",
    power="none",
)
corner(
    "unused leaves",
    {"w": normal(31, 23), "v": normal(31, 23)},
    lambda p, x: x @ p["w"],
    X,
    w="factors",
    v="none",
)
corner("no leaf used", {"w": normal(31, 23)}, lambda p, x: x, X, w="none")
corner("no leaves", {}, lambda p, x: x, X)
corner("a bare array", jnp.asarray(normal(31, 23)), lambda p, x: x @ p, X, **{"": "factors"})
corner(
    "lists and tuples",
    [(normal(31, 23), normal(23))],
    lambda p, x: x @ p[0][0] + p[0][1][None],
    X,
    **{"0": "factors", "1": "dense"},
)
corner(
    "one array in two places",
    dict.fromkeys("ab", X.T @ X),
    lambda p, x: x @ p["a"] @ p["b"],
    X,
    a="factors",
    b="factors",
)
corner(
    "a weight without rows",
    {"w": np.zeros((0, 5), np.float32)},
    lambda p, x: x @ p["w"],
    np.zeros((3, 0), np.float32),
    **DENSE,
)
corner(
    "a weight without rows, reshaped",
    {"w": np.zeros((0, 5), np.float32)},
    lambda p, x: x @ p["w"].reshape(0, 7),
    np.zeros((3, 0), np.float32),
    **DENSE,
)
corner("a batch without examples", {"w": normal(31, 23)}, lambda p, x: x @ p["w"], X[:0], **FACTORS)
corner(
    "a closure over arrays",
    {"w": normal(31, 23)},
    lambda p: (X * jnp.asarray(X)) @ p["w"],
    **FACTORS,
)
corner(
    "complex",
    {"w": normal(31, 23) + 1j * normal(31, 23, seed=1)},
    lambda p, x: x @ p["w"],
    X + 2j * X,
    **FACTORS,
)
corner(
    "complex activations, real weight",
    {"w": normal(31, 23)},
    lambda p, x: x @ p["w"].astype(jnp.complex64),
    X + 2j * X,
    **DENSE,
)

for dtype in (jnp.bfloat16, jnp.float16):

    @half(f"{dtype.__name__} parameters", PLAIN, dtype, w="factors", u="factors", b="dense")
    def _parameters(dtype):
        params = {"w": normal(29, 17), "u": normal(17, 17), "b": normal(17)}
        params = {name: jnp.asarray(x, dtype) for name, x in params.items()}
        xs = jnp.asarray(normal(3, 2, 29), dtype)

        def loss(p, xs):
            step = lambda h, x: (jnp.tanh(h @ p["u"] + x @ p["w"] + p["b"][None]), None)  # noqa: E731
            return score(lax.scan(step, jnp.zeros((2, 17), dtype), xs)[0])

        return loss, params, (xs,)


@half("one weight in two precisions", PLAIN, jnp.bfloat16, **FACTORS)
def _two_precisions(dtype):
    loss = lambda p, x: score((x @ p["w"], x.astype(dtype) @ p["w"].astype(dtype)))  # noqa: E731
    return loss, {"w": jnp.asarray(normal(31, 23))}, (X,)


@half("one table in two precisions", PLAIN, jnp.bfloat16, **ROWS)
def _two_lookups(dtype):
    loss = lambda p, i: score((p["w"][i], jnp.sin(p["w"].astype(dtype)[i])))  # noqa: E731
    return loss, {"w": jnp.asarray(normal(50, 6))}, (IDS,)


@half("bfloat16 inputs, float32 weight and product", PLAIN, jnp.bfloat16, **FACTORS)
def _mixed(dtype):
    def loss(p, x):
        numbers = (((1,), (0,)), ((), ()))
        return score(
            lax.dot_general(x.astype(dtype), p["w"], numbers, preferred_element_type=jnp.float32)
        )

    return loss, {"w": jnp.asarray(normal(31, 23))}, (X,)


@case("auxiliary outputs of any structure", has_aux=True, **FACTORS)
def _aux():
    def loss(p, x):
        out = x @ p["w"]
        return score(out), {"logits": out, "sums": (jnp.sum(out, 0), x.shape[0]), "none": None}

    return loss, {"w": normal(31, 23)}, (X,)


@case("gradients that are constants", s="dense", w="dense", v="dense")
def _constants():
    loss = lambda p: p["s"] + jnp.sum(p["w"]) + jnp.vdot(p["v"], X)  # noqa: E731
    return loss, {"s": jnp.ones(()), "w": normal(31, 23), "v": normal(5, 31)}, ()
