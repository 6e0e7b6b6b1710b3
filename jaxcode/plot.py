"""Figures: one function each, which draws on an Axes and returns it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#BBBBBB"


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
    from matplotlib.ticker import MaxNLocator

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
    ax.set_xlabel("step")
    ax.set_ylabel("worker")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
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
