"""Weighted sums of stacked messages: what `decode` is made of.

A sum over all workers decodes what adds up; sums over each block's workers decode payloads that do
not, such as factors. Messages are stacked on this device, or spread over devices on a named axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcode.codes import Code
from jaxcode.payload import is_coded, join
from jaxcode.precision import widen

_CHUNK = 16  # terms of a sum that are written out


class Decoder:
    """Weighted sums of stacked messages, over the devices' workers and a named axis."""

    def __init__(self, code: Code, weights: Any, workers: Any, axis_name: Any):
        """Prepare for ``weights`` (m, n) and the ``workers`` whose messages are on this device."""
        self.code, self.workers = code, workers
        self._axis = axis_name
        self._spread = axis_name is not None
        self.weights = widen(jnp.asarray(weights))
        if code.block is not None:
            self.scale, self.recovered = self._blocks()

    def _blocks(self) -> tuple[Array, Array]:
        """Per block, by what the weights multiply its payload, and whether they recover it.

        ``D B`` restricted to a block is ``c I`` if its payload comes back c times: c is 1 or, for
        the mean over recovered examples, more. Fewer answers than fragments give no multiple of I.
        """
        code = self.code
        m = code.num_fragments
        per_worker = jnp.einsum(
            "jn,nl->njl",
            self.weights,
            jnp.asarray(code.coefficients[:, 0], self.weights.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
        products = jax.ops.segment_sum(per_worker, jnp.asarray(code.block), code.num_partitions)
        scale = jnp.trace(products, axis1=1, axis2=2) / m
        off = products - scale[:, None, None] * jnp.eye(m, dtype=products.dtype)[None]
        # A missing answer costs a whole dimension, so the distance is then of the order of c.
        # (Weights that are not numbers are neither, and show in the result.)
        recovered = ~(jnp.sum(off**2, axis=(1, 2)) >= 0.01 * scale**2)
        return scale, recovered

    def total(self, message: Array, shape: tuple[int, ...], *, drop: bool = False) -> Array:
        """Decode a sum: ``fragment_j(sum_p g_p) = sum_i D[j,i] message_i``.

        Args:
            message: (workers here, ...) coded arrays.
            shape: of the decoded array.
            drop: leave out the blocks that are not recovered, as factors must.
        """
        weights = self.weights
        if drop:
            weights = jnp.where(self.recovered[self.code.block][None], weights, 0)
        weights = weights[:, self.workers]
        terms = _sum_terms(lambda i: _term(weights[:, i], message[i]), len(message))
        return join(self._reduce(terms), shape)

    def blocks(self, message: Array, shape: tuple[int, ...], *, scaled: bool) -> Array:
        """Decode each block's payload by itself: (k, *shape), zeros where it is not recovered."""
        undo = jnp.ones_like(self.scale) if scaled else jnp.where(self.recovered, self.scale, 1)
        factor = jnp.where(self.recovered, 1 / undo, 0)[self.code.block][None]
        weights = jnp.where(factor != 0, self.weights * factor, 0)
        return jax.vmap(lambda part: join(part, shape))(self._per_block(message, weights))

    def first(self, integers: Array) -> Array:
        """Each block's integers, from its first worker that counts: (k, ...)."""
        n, k, block = self.code.num_workers, self.code.num_partitions, self.code.block
        counts = jnp.any(self.weights != 0, axis=0)
        first = jax.ops.segment_min(jnp.where(counts, jnp.arange(n), n), jnp.asarray(block), k)
        chosen = (first[block] == jnp.arange(n)).astype(integers.dtype)
        return self.sum_by_block(integers, chosen)

    def gather(self, values: Array) -> Array:
        """One unsigned integer a worker, (workers here,), as those of all n workers."""
        if not self._spread:
            return values
        everywhere = jnp.zeros(self.code.num_workers, values.dtype)
        return self._reduce(everywhere.at[self.workers].set(values))

    def sum_by_block(self, integers: Array, weights: Array) -> Array:
        """Weighted sums (k, ...) of integers over each block's workers, from weights (n,)."""
        return jnp.squeeze(self._per_block(integers, weights[None]), axis=1)

    def _per_block(self, message: Array, weights: Array) -> Array:
        """Weighted sums over each block's workers: (k, m, ...), from weights (m, n)."""
        code = self.code
        if not self._spread:
            groups = members(code)
            weights = jnp.pad(weights, ((0, 0), (0, 1)))  # a missing member counts for nothing
            rows = np.minimum(groups, code.num_workers - 1)

            def term(j: Any) -> Array:
                return jax.vmap(_term)(weights.T[_column(groups, j)], message[_column(rows, j)])

            return _sum_terms(term, groups.shape[1])
        own = (
            jnp.asarray(code.block)[None, self.workers] == jnp.arange(code.num_partitions)[:, None]
        )
        weights = jnp.where(own[:, None], weights[None, :, self.workers], 0)
        terms = _sum_terms(lambda i: _term(weights[..., i], message[i]), len(message))
        return self._reduce(terms)

    def _reduce(self, partial: Array) -> Array:
        return jax.lax.psum(partial, self._axis) if self._spread else partial


def _term(weights: Array, message: Array) -> Array:
    """One worker's ``weights x message``, (*weights.shape, *message.shape); 0 for a straggler."""
    message = widen(message) if is_coded(message) else message
    columns = weights.astype(message.dtype).reshape(*weights.shape, *[1] * message.ndim)
    row = message.reshape(*[1] * weights.ndim, *message.shape)
    # A straggler's buffer may hold anything, and 0 times NaN is NaN.
    return jnp.where(columns != 0, columns * row, 0)


def _sum_terms(term: Callable[[Any], Array], count: int) -> Array:
    """``term(0) + ... + term(count - 1)``, in one pass over what the terms read.

    Written out, because a sum over a leading axis is not: on a CPU, XLA adds element by element
    across the rows, at a twentieth of the speed of the memory. Chunks bound the program's size.
    """
    head = (count - 1) % _CHUNK + 1
    total = term(0)
    for i in range(1, head):
        total = total + term(i)

    def chunk(j: Any, total: Array) -> Array:
        for i in range(_CHUNK):
            total = total + term(head + j * _CHUNK + i)
        return total

    chunks = (count - head) // _CHUNK
    return jax.lax.fori_loop(0, chunks, chunk, total) if chunks else total


def _column(table: np.ndarray, j: Any) -> Any:
    return table[:, j] if isinstance(j, int) else jnp.asarray(table)[:, j]


def members(code: Code) -> np.ndarray:
    """The workers of each block, (k, largest group); n where a group is smaller."""
    n, k, block = code.num_workers, code.num_partitions, code.partitions[:, 0]
    order = np.argsort(block, kind="stable")
    sizes = np.bincount(block, minlength=k)
    table = np.full((k, sizes.max()), n)
    table[np.arange(sizes.max()) < sizes[:, None]] = order
    return table
