"""The codes: one constructor function each, named after the code.

| code | exact with s missing | computes | sends |
| --- | --- | --- | --- |
| `uncoded` | s = 0 | 1 partition of n | a gradient |
| `fractional_repetition` | any s and m, any n of at least s + m | 1 of n // (s + m) | 1/m of one |
"""

import numpy as np
from jaxtyping import Float

from jaxcode.checks import integer
from jaxcode.code import Code

__all__ = ["Code", "fractional_repetition", "uncoded"]


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
    call, cure = "fractional_repetition", "Use more workers, or tolerate fewer stragglers."
    n = integer(call, "num_workers", num_workers, 1, None, "Count the workers.")
    m = integer(call, "num_fragments", num_fragments, 1, n, "Use fewer fragments.")
    s = integer(call, "num_stragglers", num_stragglers, 0, n - m, cure)
    k = n // (s + m)
    small, larger = divmod(n, k)  # the first `larger` groups have one worker more
    frames = [(small + 1, larger), (small, k - larger)]
    coefficients = [np.tile(_harmonic_frame(size, m), (count, 1)) for size, count in frames]
    block = np.repeat(np.arange(k), np.repeat(*np.transpose(frames)))
    return Code._from_rows(block[:, None], np.concatenate(coefficients)[:, None], k, s, call)


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
