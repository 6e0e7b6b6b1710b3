"""Figures: one function each, which draws on an Axes and returns it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxcode.bounds import lower_bound
from jaxcode.code import Code
from jaxcode.load import Method, communication_load, normal_form_numbers
from jaxcode.shapes import ITEMSIZE, Leaf
from jaxcode.simulation import Simulation

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#BBBBBB"

# What became of a worker in a step: the first that holds, with a mark to tell without colour.
_ARRIVALS: dict[str, dict[str, Any]] = {
    "failed, restarted": {"marker": "D", "color": "black", "mfc": "gold", "markersize": 7},
    "rejected": {"marker": "x", "color": "black", "markersize": 7},
    "survivor": {"marker": "o", "color": BLUE, "markersize": 4},
    "answered, not needed": {"marker": "o", "color": "#666666", "mfc": "white", "markersize": 4},
    "late": {"marker": "^", "color": ORANGE, "markersize": 6},
    "no answer": {"marker": "^", "color": ORANGE, "mfc": "white", "markersize": 4},
}


def loss(ax: Any, steps: Sequence[int], losses: Sequence[float]) -> Any:
    """Draw the training loss against the step, on a logarithmic axis.

    Args:
        ax: a Matplotlib Axes.
        steps: step numbers.
        losses: the loss of each.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> loss(Figure().add_subplot(), [1, 2], [2.3, 1.7]).get_ylabel()
        'training loss'
    """
    ax.plot(steps, losses, color=BLUE, linewidth=1)
    if min(losses) > 0:
        ax.set_yscale("log")
    ax.set_ylabel("training loss")
    ax.grid(alpha=0.3)
    return ax


def survivors(ax: Any, steps: Sequence[int], arrived: Bool[np.ndarray, "steps workers"]) -> Any:
    """Mark each worker that was missing, one row a worker and one column a step.

    Args:
        ax: a Matplotlib Axes.
        steps: consecutive step numbers.
        arrived: True for who answered.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> survivors(Figure().add_subplot(), [1, 2], np.array([[True, False]] * 2)).get_ylabel()
        'worker'
    """
    from matplotlib.colors import ListedColormap

    num_workers = arrived.shape[1]
    ax.imshow(
        ~arrived.T,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(["white", ORANGE]),
        vmin=0,
        vmax=1,
        extent=(steps[0] - 0.5, steps[-1] + 0.5, num_workers - 0.5, -0.5),
    )
    missing = (~arrived).sum(1)
    span = f"{missing.min()}" if missing.min() == missing.max() else "some"
    ax.set_title(f"missing at each step: {span} of {num_workers} workers", fontsize="medium")
    ax.set(xlabel="step", ylabel="worker")
    ax.locator_params(integer=True)
    return ax


def traffic(ax: Any, sizes: Mapping[str, float | int]) -> Any:
    """Draw bytes per worker and step as bars, the first in colour.

    Args:
        ax: a Matplotlib Axes.
        sizes: bytes under each scheme's name.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = traffic(Figure().add_subplot(), {"factors": 65_576, "dense": 340_008})
        >>> [text.get_text() for text in ax.texts]
        ['65.6 kB', '340.0 kB']
    """
    names, values = list(sizes), [value / 1000 for value in sizes.values()]
    bars = ax.barh(names, values, color=[BLUE] + [GREY] * (len(names) - 1))
    ax.bar_label(bars, [f"{value:.1f} kB" for value in values], padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xlabel("kB per worker and step")
    return ax


def training(
    records: Sequence[Mapping[str, Any]], workers: int, sizes: Mapping[str, float | int]
) -> Any:
    """Return the picture of a run: loss, survivors and bytes, one above the other.

    Args:
        records: the lines of ``metrics.jsonl``; at least one.
        workers: n.
        sizes: bytes per worker and step under each scheme's name.

    Returns:
        A Matplotlib Figure, to save.

    Example:
        >>> record = {"step": 1, "loss": 2.3, "missing": [0]}
        >>> len(training([record], 2, {"dense": 8}).axes)
        3
    """
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    arrived = np.ones((len(records), workers), bool)
    for row, record in zip(arrived, records, strict=True):
        row[record["missing"]] = False
    figure = Figure(figsize=(8, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, 2, 1.6])
    top.sharex(middle)
    top.tick_params(labelbottom=False)
    loss(top, steps, [record["loss"] for record in records])
    survivors(middle, steps, arrived)
    traffic(bottom, sizes)
    return figure


def load_against_rank(
    ax: Any, code: Code, shape: tuple[int, int], ranks: Sequence[int] | None = None
) -> Any:
    """Draw what a worker sends for one weight against the rank of a partition's gradient.

    Args:
        ax: a Matplotlib Axes.
        code: a block code; its number of fragments divides every scheme's load but Tandon's.
        shape: (p, q) of the weight.
        ranks: where to draw, by default from 1 to full rank.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from jaxcode.codes import fractional_repetition
        >>> ax = load_against_rank(Figure().add_subplot(), fractional_repetition(8, 1), (64, 48))
        >>> [line.get_label() for line in ax.lines]
        ['Tandon et al.', 'Ye-Abbe', 'factors', 'normal form', 'lower bound']
    """
    full = min(shape)
    if ranks is None:
        ranks = np.unique(np.geomspace(1, full, 60).round().astype(int)).tolist()
    methods: dict[str, Method] = {"Ye-Abbe": "ye_abbe"}
    if code.block is not None:
        methods |= {"factors": "factors", "normal form": "normal_form"}
    curves: dict[str, list[float]] = {"Tandon et al.": [float(shape[0] * shape[1])] * len(ranks)}
    for name, method in methods.items():
        curves[name] = [
            communication_load(code, shape, method=method, rows=rank).total for rank in ranks
        ]
    curves["lower bound"] = [lower_bound(code, shape, rank) for rank in ranks]
    # Told apart without colour: by dashes and width, the bound as dots on top.
    styles: dict[str, dict[str, Any]] = {
        "Tandon et al.": {"color": "black", "linestyle": (0, (1, 1)), "linewidth": 1.5},
        "Ye-Abbe": {"color": "black", "linestyle": "--", "linewidth": 1.5},
        "factors": {"color": ORANGE, "linestyle": "-.", "linewidth": 2},
        "normal form": {"color": BLUE, "linestyle": "-", "linewidth": 3},
        "lower bound": {"color": "black", "linestyle": "", "marker": ".", "markersize": 4},
    }
    for name, values in curves.items():
        ax.plot(ranks, values, label=name, **styles[name])
    ax.set(xscale="log", yscale="log", ylabel="numbers per worker and step")
    ax.set_xlabel("rank of a partition's gradient (rows: examples x positions)")
    ax.set_title(f"{shape[0]} x {shape[1]} weight, {code!r}".replace("<Code ", "").rstrip(">"))
    ax.legend(frameon=False)
    ax.grid(alpha=0.3)
    return ax


def load_against_tolerance(
    ax: Any, num_workers: int, shape: tuple[int, int], rank: int | None = None
) -> Any:
    """Draw the load over stragglers tolerated, s, and copies computed, d, as a share of dense.

    Every cell is the least there is for its s and d, with m = d - s fragments: the normal form of
    rank `rank`, or Ye and Abbe's where that is None (full rank).

    Args:
        ax: a Matplotlib Axes.
        num_workers: n, the most copies there can be.
        shape: (p, q) of the weight.
        rank: of one partition's gradient.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = load_against_tolerance(Figure().add_subplot(), 4, (64, 48), rank=8)
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('d, copies of the batch computed', 's, stragglers tolerated')
    """
    p, q = shape
    rank = None if rank is None else min(rank, p, q)
    numbers = normal_form_numbers(Leaf(shape, ITEMSIZE), rank or min(p, q))
    copies, stragglers = np.arange(1, num_workers + 1), np.arange(num_workers)
    fragments = copies - stragglers[:, None]
    share = np.full(fragments.shape, np.nan)
    np.divide(numbers / (p * q), fragments, out=share, where=fragments > 0)
    image = ax.imshow(share, origin="lower", cmap="Greys", vmin=0, vmax=np.nanmax(share) * 1.3)
    if num_workers <= 12:
        for (s, d), value in np.ndenumerate(share):
            if np.isfinite(value):
                colour = "white" if value > 0.75 * np.nanmax(share) else "black"
                ax.text(d, s, f"{value:.2g}", ha="center", va="center", fontsize=8, color=colour)
    step = max(1, num_workers // 12)
    ax.set_xticks(np.arange(0, num_workers, step), copies[::step])
    ax.set_yticks(stragglers[::step])
    ax.set(xlabel="d, copies of the batch computed", ylabel="s, stragglers tolerated")
    title = "full rank (Ye-Abbe)" if rank is None else f"rank {rank} (normal form)"
    ax.set_title(f"load as a share of the {p} x {q} gradient, {title}", fontsize="medium")
    ax.figure.colorbar(image, ax=ax, label="numbers sent / p q")
    return ax


def step_times(ax: Any, simulations: Sequence[Simulation]) -> Any:
    """Draw how long the steps of each design take: one row a design, the fastest on top.

    A thick bar holds the middle half of the steps, a thin line 90 % of them; the dot is the median,
    the diamond the mean, and the cross the slowest percent's beginning.

    Args:
        ax: a Matplotlib Axes.
        simulations: what `simulate` returned. Steps that never end are left out of the bars and
            counted at the right.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from jaxcode.codes import uncoded
        >>> from jaxcode.designs import Design
        >>> from jaxcode.simulation import simulate
        >>> runs = simulate([Design(uncoded(4))], (8, 8), examples=4, seconds_per_example=1,
        ...     bandwidth=256, steps=3)
        >>> ax = step_times(Figure().add_subplot(), runs)
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['uncoded, dense']
    """
    order = sorted(simulations, key=lambda run: run.mean)
    for row, run in enumerate(order):
        ended = run.seconds[np.isfinite(run.seconds)]
        colour = BLUE if run.error == 0 else ORANGE
        if ended.size:
            low, first, middle, third, high, worst = np.percentile(ended, [5, 25, 50, 75, 95, 99])
            ax.plot([low, high], [row, row], color=colour, linewidth=1.5)
            ax.plot([first, third], [row, row], color=colour, linewidth=7, solid_capstyle="butt")
            ax.plot(middle, row, "o", color="white", markeredgecolor="black", markersize=6)
            ax.plot(ended.mean(), row, "D", color="black", markersize=5)
            ax.plot(worst, row, "x", color="black", markersize=6)
        never = 1 - ended.size / run.seconds.size
        notes = [f"never ends: {never:.1%}"] * (never > 0)
        notes += [f"loses {run.error:.1%}"] * (run.error > 0)
        ax.annotate(
            ", ".join(notes), (1, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(order)), [run.design.name for run in order])
    ax.invert_yaxis()
    ax.set_xlabel("seconds a step: middle half, 90 %, median o, mean ◆, 99th percentile ×")
    ax.set_xlim(left=0)
    ax.grid(axis="x", alpha=0.3)
    return ax


def trace_heatmap(ax: Any, seconds: Float[Any, "steps workers"]) -> Any:
    """Draw who straggled when: each message's seconds, as a multiple of its step's median.

    Args:
        ax: a Matplotlib Axes.
        seconds: (steps, n), infinite where a worker never answered: a colour of its own.

    Returns:
        The Axes.

    Example:
        >>> from matplotlib.figure import Figure
        >>> seconds = np.array([[1.0, 2.0], [1.0, np.inf]])
        >>> trace_heatmap(Figure().add_subplot(), seconds).get_ylabel()
        'worker'
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    seconds = np.asarray(seconds, float)
    # Of all workers, the silent ones too: infinite where half of them are.
    middle = np.median(seconds, axis=1, keepdims=True)
    usual = np.where((middle > 0) & np.isfinite(middle), middle, 1.0)
    shown = np.where(np.isfinite(seconds), seconds / usual, np.nan)
    top = float(np.nanmax(shown, initial=2.0))
    colours = colormaps["Greys"].with_extremes(bad=ORANGE)
    image = ax.imshow(
        np.clip(shown, 1.0, None).T, aspect="auto", interpolation="nearest", cmap=colours,
        norm=LogNorm(1.0, top),
        extent=(-0.5, len(seconds) - 0.5, seconds.shape[1] - 0.5, -0.5),
    )  # fmt: skip
    bar = ax.figure.colorbar(image, ax=ax, label="times the median of the step")
    bar.ax.yaxis.set_major_formatter(ScalarFormatter())
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_ticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 30, 100, 1000) if tick <= top])
    never = np.isinf(seconds).mean()
    ax.set_title(
        "seconds of each message" + (f"; colour: never answered ({never:.1%})" if never else ""),
        fontsize="medium",
    )
    ax.set(xlabel="step", ylabel="worker")
    ax.locator_params(integer=True)
    return ax


def arrivals(ax: Any, reports: Sequence[Any]) -> Any:
    """Draw who answered when: a lane a worker, in it the steps from left to right.

    A line shows when each step ended: on it are those who did not answer, and above it, where their
    message was dropped, those who answered too late.

    Args:
        ax: a Matplotlib Axes.
        reports: a `jaxcode.cluster.StepReport` of each step.

    Returns:
        The Axes.

    Raises:
        ValueError: There are no reports.

    Example:
        >>> from types import SimpleNamespace
        >>> from matplotlib.figure import Figure
        >>> report = SimpleNamespace(step=0, arrivals=[0.1, np.inf], survivors=[True, False],
        ...     rejected={}, dropped=[], restarts=[], seconds={"step": 0.2, "wait": 0.1})
        >>> arrivals(Figure().add_subplot(), [report]).get_ylabel()
        'seconds until its report'
    """
    from matplotlib.ticker import LogLocator

    if not reports:
        raise ValueError("`arrivals` needs reports of at least one step; got none. Take a step.")
    dropped = {(i, step): late for r in reports for i, step, late in r.dropped}
    num_workers = max(len(report.arrivals) for report in reports)
    ended = [report.seconds["step"] for report in reports]
    offsets = 0.9 * ((np.arange(len(reports)) + 0.5) / len(reports) - 0.5)
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in _ARRIVALS}
    for offset, report in zip(offsets, reports, strict=True):
        for i in range(len(report.arrivals)):
            name, seconds = _arrival(report, i, dropped.get((i, report.step)))
            points[name].append((i + offset, seconds))
    for i in range(num_workers):
        ax.plot(i + offsets, ended, color=GREY, linewidth=1, label="_" if i else "step ended")
        ax.axvline(i + 0.5, color=GREY, linewidth=0.8)
    for name in filter(points.get, reversed(points)):
        ax.plot(*np.transpose(points[name]), label=name, linestyle="", **_ARRIVALS[name])
    ax.set(xlim=(-0.5, num_workers - 0.5), yscale="log", ylabel="seconds until its report")
    ax.set_xticks(range(0, num_workers, max(1, num_workers // 16)))
    ax.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    ax.yaxis.minorticks_off()
    ax.set_xlabel(f"worker; in each, steps {reports[0].step} to {reports[-1].step}")
    ax.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=9)
    return ax


def _arrival(report: Any, worker: int, late: float | None) -> tuple[str, float]:
    """What became of a worker in a step, and after how many seconds."""
    answered = bool(np.isfinite(report.arrivals[worker]))
    holds = [worker in report.restarts, worker in report.rejected, report.survivors[worker]]
    name = list(_ARRIVALS)[[*holds, answered, late is not None, True].index(True)]
    unheard = report.seconds["step"] if late is None else report.seconds["wait"] + late
    return name, report.arrivals[worker] if answered else unheard
