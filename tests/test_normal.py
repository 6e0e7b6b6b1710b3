"""The elimination behind normal forms, on factors of every kind, against dense float64."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import DEVICE, relative_error
from test_lowrank import SHAPE, SPLITS, dense, low_rank

from jaxcode.lowrank import LowRank, NormalForm, is_structured
from jaxcode.normal import normal_form, normal_form_saves


def normal(seed, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def orthonormal(seed, rows, columns):
    return np.linalg.qr(normal(seed, rows, columns))[0]


def sparse(seed, p, r):
    return np.random.default_rng(seed).random((p, r)) < 1 / r


def repeated(seed, p, r):
    return normal(seed, p, r)[:, np.random.default_rng(seed).integers(0, max(1, r // 2), r)]


# Left factors of every kind there is; most are of a lower rank than they have columns.
FACTORS = {
    "random": normal,
    "graded columns": lambda i, p, r: normal(i, p, r) * np.logspace(0, -6, r),
    "graded singular values": lambda i, p, r: (
        orthonormal(i, p, r) * np.logspace(0, -6, r) @ orthonormal(i + 9, r, r)
    ),
    "graded past rounding": lambda i, p, r: (
        orthonormal(i, p, r) * np.logspace(0, -12, r) @ orthonormal(i + 9, r, r)
    ),
    "graded rows": lambda i, p, r: normal(i, p, r) * np.logspace(0, -6, p)[:, None],
    "ReLU": lambda i, p, r: np.maximum(normal(i, p, r) - 0.5, 0),
    "one large mean": lambda i, p, r: 1 + 1e-3 * normal(i, p, r),
    "repeated examples": repeated,
    "dead units": lambda i, p, r: normal(i, p, r) * (np.arange(p) < r // 2)[:, None],
    "zero examples": lambda i, p, r: normal(i, p, r) * (np.arange(r) % 3 > 0),
    "one example": lambda i, p, r: np.repeat(normal(i, p, 1), r, axis=1),
    "rank 3": lambda i, p, r: normal(i, p, 3) @ normal(i + 9, 3, r),
    "rank 8, first columns that nearly agree": lambda i, p, r: (
        normal(i, p, 8)
        @ np.where(
            np.arange(r) < 8,
            normal(i + 9, 8, 1) + 1e-2 * normal(i + 8, 8, r),
            normal(i + 7, 8, r),
        )
    ),
    "half the rank": lambda i, p, r: normal(i, p, r // 2) @ normal(i + 9, r // 2, r),
    "zeros": lambda i, p, r: np.zeros((p, r)),
    "sparse": sparse,
    "sparse and repeated": lambda i, p, r: sparse(i, p, r) @ np.eye(r)[:, np.arange(r) // 2],
    "small integers": lambda i, p, r: np.round(normal(i, p, r)),
    "huge": lambda i, p, r: 1e30 * normal(i, p, r),
}
SIZES = [(1, 1, 1), (9, 1, 1), (5, 8, 5), (40, 30, 9), (33, 40, 32), (100, 120, 32), (128, 160, 64)]


@jax.jit
def through(P, Q):
    form = normal_form(LowRank(P, Q))
    return form, form.to_dense()


def pair(name, seed, p, q, r):
    P, Q = FACTORS[name](seed, p, r), normal(seed + 5, q, r)
    return P.astype(np.float32), (Q / 1e30 if name == "huge" else Q).astype(np.float32)


@pytest.mark.parametrize("name", FACTORS)
def test_float32_error_stays_below_1e_5(name):
    for (p, q, r), seed in itertools.product(SIZES, range(12)):
        P, Q = pair(name, seed, p, q, r)
        form, got = through(P, Q)
        want = np.float64(P) @ np.float64(Q).T
        assert relative_error(got, want) < DEVICE
        assert np.all(np.diff(form.pivots) > 0)
        assert np.abs(form.X).max(initial=0) < 100
        # The control: rows in other places are another matrix.
        if want.any() and p > r:
            moved = dataclasses.replace(form, pivots=(form.pivots + 1) % want.shape[q < p])
            assert relative_error(moved.to_dense(), want) > 1e-4 or r == 1 or name == "one example"


@pytest.mark.parametrize("name", FACTORS)
def test_float32_error_stays_below_1e_5_at_a_large_rank(name):
    P, Q = pair(name, 1, 700, 800, 600)
    want = np.float64(P) @ np.float64(Q).T
    assert relative_error(through(P, Q)[1], want) < DEVICE


def test_where_terms_cancel_it_is_as_good_as_the_product_in_float32():
    """Examples that nearly agree, with deltas that add up to nothing: small sums of large terms."""
    for (p, q, r), seed in itertools.product(SIZES[3:], range(3)):
        P, Q = 1 + 1e-2 * normal(seed, p, r), normal(seed + 5, q, r)
        P, Q = P.astype(np.float32), (Q - Q.mean(1, keepdims=True)).astype(np.float32)
        want = np.float64(P) @ np.float64(Q).T
        product = relative_error(jnp.matmul(P, Q.T, precision="highest"), want)
        assert relative_error(through(P, Q)[1], want) < 10 * product


def test_it_has_exactly_as_many_numbers_as_the_set_has_dimensions():
    for p, q, r in SIZES:
        form = normal_form(LowRank(jnp.ones((p, r)), jnp.ones((q, r))))
        assert form.X.size + form.rows.size == r * (p + q - r)
        assert (form.pivots.size, form.pivots.dtype) == (r, jnp.int32)
        assert (form.X.shape, form.rows.shape) == form.part_shapes


def test_every_split_of_the_axes_and_every_batch():
    tried = 0
    for rows, batch in SPLITS[::8]:
        grad = low_rank(SHAPE, rows, batch)
        if min(grad.P.shape[-2], grad.Q.shape[-2]) < grad.rank:
            with pytest.raises(ValueError, match=r"`normal_form` needs.*`to_dense`"):
                normal_form(grad)
            continue
        tried += 1
        got = jax.jit(lambda grad: normal_form(grad).to_dense())(grad)
        assert relative_error(got, dense(grad)) < DEVICE
    assert tried > 3


def test_under_jit_vmap_and_float64():
    grad = low_rank((3, 7, 5), (1,), (0,))
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), grad)
    forms = jax.jit(jax.vmap(normal_form))(stacked)
    want = np.stack([dense(grad), 4 * dense(grad)])
    assert relative_error(jax.vmap(NormalForm.to_dense)(forms), want) < DEVICE
    assert relative_error(forms.to_dense(), want) < DEVICE
    assert len(jax.tree.leaves(forms)) == 3
    assert is_structured(forms)
    with jax.enable_x64(True):
        P, Q = jnp.asarray(normal(0, 40, 9)), jnp.asarray(normal(1, 30, 9))
        assert relative_error(normal_form(LowRank(P, Q)).to_dense(), P @ Q.T) < 1e-13


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_off_by_the_roundings_it_says(dtype):
    for (p, q, r), name in itertools.product(SIZES[3:], ("random", "ReLU", "repeated examples")):
        P, Q = (jnp.asarray(x, dtype) for x in pair(name, 0, p, q, r))
        form = normal_form(LowRank(P, Q))
        assert form.X.dtype == form.rows.dtype == dtype
        factors = form.factors()
        got = np.float64(factors.P) @ np.float64(factors.Q).T
        want = np.float64(P) @ np.float64(Q).T
        bound = 0.6 * math.sqrt(r) * float(jnp.finfo(dtype).eps) / 2
        assert 0 < relative_error(got if q >= p else got.T, want) < bound


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["P", "Q", "zero P", "zero Q"])
def test_what_is_not_finite_shows(side, bad):
    for p, q in ((8, 12), (12, 8)):
        P, Q = (x.astype(np.float32) for x in (normal(0, p, 4), normal(1, q, 4)))
        {"zero P": P, "zero Q": Q}.get(side, np.ones(4))[...] *= 0 if "zero" in side else 1
        (Q if side in ("Q", "zero P") else P)[5, 2] = bad
        form, got = through(P, Q)
        with np.errstate(invalid="ignore"):
            want = P @ Q.T
        assert np.all(np.isfinite(want) | ~np.isfinite(got))
        assert not np.isfinite(got).all()
        assert np.all(np.diff(form.pivots) > 0)


def test_other_factors_are_refused():
    one = jnp.ones((4, 2))
    for P in (one.astype(jnp.complex64), one.astype(jnp.int32), jnp.ones((4, 5))):
        with pytest.raises(ValueError, match=r"`normal_form` needs factors of real"):
            normal_form(LowRank(P, jnp.ones((6, P.shape[1]), P.dtype)))


def test_it_is_used_where_it_saves_more_than_a_tenth():
    for p, q, r in itertools.product((1, 2, 7, 20, 40), (1, 3, 20, 50), range(60)):
        length = r * (p + q - r) + r if r <= min(p, q) else math.inf
        assert normal_form_saves(p, q, r) == (length < 0.9 * min(r * (p + q), p * q))
