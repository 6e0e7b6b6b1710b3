"""Plans against simulated steps, the published figures, and what an honest one has to say."""

import inspect
import math

import numpy as np
import pytest

from jaxcode.designs import conditions
from jaxcode.expectation import Need, StepModel, Task
from jaxcode.planning import Plan, plan
from jaxcode.simulation import simulate
from jaxcode.stragglers import bimodal, failures, markov, pareto, shifted_exponential

VECTOR = {"v": (1000,)}  # 4,000 bytes, and no factors: the study's communication is of any rank
WEIGHT = {"w": (500, 500), "b": (500,)}
FOUR = {"examples": 16, "num_workers": 16, "seconds_per_example": 1.0}
EXACT = FOUR | {"approximate": False}


def pauses(rng, shape):
    """5 % of the workers pause for Exp(mean 5), whatever they compute."""
    return np.where(rng.random(shape) < 0.05, rng.exponential(5.0, shape), 0.0)


STRAGGLING = {
    "mild": {"slowdown": bimodal(1.0, 1.3, 0.02)},
    "moderate": {"slowdown": bimodal(1.0, 3.0, 0.05)},
    "pauses": {"pause": pauses},
    "heavy": {"slowdown": pareto(1.2, 1.0)},
    "network": {"network": shifted_exponential(1.0, 1.0)},
}


# Gains of the best exact code over none, n = 16, by a published-style study that waits for n - s
# workers. c is the seconds of sending what is sent; rank a tenth of full makes it a tenth. In the
# study low rank costs the decoder nothing, product_share=0; and a vector has no product to count.
@pytest.mark.parametrize(
    ("straggling", "c", "least", "most"),
    [
        ("mild", 1, 1.0, 1.0),
        ("mild", 0.1, 1.0, 1.0),
        ("mild", 10, 1.6, 1.75),
        ("moderate", 1, 1.0, 1.05),
        ("moderate", 0.1, 1.0, 1.05),
        ("moderate", 10, 1.2, 1.6),
        ("pauses", 1, 1.5, 1.8),
        ("pauses", 0.1, 1.7, 2.1),
        ("pauses", 10, 1.8, 2.0),
        ("heavy", 1, 3.0, math.inf),
        ("network", 0.1, 1.0, 1.0),
        ("network", 1, 1.2, 1.4),
        ("network", 10, 3.5, 3.8),
    ],
)
def test_when_redundancy_pays(straggling, c, least, most):
    options = EXACT | {"bandwidth": 4000 / c, "product_share": 0} | STRAGGLING[straggling]
    found = plan(VECTOR, **options)
    fastest = found.rows[0]
    assert least - 0.005 <= fastest.speedup <= most + 0.005
    if most <= 1.05 and least == 1.0 and fastest.speedup < 1.02:
        assert found.verdict == "uncoded"
        assert "redundancy does not pay" in "\n".join(found.reasons) or fastest.copies == 1
    if least > 1.02:
        assert found.verdict == "redundancy"
        assert "redundancy pays" in "\n".join(found.reasons)


def test_the_mild_case_wants_fragments_and_no_spare_worker():
    best = plan(VECTOR, **EXACT, bandwidth=400, **STRAGGLING["mild"]).best.design.code
    assert (best.num_fragments, best.num_stragglers) == (3, 0)


def test_the_same_straggling_is_additive_or_multiplicative():
    """A pause of 3 s, and a slowdown of 3 s for one partition's work: only the pause pays."""
    options = EXACT | {"bandwidth": 40_000}
    slow = plan(VECTOR, **options, slowdown=bimodal(1.0, 4.0, 0.3))
    pausing = plan(VECTOR, **options, pause=bimodal(0.0, 3.0, 0.3))
    assert slow.uncoded.seconds == pytest.approx(pausing.uncoded.seconds, rel=0.02)
    assert pausing.best.seconds < 0.95 * slow.best.seconds
    assert (slow.verdict, pausing.verdict) == ("uncoded", "redundancy")


def test_ye_and_abbes_figures():
    """Waiting for n - s as they do; blocks of as much computing and as many bytes need less."""
    models = {"slowdown": shifted_exponential(1.6, 0.8), "network": shifted_exponential(6.0, 0.1)}
    options = {"examples": 8, "seconds_per_example": 1.0, "bandwidth": 4000.0} | models
    none = {
        "positions": 1, "master_bandwidth": math.inf, "decode_rate": math.inf, "pause": None,
        "deadline": None, "product_share": 0,
    }  # fmt: skip
    model = StepModel("plan", conditions("plan", VECTOR, **options, **none), 8, 0)
    seconds = {}
    for d in range(1, 9):
        for m in range(1, d + 1):
            task = Task(d / 8, 4000 / m, 8, Need(((8, 1),), 8 - d + m))
            seconds[d, m] = model.expect(task, whole=True).seconds
    published = {
        (1, 1): 36.10, (8, 1): 24.11, (4, 3): 21.37, (2, 2): 23.11, (3, 2): 21.41, (5, 3): 21.58
    }  # fmt: skip
    assert {key: seconds[key] for key in published} == pytest.approx(published, rel=0.005)
    assert min(seconds, key=seconds.get) == (4, 3)
    assert min((key for key in seconds if key[1] == 1), key=seconds.get) == (8, 1)
    found = plan(VECTOR, num_workers=8, approximate=False, **options)
    assert found.uncoded.seconds == pytest.approx(36.10, rel=0.005)
    assert found.best.seconds < 21.37
    sums = [row for row in found.rows if row.design.code.block is None]
    assert sums[0].seconds == pytest.approx(21.41, rel=0.005)
    for rho, gain in [(0.3, 1.03), (0.1, 1.0)]:  # at low rank the best code is almost no code
        options["bandwidth"] = 4000 / rho
        low = plan(VECTOR, num_workers=8, approximate=False, **options)
        sums = [row for row in low.rows if row.design.code.block is None or row.copies == 1]
        assert sums[0].speedup < gain + 1e-9


# Not the heavy tail: its sample mean settles too slowly to compare.
@pytest.mark.parametrize("name", sorted(STRAGGLING.keys() - {"heavy"}))
@pytest.mark.parametrize("options", [{}, {"deadline": 30.0}, {"master_bandwidth": 3e5}], ids=str)
def test_rows_are_what_the_simulation_takes(name, options):
    given = {
        "examples": 64, "seconds_per_example": 0.25, "bandwidth": 2e5, "positions": 2,
        "decode_rate": 1e7, **STRAGGLING[name], **options,
    }  # fmt: skip
    found = plan(WEIGHT, num_workers=16, **given)
    results = simulate([row.design for row in found.rows], WEIGHT, **given, steps=6000, seed=3)
    for row, result in zip(found.rows, results, strict=True):
        gained = result.exact if row.exact else 1 - result.error
        assert row.seconds == pytest.approx(result.mean / gained, rel=0.04)
        assert row.worker_bytes == result.worker_bytes
        assert row.error == pytest.approx(0 if row.exact else result.error, abs=0.01)
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    assert max(row.seconds for row in found.rows) > 1.1 * found.best.seconds  # the control


def test_low_rank_without_redundancy_is_said():
    options = FOUR | {"bandwidth": 1e5, "approximate": False}
    found = plan(WEIGHT, **options, **STRAGGLING["mild"])
    assert found.verdict == "low rank without redundancy"
    assert found.best.forms == {"w": "factors", "b": "dense"}
    assert found.low_rank.worker_bytes == 4 * (1000 + 500)
    assert found.best.design.method == "factors"
    assert any("low rank: 6000 bytes a worker in place of 1.002e+06" in x for x in found.reasons)
    full = plan(WEIGHT, **options, positions=500, **STRAGGLING["mild"])  # the control: full rank
    assert full.low_rank == full.uncoded
    assert any("no weight is shorter in factors" in x for x in full.reasons)
    assert full.verdict == "redundancy"  # for its fragments
    assert full.best.design.code.num_fragments > 1


def test_where_computing_dominates_dense_gradients_beat_factors():
    """Factors save 0.97 s of sending at 1e6 bytes/s; the products take 16/3 s and save 1/3 s."""
    options = EXACT | {"bandwidth": 1e6} | STRAGGLING["pauses"]
    counted, free = plan(WEIGHT, **options), plan(WEIGHT, **options, product_share=0)
    assert free.best.design.method == "factors"
    assert counted.best.design.method == "dense"
    assert counted.low_rank.decode == pytest.approx(16 / 3 * 500 / 501)
    more = counted.low_rank.seconds - free.low_rank.seconds
    assert more == pytest.approx((16 / 3 - 1 / 3) * 500 / 501, rel=0.01)
    said = [x for x in counted.reasons if "changes the choice" in x]
    assert len(said) == 1
    assert free.best.design.name in said[0]
    assert not any("multiplying" in x for x in free.reasons)
    slow_link = plan(WEIGHT, **options | {"bandwidth": 1e4})  # the control: sending dominates
    assert slow_link.best.design.method == "factors"


def test_dropping_the_slowest_is_said_to_lose_data():
    found = plan(VECTOR, **FOUR, bandwidth=1e6, **STRAGGLING["moderate"])
    assert found.verdict == "drop the slowest, approximately"
    kept = found.best.design.wait_for
    assert found.best.error == pytest.approx(1 - kept / 16)
    assert not found.best.exact
    assert found.best_exact.exact
    assert any(f"loses {1 - kept / 16:.1%} of the data" in x for x in found.reasons)
    kept_all = plan(VECTOR, **FOUR, bandwidth=1e6)  # the control: nobody is slow
    assert kept_all.verdict == "uncoded"


@pytest.mark.parametrize("s", [0, 1, 3, 8, 15])
def test_designs_tolerate_what_is_asked(s):
    options = FOUR | {"bandwidth": 1e6, "num_stragglers": s} | STRAGGLING["pauses"]
    found = plan(WEIGHT, **options)
    exact = [row for row in found.rows if row.exact]
    assert all(row.design.code.num_stragglers >= s for row in exact)
    dropping = [row for row in found.rows if not row.exact]
    assert all(row.design.wait_for <= 16 - s for row in dropping)
    assert bool(dropping) == (s <= 8)  # more than half are never dropped
    for row in dropping:  # which errs by those it may go on without, at least
        assert row.error >= s / 16 - 1e-9
    if s:
        unasked = plan(WEIGHT, **options | {"num_stragglers": None}).rows
        assert any(row.exact and row.design.code.num_stragglers < s for row in unasked)
    assert all(row.exact for row in plan(WEIGHT, **options, approximate=False).rows)
    assert found.uncoded.design.code.num_stragglers == 0
    assert found.best in found.rows
    assert found.best_exact in exact


def test_designs_are_complete_as_often_as_asked():
    options = FOUR | {"bandwidth": 1e6, "pause": failures(2000.0, 100.0, step=10.0)}
    for probability in (0.5, 0.99, 0.99999):
        for approximate in (False, True):
            found = plan(WEIGHT, **options, probability=probability, approximate=approximate)
            assert all(row.probability >= probability for row in found.rows)
            assert math.isfinite(found.best.seconds)
            assert found.best_exact.design.code.num_stragglers >= (3 if probability > 0.999 else 0)
            assert approximate == any(not row.exact for row in found.rows)
    bounded = plan(WEIGHT, **options, probability=0.99, deadline=8.0, approximate=False)
    assert bounded.best.probability >= 0.99
    message = "`plan` needs a design whose steps are complete with probability 0.99; the best has 0"
    with pytest.raises(ValueError, match=message):
        plan(WEIGHT, **options, probability=0.99, deadline=0.5)


def test_where_only_approximate_designs_are_complete_in_time():
    """30 % pause beyond the deadline, in which pairs fit at most: 0.91^8 of the steps are exact."""
    options = FOUR | {"bandwidth": 1e9, "deadline": 1.5, "probability": 0.9}
    options["pause"] = bimodal(0.0, 9.0, 0.3)
    found = plan(WEIGHT, **options)
    assert found.best_exact is None
    assert found.best.design.wait_for <= 9  # 11.2 of 16 arrive on average, and 9 nine times in ten
    enough = sum(math.comb(16, j) * 0.7**j * 0.3 ** (16 - j) for j in range(9, 17))
    assert enough > 0.9 > enough - math.comb(16, 9) * 0.7**9 * 0.3**7
    assert not any(row.exact for row in found.rows)
    assert isinstance(str(found), str)
    with pytest.raises(ValueError, match="complete with probability 0.9; the best has 0.4"):
        plan(WEIGHT, **options, approximate=False)


def numbers(found):
    yield from (found.break_even_redundancy, *found.break_even_bandwidth)
    for row in (*found.rows, found.uncoded, found.low_rank, found.best, found.best_exact):
        yield from (row.seconds, row.speedup, row.probability, row.error, row.copies)


@pytest.mark.parametrize(
    "models",
    [
        {"pause": failures(2000.0, 100.0, step=10.0)},
        {"pause": bimodal(0.0, math.inf, 1.0)},
        {"slowdown": bimodal(1.0, math.inf, 0.2), "network": bimodal(1.0, math.inf, 0.2)},
        {"slowdown": pareto(0.5, 1.0)},
        {"slowdown": bimodal(0.0, 0.0, 0.0)},
    ],
)
@pytest.mark.parametrize("deadline", [None, 3.0])
def test_infinite_expectations_come_last_and_are_never_nan(models, deadline):
    found = plan(WEIGHT, **FOUR, bandwidth=1e6, **models, deadline=deadline)
    assert not any(math.isnan(x) for x in numbers(found))
    seconds = [row.seconds for row in found.rows]
    assert seconds == sorted(seconds)
    assert isinstance(str(found), str)


def test_what_never_ends_is_ranked_by_how_often():
    found = plan(WEIGHT, **EXACT, bandwidth=1e6, pause=failures(2000.0, 100.0, step=10.0))
    assert found.uncoded.seconds == math.inf
    assert found.uncoded.probability < 0.6
    endless = [row.probability for row in found.rows if math.isinf(row.seconds)]
    assert endless == sorted(endless, reverse=True)
    assert found.best.probability > 0.999


def test_dropping_the_slowest_may_wait_for_ever_too():
    """The first 7 of 8 never come where two are gone: no answer to failures without a deadline."""
    gone = {"pause": failures(100.0, 10.0, step=1.0)}
    options = {"examples": 8, "seconds_per_example": 0.1, "bandwidth": 1e6}
    found = plan(WEIGHT, num_workers=8, **options, **gone)
    dropping = [row for row in found.rows if not row.exact]
    simulated = simulate([row.design for row in dropping], WEIGHT, steps=2000, **options, **gone)
    for row, steps in zip(dropping, simulated, strict=True):
        assert row.seconds == math.inf
        assert row.probability == pytest.approx(np.isfinite(steps.seconds).mean(), abs=0.03)
    assert max(steps.mean for steps in simulated) == math.inf  # of 2,000, not all meet one
    assert found.best.probability == max(row.probability for row in found.rows)
    assert "set a deadline" in str(found)
    # The control: with a deadline every step ends, and dropping the slowest is an answer again.
    ending = plan(WEIGHT, num_workers=8, deadline=5.0, **options, **gone)
    assert math.isfinite(min(row.seconds for row in ending.rows if not row.exact))


def test_a_tail_too_heavy_for_a_mean_is_found():
    """At alpha 0.8 the largest of any number has no mean, the second largest has one."""
    found = plan(VECTOR, **EXACT, bandwidth=1e6, slowdown=pareto(0.8, 1.0))
    assert found.uncoded.seconds == math.inf
    assert math.isfinite(found.best.seconds)
    assert found.verdict == "redundancy"
    lighter = plan(VECTOR, **EXACT, bandwidth=1e6, slowdown=pareto(2.0, 1.0))
    assert math.isfinite(lighter.uncoded.seconds)  # the control


def test_plans_depend_on_the_seed_and_little_on_it():
    options = FOUR | {"bandwidth": 1e6, "pause": markov(0.0, 5.0, 0.1, 0.8)}
    one, same, other = (plan(WEIGHT, **options, seed=seed) for seed in (0, 0, 1))
    assert str(one) == str(same)
    assert one.best.seconds != other.best.seconds
    assert one.best.seconds == pytest.approx(other.best.seconds, rel=0.02)


def test_one_worker_has_no_choice():
    found = plan(VECTOR, examples=4, num_workers=1, seconds_per_example=1.0, bandwidth=1000.0)
    assert found.verdict == "uncoded"
    assert found.best.seconds == 8.0
    assert [row.design.name for row in found.rows] == ["uncoded, dense"]


def test_a_thousand_workers():
    found = plan(
        WEIGHT, examples=4000, num_workers=1000, seconds_per_example=0.1, bandwidth=1e6,
        **STRAGGLING["pauses"],
    )  # fmt: skip
    assert found.best_exact.copies > 1
    given = {"examples": 4000, "seconds_per_example": 0.1, "bandwidth": 1e6}
    (result,) = simulate(
        found.best_exact.design, WEIGHT, **given, **STRAGGLING["pauses"], steps=300
    )
    assert found.best_exact.seconds == pytest.approx(result.mean, rel=0.04)


def test_the_table_has_a_line_a_design_and_a_line_a_reason():
    found = plan(WEIGHT, **FOUR, bandwidth=1e6, **STRAGGLING["pauses"])
    assert isinstance(found, Plan)
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.rows) + 1 + len(found.reasons)
    assert sum("<- chosen" in line for line in lines) == 1
    assert all("\n" not in reason for reason in found.reasons)
    names = [row.design.name for row in found.rows]
    assert len(set(names)) == len(names)
    assert {"uncoded, dense", "uncoded, factors"} <= set(names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers .* got 0"),
        ({"num_workers": 2.0}, "num_workers .* got 2.0"),
        ({"num_stragglers": 16}, "num_stragglers .* from 0 to 15; got 16"),
        ({"num_stragglers": -1}, "num_stragglers .* got -1"),
        ({"probability": 1.5}, "probability .* got 1.5"),
        ({"probability": math.nan}, "probability .* got nan"),
        ({"bandwidth": [1e6] * 16}, "bandwidth to be one number"),
        ({"seconds_per_example": np.ones(16)}, "seconds_per_example to be one number"),
        ({"bandwidth": 0}, "bandwidth of at least 1e-30; got 0"),
        ({"num_workers": 10**300}, "num_workers .* from 1 to 1048576; got 1000"),
        ({"approximate": "x"}, "approximate to be True or False; got 'x'"),
        ({"approximate": 1}, "approximate to be True or False; got 1"),
        ({"approximate": None}, "approximate to be True or False; got None"),
        ({"product_share": 1.5}, "product_share .* from 0 to 1; got 1.5"),
        ({"deadline": -1}, "deadline .* got -1"),
        ({"seed": -1}, "seed .* got -1"),
        ({"pause": 1.0}, "pause to be a latency model"),
        ({"network": lambda rng, shape: np.ones(3)}, "network to draw seconds"),
        ({"params": {}}, "parameters; got none"),
        ({"params": "gone.npz"}, "an .npz file"),
    ],
)
def test_plan_refuses(options, message):
    given = {"params": WEIGHT, **FOUR, "bandwidth": 1e6}
    with pytest.raises(ValueError, match=f"`plan` needs .*{message}"):
        inspect.unwrap(plan)(**given | options)
