"""Seconds as arguments, checked: numbers, arrays, recordings in files, and models to draw from."""

import csv
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxcode.checks import as_array, first_line, real

Real = float | int
# Seconds until each worker's message, of the shape asked for. Its annotations are loose because it
# checks its arguments itself.
Latency = Callable[[Any, Any], Float[np.ndarray, "..."]]

# What a file that is no table or archive of numbers, or is damaged, raises.
_UNREADABLE = (
    OSError, ValueError, EOFError, RuntimeError, KeyError, zipfile.BadZipFile, zlib.error, csv.Error
)  # fmt: skip


def seconds(call: str, name: str, value: Any) -> float:
    """`value` as a finite number of at least 0.

    Example:
        >>> seconds("bimodal", "fast", 2)
        2.0
    """
    return real(call, name, value, low=0, high=math.inf, cure="Give seconds.")


def positive(call: str, name: str, value: Any, cure: str = "Give a positive number.") -> float:
    """`value` as a finite number above 0.

    Example:
        >>> positive("pareto", "alpha", 1.5)
        1.5
    """
    return real(call, name, value, low=np.finfo(float).tiny, high=math.inf, cure=cure)


def latencies(call: str, value: Any) -> Float[np.ndarray, "*steps workers"]:
    """`value` as float64 seconds of shape (..., workers), none negative or NaN.

    Example:
        >>> latencies("wait", [1, 2])
        array([1., 2.])
    """
    array = as_array(value)
    if array.dtype.kind not in "iuf" or array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"`{call}` needs latencies in seconds of shape (..., workers); got {array.dtype} of "
            f"shape {array.shape}. Draw them with a latency model, or give an array."
        )
    if not (array >= 0).all():
        raise ValueError(
            f"`{call}` needs latencies of at least 0; got {np.sum(~(array >= 0))} negative or "
            "NaN. Use infinity for a message that never arrives."
        )
    return array.astype(float)


def recording(call: str, source: Any) -> Float[np.ndarray, "rows workers"]:
    """Recorded seconds, (rows, workers), from an array or from a file of one.

    Example:
        >>> recording("trace", [[1, 2], [3, 4]]).shape
        (2, 2)
    """
    named = isinstance(source, str | os.PathLike)
    recorded = latencies(call, _stored(call, os.fspath(source)) if named else source)
    if recorded.ndim != 2 or not recorded.size:
        raise ValueError(
            f"`{call}` needs seconds of shape (rows, workers); got shape {recorded.shape}. Give "
            "one row a step."
        )
    return recorded


def draw(
    call: str, name: str, model: Any, rng: np.random.Generator, shape: tuple[int, ...]
) -> Float[np.ndarray, "*steps workers"]:
    """What the latency model `model`, an argument called `name`, draws, if that is seconds.

    Example:
        >>> draw("simulate", "pause", np.random.Generator.random, np.random.default_rng(0), (2,))
        array([0.63696169, 0.26978671])
    """
    cure = "Use one such as shifted_exponential(shift=0, rate=2)."
    if not callable(model):
        raise ValueError(
            f"`{call}` needs {name} to be a latency model, a function of a generator and a shape; "
            f"got {model!r}. {cure}"
        )
    with np.errstate(over="ignore"):  # what is too large for a float takes for ever
        drawn = np.asarray(model(rng, shape))
    bad = np.sum(~(drawn >= 0)) if drawn.dtype.kind in "iuf" else drawn.size
    if drawn.shape != shape or bad:
        raise ValueError(
            f"`{call}` needs {name} to draw seconds of shape {shape}; got {drawn.dtype} of shape "
            f"{drawn.shape}, {bad} negative or NaN. {cure}"
        )
    return drawn.astype(float, copy=False)


def _stored(call: str, path: str) -> Any:
    reader = {".csv": _from_csv, ".npz": _from_npz}.get(os.path.splitext(path)[1].lower())
    if reader is None:
        raise ValueError(
            f"`{call}` needs an array, or the path of a .csv or .npz file, of seconds; got "
            f"{path!r}. Save it with numpy.savez, or as lines of numbers with commas."
        )
    try:
        return reader(path)
    except _UNREADABLE as error:
        raise ValueError(
            f"`{call}` needs a file of seconds, one row a step and one column a worker; cannot "
            f"read {path!r}: {first_line(error).rstrip('.')}. Mend the file."
        ) from error


def _from_csv(path: str) -> np.ndarray:
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = [line for line in file if line.strip()]
    if lines and not any(_is_number(cell) for cell in next(csv.reader(lines[:1]))):
        lines = lines[1:]  # the names of the workers
    if not lines:
        raise ValueError("it has no row of numbers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file of comments alone, which the shape then shows
        return np.loadtxt(lines, delimiter=",", ndmin=2)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _from_npz(path: str) -> np.ndarray:
    with zipfile.ZipFile(path):  # np.load takes other files for pickles, and says so
        pass
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        name = names[0] if len(names) == 1 else "seconds"
        if name not in names:
            raise ValueError(f'it holds {len(names)} arrays, none of them called "seconds"')
        return archive[name]
