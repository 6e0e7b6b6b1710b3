"""Makes the report of a step from what was noted while it was taken."""

import math
import time
from typing import Any

import jax
import numpy as np

from jaxcode.cluster.history import StepReport
from jaxcode.cluster.plans import values_of
from jaxcode.cluster.step import Step
from jaxcode.code import Code

# Messages that come later than so many steps are not told how late they are.
REMEMBERED = 1000


class Reporter:
    """Remembers what a report needs of earlier steps: bytes so far, and when each was decided."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self._decided: dict[int, float] = {}

    def report(
        self, step: Step, code: Code, restarts: list[int], attempts: int, *, skipped: bool
    ) -> StepReport:
        """The report of a step that is decided; call it once a step."""
        plan, n, now = step.plan, code.num_workers, time.monotonic()
        assert plan is not None
        survivors = np.zeros(n, bool)
        survivors[list(plan.headers)] = True
        answered = {i: r for i, r in step.reports.items() if i not in step.rejected}
        _, loss, aux, missing = values_of(code, answered)
        done = {i: outcome for i, outcome in step.outcomes.items() if outcome.done}
        decodable = step.decodable_at or now
        self._decided[step.number] = decodable
        self._decided.pop(step.number - REMEMBERED, None)
        used = [step.reports[i].seconds for i in plan.headers if i in step.reports]
        parts = np.array([outcome.seconds for outcome in done.values()] or [(0.0, 0.0, 0.0)])
        pull, decode, apply = map(float, np.median(parts, axis=0))
        exact = skipped or bool(code.is_decodable(survivors))
        return StepReport(
            step=step.number,
            loss=loss,
            metrics=jax.tree.map(lambda x: float(x) if np.ndim(x) == 0 else x, aux),
            survivors=survivors,
            late={i: now - decodable for i in range(n) if i not in step.reports and not skipped},
            dropped=[
                (member.index, number, at - self._decided[number])
                for member, number, at in step.late
                if number in self._decided
            ],
            rejected={**dict.fromkeys(step.disagreed, "disagrees"), **step.rejected},
            error=0.0 if exact else float(code.decoding_error(survivors)),
            skipped=skipped,
            missing=missing,
            bytes_in=[done[i].bytes_in if i in done else -1 for i in range(n)],
            bytes_out=[self._new_bytes(i, done.get(i)) for i in range(n)],
            driver_bytes=step.driver_bytes,
            seconds={
                "step": now - step.started,
                "compute": max(used, default=0.0),
                "wait": decodable - step.started,
                "pull": pull,
                "decode": decode,
                "apply": apply,
            },
            arrivals=[step.arrivals.get(i, math.inf) for i in range(n)],
            attempts=attempts,
            restarts=restarts,
        )

    def _new_bytes(self, worker: int, outcome: Any) -> int:
        """What a worker handed out since it last said; it counts from when it was started."""
        before = self._sent.get(worker, 0)
        total = before if outcome is None else outcome.bytes_out
        self._sent[worker] = total
        return total - before if total >= before else total
