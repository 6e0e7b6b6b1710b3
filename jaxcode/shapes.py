"""The shapes of a model's parameters, from whatever describes them, without JAX.

Designs are compared before anything runs, often on a machine without an accelerator. So shapes are
read from trees of arrays or of shapes, from a Flax NNX module, or from the headers of an `.npz`.
"""

import math
import numbers
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcode.checks import first_line

# Bytes of a number where nothing says its type: float32.
ITEMSIZE = 4
# Up to here a count is exact in float64.
_LARGEST = 2**53
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What a file that is no archive of arrays, or is damaged, locked or packed otherwise, raises.
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


class Leaf(NamedTuple):
    """One parameter: its shape, and the bytes of one of its numbers.

    Example:
        >>> Leaf((784, 1024), 4).size
        802816
    """

    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Its view as a matrix: the first axis by all others; a vector is a column."""
        first = self.shape[0] if self.shape else 1
        return first, math.prod(self.shape[1:])


def leaf_shapes(params: Any, *, call: str = "leaf_shapes") -> dict[str, Leaf]:
    """The parameters' leaves, by the path to each, joined by "/", in order, depth first.

    Args:
        params: nested mappings, lists and tuples of arrays (anything with a `.shape`), of shapes
            (a tuple or list of integers) and of plain numbers; a Flax NNX module; or the path of an
            `.npz` file, of which only the headers are read. None and empty containers, () among
            them, hold no leaf; a scalar's shape is that of any plain number.
        call: whose argument it is, for errors.

    Returns:
        A `Leaf` for each. Numbers take the dtype's bytes, or 4 where there is no dtype.

    Raises:
        ValueError: Something among them has no shape, is not numeric, or has the name of another;
            or the file cannot be read.

    Example:
        >>> leaf_shapes({"dense": {"kernel": (3, 4), "bias": np.zeros(4)}})
        {'dense/kernel': Leaf(shape=(3, 4), itemsize=4), 'dense/bias': Leaf(shape=(4,), itemsize=8)}
    """
    if isinstance(params, str | os.PathLike):
        return _named_once(_stored(os.fspath(params), call), call)
    nnx = sys.modules.get("flax.nnx")  # a module cannot have been made without it
    if nnx is not None and isinstance(params, nnx.Module):
        params = nnx.to_pure_dict(nnx.state(params, nnx.Param))
    return _named_once(_leaves(params, (), call), call)


def _named_once(leaves: Iterator[tuple[str, Leaf]], call: str) -> dict[str, Leaf]:
    named: dict[str, Leaf] = {}
    for name, leaf in leaves:
        if name in named:  # as {"a/b": x, "a": {"b": y}}: one of them would go uncounted
            raise ValueError(
                f"`{call}` needs a different path to each leaf; got two leaves at {name}. Rename "
                "one."
            )
        named[name] = leaf
    return named


def _leaf(shape: Any, dtype: Any, name: str, call: str) -> Leaf:
    """A leaf of this shape, if that is one, and of this dtype, if that is numeric."""
    where = name or "the top"
    if not _are_sizes(shape) or min(shape, default=0) < 0:
        raise ValueError(
            f"`{call}` needs shapes of known sizes, none negative; got {shape!r} at "
            f"{where}. Count each axis."
        )
    leaf = Leaf(tuple(int(size) for size in shape), _itemsize(dtype, where, call))
    if leaf.size > _LARGEST:
        raise ValueError(
            f"`{call}` needs parameters of at most 2**53 numbers; got about "
            f"2**{math.log2(leaf.size):.0f} at {where}. Check its shape."
        )
    return leaf


def _itemsize(dtype: Any, where: str, call: str) -> int:
    if dtype is None:
        return ITEMSIZE
    try:
        dtype = np.dtype(dtype)  # of a name or a scalar type, too
    except TypeError:  # another library's
        return getattr(dtype, "itemsize", ITEMSIZE)
    if dtype.kind in "OSUMm":
        raise ValueError(
            f"`{call}` needs arrays of numbers; got {dtype} at {where}. Leave out what is no "
            "parameter."
        )
    return dtype.itemsize


def _are_sizes(node: Any) -> bool:
    return isinstance(node, list | tuple) and all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in node
    )


def _leaves(node: Any, path: tuple[str, ...], call: str) -> Iterator[tuple[str, Leaf]]:
    """Names and leaves, depth first: JAX's flattening for the common containers, without JAX."""
    name = "/".join(path)
    if isinstance(node, Leaf):
        yield name, node
    elif hasattr(node, "shape") and not isinstance(node, type):
        yield name, _leaf(node.shape, getattr(node, "dtype", None), name, call)
    elif isinstance(node, numbers.Number):
        yield name, Leaf((), ITEMSIZE)
    elif node and _are_sizes(node):
        yield name, _leaf(node, None, name, call)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, (*path, str(key)), call)
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, str(index)), call)
    elif node is not None:
        raise ValueError(
            f"`{call}` needs nested mappings, lists and tuples of arrays or shapes; got "
            f"{type(node).__name__} at {name or 'the top'}. Give a dict of its arrays."
        )


def _stored(path: str, call: str) -> Iterator[tuple[str, Leaf]]:
    """Names and leaves of an `.npz` file, from its headers: nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {entry: _header(archive, entry) for entry in archive.namelist()}
    except _UNREADABLE as error:
        raise ValueError(
            f"`{call}` needs an .npz file of arrays; cannot read {path!r}: {first_line(error)}. "
            "Save the parameters with numpy.savez."
        ) from error
    for entry, (shape, dtype) in headers.items():
        name = entry.removesuffix(".npy")
        yield name, _leaf(shape, dtype, name, call)


def _header(archive: zipfile.ZipFile, entry: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise ValueError(f"{entry} has fields with names")  # what version 3 is for
        shape, _, dtype = _READERS[version](file)
    return shape, dtype
