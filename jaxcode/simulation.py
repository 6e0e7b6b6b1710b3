"""Simulated training steps of several designs under the same conditions, with no training in them.

A worker's message arrives after its computing, `computation x examples x seconds_per_example`
times what `slowdown` draws plus what `pause` draws, and its transfer, `bytes / bandwidth` times
what `network` draws. The three are different things: a slow worker loses more where redundancy
gives it more to do, and a pausing one does not. All designs meet the same draws, so that their
differences are theirs.

Factors are short because the product that forms a gradient is left out; whoever decodes forms it,
for the whole batch. Workers save `product_share` of their computing of such weights, and each step
ends with as large a share of the computing of the *whole batch*, at the mean worker's speed. Where
computing takes most of a step, that is more than short messages save.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxcode.arrivals import smallest, through_master, times
from jaxcode.checks import integer
from jaxcode.designs import Conditions, Design, conditions, groups, message
from jaxcode.seconds import Latency, Real

PARTS = ("compute", "straggling", "transfer", "queue", "decode")
# Steps are worked on in chunks of about so many latencies, and drawn all at once.
_CHUNK = 2**20
_LARGEST = 2**28
# Of a code that is not a block code, so many inexact steps are solved, and stand for the others.
_SOLVED = 200


class Simulation(NamedTuple):
    """What a design's steps take, and what they give.

    Attributes:
        design: the design.
        seconds: (steps,) each step, infinite where it never ends.
        parts: mean seconds spent on "compute" (what it takes without stragglers), "straggling",
            "transfer", in the "queue" at the master's link and on "decode" (reading messages and
            multiplying factors out), of the message that each step waited for; they add up to the
            mean.
        error: mean `decoding_error`: 0 is exact, and a step that never ends errs by 1. What a lossy
            method loses is not in it.
        exact: the share of the steps whose gradient was exact; the others, that of undecodable
            ones, went on with what they had at the deadline, or at `wait_for`, or never ended.
        worker_bytes: what each worker sends in a step.
        master_bytes: what arrives at the master until the step goes on, on average.

    Example:
        >>> result = Simulation(None, np.array([1.0, 3.0]), {}, 0.0, 1.0, 8.0, 16.0)
        >>> result.mean, result.percentiles
        (2.0, {50: 1.0, 90: 3.0, 99: 3.0})
    """

    design: Any
    seconds: Float[np.ndarray, " steps"]
    parts: dict[str, float]
    error: float
    exact: float
    worker_bytes: float
    master_bytes: float

    @property
    def mean(self) -> float:
        """Mean seconds a step."""
        with np.errstate(over="ignore"):
            return float(self.seconds.mean())

    @property
    def percentiles(self) -> dict[int, float]:
        """Seconds that 50, 90 and 99 % of the steps stay within."""
        at = (50, 90, 99)
        # Without interpolation, which makes NaN between infinities.
        values = np.percentile(self.seconds, at, method="inverted_cdf")
        return dict(zip(at, values.tolist(), strict=True))

    def __str__(self) -> str:
        shown = self.mean / 1000 if math.isfinite(self.mean) else 0.0
        parts = ", ".join(
            f"{name} {value:.3g}" for name, value in self.parts.items() if value > shown
        )
        late = "".join(f", p{at} {value:.3g}" for at, value in self.percentiles.items())
        return (
            f"{self.design.name}: {self.mean:.3g} s a step{late} ({parts}); exact in "
            f"{self.exact:.1%}, error {self.error:.3g}; {self.worker_bytes:.4g} bytes a worker"
        )


def simulate(
    designs: Design | Sequence[Design],
    params: Any,
    *,
    examples: int,
    seconds_per_example: Real | Shaped[Any, " workers"] | list[Any],
    bandwidth: Real | Shaped[Any, " workers"] | list[Any],
    positions: int = 1,
    master_bandwidth: Real = math.inf,
    slowdown: Latency | None = None,
    pause: Latency | None = None,
    network: Latency | None = None,
    decode_rate: Real = math.inf,
    deadline: Real | None = None,
    product_share: Real = 1 / 3,
    steps: int = 1000,
    seed: int = 0,
    progress: bool | Callable[[int, int], Any] | None = None,
) -> tuple[Simulation, ...]:
    """The seconds, error and bytes of each design's steps, drawn.

    A step of a block code ends when m messages of every group are there, that of another exact code
    when n - s are, which is what an MDS code needs; with `wait_for=K` when K are. Steps are
    independent of each other: a late message does not delay the next step.

    Args:
        designs: The designs, all for as many workers.
        params: The parameters, as `leaf_shapes` takes them: nested shapes or arrays, a Flax NNX
            module, or the path of an `.npz` file.
        examples: Of the whole batch, a step.
        seconds_per_example: A worker's computing; or (n,) each worker's.
        bandwidth: Bytes per second from a worker to the master, 1.25e8 for 1 Gbit/s; or (n,) each
            worker's. The way back is not counted: it is the same for all designs.
        positions: Rows of a weight's input per example, such as the tokens of a text.
        master_bandwidth: Bytes per second of the master's own link, which takes the messages one
            after the other as they arrive, in random order those that arrive together.
        slowdown: A latency model whose draws *multiply* a worker's computing seconds.
        pause: One whose draws, in seconds, are *added* to them, however short they are; infinity
            is a worker that never answers, see `failures`.
        network: One whose draws multiply a message's seconds on the worker's link.
        decode_rate: Bytes of messages per second that the master decodes.
        deadline: Seconds from the start after which a step goes on with what arrived.
        product_share: The share of `seconds_per_example` that forms the gradients of the weights,
            which a design in factors leaves to the decoder: 0 to below 1. Too low makes factors
            look better than they are where computing takes most of a step, and 0 has them cost
            nothing; a third suits layers that are matrix products, less those that also do other
            things, such as attention.
        steps: How many to draw.
        seed: Of the draws.
        progress: True shows a bar (it needs rich); a function is called with the number of steps
            done and that of all of them, over all designs.

    Returns:
        A `Simulation` for each design, in their order.

    Raises:
        ValueError: An argument is out of range, or does not fit the others.
        ImportError: `progress=True` without rich.

    Example:
        >>> from jaxcode.codes import fractional_repetition, uncoded
        >>> from jaxcode.stragglers import bimodal
        >>> designs = [Design(uncoded(8)), Design(fractional_repetition(8, 1))]
        >>> plain, coded = simulate(designs, {"w": (1000, 250)}, examples=80, bandwidth=1e6,
        ...     seconds_per_example=0.1, pause=bimodal(fast=0.0, slow=9.0, probability=0.1))
        >>> plain.mean > coded.mean + 2, plain.parts["compute"], coded.parts["compute"]
        (True, 1.0, 2.0)
    """
    call = "simulate"
    designs = _checked_designs(designs)
    n = designs[0].code.num_workers
    setting = conditions(
        call, params, examples=examples, positions=positions,
        seconds_per_example=seconds_per_example, bandwidth=bandwidth,
        master_bandwidth=master_bandwidth, decode_rate=decode_rate, slowdown=slowdown, pause=pause,
        network=network, deadline=deadline, product_share=product_share,
    )  # fmt: skip
    for name in ("seconds_per_example", "bandwidth"):
        shape = getattr(setting, name).shape
        if shape not in ((), (n,)):
            raise ValueError(
                f"`{call}` needs {name} to be one number or one for each of {n} workers; got "
                f"{shape[0]}. Count the workers."
            )
    steps = integer(call, "steps", steps, 1, _LARGEST // n or 1, "Simulate fewer.")
    seed = integer(call, "seed", seed, 0, None, "Give an integer.")
    with _reporter(progress, steps * len(designs)) as report:
        draws = _drawn(setting, (steps, n), seed)
        chunk = max(1, _CHUNK // n)
        results = []
        for index, design in enumerate(designs):
            run = _Run(design, setting)
            for start in range(0, steps, chunk):
                end = min(steps, start + chunk)
                run.add(end - start, *(x if x is None else x[start:end] for x in draws))
                report(index * steps + end)
            results.append(run.result())
    return tuple(results)


class _Run:
    """The steps of one design, chunk by chunk; what they sum to is kept, and each one's seconds."""

    def __init__(self, design: Design, setting: Conditions):
        self.design, self.setting, self.code = design, setting, design.code
        code = design.code
        rows = setting.rows(float(code.shares.max()))
        whole, forms = message(setting.leaves, design.method, rows, design.rank)
        product = setting.product(forms)
        self.bytes = whole / code.num_fragments
        self.groups = None if code.block is None else groups(code)
        self.decode = design.messages_used * self.bytes / setting.decode_rate
        self.decode += product * setting.batch_seconds
        computing = code.computation * setting.examples * setting.seconds_per_example
        self.computing = computing * (1 - product)
        self.transfer = np.broadcast_to(self.bytes / setting.bandwidth, self.computing.shape)
        self.limit = math.inf if setting.deadline is None else setting.deadline
        # Codes that tolerate nobody may not even be exact with everybody there.
        everybody = np.ones(code.num_workers, bool)
        surely = design.wait_for is None and (code.num_stragglers > 0 or self.groups is not None)
        self.least_error = 0.0 if surely else float(code.decoding_error(everybody))
        self.decodes = surely or bool(code.is_decodable(everybody))
        self.seconds: list[np.ndarray] = []
        self.parts = np.zeros(len(PARTS))
        self.errors = self.exact = self.arrived = 0.0
        self.pending, self.solved = 0, [0.0, 0.0, 0.0]  # steps, their errors, exact ones

    @np.errstate(over="ignore")  # what is too large for a float takes for ever
    def add(
        self,
        steps: int,
        slowdown: Float[np.ndarray, "steps workers"] | None,
        pause: Float[np.ndarray, "steps workers"] | None,
        network: Float[np.ndarray, "steps workers"] | None,
        lots: Float[np.ndarray, "steps workers"] | None,
    ) -> None:
        computed = times(self.computing, slowdown)
        if pause is not None:
            computed = computed + pause
        arrival = computed + times(self.transfer, network)
        computed, arrival = (np.broadcast_to(x, (steps, x.shape[-1])) for x in (computed, arrival))
        finish = through_master(arrival, self.bytes / self.setting.master_bandwidth, lots)
        self._account(computed, arrival, finish)

    def _account(self, computed: np.ndarray, arrival: np.ndarray, finish: np.ndarray) -> None:
        needed = self._needed(finish)
        elapsed = np.minimum(needed, self.limit)
        self.seconds.append(elapsed + self.decode)
        counted = finish <= elapsed[:, None]
        counted &= np.isfinite(finish)
        self.arrived += float(counted.sum())
        late = (finish == needed[:, None]).argmax(1)  # the message that the step waited for
        at = np.arange(len(late))
        stamps = np.stack(
            [
                np.zeros(len(late)),
                self.computing[late],
                computed[at, late],
                arrival[at, late],
                needed,
            ]
        )
        spans = _differences(np.minimum(stamps, self.limit))
        self.parts[:-1] += spans.sum(1)
        self.parts[-1] += self.decode * len(late)
        ended, in_time = np.isfinite(elapsed), np.isfinite(needed) & (needed <= self.limit)
        self.errors += float((~ended).sum())
        if self.design.wait_for is None:
            self.errors += float(in_time.sum()) * self.least_error
            self.exact += float(in_time.sum()) * self.decodes
            ended &= ~in_time
        self._judge(finish[ended], counted[ended])

    def _needed(self, finish: Float[np.ndarray, "steps workers"]) -> Float[np.ndarray, " steps"]:
        """When enough messages are through."""
        if self.design.wait_for is None and self.groups is not None:
            m = self.code.num_fragments
            latest = [smallest(finish[:, x], m).max(1) for x in self.groups]
            return np.max(latest, axis=0)
        count = self.code.num_workers - self.code.num_stragglers
        return smallest(finish, self.design.wait_for or count)

    def _judge(
        self, finish: Float[np.ndarray, "steps workers"], counted: Bool[np.ndarray, "steps workers"]
    ) -> None:
        """The error of steps that went on with those `counted`."""
        self.pending += len(finish)
        if self.groups is None:
            room = _SOLVED - int(self.solved[0])
            finish, counted = finish[:room], counted[:room]
        if not len(finish):
            return
        n, first = self.code.num_workers, self.design.wait_for or self.code.num_workers
        if self.code.num_partitions == n and self.groups is not None:  # uncoded
            errors = 1 - np.minimum(counted.sum(1), first) / n
            exact = errors == 0
        else:
            if first < n:  # of equal times the lower worker first, as in `wait`
                order = np.argsort(finish, axis=1, kind="stable")[:, :first]
                among = np.zeros_like(counted)
                among[np.arange(len(order))[:, None], order] = True
                counted = counted & among
            errors, exact = self.code.decoding_error(counted), self.code.is_decodable(counted)
        self.solved[0] += len(errors)
        self.solved[1] += float(errors.sum())
        self.solved[2] += float(exact.sum())

    def result(self) -> Simulation:
        seconds = np.concatenate(self.seconds)
        scale = self.pending / max(1.0, self.solved[0])
        return Simulation(
            self.design,
            seconds,
            dict(zip(PARTS, (self.parts / len(seconds)).tolist(), strict=True)),
            (self.errors + scale * self.solved[1]) / len(seconds),
            (self.exact + scale * self.solved[2]) / len(seconds),
            self.bytes,
            self.arrived / len(seconds) * self.bytes,
        )


def _checked_designs(designs: Any) -> list[Design]:
    listed = [designs] if isinstance(designs, Design) else designs
    if not isinstance(listed, list | tuple) or not all(isinstance(x, Design) for x in listed):
        raise ValueError(
            f"`simulate` needs a list of designs; got {designs!r}. Make each by "
            'Design(code, method="dense").'
        )
    counts = sorted({design.code.num_workers for design in listed})
    if len(counts) != 1:
        raise ValueError(
            "`simulate` needs designs, all for one number of workers; got "
            f"{counts or 'no design at all'}. Simulate others by themselves."
        )
    return list(listed)


def _drawn(setting: Conditions, shape: tuple[int, int], seed: int) -> list[np.ndarray | None]:
    """What each model draws, each from a stream of its own, and lots for the master's queue."""
    drawn = list(setting.draws("simulate", shape, seed).values())
    queued = math.isfinite(setting.master_bandwidth)
    drawn.append(np.random.default_rng([seed, 3]).random(shape, np.float32) if queued else None)
    return drawn


def _differences(stamps: Float[np.ndarray, "stamps steps"]) -> Float[np.ndarray, "spans steps"]:
    """From stamp to stamp; 0 between two that are infinite."""
    spans = np.zeros((len(stamps) - 1, stamps.shape[1]))
    return np.subtract(stamps[1:], stamps[:-1], out=spans, where=np.isfinite(stamps[:-1]))


@contextlib.contextmanager
def _reporter(progress: Any, total: int) -> Iterator[Callable[[int], Any]]:
    """The function to call with the number of steps done."""
    if progress is None or progress is False:
        yield lambda done: None
    elif callable(progress):
        yield lambda done: progress(done, total)
    elif progress is True:
        try:
            from rich.progress import Progress
        except ImportError as error:
            raise ImportError(
                "`simulate` needs rich to show a bar; it is not installed. Run `pip install "
                '"jaxcode[train]"`, or pass progress a function.'
            ) from error
        with Progress() as bar:
            task = bar.add_task("Simulating", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        raise ValueError(
            f"`simulate` needs progress to be True or a function of two numbers; got {progress!r}. "
            "Leave it out."
        )
