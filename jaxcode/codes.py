"""The codes: one constructor function each, named after the code.

| code | exact with s missing | computes | sends |
| --- | --- | --- | --- |
| `uncoded` | s = 0 | 1 partition of n | a gradient |
| `fractional_repetition` | any s and m, any n of at least s + m | 1 of n // (s + m) | 1/m of one |
| `heterogeneous` | the same, for workers of unequal speeds | by speed | 1/m of one |
| `cyclic_repetition` | any s < n | s + 1 of n | a gradient |
| `cyclic_mds` | any s < n, well conditioned for small ones | s + 1 of n | a gradient |
| `polynomial` | s + m <= n, for small n | s + m of n | 1/m of one |
| `general_placement` | any placement of s + m copies | as placed | 1/m of one |
| `bernoulli`, `expander`, `graph_code` | s = 0, approximate beyond | d of n | a gradient |

Blocks (the first three) are the ones to train with: well conditioned at every size, decoded group
by group, and alone in taking gradients in factors. The others are here to compare, and for
placements that are given.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from jaxcode.approximate import bernoulli, expander, graph_code
from jaxcode.checks import code_sizes, fractions, integer
from jaxcode.code import Code
from jaxcode.cyclic import cyclic_mds, cyclic_repetition
from jaxcode.placement import general_placement, polynomial

__all__ = [
    "Code",
    "bernoulli",
    "cyclic_mds",
    "cyclic_repetition",
    "expander",
    "fractional_repetition",
    "general_placement",
    "graph_code",
    "heterogeneous",
    "polynomial",
    "uncoded",
]


def uncoded(num_workers: int) -> Code:
    """No redundancy: one partition a worker, every one of them needed.

    Choose it where workers are merely steadily a little slow, or where computation dominates: a
    code that tolerates s stragglers computes everything at least s + 1 times.

    Args:
        num_workers: n.

    Returns:
        The [n, n, 0, 1] code.

    Raises:
        ValueError: `num_workers` is not a positive integer.

    Example:
        >>> uncoded(3)
        <Code uncoded [n=3, k=3, s=0, m=1]>
    """
    n = integer("uncoded", "num_workers", num_workers, 1, None, "Count the workers.")
    return Code._from_rows(np.arange(n)[:, None], np.ones((n, 1, 1)), n, 0, "uncoded")


def fractional_repetition(num_workers: int, num_stragglers: int, *, num_fragments: int = 1) -> Code:
    """Blocks: n // (s + m) groups of workers, one partition a group, an MDS code in each.

    Every worker of a group computes the group's partition, cuts it in m fragments and sends one
    combination of them; any m members give it back. Group sizes differ by at most one, so every n
    serves. With one fragment this is plain repetition: the first survivor of each group is taken.

    This is the code to start with. More stragglers: s + m times the computation. More fragments:
    shorter messages, more computation, and a worse condition (2.4 for groups of 4 and m = 2, but
    120 for 12 and 6).

    Args:
        num_workers: n, at least s + m.
        num_stragglers: s, how many workers may be missing, any of them.
        num_fragments: m, a message is 1/m of a gradient.

    Returns:
        The [n, n // (s + m), s, m] block code.

    Raises:
        ValueError: No such code exists.

    Example:
        >>> code = fractional_repetition(num_workers=8, num_stragglers=1, num_fragments=2)
        >>> code
        <Code fractional_repetition [n=8, k=2, s=1, m=2]>
        >>> code.block.tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]

    References:
        Tandon et al., "Gradient coding", 2017 (m = 1). Kadhe, Koyluoglu and Ramchandran,
        "Communication-efficient gradient coding for straggler mitigation in distributed learning",
        2020 (groups with fragments).
    """
    call = "fractional_repetition"
    n, s, m = code_sizes(call, num_workers, num_stragglers, num_fragments)
    k = n // (s + m)
    small, larger = divmod(n, k)  # the first `larger` groups have one worker more
    sizes = np.repeat([small + 1, small], [larger, k - larger])
    return Code._from_rows(np.repeat(np.arange(k), sizes)[:, None], _frames(sizes, m), k, s, call)


def heterogeneous(
    speeds: Shaped[Any, " workers"] | list[Any], num_stragglers: int, *, num_fragments: int = 1
) -> Code:
    """Blocks for workers of unequal speeds: alike work together, and fast groups get more data.

    Workers are sorted by speed and cut in groups of at least s + m; a group's share of the batch is
    in proportion to its slowest member, so all groups take equally long, and each worker does where
    the speeds in its group are equal. The cuts are those of the least time: with shares
    `min speed of g / sum of these`, a step takes `1 / (sum over groups of their least speed)`,
    which dynamic programming minimises. Every group is an MDS code, as in `fractional_repetition`,
    so any s workers may be missing.

    Choose it where some workers are *steadily* slower. Speeds that are measured too coarsely cost
    little: 10 % off is a step 10 % longer.

    Args:
        speeds: (n,) how fast the workers are, in any unit: examples per second, or ratios.
        num_stragglers: s, how many workers may be missing, any of them.
        num_fragments: m, a message is 1/m of a gradient.

    Returns:
        The block code; its `shares` follow the speeds, and `assign` deals the batch out so.

    Raises:
        ValueError: A speed is not a positive number, or no such code exists.

    Example:
        >>> code = heterogeneous([1, 3, 1, 3], num_stragglers=1)
        >>> code.block.tolist(), code.shares.tolist()
        ([1, 0, 1, 0], [0.75, 0.25])
        >>> (code.computation / [1, 3, 1, 3]).tolist()  # equal times
        [0.25, 0.25, 0.25, 0.25]

    References:
        Wang et al., "Heterogeneity-aware gradient coding for straggler tolerance", 2019, has the
        idea for sum codes.
    """
    call = "heterogeneous"
    n = integer(call, "the number of speeds", np.size(speeds), 1, None, "Give one a worker.")
    speeds = fractions(call, "speeds", speeds, n)
    _, s, m = code_sizes(call, n, num_stragglers, num_fragments)
    order = np.argsort(-speeds, kind="stable")
    sizes = _groups_of_like_speed(speeds[order], s + m)
    slowest = speeds[order][np.cumsum(sizes) - 1]
    block, coefficients = np.empty(n, int), np.empty((n, 1, m))
    block[order] = np.repeat(np.arange(len(sizes)), sizes)
    coefficients[order] = _frames(sizes, m)
    shares = slowest / slowest.sum()
    return Code._from_rows(block[:, None], coefficients, len(sizes), s, call, shares)


def _groups_of_like_speed(speeds: Float[np.ndarray, " workers"], least: int) -> np.ndarray:
    """Sizes, at least `least`, of consecutive groups with the largest sum of their last speeds.

    Speeds are in falling order. A group of `2 least` or more could be cut in two for a larger sum.
    """
    n = len(speeds)
    best = np.full(n + 1, -np.inf)
    best[0] = 0.0
    last = np.zeros(n + 1, int)
    for end in range(least, n + 1):
        sizes = np.arange(least, min(2 * least, end + 1))
        before = best[end - sizes]
        last[end] = sizes[before.argmax()]
        best[end] = before.max() + speeds[end - 1]
    chosen = []
    while n:
        chosen.append(last[n])
        n -= last[n]
    return np.array(chosen[::-1])


def _frames(sizes: np.ndarray, num_fragments: int) -> Float[np.ndarray, "workers 1 fragments"]:
    """The harmonic frames of consecutive groups of these sizes."""
    frames = {size: _harmonic_frame(size, num_fragments) for size in np.unique(sizes).tolist()}
    return np.concatenate([frames[size] for size in sizes.tolist()])[:, None]


def _harmonic_frame(size: int, num_fragments: int) -> Float[np.ndarray, "members fragments"]:
    """The real harmonic frame: row i holds `cos, sin` of `frequency * 2 pi i / size`.

    Frequencies are 1/2, 3/2, ... for an even number of columns, and 1, 2, ... with a constant for
    an odd one. Rows have norm one; any `num_fragments` of them are independent, and better
    conditioned than those of random, Cauchy or Vandermonde matrices.
    """
    constant = num_fragments % 2
    frequency = np.arange(1, num_fragments // 2 + 1) - (0.0 if constant else 0.5)
    angle = 2 * np.pi * np.arange(size)[:, None] * frequency / size
    waves = np.sqrt(2 / num_fragments) * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    ones = np.full((size, constant), np.sqrt(1 / num_fragments))  # exactly 1 for one fragment
    return np.concatenate([ones, waves.reshape(size, -1)], axis=1)
