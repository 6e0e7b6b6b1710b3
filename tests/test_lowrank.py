"""Factors and indexed rows against dense NumPy."""

import itertools
import math

import case_table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_table import TOLERANCE

from jaxcode import IndexedRows, LowRank, factored_value_and_grad, to_dense
from jaxcode.lowrank import concatenate, is_structured
from jaxcode.precision import alike


def normal(*shape, seed=0):
    return jnp.asarray(case_table.normal(*shape, seed=seed))


def low_rank(shape, rows, batch, rank=2, seed=0, dtype=np.float32, product_dtype=np.float32):
    """Random factors of a parameter whose axes ``rows`` are folded in P."""
    columns = [axis for axis in range(len(shape)) if axis not in (*rows, *batch)]
    head, p, q = ([shape[axis] for axis in axes] for axes in (batch, rows, columns))
    P = normal(*head, np.prod(p, dtype=int), rank, seed=seed).astype(dtype)
    Q = normal(*head, np.prod(q, dtype=int), rank, seed=seed + 1).astype(dtype)
    return LowRank(P, Q, shape, rows, batch, np.dtype(np.float32), rank, np.dtype(product_dtype))


def dense(grad):
    """The gradient entry by entry, from the definition."""
    P, Q = np.asarray(grad.P, np.float64), np.asarray(grad.Q, np.float64)
    out = np.zeros(grad.shape)
    for index in np.ndindex(*grad.shape):
        b, p, q = (
            np.ravel_multi_index(
                [index[axis] for axis in axes], [grad.shape[axis] for axis in axes]
            )
            if axes
            else 0
            for axes in (grad.batch, grad.rows, grad.columns)
        )
        flat = [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (P, Q)]
        out[index] = flat[0][b, p] @ flat[1][b, q]
    return out


SHAPE = (3, 4, 2, 5)
SPLITS = [
    (rows, batch)
    for kinds in itertools.product("rcb", repeat=4)
    if "r" in kinds
    for rows, batch in [
        tuple(tuple(axis for axis in range(4) if kinds[axis] == kind) for kind in "rb")
    ]
    if len(rows) + len(batch) < 4
]


def test_to_dense_for_every_split_of_the_axes():
    for rows, batch in SPLITS:
        grad = low_rank(SHAPE, rows, batch)
        assert (grad.P.shape, grad.Q.shape) == grad.factor_shapes
        assert grad.to_dense().dtype == jnp.float32
        np.testing.assert_allclose(grad.to_dense(), dense(grad), rtol=TOLERANCE, atol=TOLERANCE)


def test_factors_of_one_matrix():
    P, Q = normal(7, 2), normal(5, 2)
    grad = LowRank(P, Q)
    assert (grad.shape, grad.rank, grad.columns) == ((7, 5), 2, (1,))
    np.testing.assert_allclose(grad.to_dense(), P @ Q.T, rtol=TOLERANCE, atol=TOLERANCE)
    assert LowRank(P[:, :0], Q[:, :0]).to_dense().tolist() == np.zeros((7, 5)).tolist()


def test_concatenation_is_the_sum():
    parts = [low_rank(SHAPE, (1, 3), (0,), rank, seed=10 * rank) for rank in (1, 3, 0)]
    total = concatenate(parts)
    assert total.rank == 4
    assert total.factor_shapes == ((3, 20, 4), (3, 2, 4))
    expected = sum(map(dense, parts))
    np.testing.assert_allclose(total.to_dense(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_concatenation_in_two_precisions_keeps_the_wider():
    narrow = low_rank((6, 5), (0,), (), dtype=jnp.bfloat16, product_dtype=jnp.bfloat16)
    wide = low_rank((6, 5), (0,), (), seed=4)
    for parts in ([narrow, wide], [wide, narrow]):
        total = concatenate(parts)
        assert total.P.dtype == total.Q.dtype == total.product_dtype == jnp.float32
        np.testing.assert_allclose(
            total.to_dense(), sum(map(dense, parts)), rtol=TOLERANCE, atol=TOLERANCE
        )
    half, brain = jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16)
    assert [x.dtype for x in alike([half, brain])] == [jnp.float32] * 2


def test_the_product_is_rounded_once_and_where_autodiff_would():
    grad = low_rank((6, 5), (0,), (), 9, dtype=jnp.bfloat16, product_dtype=jnp.bfloat16)
    rounded = dense(grad).astype(jnp.bfloat16)
    assert grad.to_dense().dtype == jnp.float32
    # Half an ulp is 2^-9; a float32 sum that falls on the other side of a tie moves one ulp.
    np.testing.assert_allclose(grad.to_dense(), rounded.astype(np.float32), rtol=2**-7)
    assert np.array_equal(grad.to_dense(), np.asarray(grad.to_dense()).astype(jnp.bfloat16))
    P, Q = normal(2, 6, 3), normal(2, 5, 3)
    total = grad.sum_of_products(P, Q)
    want = np.einsum("kpr,kqr->pq", np.float64(P), np.float64(Q))
    np.testing.assert_allclose(total, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert not np.array_equal(total, np.asarray(total).astype(jnp.bfloat16))


def test_factors_are_a_pytree_that_jit_and_vmap_take():
    grad = low_rank((3, 7, 5), (1,), (0,))
    doubled = jax.jit(lambda grad: jax.tree.map(lambda x: 2 * x, grad))(grad)
    np.testing.assert_allclose(doubled.to_dense(), 4 * dense(grad), rtol=TOLERANCE, atol=TOLERANCE)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), grad)
    assert jax.vmap(lambda grad: grad.to_dense())(stacked).shape == (2, 3, 7, 5)
    assert len(jax.tree.leaves(grad)) == 2
    assert is_structured(grad)
    assert not is_structured(grad.P)


def test_rows_add_up_and_those_outside_the_table_add_nothing():
    rows = normal(6, 3, 2)
    grad = IndexedRows(jnp.array([2, 0, 2, 5, 2, 7]), rows, (5, 3, 2), np.dtype(np.float32))
    expected = np.zeros((5, 3, 2))
    np.add.at(expected, [2, 0, 2, 2], np.asarray(rows)[[0, 1, 2, 4]])
    np.testing.assert_allclose(grad.to_dense(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_are_summed_in_float32():
    # In bfloat16, 256 + 1 is 256: ones added one by one would stop there.
    ones = jnp.ones((300, 2), jnp.bfloat16)
    grad = IndexedRows(jnp.zeros(300, jnp.int32), ones, (4, 2), np.dtype(jnp.float32))
    assert grad.to_dense()[0].tolist() == [300, 300]


@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
def test_lookups_out_of_bounds_like_jnp_take(mode):
    ids = np.array([[0, 30, 30], [-1, -50, -110], [49, 50, 170]])
    params = {"table": normal(50, 3)}

    def loss(params, ids):
        return jnp.nansum(jnp.sin(jnp.take(params["table"], ids, axis=0, mode=mode)))

    for lookups in (ids, ids[1], ids.astype(np.int16)):
        _, grads = factored_value_and_grad(loss)(params, lookups)
        exact = jax.grad(loss)(params, lookups)["table"]
        ours = to_dense(grads, params)["table"]
        np.testing.assert_allclose(ours, exact, rtol=TOLERANCE, atol=TOLERANCE)
        assert isinstance(grads["table"], IndexedRows)
        assert grads["table"].indices.dtype == jnp.int32


def test_a_tree_of_every_kind_becomes_dense():
    params = {
        "w": jnp.ones((7, 5)),
        "table": jnp.ones((4, 2), jnp.bfloat16),
        "b": jnp.ones(3),
        "frozen": jnp.ones(2, jnp.float16),
        "steps": jnp.zeros((), jnp.int32),
        "none": None,
        "function": len,
    }
    grads = dict.fromkeys(params, None) | {
        "w": LowRank(normal(7, 1), normal(5, 1)),
        "table": IndexedRows(jnp.array([3]), normal(1, 2), (4, 2), np.dtype(jnp.bfloat16)),
        "b": jnp.arange(3.0),
    }
    ours = to_dense(grads, params)
    assert ours["none"] is ours["function"] is None
    for name in ("w", "table", "b", "frozen", "steps"):
        assert (ours[name].shape, ours[name].dtype) == (params[name].shape, params[name].dtype)
    assert not np.any(ours["frozen"])
    assert ours["b"] is grads["b"]
