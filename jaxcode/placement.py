"""Codes with fragments for placements that are not blocks: Ye and Abbe's, and any placement at all.

V (n - s, n) has independent columns, any n - s of them. Partition i's B_i = [X_i | I_m] is chosen
so that `B_i V` vanishes at the workers that do not hold it; worker w sends the combination with
coefficients `(B_i V)[:, w]`. The messages are V's columns' products with one vector whose last m
entries are the sum's fragments, so any n - s workers give it back, and messages are 1/m as long.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxcode.checks import as_array, code_sizes, integer
from jaxcode.code import Code
from jaxcode.conditioning import TOLERABLE, warn_if_lossy

# Draws are compared on up to this many sets of stragglers; the chosen one is measured on all.
_COMPARED = 5_000


def polynomial(
    num_workers: int,
    num_stragglers: int,
    *,
    num_fragments: int = 1,
    allow_ill_conditioned: bool = False,
) -> Code:
    """Ye and Abbe's recursive polynomial code: load d = s + m, messages of 1/m.

    With nodes `theta_w = +-(1 + i/2)` and 0, partition i has the polynomials
    `p_1(x) = prod (x - theta_w)` over the n - d workers w that do not hold it, and
    `p_{u+1}(x) = x p_u(x) - c p_1(x)` with c such that the coefficients of `x^(n-d), ...,
    x^(n-d+m-1)` in p_1, ..., p_m are an identity. Worker w sends the combination of fragments with
    coefficients `p_u(theta_w)`, here scaled to norm 1. Sending less is impossible for gradients
    that are arbitrary vectors (their Theorem 1): d >= s + m.

    Choose it as the baseline of the literature, with n up to 20 and m = 2 or 3. Its Vandermonde
    systems lose a digit with every other worker; `fractional_repetition` computes and sends as
    much without that.

    Args:
        num_workers: n.
        num_stragglers: s.
        num_fragments: m, with s + m <= n.
        allow_ill_conditioned: whether to make a code that may lose more than 1e-3 in float32.

    Returns:
        The [n, n, s, m] code of load s + m.

    Raises:
        ValueError: An argument is out of range, or the code would lose more than 1e-3 in float32.

    Example:
        >>> code = polynomial(8, 2, num_fragments=2)
        >>> code, code.load
        (<Code polynomial [n=8, k=8, s=2, m=2]>, 4)
        >>> polynomial(20, 4, num_fragments=4)
        Traceback (most recent call last):
        ValueError: `polynomial` needs sizes fit for float32; got [n=20, s=4, m=4], which may ...

    References:
        Ye and Abbe, "Communication-computation efficient gradient coding", 2018, section III.
    """
    call = "polynomial"
    n, s, m = code_sizes(call, num_workers, num_stragglers, num_fragments)
    code = Code(_unit_rows(_polynomial_values(n, s + m, m)), s, call)
    error = code.float32_error
    better = "Use fractional_repetition, which computes and sends as much"
    if error > TOLERABLE and not allow_ill_conditioned:
        raise ValueError(
            f"`polynomial` needs sizes fit for float32; got [n={n}, s={s}, m={m}], which may lose "
            f"{error:.0e} of the gradient. {better}, or pass allow_ill_conditioned=True."
        )
    warn_if_lossy(call, error, f"{better}.")
    return code


def _polynomial_values(n: int, d: int, m: int) -> Float[np.ndarray, "workers partitions fragments"]:
    count = np.arange(n - n % 2)
    nodes = (1 + count // 2 / 2) * np.where(count % 2, -1.0, 1.0)
    nodes = np.concatenate([np.zeros(n % 2), nodes])
    B = np.zeros((n, n, m))
    for i in range(n):
        holders = (i + np.arange(n - d + 1, n + 1)) % n
        absent = (i + np.arange(1, n - d + 1)) % n
        first = np.atleast_1d(np.poly(nodes[absent]))  # coefficients, the highest power first
        values = np.prod(nodes[holders, None] - nodes[absent], axis=1)  # better than evaluating
        p, at_holders = first, values
        for u in range(m):
            B[holders, i, u] = at_holders
            # the coefficient of x^(n-d-1) in p_u, which has degree n - d + u
            c = p[u + 1] if n > d else 0.0
            at_holders = nodes[holders] * at_holders - c * values
            p = np.append(p, 0.0)
            p[-len(first) :] -= c * first
    return B


def general_placement(
    assignment: Shaped[Any, "workers partitions"] | Sequence[Sequence[int]],
    num_stragglers: int,
    *,
    num_fragments: int = 1,
    seed: int = 0,
    num_draws: int = 5,
    shares: Shaped[Any, " partitions"] | list[Any] | None = None,
) -> Code:
    """A code for a placement that is given, with uneven replication if need be.

    V is Gaussian with orthonormal rows. For partition i with absent workers N_i,
    `X_i = -V_low[:, N_i] V_high[:, N_i]^+`, of least norm where partitions are held more than
    s + m times. This is Ye and Abbe's scheme at any V, and reaches Jahani-Nezhad and Maddah-Ali's
    load for arbitrary placements, `1 / (r - s)` with r the least replication, at m = r - s. The
    draw with the mildest worst set of stragglers is kept.

    Choose it where data cannot be moved. If you may place it, `fractional_repetition` is exact to
    float32's last digit, where this loses 1e-5 to 1e-3.

    Args:
        assignment: (n, k) bool, which worker holds which partition; or a list of the partitions of
            each worker.
        num_stragglers: s.
        num_fragments: m; every partition must be held by s + m workers or more.
        seed: of the draws of V.
        num_draws: how many to choose from. Few: a worse code. Many: slower to construct.
        shares: (k,) what part of the batch each partition is, by default equal.

    Returns:
        The [n, k, s, m] code.

    Raises:
        ValueError: The placement does not allow s and m, or is malformed.

    Warns:
        UserWarning: The worst set of stragglers loses more than 1e-3 in float32.

    Example:
        >>> code = general_placement([[0, 1], [0, 1, 2], [0, 2], [1, 2]], 1, num_fragments=2)
        >>> code
        <Code general_placement [n=4, k=3, s=1, m=2]>
        >>> code.replication.tolist()
        [3, 3, 3]

    References:
        Ye and Abbe, 2018, section IV. Jahani-Nezhad and Maddah-Ali, "Optimal
        communication-computation trade-off in heterogeneous gradient coding", 2021.
    """
    call = "general_placement"
    held = _held(call, assignment)
    n, s, m = code_sizes(call, len(held), num_stragglers, num_fragments)
    Code(held, 0)  # every worker holds a partition, and every partition is held
    if held.sum(0).min() < s + m:
        raise ValueError(
            f"`{call}` needs every partition on at least num_stragglers + num_fragments = {s + m} "
            f"workers; got partition {held.sum(0).argmin()} on {held.sum(0).min()}. Place it on "
            "more workers, or tolerate or cut less."
        )
    seed = integer(call, "seed", seed, 0, None, "Give an integer.")
    draws = integer(call, "num_draws", num_draws, 1, None, "Draw once or more.")
    rng = np.random.default_rng(seed)
    codes = [
        Code(_unit_rows(_placed(rng, held, s, m)), s, call, shares=shares) for _ in range(draws)
    ]
    code = min(codes, key=lambda code: code._amplification(_COMPARED))
    warn_if_lossy(
        call,
        code.float32_error,
        "Place data in blocks and use fractional_repetition, or draw more.",
    )
    return code


def _placed(rng: np.random.Generator, held: np.ndarray, s: int, m: int) -> np.ndarray:
    n, k = held.shape
    V = np.linalg.qr(rng.normal(size=(n, n - s)))[0].T
    high, low = V[: n - s - m], V[n - s - m :]
    B = np.zeros((n, k, m))
    for i in range(k):
        absent = ~held[:, i]
        X = -np.linalg.lstsq(high[:, absent].T, low[:, absent].T)[0].T if absent.any() else 0.0
        B[:, i] = (X @ high + low).T if absent.any() else low.T
        B[absent, i] = 0
    return B


def _unit_rows(B: np.ndarray) -> np.ndarray:
    """Messages scaled to a gradient's size: nothing is lost, and half types overflow less."""
    return B / np.linalg.norm(B, axis=(1, 2), keepdims=True)


def _held(call: str, assignment: Any) -> Bool[np.ndarray, "workers partitions"]:
    array = as_array(assignment)
    if array.dtype == bool and array.ndim == 2 and array.size:
        return array
    try:
        rows = [np.array(list(row), dtype=int) for row in assignment]
        same = all(
            (a == b and not isinstance(b, bool | np.bool_))
            for row, given in zip(rows, assignment, strict=True)
            for a, b in zip(row.tolist(), given, strict=True)
        )
        flat = np.concatenate(rows)
        fits = same and flat.size and flat.min() >= 0 and all(len(set(r)) == len(r) for r in rows)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        got = " ".join(repr(assignment).split())
        raise ValueError(
            f"`{call}` needs assignment to be (workers, partitions) bool, or one list of distinct "
            f"partitions, counted from 0, for each worker; got {got[:60]}. Write [[0, 1], ...]."
        )
    held = np.zeros((len(rows), flat.max() + 1), bool)
    for worker, row in zip(held, rows, strict=True):
        worker[row] = True
    return held
