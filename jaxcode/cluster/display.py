"""How a training goes, while it goes: the same picture in a terminal and in a notebook."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxcode.checks import integer
from jaxcode.cluster.cluster import Cluster
from jaxcode.cluster.history import History, StepReport
from jaxcode.cluster.wire import REASONS

# Often enough to be read, and seldom enough to cost nothing.
PICTURES_PER_SECOND = 4
# Steps that a worker's usual time is taken from.
RECENT = 100


def live(cluster: Cluster, steps: int) -> Iterator[StepReport]:
    """Take steps, and show meanwhile how far they are and how each worker does.

    In a terminal the picture stands below what is printed, in a notebook below the cell; where
    standard error is neither, it is printed once, at the end. Needs Rich, of the extra ``train``.

    Args:
        cluster: that trains.
        steps: how many to take from now.

    Yields:
        Each step's report.

    Raises:
        ModuleNotFoundError: Rich is not installed.
        TimeoutError: as of `Cluster.step`, and what else it raises.
    """
    steps = integer("live", "steps", steps, 0, None, "Count steps.")
    history, done, began = History(), 0, time.monotonic()

    def draw() -> Any:
        return picture(history, done, steps, time.monotonic() - began)

    with _shown(draw) as changed:
        while done < steps:
            began = time.monotonic()
            report = cluster.step()
            history.append(report)
            done += 1
            changed()
            yield report


def picture(history: History, done: int, steps: int, seconds: float) -> Any:
    """Draw what `live` shows.

    Args:
        history: of the steps taken.
        done: how many these are.
        steps: how many there will be.
        seconds: that the next one has taken so far.

    Returns:
        A Rich table.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    reports, recent = history.reports, history.reports[-RECENT:]
    head = [f"{done}/{steps}"]
    if reports:
        usual = 1e3 * float(np.median([report.seconds["step"] for report in recent]))
        head += [f"loss {reports[-1].loss:.4g}", f"{usual:.0f} ms a step"]
        fetched = [count for report in recent for count in report.bytes_in if count >= 0]
        head.append(f"{np.mean(fetched or [0]) / 1e3:,.1f} kB fetched by each")
    if done < steps and seconds >= 1:
        head.append(f"waiting for {seconds:.0f} s")
    line, rows, whole = Table.grid(padding=(0, 1)), Table(box=None), Table.grid()
    line.add_row(ProgressBar(total=max(steps, 1), completed=done, width=20), ", ".join(head))
    for name in ("worker", "answers in", "late", "in the last step"):
        rows.add_column(name, justify="left" if name == "in the last step" else "right")
    for worker in range(len(reports[-1].arrivals) if reports else 0):
        times = [r.arrivals[worker] for r in recent if worker < len(r.arrivals)]
        heard = [seconds for seconds in times if np.isfinite(seconds)]
        rows.add_row(
            str(worker),
            f"{1e3 * np.median(heard):.0f} ms" if heard else "-",
            str(history.late[worker]),
            became_of(worker, reports),
        )
    whole.add_row(line)
    whole.add_row(rows)
    return whole


def became_of(worker: int, reports: list[StepReport]) -> str:
    """Say what a worker did in the last of some steps."""
    last = reports[-1]
    if worker in last.restarts:
        return "failed, is started again"
    if worker in last.rejected:
        return f"rejected: {REASONS[last.rejected[worker]]}"
    if last.survivors[worker]:
        return "used"
    if np.isfinite(last.arrivals[worker]):
        return "answered, not needed"
    heard = [
        r.step for r in reports if worker < len(r.arrivals) and np.isfinite(r.arrivals[worker])
    ]
    return f"no answer since step {heard[-1]}" if heard else "no answer yet"


@contextmanager
def _shown(draw: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Show a picture while the block runs; yields what is to be called when it has changed."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            '`live` needs Rich: pip install "jaxcode[ray,train]"', name="rich"
        ) from error
    console = Console(stderr=True)
    if not console.is_jupyter:
        # A thread draws it, so that it also tells of a step that waits.
        with Live(get_renderable=draw, console=console, refresh_per_second=PICTURES_PER_SECOND):
            yield lambda: None
        return
    from IPython.display import display

    handle, drawn = display(draw(), display_id=True), 0.0

    def changed() -> None:
        nonlocal drawn
        if time.monotonic() - drawn >= 1 / PICTURES_PER_SECOND:
            handle.update(draw())
            drawn = time.monotonic()

    try:
        yield changed
    finally:
        handle.update(draw())
