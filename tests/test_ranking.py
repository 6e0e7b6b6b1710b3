"""The ranking's rules case by case, and its break-evens against closed forms and whole plans."""

import itertools
import math

import numpy as np
import pytest
from neutral import NEUTRAL

from jaxcode.candidates import candidates
from jaxcode.designs import conditions
from jaxcode.expectation import Expected, StepModel
from jaxcode.planning import plan
from jaxcode.ranking import Ranked, Ranking, break_even_bandwidth, break_even_redundancy
from jaxcode.stragglers import bimodal, shifted_exponential

VECTOR, WEIGHT = {"v": (1000,)}, {"w": (500, 500), "b": (500,)}
EXACT = {"examples": 16, "num_workers": 16, "seconds_per_example": 1.0, "approximate": False}


def setting(params=VECTOR, **options):
    given = {"examples": 8, "seconds_per_example": 1.0, "bandwidth": 1000.0}
    return conditions("plan", params, **NEUTRAL | given | options)


def ranking(probability=None, n=8, **options):
    return Ranking(StepModel("plan", setting(**options), n, 0), probability)


def pauses(rng, shape):
    """5 % of the workers pause for Exp(mean 5), whatever they compute."""
    return np.where(rng.random(shape) < 0.05, rng.exponential(5.0, shape), 0.0)


STRAGGLING = {
    "mild": {"slowdown": bimodal(1.0, 1.3, 0.02)},
    "pauses": {"pause": pauses},
    "network": {"network": shifted_exponential(1.0, 1.0)},
}

EXACTLY, FIRST = (
    next(x for x in candidates(setting(), 8, approximate=True) if x.exact == exact)
    for exact in (True, False)
)


# Of a step of 6 s; an approximate one waits for 7 of 8, of which the share `there` is there.
@pytest.mark.parametrize(
    ("candidate", "probability", "deadline", "ends", "there", "expected"),
    [
        (EXACTLY, None, None, 1.0, 1.0, 6.0),
        (EXACTLY, None, None, 0.9, 1.0, math.inf),  # the end of the training
        (EXACTLY, 0.8, None, 0.9, 1.0, 6.0),  # acceptable
        (EXACTLY, 0.95, None, 0.9, 1.0, math.inf),
        (EXACTLY, None, 9.0, 0.75, 1.0, 8.0),  # a quarter is lost
        (EXACTLY, None, 9.0, 0.0, 0.0, math.inf),
        (FIRST, None, None, 1.0, 1.0, 6 * 8 / 7),
        (FIRST, None, None, 0.9, 1.0, math.inf),
        (FIRST, 0.8, None, 0.9, 1.0, 6 * 8 / 7),
        (FIRST, None, 9.0, 0.5, 0.75, 6 * 8 / 7 / 0.75),  # those that came are used
        (FIRST, None, 9.0, 0.0, 0.0, math.inf),
    ],
)
def test_seconds_are_those_of_a_step_that_counts(
    candidate, probability, deadline, ends, there, expected
):
    rule = ranking(probability, deadline=deadline)
    assert FIRST.wait_for == 7
    assert rule.seconds(candidate, Expected(6.0, ends, there, 0.0)) == pytest.approx(expected)


def test_the_order_is_by_seconds_then_doubt_then_copies_then_place():
    rule = ranking(pause=bimodal(0.0, math.inf, 0.1))
    found = rule.ranked(candidates(rule.model.setting, 8, approximate=True), whole=False)
    for one, other in itertools.pairwise(found):
        pairs = zip(one[:4], other[:4], strict=True)
        differ = next((a, b) for a, b in pairs if a != b)
        assert differ[0] < differ[1]
    endless = [x for x in found if math.isinf(x.seconds)]
    assert len({x.doubt for x in endless}) > 1  # so that doubt ranked some
    assert len(found) == len({x.place for x in found})


def test_redundancy_breaks_even_at_the_most_copies_that_are_faster():
    made = candidates(setting(), 8, approximate=True)

    def screened(seconds):
        """Each candidate with the seconds that this function gives it."""
        nothing = Expected(0.0, 1.0, 1.0, 0.0)
        return [Ranked(seconds(x), 0.0, x.copies, i, x, nothing) for i, x in enumerate(made)]

    copies = sorted({x.copies for x in made if x.exact and x.redundant})
    for most in copies:
        found = screened(lambda x, most=most: 1.0 if 1 < x.copies <= most else 2.0)
        assert break_even_redundancy(found) == most
    assert break_even_redundancy(screened(lambda x: x.copies)) == 1
    assert break_even_redundancy(screened(lambda x: 1.0)) == 1  # as fast is not faster
    # What is approximate is no redundancy, however fast.
    assert break_even_redundancy(screened(lambda x: x.copies if x.exact else 0.1)) == 1


@pytest.mark.parametrize("seconds_per_example", [0.1, 1.0])
@pytest.mark.parametrize("n", [4, 8, 12])
def test_fragments_break_even_where_the_closed_form_says(n, seconds_per_example):
    """With nobody slow, d fragments: d T / n + S / (d b) < T / n + S / b where b < n S / (d T)."""
    given = {"examples": n, "seconds_per_example": seconds_per_example}
    rule = ranking(n=n, **given)
    made = candidates(rule.model.setting, n, approximate=False)
    edge = n * 4000 / (2 * n * seconds_per_example)
    low, high = break_even_bandwidth(rule, made, 1000.0)
    assert (low, high) == (0, pytest.approx(edge, rel=0.01))
    assert break_even_bandwidth(rule, made, math.inf) == (0, 0)
    plain = [x for x in made if not x.redundant]
    assert break_even_bandwidth(rule, plain, 1000.0) == (0, 0)


def test_products_make_redundancy_pay_where_low_rank_did_not():
    """A 100 x 100 weight, 8 workers, 2 s each; larger blocks have longer factors, 1,600 bytes.

    Free factors: no code is faster at any bandwidth b. Counted, they take 4 / 3 + 16 / 3 s, and
    between them and 2 s + 40,000 / b dense, two fragments take 4 s + 20,000 / b.
    """
    edges = {}
    for share in (0, 1 / 3):
        rule = ranking(n=8, params={"w": (100, 100)}, examples=16, product_share=share)
        made = candidates(rule.model.setting, 8, approximate=False)
        edges[share] = break_even_bandwidth(rule, made, 8000.0)
    assert edges[0] == (0, 0)
    assert edges[1 / 3] == pytest.approx(((20_000 - 1584) / (8 / 3), 20_000 / 2), rel=0.01)


@pytest.mark.parametrize(
    ("params", "name", "bandwidth"),
    [
        (VECTOR, "mild", 400.0),
        ({"w": (500, 500)}, "pauses", 1e4),
        (VECTOR, "network", 4000.0),
    ],
)
def test_redundancy_breaks_even_where_it_is_said_to(params, name, bandwidth):
    found = plan(params, **EXACT, bandwidth=bandwidth, **STRAGGLING[name])
    low, high = found.break_even_bandwidth
    assert low < high
    assert low > 0 or high < math.inf

    def pays(at):
        rows = plan(params, **EXACT, bandwidth=at, **STRAGGLING[name]).rows
        redundant = min(row.seconds for row in rows if row.copies > 1)
        return redundant < min(row.seconds for row in rows if row.copies == 1)

    for edge, inside in [(low, 1.15), (high, 1 / 1.15)]:
        if 0 < edge < math.inf:
            assert pays(edge * inside)
            assert not pays(edge / inside)
            assert f"{edge:.3g} bytes/s" in "\n".join(found.reasons)


def test_break_even_at_any_and_at_no_bandwidth():
    none = plan(WEIGHT, **EXACT, bandwidth=1e5)
    low_rank_only = plan({"w": (4000, 4000)}, **EXACT, bandwidth=1e5, product_share=0)
    assert low_rank_only.break_even_bandwidth == (0.0, 0.0)
    assert "redundancy pays at no bandwidth" in "\n".join(low_rank_only.reasons)
    assert low_rank_only.break_even_redundancy == none.break_even_redundancy == 1.0
    long = plan(VECTOR, **EXACT, bandwidth=1e5, pause=bimodal(0.0, 1e6, 0.05))
    assert long.break_even_bandwidth == (0.0, math.inf)
    assert long.break_even_redundancy == 16
    assert "redundancy pays at any bandwidth" in "\n".join(long.reasons)


def test_break_even_redundancy_is_the_last_that_is_faster():
    found = plan(VECTOR, **EXACT, bandwidth=40_000, **STRAGGLING["pauses"])
    faster = [row.copies for row in found.rows if row.seconds < found.uncoded.seconds]
    assert max(faster) == found.break_even_redundancy
    assert 1 < found.break_even_redundancy < 16
