"""A gradient code: who computes what, what each worker sends, and how answers become the sum.

A code is a small float64 array on the host. Worker i holds a few partitions of the batch and sends
one linear combination of their gradients' fragments; from the workers that answered, the decoding
weights give the sum back. Both are linear maps, so everything here is plain NumPy and touches no
device. A survivor is a worker whose message arrived in time (True); a straggler is one whose
message did not.

A block code is one in which each worker holds a single partition. Its groups decode independently
of each other, so it is stored, solved and cached per group: ten thousand workers are no more than a
handful of small systems.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxcode.checks import arrived, encoding, fractions, integer, weights_of
from jaxcode.conditioning import FLOAT32, worst_amplification, worst_condition
from jaxcode.solve import Kind, kinds_of_groups, least_squares_weights, mean_weights


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Code:
    """A linear gradient code: B (n, k, m), kept as the few entries that are not zero.

    Worker i sends `message_i = sum_{p,j} B[i,p,j] fragment_j(g_p)`, 1/m as long as a gradient g_p.
    Weights D with `D B = [I_m ... I_m]` decode: `fragment_j(sum_p g_p) = sum_i D[j,i] message_i`.
    Use the constructors (`uncoded`, `fractional_repetition`) where they fit, and this class for a
    code of your own.

    Args:
        encoding_matrix: B, finite, of shape (n, k, m), or (n, k) for one fragment. Each worker must
            hold a partition, and each partition be held by at least s + m workers: a necessary
            condition. Whether it suffices is what `worst_condition` tells.
        num_stragglers: s, how many workers may be missing, whichever they are, with the decoded sum
            still exact.
        name: What to call the code in tables and figures.
        shares: (k,) What part of the batch each partition is, by default 1/k: positive numbers,
            brought to the sum 1.

    Attributes:
        partitions: (n, d) the partitions each worker holds. A row with fewer than d is filled with
            its own first partition, at coefficient 0.
        coefficients: (n, d, m) float64, the entries of B for those partitions.
        num_partitions: k.
        num_stragglers: s.
        name: As given.
        shares: (k,) float64, adding up to 1.

    Raises:
        ValueError: The matrix is malformed, or holds a partition on too few workers.

    Example:
        >>> code = Code([[1, 1, 0], [0, 1, -1], [1, 0, 2]], num_stragglers=0, name="mine")
        >>> code
        <Code mine [n=3, k=3, s=0, m=1]>
        >>> code.partitions.tolist()
        [[0, 1], [1, 2], [0, 2]]
    """

    partitions: Int[np.ndarray, "workers load"]
    coefficients: Float[np.ndarray, "workers load fragments"]
    num_partitions: int
    num_stragglers: int
    name: str
    shares: Float[np.ndarray, " partitions"]

    def __init__(
        self,
        encoding_matrix: Any,
        num_stragglers: int,
        name: str = "code",
        *,
        shares: Shaped[Any, " partitions"] | list[Any] | None = None,
    ):
        matrix = encoding(encoding_matrix)
        n, k, m = matrix.shape
        cure = "Give the number the code was made for."
        s = integer("Code", "num_stragglers", num_stragglers, 0, max(0, n - m), cure)
        held = (matrix != 0).any(-1)
        if not held.any(1).all():
            raise ValueError(
                f"`Code` needs every worker to hold a partition; got a zero row for worker "
                f"{np.argmin(held.any(1))}. Leave that worker out."
            )
        if held.sum(0).min() < s + m:
            raise ValueError(
                f"`Code` needs every partition held by at least num_stragglers + num_fragments = "
                f"{s + m} workers; got partition {held.sum(0).argmin()} held by "
                f"{held.sum(0).min()}. Repeat it on more workers, or lower num_stragglers."
            )
        partitions = np.argsort(~held, axis=1, kind="stable")[:, : held.sum(1).max()]
        rows = np.arange(n)[:, None]
        padding = ~held[rows, partitions]
        coefficients = np.where(padding[..., None], 0.0, matrix[rows, partitions])
        partitions = np.where(padding, partitions[:, :1], partitions)
        shares = np.ones(k) if shares is None else fractions("Code", "shares", shares, k)
        self._store(partitions, coefficients, k, s, name, shares / shares.sum())

    @classmethod
    def _from_rows(
        cls,
        partitions: Int[np.ndarray, "workers load"],
        coefficients: Float[np.ndarray, "workers load fragments"],
        num_partitions: int,
        num_stragglers: int,
        name: str,
        shares: Float[np.ndarray, " partitions"] | None = None,
    ) -> "Code":
        """The code of these rows, which are trusted; the dense matrix is never made."""
        code = cls.__new__(cls)
        if shares is None:
            shares = np.full(num_partitions, 1 / num_partitions)
        code._store(partitions, coefficients, num_partitions, num_stragglers, name, shares)
        return code

    def _store(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields alone: solved patterns stay behind, and arrays are read-only again on arrival.
        return _from_fields, tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def __repr__(self) -> str:
        n, k, s, m = self.num_workers, self.num_partitions, self.num_stragglers, self.num_fragments
        return f"<Code {self.name} [n={n}, k={k}, s={s}, m={m}]>"

    @property
    def num_workers(self) -> int:
        """The number of workers, n."""
        return self.coefficients.shape[0]

    @property
    def load(self) -> int:
        """The most partitions that one worker computes, d: the computational load."""
        return self.coefficients.shape[1]

    @property
    def num_fragments(self) -> int:
        """The number of fragments, m: a message has 1/m of the length of a gradient."""
        return self.coefficients.shape[2]

    @functools.cached_property
    def computation(self) -> Float[np.ndarray, " workers"]:
        """The fraction of the batch that each worker computes: d / k where shares are equal.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> fractional_repetition(4, 1).computation.tolist()
            [0.5, 0.5, 0.5, 0.5]
        """
        return np.where(self._holds, self.shares[self.partitions], 0.0).sum(1)

    @functools.cached_property
    def replication(self) -> Int[np.ndarray, " partitions"]:
        """The number of workers that hold each partition; at least s + m.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> fractional_repetition(5, 1).replication.tolist()
            [3, 2]
        """
        return np.bincount(self.partitions[self._holds], minlength=self.num_partitions)

    @functools.cached_property
    def _holds(self) -> Bool[np.ndarray, "workers load"]:
        return (self.coefficients != 0).any(-1)  # the others are padding

    @property
    def encoding_matrix(self) -> Float[np.ndarray, "workers partitions fragments"]:
        """The matrix B, dense, made anew on every access: its n k m numbers may be many.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> fractional_repetition(4, 1).encoding_matrix[..., 0].T.tolist()
            [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
        """
        matrix = np.zeros((self.num_workers, self.num_partitions, self.num_fragments))
        # Added and not assigned: the padding repeats a partition, and would overwrite its entry.
        np.add.at(
            matrix, (np.arange(self.num_workers)[:, None], self.partitions), self.coefficients
        )
        return matrix

    @property
    def block(self) -> Int[np.ndarray, " workers"] | None:
        """The one partition that each worker holds, or None where some worker holds several.

        The payload of a block code need not be summable over partitions, so it may be factors.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> fractional_repetition(5, 1).block.tolist()
            [0, 0, 0, 1, 1]
        """
        return self.partitions[:, 0] if self.load == 1 else None

    def decoding_weights(
        self,
        survivors: Bool[Any, "*steps workers"] | list[Any],
        *,
        beyond: Literal["least_squares", "mean"] = "least_squares",
        sizes: Shaped[Any, " partitions"] | list[Any] | None = None,
    ) -> Float[np.ndarray, "*steps fragments workers"]:
        """The weights D for these survivors: minimum-norm least squares, exactly 0 at stragglers.

        Where a single message already is the answer, the first such survivor gets exactly 1.

        Args:
            survivors: (..., n) bool, True where the worker's message arrived.
            beyond: What to do where too few answered. "least_squares": come as close to the sum as
                the messages allow; `decoding_error` says how close. "mean": leave lost partitions
                out and rescale the others to the mean over the recovered examples. A code that is
                not a block code recovers no partition alone: there "mean" rescales least squares
                until the shares of the partitions in the decoded sum add to one.
            sizes: (k,) examples per partition, by default in the code's `shares`; only "mean" reads
                them. Partition p's payload is taken to be scaled by its share of the batch already.

        Returns:
            (..., m, n) float64. Zeros where nothing was recovered.

        Raises:
            ValueError: An argument has the wrong type or shape.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> code = fractional_repetition(num_workers=4, num_stragglers=1)
            >>> code.decoding_weights([True, True, False, True]).tolist()
            [[1.0, 0.0, 0.0, 1.0]]
            >>> code.decoding_weights([False, False, False, True], beyond="mean").tolist()
            [[0.0, 0.0, 0.0, 2.0]]
        """
        survivors = self._survivors("decoding_weights", survivors)
        if beyond not in ("least_squares", "mean"):
            raise ValueError(
                '`Code.decoding_weights` needs beyond="least_squares" or beyond="mean"; '
                f"got {beyond!r}. Choose one of the two."
            )
        if beyond == "mean":
            sizes = self.shares if sizes is None else sizes
            sizes = fractions(
                "Code.decoding_weights", "sizes", sizes, self.num_partitions, zeros=True
            )
            return mean_weights(self._kinds, survivors, sizes, apart=self.block is not None)
        return least_squares_weights(self._kinds, survivors)

    def decoding_error(
        self,
        survivors: Bool[Any, "*steps workers"] | list[Any],
        weights: Float[Any, "*steps fragments workers"] | None = None,
    ) -> Float[np.ndarray, "*steps"]:
        """The literature's err(K): `||D B - [I_m ... I_m]||_F^2 / (k m)`, at the best D by default.

        0 is exact and 1 is nobody. For a block code with one fragment it is the fraction of the
        partitions lost. The decoded gradient is off by at most `sqrt(k m err)` times the root of
        the sum of the partitions' squared gradient norms.

        Args:
            survivors: (..., n) bool, True where the worker's message arrived.
            weights: (..., m, n) other weights to judge, such as those of `one_step_weights`.

        Returns:
            (...,) float64.

        Raises:
            ValueError: An argument has the wrong type or shape.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> code = fractional_repetition(4, 1)
            >>> float(code.decoding_error([False, False, True, True]))
            0.5
            >>> float(code.decoding_error([True] * 4, np.full((1, 4), 0.5)))
            0.0
        """
        survivors = self._survivors("decoding_error", survivors)
        if weights is not None:
            weights = weights_of("Code.decoding_error", weights, survivors, self.num_fragments)
        error = np.zeros(survivors.shape[:-1])
        for kind in self._kinds:
            if weights is None:
                which, solved = kind.solutions(survivors)
                error += solved.error[which].sum(-1)
            else:
                chosen = np.moveaxis(weights[..., kind.members], -2, -3)
                error += ((chosen @ kind.rows - kind.target) ** 2).sum((-3, -2, -1))
        error /= self.num_partitions * self.num_fragments  # in place: one pattern stays an array
        return error

    def is_decodable(
        self, survivors: Bool[Any, "*steps workers"] | list[Any]
    ) -> Bool[np.ndarray, "*steps"]:
        """Whether the sum is exact from these survivors: always with s missing, often with more.

        Exact is an error norm of at most 1e-9 in every component, or what float64 rounds if that is
        more (at most 1e-6); for a block code, at least m survivors in every group.

        Args:
            survivors: (..., n) bool, True where the worker's message arrived.

        Returns:
            (...,) bool.

        Raises:
            ValueError: `survivors` has the wrong type or shape.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> code = fractional_repetition(4, 1)
            >>> bool(code.is_decodable([False, True, False, True]))  # two missing, one a group
            True
        """
        survivors = self._survivors("is_decodable", survivors)
        decodable = np.ones(survivors.shape[:-1], bool)
        for kind in self._kinds:
            which, solved = kind.solutions(survivors)
            decodable &= solved.exact[which].all(-1)
        return decodable

    @functools.cached_property
    def worst_condition(self) -> float:
        """The worst condition number of what decoding solves with exactly s workers missing.

        That is any m members of a group of a block code; else the rows of any n - s workers, short
        of the directions that least squares takes for zero. Infinite where a set does not decode.
        Up to 100,000 sets are enumerated. Beyond that a seeded sample of as many (fewer where the
        systems are large), and the cyclically contiguous sets (the worst of codes on a circle),
        give a *lower bound*.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> round(fractional_repetition(4, 2, num_fragments=2).worst_condition, 1)
            2.4
        """
        survivors = self.num_workers - self.num_stragglers
        chosen = survivors if self.block is None else self.num_fragments
        return max(worst_condition(kind, chosen) for kind in self._kinds)

    @functools.cached_property
    def worst_amplification(self) -> float:
        """How much decoding magnifies rounding with s missing: 1 is not at all, infinite no decode.

        The decoded sum's relative error is about this times that of the messages: 6e-8 for float32,
        2e-3 for bfloat16. Over the sets of stragglers that `worst_condition` looks at.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> round(fractional_repetition(4, 1).worst_amplification, 6)
            1.0
        """
        return self._amplification()

    @property
    def float32_error(self) -> float:
        """What the worst set of s stragglers loses with float32 messages, relative; an estimate.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> f"{fractional_repetition(4, 1).float32_error:.0e}"
            '6e-08'
        """
        return self.worst_amplification * FLOAT32

    def _amplification(self, sets: int | None = None) -> float:
        s, m = self.num_stragglers, self.num_fragments
        return max(
            worst_amplification(kind, min(s, len(kind.rows) - m), sets) for kind in self._kinds
        )

    @functools.cached_property
    def _kinds(self) -> list[Kind]:
        n, k = self.num_workers, self.num_partitions
        if self.block is None:  # one component
            return [Kind(np.arange(n)[None], np.arange(k)[None], self.encoding_matrix)]
        return kinds_of_groups(self.block, self.coefficients[:, 0])

    def _survivors(self, call: str, survivors: Any) -> Bool[np.ndarray, "*steps workers"]:
        return arrived(f"Code.{call}", survivors, self.num_workers)


def _from_fields(*fields: Any) -> Code:
    # A function of the module: serializers that copy methods (Ray's) find it by name.
    return Code._from_rows(*fields)
