"""Why a plan says what it says, a line a reason."""

import math
from collections.abc import Iterator
from typing import Any

from jaxcode.expectation import StepModel

# A design that is more trouble must be faster by this factor.
WORTH = 1.02
# A share of the step that is worth a line.
_NOTABLE = 0.1
# Workers whose medians differ by this factor are not alike.
_ALIKE = 1.25


def reasons(plan: Any, model: StepModel, undercut: str | None = None) -> Iterator[str]:
    """The reasons of a `Plan`, the choice first.

    Args:
        plan: The plan, but for its reasons.
        model: What it was made with.
        undercut: What would be chosen if multiplying factors out were free, where that is not the
            choice.

    Yields:
        Sentences.
    """
    best, floor = plan.best, min(plan.uncoded, plan.low_rank, key=lambda row: row.seconds)
    yield (
        f"{best.design.name}: {_seconds(best.seconds)} a step, {best.speedup:.3g} times as fast as "
        "dense gradients from everybody"
    )
    yield _of_low_rank(plan)
    yield from _of_products(plan, model, undercut)
    yield _of_waiting(floor, model)
    yield _of_redundancy(plan, floor)
    approximate = [row for row in plan.rows if not row.exact]
    if approximate:
        first = approximate[0]
        yield (
            f"approximately, {first.design.name}: {_seconds(first.seconds)} for each full batch "
            f"that is used, but every step loses {first.error:.1%} of the data"
        )
    yield f"break-even bandwidth: redundancy pays {_between(*plan.break_even_bandwidth)}"
    yield (
        f"break-even redundancy: computing everything up to {plan.break_even_redundancy:.3g} times "
        "is faster than once"
        if plan.break_even_redundancy > 1
        else "break-even redundancy: none, computing anything twice is slower"
    )
    yield from _cautions(plan, model)


def _of_low_rank(plan: Any) -> str:
    dense, low = plan.uncoded, plan.low_rank
    if low.worker_bytes >= dense.worker_bytes:
        return "low rank: no weight is shorter in factors at this many rows a worker"
    saved, saves = dense.seconds - low.seconds, ""
    if saved and math.isfinite(saved):
        saves = f", {_seconds(abs(saved))} {'less' if saved > 0 else 'more'} a step"
    return (
        f"low rank: {low.worker_bytes:.4g} bytes a worker in place of {dense.worker_bytes:.4g}"
        f"{saves}, without redundancy"
    )


def _of_products(plan: Any, model: StepModel, undercut: str | None) -> Iterator[str]:
    """What multiplying factors out takes, where that is much or decides."""
    best, setting = plan.best, model.setting
    product = setting.product(best.forms) * setting.batch_seconds
    if undercut is not None:
        yield (
            f"multiplying factors out of the whole batch changes the choice: if it were free, "
            f"{undercut} would be best"
        )
    elif product > _NOTABLE * best.seconds:
        yield (
            f"multiplying factors out of the whole batch takes {_seconds(product)} of the "
            f"{_seconds(best.seconds)}"
        )


def _of_waiting(floor: Any, model: StepModel) -> str:
    setting = model.setting
    computing = (1 - setting.product(floor.forms)) * setting.batch_seconds / model.n
    sending = floor.worker_bytes / float(setting.bandwidth)
    waiting = max(0.0, floor.seconds - computing - sending - floor.decode)
    decoding = f", {_seconds(floor.decode)} of decoding" if floor.decode else ""
    return (
        f"without redundancy a step is {_seconds(computing)} of computing, {_seconds(sending)} of "
        f"sending{decoding} and {_seconds(waiting)} of waiting for the slowest and the master"
    )


def _of_redundancy(plan: Any, floor: Any) -> str:
    redundant = [row for row in plan.rows if row.exact and row.copies > 1]
    if not redundant:
        return "redundancy: no such design is among the fastest"
    row = redundant[0]
    times = f"computes everything {row.copies:.3g} times"
    compared = f"{_seconds(row.seconds)} against {_seconds(floor.seconds)} without"
    if row.seconds * WORTH < floor.seconds:
        return f"redundancy pays: {row.design.name} {times}, {compared}"
    return f"redundancy does not pay: the best, {row.design.name}, {times}, {compared}"


def _between(low: float, high: float) -> str:
    if high == 0:
        return "at no bandwidth"
    if low == 0:
        return "at any bandwidth" if math.isinf(high) else f"below {high:.3g} bytes/s"
    if math.isinf(high):
        return f"above {low:.3g} bytes/s"
    return f"from {low:.3g} to {high:.3g} bytes/s"


def _cautions(plan: Any, model: StepModel) -> Iterator[str]:
    if plan.best.probability < 1:
        ends = "is not over by the deadline" if model.setting.deadline else "never ends"
        yield f"caution: a step {ends} with probability {1 - plan.best.probability:.2g}"
    if math.isinf(plan.best.seconds):
        yield "caution: every design waits for ever on average; set a deadline"
    for name, medians in model.medians.items():
        low, high = float(medians.min()), float(medians.max())
        if high > _ALIKE * low:
            yield (
                f"caution: {name} differs from worker to worker (medians {low:.3g} to {high:.3g}), "
                "where this ranking takes them to be alike; simulate the first rows, and consider "
                "`heterogeneous`"
            )


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
