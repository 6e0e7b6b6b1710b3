"""Candidates ranked by expected seconds, and where redundancy breaks even."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxcode.candidates import Candidate
from jaxcode.expectation import Expected, StepModel

# Redundancy is tried at so many bandwidths either way, over so many decades.
_BANDWIDTHS, _DECADES = 12, 4
# Of the candidates, so many are tried at all of them.
_POOL = 8


class Ranked(NamedTuple):
    """A candidate and its expectation; the order of these tuples is the ranking.

    Attributes:
        seconds: What it is ranked by, see `Ranking.seconds`.
        doubt: One less the probability that a step ends: it ranks what is infinite.
        copies: Of equals, the one that computes less comes first.
        place: Among the candidates, so that the order is total.
        candidate: The candidate.
        expected: Its expectation.
    """

    seconds: float
    doubt: float
    copies: float
    place: int
    candidate: Candidate
    expected: Expected


class Ranking:
    """What designs are ranked by.

    Args:
        model: of a step.
        probability: that steps are to be exact with, or None.
    """

    def __init__(self, model: StepModel, probability: float | None):
        self.model, self.probability = model, probability

    def ranked(
        self, candidates: Iterable[Candidate], *, whole: bool, bandwidth: float | None = None
    ) -> list[Ranked]:
        """The candidates, the fastest first."""
        found = []
        for place, candidate in enumerate(candidates):
            expected = self.model.expect(candidate.task, whole=whole, bandwidth=bandwidth)
            seconds, doubt = self.seconds(candidate, expected), 1 - expected.probability
            found.append(Ranked(seconds, doubt, candidate.copies, place, candidate, expected))
        return sorted(found, key=lambda x: x[:4])

    def seconds(self, candidate: Candidate, expected: Expected) -> float:
        """Seconds an exact step; of an approximate design, seconds a full batch of examples used.

        A step cut by the deadline counts as lost. Without a deadline one that never ends is the end
        of the training, so the expectation is infinite; unless a probability says how many of them
        are acceptable.
        """
        limited = self.model.setting.deadline is not None
        ends = 1.0 if self.probability is None else self.probability
        if not limited and expected.probability < ends:  # the first K may never come, either
            return math.inf
        if not candidate.exact:
            used = expected.there * candidate.task.need.least / candidate.num_workers
            return expected.seconds / used if used else math.inf
        if limited:
            return expected.seconds / expected.probability if expected.probability else math.inf
        return expected.seconds


def break_even_redundancy(screened: list[Ranked]) -> float:
    """The most copies with which some exact design beats the best without redundancy, or 1."""
    exact = [x for x in screened if x.candidate.exact]
    plain = min(x.seconds for x in exact if not x.candidate.redundant)
    return float(max((x.copies for x in exact if x.seconds < plain), default=1.0))


def break_even_bandwidth(
    ranking: Ranking, candidates: list[Candidate], bandwidth: float
) -> tuple[float, float]:
    """The bandwidths between which redundancy beats none: the range nearest to `bandwidth`."""
    exact = [x for x in candidates if x.exact]
    plain = [x for x in exact if not x.redundant]
    redundant = [x for x in exact if x.redundant]
    if not redundant or math.isinf(bandwidth):
        return 0.0, 0.0
    pool: dict[int, Candidate] = {}
    for scale in (10.0**-_DECADES, 1.0, 10.0**_DECADES):
        best = ranking.ranked(redundant, whole=False, bandwidth=bandwidth * scale)[:_POOL]
        pool |= {id(x.candidate): x.candidate for x in best}

    def pays(at: float) -> bool:
        coded, none = (
            ranking.ranked(group, whole=False, bandwidth=at)[0].seconds
            for group in (pool.values(), plain)
        )
        return coded < none

    grid = bandwidth * 10 ** np.linspace(-_DECADES, _DECADES, 2 * _BANDWIDTHS + 1)
    paying = [pays(float(at)) for at in grid]
    there = np.flatnonzero(paying)
    if not there.size:
        return 0.0, 0.0
    low = high = int(there[np.abs(there - _BANDWIDTHS).argmin()])
    while low > 0 and paying[low - 1]:
        low -= 1
    while high < len(grid) - 1 and paying[high + 1]:
        high += 1
    least = _boundary(pays, float(grid[low]), float(grid[low - 1])) if low else 0.0
    last = high == len(grid) - 1
    most = math.inf if last else _boundary(pays, float(grid[high]), float(grid[high + 1]))
    return least, most


def _boundary(pays: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where redundancy stops paying between two bandwidths, to a per cent."""
    while abs(math.log(inside / outside)) > 0.01:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if pays(middle) else (inside, middle)
    return math.sqrt(inside * outside)
