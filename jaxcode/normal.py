"""The normal form of a gradient in factors: which rows are the pivots, and what the others are.

``P Q^T`` of rank r is r of its rows and the others as combinations of them. Which combinations is a
matter of P alone: Gaussian elimination of its columns finds r rows on which the others depend with
small coefficients. Once the pivots are chosen the form is unique, unless P has a smaller rank.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcode.lowrank import LowRank, NormalForm
from jaxcode.precision import alike, widen


def normal_form_saves(p: int, q: int, rank: int) -> bool:
    """Whether a normal form, pivots included, is over 10 % shorter than factors and than dense.

    That is from a rank of about ``0.1 (p + q)``, and well short of full rank.

    Example:
        >>> [normal_form_saves(100, 100, rank) for rank in (10, 30, 60, 80)]
        [False, True, True, False]
    """
    shorter = min(rank * (p + q), p * q)
    return rank <= min(p, q) and 10 * rank * (p + q - rank + 1) < 9 * shorter


def normal_form(grad: LowRank) -> NormalForm:
    """Write a gradient in factors in its normal form; exact, whatever its rank really is.

    The pivots are those of Gaussian elimination, on the shorter side of the matrix. Arithmetic is
    in float32 or wider. In float32 the gradient is off by less than 5e-6 up to r = 600, in the
    Frobenius norm. Where the terms of the product cancel, that is up to ten times what the product
    in float32 has. In half precision X and the rows are rounded, and the
    gradient is off by up to ``0.6 sqrt(r)`` of such roundings (2^-8 in bfloat16).

    Replicas whose messages are mixed (m > 1) should compute alike, on devices of one kind. Where
    columns of P depend on each other (repeated examples), or nearly do, a difference in rounding
    changes the pivots or is magnified in X. Padding, which is columns of zeros, does no harm.

    Args:
        grad: factors, r at most min(p, q). It may be more than the rank of the matrix.

    Returns:
        The normal form, in the dtype of the factors (of the wider, if they are not alike). Where P
        or Q hold numbers that are not finite it holds NaN.

    Raises:
        ValueError: r is more than p or q, or the factors are not of real floating-point numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> x, delta = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 4))
        >>> grad = LowRank(x.T, delta.T)
        >>> bool(jnp.allclose(normal_form(grad).to_dense(), grad.to_dense()))
        True

    References:
        Goreinov, Tyrtyshnikov and Zamarashkin, "A theory of pseudoskeleton approximations", 1997.
    """
    (*batch, p, rank), (*_, q, _) = grad.factor_shapes
    P, Q = alike([grad.P, grad.Q])
    if rank > min(p, q) or not jnp.issubdtype(P.dtype, jnp.floating):
        raise ValueError(
            "`normal_form` needs factors of real floating-point numbers with r at most min(p, q); "
            f"got {P.dtype} and r = {rank} for p = {p}, q = {q}: use `to_dense`"
        )
    place = replace(grad, P=None, Q=None)
    if q < p and grad.rows == tuple(sorted(grad.rows)):  # columns are in ascending order
        P, Q, place = Q, P, replace(place, rows=place.columns)
    form = _form
    for _ in batch:
        form = jax.vmap(form)
    with jax.named_scope("normal_form"):
        pivots, X, rows = form(widen(P), widen(Q))
    return NormalForm(pivots, X.astype(P.dtype), rows.astype(P.dtype), place)


def _form(P: Array, Q: Array) -> tuple[Array, Array, Array]:
    """Pivots, X and pivot rows of one matrix ``P Q^T``, from (p, r) and (q, r)."""
    rank = P.shape[1]
    # X says how the rows of P depend on each other, so that its columns may be scaled, left out
    # where Q has zeros (padding), and reordered: zeros last, where they take no other's pivot.
    finite = jnp.all(jnp.isfinite(P))
    peaks = jnp.max(jnp.abs(P), axis=0, keepdims=True, initial=0)
    used = finite & (peaks > 0) & jnp.any(Q != 0, axis=0, keepdims=True)
    columns = jnp.where(used, P, 0) / jnp.where(used, peaks, 1)
    order, X = _eliminate(columns[:, jnp.argsort(~used[0], stable=True)])
    ours, others = jnp.argsort(order[:rank]), jnp.argsort(order[rank:])
    X = jnp.where(finite, X[others][:, ours], jnp.nan)
    pivots = order[:rank][ours]
    return pivots, X, _product(P[pivots], Q.T)


def _eliminate(columns: Array) -> tuple[Array, Array]:
    """An order of the rows, the pivots first, and X with ``others = X pivots``."""
    rank = columns.shape[1]
    lu, _, order = jax.lax.linalg.lu(columns)
    pivots, others = columns[order[:rank]], columns[order[rank:]]
    diagonal = jnp.abs(jnp.diagonal(lu))[None]
    solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=False)
    lower = jnp.where(diagonal > 0, lu, 0)
    undo = functools.partial(solve, lower[:rank], lower=True, unit_diagonal=True)
    X = undo(lower[rank:])
    # Refined once: without, the error grows with r, and with, as that of any sum of r terms. Where
    # a column depends on those before it, elimination leaves rounding, which is not divided by.
    # What is left of the others is then only nearly a combination of the pivot rows; the nearest
    # one is by orthogonal rows, where back substitution would amplify what the first columns miss.
    # Rows of X that this does no good stay as they are.
    rounding = 40 * float(jnp.finfo(lu.dtype).eps) * math.sqrt(rank)
    small = diagonal <= rounding * jnp.max(diagonal, initial=0)
    Q, R = jnp.linalg.qr(jnp.where(small, 0, jnp.triu(lu[:rank]).T))
    R = jnp.where(jnp.eye(rank, dtype=bool) & small, 1, R)
    left = others - _product(X, pivots)
    step = jnp.where(small, 0, solve(R, _product(left, Q), transpose_a=True))
    refined = X + undo(step)
    better = _largest(others - _product(refined, pivots)) < _largest(left)
    return order, jnp.where(better, refined, X)


def _largest(rows: Array) -> Array:
    return jnp.max(jnp.abs(rows), axis=1, keepdims=True, initial=0)


def _product(X: Array, Y: Array) -> Array:
    return jnp.matmul(X, Y, precision=jax.lax.Precision.HIGHEST)
