"""Checks of arguments, in one grammar: the call, what it needs, what it got, the cure."""

import math
import operator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float


def integer(call: str, name: str, value: Any, low: int, high: int | None, cure: str) -> int:
    """`value` as an int from `low` to `high`, or the error that names the valid ones.

    Example:
        >>> integer("uncoded", "num_workers", 8, 1, None, "Count the workers.")
        8
    """
    valid = f"of at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ValueError(f"`{call}` needs {name} to be an integer {valid}; got {value!r}. {cure}")
    return number


def real(
    call: str, name: str, value: Any, *, low: float | int, high: float | int, cure: str
) -> float:
    """`value` as a finite float from `low` to `high`, or the error that names the valid ones.

    Example:
        >>> real("bimodal", "probability", 0.25, low=0, high=1, cure="Use a fraction.")
        0.25
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        valid = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(
            f"`{call}` needs {name} to be a finite number {valid}; got {value!r}. {cure}"
        )
    return number


def code_sizes(
    call: str, num_workers: Any, num_stragglers: Any, num_fragments: Any = 1
) -> tuple[int, int, int]:
    """n, s and m of a code, with s + m <= n.

    Example:
        >>> code_sizes("polynomial", 8, 2, 2)
        (8, 2, 2)
    """
    n = integer(call, "num_workers", num_workers, 1, None, "Count the workers.")
    m = integer(call, "num_fragments", num_fragments, 1, n, "Use fewer fragments.")
    cure = "Use more workers, or tolerate fewer stragglers."
    return n, integer(call, "num_stragglers", num_stragglers, 0, n - m, cure), m


def as_array(value: Any) -> np.ndarray:
    """`value` as an array; what is ragged, and so is none, as an empty one of objects.

    Example:
        >>> as_array([[1], [2, 3]])
        array([], dtype=object)
    """
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty(0, object)


def first_line(error: Exception) -> str:
    """Why a file cannot be read: an exception's first line, or its type where it has none.

    Example:
        >>> first_line(EOFError())
        'EOFError'
    """
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return str(error).strip().split("\n")[0] or type(error).__name__


def fractions(
    call: str, name: str, values: Any, count: int, *, zeros: bool = False
) -> Float[np.ndarray, " {count}"]:
    """`values` as `count` finite floats above 0, or of at least 0 and not all 0.

    Example:
        >>> fractions("Code", "shares", [1, 3], 2)
        array([1., 3.])
    """
    array = as_array(values)
    fits = array.shape == (count,) and array.dtype.kind in "iuf" and np.isfinite(array).all()
    if not (fits and (array >= 0).all() and (array.any() if zeros else array.all())):
        valid = "none negative and not all 0" if zeros else "all above 0"
        raise ValueError(
            f"`{call}` needs {name} to be {count} finite numbers, {valid}; got {values!r}. Count "
            "the examples of each."
        )
    return array.astype(float)


def encoding(matrix: Any) -> Float[np.ndarray, "workers partitions fragments"]:
    """An encoding matrix, (n, k) or (n, k, m), as a finite float64 array of three axes.

    Example:
        >>> encoding([[1, 0], [0, 1]]).shape
        (2, 2, 1)
    """
    array = as_array(matrix)
    if array.ndim not in (2, 3) or 0 in array.shape or array.dtype.kind not in "biuf":
        raise ValueError(
            "`Code` needs a real encoding_matrix of shape (workers, partitions) or (workers, "
            f"partitions, fragments), its rows of one length; got {type(matrix).__name__} that "
            f"makes {array.dtype} of shape {array.shape}. Give one row a worker."
        )
    if not np.isfinite(array).all():
        raise ValueError(
            f"`Code` needs a finite encoding_matrix; got {np.sum(~np.isfinite(array))} infinite "
            "or NaN entries. Check how the code was made."
        )
    return array.reshape(*array.shape[:2], -1).astype(float)


def arrived(call: str, survivors: Any, num_workers: int) -> Bool[np.ndarray, "*steps workers"]:
    """Survivors as an array of (..., num_workers) bool.

    Example:
        >>> arrived("Code.is_decodable", [True, False], 2)
        array([ True, False])
    """
    try:
        array = np.asarray(survivors)
    except Exception as error:  # what a tracer raises is JAX's, which this module does not know
        raise ValueError(
            f"`{call}` needs survivors known by now, got {type(survivors).__name__}: call it "
            "outside jit, and pass the weights in as an argument"
        ) from error
    if array.dtype != bool or array.shape[-1:] != (num_workers,):
        raise ValueError(
            f"`{call}` needs survivors to be bool of shape (..., {num_workers}), True where a "
            f"worker answered; got {array.dtype} of shape {array.shape}. Compare arrival times "
            "with a deadline, or use the survivors of a Round."
        )
    return array


def weights_of(
    call: str, weights: Any, survivors: Bool[np.ndarray, "*steps workers"], num_fragments: int
) -> Float[np.ndarray, "*steps fragments workers"]:
    """Decoding weights that fit these survivors: of their shape, finite, and 0 at stragglers.

    Example:
        >>> weights_of("Code.decoding_error", [[1, 0]], np.array([True, False]), 1)
        array([[1., 0.]])
    """
    array = np.asarray(weights, float)
    shape = (*survivors.shape[:-1], num_fragments, survivors.shape[-1])
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(
            f"`{call}` needs finite weights of shape {shape} for these survivors; got shape "
            f"{array.shape}. Use decoding_weights or one_step_weights."
        )
    if array[~np.broadcast_to(survivors[..., None, :], shape)].any():
        raise ValueError(
            f"`{call}` needs weights of 0 where a worker is missing; got others. Use the weights "
            "that were made for these survivors."
        )
    return array
