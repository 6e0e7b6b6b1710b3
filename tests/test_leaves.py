"""Which leaves get a gradient: filters, leaves that are not floating point, and errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_table import TOLERANCE, normal

from jaxcode import factored_value_and_grad, to_dense
from jaxcode.leaves import eval_shape, is_differentiable, split_arrays
from jaxcode.payload import num_bytes

X = normal(4, 31)
PARAMS = {
    "first": {"w": normal(31, 29), "b": normal(29)},
    "second": {"w": normal(29, 23), "b": normal(23)},
    "steps": np.int32(3),
    "flags": np.array([True, False]),
    "none": None,
}
FLOATS = {name: PARAMS[name] for name in ("first", "second")}


def loss(params, x):
    for name in ("first", "second"):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"][None])
    return jnp.sum(x)


EXACT = jax.jit(jax.grad(loss))(FLOATS, X)


def trained(mask):
    """Paths of the leaves that get a gradient, which is checked."""
    _, grads = factored_value_and_grad(loss, trainable=mask)(PARAMS, X)
    dense = to_dense(grads, PARAMS)
    found = set()
    for name in FLOATS:
        for leaf, exact in EXACT[name].items():
            if grads[name][leaf] is None:
                assert not np.any(dense[name][leaf])
            else:
                np.testing.assert_allclose(dense[name][leaf], exact, rtol=1e-4, atol=TOLERANCE)
                found.add(f"{name}.{leaf}")
    return found


EVERYTHING = {"first.w", "first.b", "second.w", "second.b"}
FILTERS = {
    "all": (None, EVERYTHING),
    "one bool": (True, EVERYTHING),
    "nothing": (False, set()),
    "a prefix": (
        {"first": False, "second": True, "steps": True, "flags": True, "none": None},
        {"second.w", "second.b"},
    ),
    "the weight frozen, its bias not": (
        {**dict.fromkeys(PARAMS, True), "none": None, "first": {"w": False, "b": True}},
        EVERYTHING - {"first.w"},
    ),
    "a function": (
        lambda params: jax.tree.map(lambda x: np.ndim(x) == 2, params),
        {"first.w", "second.w"},
    ),
    "a function to a prefix": (lambda _: False, set()),
}


@pytest.mark.parametrize(("mask", "expected"), FILTERS.values(), ids=FILTERS)
def test_trainable(mask, expected):
    assert trained(mask) == expected


def test_a_leaf_is_frozen_and_trained_again():
    freeze_first = {**dict.fromkeys(PARAMS, True), "none": None, "first": False}
    assert trained(None) > trained(freeze_first) == {"second.w", "second.b"}
    assert trained(None) == EVERYTHING


def test_leaves_without_a_gradient_are_not_sent_and_not_changed():
    mask = {**dict.fromkeys(PARAMS, True), "none": None, "first": False}
    gradient = factored_value_and_grad(loss, trainable=mask)
    _, grads = gradient(PARAMS, X)
    assert grads["first"] == {"w": None, "b": None}
    assert grads["steps"] is grads["flags"] is grads["none"] is None
    assert num_bytes(grads) == num_bytes(grads["second"]) == 4 * gradient.summary(PARAMS, X).numbers
    reasons = {row.path: (row.kind, row.reason) for row in gradient.summary(PARAMS, X).rows}
    assert reasons["['first']['w']"] == ("none", "frozen")
    assert reasons["['steps']"] == ("none", "int32 has no gradient")
    assert reasons["['flags']"] == ("none", "bool has no gradient")

    updated = optax.apply_updates(PARAMS, to_dense(grads, PARAMS))
    for name in ("first", "steps", "flags"):
        assert jax.tree.all(jax.tree.map(np.array_equal, updated[name], PARAMS[name]))
    assert updated["none"] is None
    assert not np.array_equal(updated["second"]["w"], PARAMS["second"]["w"])


def test_a_frozen_leaf_is_not_computed():
    mask = {**dict.fromkeys(PARAMS, False), "none": None, "second": True}
    whole, part = (
        str(jax.make_jaxpr(factored_value_and_grad(loss, trainable=mask))(PARAMS, X))
        for mask in (None, mask)
    )
    assert part.count("dot_general") < whole.count("dot_general")


def test_an_equinox_module_with_numbers_that_are_not_parameters():
    # A float is a parameter to `jax.grad`; Equinox's rule, that only arrays are, is a filter.
    module = eqx.nn.MultiheadAttention(4, 32, dropout_p=0.0, key=jax.random.key(0))
    sequence = normal(3, 32)
    gradient = factored_value_and_grad(
        lambda module, x: jnp.sum(jnp.sin(module(x, x, x))),
        trainable=lambda module: jax.tree.map(eqx.is_inexact_array, module),
    )
    _, grads = gradient(module, sequence)
    exact = eqx.filter_grad(lambda module, x: jnp.sum(jnp.sin(module(x, x, x))))(module, sequence)
    dense = eqx.filter(to_dense(grads, module), jax.tree.map(eqx.is_inexact_array, module))
    for ours, theirs in zip(jax.tree.leaves(dense), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=TOLERANCE)
    assert grads.dropout.p is None


def test_static_arguments_stay_python_values():
    def loss(params, x, activation, *, scale, train):
        assert scale == 2.0
        return jnp.sum(activation(x @ params["w"])) * (scale if train else 0.0)

    gradient = factored_value_and_grad(loss)
    value, grads = gradient({"w": PARAMS["first"]["w"]}, X, jnp.tanh, scale=2.0, train=True)
    assert grads["w"].rank == 4
    np.testing.assert_allclose(value, 2 * np.tanh(X @ PARAMS["first"]["w"]).sum(), rtol=1e-4)


BAD = {
    "a filter of other structure": (
        {"trainable": {"first": True}},
        loss,
        "`trainable` needs a tree of bools that is a prefix of the parameters",
    ),
    "a filter of other leaves": (
        {"trainable": {**dict.fromkeys(PARAMS, "yes"), "none": None}},
        loss,
        "`trainable` needs bools for leaves; got .*: use True or False",
    ),
    "a loss an example": (
        {},
        lambda params, x: jnp.sum(x @ params["first"]["w"], 1),
        r"`loss` needs to return a scalar; got shape \(4,\): take the mean",
    ),
    "a pair that was not announced": (
        {},
        lambda params, x: (loss(params, x), x),
        r"`loss` needs to return a scalar; got shape \(\(\), \(4, 31\)\): .* with has_aux=True",
    ),
    "no pair though announced": (
        {"has_aux": True},
        loss,
        r"`has_aux=True` needs a loss that returns a pair \(value, aux\); got .*: return the pair",
    ),
}


@pytest.mark.parametrize(("options", "function", "message"), BAD.values(), ids=BAD)
def test_errors(options, function, message):
    gradient = factored_value_and_grad(function, **options)
    with pytest.raises(ValueError, match=message):
        gradient(PARAMS, X)
    with pytest.raises(ValueError, match=message):
        gradient.summary(PARAMS, X)


def test_what_can_have_a_gradient():
    yes = (1.0, 1j, np.float32(1), np.ones(2), jnp.ones(2, jnp.bfloat16), np.complex64(1))
    no = (1, True, None, "x", len, np.int32(1), jnp.zeros(2, bool), jax.random.key(0))
    assert all(map(is_differentiable, yes))
    assert not any(map(is_differentiable, no))


def test_arrays_are_split_from_the_rest():
    tree = {"x": jnp.ones(2), "f": len, "n": 3, "s": "name"}
    arrays, static = split_arrays(tree)
    assert static.merge(arrays) == tree
    assert hash(static) == hash(split_arrays(tree)[1])
    shapes = eval_shape(lambda tree: jnp.zeros(tree["f"](tree["s"])), tree)
    assert shapes.shape == (4,)


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("rows", [100, 256, 40_000])
def test_small_indices_into_long_tables(rows, dtype, mode):
    """A byte cannot hold the length of a table of 256 rows."""
    ids = np.array([0, 1, 99, 120], dtype)
    table = jnp.ones((rows, 3))

    def loss(w):
        return jnp.sum(jnp.nan_to_num(jnp.take(w, ids, axis=0, mode=mode)) * 2)

    _, grad = factored_value_and_grad(loss)(table)
    assert np.array_equal(to_dense(grad, table), jax.grad(loss)(table))


def test_a_weight_used_a_thousand_times():
    def loss(w):
        h = jnp.ones((1, 300))
        for _ in range(1000):
            h = jnp.tanh(h @ w)
        return jnp.sum(h)

    row = factored_value_and_grad(loss).summary(jnp.ones((300, 300))).rows[0]
    assert row.kind == "dense"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_mutable_references_are_left_alone(wrap):
    @wrap
    def loss(w, x):
        ref = jax.new_ref(jnp.float32(0))
        ref[...] = jnp.sum(jnp.tanh(x @ w))
        return ref[...]

    w, x = jnp.full((30, 20), 0.1), jnp.ones((2, 30))
    gradient = factored_value_and_grad(loss)
    np.testing.assert_allclose(gradient(w, x)[1], jax.grad(loss)(w, x), rtol=1e-6)
    assert gradient.summary(w, x).rows[0].kind == "dense"


def test_mapped_gradients_become_dense_with_their_leading_axis():
    def loss(params, x, i):
        return jnp.sum(jnp.tanh(x @ params["w"])) + jnp.sum(params["t"][i] ** 2)

    params = {"w": jnp.full((30, 20), 0.1), "t": jnp.ones((50, 8))}
    x, i = jnp.ones((5, 2, 30)), jnp.arange(10).reshape(5, 2)
    grads = jax.vmap(lambda x, i: factored_value_and_grad(loss)(params, x, i)[1])(x, i)
    want = jax.vmap(lambda x, i: jax.grad(loss)(params, x, i))(x, i)
    for name in params:
        np.testing.assert_allclose(grads[name].to_dense(), want[name], rtol=1e-5, atol=1e-6)
