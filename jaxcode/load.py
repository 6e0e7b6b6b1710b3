"""How many numbers a worker sends, and how few it could: loads and the lower bound on them.

Both count numbers and not bytes, for one worker and one step. A gradient of a p x q parameter used
as `x @ W` has at most as many dimensions of rank as x has rows, so its factors are often far
shorter than its p q entries; a code with m fragments divides either by m.
"""

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxcode.checks import integer
from jaxcode.code import Code

# `lower_bound` looks at all sets of partitions of a code that is not a block code up to this k.
_ENUMERATED_PARTITIONS = 12


class Load(NamedTuple):
    """The numbers that one worker sends in a step.

    Attributes:
        per_leaf: By the leaf's name, the path to it joined by "/".
        total: Their sum.

    Example:
        >>> Load({"w": 12.0, "b": 3.0}, 15.0).total
        15.0
    """

    per_leaf: dict[str, float]
    total: float


def communication_load(
    code: Code,
    shapes: Any,
    *,
    method: Literal["dense", "factors"] = "dense",
    rows: int | None = None,
) -> Load:
    """The numbers each worker sends: `p q / m` dense, `min(r (p + q), p q) / m` as factors.

    Args:
        code: The code; its number of fragments is m.
        shapes: The parameters: nested mappings, lists and tuples of anything with a `.shape`.
        method: "dense" sends each leaf's entries. "factors" sends two-dimensional leaves as
            factors where these are shorter, and needs a block code, since factors do not add up.
        rows: r, the examples times positions of one partition, for "factors". From `p q / (p + q)`
            on nothing is gained.

    Returns:
        The `Load`, before any padding of a message to a multiple of m.

    Raises:
        ValueError: An argument does not fit the others, or something in `shapes` has no shape.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(8, 1, num_fragments=2)
        >>> params = {"dense": {"kernel": np.zeros((784, 1024)), "bias": np.zeros(1024)}}
        >>> communication_load(code, params, method="factors", rows=32).per_leaf
        {'dense/kernel': 28928.0, 'dense/bias': 512.0}
        >>> communication_load(code, params).total
        401920.0
    """
    call = "communication_load"
    if method not in ("dense", "factors"):
        raise ValueError(f'`{call}` needs method="dense" or "factors"; got {method!r}. Choose one.')
    if method == "factors":
        if code.block is None:
            raise ValueError(
                f'`{call}` needs a block code for method="factors", since factors of different '
                f"partitions do not add up; got {code!r}. Use fractional_repetition, or "
                'method="dense".'
            )
        rows = integer(call, "rows", rows, 1, None, "Give one partition's examples x positions.")
    per_leaf = {}
    for name, shape in _leaves(shapes):
        count = math.prod(shape)
        if method == "factors" and rows is not None and len(shape) == 2:
            count = min(count, rows * sum(shape))
        per_leaf[name] = count / code.num_fragments
    return Load(per_leaf, sum(per_leaf.values()))


def lower_bound(code: Code, shape: Sequence[Any], rank: Any) -> float:
    """The numbers that some worker must send, whatever the scheme, with this placement and s.

    Let all gradients vanish but those of a set T of partitions, held by w(T) workers. Their sum is
    any matrix of rank `rho = min(|T| r, p, q)`, one of a set of dimension `rho (p + q - rho)`, and
    must come out of `w(T) - s` messages. So some worker sends at least
    `max_T rho (p + q - rho) / (w(T) - s)`. For a block code the maximum over all T is found
    exactly. For another code all T are looked at up to 12 partitions; beyond that single partitions
    and the set of all, still a bound but perhaps not the best.

    Args:
        code: The code: its placement and s are used, and not its coefficients.
        shape: (p, q) of the parameter; or a list of such pairs, bounded together. A vector of
            length L is (L, 1).
        rank: r, the rank bound of *one* partition's gradient, None for full rank; or a list of
            them, one a shape.

    Returns:
        The bound, in numbers.

    Raises:
        ValueError: A shape or rank is not positive, or their numbers differ.

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
    single = isinstance(next(iter(shape), None), numbers.Integral)
    shapes, ranks = ([shape], [rank]) if single else (shape, rank)
    if not shapes or not isinstance(ranks, list | tuple) or len(shapes) != len(ranks):
        raise ValueError(
            f"`lower_bound` needs one rank (or None) for each shape; got shapes {shapes!r} and "
            f"rank {rank!r}. Give (p, q) and a rank, or two lists of equal length."
        )
    size, workers = _fewest_workers(code)
    dimension = np.zeros(len(size))
    for pair, bound in zip(shapes, ranks, strict=True):
        p, q, r = _checked_leaf(pair, bound)
        rho = np.minimum(size * r, min(p, q))
        dimension += rho * (p + q - rho)
    return float((dimension / (workers - code.num_stragglers)).max())


def _fewest_workers(code: Code) -> tuple[Int[np.ndarray, " sets"], Int[np.ndarray, " sets"]]:
    """Sizes |T| of sets of partitions, and the number w(T) of workers that hold any of each."""
    k = code.num_partitions
    if code.block is not None:  # the fewest workers for each |T| are those of the smallest groups
        return np.arange(1, k + 1), np.cumsum(np.sort(np.bincount(code.block, minlength=k)))
    if k <= _ENUMERATED_PARTITIONS:
        subsets = np.arange(1, 2**k)
        held = np.bitwise_or.reduce(1 << code.partitions, axis=1)
        holdings, workers = np.unique(held, return_counts=True)
        meets = (subsets[:, None] & holdings) != 0
        return np.bitwise_count(subsets).astype(int), meets @ workers
    holders = np.bincount(code.partitions[code.coefficients.any(-1)], minlength=k)
    return np.array([1, k]), np.array([holders.min(), code.num_workers])


def _checked_leaf(shape: Any, rank: Any) -> tuple[int, int, int]:
    pair = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    if len(pair) != 2:
        raise ValueError(
            f"`lower_bound` needs two-dimensional shapes (p, q); got {shape!r}. Write a vector of "
            "length L as (L, 1), and reshape other leaves likewise."
        )
    p, q = (integer("lower_bound", "shape", size, 1, None, "Give (p, q).") for size in pair)
    if rank is None:
        return p, q, min(p, q)
    return p, q, integer("lower_bound", "rank", rank, 1, None, "Use None for full rank.")


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, depth first: JAX's flattening for the common containers, without JAX."""
    if hasattr(node, "shape") or isinstance(node, numbers.Number):
        yield "/".join(path), tuple(getattr(node, "shape", ()))
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, str(index)))
    elif node is not None:
        raise ValueError(
            "`communication_load` needs nested mappings, lists and tuples of things with a .shape; "
            f"got {type(node).__name__} at {'/'.join(path) or 'the top'}. Give a dict of its "
            "arrays."
        )
