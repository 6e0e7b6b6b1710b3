"""Latency models from recorded seconds: which one, its parameters, and how sure they are."""

import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxcode import stragglers
from jaxcode.seconds import Latency, recording

Model = Literal["shifted_exponential", "pareto", "bimodal", "markov"]
Interval = tuple[float, float]

# Of the standard normal, for intervals of 95 %.
_Z = 1.96
# Clusters are at least this wide, relative to the largest of all: recordings are rounded.
_WIDTH = 1e-6
# Squares of seconds are added up.
_LARGEST = 1e100


class Fit(NamedTuple):
    """A fitted model.

    Attributes:
        model: its name, that of the function in `jaxcode.stragglers`.
        parameters: that function's arguments, of maximum likelihood.
        intervals: of 95 % confidence each, if what the model takes to be independent is.
        latency: the fitted latency model.
        bic: the Bayesian information criterion of each model tried, the least being the best.
        warnings: what the model does not show, a line each.

    Example:
        >>> print(fit([[1.0, 1.0, 5.0], [1.0, 1.0, 1.0]], model="bimodal"))
        bimodal(fast=1, slow=5, probability=0.1667)
        fast         1       95 %: 1 to 1
        slow         5       95 %: 5 to 5
        probability  0.1667  95 %: 0.03005 to 0.5635
    """

    model: Model
    parameters: dict[str, float]
    intervals: dict[str, Interval]
    latency: Latency
    bic: dict[str, float]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value:.4g}" for name, value in self.parameters.items())
        lines = [f"{self.model}({given})"]
        for name, (low, high) in self.intervals.items():
            value = f"{self.parameters[name]:.4g}"
            lines.append(f"{name:<11}  {value:<6}  95 %: {low:.4g} to {high:.4g}")
        return "\n".join([*lines, *(f"warning: {line}" for line in self.warnings)])


class _Fitted(NamedTuple):
    """A model's parameters and intervals, log-likelihood, and number of free parameters."""

    parameters: dict[str, float]
    intervals: dict[str, Interval]
    likelihood: float
    free: int


def fit(
    source: Shaped[Any, "rows workers"] | list[Any] | str | os.PathLike[str],
    *,
    model: Model | None = None,
) -> Fit:
    """The latency model that recorded seconds most likely came from.

    `shifted_exponential` and `pareto` are fitted by maximum likelihood. For `bimodal` and `markov`
    the seconds are cut in a fast and a slow cluster of one width, where the likelihood is largest,
    and `markov`'s persistence is the share of slow answers followed by another of the same worker.
    Between models the Bayesian information criterion decides.

    The seconds may be whole answers, or only what is added to them (`pause=` in a simulation), or
    ratios to what they should be (`slowdown=`): a model of the one is not a model of the other.

    Args:
        source: (rows, n) seconds, a row a step; infinite where a worker never answered. Or the path
            of such, as `trace` takes it.
        model: Which model to fit; None tries all four. With few rows, or where the best model is
            still a poor one, replay the recording instead: `trace(source)`.

    Returns:
        The `Fit`.

    Raises:
        ValueError: The recording is malformed, or this model cannot be fitted to it.

    Example:
        >>> from jaxcode.stragglers import shifted_exponential
        >>> recorded = shifted_exponential(0.5, 6.0)(np.random.default_rng(0), (100, 8))
        >>> found = fit(recorded)
        >>> found.model, {name: round(x, 1) for name, x in found.parameters.items()}
        ('shifted_exponential', {'shift': 0.5, 'rate': 5.8})
        >>> found.latency(np.random.default_rng(1), (2, 4)).shape
        (2, 4)

    References:
        Schwarz, "Estimating the dimension of a model", 1978 (the criterion).
    """
    recorded = recording("fit", source)
    if model is not None and model not in _FITS:
        raise ValueError(
            f"`fit` needs model to be one of {', '.join(_FITS)}, or None; got {model!r}. Choose "
            "one."
        )
    if recorded[np.isfinite(recorded)].max(initial=0.0) > _LARGEST:
        raise ValueError(
            f"`fit` needs seconds of at most {_LARGEST:g}; got more. Use infinity for an answer "
            "that never came."
        )
    tried, refused = {}, {}
    for name in _FITS if model is None else (model,):
        try:
            tried[name] = _FITS[name](recorded)
        except _Unfit as error:
            refused[name] = str(error)
    if not tried:
        name, reason = next(iter(refused.items()))
        raise ValueError(
            f"`fit` needs {reason} to fit {name}; got seconds of shape {recorded.shape} from "
            f"{recorded.min():g} to {recorded.max():g}. Record more steps, or use trace."
        )
    size = math.log(recorded.size)
    bic: dict[str, float] = {x: y.free * size - 2 * y.likelihood for x, y in tried.items()}
    best = min(tried, key=lambda name: bic[name])
    chosen = tried[best]
    latency = getattr(stragglers, best)(**chosen.parameters)
    warnings = tuple(_warnings(recorded, best))
    return Fit(best, chosen.parameters, chosen.intervals, latency, bic, warnings)


class _Unfit(Exception):
    """Says what a model needs, which a recording lacks."""


def _shifted_exponential(recorded: np.ndarray) -> _Fitted:
    """MLE: the least, and one over the mean excess; the least has an exact pivot."""
    values = _finite(recorded)
    least, rate, below = _exponential(values)
    likelihood = len(values) * (math.log(rate) - 1) + _answered(recorded)
    intervals = {
        "shift": (max(0.0, least - below / rate), least), "rate": _around(rate, len(values))
    }  # fmt: skip
    return _Fitted({"shift": least, "rate": rate}, intervals, likelihood, 2)


def _pareto(recorded: np.ndarray) -> _Fitted:
    """Its logarithm is a shifted exponential, with alpha for the rate."""
    values = _finite(recorded)
    if values.min() <= 0:
        raise _Unfit("seconds above 0")
    logs = np.log(values)
    least, alpha, below = _exponential(logs)
    likelihood = len(values) * (math.log(alpha) - 1) - float(logs.sum()) + _answered(recorded)
    scale = float(values.min())
    intervals = {
        "alpha": _around(alpha, len(values)), "scale": (scale * math.exp(-below / alpha), scale)
    }  # fmt: skip
    return _Fitted({"alpha": alpha, "scale": scale}, intervals, likelihood, 2)


def _bimodal(recorded: np.ndarray) -> _Fitted:
    slow, fitted = _clusters(recorded)
    count = int(slow.sum())
    share = count / slow.size
    parameters = fitted.parameters | {"probability": share}
    intervals = fitted.intervals | {"probability": _wilson(share, slow.size)}
    likelihood = fitted.likelihood + _chance(count, slow.size, share)
    return _Fitted(parameters, intervals, likelihood, 4)


def _markov(recorded: np.ndarray) -> _Fitted:
    slow, fitted = _clusters(recorded)
    before, after = slow[:-1], slow[1:]
    share = float(slow.mean())
    from_slow, stayed = int(before.sum()), int((before & after).sum())
    from_fast, became = int((~before).sum()), int((~before & after).sum())
    if not from_slow or not from_fast:
        raise _Unfit("two rows or more, with slow and fast answers before the last")
    likelihood = fitted.likelihood + _chance(int(slow[0].sum()), slow.shape[1], share)
    likelihood += _chance(stayed, from_slow, stayed / from_slow)
    likelihood += _chance(became, from_fast, became / from_fast)
    # A chain with this share needs so much persistence at least; sampled ones may have less.
    persistence = max(stayed / from_slow, 2 - 1 / share, 0.0)
    # The share is known as well as from so many independent answers.
    memory = persistence - share * (1 - persistence) / (1 - share)
    worth = slow.size * (1 - memory) / (1 + memory) if memory > -1 else slow.size
    parameters = fitted.parameters | {"probability": share, "persistence": persistence}
    intervals = fitted.intervals | {
        "probability": _wilson(share, max(1.0, worth)),
        "persistence": _wilson(persistence, from_slow),
    }
    return _Fitted(parameters, intervals, likelihood, 5)


_FITS: dict[Model, Callable[[np.ndarray], _Fitted]] = {
    "shifted_exponential": _shifted_exponential,
    "pareto": _pareto,
    "bimodal": _bimodal,
    "markov": _markov,
}


def _exponential(values: Float[np.ndarray, " answers"]) -> tuple[float, float, float]:
    """The least, the rate above it, and how far below the truth may lie, in units of 1 / rate.

    `(least - shift) rate_hat` exceeds r with probability `(1 + r)^-(N - 1)`, whatever the truth.
    """
    least, excess = float(values.min()), float(values.mean() - values.min())
    if excess <= 0 or not math.isfinite(1 / excess):
        raise _Unfit("seconds that differ")
    return least, 1 / excess, 0.05 ** (-1 / (len(values) - 1)) - 1


def _clusters(
    recorded: Float[np.ndarray, "rows workers"],
) -> tuple[Bool[np.ndarray, "rows workers"], _Fitted]:
    """Who was slow, and the two clusters' centres; who never answered is slow, if anybody is."""
    values = np.sort(_finite(recorded))
    scale = float(values[-1]) or 1.0  # or the squares of tiny seconds vanish
    values, scaled = values / scale, recorded / scale
    gone = int(np.isinf(recorded).sum())
    if gone:
        cut, means, counts = math.inf, [float(values.mean()), math.inf], [len(values), gone]
        squares = [float(((values - means[0]) ** 2).sum()), 0.0]
    else:
        cut, means, counts, squares = _split(values)
    width = math.sqrt(sum(squares) / len(values))
    floor = max(width, _WIDTH)
    each = math.log(floor) + math.log(scale * math.sqrt(2 * math.pi)) + (width / floor) ** 2 / 2
    parameters, intervals = {}, {}
    for name, mean, count, own in zip(("fast", "slow"), means, counts, squares, strict=True):
        # One width decides the cut, but the slow often vary more; of few answers, none can say.
        margin = _Z * max(width, math.sqrt(own / max(1, count - 1))) / math.sqrt(count)
        parameters[name] = mean * scale
        intervals[name] = (max(0.0, mean - margin) * scale, (mean + margin) * scale)
    return scaled >= cut, _Fitted(parameters, intervals, -len(values) * each, 3)


def _split(
    values: Float[np.ndarray, " answers"],
) -> tuple[float, list[float], list[int], list[float]]:
    """Where to cut sorted values up to 1: the first slow one; means, counts and squares of each."""
    if values[0] == values[-1]:
        raise _Unfit("seconds that differ")
    size = len(values)
    count = np.arange(1, size)
    centred = values - values.mean()
    fast = np.cumsum(centred)[:-1]
    # The squares within are all of them less those between, which the sums of one part tell.
    between = fast**2 / count + fast**2 / (size - count)
    within = np.maximum((centred**2).sum() - between, _WIDTH**2 * size)
    entropy = count * np.log(count / size) + (size - count) * np.log1p(-count / size)
    score = entropy - size / 2 * np.log(within)
    score[np.diff(values) == 0] = -np.inf  # equal ones stay together
    best = int(score.argmax()) + 1
    parts = values[:best], values[best:]
    squares = [float(((part - part.mean()) ** 2).sum()) for part in parts]
    return float(values[best]), [float(x.mean()) for x in parts], [len(x) for x in parts], squares


def _finite(recorded: np.ndarray) -> Float[np.ndarray, " answers"]:
    values = recorded[np.isfinite(recorded)]
    if len(values) < 2:
        raise _Unfit("two answers or more")
    return values


def _answered(recorded: np.ndarray) -> float:
    """The log-likelihood of who answered at all, so that models are compared on the same data."""
    gone = int(np.isinf(recorded).sum())
    return _chance(gone, recorded.size, gone / recorded.size)


def _chance(count: int, size: int, share: float) -> float:
    """The log-likelihood of `count` of `size` at probability `share`."""
    terms = ((count, share), (size - count, 1 - share))
    return sum(number * math.log(chance) for number, chance in terms if number)


def _around(rate: float, size: int) -> Interval:
    """The logarithm of an estimated rate has a standard error of about one over the root of N."""
    factor = math.exp(_Z / math.sqrt(size - 1))
    return rate / factor, rate * factor


def _wilson(share: float, size: float | int) -> Interval:
    """Wilson's interval of a proportion."""
    middle = (share + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * math.sqrt(share * (1 - share) / size + (_Z / size) ** 2 / 4)
    # Rounding aside, the share itself is in it.
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def _warnings(recorded: np.ndarray, model: str) -> list[str]:
    found = []
    gone = float(np.isinf(recorded).mean())
    if gone and model in ("shifted_exponential", "pareto"):
        found.append(
            f"{gone:.2%} never answered, which {model} leaves out: put failures(..., latency=) "
            "around it"
        )
    if slow := _steadily_slow(recorded):
        listed = ", ".join(map(str, slow[:8])) + (", ..." if len(slow) > 8 else "")
        found.append(
            f"workers differ for good: {listed} slower than the others in both halves of the "
            "recording, where a model takes them to be alike; use trace, or `heterogeneous`"
        )
    return found


def _steadily_slow(recorded: Float[np.ndarray, "rows workers"]) -> list[int]:
    """Workers above a row's median far more often than by chance, early and late alike."""
    steady = np.ones(recorded.shape[1], bool)
    for half in np.array_split(recorded, 2):
        rows = len(half)
        if not rows:  # one row has no halves
            return []
        above = (half > np.median(half, axis=1, keepdims=True)).sum(0)
        slower = np.median(half, axis=0) > 1.1 * np.median(half)
        steady &= (above >= rows / 2 + 1.5 * math.sqrt(rows)) & slower
    return np.flatnonzero(steady).tolist()
