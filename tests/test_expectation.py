"""Expected seconds against enumeration, closed forms and simulated steps."""

import itertools
import math

import numpy as np
import pytest
from neutral import NEUTRAL

from jaxcode.codes import cyclic_mds, fractional_repetition, polynomial, uncoded
from jaxcode.designs import Design, conditions
from jaxcode.expectation import Need, StepModel, Task, arrivals, order_weights, tail, tail_index
from jaxcode.planning import plan
from jaxcode.simulation import simulate
from jaxcode.stragglers import bimodal, failures, markov, pareto, shifted_exponential, trace

WEIGHT = {"w": (50, 40)}
GIVEN = {"examples": 24, "seconds_per_example": 0.25, "bandwidth": 4000.0}


def setting(**options):
    return conditions("plan", WEIGHT, **NEUTRAL | GIVEN | options)


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_tails_are_sums_of_binomial_terms(count):
    u = np.array([0.0, 1e-9, 0.1, 0.5, 0.97, 1.0])
    for least in range(count + 1):
        expected = [
            sum(
                math.comb(count, j) * x**j * (1 - x) ** (count - j) for j in range(least, count + 1)
            )
            for x in u
        ]
        np.testing.assert_allclose(tail(count, least, u), expected, atol=1e-12)


NEEDS = [
    Need(((2, 2),), 1),
    Need(((2, 1), (3, 1)), 2),
    Need(((3, 2),), 2),
    Need(((5, 1),), 1),
    Need(((5, 1),), 4),
]


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_weights_are_what_enumeration_counts(need):
    """Every way for the workers to draw one of the sample's values, equally likely."""
    size = 4 if need.workers > 5 else 6
    count = np.zeros(size)
    for drawn in itertools.product(range(size), repeat=need.workers):
        waiting, start = 0, 0
        for members, number in need.groups:
            for _ in range(number):
                waiting = max(waiting, sorted(drawn[start : start + members])[need.least - 1])
                start += members
        count[waiting] += 1
    exact = count / count.sum()
    single = len(need.groups) == need.groups[0][1] == 1  # from the density, by the midpoint rule
    np.testing.assert_allclose(order_weights(need, size), exact, atol=0.02 if single else 1e-12)


def test_the_density_of_order_statistics_is_the_difference_of_their_tails():
    u = np.arange(20_001) / 20_000
    for n, r in [(1, 1), (5, 2), (40, 40), (300, 7), (300, 299)]:
        expected = np.diff(tail(n, r, u))
        found = order_weights(Need(((n, 1),), r), 20_000)
        np.testing.assert_allclose(found, expected, atol=2e-3 * expected.max())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_arrivals_are_counted_up_to_the_least(share):
    for size, least in [(1, 1), (6, 4), (9, 9)]:
        count = np.array([sum(x) for x in itertools.product([0, 1], repeat=size)])
        chance = share**count * (1 - share) ** (size - count)
        expected = chance @ np.minimum(count, least) / least
        assert arrivals(Need(((size, 1),), least), share) == pytest.approx(expected, abs=1e-12)
    assert arrivals(Need(((10_000, 1),), 9000), 0.5) == pytest.approx(5000 / 9000)


@pytest.mark.parametrize("alpha", [0.8, 1.2, 3.0])
def test_tail_index_of_heavy_tails(alpha):
    sample = np.sort(pareto(alpha, 1.0)(np.random.default_rng(0), 200_000))
    assert tail_index(sample) == pytest.approx(alpha, rel=0.15)


def test_tail_index_of_light_tails_is_large():
    light = np.sort(1 + np.random.default_rng(0).exponential(size=200_000))
    assert tail_index(light) > 5
    for constant in (np.ones(1), np.ones(1000), np.zeros(1000), np.repeat([1.0, 9.0], 500)):
        assert tail_index(constant) == math.inf


def test_the_largest_of_exponentials_has_its_closed_form():
    model = StepModel("plan", setting(pause=shifted_exponential(0.0, 2.0)), 8, 0)
    slowest = Task(0.0, 0.0, 8, Need(((8, 1),), 8))
    harmonic = sum(1 / j for j in range(1, 9)) / 2
    assert model.expect(slowest, whole=True).seconds == pytest.approx(harmonic, rel=0.01)
    assert model.expect(slowest).seconds == pytest.approx(harmonic, rel=0.05)


def task_of(design):
    """What the design is, from its code."""
    code, n = design.code, design.code.num_workers
    if design.wait_for is not None:
        need = Need(((n, 1),), design.wait_for)
    elif code.block is None:
        need = Need(((n, 1),), n - code.num_stragglers)
    else:
        sizes, number = np.unique(np.bincount(code.block), return_counts=True)
        need = Need(tuple(zip(sizes.tolist(), number.tolist(), strict=True)), code.num_fragments)
    size, product = 8000 / code.num_fragments, 0.0
    if design.method == "factors":  # rows times 50 + 40 numbers; the weight is all there is
        size, product = 4 * 24 / code.num_partitions * 90, 1 / 3
    return Task(float(code.computation[0]), size, design.messages_used, need, product)


DESIGNS = [
    Design(uncoded(12)),
    Design(fractional_repetition(12, 1)),
    Design(fractional_repetition(12, 3, num_fragments=2)),
    Design(cyclic_mds(12, 3)),
    Design(polynomial(12, 1, num_fragments=2)),
    Design(uncoded(12), wait_for=9),
    Design(fractional_repetition(12, 1), method="factors"),
]
MODELS = {
    "exponential": {"slowdown": shifted_exponential(1.0, 2.0)},
    "pauses": {"pause": bimodal(fast=0.0, slow=9.0, probability=0.1)},
    "bursts": {"pause": markov(fast=0.0, slow=9.0, probability=0.1, persistence=0.7)},
    "heavy": {"slowdown": pareto(alpha=2.2, scale=1.0)},
    "network": {"network": shifted_exponential(0.5, 1.0), "pause": bimodal(0.0, 3.0, 0.3)},
    "everything": {
        "slowdown": shifted_exponential(1.0, 4.0), "network": pareto(3.0, 1.0),
        "pause": bimodal(0.0, 3.0, 0.1),
    },
}  # fmt: skip
every_model = pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)


@every_model
def test_expected_seconds_are_the_simulated_mean(models):
    model = StepModel("plan", setting(**models, decode_rate=1e5), 12, 0)
    results = simulate(DESIGNS, WEIGHT, **GIVEN, **models, decode_rate=1e5, steps=20_000, seed=1)
    for result in results:
        expected = model.expect(task_of(result.design), whole=True).seconds
        assert expected == pytest.approx(result.mean, rel=0.02)
    means = [result.mean for result in results]
    assert max(means) > 1.1 * min(means)  # the control: they differ by more than they err


@every_model
def test_so_are_they_with_a_deadline(models):
    deadline = 13.0
    model = StepModel("plan", setting(**models, deadline=deadline), 12, 0)
    options = {**GIVEN, **models, "deadline": deadline, "steps": 20_000, "seed": 1}
    for result in simulate(DESIGNS, WEIGHT, **options):
        expected = model.expect(task_of(result.design), whole=True)
        assert expected.seconds == pytest.approx(result.mean, rel=0.02)
        if result.design.wait_for is None:
            assert expected.probability == pytest.approx(result.exact, abs=0.015)
        else:
            lost = 1 - expected.there * 9 / 12
            assert lost == pytest.approx(result.error, abs=0.01)


@pytest.mark.parametrize("master_bandwidth", [4e3, 2e4, 1e5])
@pytest.mark.parametrize("name", ["exponential", "pauses", "network"])
def test_the_queue_at_the_master_is_nearly_the_simulated_one(master_bandwidth, name):
    options = MODELS[name] | {"master_bandwidth": master_bandwidth}
    model = StepModel("plan", setting(**options), 12, 0)
    for result in simulate(DESIGNS, WEIGHT, **GIVEN, **options, steps=5000, seed=1):
        expected = model.expect(task_of(result.design), whole=True).seconds
        assert expected == pytest.approx(result.mean, rel=0.04)
        without = result.mean - result.parts["queue"] - result.parts["decode"]
        if master_bandwidth == 4e3:  # the control: it is most of the time
            assert without < 0.7 * result.mean


def test_failures_make_the_expectation_infinite_only_where_they_matter():
    rare = failures(1e4, 10.0, step=1.0)
    model = StepModel("plan", setting(pause=rare), 12, 0)
    answers = 1e4 / (1e4 + 10) * math.exp(-1 / 1e4)
    for design, probability in [
        (DESIGNS[0], answers**12),
        (DESIGNS[1], (2 * answers - answers**2) ** 6),
    ]:
        expected = model.expect(task_of(design), whole=True)
        assert expected.probability == pytest.approx(probability, abs=0.004)
        assert expected.seconds == pytest.approx(24 * 0.25 * design.code.computation[0] + 2)
    everybody = {"pause": bimodal(0.0, math.inf, 1.0)}
    gone = StepModel("plan", setting(**everybody), 12, 0).expect(task_of(DESIGNS[0]))
    assert (gone.seconds, gone.probability, gone.there) == (math.inf, 0.0, 0.0)


def test_workers_that_differ_for_good_are_beyond_the_model():
    """One slow worker of twelve: the model takes each worker to be it one time in twelve."""
    slow = trace(np.where(np.arange(12) == 3, 3.0, 1.0)[None])
    model = StepModel("plan", setting(slowdown=slow), 12, 0)
    (result,) = simulate(DESIGNS[0], WEIGHT, **GIVEN, slowdown=slow, steps=5)
    assert model.expect(task_of(DESIGNS[0]), whole=True).seconds < 0.9 * result.mean
    medians = model.medians["slowdown"]
    assert (medians.min(), medians.max()) == (1.0, 3.0)  # which is how it is noticed


WITH_BIAS = {"w": (50, 40), "b": (500,)}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_the_products_of_factors_are_counted_by_hand(share):
    """Two groups of two; 8 examples of 0.5 s; factors 4 (50 + 40), and 500 numbers dense."""
    options = {"examples": 8, "seconds_per_example": 0.5, "bandwidth": 1000.0}
    design = Design(fractional_repetition(4, 1), method="factors")
    left = share * 2000 / 2500  # of the computing, to the decoder
    sending, decode = 4 * (4 * 90 + 500) / 1000, left * 8 * 0.5
    by_hand = (1 - left) * 2 + sending + decode
    (result,) = simulate(design, WITH_BIAS, **options, product_share=share, steps=3)
    assert result.seconds == pytest.approx([by_hand] * 3)
    assert result.parts["decode"] == pytest.approx(decode)
    assert result.parts["compute"] == pytest.approx((1 - left) * 2)
    (dense,) = simulate(
        Design(fractional_repetition(4, 1)), WITH_BIAS, **options, product_share=share, steps=1
    )
    assert dense.mean == pytest.approx(2 + 10)  # whatever the share
    found = plan(WITH_BIAS, num_workers=4, **options, product_share=share, num_stragglers=1)
    (row,) = (row for row in found.rows if row.design.name == design.name)
    assert (row.seconds, row.decode) == pytest.approx((by_hand, decode))
    free = 2 + sending
    assert (by_hand == pytest.approx(free)) == (share == 0)  # the control


def test_products_are_not_slowed_with_the_workers():
    """A slowdown of 3 multiplies what workers still compute, and not what decoding takes."""
    options = GIVEN | {"bandwidth": math.inf, "product_share": 0.5}
    slow = bimodal(1.0, 3.0, probability=1.0)
    design = Design(fractional_repetition(4, 1), method="factors")
    for models, times in [({}, 1), ({"slowdown": slow}, 3)]:
        (result,) = simulate(design, WEIGHT, **options, **models, steps=2)
        assert result.mean == pytest.approx(times * 0.5 * 3 + 0.5 * 6)
        model = StepModel("plan", setting(**options, **models), 4, 0)
        task = Task(0.5, 0.0, 2, Need(((2, 2),), 1), 0.5)
        assert model.expect(task).seconds == pytest.approx(result.mean)
        assert model.expect(task).decode == pytest.approx(3)
