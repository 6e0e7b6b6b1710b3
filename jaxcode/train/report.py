"""What a training run says on the terminal: a line before, a bar during and a table after."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxcode.train.schedule import TIMED
from jaxcode.train.training import Record, Traffic, Trainer
from jaxcode.train.verification import Difference, Differences

# Columns of a terminal that the whole bar fits in.
_WIDE = 90


def size(count: float | int) -> str:
    """Format a number of bytes.

    Args:
        count: bytes.

    Returns:
        The number in a decimal unit.

    Example:
        >>> size(65_576), size(3), size(1.5e9)
        ('65.6 kB', '3 B', '1.5 GB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.95 or unit == "TB":
            break
    return f"{count:.1f} {unit}"


def describe(trainer: Trainer) -> str:
    """Return two lines: the data with the model, and the workers with the code.

    Args:
        trainer: the run.

    Returns:
        The lines, without the last line break.
    """
    config, data, code = trainer.config, trainer.data, trainer.code
    layers = [data.x_train.shape[1], *config.hidden, data.num_classes]
    count = 1 if trainer.mesh is None else trainer.mesh.size
    device = jax.devices()[0].platform + (" device" if count == 1 else " devices")
    blocks = "block" if code.num_partitions == 1 else "blocks"
    workers = "worker" if config.workers == 1 else "workers"
    missing = f"any {config.stragglers}" if config.stragglers else "none"
    return (
        f"{data.name}: {len(data.y_train):,} training and {len(data.y_test):,} test examples, "
        f"layers {'-'.join(map(str, layers))}\n"
        f"{config.workers} {workers}, {missing} may be missing: {code.num_partitions} {blocks}, "
        f"{config.method}, on {count} {device}"
    )


class Meter:
    """One progress bar with loss, survivors and bytes received so far.

    Args:
        progress: Rich's live display.
        message: bytes in one worker's message.

    Example:
        >>> with meter(message=8) as bar:
        ...     bar.start("training", total=2)
        ...     bar.advance()
    """

    def __init__(self, progress: Progress, message: float | int):
        self._progress = progress
        self._message = message
        self._received = 0.0
        self._task: Any = None

    def start(self, name: str, *, total: int, completed: int = 0) -> None:
        """Begin another bar."""
        self._task = self._progress.add_task(name, total=total, completed=completed, note="")

    def advance(self, record: Record | None = None) -> None:
        """Count one step, with its record if there is one to show."""
        if record is not None:
            answered = int(record.survivors.sum())
            self._received += answered * self._message
            note = f"loss {record.loss:<9.3g}"
            if self._progress.console.width >= _WIDE:  # else the bar and count have no room
                note += f" {answered}/{len(record.survivors)} answered, {size(self._received)}"
            self._progress.update(self._task, note=note)
        self._progress.advance(self._task)

    def advance_report(self, report: Any) -> None:
        """Count one step of a cluster, with its loss, survivors and bytes as measured."""
        self._received += sum(count for count in report.bytes_in if count > 0)
        note = f"loss {report.loss:<9.3g}"
        if self._progress.console.width >= _WIDE:
            used = f"{int(report.survivors.sum())}/{len(report.survivors)} used"
            note += f" {used}, {size(self._received)}"
        self._progress.update(self._task, note=note)
        self._progress.advance(self._task)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def meter(*, message: float | int) -> Iterator[Meter]:
    """Show progress on standard error while the block runs.

    Args:
        message: bytes in one worker's message.

    Yields:
        The `Meter` to advance.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Meter(progress, message)


def table(
    trainer: Trainer,
    records: Sequence[Record],
    *,
    accuracy: float,
    traffic: Traffic,
    differences: Differences | None,
) -> Table:
    """Return the closing table.

    Args:
        trainer: the run.
        records: of the steps taken now.
        accuracy: on the held-out examples.
        traffic: bytes per worker and step.
        differences: of the parameters to those of other trainings, if they were made.

    Returns:
        A Rich table.
    """
    rows = blank_table()
    rows.add_row("test accuracy", f"{accuracy:.1%}", f"of {len(trainer.data.y_test):,} examples")
    if differences:
        add_differences(rows, differences, "had missing data been dropped")
    _add_bytes(rows, trainer, traffic)
    if records:
        _add_times(rows, trainer, records)
    return rows


def blank_table() -> Table:
    """Return the closing table without rows: a name, a number, a note.

    Example:
        >>> len(blank_table().columns)
        3
    """
    rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column()
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column()
    return rows


def add_differences(rows: Table, differences: Differences, control: str) -> None:
    """Add how far the parameters are from those of other trainings.

    Args:
        rows: the table to add to.
        differences: what was measured.
        control: what became of whose data, in the control.

    Example:
        >>> rows = blank_table()
        >>> add_differences(rows, Differences(Difference(1e-7, 1e-6), None), "dropped")
        >>> rows.row_count
        2
    """
    rows.add_row("largest parameter difference")
    rows.add_row("  to training without stragglers", *_difference(differences.exact))
    if differences.control:
        rows.add_row(f"  {control}", *_difference(differences.control))


def _add_bytes(rows: Table, trainer: Trainer, traffic: Traffic) -> None:
    """Add what a worker sends, beside what it would send otherwise."""
    rows.add_row(
        f"bytes per worker and step, {trainer.config.method}",
        size(traffic.message),
        ratio(traffic.message, traffic.dense),
    )
    rows.add_row("  dense", size(traffic.dense))
    rows.add_row(
        f"  Ye-Abbe, fragments {trainer.config.fragments}",
        size(traffic.ye_abbe),
        ratio(traffic.ye_abbe, traffic.dense),
    )
    if traffic.lower_bound is not None:
        bound = traffic.lower_bound
        rows.add_row("  lower bound", size(bound), ratio(bound, traffic.dense))


def _add_times(rows: Table, trainer: Trainer, records: Sequence[Record]) -> None:
    """Add simulated waits, where the model has latencies, and real seconds."""
    if trainer.config.straggler_model in TIMED:
        waited, everyone = (
            sum(getattr(record, name) for record in records) / len(records)
            for name in ("waited", "waited_all")
        )
        rows.add_row(
            "simulated wait per step", f"{waited:.2f} s", f"{everyone:.2f} s to wait for everyone"
        )
    seconds = sum(record.seconds for record in records)
    each = f"{1000 * seconds / len(records):.1f} ms a step"
    compiling = trainer.compile_seconds
    rows.add_row("seconds", f"{seconds + compiling:.1f} s", f"{compiling:.1f} compiling, {each}")


def _difference(difference: Difference) -> tuple[str, str]:
    """Format a difference of parameters as two cells."""
    return f"{difference.absolute:.1e}", f"relative {difference.relative:.1e}"


def ratio(count: float | int, dense: float | int) -> str:
    """Say how bytes compare with a dense gradient's.

    Args:
        count: bytes.
        dense: those of the gradient.

    Example:
        >>> ratio(10, 25), ratio(25, 25), ratio(50, 25)
        ('2.5 times fewer than dense', 'as dense', '2.00 times dense: more')
    """
    if abs(count - dense) < 0.005 * dense:
        return "as dense"
    if not count:
        return ""
    if count > dense:
        return f"{count / dense:.2f} times dense: more"
    return f"{dense / count:.1f} times fewer than dense"
