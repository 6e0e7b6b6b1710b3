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

from jaxcode.checks import integer
from jaxcode.solve import EXACT, Kind


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

    Attributes:
        partitions: (n, d) the partitions each worker holds. A row with fewer than d is filled with
            its own first partition, at coefficient 0.
        coefficients: (n, d, m) float64, the entries of B for those partitions.
        num_partitions: k.
        num_stragglers: s.
        name: As given.

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

    def __init__(self, encoding_matrix: Any, num_stragglers: int, name: str = "code"):
        matrix = _checked_matrix(encoding_matrix)
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
        self._store(partitions, coefficients, k, s, name)

    @classmethod
    def _from_rows(
        cls,
        partitions: Int[np.ndarray, "workers load"],
        coefficients: Float[np.ndarray, "workers load fragments"],
        num_partitions: int,
        num_stragglers: int,
        name: str,
    ) -> "Code":
        """The code of these rows, which are trusted; the dense matrix is never made."""
        code = cls.__new__(cls)
        code._store(partitions, coefficients, num_partitions, num_stragglers, name)
        return code

    def _store(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields alone: solved patterns stay behind, and arrays are read-only again on arrival.
        return self._from_rows, tuple(getattr(self, f.name) for f in dataclasses.fields(self))

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
            sizes: (k,) examples per partition, by default equal; only "mean" reads them. Partition
                p's payload is taken to be scaled by its share `sizes[p] / sum(sizes)` already.

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
        survivors = self._checked_survivors("decoding_weights", survivors)
        if beyond not in ("least_squares", "mean"):
            raise ValueError(
                '`Code.decoding_weights` needs beyond="least_squares" or beyond="mean"; '
                f"got {beyond!r}. Choose one of the two."
            )
        if beyond == "mean":
            return self._mean_weights(survivors, self._checked_sizes(sizes))
        weights = np.zeros((*survivors.shape[:-1], self.num_fragments, self.num_workers))
        for kind in self._kinds:
            which, solved = kind.solutions(survivors)
            weights[..., kind.members] = np.moveaxis(solved.weights[which], -3, -2)
        return weights

    def _mean_weights(
        self, survivors: Bool[np.ndarray, "*steps workers"], sizes: Float[np.ndarray, " partitions"]
    ) -> Float[np.ndarray, "*steps fragments workers"]:
        weights = self.decoding_weights(survivors)
        lost = np.zeros(survivors.shape[:-1])
        for kind in self._kinds:
            which, solved = kind.solutions(survivors)
            exact = (solved.error <= EXACT)[:, None]
            if self.block is not None:
                weights[..., kind.members] *= exact[which][..., None, :, :]
            shares = np.where(exact, 1.0, 0.0 if self.block is not None else solved.shares)
            lost += ((1 - shares)[which] * sizes[kind.parts]).sum((-2, -1))
        kept = sizes.sum() - lost  # rather than a sum of its own: all of it, exactly, if none lost
        some = kept > 1e-12 * sizes.sum()
        scale = np.divide(sizes.sum(), kept, out=np.zeros_like(kept), where=some)
        return weights * scale[..., None, None]

    def decoding_error(
        self, survivors: Bool[Any, "*steps workers"] | list[Any]
    ) -> Float[np.ndarray, "*steps"]:
        """The literature's err(K): `||D B - [I_m ... I_m]||_F^2 / (k m)` at the least-squares D.

        0 is exact and 1 is nobody. For a block code with one fragment it is the fraction of the
        partitions lost. The decoded gradient is off by at most `sqrt(k m err)` times the root of
        the sum of the partitions' squared gradient norms.

        Args:
            survivors: (..., n) bool, True where the worker's message arrived.

        Returns:
            (...,) float64.

        Raises:
            ValueError: `survivors` has the wrong type or shape.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> float(fractional_repetition(4, 1).decoding_error([False, False, True, True]))
            0.5
        """
        survivors = self._checked_survivors("decoding_error", survivors)
        error = np.zeros(survivors.shape[:-1])
        for kind in self._kinds:
            which, solved = kind.solutions(survivors)
            error += solved.error[which].sum(-1)
        error /= (
            self.num_partitions * self.num_fragments
        )  # in place: stays an array for one pattern
        return error

    def is_decodable(
        self, survivors: Bool[Any, "*steps workers"] | list[Any]
    ) -> Bool[np.ndarray, "*steps"]:
        """Whether the sum is exact from these survivors: always with s missing, often with more.

        Exact is an error norm of at most 1e-9 in every component; for a block code, at least m
        survivors in every group.

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
        survivors = self._checked_survivors("is_decodable", survivors)
        decodable = np.ones(survivors.shape[:-1], bool)
        for kind in self._kinds:
            which, solved = kind.solutions(survivors)
            decodable &= (solved.error <= EXACT)[which].all(-1)
        return decodable

    @functools.cached_property
    def worst_condition(self) -> float:
        """The worst condition number of what decoding solves with exactly s workers missing.

        That is any m members of a group of a block code; else the rows of any n - s workers, short
        of the directions that least squares takes for zero. Infinite where a set does not decode.
        Up to 20,000 sets are enumerated. Beyond that a seeded sample of as many, and the cyclically
        contiguous sets (the worst of codes on a circle), give a *lower bound*.

        Decoding errs by about this times the precision of the messages: 1e3 costs three of
        float32's seven digits, and all of bfloat16's.

        Example:
            >>> from jaxcode.codes import fractional_repetition
            >>> round(fractional_repetition(4, 2, num_fragments=2).worst_condition, 1)
            2.4
        """
        survivors = self.num_workers - self.num_stragglers
        chosen = survivors if self.block is None else self.num_fragments
        return max(kind.worst_condition(chosen) for kind in self._kinds)

    @functools.cached_property
    def _kinds(self) -> list[Kind]:
        """The groups of a block code by their coefficients; any other code is one component."""
        n, k, m = self.num_workers, self.num_partitions, self.num_fragments
        if self.block is None:
            return [Kind(np.arange(n)[None], np.arange(k)[None], self.encoding_matrix)]
        kinds = []
        by_group = np.argsort(self.block, kind="stable")
        sizes = np.bincount(self.block, minlength=k)
        starts = np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            parts = np.flatnonzero(sizes == size)
            members = by_group[starts[parts][:, None] + np.arange(size)]
            flat = self.coefficients[members].reshape(len(parts), -1)
            matrices, which = np.unique(flat, axis=0, return_inverse=True)
            for index, matrix in enumerate(matrices):
                same = which.reshape(-1) == index
                kinds.append(Kind(members[same], parts[same, None], matrix.reshape(size, 1, m)))
        return kinds

    def _checked_survivors(self, call: str, survivors: Any) -> Bool[np.ndarray, "*steps workers"]:
        try:
            survivors = np.asarray(survivors)
        except Exception as error:  # what a tracer raises is JAX's, which this module does not know
            raise ValueError(
                f"`Code.{call}` needs survivors known by now, got {type(survivors).__name__}: "
                "call it outside jit, and pass the weights in as an argument"
            ) from error
        if survivors.dtype != bool or survivors.shape[-1:] != (self.num_workers,):
            raise ValueError(
                f"`Code.{call}` needs survivors to be bool of shape (..., {self.num_workers}), "
                f"True where a worker answered; got {survivors.dtype} of shape {survivors.shape}. "
                "Compare arrival times with a deadline, or use the survivors of a Round."
            )
        return survivors

    def _checked_sizes(self, sizes: Any) -> Float[np.ndarray, " partitions"]:
        k = self.num_partitions
        sizes = np.ones(k) if sizes is None else np.asarray(sizes)
        fits = sizes.shape == (k,) and sizes.dtype.kind in "iuf" and np.isfinite(sizes).all()
        if not (fits and (sizes >= 0).all() and sizes.any()):
            raise ValueError(
                f"`Code.decoding_weights` needs sizes to be {k} finite numbers, none negative and "
                f"not all 0; got {sizes!r}. Count the examples in each partition."
            )
        return sizes.astype(float)


def _checked_matrix(encoding_matrix: Any) -> Float[np.ndarray, "workers partitions fragments"]:
    matrix = np.asarray(encoding_matrix)
    if matrix.ndim not in (2, 3) or 0 in matrix.shape or matrix.dtype.kind not in "biuf":
        raise ValueError(
            "`Code` needs a real encoding_matrix of shape (workers, partitions) or (workers, "
            f"partitions, fragments); got {matrix.dtype} of shape {matrix.shape}. Give one row a "
            "worker."
        )
    if not np.isfinite(matrix).all():
        raise ValueError(
            f"`Code` needs a finite encoding_matrix; got {np.sum(~np.isfinite(matrix))} infinite "
            "or NaN entries. Check how the code was made."
        )
    return matrix.reshape(*matrix.shape[:2], -1).astype(float)
