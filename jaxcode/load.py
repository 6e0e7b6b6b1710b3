"""What a worker sends: numbers and bytes, per parameter, for every scheme there is.

A gradient of a p x q parameter used as `x @ W` has at most as many dimensions of rank as x has
rows, so its factors are often far shorter than its p q entries, and its normal form shorter still;
a code with m fragments divides either by m.

| method | numbers for a p x q weight | |
| --- | --- | --- |
| `dense` | `p q / m` | Tandon et al. at m = 1 |
| `ye_abbe` | `p q / (d - s)` | least for arbitrary vectors, d the least replication |
| `factors` | `min(r (p + q), p q) / m` | block codes, r rows a partition |
| `normal_form` | `rho (p + q - rho) / m` | block codes, `rho = min(r, p, q)` |
| `power_sgd` | `min(rank (p + q), p q)` | lossy, no code |
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from jaxcode.bounds import fewest_workers, worst_set
from jaxcode.bounds import lower_bound as lower_bound  # loads and bounds are read together
from jaxcode.checks import integer
from jaxcode.code import Code
from jaxcode.shapes import Leaf, leaf_shapes

Method = Literal["dense", "ye_abbe", "factors", "normal_form", "power_sgd"]
METHODS = ("dense", "ye_abbe", "factors", "normal_form", "power_sgd")


class Load(NamedTuple):
    """What one worker sends in a step.

    Attributes:
        per_leaf: numbers, by the leaf's name, the path to it joined by "/".
        total: their sum.
        bytes_per_leaf: the same in bytes, each leaf in its own dtype, float32 if it has none.
        total_bytes: their sum.
        bounds: numbers that some worker must send for this leaf, see `lower_bound`; empty where
            nothing is exact: for "power_sgd", and for codes that not even all workers decode.

    Example:
        >>> load = Load({"w": 12.0}, 12.0, {"w": 48.0}, 48.0, {"w": 12.0})
        >>> load.optimal
        {'w': True}
    """

    per_leaf: dict[str, float]
    total: float
    bytes_per_leaf: dict[str, float]
    total_bytes: float
    bounds: dict[str, float]

    @property
    def optimal(self) -> dict[str, bool]:
        """Whether a leaf's load is the lower bound: no scheme can send less."""
        return {
            name: self.per_leaf[name] <= bound * (1 + 1e-9) for name, bound in self.bounds.items()
        }


def communication_load(
    code: Code,
    params: Any,
    *,
    method: Method = "dense",
    rows: int | None = None,
    rank: int = 4,
) -> Load:
    """What each worker sends, in numbers and bytes, per leaf and in total.

    Args:
        code: The code; its number of fragments is m.
        params: The parameters, as `leaf_shapes` takes them: nested mappings, lists and tuples of
            arrays or shapes, a Flax NNX module, or the path of an `.npz` file.
        method: "dense": each leaf's entries. "ye_abbe": the same with as many fragments as the
            placement allows, the least for vectors without structure. "factors" and "normal_form":
            two-dimensional leaves as the one or the other where that is shorter; they need a block
            code, since neither adds up over partitions. "power_sgd": leaves of two and more axes,
            as matrices, in factors of the given rank: lossy, and without a code.
        rows: r, the examples times positions of one partition (the largest, where shares differ),
            for "factors" and "normal_form". If given it bounds the rank in `bounds` for every
            method; if not, gradients count as of full rank.
        rank: of "power_sgd". Too low loses accuracy, too high bytes; 1 to 4 is usual, 32 for
            language models.

    Returns:
        The `Load`, before any padding of a message to a multiple of m, and without the row numbers
        that a normal form's pivots or an embedding's lookups add.

    Raises:
        ValueError: An argument does not fit the others, or something in `params` has no shape.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(8, 1, num_fragments=2)
        >>> params = {"dense": {"kernel": (784, 1024), "bias": (1024,)}}
        >>> communication_load(code, params, method="factors", rows=32).per_leaf
        {'dense/kernel': 28928.0, 'dense/bias': 512.0}
        >>> communication_load(code, params).total_bytes
        1607680.0
        >>> group = fractional_repetition(8, 2, num_fragments=2)  # groups of s + m
        >>> communication_load(group, params, method="normal_form", rows=32).optimal
        {'dense/kernel': True, 'dense/bias': True}
    """
    call = "communication_load"
    if method not in METHODS:
        raise ValueError(
            f"`{call}` needs method to be one of {', '.join(METHODS)}; got {method!r}. Choose one."
        )
    structured = method in ("factors", "normal_form")
    if structured and code.block is None:
        raise ValueError(
            f'`{call}` needs a block code for method="{method}", since factors of different '
            f"partitions do not add up; got {code!r}. Use fractional_repetition, or "
            'method="dense".'
        )
    if structured or rows is not None:
        rows = integer(call, "rows", rows, 1, None, "Give one partition's examples x positions.")
    rank = integer(call, "rank", rank, 1, None, "Give the rank of the approximation.")
    leaves = leaf_shapes(params, call=call)
    numbers = {name: _numbers(code, leaf, method, rows, rank) for name, leaf in leaves.items()}
    size = {name: numbers[name] * leaf.itemsize for name, leaf in leaves.items()}
    exact = method != "power_sgd" and code.is_decodable(np.ones(code.num_workers, bool))
    bounds = _bounds(code, leaves, rows) if exact else {}
    return Load(numbers, sum(numbers.values()), size, sum(size.values()), bounds)


def _numbers(code: Code, leaf: Leaf, method: Method, rows: int | None, rank: int) -> float:
    m, size = code.num_fragments, leaf.size
    if method == "power_sgd":
        return float(min(size, rank_numbers(leaf, rank)) if len(leaf.shape) > 1 else size)
    if method == "ye_abbe":
        return size / (int(code.replication.min()) - code.num_stragglers)
    if method == "dense" or len(leaf.shape) != 2 or rows is None:
        return size / m
    if method == "factors":
        return min(size, rank_numbers(leaf, rows)) / m
    return normal_form_numbers(leaf, rows) / m


def rank_numbers(leaf: Leaf, rank: int) -> int:
    """Numbers of a leaf, seen as a matrix, in factors of this rank: `rank (p + q)`.

    Example:
        >>> rank_numbers(Leaf((30, 20), 4), 3)
        150
    """
    return rank * sum(leaf.matrix)


def normal_form_numbers(leaf: Leaf, rank: int) -> int:
    """Numbers of a leaf, seen as a matrix, in normal form: `rho (p + q - rho)`, at most p q.

    Example:
        >>> normal_form_numbers(Leaf((30, 20), 4), 3), normal_form_numbers(Leaf((30, 20), 4), 99)
        (141, 600)
    """
    rho = min(rank, *leaf.matrix)
    return rho * (sum(leaf.matrix) - rho)


def _bounds(code: Code, leaves: dict[str, Leaf], rows: int | None) -> dict[str, float]:
    sets = fewest_workers(code)  # once, for they may take a while to find
    bounds = {}
    for name, leaf in leaves.items():
        if leaf.size:
            p, q = leaf.matrix
            rank = rows if rows is not None and len(leaf.shape) == 2 else min(p, q)
            bounds[name] = worst_set(sets, code.num_stragglers, [(p, q, rank)])
    return bounds
