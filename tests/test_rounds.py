"""`wait` against a loop over arrivals."""

import inspect
import math

import numpy as np
import pytest
from code_cases import CODES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.codes import fractional_repetition, uncoded
from jaxcode.rounds import wait


def rng():
    return np.random.default_rng(0)


def wait_by_definition(latency, until, deadline):
    """One round: add arrivals one by one until accepted."""
    limit = math.inf if deadline is None else deadline
    order = [i for i in np.argsort(latency, kind="stable") if latency[i] < math.inf]
    survivors = np.zeros(len(latency), bool)
    for i in [i for i in order if latency[i] <= limit]:
        survivors[i] = True
        if until(survivors):
            return survivors, latency[i]
    last = max(latency[survivors])
    return survivors, last if deadline is None or survivors.all() else deadline


CONDITIONS = {
    "decodable": CODES["uneven"].is_decodable,
    "fragments": fractional_repetition(8, 2, num_fragments=2).is_decodable,
    "everybody": uncoded(8).is_decodable,
    "five": lambda survivors: survivors.sum(-1) >= 5,
    "at once": lambda survivors: np.ones(survivors.shape[:-1], bool),
    "never": lambda survivors: np.zeros(survivors.shape[:-1], bool),
}


@pytest.mark.parametrize("until", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("deadline", [None, 0.7, 5.0])
def test_wait_is_a_loop_over_arrivals(until, deadline):
    latency = rng().integers(0, 40, size=(300, 8)) / 16.0  # with many ties
    latency[rng().random((300, 8)) < 0.1] = np.inf
    latency[:, 0] = np.minimum(latency[:, 0], 0.5)  # somebody always arrives
    rounds = wait(latency, until=until, deadline=deadline)
    np.testing.assert_array_equal(rounds.latency, latency)
    for row, survivors, elapsed in zip(latency, rounds.survivors, rounds.elapsed, strict=True):
        expected = wait_by_definition(row, until, deadline)
        np.testing.assert_array_equal(survivors, expected[0])
        assert elapsed == expected[1]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.floats(0, 10) | st.just(math.inf), min_size=1, max_size=12),
    st.integers(1, 12),
    st.none() | st.floats(0.1, 12),
)
def test_wait_for_a_number_of_arrivals(latency, needed, deadline):
    needed = min(needed, len(latency))
    limit = math.inf if deadline is None else deadline
    if not any(t <= limit and t < math.inf for t in latency):
        with pytest.raises(TimeoutError):
            wait(latency, until=needed, deadline=deadline)
        return
    survivors, _, elapsed = wait(latency, until=needed, deadline=deadline)
    expected = wait_by_definition(np.array(latency), lambda x: x.sum() >= needed, deadline)
    np.testing.assert_array_equal(survivors, expected[0])
    assert (elapsed.shape, elapsed) == ((), expected[1])


def test_leading_axes_are_rounds():
    latency = rng().exponential(size=(4, 5, 8))
    rounds = wait(latency, until=CODES["uneven"].is_decodable)
    assert [x.shape for x in rounds] == [(4, 5, 8), (4, 5, 8), (4, 5)]
    alone = wait(latency[2, 3], until=CODES["uneven"].is_decodable)
    np.testing.assert_array_equal(rounds.survivors[2, 3], alone.survivors)
    assert rounds.elapsed[2, 3] == alone.elapsed
    assert wait(latency[:0], until=3).elapsed.shape == (0, 5)


def test_the_condition_is_asked_a_logarithmic_number_of_times():
    asked = []

    def until(survivors):
        asked.append(survivors.shape)
        return survivors.sum(-1) >= 700

    wait(rng().random((3, 1000)), until=until)
    assert len(asked) <= 2 + math.log2(1000)
    assert set(asked) == {(3, 1000)}


def test_a_code_that_tolerates_stragglers_does_not_wait_for_them():
    code = fractional_repetition(8, 1)
    latency = np.ones((8, 8)) + 99 * np.eye(8)  # each worker straggles once
    rounds = wait(latency, until=code.is_decodable)
    assert (rounds.elapsed == 1).all()
    assert code.is_decodable(rounds.survivors).all()
    assert (wait(latency, until=uncoded(8).is_decodable).elapsed == 100).all()  # the control


@pytest.mark.parametrize(
    ("latency", "deadline", "message"),
    [
        ([9.0, 7.0], 5.0, "none by the deadline of 5 s in the round, where .* after 7 s"),
        ([np.inf, np.inf], None, "none at all in the round, where .* after inf s"),
        ([[1.0, 9.0], [7.0, 8.0]], 2.0, "in round 1, where .* after 7 s"),
        (np.full((2, 2, 2), 3.0), 2.0, r"in round \(0, 0\), where"),
    ],
)
def test_nobody_in_time_names_the_round(latency, deadline, message):
    with pytest.raises(TimeoutError, match=message):
        wait(latency, until=1, deadline=deadline)


@pytest.mark.parametrize(
    ("latency", "kwargs", "message"),
    [
        ([1.0, np.nan], {"until": 1}, "got 1 negative or NaN"),
        ([[1.0, -1.0]], {"until": 1}, "got 1 negative or NaN"),
        (np.array(1.0), {"until": 1}, r"shape \(..., workers\)"),
        (np.ones((3, 0)), {"until": 1}, r"of shape \(3, 0\)"),
        (np.ones(3) * 1j, {"until": 1}, "complex128"),
        ([True, False], {"until": 1}, "got bool"),
        ([[1.0], [1.0, 2.0]], {"until": 1}, "got object"),
        ([1.0, 2.0], {"until": 0}, "until .* from 1 to 2; got 0"),
        ([1.0, 2.0], {"until": 3}, "until .* from 1 to 2; got 3"),
        ([1.0, 2.0], {"until": True}, "until .* got True"),
        ([1.0, 2.0], {"until": None}, "until .* got None"),
        ([1.0, 2.0], {"until": lambda x: x}, r"return bool of shape \(\)"),
        ([1.0, 2.0], {"until": lambda x: x.sum(-1)}, "got int64"),
        ([1.0, 2.0], {"until": 1, "deadline": 0}, "deadline .* got 0"),
        ([1.0, 2.0], {"until": 1, "deadline": np.inf}, "deadline .* got inf"),
        ([1.0, 2.0], {"until": 1, "deadline": "5"}, "deadline .* got '5'"),
    ],
)
def test_wait_refuses(latency, kwargs, message):
    with pytest.raises(ValueError, match=f"`wait` needs .*{message}"):
        inspect.unwrap(wait)(latency, **kwargs)
