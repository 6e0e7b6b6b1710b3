"""The expected seconds of a step, from the distribution of one worker's seconds.

A step ends when each of its groups of workers has enough messages. With u the probability that a
worker is there by time t, independently of the others, that is
`H(u) = prod over groups of P(Binomial(size, u) >= least)`: the groups of a block code with
`least = m`, or all n workers as one group with `least = n - s`. Over a sorted sample of N workers'
seconds the mean of the step's is the weighted sum of the sample with weights
`H(i / N) - H((i - 1) / N)`: an exact integral over the sample's distribution, and no further draw.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcode.arrivals import times
from jaxcode.designs import Conditions

# Of workers' seconds: for ranking everything, and for the few that are shown.
SCREENED = 2**14
_SAMPLE, _SAMPLE_PER_WORKER, _LARGEST_SAMPLE = 2**17, 2**11, 2**20
# Points of a sample at which the master's queue is worked out.
_GRID = 100
# A step that ends but once in so many never ending ones is taken to end.
_NEVER = 1e-9


class Need(NamedTuple):
    """What a step waits for: in every group, this many messages at least.

    Attributes:
        groups: (size, number of such groups), for each size.
        least: of messages, in each.
    """

    groups: tuple[tuple[int, int], ...]
    least: int

    @property
    def late(self) -> int:
        """How many workers are late, at least, where the step is."""
        return min(size for size, _ in self.groups) - self.least + 1

    @property
    def workers(self) -> int:
        """How many there are."""
        return sum(size * number for size, number in self.groups)


class Task(NamedTuple):
    """What a worker does, and what the step needs: all that the expectation depends on."""

    computation: float  # of the batch
    message_bytes: float
    used: int  # messages that decoding reads
    need: Need
    product: float = 0.0  # the share of the computing that is left to the decoder


class Expected(NamedTuple):
    """A task's expectation.

    Attributes:
        seconds: of a step that ends, or is cut by the deadline; decoding included.
        probability: that enough is there, by the deadline if there is one.
        there: the expected share of the needed messages that are there by then.
        decode: seconds of decoding: reading the messages, and the products left to the decoder.
    """

    seconds: float
    probability: float
    there: float
    decode: float


def tail(count: int, least: int, u: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
    """`P(Binomial(count, u) >= least)` for u from 0 to 1, by the shorter of the two sums.

    Example:
        >>> tail(2, 1, np.array([0.0, 0.5, 1.0])).tolist()
        [0.0, 0.75, 1.0]
    """
    below = least <= count - least
    successes = range(least) if below else range(least, count + 1)
    inner = np.clip(u, 1e-300, 1 - 1e-16)
    yes, no = np.log(inner), np.log1p(-inner)
    total = np.zeros_like(u)
    for j in successes:
        ways = math.lgamma(count + 1) - math.lgamma(j + 1) - math.lgamma(count - j + 1)
        total += np.exp(ways + j * yes + (count - j) * no)
    result = np.clip(1 - total if below else total, 0.0, 1.0)
    return np.where(u <= 0, float(least == 0), np.where(u >= 1, 1.0, result))


def order_weights(need: Need, size: int) -> Float[np.ndarray, " {size}"]:
    """How much each of a sorted sample counts for in the mean of what is needed.

    Example:
        >>> order_weights(Need(((2, 1),), 2), 4).round(9)  # the larger of two
        array([0.0625, 0.1875, 0.3125, 0.4375])
    """
    workers, number = need.groups[0]
    if len(need.groups) == number == 1:  # an order statistic: u is Beta(r, n - r + 1)
        middle = (np.arange(size) + 0.5) / size
        yes, no = need.least - 1, workers - need.least
        density = yes * np.log(middle) + no * np.log1p(-middle)
        density = np.exp(density - density.max())
        return density / density.sum()
    u = np.arange(size + 1) / size
    met = np.ones(size + 1)
    for workers, number in need.groups:
        met *= tail(workers, need.least, u) ** number
    return np.maximum(np.diff(met), 0.0)  # short of rounding


class StepModel:
    """Workers' seconds, drawn once, and what any task takes of them.

    Args:
        call: Whose arguments they are, for errors.
        setting: The conditions, the same for all workers.
        num_workers: n.
        seed: of the draws.
    """

    def __init__(self, call: str, setting: Conditions, num_workers: int, seed: int):
        self.setting, self.n = setting, num_workers
        size = min(max(_SAMPLE, _SAMPLE_PER_WORKER * num_workers), _LARGEST_SAMPLE)
        # One step each of many runs: with a memory, steps of one run would tell less.
        shape = (-(-size // num_workers), 1, num_workers)
        pick = np.random.default_rng(seed).permutation(math.prod(shape))[:SCREENED]
        self.whole: list[np.ndarray | None] = []
        self.sample: list[np.ndarray | None] = []
        self.medians: dict[str, np.ndarray] = {}
        for name, drawn in setting.draws(call, shape, seed).items():
            if drawn is not None:
                with np.errstate(over="ignore"):
                    self.medians[name] = np.median(drawn.reshape(-1, num_workers), axis=0)
            self.whole.append(None if drawn is None else drawn.reshape(-1))
            self.sample.append(None if drawn is None else drawn.reshape(-1)[pick])
        self._seen: dict[Any, np.ndarray] = {}

    @np.errstate(over="ignore")  # a draw too large for a float takes for ever
    def expect(
        self, task: Task, *, whole: bool = False, bandwidth: float | None = None
    ) -> Expected:
        """The expectation of a task, from the sample for screening or from the whole of it."""
        bandwidth = float(self.setting.bandwidth) if bandwidth is None else bandwidth
        arriving = self._times(task, task.message_bytes / bandwidth, whole=whole)
        weights = self._weights(task.need, len(arriving))
        each = task.message_bytes / self.setting.master_bandwidth
        through = through_queue(arriving, weights, self.n, each) if each else arriving
        decode = task.used * task.message_bytes / self.setting.decode_rate
        decode += task.product * self.setting.batch_seconds
        deadline = self.setting.deadline
        in_time = np.isfinite(through) if deadline is None else through <= deadline
        probability = float(weights[in_time].sum())
        if probability > 1 - _NEVER:
            probability = 1.0
        share = float(in_time.mean())
        there = arrivals(task.need, share) if probability < 1 else 1.0
        if deadline is not None:
            seconds = _mean(weights, np.minimum(through, deadline))
        elif probability:
            seconds = _mean(weights[in_time], through[in_time]) / probability
            if whole and tail_index(arriving[in_time]) * task.need.late <= 1:
                seconds = math.inf
        else:
            seconds = math.inf
        return Expected(seconds + decode, probability, there, decode)

    def _times(self, task: Task, transfer: float, *, whole: bool) -> Float[np.ndarray, " sample"]:
        """Sorted seconds until a worker's message has left it."""
        slowdown, pause, network = self.whole if whole else self.sample
        computing = task.computation * (1 - task.product) * self.setting.batch_seconds
        base = self._seen.get(computing) if not whole else None
        if base is None:
            pauses = 0.0 if pause is None else pause
            base = np.atleast_1d(times(computing, slowdown) + pauses)
            base = np.sort(base) if network is None else base
            if not whole:
                self._seen[computing] = base
        arriving = base + times(transfer, network)
        return arriving if network is None else np.sort(arriving)

    def _weights(self, need: Need, size: int) -> Float[np.ndarray, " {size}"]:
        if size > SCREENED:  # each is used once or twice, and large
            return order_weights(need, size)
        if (need, size) not in self._seen:
            self._seen[need, size] = order_weights(need, size)
        return self._seen[need, size]


def through_queue(
    times: Float[np.ndarray, " sample"],
    weights: Float[np.ndarray, " sample"],
    num_workers: int,
    each: float,
) -> Float[np.ndarray, " sample"]:
    """When the message that ends the step is through the master's link, `each` seconds a message.

    It is the j-th of the n to arrive, with j at its mean: the order of arrival is random. The
    others before it are taken to be spread evenly over the distribution up to its own arrival, and
    the link takes them in order: message j is through at `max_{l <= j} a_l + (j - l + 1) each`.

    Args:
        times: The sorted sample of arrivals.
        weights: How much each counts for as the last that is needed.
        num_workers: n.
        each: Seconds.

    Returns:
        As many seconds.

    Example:
        >>> through_queue(np.ones(1), np.ones(1), 3, 0.5).tolist()  # two of three are before it
        [2.0]
    """
    size = len(times)
    middle = np.arange(size) + 0.5
    share = _mean(weights, middle) / float(weights.sum()) / size
    place = min(float(num_workers), max(1.0, (num_workers + 1) * share))
    # At some of the sample, and of the messages before it; in between it changes little.
    reached = np.searchsorted(np.cumsum(weights), np.linspace(0, float(weights.sum()), _GRID))
    points = np.unique(np.minimum(reached, size - 1))
    order = np.linspace(1, place, min(math.ceil(place), _GRID))
    before = times[(points[:, None] * order / place).astype(int)] + (place - order + 1) * each
    finite = np.isfinite(times[points])
    if not finite.any():
        return times
    extra = before[finite].max(1) - times[points[finite]]
    return times + np.interp(middle - 0.5, points[finite], extra)


def arrivals(need: Need, share: float) -> float:
    """The expected share of the first group's `least` messages that are there.

    Each is there with probability `share`; those beyond the least do not count.

    Example:
        >>> round(arrivals(Need(((4, 1),), 4), 0.25), 9)
        0.25
    """
    size = need.groups[0][0]
    if share <= 0 or share >= 1:
        return float(share > 0)
    count = np.arange(size + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(count[1:]))])
    ways = log_factorial[-1] - log_factorial - log_factorial[::-1]
    chance = np.exp(ways + count * math.log(share) + count[::-1] * math.log1p(-share))
    return _mean(chance, np.minimum(count, need.least)) / need.least


def tail_index(times: Float[np.ndarray, " sample"]) -> float:
    """Hill's estimate of alpha in `P(T > t) ~ t^-alpha`, of a sorted sample; infinite if lighter.

    The mean of the r-th smallest of n is infinite where `alpha (n - r + 1) <= 1`, and no sample
    mean shows it.

    Example:
        >>> sample = np.sort(1 + np.random.default_rng(0).pareto(1.5, 100_000))
        >>> round(tail_index(sample), 1)
        1.5
    """
    top = times[-max(16, math.isqrt(len(times))) :]
    if len(top) < 16 or top[0] <= 0 or top[0] == top[-1]:
        return math.inf
    return 1 / float(np.mean(np.log(top[1:] / top[0])))


def _mean(weights: Float[np.ndarray, " sample"], values: np.ndarray) -> float:
    # Not BLAS: its threads take turns with those of other processes, for a dot product.
    return float((weights * values).sum())
