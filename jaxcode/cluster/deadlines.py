"""How long a step waits at most: a constant, or what recent steps say is reasonable."""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from jaxcode.checks import integer, real


class AdaptiveDeadline:
    """A deadline from recent arrival times: a multiple of how long the slowest needed one took.

    Args:
        factor: The deadline is so many times the 90th percentile of the recent steps' waits.
        least: Seconds; never less, so that one quick step makes no straggler of everybody.
        most: Seconds; also the deadline until there are steps to learn from.
        window: How many steps are recent.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> deadline = AdaptiveDeadline(factor=3, least=0.5, most=60)
        >>> deadline.seconds
        60.0
        >>> for _ in range(5):
        ...     deadline.observe([0.2, 0.4])
        >>> round(deadline.seconds, 3)
        1.2
    """

    def __init__(
        self,
        *,
        factor: float | int = 3.0,
        least: float | int = 0.5,
        most: float | int = 60.0,
        window: int = 50,
    ):
        call = "AdaptiveDeadline"
        self.factor = real(call, "factor", factor, low=1, high=1e6, cure="Give a multiple.")
        self.least = real(call, "least", least, low=0, high=1e9, cure="Give seconds.")
        self.most = real(call, "most", most, low=self.least, high=1e9, cure="Give seconds.")
        if not self.most:
            raise ValueError(f"`{call}` needs most above 0; got {most!r}. Give seconds.")
        window = integer(call, "window", window, 1, 10**6, "Count steps.")
        self._waits: deque[float] = deque(maxlen=window)

    def observe(self, arrivals: Iterable[float]) -> None:
        """Learn from a step: seconds from its start to each arrival that it needed."""
        waits = [x for x in arrivals if math.isfinite(x)]
        if waits:
            self._waits.append(max(waits))

    @property
    def seconds(self) -> float:
        """How long the next step waits at most."""
        # Three steps say something; a window shorter than that is full earlier.
        if len(self._waits) < min(3, self._waits.maxlen or 3):
            return self.most
        usual = float(np.quantile(np.asarray(self._waits), 0.9))
        return min(max(self.factor * usual, self.least), self.most)


Deadline = float | int | AdaptiveDeadline


def checked_deadline(call: str, deadline: Deadline) -> Deadline:
    """A deadline that is one: seconds above 0, or adaptive.

    Example:
        >>> checked_deadline("Cluster", 5)
        5.0
    """
    if isinstance(deadline, AdaptiveDeadline):
        return deadline
    cure = "Give seconds, or an AdaptiveDeadline."
    seconds = real(call, "deadline", deadline, low=0, high=1e9, cure=cure)
    if not seconds:
        raise ValueError(f"`{call}` needs a deadline above 0; got {deadline!r}. {cure}")
    return seconds
