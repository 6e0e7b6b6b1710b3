"""Latency models by their definitions."""

import inspect
import math

import numpy as np
import pytest

from jaxcode import stragglers
from jaxcode.stragglers import bimodal, failures, markov, pareto, shifted_exponential, trace

RECORDED = [[1.0, 2.0, 3.0], [4.0, np.inf, 6.0]]
MODELS = {
    "shifted_exponential": shifted_exponential(shift=1.0, rate=2.0),
    "pareto": pareto(alpha=1.5, scale=1.0),
    "bimodal": bimodal(fast=1.0, slow=5.0, probability=0.3),
    "markov": markov(fast=1.0, slow=math.inf, probability=0.3, persistence=0.8),
    "failures": failures(20.0, 10.0, step=1.0, latency=1.0),
    "failures of slow ones": failures(9.0, 0.0, step=1.0, latency=shifted_exponential(1.0, 2.0)),
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


def one_worker_failing(generator, between, repair, steps):
    """Which steps of one second a worker answers: events one after another, in continuous time."""
    clock, running = 0.0, generator.random() < between / (between + repair)
    answers = np.ones(steps, bool)
    while clock < steps:
        spell = generator.exponential(between if running else repair) if running or repair else 0.0
        if not running:
            answers[int(clock) : math.ceil(clock + spell)] = False
        clock += spell
        if running and clock < steps:
            answers[int(clock)] = False  # the step that the failure falls in
        running = not running
    return answers


@pytest.mark.parametrize(("between", "repair"), [(10.0, 4.0), (2.0, 0.7), (1.0, 3.0), (5.0, 0.0)])
def test_failures_are_those_of_a_clock_that_runs_on(between, repair):
    generator = rng()
    expected = np.array([one_worker_failing(generator, between, repair, 12) for _ in range(20_000)])
    drawn = failures(between, repair, step=1.0)(rng(), (12, 20_000))
    assert set(np.unique(drawn)) == {0.0, np.inf}
    answers = drawn.T == 0
    share = between / (between + repair) * math.exp(-1 / between)
    for step in (0, 1, 11):  # stationary from the first step on
        assert answers[:, step].mean() == pytest.approx(share, abs=0.015)
        assert expected[:, step].mean() == pytest.approx(share, abs=0.015)
    for lag in (1, 2, 5):  # memory
        both = [(x[:, :-lag] & x[:, lag:]).mean() for x in (answers, expected)]
        assert both[0] == pytest.approx(both[1], abs=0.01)
    steps_in_a_row = [(~(~x[:, 1:] & ~x[:, :-1])).mean() for x in (answers, expected)]
    assert steps_in_a_row[0] == pytest.approx(steps_in_a_row[1], abs=0.01)


def test_a_longer_step_meets_more_failures():  # the control: `step` is used
    shares = [(failures(10.0, 4.0, step=s)(rng(), (400, 400)) == 0).mean() for s in (0.5, 5.0)]
    assert shares[0] - shares[1] > 0.2


@every_model
def test_the_shape_may_be_the_number_of_workers(model):
    np.testing.assert_array_equal(model(rng(), 3), model(rng(), (3,)))
    np.testing.assert_array_equal(model(rng(), [2, np.int64(3)]), model(rng(), (2, 3)))


@every_model
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.random.default_rng(0), ()), r"needs a shape of \(..., workers\); got \(\)"),
        ((np.random.default_rng(0), (2, -3)), "needs the shape to be an integer .* got -3"),
        ((np.random.default_rng(0), 3.0), "needs the shape to be an integer .* got 3.0"),
        ((np.random.default_rng(0), None), "needs the shape to be an integer .* got None"),
        ((0, (2, 3)), "needs a generator to draw from; got 0. Use np.random.default_rng"),
    ],
)
def test_models_refuse_other_shapes_and_generators(model, args, message):
    with pytest.raises(ValueError, match=message):
        model(*args)


def test_failures_refuse_a_latency_that_is_not_seconds():
    for bad in (lambda rng, shape: -np.ones(shape), lambda rng, shape: np.ones(2)):
        with pytest.raises(ValueError, match="`failures` needs latency to draw seconds of shape"):
            failures(1.0, 1.0, step=1.0, latency=bad)(rng(), (4, 3))


def test_trace_replays_in_order_and_begins_again():
    replay = trace(RECORDED)(rng(), (2, 2, 3)).reshape(4, 3)
    np.testing.assert_array_equal(replay, RECORDED * 2)


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
        ("failures", (0, 1), "mean_time_between .* got 0"),
        ("failures", (1, -1), "repair .* got -1"),
        ("failures", (math.inf, 1), "mean_time_between .* got inf"),
        ("failures", (1, 1, 0), "step .* got 0"),
        ("failures", (1, 1, 1, "late"), "latency .* got 'late'"),
        ("trace", ([1.0, 2.0],), r"got shape \(2,\)"),
        ("trace", ([[1.0, -2.0]],), "got 1 negative"),
        ("trace", (np.zeros((0, 3)),), r"got shape \(0, 3\)"),
    ],
)
def test_models_refuse(model, args, message):
    function = inspect.unwrap(getattr(stragglers, model))
    given = dict(zip(inspect.signature(function).parameters, args, strict=False))
    given |= {"step": 1.0} if model == "failures" and "step" not in given else {}
    with pytest.raises(ValueError, match=f"`{model}` needs .*{message}"):
        function(**given)


def test_a_trace_has_as_many_workers_as_it_recorded():
    with pytest.raises(ValueError, match=r"`trace` needs a shape of \(..., 3\).*got \(5, 4\)"):
        trace(RECORDED)(rng(), (5, 4))
