"""Simulated steps against loops over arrivals, closed forms and the papers' figures."""

import builtins
import inspect
import itertools
import math

import numpy as np
import pytest

from jaxcode import simulation
from jaxcode.approximate import bernoulli, expander, repetition_error
from jaxcode.codes import (
    cyclic_mds,
    fractional_repetition,
    general_placement,
    heterogeneous,
    polynomial,
    uncoded,
)
from jaxcode.designs import Design
from jaxcode.rounds import wait
from jaxcode.simulation import Simulation, simulate
from jaxcode.stragglers import bimodal, failures, markov, pareto, shifted_exponential, trace

WEIGHT = {"w": (50, 40)}  # 8,000 bytes
MODELS = {
    "slowdown": shifted_exponential(1.0, 2.0),
    "pause": bimodal(fast=0.0, slow=4.0, probability=0.2),
    "network": pareto(alpha=2.5, scale=1.0),
}
GIVEN = {"examples": 24, "seconds_per_example": 0.25, "bandwidth": 4000.0}
DESIGNS = {
    "uncoded": Design(uncoded(8)),
    "pairs": Design(fractional_repetition(8, 1)),
    "uneven": Design(fractional_repetition(8, 2)),
    "fragments": Design(fractional_repetition(8, 1, num_fragments=2)),
    "factors": Design(fractional_repetition(8, 1, num_fragments=2), method="factors"),
    "speeds": Design(heterogeneous([3, 1, 1, 3, 2, 2, 1, 3], 1), method="factors"),
    "cyclic": Design(cyclic_mds(8, 2)),
    "polynomial": Design(polynomial(8, 1, num_fragments=3)),
    "placed": Design(general_placement([[0, 1], [0, 2], [1, 2], [0, 1, 2]] * 2, 1)),
    "first": Design(uncoded(8), wait_for=6),
    "first of pairs": Design(fractional_repetition(8, 1), wait_for=5),
    "first of cyclic": Design(cyclic_mds(8, 2), wait_for=4),
    "bernoulli": Design(bernoulli(8, 2)),
    "first of expander": Design(expander(8, 3), wait_for=5),
}
every_design = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)


def drawn(models, steps, n, seed=0):
    """What the simulation draws: a stream a model."""
    return {
        name: models[name](np.random.default_rng([seed, index]), (steps, n))
        for index, name in enumerate(("slowdown", "pause", "network"))
        if name in models
    }


def through_master(arrival, each, lots):
    """One step of a queue, message by message."""
    finish, free = np.empty(len(arrival)), 0.0
    for i in sorted(range(len(arrival)), key=lambda i: (arrival[i], lots[i])):
        free = max(free, arrival[i]) + each
        finish[i] = free
    return finish


def product(design):
    """A third of the computing, left to the decoder: the weight is all there is."""
    return 1 / 3 if design.method == "factors" else 0


def finishing(design, draws, steps, size, each):
    """(steps, n) seconds until each message is through, from the definition."""
    code = design.code
    seconds = np.empty((steps, code.num_workers))
    for step, i in itertools.product(range(steps), range(code.num_workers)):
        held = {
            int(p) for p, c in zip(code.partitions[i], code.coefficients[i], strict=True) if c.any()
        }
        computing = 24 * 0.25 * sum(code.shares[p] for p in held) * (1 - product(design))
        computing = computing * draws["slowdown"][step, i] + draws["pause"][step, i]
        seconds[step, i] = computing + size / 4000 * draws["network"][step, i]
    lots = np.random.default_rng([0, 3]).random(seconds.shape, np.float32)
    return np.array([through_master(*x) for x in zip(seconds, [each] * steps, lots, strict=True)])


def step_by_step(design, finish, deadline):
    """Elapsed seconds, error and arrivals of one step, adding arrivals one by one."""
    code, n = design.code, len(finish)

    def enough(there):
        if design.wait_for is not None:
            return there.sum() >= design.wait_for
        if code.block is not None:
            m = code.num_fragments
            return all(there[code.block == p].sum() >= m for p in range(code.num_partitions))
        return there.sum() >= n - code.num_stragglers

    there, elapsed = np.zeros(n, bool), deadline
    for i in np.argsort(finish, kind="stable"):
        if finish[i] > deadline:
            break
        there[i] = True
        if enough(there):
            elapsed = finish[i]
            break
    return elapsed, float(code.decoding_error(there)), there.sum()


@every_design
@pytest.mark.parametrize("master_bandwidth", [math.inf, 9000.0])
@pytest.mark.parametrize("deadline", [None, 7.0])
def test_steps_are_a_loop_over_arrivals(design, master_bandwidth, deadline):
    (result,) = simulate(
        design, WEIGHT, **GIVEN, **MODELS, steps=60, deadline=deadline,
        master_bandwidth=master_bandwidth,
    )  # fmt: skip
    each = result.worker_bytes / master_bandwidth
    finish = finishing(design, drawn(MODELS, 60, 8), 60, result.worker_bytes, each)
    limit = math.inf if deadline is None else deadline
    expected = [step_by_step(design, row, limit) for row in finish]
    elapsed, errors, _ = np.array(expected).T
    decode = product(design) * 24 * 0.25
    np.testing.assert_allclose(result.seconds, elapsed + decode, rtol=1e-12)
    assert result.parts["decode"] == pytest.approx(decode)
    assert result.error == pytest.approx(errors.mean(), abs=1e-12)
    assert result.exact == pytest.approx((errors < 1e-18).mean(), abs=1e-12)
    arrived = (finish <= elapsed[:, None] + 1e-9).sum(1).mean()
    assert result.master_bytes == pytest.approx(arrived * result.worker_bytes)
    assert sum(result.parts.values()) == pytest.approx(result.mean)
    assert result.mean == pytest.approx(elapsed.mean() + decode)
    if deadline is not None:
        assert result.exact < 1 or not errors.any()
        assert (elapsed == deadline).any()  # so that it was tested


@pytest.mark.parametrize("name", ["uncoded", "pairs", "uneven", "fragments", "factors"])
def test_block_codes_end_a_step_when_they_decode(name):
    design = DESIGNS[name]
    (result,) = simulate(design, WEIGHT, **GIVEN, **MODELS, steps=200)
    draws = drawn(MODELS, 200, 8)
    finish = finishing(design, draws, 200, result.worker_bytes, 0.0)
    rounds = wait(finish, until=design.code.is_decodable)
    decoded = result.seconds - product(design) * 24 * 0.25
    np.testing.assert_allclose(decoded, rounds.elapsed, rtol=1e-12)
    if design.code.num_stragglers:  # beyond s too: waiting for n - s takes longer
        number = wait(finish, until=8 - design.code.num_stragglers).elapsed
        assert number.mean() > 1.05 * rounds.elapsed.mean()


def test_the_chunks_do_not_matter(monkeypatch):
    options = {
        **GIVEN, "steps": 53, "deadline": 6.0,
        "slowdown": markov(fast=1.0, slow=4.0, probability=0.3, persistence=0.9),
        "pause": failures(20.0, 10.0, step=1.0),
        "network": trace(np.random.default_rng(1).random((10, 8))),
    }  # fmt: skip
    whole = simulate(list(DESIGNS.values()), WEIGHT, **options)
    monkeypatch.setattr(simulation, "_CHUNK", 8 * 5)
    for one, other in zip(whole, simulate(list(DESIGNS.values()), WEIGHT, **options), strict=True):
        np.testing.assert_array_equal(one.seconds, other.seconds)
        assert (one.error, one.exact) == pytest.approx((other.error, other.exact))
        assert one.parts == pytest.approx(other.parts)
        assert one.master_bytes == pytest.approx(other.master_bytes)


def test_designs_meet_the_same_draws():
    options = {**GIVEN, **MODELS, "steps": 300}
    alone = simulate([DESIGNS["pairs"]], WEIGHT, **options)[0]
    beside = simulate([DESIGNS["uncoded"], DESIGNS["pairs"]], WEIGHT, **options)[1]
    np.testing.assert_array_equal(alone.seconds, beside.seconds)
    first, everybody = simulate([DESIGNS["first"], DESIGNS["uncoded"]], WEIGHT, **options)
    assert (first.seconds <= everybody.seconds).all()  # step for step
    other = simulate(DESIGNS["uncoded"], WEIGHT, **options, seed=1)[0]
    assert not (first.seconds <= other.seconds).all()  # the control


def test_slowness_multiplies_and_pauses_add():
    """A pause costs as much however little is computed; slowness costs in proportion to it."""
    delay = bimodal(fast=0.0, slow=3.0, probability=1.0)
    given = {"examples": 8, "bandwidth": 1e9, "steps": 2}
    for scale in (0.5, 2.0):
        extra = {}
        for name, model in [("pause", delay), ("slowdown", bimodal(1.0, 3.0, 1.0)), ("none", None)]:
            options = {} if model is None else {name: model}
            designs = [DESIGNS["uncoded"], DESIGNS["pairs"]]
            results = simulate(designs, WEIGHT, seconds_per_example=scale, **given, **options)
            extra[name] = [x.mean for x in results]
        plain = extra["none"]
        assert np.subtract(extra["pause"], plain) == pytest.approx([3.0, 3.0])
        assert np.subtract(extra["slowdown"], plain) == pytest.approx([2 * scale, 4 * scale])


def test_the_mean_of_the_slowest_has_its_closed_form():
    slowest = 1 + sum(1 / j for j in range(1, 9)) / 2  # of eight shifted exponentials
    options = {"examples": 8, "seconds_per_example": 1.0, "bandwidth": math.inf, "steps": 40_000}
    (result,) = simulate(DESIGNS["uncoded"], WEIGHT, **options, slowdown=MODELS["slowdown"])
    assert result.mean == pytest.approx(slowest, rel=0.01)
    pairs = 2 * (1 + sum(1 / j for j in range(1, 5)) / 4)  # of four least of two, twice the work
    (result,) = simulate(DESIGNS["pairs"], WEIGHT, **options, slowdown=MODELS["slowdown"])
    assert result.mean == pytest.approx(pairs, rel=0.01)
    assert result.parts["compute"] == 2


# Ye and Abbe's model at n = 8: computing d (t1 + Exp(lambda1)), sending (t2 + Exp(lambda2)) / m.
YE_ABBE = {
    "examples": 8, "seconds_per_example": 1.0, "bandwidth": 8000.0, "steps": 200_000,
    "slowdown": shifted_exponential(1.6, 0.8), "network": shifted_exponential(6.0, 0.1),
}  # fmt: skip


def test_ye_and_abbes_figures():
    codes = {
        (1, 1): uncoded(8),
        (8, 1): cyclic_mds(8, 7),
        (4, 3): polynomial(8, 1, num_fragments=3),
        (2, 2): polynomial(8, 0, num_fragments=2),
        (3, 2): polynomial(8, 1, num_fragments=2),
        (5, 3): polynomial(8, 2, num_fragments=3),
    }
    results = simulate([Design(code) for code in codes.values()], WEIGHT, **YE_ABBE)
    seconds = {key: result.mean for key, result in zip(codes, results, strict=True)}
    expected = {
        (1, 1): 36.10, (8, 1): 24.11, (4, 3): 21.37, (2, 2): 23.11, (3, 2): 21.41, (5, 3): 21.58
    }  # fmt: skip
    assert seconds == pytest.approx(expected, rel=4e-3)
    assert min(seconds, key=seconds.get) == (4, 3)


@pytest.mark.parametrize(
    ("rho", "uncoded_seconds", "best"),
    [(1.0, 36.10, 21.37), (0.3, 13.13, 13.00), (0.1, None, None)],
)
def test_low_rank_takes_the_reason_for_fragments_away(rho, uncoded_seconds, best):
    """The same model with messages of rho times the length: at 0.3 coding gains 1 %, at 0.1 0."""
    designs = [Design(uncoded(8))]
    for s, m in itertools.product(range(3), range(1, 4)):
        if (s, m) != (0, 1):
            designs.append(
                Design(cyclic_mds(8, s) if m == 1 else polynomial(8, s, num_fragments=m))
            )
    options = YE_ABBE | {"bandwidth": 8000 / rho, "steps": 100_000}
    plain, *coded = [result.mean for result in simulate(designs, WEIGHT, **options)]
    if best is None:
        assert plain < min(coded)
    else:
        assert (plain, min(coded)) == pytest.approx((uncoded_seconds, best), rel=0.01)


def test_low_rank_blocks_send_less_as_the_rank_falls():
    """Beside the published model: real factors of (50, 40) with 1 to 5 rows a worker."""
    for examples in (8, 40):
        options = YE_ABBE | {
            "examples": examples, "seconds_per_example": 8 / examples, "steps": 20_000
        }  # fmt: skip
        dense, factors = simulate(
            [Design(uncoded(8)), Design(uncoded(8), method="factors")], WEIGHT, **options
        )
        r = examples // 8
        numbers = r * (90 - r) if r * (90 - r) < 0.9 * r * 90 else r * 90
        assert factors.worker_bytes == 4 * numbers
        assert factors.mean < 0.5 * dense.mean


def test_dropping_the_slowest_errs_by_what_it_drops():
    designs = [Design(uncoded(12), wait_for=k) for k in (12, 9, 1)]
    results = simulate(designs, WEIGHT, **GIVEN, slowdown=MODELS["slowdown"], steps=500)
    assert [x.error for x in results] == pytest.approx([0, 3 / 12, 11 / 12])
    assert [x.exact for x in results] == [1, 0, 0]
    design = Design(fractional_repetition(12, 2), wait_for=8)
    (result,) = simulate(design, WEIGHT, **GIVEN, slowdown=MODELS["slowdown"], steps=20_000)
    assert result.error == pytest.approx(repetition_error(12, 3, 4), rel=0.1)


def test_workers_that_are_gone_are_waited_for_until_the_deadline():
    gone = failures(50.0, 10.0, step=1.0)
    designs = [DESIGNS[name] for name in ("uncoded", "pairs", "cyclic", "first", "bernoulli")]
    options = {**GIVEN, "steps": 2000, "slowdown": MODELS["slowdown"], "pause": gone}
    hung = simulate(designs, WEIGHT, **options)
    for result in hung:
        assert not np.isnan(result.seconds).any()
        assert not any(
            math.isnan(x) for x in (*result.parts.values(), *result.percentiles.values())
        )
        assert result.mean == math.inf
        assert 0 < result.error < 1
        assert "inf s a step" in str(result)
    bounded = simulate(designs, WEIGHT, **options, deadline=20.0)
    for before, after in zip(hung, bounded, strict=True):
        assert after.mean < 20
        assert after.error < before.error  # a step that ends errs by less than 1
        np.testing.assert_array_equal(np.minimum(before.seconds, 20), after.seconds)
    assert bounded[1].exact > bounded[0].exact + 0.3
    everybody = failures(1e-3, 1e3, step=1.0)
    (lost,) = simulate(designs[1], WEIGHT, **GIVEN, pause=everybody, steps=20, deadline=1.0)
    assert (lost.mean, lost.error, lost.exact, lost.master_bytes) == (1.0, 1.0, 0.0, 0.0)


def test_nothing_to_compute_on_a_worker_that_is_gone_still_takes_for_ever():
    gone = bimodal(fast=1.0, slow=math.inf, probability=0.5)
    options = {"examples": 8, "seconds_per_example": 0, "bandwidth": math.inf, "steps": 50}
    for name in ("slowdown", "network"):
        (result,) = simulate(DESIGNS["pairs"], WEIGHT, **options, **{name: gone})
        assert set(np.unique(result.seconds)) == {0.0, math.inf}


def test_per_worker_speeds_suit_a_code_made_for_them():
    speeds = np.array([3.0, 1, 1, 3, 2, 2, 1, 3])
    designs = [Design(uncoded(8)), Design(heterogeneous(speeds, 0))]
    options = {"examples": 80, "seconds_per_example": 1 / speeds, "bandwidth": math.inf, "steps": 1}
    equal, suited = simulate(designs, WEIGHT, **options)
    assert equal.mean == pytest.approx(80 / 8)
    assert suited.mean == pytest.approx(80 / 16)
    slow_link = simulate(designs, WEIGHT, **options | {"bandwidth": np.full(8, 100.0)})
    assert slow_link[0].mean == pytest.approx(10 + 80)


def test_decoding_takes_what_is_read():
    options = {"examples": 8, "seconds_per_example": 0, "bandwidth": math.inf, "steps": 3}
    for design, read in [(DESIGNS["pairs"], 4 * 8000), (DESIGNS["fragments"], 2 * 2 * 4000)]:
        (result,) = simulate(design, WEIGHT, **options, decode_rate=1000.0)
        assert result.mean == result.parts["decode"] == read / 1000


def test_progress_is_told(monkeypatch, capsys):
    told = []
    designs = [DESIGNS["uncoded"], DESIGNS["pairs"]]
    monkeypatch.setattr(simulation, "_CHUNK", 80)
    simulate(designs, WEIGHT, **GIVEN, steps=25, progress=lambda *done: told.append(done))
    assert told == [(10, 50), (20, 50), (25, 50), (35, 50), (45, 50), (50, 50)]
    pytest.importorskip("rich")
    simulate(designs, WEIGHT, **GIVEN, steps=25, progress=True)
    assert "100%" in capsys.readouterr().out


def test_a_bar_without_rich_says_what_to_install(monkeypatch):
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ModuleNotFoundError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "jaxcode\[train\]"'):
        simulate(DESIGNS["pairs"], WEIGHT, **GIVEN, steps=1, progress=True)


def test_ten_thousand_workers_and_a_thousand_steps_fit():
    n = 10_000
    designs = [Design(fractional_repetition(n, 2, num_fragments=2), method="factors")]
    options = {"examples": 10 * n, "seconds_per_example": 0.1, "bandwidth": 1e6}
    (result,) = simulate(designs, WEIGHT, **options, **MODELS, deadline=9.0, steps=1000)
    assert result.seconds.shape == (1000,)
    assert 0 < result.error < 0.1


def test_one_worker_and_one_step():
    (result,) = simulate(Design(uncoded(1)), WEIGHT, **GIVEN, steps=1)
    assert result.seconds.tolist() == [24 * 0.25 + 2]
    assert result.parts == {
        "compute": 6.0, "straggling": 0.0, "transfer": 2.0, "queue": 0.0, "decode": 0.0
    }  # fmt: skip
    assert isinstance(result, Simulation)
    assert "uncoded, dense: 8 s a step" in str(result)


@pytest.mark.parametrize(
    ("designs", "options", "message"),
    [
        ([], {}, "one number of workers; got no design at all"),
        ([Design(uncoded(8)), Design(uncoded(9))], {}, r"got \[8, 9\]"),
        ([uncoded(8)], {}, "a list of designs; got"),
        ("uncoded", {}, "a list of designs; got 'uncoded'"),
        (None, {"steps": 0}, "steps .* got 0"),
        (None, {"steps": 10**12}, "steps to be an integer from 1 to 33554432; got 10"),
        (None, {"seed": -1}, "seed .* got -1"),
        (None, {"bandwidth": [1.0, 2.0]}, "bandwidth .* each of 8 workers; got 2"),
        (None, {"seconds_per_example": np.ones(9)}, "each of 8 workers; got 9"),
        (None, {"pause": 3.0}, "pause to be a latency model"),
        (None, {"pause": trace(np.ones((4, 3)))}, "a shape of"),
        (None, {"slowdown": lambda rng, shape: -np.ones(shape)}, "slowdown to draw seconds"),
        (None, {"params": {}}, "parameters; got none"),
        (None, {"params": {"w": "shape"}}, "got str at w"),
        (None, {"progress": 3}, "progress to be True or a function"),
        (None, {"progress": ""}, "progress to be True or a function"),
        (None, {"product_share": 1.0}, "product_share below 1; got 1"),
    ],
)
def test_simulate_refuses(designs, options, message):
    given = {"params": WEIGHT, "designs": DESIGNS["pairs"] if designs is None else designs, **GIVEN}
    with pytest.raises(ValueError, match=f"`(simulate|trace)` needs .*{message}"):
        inspect.unwrap(simulate)(**given | options)
