"""Numbers from the command line, for argparse: one line says what was needed and what came."""

import argparse
import math
from collections.abc import Callable


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a converter to integers of at least `low`, and at most `high` if there is one.

    Example:
        >>> whole(1)("8")
        8
    """
    valid = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"needs a whole number {valid}; got {text!r}")
        return value

    return convert


def real(low: float, high: float | None = None, *, above: bool = False) -> Callable[[str], float]:
    """Return a converter to numbers of at least `low`, or above it, and below `high`, if any.

    Example:
        >>> real(0.0, 1.0)("0.5")
        0.5
    """
    valid = f"{'above' if above else 'of at least'} {low:g}"
    valid += "" if high is None else f" and below {high:g}"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = value > low if above else value >= low
        if not inside or (high is not None and not value < high):
            raise argparse.ArgumentTypeError(f"needs a number {valid}; got {text!r}")
        return value

    return convert


def seconds_or_adaptive(text: str) -> float | str:
    """Return seconds above 0, or the word adaptive.

    Example:
        >>> seconds_or_adaptive("2.5"), seconds_or_adaptive("adaptive")
        (2.5, 'adaptive')
    """
    try:
        return text if text == "adaptive" else real(0.0, 1e9, above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"needs seconds above 0, or adaptive; got {text!r}"
        ) from error


def share(*, above: bool = False) -> Callable[[str], float]:
    """Return a converter to a whole number, or a fraction below 1, as Ray counts what it has.

    Args:
        above: refuse 0.

    Example:
        >>> share()("0.5"), share()("2")
        (0.5, 2.0)
    """

    def convert(text: str) -> float:
        value = real(0.0, 1e6, above=above)(text)
        if value > 1 and value != int(value):
            raise argparse.ArgumentTypeError(
                f"needs a whole number, or a fraction below 1; got {text!r}"
            )
        return value

    return convert
