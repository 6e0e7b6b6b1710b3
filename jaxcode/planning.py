"""Which design to train with: all of them ranked by expected seconds, with reasons.

Low rank takes most of the communication away, and with it most of the reason for coding: what is
left of it is protection against stragglers, at several times the computing. So the answer may well
be not to code. Nor are factors free: whoever decodes multiplies them out, for the whole batch, and
where computing takes most of a step dense gradients are faster. Slowness that multiplies a worker's
seconds grows with redundancy, and pauses that add to them do not; most decisions hang on which of
the two it is.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jaxcode.candidates import Candidate, candidates
from jaxcode.checks import integer, real
from jaxcode.codes import uncoded as make_uncoded
from jaxcode.designs import Design, Form, conditions
from jaxcode.expectation import StepModel
from jaxcode.ranking import Ranked, Ranking, break_even_bandwidth, break_even_redundancy
from jaxcode.reasons import WORTH, reasons
from jaxcode.seconds import Latency, Real

# From simple to elaborate; a later one must be worth it.
Verdict = Literal[
    "uncoded", "low rank without redundancy", "redundancy", "drop the slowest, approximately"
]
# Designs that are expected with the whole sample; and exact rows of a plan.
_REFINED = {"blocks": 16, "sum": 12, "first": 6}
_SHOWN = 9
# Workers: a slip beyond, and more than can be drawn.
_LARGEST = 2**20


class Estimate(NamedTuple):
    """A design and what to expect of it.

    Attributes:
        design: the design; `design.code.load` partitions a worker, m fragments.
        seconds: expected, of a step. With a deadline: over the probability that it is exact, so
            that a step that is not counts as lost. Approximately: over the share of the batch used.
        speedup: how many times faster than uncoded dense gradients.
        worker_bytes: what each worker sends in a step.
        decode: the seconds of these that decoding takes: reading the messages and multiplying
            factors out.
        copies: how often the batch is computed: 1 is no redundancy.
        probability: that a step is exact (or has the arrivals it waits for) by the deadline, or,
            without a deadline, ever.
        error: the share of the batch that an approximate design loses; 0 is exact.
        forms: the form each leaf is sent in.
    """

    design: Design
    seconds: float
    speedup: float
    worker_bytes: float
    decode: float
    copies: float
    probability: float
    error: float
    forms: dict[str, Form]

    @property
    def exact(self) -> bool:
        """Whether steps wait for the exact gradient."""
        return self.design.wait_for is None


class Plan(NamedTuple):
    """Designs ranked, the choice among them, and why; `str` makes a table.

    Attributes:
        rows: the best designs that qualify, the fastest first.
        best: the choice: the fastest, unless a simpler one is within 2 %.
        best_exact: the choice among exact ones; None where only approximate ones qualify.
        uncoded: dense gradients from everybody, whether or not that qualifies.
        low_rank: the same with factors, where they are shorter; else the same as `uncoded`.
        verdict: what kind of design `best` is.
        reasons: a line each.
        break_even_bandwidth: (low, high) bytes per second between which some redundant design beats
            the best without redundancy, the range nearest to the bandwidth given. (0, inf) is at
            any bandwidth tried, four decades either way, and (0, 0) at none.
        break_even_redundancy: the most copies of the batch with which some exact design is still
            faster than none; 1 where none is.
    """

    rows: tuple[Estimate, ...]
    best: Estimate
    best_exact: Estimate | None
    uncoded: Estimate
    low_rank: Estimate
    verdict: Verdict
    reasons: tuple[str, ...]
    break_even_bandwidth: tuple[float, float]
    break_even_redundancy: float

    def __str__(self) -> str:
        width = max(len(row.design.name) for row in self.rows)
        lines = [
            f"{'design':{width}}  seconds  decode  speed  copies  bytes/worker  exact or error"
        ]
        for row in self.rows:
            sure = f"exact {row.probability:.4g}" if row.exact else f"error {row.error:.3g}"
            chosen = "  <- chosen" if row == self.best else ""
            lines.append(
                f"{row.design.name:{width}}  {row.seconds:7.4g}  {row.decode:6.3g}  "
                f"{row.speedup:4.2f}x  {row.copies:6.3g}  {row.worker_bytes:12.5g}  {sure}{chosen}"
            )
        return "\n".join([*lines, f"verdict: {self.verdict}", *(f"- {x}" for x in self.reasons)])


def plan(
    params: Any,
    *,
    examples: int,
    num_workers: int,
    seconds_per_example: Real,
    bandwidth: Real,
    num_stragglers: int | None = None,
    probability: Real | None = None,
    positions: int = 1,
    slowdown: Latency | None = None,
    pause: Latency | None = None,
    network: Latency | None = None,
    master_bandwidth: Real = math.inf,
    decode_rate: Real = math.inf,
    deadline: Real | None = None,
    product_share: Real = 1 / 3,
    approximate: bool = True,
    seed: int = 0,
) -> Plan:
    """Designs ranked by expected seconds a step, and the one to choose, which may be no code.

    Expected seconds are exact for the distribution of one worker's seconds, of which some 100,000
    are drawn, if workers are alike and independent of each other. Where they differ for good (a
    slow machine, a trace with one) or straggle together, `simulate` the first few rows. The
    master's own link is approximate: messages queue as if each arrived when expected.

    Args:
        params: The parameters, as `leaf_shapes` takes them: nested shapes or arrays, a Flax NNX
            module, or the path of an `.npz` file.
        examples: Of the whole batch, a step.
        num_workers: n.
        seconds_per_example: A worker's computing.
        bandwidth: Bytes per second from a worker to the master, 1.25e8 for 1 Gbit/s.
        num_stragglers: Only designs that go on with any s workers missing: exactly, or, if
            `approximate`, without their data.
        probability: Only designs whose steps are complete (exact, or with the arrivals they wait
            for) by the deadline, or ever, with this probability at least. Steps that never end are
            then left out of the expected seconds.
        positions: Rows of a weight's input per example, such as the tokens of a text.
        slowdown: A latency model whose draws multiply a worker's computing seconds.
        pause: One whose draws, in seconds, are added to them; see `failures`.
        network: One whose draws multiply a message's seconds on the worker's link.
        master_bandwidth: Bytes per second of the master's own link.
        decode_rate: Bytes of messages per second that the master decodes.
        deadline: Seconds from the start after which a step is over.
        product_share: The share of `seconds_per_example` that forms the gradients of the weights,
            which a design in factors leaves to the decoder: 0 to below 1. Too low makes factors
            look better than they are where computing takes most of a step, and 0 has them cost
            nothing; see `simulate`.
        approximate: Whether to consider dropping the slowest workers, up to half, without a code.
            False leaves exact designs alone.
        seed: Of the draws.

    Returns:
        The `Plan`. What is infinite on average (steps that never end, tails as heavy as `pareto`'s
        at alpha 1) ranks last.

    Raises:
        ValueError: An argument is out of range, or no design qualifies.

    Example:
        >>> from jaxcode.stragglers import bimodal
        >>> conditions = {"examples": 160, "num_workers": 16, "bandwidth": 1e5,
        ...               "seconds_per_example": 0.1, "approximate": False}
        >>> slow = plan({"w": (500, 500)}, **conditions, slowdown=bimodal(1.0, 1.3, 0.02))
        >>> slow.verdict, slow.break_even_redundancy
        ('low rank without redundancy', 1.0)
        >>> pauses = plan({"w": (500, 500)}, **conditions, pause=bimodal(0.0, 9.0, 0.05))
        >>> pauses.verdict, pauses.best.design.code
        ('redundancy', <Code fractional_repetition [n=16, k=8, s=1, m=1]>)

    References:
        Ye and Abbe, "Communication-computation efficient gradient coding", 2018: the model of a
        worker's seconds.
    """
    call = "plan"
    n = integer(call, "num_workers", num_workers, 1, _LARGEST, "Count the workers.")
    setting = conditions(
        call, params, examples=examples, positions=positions,
        seconds_per_example=seconds_per_example, bandwidth=bandwidth,
        master_bandwidth=master_bandwidth, decode_rate=decode_rate, slowdown=slowdown, pause=pause,
        network=network, deadline=deadline, product_share=product_share,
    )  # fmt: skip
    for name in ("seconds_per_example", "bandwidth"):
        if getattr(setting, name).ndim:
            raise ValueError(
                f"`{call}` needs {name} to be one number, since it takes workers to be alike; got "
                "one a worker. Use simulate."
            )
    if num_stragglers is not None:
        cure = "Somebody must answer."
        num_stragglers = integer(call, "num_stragglers", num_stragglers, 0, n - 1, cure)
    if probability is not None:
        cure = "Give a share of the steps."
        probability = real(call, "probability", probability, low=0, high=1, cure=cure)
    seed = integer(call, "seed", seed, 0, None, "Give an integer.")
    if not isinstance(approximate, bool | np.bool_):
        raise ValueError(
            f"`{call}` needs approximate to be True or False; got {approximate!r}. False leaves "
            "exact designs alone."
        )
    found = candidates(setting, n, approximate=bool(approximate))
    ranking = Ranking(StepModel(call, setting, n, seed), probability)
    return _planned(ranking, found, num_stragglers or 0)


def _planned(ranking: Ranking, found: list[Candidate], num_stragglers: int) -> Plan:
    plain = [x for x in found if x.exact and not x.redundant]  # dense, and factors if shorter
    able = [x for x in found if x.tolerated >= num_stragglers]
    considered = _distinct(plain, able)
    screened = ranking.ranked(considered, whole=False)
    finalists = _finalists(screened, ranking, num_stragglers)
    refined = ranking.ranked(_distinct(plain, finalists), whole=True)
    by_candidate = {id(x.candidate): x for x in refined}
    base = by_candidate[id(plain[0])]
    uncoded, *shorter = (_estimate(by_candidate[id(x)], base) for x in plain)
    rows = _shown([x for x in refined if _qualifies(x, ranking, num_stragglers)], base)
    if not rows:
        most = max(1 - x.doubt for x in screened)
        raise ValueError(
            f"`plan` needs a design whose steps are complete with probability "
            f"{ranking.probability}; the best has {most:.4g}. Raise the deadline, or lower the "
            "probability."
        )
    best = _chosen(rows)
    assert best is not None  # there are rows
    result = Plan(
        rows=rows,
        best=best,
        best_exact=_chosen([x for x in rows if x.exact]),
        uncoded=uncoded,
        low_rank=shorter[0] if shorter else uncoded,
        verdict=_verdict(best),
        reasons=(),
        break_even_bandwidth=break_even_bandwidth(
            ranking,
            [*plain, *(x for x in able if x.redundant)],
            float(ranking.model.setting.bandwidth),
        ),
        break_even_redundancy=break_even_redundancy(screened),
    )
    undercut = _undercut(ranking, considered, num_stragglers, best)
    return result._replace(reasons=tuple(reasons(result, ranking.model, undercut)))


def _distinct(*groups: list[Candidate]) -> list[Candidate]:
    return list({id(x): x for group in groups for x in group}.values())


def _finalists(screened: list[Ranked], ranking: Ranking, num_stragglers: int) -> list[Candidate]:
    """Those to work out from the whole sample; of each kind, for sum codes may prove unfit."""
    near = [x.candidate for x in screened if _qualifies(x, ranking, num_stragglers, room=0.5)]
    found = []
    for kind, count in _REFINED.items():
        found += [x for x in near if x.kind == kind][:count]
    return found


def _undercut(
    ranking: Ranking, considered: list[Candidate], num_stragglers: int, chosen: Estimate
) -> str | None:
    """The name of what would be chosen if products were free, where that is something else."""
    if not any(x.task.product for x in considered):
        return None
    free = [x._replace(task=x.task._replace(product=0.0)) for x in considered]
    names = [chosen.design.name]
    for tried in (considered, free):  # both from the smaller sample, to compare like with like
        screened = ranking.ranked(tried, whole=False)
        finalists = ranking.ranked(_finalists(screened, ranking, num_stragglers), whole=False)
        best = _chosen(_shown(finalists, screened[0]))
        names.append(best.design.name if best else "")
    return names[-1] if names[-1] not in names[:-1] else None


def _qualifies(x: Ranked, ranking: Ranking, num_stragglers: int, room: float = 0.0) -> bool:
    """Whether it does what was asked, with some room for what the smaller sample does not show."""
    least = ranking.probability or 0.0
    enough = 1 - x.doubt >= least - room * (1 - least)
    return x.candidate.tolerated >= num_stragglers and enough


def _shown(qualified: list[Ranked], base: Ranked) -> tuple[Estimate, ...]:
    """The fastest whose codes are fit, and the fastest of each kind."""
    made = []
    kinds: dict[Verdict, int] = {}
    for x in qualified:
        design = x.candidate.design()
        if design is None:
            continue
        estimate = _estimate(x, base, design)
        kind = _verdict(estimate)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= (_SHOWN if estimate.exact else 3):
            made.append(estimate)
    exact = [x for x in made if x.exact]
    # Uncoded and low rank stay, however slow: they are what the others are compared with.
    kept = exact[:_SHOWN] + [x for x in exact[_SHOWN:] if x.copies == 1]
    return tuple(x for x in made if not x.exact or any(x is y for y in kept))


def _estimate(x: Ranked, base: Ranked, design: Design | None = None) -> Estimate:
    candidate = x.candidate
    error = 0.0
    if not candidate.exact:
        error = 1 - x.expected.there * candidate.task.need.least / candidate.num_workers
    return Estimate(
        design or Design(make_uncoded(candidate.num_workers), method=candidate.method),
        x.seconds,
        _ratio(base.seconds, x.seconds),
        candidate.task.message_bytes,
        x.expected.decode,
        candidate.copies,
        x.expected.probability,
        error,
        candidate.forms,
    )


def _ratio(seconds: float, other: float) -> float:
    """How many times faster; both may be infinite, or nothing at all."""
    if seconds == other:
        return 1.0
    return seconds / other if other else math.inf


def _chosen(rows: Sequence[Estimate]) -> Estimate | None:
    """The fastest, unless a simpler one is nearly as fast."""
    best: Estimate | None = None
    for kind in get_args(Verdict):
        same = [row for row in rows if _verdict(row) == kind]
        if same and (best is None or _beats(same[0], best)):
            best = same[0]
    return best


def _beats(row: Estimate, simpler: Estimate) -> bool:
    if math.isinf(simpler.seconds) and math.isinf(row.seconds):
        return row.probability > simpler.probability
    return row.seconds * WORTH < simpler.seconds


def _verdict(row: Estimate) -> Verdict:
    if not row.exact:
        return "drop the slowest, approximately"
    if row.copies > 1:
        return "redundancy"
    return "uncoded" if row.design.method == "dense" else "low rank without redundancy"
