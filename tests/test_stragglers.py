"""Latency models by their definitions, and `wait` against a loop over arrivals."""

import inspect
import math

import numpy as np
import pytest
from code_cases import CODES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode import stragglers
from jaxcode.codes import fractional_repetition, uncoded
from jaxcode.stragglers import bimodal, markov, pareto, shifted_exponential, trace, wait

RECORDED = [[1.0, 2.0, 3.0], [4.0, np.inf, 6.0]]
MODELS = {
    "shifted_exponential": shifted_exponential(shift=1.0, rate=2.0),
    "pareto": pareto(alpha=1.5, scale=1.0),
    "bimodal": bimodal(fast=1.0, slow=5.0, probability=0.3),
    "markov": markov(fast=1.0, slow=math.inf, probability=0.3, persistence=0.8),
    "trace": trace(RECORDED),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def rng():
    return np.random.default_rng(0)


@every_model
@pytest.mark.parametrize("shape", [(3,), (1, 3), (50, 3), (2, 5, 3), (0, 3)])
def test_models_give_seconds_of_the_shape_and_depend_on_the_seed_alone(model, shape):
    seconds = model(rng(), shape)
    assert seconds.shape == shape
    assert seconds.dtype == np.float64
    assert (seconds >= 1).all()
    np.testing.assert_array_equal(seconds, model(rng(), shape))


def test_shifted_exponential_has_its_moments():
    delay = shifted_exponential(shift=3.0, rate=4.0)(rng(), (100_000, 2)) - 3
    assert delay.min() >= 0
    assert delay.mean() == pytest.approx(1 / 4, rel=0.01)
    assert delay.std() == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.parametrize("alpha", [1.2, 3.0])
def test_pareto_has_its_tail(alpha):
    seconds = pareto(alpha=alpha, scale=2.0)(rng(), (100_000, 2))
    assert seconds.min() >= 2
    for factor in (1.5, 2, 5):
        assert (seconds > 2 * factor).mean() == pytest.approx(factor**-alpha, rel=0.05)


def test_bimodal_is_slow_as_often_as_asked():
    seconds = bimodal(fast=1.0, slow=np.inf, probability=0.2)(rng(), (100_000, 2))
    assert set(np.unique(seconds)) == {1.0, np.inf}
    assert np.isinf(seconds).mean() == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(
    ("probability", "persistence"), [(0.05, 0.1), (0.3, 0.9), (0.75, 2 / 3), (0.5, 0.0)]
)
def test_markov_has_its_stationary_share_and_persistence(probability, persistence):
    latency = markov(fast=1.0, slow=2.0, probability=probability, persistence=persistence)
    slow = latency(rng(), (400, 1000)) == 2
    for step in (0, 1, 399):  # stationary from the first step on
        assert slow[step].mean() == pytest.approx(probability, abs=0.06)
    assert slow.mean() == pytest.approx(probability, rel=0.05)
    assert slow[1:][slow[:-1]].mean() == pytest.approx(persistence, abs=0.01)


def test_markov_without_memory_is_bimodal():
    args = {"fast": 1.0, "slow": 2.0, "probability": 0.3}
    expected = bimodal(**args)(rng(), (20, 40))
    np.testing.assert_array_equal(markov(**args, persistence=0.3)(rng(), (20, 40)), expected)
    assert set(np.unique(markov(1.0, 2.0, 0.0, 0.5)(rng(), (9, 9)))) == {1.0}
    assert set(np.unique(markov(1.0, 2.0, 1.0, 1.0)(rng(), (9, 9)))) == {2.0}


def test_trace_replays_in_order_and_begins_again():
    replay = trace(RECORDED)(rng(), (2, 2, 3)).reshape(4, 3)
    np.testing.assert_array_equal(replay, RECORDED * 2)


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


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("shifted_exponential", (-1, 1), "shift .* at least 0; got -1"),
        ("shifted_exponential", (1, 0), "rate .* got 0"),
        ("shifted_exponential", (1, math.nan), "rate .* got nan"),
        ("pareto", (0, 1), "alpha .* got 0"),
        ("pareto", (1, math.inf), "scale .* got inf"),
        ("bimodal", (1, 2, 1.5), "probability .* from 0 to 1; got 1.5"),
        ("bimodal", (math.inf, 2, 0.5), "fast .* got inf"),
        ("bimodal", (1, -2, 0.5), "slow .* got -2"),
        ("bimodal", (1, 2, True), "probability .* got True"),
        ("markov", (1, 2, 0.75, 0.5), "persistence .* from 0.666667 to 1; got 0.5"),
        ("markov", (1, 2, 0.5, 1.1), "persistence .* got 1.1"),
        ("trace", ([1.0, 2.0],), r"got shape \(2,\)"),
        ("trace", ([[1.0, -2.0]],), "got 1 negative"),
        ("trace", (np.zeros((0, 3)),), r"got shape \(0, 3\)"),
    ],
)
def test_models_refuse(model, args, message):
    with pytest.raises(ValueError, match=f"`{model}` needs .*{message}"):
        inspect.unwrap(getattr(stragglers, model))(*args)


def test_a_trace_has_as_many_workers_as_it_recorded():
    with pytest.raises(ValueError, match=r"`trace` needs a shape of \(..., 3\).*got \(5, 4\)"):
        trace(RECORDED)(rng(), (5, 4))
