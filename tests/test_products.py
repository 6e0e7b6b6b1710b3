"""Products of any axes, in any order and shape, and sums of them: found, and exact."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_table import TOLERANCE, normal
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_factors import errors

from jaxcode import LowRank, factored_value_and_grad
from jaxcode.products import _blocks

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
LETTERS = "abcdefghij"
X, W = normal(4, 31), {"w": normal(31, 23)}


@st.composite
def products(draw):
    """Subscripts and shapes of an einsum of x and W, small in x's own axes."""
    sizes, x, w, out = {}, "", "", ""
    letters = iter(LETTERS)
    kinds = draw(st.lists(st.sampled_from(["batch", "x"]), max_size=2))
    kinds += ["contract"] * draw(st.integers(1, 2)) + ["w"] * draw(st.integers(1, 2))
    for kind, letter in zip(kinds, letters, strict=False):
        sizes[letter] = draw(st.integers(1, 2) if kind in ("batch", "x") else st.integers(5, 7))
        x += letter * (kind != "w")
        w += letter * (kind != "x")
        out += letter * (kind != "contract")
    x, w, out = ("".join(draw(st.permutations(part))) for part in (x, w, out))
    return x, w, out, sizes


def compare(loss, params, *args):
    """The gradient, which is exact."""
    _, grads = jax.jit(factored_value_and_grad(loss))(params, *args)
    exact = jax.jit(jax.grad(loss))(params, *args)
    assert max(errors(grads, params, exact), default=0) < TOLERANCE
    return grads


def arrays(sizes, *subscripts):
    return [
        normal(*(sizes[letter] for letter in part), seed=i) for i, part in enumerate(subscripts)
    ]


@few
@given(products())
def test_any_einsum(product):
    x, w, out, sizes = product
    X, W = arrays(sizes, x, w)

    def loss(params, X):
        return jnp.sum(jnp.sin(jnp.einsum(f"{x},{w}->{out}", X, params["w"])))

    grads = compare(loss, {"w": W}, X)
    batch, rank, p, q = (
        math.prod(sizes[letter] for letter in sizes if keep(letter))
        for keep in (
            lambda a: a in x and a in w and a in out,
            lambda a: a not in w,
            lambda a: a not in out,
            lambda a: a not in x,
        )
    )
    pays = batch * rank * (p + q) < W.size
    assert isinstance(grads["w"], LowRank) == pays
    if pays:
        assert grads["w"].rank == rank


@few
@given(products(), st.data())
def test_any_einsum_of_a_weight_reshaped_and_transposed(product, data):
    x, w, out, sizes = product
    (X,) = arrays(sizes, x)
    # The parameter is W with its axes in another order, some neighbours merged.
    order = data.draw(st.permutations(range(len(w))))
    shape = [sizes[w[axis]] for axis in order]
    cuts = data.draw(st.lists(st.booleans(), min_size=len(w) - 1, max_size=len(w) - 1))
    merged = [shape[0]]
    for size, cut in zip(shape[1:], cuts, strict=True):
        merged = [*merged, size] if cut else [*merged[:-1], merged[-1] * size]

    def loss(params, X):
        W = params["w"].reshape(shape).transpose(np.argsort(order))
        return jnp.sum(jnp.sin(jnp.einsum(f"{x},{w}->{out}", X, W)))

    grads = compare(loss, {"w": normal(*merged)}, X)
    event(type(grads["w"]).__name__)
    if all(cuts):
        plain = factored_value_and_grad(
            lambda params, X: jnp.sum(jnp.sin(jnp.einsum(f"{x},{w}->{out}", X, params["w"])))
        )
        row = plain.summary({"w": arrays(sizes, x, w)[1]}, X).rows[0]
        assert isinstance(grads["w"], LowRank) == (row.kind == "factors")


@few
@given(
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_any_dot_general(num_batch, num_contract, num_free, weight_first, rows, data):
    batch, contract, free = (
        [data.draw(sizes) for _ in range(number)]
        for number, sizes in (
            (num_batch, st.integers(1, 3)),
            (num_contract, st.integers(4, 6)),
            (num_free, st.integers(4, 6)),
        )
    )

    def side(own):
        """A shape, and where its batch and contracted axes are."""
        kinds = [("b", i) for i in range(num_batch)] + [("c", i) for i in range(num_contract)]
        kinds += [("f", i) for i in range(len(own))]
        kinds = data.draw(st.permutations(kinds))
        sizes = {"b": batch, "c": contract, "f": own}
        where = [[kinds.index((k, i)) for i in range(len(sizes[k]))] for k in "cb"]
        return [sizes[kind][i] for kind, i in kinds], where

    w_shape, w_axes = side(free)
    x_shape, x_axes = side([rows])

    def loss(params, x):
        first, second = ((params["w"], w_axes), (x, x_axes))[:: 1 if weight_first else -1]
        numbers = tuple((tuple(a), tuple(b)) for a, b in zip(first[1], second[1], strict=True))
        return jnp.sum(jnp.sin(jax.lax.dot_general(first[0], second[0], numbers)))

    grads = compare(loss, {"w": normal(*w_shape)}, normal(*x_shape))
    pays = math.prod(batch) * rows * (math.prod(contract) + math.prod(free)) < math.prod(w_shape)
    assert isinstance(grads["w"], LowRank) == pays


shapes = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(shapes, shapes, shapes)
def test_blocks_cut_a_reshape_in_order(one, two, units):
    # Two shapes of one size: the prime factors of a shape merged, and in another grouping.
    total = math.prod(one)
    other = [1] * len(units) + [d for d in two if total % math.prod(two) == 0]
    new = (*other, total // math.prod(other))
    blocks = _blocks(one, new)
    assert [dim for dims, _ in blocks for dim in dims] == list(range(len(one)))
    assert tuple(size for _, shape in blocks for size in shape) == new
    for dims, shape in blocks:
        assert math.prod(one[dim] for dim in dims) == math.prod(shape)


USES = {
    "straight": lambda x, w: x @ w,
    "transposed": lambda x, w: x[:, :23] @ w.T,
    "reshaped": lambda x, w: jnp.einsum("ba,abc->bc", x, w.reshape(31, 1, 23)),
    "vector": lambda x, w: x[0] @ w,
    "mapped": lambda x, w: jax.vmap(lambda x: x @ w)(x),
    "remat": lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w),
    "unused": lambda x, w: x,
}


@settings(few, max_examples=15)
@given(st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=4))
def test_any_sum_of_uses(uses):
    def loss(params, x):
        outputs = [USES[use](x, params["w"]) for use in uses]
        return sum(jnp.sum(jnp.sin((i + 1) * out)) for i, out in enumerate(outputs))

    grads = compare(loss, W, X[:2])
    ranks = [0 if use == "unused" else 1 if use == "vector" else 2 for use in uses]
    rank = None if grads["w"] is None else grads["w"].rank
    assert (rank or 0) == sum(ranks)


REASONS = {
    "a scalar": (jnp.float32(2), lambda w: w**2),
    "a vector": (normal(5), jnp.sin),
    "it is empty": (np.zeros((0, 3), np.float32), jnp.sin),
    "its gradient comes from `mul`": (normal(31, 23), jnp.sin),
    "its gradient comes from `cond`": (normal(5, 5), lambda w: jax.lax.cond(True, jnp.sin, abs, w)),
    "factors would hold 1,674 numbers": (normal(31, 23), lambda w: normal(31, 31) @ w),
    "its uses contract different axes": (
        normal(8, 9, 7),
        lambda w: (jnp.einsum("a,abc->bc", X[0, :8], w), jnp.einsum("c,abc->ab", X[0, :7], w)),
    ),
    "it is both looked up and multiplied": (normal(31, 31), lambda w: (w[IDS], X @ w)),
    "it is looked up by more than whole rows": (normal(31, 23), lambda w: w[IDS, IDS]),
    "it is looked up by columns": (normal(31, 23), lambda w: w.T[IDS]),
    "its gradient is reshaped across the two factors": (
        normal(62, 12),
        lambda w: X @ w.reshape(31, 24),
    ),
    "its gradient is carried through a scan": (
        normal(31, 31),
        lambda w: jax.lax.scan(lambda w, x: (w.T, jnp.sin(x @ w)), w, X)[1],
    ),
    "its gradient is a reshaped table": (normal(5, 62), lambda w: w.reshape(10, 31)[IDS]),
    "its gradient is the real part of a product": (
        normal(31, 23),
        lambda w: jnp.abs((1j * X) @ w.astype(jnp.complex64)),
    ),
    "its gradient is an input, of the program or of a loop": (
        normal(31, 31),
        lambda w: X @ jax.lax.scan(lambda w, _: (w, w), w, None, length=2)[1],
    ),
    "the loss does not use it": (normal(31, 23), lambda w: X),
}
IDS = np.array([0, 1])


@pytest.mark.parametrize("reason", REASONS)
def test_reasons(reason):
    param, function = REASONS[reason]

    def loss(param):
        return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(function(param)))

    (row,) = factored_value_and_grad(loss).summary(param).rows
    assert (row.kind, row.reason) == ("none" if "use it" in reason else "dense", reason)
