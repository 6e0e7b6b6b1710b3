"""Finding ``x^T delta`` in the jaxpr of a gradient.

Automatic differentiation forms a weight's gradient in a last step: a product of two matrices, or a
scatter of rows into zeros, dressed in transposes, reshapes, casts, sums over several uses, and
inside the bodies of scans and remats. `find_terms` walks back from the gradient to those last
steps and describes them, so that their operands can be returned in place of their result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jaxcode.jaxprs import Graph, Inside, Value, dtype_of, is_remat, is_scan, shape_of


class NotFactored(Exception):
    """The gradient is not a product; the message says what it is instead."""


@dataclass(frozen=True)
class Side:
    """One operand of a product, and what its dimensions are for.

    Attributes:
        value: where the operand is computed.
        batch: its dimensions that index separate products.
        free: its dimensions that survive in the product.
        contract: its dimensions that are summed over, in the other side's order.
        sizes: the product's dimensions that ``free`` is seen as, after reshapes.
    """

    value: Value
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contract: tuple[int, ...]
    sizes: tuple[int, ...]

    def lifted(self, eqn: JaxprEqn, *, summed: bool) -> "Side":
        """The side seen from outside ``eqn``, whose iterations are stacked in front."""
        value = Inside(eqn, self.value)
        if not is_scan(eqn):
            return replace(self, value=value)
        batch, free, contract = (
            tuple(dim + 1 for dim in dims) for dims in (self.batch, self.free, self.contract)
        )
        batch, contract = (batch, (0, *contract)) if summed else ((0, *batch), contract)
        return Side(value, batch, free, contract, self.sizes)

    @property
    def rank(self) -> int:
        """Length of the contracted dimensions together."""
        return math.prod(shape_of(self.value)[dim] for dim in self.contract)


@dataclass(frozen=True)
class Product:
    """A matrix product and how its dimensions are arranged.

    ``labels[i]`` says which dimension of the product dimension i of the current value is: a pair of
    "batch", "left" or "right" and a position among those.
    """

    left: Side
    right: Side
    labels: tuple[tuple[str, int], ...]
    dtype: Any

    def lifted(self, eqn: JaxprEqn, *, summed: bool) -> "Product":
        """The product seen from outside ``eqn``."""
        left, right = (side.lifted(eqn, summed=summed) for side in (self.left, self.right))
        labels = self.labels
        if is_scan(eqn) and not summed:
            labels = (("batch", 0), *((kind, i + (kind == "batch")) for kind, i in labels))
        return Product(left, right, labels, self.dtype)

    def summed(self, axes: tuple[int, ...]) -> "Product":
        """The sum over some of the batch axes: they are contracted like the others."""
        dims = [self.labels[axis][1] for axis in axes]
        kept = [i for i in range(len(self.left.batch)) if i not in dims]
        left, right = (
            replace(
                side,
                batch=tuple(side.batch[i] for i in kept),
                contract=(*(side.batch[i] for i in dims), *side.contract),
            )
            for side in (self.left, self.right)
        )
        labels = tuple(
            (kind, kept.index(i) if kind == "batch" else i)
            for axis, (kind, i) in enumerate(self.labels)
            if axis not in axes
        )
        return Product(left, right, labels, self.dtype)


@dataclass(frozen=True)
class Scatter:
    """Rows added into a table of zeros, row i at ``indices[i, 0]``."""

    indices: Value
    rows: Value
    clip: bool

    def lifted(self, eqn: JaxprEqn, *, summed: bool) -> "Scatter":
        """The scatter seen from outside ``eqn``."""
        if is_scan(eqn) and not summed:
            raise NotFactored("its rows are looked up in one table per scan iteration")
        return replace(self, indices=Inside(eqn, self.indices), rows=Inside(eqn, self.rows))


Term = Product | Scatter


def find_terms(graph: Graph, value: Value) -> list[Term]:
    """Describe ``value`` as a sum of products and scatters.

    Args:
        graph: the program that computes the value.
        value: a gradient.

    Returns:
        The terms; none for a value that is zero by construction.

    Raises:
        NotFactored: the value is something else, or is partly something else.
    """
    return [term for addend in _addends(graph, value) for term in _terms(graph, addend)]


def _addends(graph: Graph, value: Value) -> list[Value]:
    found: list[Value] = []
    pending = [value]
    while pending:  # not by recursion: a weight may be used a thousand times
        eqn, _ = graph.producer(value := pending.pop())
        if eqn is None or eqn.primitive.name != "add_any":
            found.append(value)
        else:
            pending += reversed(eqn.invars)
    return found


def _terms(graph: Graph, value: Value) -> list[Term]:
    if graph.is_zero(value):
        return []
    eqn, index = graph.producer(value)
    if eqn is None:
        raise NotFactored("its gradient is an input, of the program or of a loop")
    name = eqn.primitive.name
    if is_scan(eqn) or is_remat(eqn):
        return _lift(graph, eqn, index)
    if name in _SOURCES:
        return [_SOURCES[name](graph, eqn)]
    if name not in _VIEWS:
        raise NotFactored(f"its gradient comes from `{name}`")
    return [_VIEWS[name](term, eqn) for term in find_terms(graph, eqn.invars[0])]


def _lift(graph: Graph, eqn: JaxprEqn, index: int) -> list[Term]:
    body = graph.body(eqn)
    addends = _addends(body, body.jaxpr.outvars[index])
    summed = is_scan(eqn) and index < eqn.params["num_carry"]
    if summed:
        position = eqn.params["num_consts"] + index
        carry = body.jaxpr.invars[position]
        others = [addend for addend in addends if addend is not carry]
        # A sum over iterations starts at zero and is itself one addend, once: w.T, w + w or a
        # fresh value would be carried on as something else.
        if not graph.is_zero(eqn.invars[position]) or len(others) != len(addends) - 1:
            raise NotFactored("its gradient is carried through a scan")
        addends = others
    terms = [term for addend in addends for term in _terms(body, addend)]
    return [term.lifted(eqn, summed=summed) for term in terms]


def _product(graph: Graph, eqn: JaxprEqn) -> Product:
    del graph
    (contract, batch) = eqn.params["dimension_numbers"]
    sides = []
    for value, contracted, batched in zip(eqn.invars, contract, batch, strict=True):
        if not jnp.issubdtype(dtype_of(value), jnp.inexact):
            raise NotFactored("it multiplies integers")
        shape = shape_of(value)
        free = tuple(d for d in range(len(shape)) if d not in (*contracted, *batched))
        sizes = tuple(shape[d] for d in free)
        sides.append(Side(value, tuple(batched), free, tuple(contracted), sizes))
    left, right = sides
    labels = (
        *(("batch", i) for i in range(len(left.batch))),
        *(("left", i) for i in range(len(left.free))),
        *(("right", i) for i in range(len(right.free))),
    )
    return Product(left, right, labels, dtype_of(eqn.outvars[0]))


def _scatter(graph: Graph, eqn: JaxprEqn) -> Scatter:
    table, indices, rows = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    clip = eqn.params["mode"] == GatherScatterMode.CLIP
    lookups = len(shape_of(indices)) - 1
    rest = shape_of(table)[1:]
    windows = {(0,): rest, (): (1, *rest)}  # with the row's own axis dropped, or kept
    indexed = tuple(numbers.scatter_dims_to_operand_dims)
    whole_rows = (
        # A window as wide as the table, clipped into it, starts at 0 whatever its other indices.
        (indexed[:1] == (0,) if clip else indexed == (0,))
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(lookups, len(shape_of(rows))))
        and windows.get(tuple(numbers.inserted_window_dims)) == shape_of(rows)[lookups:]
    )
    if not (whole_rows and graph.is_zero(table)):
        raise NotFactored("it is looked up by more than whole rows")
    return Scatter(indices, rows, clip)


_SOURCES: dict[str, Callable[[Graph, JaxprEqn], Term]] = {
    "dot_general": _product,
    "scatter-add": _scatter,
}


def _cast(term: Term, eqn: JaxprEqn) -> Term:
    old, new = (
        jnp.issubdtype(dtype_of(x), jnp.complexfloating) for x in (eqn.invars[0], eqn.outvars[0])
    )
    if old and not new:
        raise NotFactored("its gradient is the real part of a product")
    return term


def _transpose(term: Term, eqn: JaxprEqn) -> Term:
    if isinstance(term, Scatter):
        raise NotFactored("it is looked up by columns")
    return replace(term, labels=tuple(term.labels[axis] for axis in eqn.params["permutation"]))


def _reshape(term: Term, eqn: JaxprEqn) -> Term:
    """Split and merge dimensions of one side of the product."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if math.prod(old) != math.prod(new):
        raise NotFactored(f"its gradient comes from `{eqn.primitive.name}`")
    if isinstance(term, Scatter):
        raise NotFactored("its gradient is a reshaped table")
    sizes: dict[str, list[int]] = {"batch": [], "left": [], "right": []}
    labels: list[tuple[str, int]] = []
    flat: dict[str, list[int]] = {"batch": [], "left": [], "right": []}
    for dims, shape in _blocks(old, new):
        kinds = {term.labels[d][0] for d in dims} or {"right"}
        kind = kinds.pop()
        if kinds or (kind == "batch" and len(dims) != len(shape)):
            raise NotFactored("its gradient is reshaped across the two factors")
        flat[kind] += [term.labels[d][1] for d in dims]
        labels += [(kind, len(sizes[kind]) + i) for i in range(len(shape))]
        sizes[kind] += shape
    if any(order != sorted(order) for order in flat.values()):
        raise NotFactored("its gradient is reshaped out of order")
    left, right = replace(term.left, sizes=tuple(sizes["left"])), term.right
    return Product(left, replace(right, sizes=tuple(sizes["right"])), tuple(labels), term.dtype)


def _sum(term: Term, eqn: JaxprEqn) -> Term:
    """Sum separate products, or drop dimensions of size one."""
    axes = tuple(map(int, eqn.params["axes"]))
    if isinstance(term, Product) and all(term.labels[axis][0] == "batch" for axis in axes):
        return term.summed(axes)
    return _reshape(term, eqn)


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Cut a reshape into the smallest independent ones: (old dimensions, new sizes) each."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        dims, shape = [], []
        if i < len(old):
            dims.append(i)
            i += 1
        if j < len(new) and (not dims or old[dims[0]] != 1 or new[j] == 1):
            shape.append(new[j])
            j += 1
        while math.prod(old[d] for d in dims) != math.prod(shape):
            if math.prod(old[d] for d in dims) < math.prod(shape):
                dims.append(i)
                i += 1
            else:
                shape.append(new[j])
                j += 1
        blocks.append((dims, shape))
    return blocks


_VIEWS: dict[str, Callable[[Term, JaxprEqn], Term]] = {
    "convert_element_type": _cast,
    "copy": _cast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _reshape,
    "reduce_sum": _sum,
}
