"""Figures: each function draws on the Axes it is given and returns it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxcode import plot

RECORDS = [
    {"step": 1, "loss": 2.0, "missing": [0]},
    {"step": 2, "loss": 1.0, "missing": [2]},
    {"step": 3, "loss": 0.5, "missing": [2]},
]


def test_loss_is_drawn_on_a_logarithmic_axis():
    ax = Figure().add_subplot()
    assert plot.loss(ax, [1, 2, 3], [2.0, 1.0, 0.5]) is ax
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 2.0], [2, 1.0], [3, 0.5]])
    assert ax.get_yscale() == "log"


def test_a_loss_of_zero_has_no_logarithm():
    ax = plot.loss(Figure().add_subplot(), [1, 2], [1.0, 0.0])
    assert ax.get_yscale() == "linear"


def test_survivors_marks_the_missing():
    ax = Figure().add_subplot()
    arrived = np.array([[False, True, True], [True, True, False]])
    assert plot.survivors(ax, [1, 2], arrived) is ax
    np.testing.assert_array_equal(ax.images[0].get_array(), ~arrived.T)
    assert tuple(ax.images[0].get_extent()) == (0.5, 2.5, 2.5, -0.5)
    assert "1 of 3" in ax.get_title()


def test_traffic_draws_a_bar_for_each_scheme():
    ax = Figure().add_subplot()
    assert plot.traffic(ax, {"factors": 1000, "dense": 4000.0}) is ax
    assert [bar.get_width() for bar in ax.patches] == [1.0, 4.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["factors", "dense"]


def test_training_is_three_axes_over_the_same_steps(tmp_path):
    figure = plot.training(RECORDS, 4, {"factors": 1000, "dense": 4000})
    top, middle, bottom = figure.axes
    assert top.get_xlim() == middle.get_xlim() == (0.5, 3.5)
    np.testing.assert_array_equal(middle.images[0].get_array().sum(1), [1, 0, 2, 0])
    assert len(bottom.patches) == 2
    figure.savefig(tmp_path / "figure.png")


def test_a_single_step_can_be_drawn(tmp_path):
    plot.training(RECORDS[:1], 1, {"dense": 8}).savefig(tmp_path / "figure.png")


def report(step, arrivals, survivors, **options):
    """What `arrivals` reads of a StepReport; the step ends at 0.4 s and was decodable at 0.3 s."""
    other = {"rejected": {}, "dropped": [], "restarts": []}
    seconds = {"step": 0.4, "wait": 0.3}
    fields = other | options | {"arrivals": arrivals, "survivors": np.isin(range(4), survivors)}
    return SimpleNamespace(step=step, seconds=seconds, **fields)


def marked(ax):
    """Lines that are marks only."""
    return [line for line in ax.lines if line.get_linestyle() == "None"]


def marks(ax):
    """(worker, step among two, seconds) under each label, from where the marks are."""
    found = {}
    for line in marked(ax):
        found[line.get_label()] = [
            (round(at), int(at > round(at)), float(seconds)) for at, seconds in line.get_xydata()
        ]
    return found


NEVER = math.inf
REPORTS = [
    report(7, [0.1, 0.2, NEVER, 0.35], [0, 1]),
    report(8, [0.1, NEVER, 0.25, NEVER], [0], rejected={2: "checksum"}, restarts=[3],
           dropped=[(2, 7, 1.5)]),
]  # fmt: skip


def test_arrivals_marks_what_became_of_everybody(tmp_path):
    figure = Figure()
    ax = figure.add_subplot()
    assert plot.arrivals(ax, REPORTS) is ax
    assert marks(ax) == {
        "survivor": [(0, 0, 0.1), (1, 0, 0.2), (0, 1, 0.1)],
        "answered, not needed": [(3, 0, 0.35)],
        "late": [(2, 0, 1.8)],  # 1.5 s after 0.3 s, said by the next step
        "no answer": [(1, 1, 0.4)],
        "rejected": [(2, 1, 0.25)],
        "failed, restarted": [(3, 1, 0.4)],
    }
    assert ax.get_ylabel() == "seconds until its report"
    assert ax.get_xlabel() == "worker; in each, steps 7 to 8"
    figure.savefig(tmp_path / "figure.png")


def test_arrivals_tells_the_marks_apart_without_colour():
    ax = plot.arrivals(Figure().add_subplot(), REPORTS)
    shapes = [(x.get_marker(), x.get_markerfacecolor() == "white") for x in marked(ax)]
    assert len(set(shapes)) == len(shapes) == 6


def test_arrivals_draws_a_cluster_that_grew():
    small = report(7, [0.1, 0.2], [0, 1])
    ax = plot.arrivals(Figure().add_subplot(), [small, REPORTS[1]])
    assert sum(map(len, marks(ax).values())) == 2 + 4
    assert ax.get_xlim() == (-0.5, 3.5)


def test_arrivals_needs_a_report():
    with pytest.raises(ValueError, match="`arrivals` needs reports of at least one step; got none"):
        plot.arrivals(Figure().add_subplot(), [])
