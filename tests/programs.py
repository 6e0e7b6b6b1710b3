"""Plain JAX functions: how a weight can be used, and what else a tree of parameters can hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from case_table import CORNER, normal, plain
from jax import lax

X = normal(5, 31)
PAIR = (normal(4, 31), normal(3, 31))
W, SQUARE, STACK = {"w": (31, 23)}, {"w": (31, 31)}, {"w": (3, 31, 31)}
FACTORS, DENSE = {"w": "factors"}, {"w": "dense"}

# How the axes of a weight are arranged.
plain("x @ W", W, lambda p, x: x @ p["w"], X, **FACTORS)
plain("x @ W.T", {"w": (23, 31)}, lambda p, x: x @ p["w"].T, X, **FACTORS)
plain(
    "einsum, the contracted axis in the middle",
    {"w": (5, 31, 4)},
    lambda p, x: jnp.einsum("btd,hdk->bthk", x, p["w"]),
    normal(2, 3, 31),
    **FACTORS,
)
plain(
    "einsum, two contracted axes apart",
    {"w": (5, 23, 6)},
    lambda p, x: jnp.einsum("bik,idk->bd", x, p["w"]),
    normal(4, 5, 6),
    **FACTORS,
)
plain(
    "expert stack",
    {"w": (3, 31, 23)},
    lambda p, x: jnp.einsum("ebd,edf->ebf", x, p["w"]),
    normal(3, 4, 31),
    **FACTORS,
)
plain(
    "a weight an example",
    {"w": (3, 11, 7)},
    lambda p, x: jnp.einsum("bd,bdf->bf", x, p["w"]),
    normal(3, 11),
    **FACTORS,
)
plain(
    "W reshaped before use",
    {"w": (31, 4, 6)},
    lambda p, x: x @ p["w"].reshape(31, 24),
    X,
    **FACTORS,
)
plain(
    "W reshaped across its two sides",
    {"w": (62, 12)},
    lambda p, x: x @ p["w"].reshape(31, 24),
    X,
    **DENSE,
)
plain(
    "W with a new axis, broadcast",
    W,
    lambda p, x: x @ jnp.broadcast_to(p["w"][None], (2, 31, 23)),
    normal(2, 3, 31),
    **FACTORS,
)
plain("vectors", W, lambda p, x: x @ p["w"], normal(31), **FACTORS)
plain(
    "vmap over examples", W, lambda p, x: jax.vmap(lambda x: jnp.tanh(x @ p["w"]))(x), X, **FACTORS
)
plain(
    "vmap over a mapped weight",
    {"w": (3, 31, 23)},
    lambda p, x: jax.vmap(jnp.matmul)(x, p["w"]),
    normal(3, 4, 31),
    **FACTORS,
)

# More than one use.
plain(
    "twice, at different batch sizes", W, lambda p, x, y: (x @ p["w"], y @ p["w"]), *PAIR, **FACTORS
)
plain("a layer called twice", SQUARE, lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"], X, **FACTORS)
plain(
    "straight and transposed (tied autoencoder)",
    W,
    lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T,
    X,
    **FACTORS,
)
plain(
    "in two orientations of three axes",
    {"w": (8, 9, 7)},
    lambda p, x, y: (jnp.einsum("xa,abc->xbc", x, p["w"]), jnp.einsum("xc,abc->xab", y, p["w"])),
    normal(2, 8),
    normal(2, 7),
    **DENSE,
)
plain("with weight decay", W, lambda p, x: (x @ p["w"], 0.1 * p["w"] ** 2), X, **DENSE)
plain("times a scalar", W, lambda p, x: x @ (0.5 * p["w"]), X, **DENSE)
plain(
    "sliced in q, k and v",
    {"w": (31, 27)},
    lambda p, x: [jnp.tanh(x @ w) for w in jnp.split(p["w"], 3, 1)],
    X,
    **DENSE,
)
plain(
    "product of two weights",
    {"a": (31, 29), "b": (29, 27)},
    lambda p, x: x @ (p["a"] @ p["b"]),
    X,
    a="dense",
    b="dense",
)
plain(
    "LoRA: x @ A @ B",
    {"a": (61, 8), "b": (8, 59)},
    lambda p, x: x @ p["a"] @ p["b"] * 0.5,
    normal(3, 61),
    a="factors",
    b="factors",
)
plain(
    "x @ W + b, scaled",
    {"w": (31, 23), "b": (23,), "s": ()},
    lambda p, x: p["s"] * jnp.tanh(x @ p["w"] + p["b"][None]),
    X,
    w="factors",
    b="dense",
    s="dense",
)

# Lookups.
TABLE, ROWS = {"w": (19, 6)}, {"w": "rows"}
IDS = np.array([[3, 0, 3], [18, 7, 8]])
plain("lookup of rows", TABLE, lambda p, i: p["w"][i], IDS, **ROWS)
plain(
    "lookup, negative and out of bounds",
    TABLE,
    lambda p, i: jnp.nan_to_num(jnp.take(p["w"], i, axis=0)),
    IDS - 5,
    **ROWS,
)
plain("lookup, clipped", TABLE, lambda p, i: p["w"].at[i].get(mode="clip"), 3 * IDS - 5, **ROWS)
plain("lookup of matrices", {"w": (19, 2, 3)}, lambda p, i: p["w"][i], IDS, **ROWS)
plain("lookup by vmap", TABLE, lambda p, i: jax.vmap(lambda i: p["w"][i])(i), IDS[0], **ROWS)
plain("lookup twice", TABLE, lambda p, i: (p["w"][i], jnp.cos(p["w"][i[0]])), IDS, **ROWS)
plain(
    "lookup in a scan",
    TABLE,
    lambda p, i: lax.scan(lambda h, i: (jnp.sin(h + p["w"][i]), None), jnp.zeros((3, 6)), i)[0],
    IDS,
    **ROWS,
)
plain("lookup of columns", {"w": (6, 19)}, lambda p, i: p["w"][:, i], IDS, **DENSE)
plain("lookup of one number", TABLE, lambda p, i: p["w"][i, 2], IDS, **DENSE)
plain(
    "lookup and product",
    {"w": (19, 19)},
    lambda p, i: jnp.tanh(p["w"][i[0]]) @ p["w"],
    IDS,
    **DENSE,
)
plain(
    "one-hot product", {"w": (50, 16)}, lambda p, i: jax.nn.one_hot(i, 50) @ p["w"], IDS, **FACTORS
)


# Control flow.
def carried(step):
    """A recurrence with its weight in the carry, as ``step`` hands it on."""

    def model(p, x):
        body = lambda c, x: ((step(c[0]), jnp.tanh(0.2 * c[1] @ c[0] + x)), None)  # noqa: E731
        return lax.scan(body, (p["w"], jnp.zeros((2, 31))), x)[0][1]

    return model


def stacked(layer):
    return lambda p, x: lax.scan(lambda h, w: (layer(h, w), None), x, p["w"])[0]


def recurrent(p, xs):
    return lax.scan(lambda h, x: (jnp.tanh(h @ p["u"] + x @ p["w"]), None), jnp.zeros((2, 17)), xs)[
        0
    ]


def layer(x, w):
    return jnp.tanh(x @ w)


RNN, TIME = {"w": (29, 17), "u": (17, 17)}, normal(3, 2, 31)
plain("scan over stacked layers", STACK, stacked(layer), X, **FACTORS)
plain("scan over stacked layers, remat inside", STACK, stacked(jax.checkpoint(layer)), X, **FACTORS)
plain("scan over time", RNN, recurrent, normal(3, 2, 29), w="factors", u="factors")
plain(
    "scan over time in a scan over sequences",
    RNN,
    lambda p, xs: lax.map(functools.partial(recurrent, p), xs),
    normal(1, 3, 2, 29),
    w="factors",
    u="factors",
)
plain(
    "scan over layers in a scan over time",
    STACK,
    lambda p, xs: lax.scan(lambda h, x: (stacked(layer)(p, h + x), None), 0 * xs[0], xs)[0],
    TIME,
    **FACTORS,
)
plain(
    "scan over microbatches",
    W,
    lambda p, xs: lax.scan(lambda s, x: (s + jnp.sum(jnp.sin(x @ p["w"])), None), 0.0, xs)[0],
    normal(3, 2, 31),
    **FACTORS,
)
plain("scan with the weight as carry", SQUARE, carried(lambda w: w), TIME, **FACTORS)
plain("scan that transposes the weight it carries", SQUARE, carried(lambda w: w.T), TIME, **DENSE)
plain("scan that doubles the weight it carries", SQUARE, carried(lambda w: w + w), TIME, **DENSE)
plain("scan that drops the weight it carries", SQUARE, carried(jnp.ones_like), TIME, **DENSE)
plain(
    "fori_loop, static trip count",
    SQUARE,
    lambda p, x: lax.fori_loop(0, 3, lambda _, h: layer(h, p["w"]), x),
    X,
    **FACTORS,
)
plain(
    "while, forward only",
    SQUARE,
    lambda p, x: layer(x * lax.while_loop(lambda i: i < 3.0, lambda i: i + 1, 0.0), p["w"]),
    X,
    **FACTORS,
)
plain(
    "cond",
    W,
    lambda p, x: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: -x @ w, p["w"]),
    X,
    **DENSE,
)
plain(
    "switch",
    W,
    lambda p, x: lax.switch(1, [lambda w: x @ w, lambda w: jnp.sin(x @ w)], p["w"]),
    X,
    **DENSE,
)
plain("remat", W, lambda p, x: jax.checkpoint(layer)(x, p["w"]), X, **FACTORS)
plain(
    "remat with a policy, in jit",
    W,
    lambda p, x: jax.jit(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable))(
        x, p["w"]
    ),
    X,
    **FACTORS,
)
plain(
    "jit in jit",
    W,
    lambda p, x: jax.jit(lambda x, w: jax.jit(layer)(x, w) + jax.jit(layer)(2 * x, w))(x, p["w"]),
    X,
    **FACTORS,
)
plain(
    "jit with static arguments",
    W,
    lambda p, x: jax.jit(lambda x, w, f: f(x @ w), static_argnums=2)(x, p["w"], jnp.tanh),
    X,
    **FACTORS,
)
plain(
    "jit over a closure",
    W,
    lambda p, x: jax.jit(lambda w: jnp.sin((x + X) @ w) * X[:, :1])(p["w"]),
    X,
    **FACTORS,
)
plain(
    "jit with a sharding",
    W,
    lambda p, x: jax.jit(
        layer, in_shardings=(None, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    )(x, p["w"]),
    X,
    group=CORNER,
    **DENSE,
)


# Derivatives that are not the true ones must keep their meaning.
@jax.custom_vjp
def clipped(x, w):
    return x @ w


clipped.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda r, g: (3 * g @ r[1].T, r[0].T @ jnp.clip(g, -0.1, 0.1))
)


@jax.custom_jvp
def rounded(w):
    return jnp.round(w)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))

plain("custom_vjp, clipped", W, lambda p, x: clipped(x, p["w"]), X, **FACTORS)
plain(
    "custom_vjp under vmap",
    W,
    lambda p, x: jax.vmap(lambda x: clipped(x, p["w"]))(x),
    normal(4, 2, 31),
    **FACTORS,
)
plain(
    "custom_vjp with an outer product an example, under vmap",
    W,
    lambda p, x: jax.vmap(lambda x: clipped(x[None], p["w"])[0])(x),
    X,
    **FACTORS,
)
plain("custom_jvp, straight-through", W, lambda p, x: x @ rounded(p["w"]), X, **FACTORS)
plain(
    "stop_gradient",
    {"w": (31, 23), "v": (31, 23)},
    lambda p, x: x @ p["w"] + x @ lax.stop_gradient(p["v"]),
    X,
    w="factors",
    v="none",
)
