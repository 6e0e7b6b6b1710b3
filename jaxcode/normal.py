"""The normal form of a gradient in factors: which rows are the pivots, and what the others are.

``P Q^T`` of rank r is r of its rows and the others as combinations of them. Which combinations is a
matter of P alone: Gaussian elimination of its columns finds r rows on which the others depend with
small coefficients. The form is unique once the pivots are chosen, as long as the columns of P do
not depend on each other; where they do, the dependent ones are left out.
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
    in float32 or wider: the float32 error is below 3e-6 of the gradient up to r = 600. Where the
    terms of the product cancel it is up to ten times what the product in float32 has. In half
    precision X and the rows are rounded, and r such errors add up: expect ``sqrt(r) / 2`` of them.

    Replicas whose messages are mixed (m > 1) should compute alike: where columns of P nearly depend
    on each other, X magnifies a difference in rounding, and may differ in its pivots. Columns that
    depend on each other altogether (repeated examples, padding) do no harm.

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
    columns = _select(jnp.where(used, P, 0) / jnp.where(used, peaks, 1), used[0])
    order, X, apart = _eliminate(columns)
    order, X = jax.lax.cond(
        jnp.sum(apart) == jnp.sum(used), lambda *_: (order, X), _reduced, columns, order, X, apart
    )
    ours, others = jnp.argsort(order[:rank]), jnp.argsort(order[rank:])
    X = jnp.where(finite, X[others][:, ours], jnp.nan)
    pivots = order[:rank][ours]
    return pivots, X, _product(P[pivots], Q.T)


def _select(columns: Array, wanted: Array) -> Array:
    """The wanted columns, and after them zeros."""
    return jnp.where(wanted[None], columns, 0)[:, jnp.argsort(~wanted, stable=True)]


def _eliminate(columns: Array) -> tuple[Array, Array, Array]:
    """An order of the rows, the pivots first; X; and which columns were apart from those before."""
    rank = columns.shape[1]
    lu, _, order = jax.lax.linalg.lu(columns)
    pivots, others = columns[order[:rank]], columns[order[rank:]]
    diagonal = jnp.abs(jnp.diagonal(lu))
    apart = diagonal > _rounding(columns)
    solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=False)
    lower = jnp.where(diagonal[None] > 0, lu, 0)
    upper = jnp.where(jnp.eye(rank, dtype=bool) & ~apart[None], 1, lu[:rank])
    undo = functools.partial(solve, lower[:rank], lower=True, unit_diagonal=True)
    X = undo(lower[rank:])
    # Refined once: without, the error grows with r, and with, as that of any sum of r terms.
    return order, X + undo(solve(upper, others - _product(X, pivots))), apart


def _reduced(columns: Array, order: Array, X: Array, apart: Array) -> tuple[Array, Array]:
    """An order and X for columns that depend on each other, from those that are apart.

    For what elimination leaves of the others is rounding, and so would be their part of X: large,
    and another on a replica that rounds differently. Rarely, a column counts as dependent for a
    pivot that rounding chose; then X as it was is the better one.
    """
    rank = columns.shape[1]
    fewer, smaller, _ = _eliminate(_select(columns, apart))
    left = columns[fewer[rank:]] - _product(smaller, columns[fewer[:rank]])
    enough = jnp.max(jnp.abs(left), initial=0) <= 2 * _rounding(columns)
    return jnp.where(enough, fewer, order), jnp.where(enough, smaller, X)


def _rounding(columns: Array) -> float:
    """The most that elimination may leave of a dependent column, whose largest entry is 1."""
    return 4 * float(jnp.finfo(columns.dtype).eps) * math.sqrt(columns.shape[1])


def _product(X: Array, Y: Array) -> Array:
    return jnp.matmul(X, Y, precision=jax.lax.Precision.HIGHEST)
