"""The rounds of a server that waits for enough workers: who was counted, and how long it took."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxcode.checks import integer
from jaxcode.seconds import Real, latencies, positive


class Round(NamedTuple):
    """Who was counted in a round, or in many rounds with leading axes.

    Attributes:
        survivors: (..., n) bool, True for the workers counted.
        latency: (..., n) seconds until each worker's message, counted or not.
        elapsed: (...) seconds until the step could go on.

    Example:
        >>> rounds = wait(np.array([[1.0, 3.0, 2.0]]), until=2)
        >>> rounds.survivors.tolist(), rounds.elapsed.tolist()
        ([[True, False, True]], [2.0])
    """

    survivors: Bool[np.ndarray, "*steps workers"]
    latency: Float[np.ndarray, "*steps workers"]
    elapsed: Float[np.ndarray, "*steps"]


def wait(
    latency: Shaped[Any, "*steps workers"] | list[Any],
    *,
    until: int | Callable[[Bool[np.ndarray, "..."]], Any],
    deadline: Real | None = None,
) -> Round:
    """The rounds of a server that counts messages in order of arrival until it has enough.

    Counted are the fewest first arrivals, at least one, that `until` accepts (of equal times the
    lower worker first). Where it never does, all in time count, and the round lasts until the
    deadline, or until the last arrival if there is no deadline or nobody is missing.

    Args:
        latency: (..., n) seconds, infinite where a worker never answers.
        until: How many arrivals to wait for, or a function from (..., n) survivors to (...) bool,
            such as `code.is_decodable`. More survivors must never make it false.
        deadline: Seconds to wait at most. Too low and rounds end without enough; too high and each
            loss that the code does not cover costs that long.

    Returns:
        The `Round`.

    Raises:
        ValueError: An argument is out of range, such as a latency that is negative or NaN.
        TimeoutError: Nobody at all arrived in time in some round.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(4, 1)
        >>> float(wait([1.0, 2.0, np.inf, 9.0], until=code.is_decodable).elapsed)
        9.0
        >>> wait([1.0, 2.0, np.inf, 9.0], until=code.is_decodable, deadline=5.0).elapsed.tolist()
        5.0
    """
    seconds = latencies("wait", latency)
    accepts = _acceptance(until, seconds.shape[-1])
    arrived = np.isfinite(seconds)
    if deadline is not None:
        arrived &= seconds <= positive("wait", "deadline", deadline)
    total = np.asarray(arrived.sum(-1))
    _require_somebody(seconds, total, deadline)
    enough = accepts(arrived)
    order = np.argsort(seconds, axis=-1, kind="stable")
    place = np.argsort(order, axis=-1)  # of each worker in the order of arrival
    count = _smallest(lambda count: accepts(place < count[..., None]), total, enough)
    ordered = np.take_along_axis(seconds, order, axis=-1)
    elapsed = np.take_along_axis(ordered, count[..., None] - 1, axis=-1)[..., 0]
    if deadline is not None:
        elapsed = np.where(enough | (total == seconds.shape[-1]), elapsed, deadline)
    return Round(place < count[..., None], seconds, elapsed)


def _smallest(
    accepts: Callable[[Int[np.ndarray, "*steps"]], Bool[np.ndarray, "*steps"]],
    total: Int[np.ndarray, "*steps"],
    enough: Bool[np.ndarray, "*steps"],
) -> Int[np.ndarray, "*steps"]:
    """The smallest count accepted, from 1 to `total`, by bisection; `total` where not enough."""
    low, high = np.where(enough, 1, total), total
    while (low < high).any():
        middle = np.asarray((low + high) // 2)
        accepted = accepts(middle)
        low, high = np.where(accepted, low, middle + 1), np.where(accepted, middle, high)
        low = np.minimum(low, high)  # a round that never is accepted stays at its total
    return high


def _acceptance(until: Any, num_workers: int) -> Callable[[np.ndarray], Bool[np.ndarray, "..."]]:
    """`until` as a function of survivors whose answer is known to be bool and of their shape."""
    if not callable(until):
        cure = "Give how many arrivals to wait for, or a function such as code.is_decodable."
        needed = integer("wait", "until", until, 1, num_workers, cure)
        return lambda survivors: np.asarray(survivors.sum(-1) >= needed)

    def accepts(survivors: np.ndarray) -> Bool[np.ndarray, "..."]:
        answer = np.asarray(until(survivors))
        if answer.dtype != bool or answer.shape != survivors.shape[:-1]:
            raise ValueError(
                f"`wait` needs until to return bool of shape {survivors.shape[:-1]} for survivors "
                f"of shape {survivors.shape}; got {answer.dtype} of shape {answer.shape}. Reduce "
                "over the last axis only."
            )
        return answer

    return accepts


def _require_somebody(seconds: np.ndarray, total: np.ndarray, deadline: Real | None) -> None:
    if total.all():
        return
    index = tuple(int(i) for i in np.argwhere(total == 0)[0])
    where = f"round {index[0] if len(index) == 1 else index}" if index else "the round"
    limit = "at all" if deadline is None else f"by the deadline of {deadline:g} s"
    raise TimeoutError(
        f"`wait` needs a message in every round; got none {limit} in {where}, where the first "
        f"arrives after {seconds[index].min():g} s. Raise the deadline, or check the workers."
    )
