"""Figures: each function draws on the Axes it is given and returns it."""

import numpy as np
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
