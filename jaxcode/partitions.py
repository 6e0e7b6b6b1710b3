"""Dealing a global batch out to workers: `assign`.

The batch is cut into k partitions, as near to the code's shares as whole examples allow, and each
worker gets those that the code gives it. Every array has the same shape on every worker, so
partitions that are shorter than the longest are padded with a real example, whose share of the mean
is zero.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcode.checks import fractions, integer
from jaxcode.codes import Code


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partitions:
    """What each worker computes on.

    Attributes:
        examples: the batch's tree, leaves (n, d, b, ...): worker, partition, example.
        share: (n, d, b), each example's share of the global mean: 1/N, and 0 for padding.
        padded: whether any example is padding; then the loss must return per-example values.
        held: which worker holds which partition, as a digest: what another code was given does not
            fit, though its shapes may.
    """

    examples: Any
    share: Any
    padded: bool = field(metadata={"static": True})
    held: str = field(metadata={"static": True})


def partition_sizes(num_examples: int, num_partitions: int, *, shares: Any = None) -> np.ndarray:
    """Number of examples of each partition: as near to its share as whole examples allow.

    What is left after rounding down goes to the largest remainders, of equal ones to the first.

    Args:
        num_examples: N.
        num_partitions: k.
        shares: (k,) positive numbers, such as a code's; by default equal.

    Example:
        >>> partition_sizes(10, 4)
        array([3, 3, 2, 2])
        >>> partition_sizes(10, 2, shares=[3, 1])
        array([8, 2])
    """
    total = integer("partition_sizes", "num_examples", num_examples, 0, None, "Give N.")
    k = integer("partition_sizes", "num_partitions", num_partitions, 1, None, "Give k.")
    shares = np.ones(k) if shares is None else fractions("partition_sizes", "shares", shares, k)
    exact = total * shares / shares.sum()
    sizes = np.floor(exact + 1e-9).astype(int)  # short of rounding
    left = total - sizes.sum()
    sizes[np.argsort(-(exact - sizes).round(9), kind="stable")[:left]] += 1
    return sizes


def num_examples(batch: Any) -> int:
    """N, the common length of the leading axis of a batch's leaves."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or lengths in ({()}, {(0,)}):
        shapes = jax.tree.map(jnp.shape, batch)
        raise ValueError(
            "`batch` needs arrays with one common leading axis of at least one example; got shapes "
            f"{shapes}: put what is not per example into the loss, or the parameters"
        )
    return int(lengths.pop()[0])


def assign(batch: Any, code: Code) -> Partitions:
    """Give each worker its partitions of a global batch.

    Args:
        batch: pytree of arrays with a common leading axis of N examples. NumPy stays NumPy.
        code: the code; worker i holds partitions ``code.partitions[i]``.

    Returns:
        The examples of every worker, and each example's share of the mean over the batch.

    Raises:
        ValueError: the leaves have no common leading axis, or no examples.

    Example:
        >>> import numpy as np
        >>> from jaxcode.codes import fractional_repetition
        >>> parts = assign(np.arange(5), fractional_repetition(4, 1))
        >>> parts.examples[:, 0].tolist()
        [[0, 1, 2], [0, 1, 2], [3, 4, 4], [3, 4, 4]]
        >>> parts.share[3, 0]
        array([0.2, 0.2, 0. ])
    """
    total = num_examples(batch)
    sizes = partition_sizes(total, code.num_partitions, shares=code.shares)
    starts = np.cumsum(sizes) - sizes
    offsets = np.arange(sizes.max())
    real = offsets < sizes[:, None]
    # Padding repeats an example: zeros could make a loss or its derivative infinite.
    index = starts[:, None] + np.minimum(offsets, np.maximum(sizes - 1, 0)[:, None])
    index = np.minimum(index, total - 1)[code.partitions]
    share = np.where(real, 1 / total, 0.0)[code.partitions]
    examples = jax.tree.map(lambda x: (x if hasattr(x, "shape") else np.asarray(x))[index], batch)
    return Partitions(examples, share, padded=not real.all(), held=digest(code))


def digest(code: Code) -> str:
    """Which worker holds which partition, in few letters."""
    return hashlib.sha256(code.partitions.astype(np.int64).tobytes()).hexdigest()[:16]
