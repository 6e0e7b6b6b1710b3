"""Checks of arguments, in one grammar: the call, what it needs, what it got, the cure."""

import math
import operator
from typing import Any


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
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        valid = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(
            f"`{call}` needs {name} to be a finite number {valid}; got {value!r}. {cure}"
        )
    return number
