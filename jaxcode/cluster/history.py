"""What happened, step by step: reports, and a table of who is slow."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

# Steps that say what is usual.
RECENT = 10


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        step: counted from 0.
        loss: mean over the examples that were heard of; NaN if there were none.
        metrics: auxiliary outputs of the loss, in its structure, averaged like it.
        survivors: (n,) whose messages decided the step.
        late: seconds since the step was decodable, by worker that had not answered when it ended.
        dropped: messages of earlier steps that came in during this one: worker, its step, and
            seconds after that step was decodable.
        rejected: messages that were not used, by worker: a key of `jaxcode.cluster.wire.REASONS`.
        error: how far the decoded gradient may be off, as `Code.decoding_error`; 0 if exact.
        skipped: whether parameters stayed as they were.
        missing: partitions that no answer covered.
        bytes_in: fetched by each worker, or -1 where it did not say in time.
        bytes_out: handed out by each worker, during this step or since it last said.
        driver_bytes: fetched and handed out by a master.
        seconds: whole step, and of it in compute, wait, pull, decode (what of it was left when all
            was fetched) and apply.
        arrivals: seconds from the step's start until each worker's report; infinity if none.
        attempts: plans that were made; more than one if a worker was lost in between.
        restarts: workers that were started again in this step.
    """

    step: int
    loss: float
    metrics: Any
    survivors: Bool[np.ndarray, " workers"]
    late: dict[int, float]
    dropped: list[tuple[int, int, float]]
    rejected: dict[int, str]
    error: float
    skipped: bool
    missing: list[int]
    bytes_in: list[int]
    bytes_out: list[int]
    driver_bytes: tuple[int, int]
    seconds: dict[str, float]
    arrivals: list[float]
    attempts: int
    restarts: list[int]

    def scalars(self) -> dict[str, Any]:
        """Plain numbers for a log or TensorBoard, in groups by the part before the slash."""
        counts = Counter(self.rejected.values())
        return {
            "step": self.step,
            "loss": None if np.isnan(self.loss) else self.loss,
            **self._named_metrics(),
            "survivors": int(self.survivors.sum()),
            "late": len(self.late),
            "dropped": len(self.dropped),
            "rejected": sum(counts.values()),
            "error": self.error,
            "skipped": int(self.skipped),
            "bytes/in": sum(x for x in self.bytes_in if x > 0),
            "bytes/out": sum(x for x in self.bytes_out if x > 0),
            "bytes/driver_in": self.driver_bytes[0],
            "bytes/driver_out": self.driver_bytes[1],
            **{f"seconds/{name}": round(x, 6) for name, x in self.seconds.items()},
            **{f"rejected/{reason}": count for reason, count in sorted(counts.items())},
        }

    def _named_metrics(self) -> dict[str, float]:
        """Auxiliary outputs that are numbers, by their place in the loss's structure."""
        leaves = jax.tree_util.tree_leaves_with_path(self.metrics)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        return {
            f"metrics/{name}".rstrip("/"): float(x)
            for name, (_, x) in zip(names, leaves, strict=True)
            if np.ndim(x) == 0 and np.isfinite(x)
        }

    def __str__(self) -> str:
        """One line for a person."""
        missing = [int(i) for i in np.flatnonzero(~self.survivors)]
        text = f"step {self.step}: loss {self.loss:.4g}, {self.seconds['step'] * 1e3:.0f} ms"
        if missing:
            text += f", without {', '.join(map(str, missing))}"
        if self.rejected:
            text += "".join(f", {i}: {why}" for i, why in sorted(self.rejected.items()))
        if self.skipped:
            text += ", skipped"
        elif self.error:
            text += f", approximate ({self.error:.2g})"
        return text


class History:
    """Reports of all steps, and what they say of each worker.

    Args:
        path: a file to add a line of JSON to at each step, ``metrics.jsonl``; None for none.
        kept: so many of the last reports stay in memory.

    Example:
        >>> History().table()
        []
    """

    def __init__(self, path: Path | None = None, *, kept: int = 10_000):
        self.path, self._kept = path, kept
        self.reports: list[StepReport] = []
        self.rejected: Counter[str] = Counter()
        self.late: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()

    def append(self, report: StepReport) -> None:
        """Add a step, and its line to the file."""
        self.reports.append(report)
        del self.reports[: -self._kept]
        self.rejected.update(report.rejected.values())
        self.late.update(report.late.keys())
        self.dropped.update(worker for worker, _, _ in report.dropped)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(report.scalars()) + "\n")

    @property
    def usual_wait(self) -> float:
        """Median of the seconds that recent steps waited for answers; 0 before the first."""
        recent = [report.seconds["wait"] for report in self.reports[-RECENT:]]
        return float(np.median(recent)) if recent else 0.0

    def rewind(self, step: int) -> None:
        """Forget the file's lines of a step and after: they are taken again."""
        if self.path is None or not self.path.exists():
            return
        kept = [x for x in self.path.read_text().splitlines() if json.loads(x)["step"] < step]
        self.path.write_text("".join(f"{line}\n" for line in kept))

    def table(self) -> list[dict[str, Any]]:
        """A row a worker, slowest first: seconds until it reported, and what went wrong.

        Returns:
            Rows with worker, reports, min, median, p99, worst (seconds until it reported, of the
            steps it did), late (steps that ended without it) and dropped (its late messages).
        """
        if not self.reports:
            return []
        widest = max(len(report.arrivals) for report in self.reports)
        rows = []
        for worker in range(widest):
            seen = np.array([r.arrivals[worker] for r in self.reports if worker < len(r.arrivals)])
            times = seen[np.isfinite(seen)]
            points = np.quantile(times, [0, 0.5, 0.99, 1]) if times.size else np.full(4, np.nan)
            rows.append(
                {
                    "worker": worker,
                    "reports": int(times.size),
                    **dict(zip(("min", "median", "p99", "worst"), map(float, points), strict=True)),
                    "late": self.late[worker],
                    "dropped": self.dropped[worker],
                }
            )
        return sorted(rows, key=lambda row: (-row["late"], -np.nan_to_num(row["median"])))

    def __str__(self) -> str:
        """The table, in milliseconds."""
        head = f"{'worker':>6} {'reports':>7} {'min':>7} {'median':>7} {'p99':>7} {'worst':>7}"
        lines = [f"{head} {'late':>5} {'dropped':>7}   (milliseconds until it reported)"]
        for row in self.table():
            points = " ".join(
                f"{row[name] * 1e3:7.0f}" for name in ("min", "median", "p99", "worst")
            )
            counts = f"{row['late']:5d} {row['dropped']:7d}"
            lines.append(f"{row['worker']:6d} {row['reports']:7d} {points} {counts}")
        return "\n".join(lines)
