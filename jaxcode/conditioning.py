"""How much decoding magnifies rounding: worst cases over the sets of workers that may be missing.

Sets are enumerated where they are few, and else sampled from a fixed seed together with the
cyclically contiguous ones, which are the worst of codes on a circle.
"""

import itertools
import math
import warnings
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from jaxcode.solve import EXACT, Kind

# Sets of workers are enumerated up to this many, and as many are sampled beyond it.
SETS = 100_000
# Of sets whose systems are large, fewer are sampled: about so many operations in all.
_WORK = 5e8
_CHUNK = 2**21  # numbers in a stack of systems: 16 MB
# Half the spacing of float32 at 1: what rounding a number costs, relative.
FLOAT32 = 2.0**-24
# A code that may lose more than this in float32 warns.
TOLERABLE = 1e-3


def worst_condition(kind: Kind, chosen: int) -> float:
    """The worst condition number of any `chosen` rows, short of what least squares takes for zero.

    Infinite where a set does not decode.
    """
    if kind.particular is None:
        return math.inf
    left, values, right, rank = kind.singular
    rows = left[:, :rank] * values[:rank]  # as conditioned as the matrix, in fewer columns
    target = kind.target @ right[:rank].T
    worst = 0.0
    for sets in _subsets(len(rows), chosen, chosen * rank * min(chosen, rank), SETS):
        systems = rows[sets]
        found = np.linalg.svd(systems, compute_uv=False)
        used = found > np.finfo(float).eps * max(chosen, kind.rows.shape[1]) * found[:, :1]
        deficient = used.sum(-1) < rank
        if deficient.any() and not _decode(systems[deficient], target):
            return math.inf
        worst = max(worst, (found[:, 0] / np.where(used, found, np.inf).min(-1)).max())
    return float(worst)


def _decode(systems: Float[np.ndarray, "sets chosen rank"], target: np.ndarray) -> bool:
    """Whether the target is in the row space of all of these."""
    _, values, basis = np.linalg.svd(systems, full_matrices=False)
    used = values > np.finfo(float).eps * max(systems.shape[1:]) * values[:, :1]
    basis = basis * used[..., None]
    residual = target - (target @ basis.mT) @ basis
    return bool(((residual**2).sum((-2, -1)) <= EXACT**2).all())


def worst_amplification(kind: Kind, missing: int, sets: int | None = None) -> float:
    """The most by which decoding magnifies relative rounding, with `missing` workers missing.

    Rounding adds an error to each message in proportion to its norm, of about `||B_i||` times a
    gradient's; decoding adds those up with the weights, and the sum of k gradients has `sqrt(k)`
    times a gradient's norm. So errors grow by `sqrt(sum_ij D_ji^2 ||B_i||^2 / (k m))`.
    """
    if kind.particular is None:
        return math.inf
    everybody, null = kind.particular
    norms = np.linalg.norm(kind.rows, axis=1)
    if missing == 0:
        return _magnified(everybody[None], norms, kind)
    if null.shape[1] < 1:
        return math.inf
    worst = 0.0
    for stragglers in _subsets(len(norms), missing, missing**3 + null.size, sets or SETS):
        systems, right = null[stragglers], everybody.T[stragglers]
        steps = _least_norm(systems, right)
        if not np.allclose(systems @ steps, right, rtol=0, atol=1e-6):
            return math.inf
        weights = everybody - steps.mT @ null.T
        np.put_along_axis(weights, stragglers[:, None], 0.0, axis=-1)
        worst = max(worst, _magnified(weights, norms, kind))
    return worst


def _least_norm(systems: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solutions of a stack of systems, of least norm where there are several."""
    if systems.shape[-2] == systems.shape[-1]:
        try:
            return np.linalg.solve(systems, right)
        except np.linalg.LinAlgError:
            pass
    return np.linalg.pinv(systems, rcond=1e-13) @ right


def _magnified(weights: np.ndarray, norms: np.ndarray, kind: Kind) -> float:
    num_parts, m = kind.matrix.shape[1:]
    return float(np.sqrt(((weights * norms) ** 2).sum((-2, -1)).max() / (num_parts * m)))


def _subsets(
    size: int, chosen: int, work: int, most: int
) -> Iterator[Int[np.ndarray, "sets chosen"]]:
    """All sets of `chosen` out of `size`, or the contiguous ones and a seeded sample; in chunks."""
    chunk = max(1, int(_CHUNK / max(work, 1)))
    if math.comb(size, chosen) <= most:
        every = itertools.combinations(range(size), chosen)
        while some := list(itertools.islice(every, chunk)):
            yield np.array(some)
        return
    contiguous = (np.arange(size)[:, None] + np.arange(chosen)) % size
    for start in range(0, size, chunk):
        yield contiguous[start : start + chunk]
    rng = np.random.default_rng(0)
    left = min(most, max(200, int(_WORK / work)))
    while left > 0:
        count = min(left, chunk, max(1, _CHUNK // size))
        yield np.argsort(rng.random((count, size)), axis=-1)[:, :chosen]
        left -= count


def warn_if_lossy(call: str, error: float, better: str) -> None:
    """Warn of a code whose worst pattern of stragglers loses more than 1e-3 in float32."""
    if error > TOLERABLE:
        warnings.warn(
            f"`{call}` makes a code that may lose {error:.0e} of the gradient in float32, for its "
            f"worst set of stragglers. {better}",
            stacklevel=3,
        )
