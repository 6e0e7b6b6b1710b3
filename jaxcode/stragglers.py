"""Who arrives when: latency models.

A latency model is a function of a generator and a shape `(..., n)`, or n alone, that returns the
seconds until each worker's message arrives; infinity never arrives. Along the axis before the last
are the steps, which matters to models with a memory. `wait` turns latencies into a `Round`: who was
counted, and when the step could go on. Stragglers are thus data, drawn before anything runs.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from jaxcode.checks import integer, real
from jaxcode.rounds import Round as Round
from jaxcode.rounds import wait as wait
from jaxcode.seconds import Latency, Real, draw, positive, recording, seconds


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
    shift = seconds(call, "shift", shift)
    rate = positive(call, "rate", rate)
    return _model(call, lambda rng, shape: shift + rng.exponential(1 / rate, shape))


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
    alpha = positive("pareto", "alpha", alpha)
    scale = positive("pareto", "scale", scale)
    return _model("pareto", lambda rng, shape: scale * (1 + rng.pareto(alpha, shape)))


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
    return _model(
        "bimodal", lambda rng, shape: np.where(rng.random(shape) < probability, slow, fast)
    )


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

    def latency(rng: Any, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        # The first step is stationary; then a draw is held against the state of the step before.
        draws = rng.random(shape)
        is_slow = draws < probability
        for step in range(1, shape[-2] if len(shape) > 1 else 1):
            threshold = np.where(is_slow[..., step - 1, :], persistence, onset)
            is_slow[..., step, :] = draws[..., step, :] < threshold
        return np.where(is_slow, slow, fast)

    return _model("markov", latency)


def failures(
    mean_time_between: Real, repair: Real, *, step: Real, latency: Real | Latency = 0.0
) -> Latency:
    """Workers that fail and are gone, and come back repaired: infinity while they are.

    Each worker runs for Exp seconds of mean `mean_time_between`, is then gone for Exp seconds of
    mean `repair`, and runs again. A step's answer arrives if the worker ran throughout it; that is
    `mean_time_between / (mean_time_between + repair) * exp(-step / mean_time_between)` of them,
    from the first step on. Steps are along the axis before the last.

    As a pause in a simulation, leave `latency` at 0: the others then lose no time. A code that
    tolerates fewer than all workers may meet a step that never ends: set a deadline.

    Args:
        mean_time_between: Mean seconds from a worker's repair to its next failure. A machine that
            fails every 50,000 hours is 1.8e8; ten thousand of them are one failure every 5 hours.
        repair: Mean seconds until it is back, restart and reloading included. At 0 a failure costs
            the step that it falls in, and no more.
        step: Seconds of a step, the time from one row to the next. Too long counts too many steps
            as lost.
        latency: Seconds of the answers that arrive, or a latency model to draw them from.

    Returns:
        The latency model.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> latency = failures(mean_time_between=1000.0, repair=100.0, step=1.0, latency=2.0)
        >>> seconds = latency(np.random.default_rng(0), (1000, 50))
        >>> float(seconds.min()), round(float(np.isinf(seconds).mean()), 2)
        (2.0, 0.09)
    """
    call = "failures"
    between = positive(call, "mean_time_between", mean_time_between, "Give seconds.")
    repair = seconds(call, "repair", repair)
    step = positive(call, "step", step, "Give seconds.")
    if not callable(latency):
        latency = seconds(call, "latency", latency)
    running = 1 / (1 + repair / between)  # of the time
    mixing = math.exp(-step / between - step / repair) if repair else 0.0
    unbroken = math.exp(-step / between)
    runs_after_running = running + (1 - running) * mixing
    runs_after_failed = running * (1 - mixing)

    def draw_answers(rng: Any, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        # One draw tells both whether a step is unbroken and whether the worker runs at its end, for
        # an unbroken one ends running. A step may be broken and end running: repaired in time.
        runs = rng.random((*shape[:-2], *shape[-1:])) < running
        draws = rng.random(shape)
        answers = np.empty(shape, bool)
        for row in range(shape[-2] if len(shape) > 1 else 1):
            now = (..., row, slice(None)) if len(shape) > 1 else ...
            answers[now] = runs & (draws[now] < unbroken)
            runs = draws[now] < np.where(runs, runs_after_running, runs_after_failed)
        others = draw(call, "latency", latency, rng, shape) if callable(latency) else latency
        return np.where(answers, others, np.inf)

    return _model(call, draw_answers)


def trace(source: Shaped[Any, "rows workers"] | list[Any] | str | os.PathLike[str]) -> Latency:
    """Recorded latencies, row after row from the first, and again from the first at the end.

    Args:
        source: (rows, n) seconds, infinite where a worker never answered. Or the path of such: a
            .csv file with one line a row (and, if wanted, a first line of names), or an .npz file
            with one array, or several of which one is called "seconds".

    Returns:
        The latency model; it draws nothing from its generator.

    Raises:
        ValueError: The recording is malformed, or a shape asks for another number of workers.

    Example:
        >>> trace([[1.0, 2.0], [3.0, 4.0]])(np.random.default_rng(0), (3, 2)).tolist()
        [[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]
    """
    recorded = recording("trace", source)

    def latency(rng: Any, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        if shape[-1:] != recorded.shape[1:]:
            raise ValueError(
                f"`trace` needs a shape of (..., {recorded.shape[1]}), the workers recorded; got "
                f"{shape}. Choose as many workers, or as many columns of the recording."
            )
        rows = np.arange(math.prod(shape[:-1])) % len(recorded)
        return recorded[rows].reshape(shape)

    return _model("trace", latency)


def _model(call: str, draw_checked: Callable[[Any, tuple[int, ...]], np.ndarray]) -> Latency:
    """The latency model that checks its arguments, then draws."""

    def latency(rng: Any, shape: Any) -> Float[np.ndarray, "..."]:
        if not isinstance(rng, np.random.Generator):
            raise ValueError(
                f"`{call}` needs a generator to draw from; got {rng!r}. Use np.random.default_rng."
            )
        sizes = shape if isinstance(shape, tuple | list) else (shape,)
        if not sizes:
            raise ValueError(
                f"`{call}` needs a shape of (..., workers); got {shape!r}. Count the workers."
            )
        cure = "Count the steps and workers."
        return draw_checked(
            rng, tuple(integer(call, "the shape", size, 0, None, cure) for size in sizes)
        )

    return latency


def _two_speeds(call: str, fast: Any, slow: Any, chance: Any) -> tuple[float, float, float]:
    fast = seconds(call, "fast", fast)
    slow = math.inf if slow == math.inf else seconds(call, "slow", slow)
    chance = real(call, "probability", chance, low=0, high=1, cure="Give a fraction of the steps.")
    return fast, slow, chance
