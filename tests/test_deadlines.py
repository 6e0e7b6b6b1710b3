"""Deadlines that follow the recent steps: quantiles by hand, bounds, forgetting."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.cluster.deadlines import AdaptiveDeadline, checked_deadline

few = settings(max_examples=200, deadline=None, derandomize=True, database=None)
HOST = 1e-9
WIDE = {"least": 0.0, "most": 1e9}


def after(steps, **options):
    """The seconds of a deadline that has seen these steps' arrivals."""
    deadline = AdaptiveDeadline(**options)
    for arrivals in steps:
        deadline.observe(arrivals)
    return deadline.seconds


def percentile_90(waits):
    """Between the two order statistics around position 0.9 (n - 1), linearly."""
    waits = sorted(waits)
    position = 0.9 * (len(waits) - 1)
    low = math.floor(position)
    high = min(low + 1, len(waits) - 1)
    return waits[low] + (position - low) * (waits[high] - waits[low])


@pytest.mark.parametrize(
    ("waits", "usual"),
    [
        ([1.0, 2.0, 3.0], 2.8),
        ([3.0, 1.0, 2.0], 2.8),
        ([float(x) for x in range(11)], 9.0),
        ([5.0] * 7, 5.0),
        ([1.0] * 19 + [100.0], 1.0),
        ([1.0] * 8 + [100.0], 1.0 + 0.2 * 99.0),
    ],
)
def test_the_90th_percentile(waits, usual):
    seconds = after([[x] for x in waits], factor=2, **WIDE)
    assert seconds == pytest.approx(2 * usual, rel=HOST)
    assert percentile_90(waits) == pytest.approx(usual, rel=HOST)


@few
@given(
    st.lists(st.lists(st.floats(0, 1e3), min_size=1, max_size=4), min_size=3, max_size=40),
    st.floats(1, 100),
)
def test_a_multiple_of_the_percentile_of_the_slowest(steps, factor):
    usual = percentile_90([max(arrivals) for arrivals in steps])
    seconds = after(steps, factor=factor, **WIDE)
    assert seconds == pytest.approx(factor * usual, rel=HOST)
    by_numpy = factor * np.quantile([max(arrivals) for arrivals in steps], 0.9)
    assert seconds == pytest.approx(by_numpy, rel=HOST)


def test_the_slowest_arrival_counts_in_any_order():
    for arrivals in ([0.1, 4.0, 0.2], [4.0], [0.2, 0.1, 4.0]):
        assert after([arrivals] * 3, factor=1, **WIDE) == 4.0
    assert after([iter([0.1, 4.0])] + [[4.0]] * 2, factor=1, **WIDE) == 4.0
    assert after([np.array([0.1, 4.0])] * 3, factor=1, **WIDE) == 4.0
    assert after([[0.1]] * 3, factor=1, **WIDE) == 0.1


@pytest.mark.parametrize("never", [math.inf, math.nan, -math.inf])
def test_who_never_arrives_teaches_nothing(never):
    steps = [[1.0], [2.0], [3.0]]
    seconds = after(steps, factor=1, **WIDE)
    assert after([[*x, never] for x in steps], factor=1, **WIDE) == seconds
    assert after([[never, *x] for x in steps], factor=1, **WIDE) == seconds
    # A step in which nobody arrives is none to learn from, and pushes none out.
    assert after([*steps, [never], [never, never], []], factor=1, **WIDE) == seconds
    assert after([*steps, [never], [never]], factor=1, window=3, **WIDE) == seconds
    assert after([[1.0], [2.0], [never]], factor=1, least=0, most=77) == 77.0
    assert after([*steps, [9.0]], factor=1, **WIDE) != seconds


@pytest.mark.parametrize("steps", range(6))
def test_the_most_until_three_steps(steps):
    seconds = after([[0.2, 0.4]] * steps, factor=3, least=0.5, most=60)
    assert seconds == pytest.approx(60.0 if steps < 3 else 1.2, rel=HOST)
    assert isinstance(seconds, float)


def test_bounds():
    options = {"factor": 3, "least": 0.5, "most": 60}
    for wait, seconds in [(0.0, 0.5), (0.1, 0.5), (0.2, 0.6), (20.0, 60.0), (1e8, 60.0)]:
        assert after([[wait]] * 5, **options) == pytest.approx(seconds, rel=HOST)
    assert after([[1.0]] * 5, factor=1, least=2, most=2) == 2.0


@pytest.mark.parametrize("window", [1, 2, 3, 4, 10])
def test_steps_before_the_window_are_forgotten(window):
    options = {"factor": 1, "window": window, **WIDE}
    slow, quick = [[100.0]] * 20, [[1.0]]
    assert after(slow + quick * window, **options) == 1.0
    assert after(slow + quick * (window - 1), **options) > 1.0
    assert after(slow + quick, **options) == pytest.approx(
        percentile_90([100.0] * (window - 1) + [1.0]), rel=HOST
    )


@pytest.mark.parametrize("window", [1, 2])
def test_a_short_window_learns_when_it_is_full(window):
    options = {"factor": 1, "least": 0, "most": 60, "window": window}
    assert after([[2.0]] * (window - 1), **options) == 60.0
    assert after([[2.0]] * window, **options) == 2.0


def test_the_window_by_default():
    assert after([[100.0]] * 9 + [[1.0]] * 50, factor=1, **WIDE) == 1.0
    assert after([[100.0]] * 9 + [[1.0]] * 44, factor=1, **WIDE) > 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.9}, "factor to be a finite number from 1 to .* got 0.9"),
        ({"factor": math.nan}, "factor .* got nan"),
        ({"factor": math.inf}, "factor .* got inf"),
        ({"factor": True}, "factor .* got True"),
        ({"factor": 1e7}, "factor .* got 10000000"),
        ({"least": -0.1}, "least to be a finite number from 0 to .* got -0.1"),
        ({"least": math.nan}, "least .* got nan"),
        ({"least": math.inf, "most": math.inf}, "least .* got inf"),
        ({"most": 0.4}, "most to be a finite number from 0.5 to .* got 0.4"),
        ({"least": 61}, "most to be a finite number from 61 to .* got 60.0"),
        ({"most": math.inf}, "most .* got inf"),
        ({"most": math.nan}, "most .* got nan"),
        ({"most": 1e10}, "most .* got 10000000000"),
        ({"least": 0, "most": 0}, "most above 0; got 0"),
        ({"window": 0}, "window to be an integer from 1 to 1000000; got 0"),
        ({"window": -1}, "window .* got -1"),
        ({"window": True}, "window .* got True"),
        ({"window": 10**6 + 1}, "window .* got 1000001"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=f"^`AdaptiveDeadline` needs {message}") as error:
        AdaptiveDeadline(**options)
    assert len(str(error.value).splitlines()) == 1
    assert AdaptiveDeadline(factor=1, least=0, most=0.1, window=10**6).seconds == 0.1


@pytest.mark.parametrize("deadline", [5, 0.1, 1e9, np.float64(2.5)])
def test_a_constant_deadline(deadline):
    seconds = checked_deadline("Cluster", deadline)
    assert type(seconds) is float
    assert seconds == deadline


def test_an_adaptive_deadline_stays_itself():
    deadline = AdaptiveDeadline()
    assert checked_deadline("Cluster", deadline) is deadline


@pytest.mark.parametrize("deadline", [0, 0.0, -0.0, -1, math.nan, math.inf, -math.inf, True, 1e10])
def test_a_deadline_that_is_none(deadline):
    with pytest.raises(ValueError, match="^`Cluster` needs .*deadline") as error:
        checked_deadline("Cluster", deadline)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert repr(deadline) in message
    assert message.endswith("Give seconds, or an AdaptiveDeadline.")
