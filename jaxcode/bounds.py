"""How few numbers a worker could send, whatever the scheme: the lower bound and who meets it."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxcode.checks import integer
from jaxcode.code import Code

# All sets of partitions are looked at up to this k, in chunks of so many.
_ENUMERATED_PARTITIONS = 16
_CHUNK = 2**12
# Beyond that, sets are grown from so many partitions; all of them would take n k^2 operations.
_STARTS = 128
# Numbers are counted in float64.
_LARGEST = 2**53

Sets = tuple[Int[np.ndarray, " sets"], Int[np.ndarray, " sets"]]


def lower_bound(code: Code, shape: Any, rank: Any) -> float:
    """The numbers that some worker must send, whatever the scheme, with this placement and s.

    Let all gradients vanish but those of a set T of partitions, held by w(T) workers. Their sum is
    any matrix of rank `rho = min(|T| r, p, q)`, one of a set of dimension `rho (p + q - rho)`, and
    must come out of `w(T) - s` messages. So some worker sends at least
    `max_T rho (p + q - rho) / (w(T) - s)`.

    The maximum over all T is exact for block codes (the smallest groups), for cyclic placements
    (runs of partitions: no other set of a size is held by fewer workers), and up to 16 partitions
    (all sets). Beyond that the sets are grown greedily from the least replicated partitions, and
    the bound is true but perhaps not the best.

    Args:
        code: The code: its placement and s are used, and not its coefficients.
        shape: (p, q) of the parameter; or a list of such pairs, bounded together. A vector of
            length L is (L, 1).
        rank: r, the rank bound of *one* partition's gradient, the same for all partitions even
            where shares differ; None for full rank; or a list of them, one a shape.

    Returns:
        The bound, in numbers.

    Raises:
        ValueError: A shape or rank is not positive, or there are not as many of each.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(8, 1, num_fragments=2)
        >>> lower_bound(code, (784, 1024), 32)  # 32 (784 + 1024 - 32) / (4 - 1)
        18944.0
        >>> lower_bound(code, [(784, 1024), (1024, 1)], [32, None])
        19285.333333333332

    References:
        Ye and Abbe, "Communication-computation efficient gradient coding", 2018: the bound
        `p q / (d - s)` that this becomes at full rank.
    """
    shapes, ranks = _pairs(shape, rank)
    leaves = [_checked_leaf(pair, bound) for pair, bound in zip(shapes, ranks, strict=True)]
    return worst_set(fewest_workers(code), code.num_stragglers, leaves)


def optimal_regime(code: Code) -> str:
    """Where this code meets the lower bound, in one line.

    - Blocks with m = g - s, for the least group size g: normal form meets it at every rank, since
      one group's gradient alone needs `rho (p + q - rho) / (g - s)`, which is what is sent.
    - Any placement with m = d - s, for the least replication d: dense messages meet it at full
      rank (Ye and Abbe's optimum `p q / (d - s)`).
    - Fewer fragments than that meet it nowhere.

    Args:
        code: The code.

    Returns:
        The sentence that `jaxcode describe` prints.

    Example:
        >>> from jaxcode.codes import cyclic_mds, fractional_repetition
        >>> optimal_regime(fractional_repetition(8, 1))
        'optimal at every rank in normal form: blocks with m = group size - s'
        >>> optimal_regime(cyclic_mds(8, 2))
        'optimal at full rank only: m = replication - s, but ranks add over partitions'
    """
    if not code.is_decodable(np.ones(code.num_workers, bool)):
        return "no bound applies: not even all workers decode exactly"
    best = int(code.replication.min()) - code.num_stragglers
    if code.num_fragments < best:
        return f"nowhere optimal: up to {best} fragments would do, this code has fewer"
    if code.block is not None:
        return "optimal at every rank in normal form: blocks with m = group size - s"
    return "optimal at full rank only: m = replication - s, but ranks add over partitions"


def worst_set(sets: Sets, num_stragglers: int, leaves: Iterable[tuple[int, int, int]]) -> float:
    """The bound for leaves (p, q, r) together: the maximum over these sets."""
    size, workers = sets
    dimension = np.zeros(len(size))
    for p, q, r in leaves:
        # In floating point: the counts of large parameters overflow 64-bit integers.
        rho = np.minimum(size * float(min(r, p, q)), min(p, q))
        dimension += rho * (p + q - rho)
    return float((dimension / (workers - num_stragglers)).max())


def fewest_workers(code: Code) -> Sets:
    """Sizes |T| of sets of partitions, and the number w(T) of workers that hold any of each."""
    k = code.num_partitions
    if code.block is not None:  # the fewest workers for each |T| are those of the smallest groups
        return np.arange(1, k + 1), np.cumsum(np.sort(code.replication))
    held = np.zeros((code.num_workers, k), bool)  # and not the encoding matrix, 8 m times as large
    row, column = np.nonzero((code.coefficients != 0).any(-1))
    held[row, code.partitions[row, column]] = True
    if _is_cyclic(held):
        run = np.arange(1, k + 1)
        return run, np.minimum(k, run + held[0].sum() - 1)
    return _enumerated(held) if k <= _ENUMERATED_PARTITIONS else _grown(held)


def _is_cyclic(held: Bool[np.ndarray, "workers partitions"]) -> bool:
    """Whether the workers hold the runs of d partitions, one each, in any order."""
    if held.shape[0] != held.shape[1] or (held.sum(1) != held[0].sum()).any():
        return False
    if held.all():
        return True
    starts = held & ~np.roll(held, 1, axis=1)
    return bool((starts.sum(1) == 1).all() and (starts.sum(0) == 1).all())


def _enumerated(held: Bool[np.ndarray, "workers partitions"]) -> Sets:
    """All sets."""
    k = held.shape[1]
    holdings, workers = np.unique(held @ (1 << np.arange(k)), return_counts=True)
    subsets = np.arange(1, 2**k)
    meets = [
        ((subsets[start : start + _CHUNK, None] & holdings) != 0) @ workers
        for start in range(0, len(subsets), _CHUNK)
    ]
    return np.bitwise_count(subsets).astype(int), np.concatenate(meets)


def _grown(held: Bool[np.ndarray, "workers partitions"]) -> Sets:
    """Sets grown from a partition, each time by the one that brings the fewest new workers."""
    n, k = held.shape
    replication = held.sum(0)
    fewest = np.full(k + 1, n)
    for start in np.argsort(replication, kind="stable")[:_STARTS]:
        new = held[:, start]
        met, brings = new.copy(), (replication - held[new].sum(0)).astype(float)
        brings[start] = np.inf
        for size in range(1, k):
            fewest[size] = min(fewest[size], met.sum())
            following = brings.argmin()
            new = held[:, following] & ~met
            if met.all():
                break
            met |= new
            brings -= held[new].sum(0)
            brings[following] = np.inf
    # A part of a set is held by no more workers than the whole of it.
    return np.arange(1, k + 1), np.minimum.accumulate(fewest[::-1])[::-1][1:]


def _pairs(shape: Any, rank: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    single = isinstance(shape, list | tuple) and isinstance(
        next(iter(shape), None), numbers.Integral
    )
    shapes, ranks = ([shape], [rank]) if single else (shape, rank)
    listed = isinstance(shapes, list | tuple) and isinstance(ranks, list | tuple)
    if not listed or not shapes or len(shapes) != len(ranks):
        raise ValueError(
            f"`lower_bound` needs one rank (or None) for each shape; got shapes {shape!r} and "
            f"rank {rank!r}. Give (p, q) and a rank, or two lists of equal length."
        )
    return shapes, ranks


def _checked_leaf(shape: Any, rank: Any) -> tuple[int, int, int]:
    pair = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    if len(pair) != 2:
        raise ValueError(
            f"`lower_bound` needs two-dimensional shapes (p, q); got {shape!r}. Write a vector of "
            "length L as (L, 1), and reshape other leaves likewise."
        )
    cure = "Give (p, q)."
    p, q = (integer("lower_bound", "shape", size, 1, _LARGEST, cure) for size in pair)
    if rank is None:
        return p, q, min(p, q)
    return p, q, integer("lower_bound", "rank", rank, 1, None, "Use None for full rank.")
