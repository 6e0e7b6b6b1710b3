"""What a training on a cluster says on the terminal; reports are `jaxcode.cluster.StepReport`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jaxcode.train.clustered_session import LOCAL, ClusterSession
from jaxcode.train.report import add_differences, blank_table, ratio, size
from jaxcode.train.verification import Differences


def describe(session: ClusterSession) -> list[str]:
    """Return two lines: what is trained, and the workers with the code.

    Args:
        session: the run.

    Returns:
        The lines.
    """
    config, code, trainer = session.config, session.code, session.trainer
    leaves = jax.tree.leaves(session.problem.params)
    first = f"{session.problem.name}: {sum(np.size(x) for x in leaves):,} parameters"
    if trainer is not None:
        data = trainer.data
        layers = "-".join(map(str, [data.x_train.shape[1], *config.hidden, data.num_classes]))
        first = (
            f"{data.name}: {len(data.y_train):,} training and {len(data.y_test):,} test examples, "
            f"layers {layers}"
        )
    blocks = "block" if code.num_partitions == 1 else "blocks"
    workers = "worker" if config.workers == 1 else "workers"
    missing = f"any {config.stragglers}" if config.stragglers else "none"
    place = "a Ray cluster of its own" if session.address == LOCAL else session.address
    return [
        first,
        f"{config.workers} {workers}, {missing} may be missing: {code.num_partitions} {blocks}, "
        f"{config.method}, {config.topology}, on {place}",
    ]


def where(workers: Sequence[Any]) -> str:
    """Say where the workers ran.

    Args:
        workers: `Cluster.workers`.

    Example:
        >>> from types import SimpleNamespace
        >>> where([SimpleNamespace(host=name, devices="cpu:0") for name in "aab"])
        '2 hosts: a 2, b 1'
    """
    hosts = Counter(worker.host for worker in workers)
    if len(hosts) == 1:
        return f"{len(workers)} on 1 host"
    return f"{len(hosts)} hosts: " + ", ".join(f"{host} {n}" for host, n in hosts.items())


def events(report: Any, seen: set[tuple[int, str]]) -> Iterator[str]:
    """Say what went wrong in a step; of the same worker and kind the first time only.

    Args:
        report: of the step.
        seen: what was said before; added to.

    Yields:
        Lines.
    """
    from jaxcode.cluster.wire import REASONS

    found = [(i, f"worker {i}'s message is rejected: {REASONS[why]}")
             for i, why in sorted(report.rejected.items())]  # fmt: skip
    found += [(i, f"worker {i} is started again") for i in report.restarts]
    found += [(-1, "too few answered: the parameters stay")] if report.skipped else []
    if report.error:
        found.append((-1, f"too few answered: an approximate gradient, off by {report.error:.2g}"))
    for worker, text in found:
        kind = (worker, text.split(",")[0])
        if kind not in seen or "started" in text:
            seen.add(kind)
            yield f"step {report.step}: {text}"


def table(
    session: ClusterSession,
    reports: Sequence[Any],
    results: Mapping[str, float],
    differences: Differences | None,
    place: str,
) -> Table:
    """Return the closing table.

    Args:
        session: the run.
        reports: of the steps taken now.
        results: of the problem's `evaluate`.
        differences: of the parameters to those of other trainings, if they were made.
        place: from `where`.

    Returns:
        A Rich table.
    """
    rows = blank_table()
    for name, value in results.items():
        text, note = f"{value:.4g}", ""
        if session.trainer is not None:
            text, note = f"{value:.1%}", f"of {len(session.trainer.data.y_test):,} examples"
        rows.add_row(name, text, note)
    if reports:
        first, last = (report.scalars() for report in (reports[0], reports[-1]))
        rows.add_row("loss", f"{reports[-1].loss:.4g}", f"{reports[0].loss:.4g} at first")
        for name in (name for name in last if name.startswith("metrics")):
            before = f"{first[name]:.4g} at first" if name in first else ""
            rows.add_row(name.removeprefix("metrics/"), f"{last[name]:.4g}", before)
    if differences:
        add_differences(rows, differences, "had absent data been dropped")
    if reports:
        _add_faults(rows, reports)
        _add_bytes(rows, session, reports)
        seconds = sum(report.seconds["step"] for report in reports)
        median = float(np.median([report.seconds["step"] for report in reports]))
        rows.add_row("seconds", f"{seconds:.1f} s", f"median {1e3 * median:.1f} ms a step")
    rows.add_row("workers", str(session.config.workers), place)
    return rows


def _add_faults(rows: Table, reports: Sequence[Any]) -> None:
    """Add who was late, rejected or restarted, and steps that were not exact."""
    late = Counter(i for report in reports for i in report.late)
    again = Counter(i for report in reports for i in report.restarts)
    rejected = Counter(item for report in reports for item in report.rejected.items())
    damaged = Counter({f"worker {i}, {why}": n for (i, why), n in sorted(rejected.items())})
    rows.add_row("answers late or absent", *_counted(late))
    rows.add_row("messages rejected", *_counted(damaged))
    rows.add_row("workers restarted", *_counted(again))
    skipped = sum(report.skipped for report in reports)
    approximate = sum(report.error > 0 for report in reports)
    if skipped or approximate:
        rows.add_row("steps not exact", str(skipped + approximate), f"{skipped} skipped")


def _counted(counts: Counter[Any]) -> tuple[str, str]:
    """Format counts by worker as two cells: all, and each."""
    each = ", ".join(f"{name}: {n}" for name, n in sorted(counts.items()))
    bare = each and not each.startswith("worker")
    return str(counts.total()), f"of worker {each}" if bare else each


def _add_bytes(rows: Table, session: ClusterSession, reports: Sequence[Any]) -> None:
    """Add what a worker sent and fetched, as measured, beside a dense gradient."""
    leaves = map(np.asarray, jax.tree.leaves(session.problem.params))
    dense = sum(leaf.nbytes for leaf in leaves)
    sent = sum(x for report in reports for x in report.bytes_out if x > 0)
    sent /= len(reports) * session.config.workers
    known = [x for report in reports for x in report.bytes_in if x >= 0]
    fetched = sum(known) / len(known) if known else 0.0
    rows.add_row("measured bytes, worker and step")
    rows.add_row("  sent", size(sent), ratio(sent, dense))
    rows.add_row("  fetched", size(fetched), ratio(fetched, dense))
    rows.add_row("  a dense gradient", size(dense))
