"""Gradients that are not stored as matrices: sufficient factors, normal forms and indexed rows.

A layer ``y = x @ W`` has the gradient ``x^T delta``. With ``r`` rows of ``x`` its rank is at most
``r``, and the pair ``(x^T, delta^T)`` says all there is to say about it in ``r (p + q)`` numbers.
A matrix of rank ``r`` has fewer dimensions than that: its normal form, ``r`` of its rows and the
others as combinations of them, is ``r (p + q - r)`` numbers. The gradient of an embedding table
touches only the rows that were looked up. All are pytrees, so whatever is linear in the stored
numbers (encoding, decoding) maps over them leaf by leaf.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcode.precision import alike, widen


def _static(default: Any = None) -> Any:
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The matrix ``P Q^T``, one for each index of the batch axes.

    ``LowRank(P, Q)`` is a gradient of shape (*batch, p, q); the other fields say where it stands in
    a parameter whose axes are in another order, or more.

    Attributes:
        P: left factor, (*batch, p, r). For a layer ``x @ W`` it is ``x^T``.
        Q: right factor, (*batch, q, r). For a layer ``x @ W`` it is ``delta^T``.
        shape: shape of the parameter, whose axes the factors' axes are folded from.
        rows: the parameter's axes that p runs over, in order.
        batch: the parameter's axes that hold one matrix each (stacked layers, experts).
        dtype: dtype of the parameter, and of the dense gradient.
        rank: r, an upper bound on the rank of each matrix.
        product_dtype: dtype in which automatic differentiation would have returned the product;
            narrower than ``dtype`` where a layer computes in half precision.

    Example:
        >>> import jax.numpy as jnp
        >>> x, delta = jnp.ones((2, 5)), jnp.ones((2, 3))
        >>> grad = LowRank(x.T, delta.T)
        >>> grad.rank, grad.to_dense().shape
        (2, (5, 3))
    """

    P: Any
    Q: Any
    shape: tuple[int, ...] = _static(())
    rows: tuple[int, ...] = _static(())
    batch: tuple[int, ...] = _static(())
    dtype: Any = _static()
    rank: int = _static(0)
    product_dtype: Any = _static()

    def __post_init__(self) -> None:
        """Derive what was left out from the factors."""
        if self.shape:
            return
        *batch, p, rank = self.P.shape
        *_, q, other = self.Q.shape
        if self.P.shape[:-2] != self.Q.shape[:-2] or rank != other:
            raise ValueError(
                "`LowRank` needs factors of shapes (*batch, p, r) and (*batch, q, r); got "
                f"{self.P.shape} and {self.Q.shape}: the batch axes and r must agree"
            )
        dtype = np.promote_types(self.P.dtype, self.Q.dtype)
        derived = {
            "shape": (*batch, p, q),
            "rows": (len(batch),),
            "batch": tuple(range(len(batch))),
            "dtype": dtype,
            "rank": rank,
            "product_dtype": dtype,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def columns(self) -> tuple[int, ...]:
        """The parameter's axes that q runs over, in order."""
        used = set(self.rows) | set(self.batch)
        return tuple(axis for axis in range(len(self.shape)) if axis not in used)

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of P and Q; also where the factors themselves are coded, and have other shapes."""
        batch, rows, columns = (
            tuple(self.shape[axis] for axis in axes)
            for axes in (self.batch, self.rows, self.columns)
        )
        return (*batch, math.prod(rows), self.rank), (*batch, math.prod(columns), self.rank)

    def to_dense(self) -> Array:
        """Form the product, in the parameter's shape and dtype.

        The product is summed in float32 at the highest precision, and rounded where automatic
        differentiation would have rounded it. Further leading axes, as `jax.vmap` makes them, stay.
        """
        if self.P.ndim > len(self.batch) + 2:
            return jax.vmap(LowRank.to_dense)(self)
        P, Q = map(widen, alike([self.P, self.Q]))
        product = jnp.einsum("...pr,...qr->...pq", P, Q, precision=jax.lax.Precision.HIGHEST)
        return self._unfold(product).astype(self.product_dtype).astype(self.dtype)

    def sum_of_products(self, P: Array, Q: Array) -> Array:
        """The dense sum of k gradients of this parameter, from (k, *batch, p, r) stacked factors.

        As if their factors stood side by side, of rank k r; unrounded until the end.
        """
        P, Q = map(widen, alike([P, Q]))
        product = jnp.einsum("k...pr,k...qr->...pq", P, Q, precision=jax.lax.Precision.HIGHEST)
        return self._unfold(product).astype(self.dtype)

    def _unfold(self, product: Array) -> Array:
        """Bring (*batch, p, q) into the parameter's shape."""
        order = (*self.batch, *self.rows, *self.columns)
        shape = tuple(self.shape[axis] for axis in order)
        if product.shape != shape:
            product = product.reshape(shape)
        if order == tuple(range(len(order))):
            return product
        return product.transpose(sorted(range(len(order)), key=order.__getitem__))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormalForm:
    """A matrix ``G`` of rank at most r, as r of its rows and the others as combinations of them.

    ``G[pivots] = rows`` and ``G[others] = X rows``, with the other rows in ascending order: exactly
    r (p + q - r) real numbers, as many as the set of these matrices has dimensions. The pivots are
    integers, and travel whole. Made by `jaxcode.normal.normal_form`.

    Attributes:
        pivots: int32 (*batch, r), ascending.
        X: (*batch, p - r, r), each of the other rows as a combination of the pivot rows.
        rows: (*batch, r, q), the pivot rows.
        place: the factors it was made from, without their arrays: where it stands in the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcode.normal import normal_form
        >>> grad = normal_form(LowRank(jnp.array([[1.0], [4.0], [2.0]]), jnp.ones((3, 1))))
        >>> grad.pivots.tolist(), grad.X.tolist(), grad.rows.tolist()
        ([1], [[0.25], [0.5]], [[4.0, 4.0, 4.0]])
    """

    pivots: Any
    X: Any
    rows: Any
    place: LowRank = _static()

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of X and of the pivot rows; also where they are coded, and have other shapes."""
        (*batch, p, rank), (*_, q, _) = self.place.factor_shapes
        return (*batch, p - rank, rank), (*batch, rank, q)

    def factors(self) -> LowRank:
        """The same matrix as ``P Q^T``: P has the unit matrix at the pivots, and X elsewhere."""
        P = jnp.vectorize(_spread, signature="(r),(o,r)->(p,r)")(self.pivots, self.X)
        return replace(self.place, P=P, Q=jnp.swapaxes(self.rows, -1, -2))

    def to_dense(self) -> Array:
        """Form the matrix, in the parameter's shape and dtype; see `LowRank.to_dense`."""
        return self.factors().to_dense()


def _spread(pivots: Array, X: Array) -> Array:
    """P (p, r) with the unit matrix at the pivots and X elsewhere; any integers will do."""
    others, rank = X.shape
    is_pivot = jnp.zeros(others + rank, jnp.int32).at[pivots].set(1, mode="drop")
    rest = jnp.argsort(is_pivot, stable=True)[:others].astype(pivots.dtype)
    order = jnp.concatenate([pivots, rest])
    whole = jnp.concatenate([jnp.eye(rank, dtype=X.dtype), X])
    return jnp.zeros_like(whole).at[order].set(whole, mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedRows:
    """A table that is zero outside some rows: row ``indices[i]`` holds the sum of its ``rows[i]``.

    Attributes:
        indices: int32 (r,), repeats allowed; an index outside the table adds nothing.
        rows: (r, *rest), the gradients of the rows looked up.
        shape: shape (V, *rest) of the table.
        dtype: dtype of the table, and of the dense gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> grad = IndexedRows(jnp.array([1, 1]), jnp.ones((2, 4)), (3, 4), jnp.float32)
        >>> grad.to_dense()[:, 0]
        Array([0., 2., 0.], dtype=float32)
    """

    indices: Any
    rows: Any
    shape: tuple[int, ...] = _static()
    dtype: Any = _static()

    def to_dense(self) -> Array:
        """Add the rows up into the table; sums are in float32. Leading axes of `jax.vmap` stay."""
        if self.indices.ndim > 1:
            return jax.vmap(IndexedRows.to_dense)(self)
        rows = widen(self.rows)
        table = jnp.zeros(self.shape, rows.dtype)
        return table.at[self.indices].add(rows, mode="drop").astype(self.dtype)


Structured = (LowRank, NormalForm, IndexedRows)


def is_structured(leaf: Any) -> bool:
    """Whether a gradient leaf is no array but a structure; for ``jax.tree.map(is_leaf=...)``."""
    return isinstance(leaf, Structured)


def concatenate(parts: list[LowRank]) -> LowRank:
    """Add gradients of one parameter by putting their factors side by side: ranks add.

    Example:
        >>> import jax.numpy as jnp
        >>> one = LowRank(jnp.ones((4, 2)), jnp.ones((3, 2)))
        >>> concatenate([one, one]).rank
        4
    """
    P = jnp.concatenate(alike([part.P for part in parts]), axis=-1)
    Q = jnp.concatenate(alike([part.Q for part in parts]), axis=-1)
    product_dtype = functools.reduce(np.promote_types, [part.product_dtype for part in parts])
    return replace(parts[0], P=P, Q=Q, rank=P.shape[-1], product_dtype=product_dtype)


def to_dense(grads: Any, params: Any) -> Any:
    """Turn a tree of factored gradients into dense ones, ready for Optax.

    Args:
        grads: as returned by `factored_value_and_grad`: arrays, `LowRank`, `IndexedRows`, or None
            for leaves without a gradient (frozen, integer, bool, unused).
        params: the parameters; a leaf without a gradient becomes zeros like its parameter, so that
            `optax.apply_updates` leaves that parameter untouched.

    Returns:
        A tree of arrays with the structure, shapes and dtypes of ``params``.

    Example:
        >>> import jax.numpy as jnp
        >>> to_dense({"w": None}, {"w": jnp.ones(2)})["w"]
        Array([0., 0.], dtype=float32)
    """

    def dense(param: Any, grad: Any) -> Any:
        if grad is None:
            is_array = hasattr(param, "dtype")
            return jnp.zeros(param.shape, param.dtype) if is_array else None
        return grad.to_dense() if is_structured(grad) else grad

    return jax.tree.map(dense, params, grads, is_leaf=lambda leaf: leaf is None)
