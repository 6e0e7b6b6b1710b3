"""Fits of drawn seconds give the parameters back, and say how sure they are."""

import inspect
import math

import numpy as np
import pytest

from jaxcode.fitting import Fit, fit
from jaxcode.stragglers import (
    bimodal,
    failures,
    markov,
    pareto,
    shifted_exponential,
    trace,
)

TRUTH = {
    "shifted_exponential": {"shift": 0.54, "rate": 6.0},
    "pareto": {"alpha": 1.7, "scale": 0.3},
    "bimodal": {"fast": 1.0, "slow": 3.0, "probability": 0.1},
    "markov": {"fast": 1.0, "slow": 3.0, "probability": 0.2, "persistence": 0.8},
}
MODELS = {
    "shifted_exponential": shifted_exponential,
    "pareto": pareto,
    "bimodal": bimodal,
    "markov": markov,
}
every_model = pytest.mark.parametrize("model", TRUTH)


def drawn(model, seed=0, shape=(400, 32), noise=0.0):
    rng = np.random.default_rng(seed)
    return MODELS[model](**TRUTH[model])(rng, shape) + noise * rng.normal(size=shape)


@every_model
def test_parameters_are_recovered_and_the_model_is_found(model):
    found = fit(drawn(model))
    assert isinstance(found, Fit)
    assert found.model == model
    assert found.parameters == pytest.approx(TRUTH[model], rel=0.06)
    assert found.parameters == fit(drawn(model), model=model).parameters
    assert found.warnings == ()
    assert min(found.bic, key=found.bic.get) == model
    for name, (low, high) in found.intervals.items():
        assert low <= found.parameters[name] <= high


@every_model
def test_the_fitted_latency_draws_what_was_recorded(model):
    recorded = drawn(model)
    again = fit(recorded).latency(np.random.default_rng(7), recorded.shape)
    for q in (5, 50, 85, 95):
        expected = np.percentile(recorded, q)
        assert np.percentile(again, q) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("model", ["bimodal", "markov"])
def test_clusters_with_noise_are_still_two(model):
    found = fit(drawn(model, noise=0.15))
    assert found.model == model
    assert found.parameters == pytest.approx(TRUTH[model], rel=0.06)


def test_a_cluster_of_those_who_never_answer():
    for model, slow in (("bimodal", bimodal(1.0, math.inf, 0.1)), ("markov", None)):
        latency = slow or markov(1.0, math.inf, 0.1, 0.9)
        recorded = latency(np.random.default_rng(0), (300, 20))
        recorded += 0.01 * np.random.default_rng(1).normal(size=recorded.shape)
        found = fit(recorded)
        assert found.model == model
        assert found.parameters["slow"] == math.inf
        assert found.parameters["fast"] == pytest.approx(1, rel=0.01)
        assert found.parameters["probability"] == pytest.approx(0.1, abs=0.03)
        assert not any(math.isnan(x) for ends in found.intervals.values() for x in ends)


def test_a_continuous_model_says_whom_it_leaves_out():
    answers = shifted_exponential(0.5, 2.0)
    recorded = failures(50.0, 1.0, step=1.0, latency=answers)(np.random.default_rng(0), (400, 20))
    found = fit(recorded, model="shifted_exponential")
    assert found.parameters == pytest.approx({"shift": 0.5, "rate": 2.0}, rel=0.05)
    assert "never answered" in found.warnings[0]


REPEATS = 200


@every_model
def test_intervals_cover_the_truth_about_as_often_as_they_say(model):
    """95 % of the time; over 200 recordings of 40 steps and 8 workers."""
    covered = {name: 0 for name in TRUTH[model]}
    widths = {name: [] for name in TRUTH[model]}
    for seed in range(REPEATS):
        noise = 0.1 if model in ("bimodal", "markov") else 0.0
        found = fit(drawn(model, seed, (40, 8), noise), model=model)
        for name, (low, high) in found.intervals.items():
            covered[name] += low <= TRUTH[model][name] <= high
            widths[name].append((high - low) / TRUTH[model][name])
    for name, count in covered.items():
        assert count >= 0.85 * REPEATS, name
        assert np.mean(widths[name]) < 1.2, name  # the control: it is not that they are endless
    assert min(covered.values()) < REPEATS  # nor are they surely right


@pytest.mark.parametrize("model", ["bimodal", "markov"])
def test_intervals_cover_where_the_slow_vary_more(model):
    """As they do if each answer is off by so many per cent, whichever cluster it is in."""
    covered = {"fast": 0, "slow": 0}
    for seed in range(REPEATS):
        off = 0.04 * np.random.default_rng([seed, 1]).normal(size=(40, 8))
        found = fit(drawn(model, seed, (40, 8)) * (1 + off), model=model)
        for name in covered:
            low, high = found.intervals[name]
            covered[name] += low <= TRUTH[model][name] <= high
    assert min(covered.values()) >= 0.9 * REPEATS


def test_more_steps_narrow_the_intervals():
    for model in TRUTH:
        name = list(TRUTH[model])[-1]
        few, many = (
            fit(drawn(model, 0, (rows, 16), 0.01), model=model).intervals[name]
            for rows in (25, 2500)
        )
        assert many[1] - many[0] < 0.25 * (few[1] - few[0])


def test_memory_widens_the_interval_of_the_share():
    shape = (400, 16)
    independent = fit(bimodal(1.0, 3.0, 0.2)(np.random.default_rng(0), shape), model="markov")
    bursts = fit(markov(1.0, 3.0, 0.2, 0.95)(np.random.default_rng(0), shape), model="markov")
    one, other = (np.ptp(x.intervals["probability"]) for x in (independent, bursts))
    assert other > 3 * one


def test_the_split_is_the_best_of_all():
    """Against every cut of a small sample, scored from the definition."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        values = np.sort(np.where(rng.random(12) < 0.4, 3.0, 1.0) + 0.3 * rng.normal(size=12))
        values -= min(0.0, values.min())
        scores = []
        for cut in range(1, 12):
            parts = values[:cut], values[cut:]
            width = sum(((part - part.mean()) ** 2).sum() for part in parts) / 12
            chosen = sum(len(part) * math.log(len(part) / 12) for part in parts)
            scores.append((chosen - 6 * math.log(width), parts))
        best = max(scores, key=lambda x: x[0])[1]
        found = fit(rng.permutation(values).reshape(4, 3), model="bimodal").parameters
        assert found["fast"] == pytest.approx(best[0].mean())
        assert found["slow"] == pytest.approx(best[1].mean())
        assert found["probability"] == pytest.approx(len(best[1]) / 12)


def test_markov_counts_who_stays_slow():
    slow = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], bool)
    found = fit(np.where(slow, 5.0, 1.0), model="markov").parameters
    assert found["persistence"] == pytest.approx(3 / 5)  # of (0, 0) (0, 1) (0, 2), (1, 1) (1, 3)
    assert found["probability"] == pytest.approx(7 / 15)


def test_workers_that_are_always_slow_are_named():
    recorded = drawn("shifted_exponential", shape=(60, 12))
    assert fit(recorded).warnings == ()
    recorded[:, [3, 7]] *= 2
    found = fit(recorded)
    assert "workers differ for good: 3, 7 slower" in found.warnings[0]
    assert "warning: workers differ" in str(found)
    recorded[30:, 7] /= 2  # slow in one half alone is a burst
    assert "good: 3 slower" in fit(recorded).warnings[0]


def test_alike_workers_are_not_taken_for_different_ones():
    for seed in range(30):
        for model in TRUTH:
            assert fit(drawn(model, seed, (60, 40)), model=model).warnings == (), (model, seed)


def test_files_and_traces_are_read(tmp_path):
    recorded = drawn("pareto", shape=(30, 4))
    np.savez(tmp_path / "seconds.npz", recorded)
    np.savetxt(tmp_path / "seconds.csv", recorded, delimiter=",", fmt="%.17g")
    for name in ("seconds.npz", "seconds.csv"):
        assert fit(tmp_path / name).parameters == fit(recorded).parameters
    replayed = trace(tmp_path / "seconds.csv")(np.random.default_rng(0), (30, 4))
    np.testing.assert_array_equal(replayed, recorded)


def test_pauses_of_zero_leave_the_pareto_out():
    pauses = bimodal(0.0, 5.0, 0.1)(np.random.default_rng(0), (200, 8))
    found = fit(pauses)
    assert (found.model, found.parameters["fast"]) == ("bimodal", 0.0)
    assert "pareto" not in found.bic


def test_the_summary_is_a_line_a_parameter():
    lines = str(fit(drawn("markov"))).splitlines()
    assert lines[0].startswith("markov(fast=1, slow=3, probability=0.")
    assert len(lines) == 5
    assert all("95 %" in line for line in lines[1:])


@pytest.mark.parametrize("value", [1e-300, 1e-6, 1e99])
def test_extreme_seconds_stay_finite(value):
    recorded = value * drawn("shifted_exponential", shape=(30, 4))
    recorded = np.minimum(recorded, 1e100)
    for model in TRUTH:
        found = fit(recorded, model=model)
        assert not any(math.isnan(x) for x in found.parameters.values())
    assert fit(recorded).model == "shifted_exponential"


@pytest.mark.parametrize(
    ("source", "model", "message"),
    [
        ([1.0, 2.0], None, r"got shape \(2,\)"),
        ([[1.0, math.nan]], None, "1 negative or NaN"),
        ([[1.0, -1.0]], None, "1 negative or NaN"),
        ([], None, "latencies in seconds"),
        ([["late"]], None, "latencies in seconds"),
        ([[1.0]], None, "two answers or more to fit shifted_exponential"),
        ([[math.inf, math.inf]], None, "two answers or more"),
        ([[2.0, 2.0]], None, "seconds that differ to fit shifted_exponential"),
        ([[0.0, 2.0]], "pareto", "seconds above 0 to fit pareto"),
        ([[1.0, 2.0]], "markov", "two rows or more"),
        ([[1.0, 1e101]], None, r"at most 1e\+100"),
        ([[1.0, 2.0]], "normal", "one of shifted_exponential, pareto, .* got 'normal'"),
        ([[1.0, 2.0]], 3, "got 3"),
        ("gone.csv", None, "it does not exist"),
        ("seconds.txt", None, "a .csv or .npz file"),
    ],
)
def test_fit_refuses(source, model, message):
    with pytest.raises(ValueError, match=f"`fit` needs .*{message}"):
        inspect.unwrap(fit)(source, model=model)
