"""Who arrives when: latency models, and the rounds of a server that waits for enough workers.

A latency model is a function of a generator and a shape `(..., n)` that returns the seconds until
each worker's message arrives; infinity never arrives. `wait` turns latencies into a `Round`: who
was counted, and when the step could go on. Stragglers are thus data, drawn before anything runs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jaxcode.checks import integer, real

Real = float | int
Latency = Callable[[np.random.Generator, tuple[int, ...]], Float[np.ndarray, "..."]]


def shifted_exponential(shift: Real, rate: Real) -> Latency:
    """`shift + Exp(rate)`: a fixed time and a memoryless delay, the literature's usual model.

    Args:
        shift: Seconds that every worker takes.
        rate: Of the delay, per second; its mean is 1 / rate seconds.

    Returns:
        The latency model.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> latency = shifted_exponential(shift=1.0, rate=2.0)
        >>> latency(np.random.default_rng(0), (100, 8)).shape
        (100, 8)

    References:
        Lee et al., "Speeding up distributed machine learning using codes", 2018.
    """
    call = "shifted_exponential"
    shift = _seconds(call, "shift", shift)
    rate = _positive(call, "rate", rate)
    return lambda rng, shape: shift + rng.exponential(1 / rate, shape)


def pareto(alpha: Real, scale: Real) -> Latency:
    """Pareto with `P(latency > t) = (scale / t)^alpha` from `scale` on: rare but enormous delays.

    Args:
        alpha: Tail index; clusters show 1.2 to 2. At 1 and below the mean is infinite.
        scale: The least latency, in seconds.

    Returns:
        The latency model.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> bool((pareto(alpha=1.5, scale=2.0)(np.random.default_rng(0), (50, 4)) >= 2).all())
        True
    """
    alpha = _positive("pareto", "alpha", alpha)
    scale = _positive("pareto", "scale", scale)
    return lambda rng, shape: scale * (1 + rng.pareto(alpha, shape))


def bimodal(fast: Real, slow: Real, probability: Real) -> Latency:
    """`slow` with a probability, else `fast`: independent from step to step and worker to worker.

    Args:
        fast: Seconds of an ordinary answer.
        slow: Seconds of a straggler's; infinity for one that never answers.
        probability: Of straggling.

    Returns:
        The latency model.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> bimodal(fast=1.0, slow=5.0, probability=1.0)(np.random.default_rng(0), (2,)).tolist()
        [5.0, 5.0]
    """
    fast, slow, probability = _two_speeds("bimodal", fast, slow, probability)
    return lambda rng, shape: np.where(rng.random(shape) < probability, slow, fast)


def markov(fast: Real, slow: Real, probability: Real, persistence: Real) -> Latency:
    """Bursts: `bimodal` at every step, but a worker that was slow stays slow with `persistence`.

    A stationary two-state chain per worker along the steps, the axis before the last. Compare
    `persistence` with `probability`: equal is `bimodal`, more makes bursts of
    `1 / (1 - persistence)` steps on average, less makes stragglers take turns.

    Args:
        fast: Seconds of an ordinary answer.
        slow: Seconds of a straggler's; infinity for one that never answers.
        probability: Of straggling, over all steps.
        persistence: Of straggling, given that the worker straggled the step before. At least
            2 - 1 / probability, or no such chain exists.

    Returns:
        The latency model.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> latency = markov(fast=1.0, slow=5.0, probability=0.5, persistence=1.0)
        >>> seconds = latency(np.random.default_rng(0), (100, 8))  # who is slow stays slow
        >>> bool((seconds == seconds[0]).all())
        True

    References:
        Gilbert, "Capacity of a burst-noise channel", 1960 (the chain).
    """
    fast, slow, probability = _two_speeds("markov", fast, slow, probability)
    least = max(0.0, 2 - 1 / probability - 1e-12) if probability else 0.0  # short of rounding
    cure = "Use a value near probability for independent steps, near 1 for long bursts."
    persistence = real("markov", "persistence", persistence, low=least, high=1, cure=cure)
    ordinary = 1 - probability
    onset = min(1.0, probability * (1 - persistence) / ordinary) if ordinary else 1.0

    def latency(rng: np.random.Generator, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        # The first step is stationary; then a draw is held against the state of the step before.
        draws = rng.random(shape)
        is_slow = draws < probability
        for step in range(1, shape[-2] if len(shape) > 1 else 1):
            threshold = np.where(is_slow[..., step - 1, :], persistence, onset)
            is_slow[..., step, :] = draws[..., step, :] < threshold
        return np.where(is_slow, slow, fast)

    return latency


def trace(seconds: Shaped[Any, "rows workers"] | list[Any]) -> Latency:
    """Recorded latencies, row after row from the first, and again from the first at the end.

    Args:
        seconds: (rows, n) latencies, infinite where a worker never answered.

    Returns:
        The latency model; it draws nothing from its generator.

    Raises:
        ValueError: The recording is malformed, or a shape asks for another number of workers.

    Example:
        >>> trace([[1.0, 2.0], [3.0, 4.0]])(np.random.default_rng(0), (3, 2)).tolist()
        [[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]
    """
    recorded = _checked_latency("trace", seconds)
    if recorded.ndim != 2 or not recorded.size:
        raise ValueError(
            f"`trace` needs seconds of shape (rows, workers); got shape {recorded.shape}. Give one "
            "row a step."
        )

    def latency(rng: np.random.Generator, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        if shape[-1:] != recorded.shape[1:]:
            raise ValueError(
                f"`trace` needs a shape of (..., {recorded.shape[1]}), the workers recorded; got "
                f"{shape}. Choose as many workers, or as many columns of the recording."
            )
        rows = np.arange(math.prod(shape[:-1])) % len(recorded)
        return recorded[rows].reshape(shape)

    return latency


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
    seconds = _checked_latency("wait", latency)
    accepts = _acceptance(until, seconds.shape[-1])
    arrived = np.isfinite(seconds)
    if deadline is not None:
        arrived &= seconds <= _positive("wait", "deadline", deadline)
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


def _checked_latency(call: str, latency: Any) -> Float[np.ndarray, "*steps workers"]:
    seconds = np.asarray(latency)
    if seconds.dtype.kind not in "iuf" or seconds.ndim == 0 or seconds.shape[-1] == 0:
        raise ValueError(
            f"`{call}` needs latencies in seconds of shape (..., workers); got {seconds.dtype} of "
            f"shape {seconds.shape}. Draw them with a latency model, or give an array."
        )
    if not (seconds >= 0).all():
        raise ValueError(
            f"`{call}` needs latencies of at least 0; got {np.sum(~(seconds >= 0))} negative or "
            "NaN. Use infinity for a message that never arrives."
        )
    return seconds.astype(float)


def _two_speeds(call: str, fast: Any, slow: Any, chance: Any) -> tuple[float, float, float]:
    fast = _seconds(call, "fast", fast)
    slow = math.inf if slow == math.inf else _seconds(call, "slow", slow)
    chance = real(call, "probability", chance, low=0, high=1, cure="Give a fraction of the steps.")
    return fast, slow, chance


def _seconds(call: str, name: str, value: Any) -> float:
    return real(call, name, value, low=0, high=math.inf, cure="Give seconds.")


def _positive(call: str, name: str, value: Any) -> float:
    tiny = np.finfo(float).tiny
    return real(call, name, value, low=tiny, high=math.inf, cure="Give a positive number.")
