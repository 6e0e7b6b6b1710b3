"""One component of a code: from the pattern of its survivors to decoding weights, once a pattern.

A component is a set of workers and the partitions that they alone hold, so components decode
independently. Those with one and the same coefficient matrix are one *kind* and share solutions:
a block code has two or so, whatever the number of its groups.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

# A component is decoded exactly when its squared error is at most this: a norm of 1e-9.
EXACT = 1e-18
# Solved survivor patterns kept for each kind.
CACHED_PATTERNS = 4096
# `worst_condition` enumerates up to this many sets of workers, and samples as many beyond it.
CONDITION_SETS = 20_000


class Solution(NamedTuple):
    """How one component decodes, or a stack of components with a leading axis."""

    weights: Float[np.ndarray, "*patterns fragments members"]
    shares: Float[np.ndarray, "*patterns parts"]  # how much of each partition is in the decoded sum
    error: Float[np.ndarray, "*patterns"]  # ||D B - [I_m ... I_m]||_F^2


class Kind:
    """The components with one coefficient matrix, and a bounded cache of their solutions.

    Args:
        members: (components, members) each component's workers.
        parts: (components, parts) each component's partitions.
        matrix: (members, parts, m) the encoding matrix of every one of the components.
    """

    def __init__(
        self,
        members: Int[np.ndarray, "components members"],
        parts: Int[np.ndarray, "components parts"],
        matrix: Float[np.ndarray, "members parts fragments"],
    ):
        self.members, self.parts, self.matrix = members, parts, matrix
        # An lru_cache of its own, so that the cache lives and dies with the code; it takes locks.
        self._solve = functools.lru_cache(CACHED_PATTERNS)(functools.partial(_solve, matrix))

    def solutions(
        self, survivors: Bool[np.ndarray, "*steps workers"]
    ) -> tuple[Int[np.ndarray, "*steps components"], Solution]:
        """The solution of every pattern that occurs, and which of them each component has."""
        size, num_parts, m = self.matrix.shape
        words = _packed(survivors[..., self.members])
        flat = words.reshape(-1, words.shape[-1])
        axis = None if flat.shape[1] == 1 else 0  # unique rows are found far faster as numbers
        patterns, which = np.unique(flat, axis=axis, return_inverse=True)
        solved = [self._solve(pattern.tobytes()) for pattern in patterns]
        stacked = Solution(
            np.array([x.weights for x in solved]).reshape(-1, m, size),
            np.array([x.shares for x in solved]).reshape(-1, num_parts),
            np.array([x.error for x in solved]),
        )
        return which.reshape(words.shape[:-1]), stacked

    def worst_condition(self, chosen: int) -> float:
        """The worst condition number over sets of `chosen` members; see `Code.worst_condition`."""
        sets = _subsets(len(self.matrix), chosen)
        chunk = max(1, 2**22 // (chosen * self.matrix[0].size))  # at most 32 MB a chunk
        starts = range(0, len(sets), chunk)
        return max(_condition(self.matrix, sets[start : start + chunk]) for start in starts)


def _packed(bits: Bool[np.ndarray, "*steps members"]) -> UInt64[np.ndarray, "*steps words"]:
    """64 survivors a word, in the order that `unpackbits` reads the words' bytes."""
    octets = np.packbits(bits, axis=-1)
    words = np.zeros((*bits.shape[:-1], -(-bits.shape[-1] // 64)), np.uint64)
    words.view(np.uint8)[..., : octets.shape[-1]] = octets
    return words


def _solve(matrix: Float[np.ndarray, "members parts fragments"], packed: bytes) -> Solution:
    """Minimum-norm least squares for the survivors whose bits are set."""
    size, num_parts, m = matrix.shape
    alive = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8), count=size))
    rows = matrix.reshape(size, -1)
    target = np.tile(np.eye(m), num_parts)
    weights = np.zeros((m, size))
    answers = alive[(rows[alive] == target).all(-1)] if m == 1 else alive[:0]
    if answers.size:
        weights[0, answers[0]] = 1  # one message is the answer: nothing to solve, nothing to round
    elif alive.size:
        weights[:, alive] = np.linalg.lstsq(rows[alive].T, target.T)[0].T
    decoded = weights @ rows
    shares = np.einsum("jpj->p", decoded.reshape(m, num_parts, m)) / m
    return Solution(weights, shares, ((decoded - target) ** 2).sum())


def _subsets(size: int, chosen: int) -> Int[np.ndarray, "sets chosen"]:
    """All sets of `chosen` out of `size`, or a seeded sample with the contiguous ones."""
    if math.comb(size, chosen) <= CONDITION_SETS:
        return np.array(list(itertools.combinations(range(size), chosen)))
    rng = np.random.default_rng(0)
    sample = [rng.choice(size, chosen, replace=False) for _ in range(CONDITION_SETS)]
    contiguous = (np.arange(size)[:, None] + np.arange(chosen)) % size
    return np.concatenate([contiguous, sample])


def _condition(
    matrix: Float[np.ndarray, "members parts fragments"], sets: Int[np.ndarray, "sets chosen"]
) -> float:
    """The worst condition number over these sets of rows; infinite where one does not decode."""
    _, num_parts, m = matrix.shape
    rows = matrix[sets].reshape(*sets.shape, -1)
    _, values, basis = np.linalg.svd(rows, full_matrices=False)
    used = values > np.finfo(float).eps * max(rows.shape[1:]) * values[:, :1]  # as lstsq has it
    basis = basis * used[..., None]
    target = np.tile(np.eye(m), num_parts)
    residual = target - (target @ basis.mT) @ basis
    if ((residual**2).sum((-2, -1)) > EXACT).any():
        return math.inf
    return float((values[:, 0] / np.where(used, values, np.inf).min(-1)).max())
