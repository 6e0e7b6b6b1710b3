"""The gradient of any loss, in factors: `factored_value_and_grad`.

The loss is differentiated as usual, and the program of its gradient is rewritten: where a weight's
gradient ends in a product ``x^T delta`` (or a scatter of rows), the operands are returned and the
product is never formed. Because the rewrite happens after differentiation it needs no change to the
model and no rule of its own for any layer, and a custom derivative keeps its meaning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxcode.jaxprs import Graph, Value, dtype_of, shape_of
from jaxcode.leaves import Call, is_array, is_differentiable
from jaxcode.lowrank import IndexedRows, LowRank, NormalForm, concatenate
from jaxcode.normal import normal_form, normal_form_saves
from jaxcode.precision import alike
from jaxcode.products import NotFactored, Product, Scatter, Side, Term, find_terms

UNUSED = "the loss does not use it"


class LeafSummary(NamedTuple):
    """How one parameter's gradient is represented.

    Attributes:
        path: where the leaf is in the tree of parameters.
        shape: shape of the parameter.
        kind: "factors", "normal form", "rows", "dense", or "none" for a leaf without a gradient.
        numbers: numbers the representation holds.
        reason: why it is not in factors; empty where it is.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    numbers: int
    reason: str


class Summary(NamedTuple):
    """Which leaf went which way and why; ``str()`` makes a table of it."""

    rows: tuple[LeafSummary, ...]

    @property
    def numbers(self) -> int:
        """Numbers in the whole gradient as represented."""
        return sum(row.numbers for row in self.rows)

    @property
    def dense_numbers(self) -> int:
        """Numbers in the same gradient with every leaf dense."""
        return sum(math.prod(row.shape) for row in self.rows if row.kind != "none")

    def __str__(self) -> str:
        """One line a leaf."""
        header = ("parameter", "shape", "kind", "numbers", "reason")
        lines = [header, *((r[0], str(r[1]), r[2], f"{r[3]:,}", r[4]) for r in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = ["  ".join([*map(str.ljust, line[:4], widths), line[4]]).rstrip() for line in lines]
        total = f"{self.numbers:,} numbers of {self.dense_numbers:,} dense"
        return "\n".join([*table, total])


@dataclass(frozen=True)
class _Factors:
    """Where a leaf's factors are computed, and how to arrange them."""

    products: tuple[Product, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    normal: bool = False

    @property
    def kind(self) -> str:
        return "normal form" if self.normal else "factors"

    @property
    def values(self) -> list[Value]:
        return [side.value for term in self.products for side in (term.left, term.right)]

    @property
    def numbers(self) -> int:
        batch, p, q, rank = self._sizes
        # The pivots, a row's number each, count as numbers.
        return batch * rank * (p + q - rank + 1 if self.normal else p + q)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        batch = math.prod(self.shape[axis] for axis in self.batch)
        p = math.prod(self.shape[axis] for axis in self.rows)
        q = math.prod(self.shape) // max(batch * p, 1)
        return batch, p, q, sum(term.left.rank for term in self.products)

    def shortest(self) -> "_Factors":
        """These factors, or their normal form where that saves enough.

        Mixed precision keeps its factors: a normal form would round their products to the narrower
        dtype, or be sent in the wider.
        """
        _, p, q, rank = self._sizes
        dtypes = {np.dtype(dtype_of(value)) for value in self.values}
        dtypes |= {np.dtype(term.dtype) for term in self.products}
        same = len(dtypes) == 1 and all(jnp.issubdtype(x, jnp.floating) for x in dtypes)
        return replace(self, normal=same and normal_form_saves(p, q, rank))

    def assemble(self, arrays: list[Any]) -> LowRank | NormalForm:
        pairs = zip(self.products, arrays[::2], arrays[1::2], strict=True)
        grad = concatenate([self._low_rank(*pair) for pair in pairs])
        return normal_form(grad) if self.normal else grad

    def _low_rank(self, term: Product, left: Any, right: Any) -> LowRank:
        first = term.labels[self.rows[0]][0]
        sides = {"left": (term.left, left), "right": (term.right, right)}
        batch = [i for kind, i in term.labels if kind == "batch"]
        P, Q = (
            _arrange(*sides[side], [i for kind, i in term.labels if kind == side], batch)
            for side in (first, "right" if first == "left" else "left")
        )
        rank = term.left.rank
        return LowRank(P, Q, self.shape, self.rows, self.batch, self.dtype, rank, term.dtype)


def _arrange(side: Side, array: Any, order: list[int], batch: list[int]) -> Any:
    """Bring an operand into (*batch, p, r) with p in the order of the parameter's axes."""
    array = array.transpose([side.batch[i] for i in batch] + [*side.free, *side.contract])
    head = array.shape[: len(batch)]
    array = array.reshape(*head, *side.sizes, side.rank)
    axes = [len(batch) + i for i in order]
    array = array.transpose([*range(len(batch)), *axes, array.ndim - 1])
    return array.reshape(*head, math.prod(side.sizes), side.rank)


@dataclass(frozen=True)
class _Rows:
    """Where a table's rows and indices are computed."""

    scatters: tuple[Scatter, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def kind(self) -> str:
        return "rows"

    @property
    def values(self) -> list[Value]:
        return [value for term in self.scatters for value in (term.indices, term.rows)]

    @property
    def numbers(self) -> int:
        indices = sum(math.prod(shape_of(term.indices)[:-1]) for term in self.scatters)
        return indices * (1 + math.prod(self.shape[1:]))

    def assemble(self, arrays: list[Any]) -> IndexedRows:
        table = self.shape[0]
        indices, rows = [], []
        for term, index, row in zip(self.scatters, arrays[::2], arrays[1::2], strict=True):
            index = index[..., 0].reshape(-1)
            if jnp.iinfo(index.dtype).bits < 32:  # the table may be longer than a byte counts
                index = index.astype(jnp.int32)
            if term.clip:
                index = jnp.clip(index, 0, table - 1)
            # `.at[]` would read a negative index from the end; here it is out of bounds.
            outside = (index < 0) | (index >= table)
            indices.append(jnp.where(outside, table, index).astype(jnp.int32))
            rows.append(row.reshape(-1, *self.shape[1:]))
        return IndexedRows(
            jnp.concatenate(indices), jnp.concatenate(alike(rows)), self.shape, self.dtype
        )


def _decide(graph: Graph, gradient: Value, path: str, *, normal: bool) -> tuple[Any, LeafSummary]:
    """How to represent one gradient: _Factors, _Rows, "dense", or None for a zero."""
    shape, dtype = shape_of(gradient), dtype_of(gradient)
    size = math.prod(shape)
    try:
        if graph.has_references:
            raise NotFactored("the loss uses mutable references")
        if graph.is_zero(gradient):
            return None, LeafSummary(path, shape, "none", 0, UNUSED)
        if len(shape) < 2 or not size:
            raise NotFactored("a scalar" if not shape else "a vector" if size else "it is empty")
        terms = find_terms(graph, gradient)
        if not terms:
            return None, LeafSummary(path, shape, "none", 0, UNUSED)
        found = _arrangement(terms, shape, dtype)
        if normal and isinstance(found, _Factors):
            found = found.shortest()
        if found.numbers >= size:
            raise NotFactored(f"factors would hold {found.numbers:,} numbers")
    except NotFactored as reason:
        return "dense", LeafSummary(path, shape, "dense", size, str(reason))
    return found, LeafSummary(path, shape, found.kind, found.numbers, "")


def _arrangement(terms: list[Term], shape: tuple[int, ...], dtype: Any) -> "_Factors | _Rows":
    scatters = tuple(term for term in terms if isinstance(term, Scatter))
    products = tuple(term for term in terms if isinstance(term, Product))
    if scatters and products:
        raise NotFactored("it is both looked up and multiplied")
    return _Rows(scatters, shape, dtype) if scatters else _factors(products, shape, dtype)


def _factors(terms: tuple[Product, ...], shape: tuple[int, ...], dtype: Any) -> _Factors:
    arrangements = set()
    for term in terms:
        kinds = [kind for kind, _ in term.labels]
        if "left" not in kinds or "right" not in kinds:
            raise NotFactored("its gradient is an elementwise product")
        first = next(kind for kind in kinds if kind != "batch")
        batch = tuple(axis for axis, kind in enumerate(kinds) if kind == "batch")
        rows = tuple(axis for axis, kind in enumerate(kinds) if kind == first)
        arrangements.add((batch, rows))
    if len(arrangements) > 1:
        raise NotFactored("its uses contract different axes")
    batch, rows = arrangements.pop()
    return _Factors(terms, batch, rows, shape, dtype)


class _Program(NamedTuple):
    """The gradient's program with factors for outputs, and what to make of the outputs."""

    jaxpr: ClosedJaxpr
    inputs: list[Any]
    head: Any  # shapes of (value, aux)
    leaves: list[Any]  # per leaf of the parameters: _Factors, _Rows, "dense" or None
    params: Any  # tree structure of the parameters
    summary: Summary


def _without_gradient(path: str, leaf: Any) -> LeafSummary:
    shape = tuple(leaf.shape) if is_array(leaf) else ()
    kind = str(leaf.dtype) if is_array(leaf) else type(leaf).__name__
    reason = "frozen" if is_differentiable(leaf) else f"{kind} has no gradient"
    return LeafSummary(path, shape, "none", 0, reason)


@dataclass(frozen=True)
class FactoredGradient:
    """Computes a loss and its gradient in factors; see `factored_value_and_grad`."""

    loss: Callable[..., Any]
    has_aux: bool
    trainable: Any
    normal_form: bool = False  # make a leaf a `NormalForm` where that saves enough

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return ``(value, grads)``, or ``((value, aux), grads)`` with ``has_aux``."""
        program = self._trace(params, args, kwargs)
        # Inputs and literals that are passed through come out as arrays, as under jit.
        inputs = map(jnp.asarray, program.inputs)
        outputs = map(jnp.asarray, jaxpr_as_fun(program.jaxpr)(*inputs))
        value, aux = jax.tree.map(lambda _: next(outputs), program.head)
        grads = []
        for found in program.leaves:
            if found is None or found == "dense":
                grads.append(None if found is None else next(outputs))
            else:
                grads.append(found.assemble([next(outputs) for _ in found.values]))
        result = (value, aux) if self.has_aux else value
        return result, jax.tree.unflatten(program.params, grads)

    def summary(self, params: Any, *args: Any, **kwargs: Any) -> Summary:
        """Say which leaf went which way and why, from shapes alone; computes nothing."""
        return self._trace(params, args, kwargs).summary

    def _trace(self, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        call = Call.of(params, args, kwargs, self.trainable)

        function = call.value_and_grad(self.loss, has_aux=self.has_aux)
        closed, (head, _) = jax.make_jaxpr(function, return_shape=True)(*call.inputs)
        graph = Graph(closed.jaxpr)
        outputs = graph.jaxpr.outvars
        num_head = len(jax.tree.leaves(head))
        exposed: list[Value] = list(outputs[:num_head])
        gradients = iter(outputs[num_head:])
        leaves: list[Any] = []
        rows = []
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        for path, leaf, role in zip(paths, call.leaves, call.roles, strict=False):
            if role != "trained":
                leaves.append(None)
                rows.append(_without_gradient(path, leaf))
                continue
            gradient = next(gradients)
            found, row = _decide(graph, gradient, path, normal=self.normal_form)
            leaves.append(found)
            rows.append(row)
            exposed += [gradient] if found == "dense" else [] if found is None else found.values
        jaxpr = ClosedJaxpr(graph.expose(exposed), closed.consts)
        return _Program(
            jaxpr, jax.tree.leaves(call.inputs), head, leaves, call.params, Summary(tuple(rows))
        )


def factored_value_and_grad(
    loss: Callable[..., Any], *, has_aux: bool = False, trainable: Any = None
) -> FactoredGradient:
    """Make a function that returns a loss and its gradient, with weights' gradients in factors.

    Like ``jax.value_and_grad(loss)``, but the gradient of a weight ``W`` used as ``x @ W`` is
    returned as a `LowRank` pair ``(x^T, delta^T)`` and that of a table used in lookups as
    `IndexedRows`, where that takes fewer numbers. Works through jit, remat, custom derivatives,
    casts, ``lax.scan`` over stacked layers or time, and any number of uses of one weight. Whatever
    does not match (biases, norms, convolutions, a weight inside ``cond``) is dense, exactly as
    ``jax.grad`` gives it. Neither per-example gradients nor the dense gradient of a factored leaf
    are ever formed. Use it under ``jax.jit``: each call traces the loss.

    Args:
        loss: ``loss(params, *args, **kwargs)`` returning a scalar, or ``(scalar, aux)``.
        has_aux: whether the loss returns auxiliary outputs beside its value.
        trainable: which leaves get a gradient: a tree of bools that is a prefix of the parameters,
            or a function from the parameters to one, as in ``optax.masked``. Default: all.

    Returns:
        A function from the loss's arguments to ``(value, grads)`` or ``((value, aux), grads)``.
        ``grads`` has the structure of the parameters; a leaf is an array, `LowRank`,
        `IndexedRows`, or None where there is no gradient: frozen, integer and bool leaves, which
        `to_dense` leaves untouched, and leaves the loss does not use. Its method ``summary`` takes
        the same arguments and tells which leaf went which way and why.

    Raises:
        ValueError: ``trainable`` does not fit the parameters, or the loss is not a scalar.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])
        >>> params = {"w": jnp.ones((30, 20)), "v": jnp.ones(20)}
        >>> gradient = factored_value_and_grad(loss)
        >>> value, grads = gradient(params, jnp.ones((4, 30)))
        >>> grads["w"].P.shape, grads["w"].Q.shape, grads["v"].shape
        ((30, 4), (20, 4), (20,))
        >>> print(gradient.summary(params, jnp.ones((4, 30))))
        parameter  shape     kind     numbers  reason
        ['v']      (20,)     dense    20       a vector
        ['w']      (30, 20)  factors  200
        220 numbers of 620 dense
    """
    return FactoredGradient(loss, has_aux, trainable)
