"""One component of a code: from the pattern of its survivors to decoding weights, once a pattern.

A component is a set of workers and the partitions that they alone hold, so components decode
independently. Those with one and the same coefficient matrix are one *kind* and share solutions:
a block code has two or so, whatever the number of its groups.

Decoding is a particular solution minus the left null space. With nobody missing, D0 decodes, and
`N^T B = 0` for an orthonormal N. For stragglers S, `D = D0 - lambda N^T` is zero at S where
`N_S lambda^T = D0_S^T`: a system of |S| equations however many workers there are, and at the least
norm of lambda the D of least norm.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

# A component is decoded exactly when its error is at most EXACT; or at most ROUNDING times what its
# terms add up to, for weights of 1e6 cannot do better in float64, but never more than LOOSEST.
EXACT, ROUNDING, LOOSEST = 1e-9, 1e-13, 1e-6
# Singular values below this share of the largest count as zero.
RANK = 1e-10
# Solved survivor patterns kept for each kind.
CACHED_PATTERNS = 4096


class Solution(NamedTuple):
    """How one component decodes, or a stack of components with a leading axis."""

    weights: Float[np.ndarray, "*patterns fragments members"]
    shares: Float[np.ndarray, "*patterns parts"]  # how much of each partition is in the decoded sum
    error: Float[np.ndarray, "*patterns"]  # ||D B - [I_m ... I_m]||_F^2
    exact: Bool[np.ndarray, "*patterns"]


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
        self.rows = matrix.reshape(len(matrix), -1)
        self.target = np.tile(np.eye(matrix.shape[2]), matrix.shape[1])
        # An lru_cache of its own, so that the cache lives and dies with the code; it takes locks.
        self._solve = functools.lru_cache(CACHED_PATTERNS)(self._solved)

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
            np.array([x.exact for x in solved], bool),
        )
        return which.reshape(words.shape[:-1]), stacked

    @functools.cached_property
    def singular(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """U (members, members), the singular values and V^T of the rows, and their rank."""
        short = len(self.rows) - self.rows.shape[1]
        rows = np.pad(self.rows, ((0, 0), (0, max(0, short))))
        left, values, right = np.linalg.svd(rows, full_matrices=False)
        return left, values, right[:, : self.rows.shape[1]], int((values > RANK * values[0]).sum())

    @functools.cached_property
    def particular(self) -> tuple[np.ndarray, np.ndarray] | None:
        """D0 (m, members) and N (members, nullity), or None where not even all decode exactly."""
        left, values, right, rank = self.singular
        weights = (self.target @ right[:rank].T / values[:rank]) @ left[:, :rank].T
        return (weights, left[:, rank:]) if self._judged(weights).exact else None

    def _judged(self, weights: Float[np.ndarray, "fragments members"]) -> Solution:
        num_parts, m = self.matrix.shape[1:]
        decoded = weights @ self.rows
        shares = np.einsum("jpj->p", decoded.reshape(m, num_parts, m)) / m
        error = ((decoded - self.target) ** 2).sum()
        terms = float(np.linalg.norm(weights) * np.linalg.norm(self.rows))
        allowed = min(max(EXACT, ROUNDING * terms), LOOSEST)
        return Solution(weights, shares, error, error <= allowed**2)

    def _solved(self, packed: bytes) -> Solution:
        """Minimum-norm least squares for the survivors whose bits are set."""
        size, _, m = self.matrix.shape
        arrived = np.unpackbits(np.frombuffer(packed, np.uint8), count=size).astype(bool)
        alive, missing = np.flatnonzero(arrived), np.flatnonzero(~arrived)
        weights = np.zeros((m, size))
        answers = alive[(self.rows[alive] == self.target).all(-1)] if m == 1 else alive[:0]
        if answers.size:
            weights[0, answers[0]] = 1  # one message is the answer: nothing to solve or to round
            return self._judged(weights)
        if alive.size and self.particular is not None:
            everybody, null = self.particular
            steps = np.linalg.lstsq(null[missing], everybody[:, missing].T)[0]
            solved = np.where(arrived, everybody - steps.T @ null.T, 0.0)
            if (judged := self._judged(solved)).exact:
                return judged
        if alive.size:
            weights[:, alive] = np.linalg.lstsq(self.rows[alive].T, self.target.T)[0].T
        return self._judged(weights)


def groups_by_size(
    block: Int[np.ndarray, " workers"],
) -> list[tuple[Int[np.ndarray, " groups"], Int[np.ndarray, "groups members"]]]:
    """For each size of group, the groups (partitions) of that size and their workers.

    Example:
        >>> [(parts.tolist(), members.tolist()) for parts, members in groups_by_size(
        ...     np.array([1, 0, 1, 0, 1]))]
        [([0], [[1, 3]]), ([1], [[0, 2, 4]])]
    """
    by_group = np.argsort(block, kind="stable")
    sizes = np.bincount(block)
    starts = np.cumsum(sizes) - sizes
    found = []
    for size in np.unique(sizes):
        parts = np.flatnonzero(sizes == size)
        found.append((parts, by_group[starts[parts][:, None] + np.arange(size)]))
    return found


def kinds_of_groups(
    block: Int[np.ndarray, " workers"], coefficients: Float[np.ndarray, "workers fragments"]
) -> list[Kind]:
    """The groups of a block code, those of equal coefficients together."""
    kinds = []
    for parts, members in groups_by_size(block):
        flat = coefficients[members].reshape(len(parts), -1)
        matrices, which = np.unique(flat, axis=0, return_inverse=True)
        for index, matrix in enumerate(matrices):
            same = which.reshape(-1) == index
            kinds.append(
                Kind(members[same], parts[same, None], matrix.reshape(members.shape[1], 1, -1))
            )
    return kinds


def least_squares_weights(
    kinds: list[Kind], survivors: Bool[np.ndarray, "*steps workers"]
) -> Float[np.ndarray, "*steps fragments workers"]:
    """Minimum-norm least-squares weights of a code of these components."""
    m = kinds[0].matrix.shape[2]
    weights = np.zeros((*survivors.shape[:-1], m, survivors.shape[-1]))
    for kind in kinds:
        which, solved = kind.solutions(survivors)
        weights[..., kind.members] = np.moveaxis(solved.weights[which], -3, -2)
    return weights


def mean_weights(
    kinds: list[Kind],
    survivors: Bool[np.ndarray, "*steps workers"],
    sizes: Float[np.ndarray, " partitions"],
    *,
    apart: bool,
) -> Float[np.ndarray, "*steps fragments workers"]:
    """Weights of the mean over the examples recovered; `apart`: partition by partition."""
    weights = least_squares_weights(kinds, survivors)
    lost = np.zeros(survivors.shape[:-1])
    for kind in kinds:
        which, solved = kind.solutions(survivors)
        exact = solved.exact[:, None]
        if apart:
            weights[..., kind.members] *= exact[which][..., None, :, :]
        shares = np.where(exact, 1.0, 0.0 if apart else solved.shares)
        lost += ((1 - shares)[which] * sizes[kind.parts]).sum((-2, -1))
    kept = sizes.sum() - lost  # rather than a sum of its own: all of it, exactly, if none lost
    some = kept > 1e-12 * sizes.sum()
    scale = np.divide(sizes.sum(), kept, out=np.zeros_like(kept), where=some)
    return weights * scale[..., None, None]


def _packed(bits: Bool[np.ndarray, "*steps members"]) -> UInt64[np.ndarray, "*steps words"]:
    """64 survivors a word, in the order that `unpackbits` reads the words' bytes."""
    octets = np.packbits(bits, axis=-1)
    words = np.zeros((*bits.shape[:-1], -(-bits.shape[-1] // 64)), np.uint64)
    words.view(np.uint8)[..., : octets.shape[-1]] = octets
    return words
