"""The shapes of a model's parameters, from whatever describes them, without JAX.

Designs are compared before anything runs, often on a machine without an accelerator. So shapes are
read from trees of arrays or of shapes, from a Flax NNX module, or from the headers of an `.npz`.
"""

import math
import numbers
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

# Bytes of a number where nothing says its type: float32.
ITEMSIZE = 4


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
            `.npz` file, of which only the headers are read.
        call: whose argument it is, for errors.

    Returns:
        A `Leaf` for each. Numbers take the dtype's bytes, or 4 where there is no dtype.

    Raises:
        ValueError: Something among them has no shape, or the file cannot be read.

    Example:
        >>> leaf_shapes({"dense": {"kernel": (3, 4), "bias": np.zeros(4)}})
        {'dense/kernel': Leaf(shape=(3, 4), itemsize=4), 'dense/bias': Leaf(shape=(4,), itemsize=8)}
    """
    if isinstance(params, str | os.PathLike):
        return dict(_stored(os.fspath(params), call))
    nnx = sys.modules.get("flax.nnx")  # a module cannot have been made without it
    if nnx is not None and isinstance(params, nnx.Module):
        params = nnx.to_pure_dict(nnx.state(params, nnx.Param))
    return dict(_leaves(params, (), call))


def _is_shape(node: Any) -> bool:
    return (
        isinstance(node, list | tuple)
        and len(node) > 0
        and all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in node)
    )


def _leaves(node: Any, path: tuple[str, ...], call: str) -> Iterator[tuple[str, Leaf]]:
    """Names and leaves, depth first: JAX's flattening for the common containers, without JAX."""
    name = "/".join(path)
    if hasattr(node, "shape") or isinstance(node, numbers.Number):
        itemsize = getattr(getattr(node, "dtype", None), "itemsize", ITEMSIZE)
        yield name, Leaf(tuple(getattr(node, "shape", ())), itemsize)
    elif _is_shape(node):
        if min(node) < 0:
            raise ValueError(
                f"`{call}` needs shapes without negative sizes; got {tuple(node)} at "
                f"{name or 'the top'}. Count each axis."
            )
        yield name, Leaf(tuple(int(size) for size in node), ITEMSIZE)
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
    """Names and leaves of an `.npz` file, from its headers."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)
                    read = {
                        (1, 0): np.lib.format.read_array_header_1_0,
                        (2, 0): np.lib.format.read_array_header_2_0,
                    }[version]
                    shape, _, dtype = read(file)
                yield entry.removesuffix(".npy"), Leaf(shape, dtype.itemsize)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
        raise ValueError(
            f"`{call}` needs an .npz file of arrays; cannot read {path!r}: {reason}. Save the "
            "parameters with numpy.savez."
        ) from error
