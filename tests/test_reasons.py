"""Reasons: each line appears exactly under its condition, and says the numbers it is given."""

import math

import numpy as np
import pytest
from neutral import NEUTRAL

from jaxcode.codes import fractional_repetition, uncoded
from jaxcode.designs import Design, conditions
from jaxcode.expectation import StepModel
from jaxcode.planning import Estimate, Plan, plan
from jaxcode.reasons import reasons
from jaxcode.simulation import simulate
from jaxcode.stragglers import bimodal, trace

VECTOR = {"v": (1000,)}
FOUR = {"examples": 16, "num_workers": 16, "seconds_per_example": 1.0}


def model(**options):
    given = {"examples": 16, "seconds_per_example": 1.0, "bandwidth": 1000.0}
    return StepModel("plan", conditions("plan", {"w": (30, 20)}, **NEUTRAL | given | options), 8, 0)


DENSE, FACTORS = {"w": "dense"}, {"w": "factors"}


def row(code=None, seconds=10.0, forms=DENSE, *, size=2400.0, decode=0.0, wait_for=None, sure=1.0):
    """An estimate, of what is said to be so."""
    code = uncoded(8) if code is None else code
    method = "factors" if forms == FACTORS else "dense"
    design = Design(code, method=method, wait_for=wait_for)
    copies, error = 8 * float(code.computation[0]), 0 if wait_for is None else 1 - wait_for / 8
    return Estimate(design, seconds, 1.0, size, decode, copies, sure, error, forms)


def said(found, undercut=None, **options):
    return list(reasons(found, model(**options), undercut))


def planned(*others, best=None, dense=None, low=None, bandwidth=(0.0, 0.0), redundancy=1.0):
    """A plan with these rows, the uncoded ones among them."""
    dense = row() if dense is None else dense
    low = dense if low is None else low
    best = dense if best is None else best
    rows = tuple({id(x): x for x in (best, dense, low, *others)}.values())
    return Plan(rows, best, dense, dense, low, "uncoded", (), bandwidth, redundancy)


PAIRS = row(fractional_repetition(8, 1), 5.0)
SLOW_PAIRS = row(fractional_repetition(8, 1), 9.9)  # not faster by 2 %
FIRST = row(None, 4.0, wait_for=6)
LOW = row(None, 4.0, FACTORS, size=400.0, decode=3.0)
SLOW_LOW = row(None, 12.0, FACTORS, size=400.0, decode=3.0)
ENDLESS = row(None, math.inf, sure=0.75)
SLOWER = trace(np.where(np.arange(8) == 3, 1.3, 1.0)[None])
ALIKE = trace(np.where(np.arange(8) == 3, 1.2, 1.0)[None])
# A phrase, where it is said, and where it is not.
LINES = {
    "no weight is shorter in factors": ([planned()], [planned(low=LOW)]),
    "400 bytes a worker in place of 2400, 6 s less a step": ([planned(low=LOW)], [planned()]),
    "in place of 2400, 2 s more a step": ([planned(low=SLOW_LOW)], [planned(low=LOW)]),
    "in place of 2400, without redundancy": (
        [planned(dense=ENDLESS, low=LOW)],
        [planned(low=LOW), planned()],
    ),
    "no such design is among the fastest": ([planned()], [planned(PAIRS), planned(SLOW_PAIRS)]),
    "redundancy pays: fractional_repetition s=1 m=1, dense computes everything 2 times, 5 s "
    "against 10 s": ([planned(PAIRS)], [planned(), planned(SLOW_PAIRS)]),
    "redundancy does not pay: the best, fractional_repetition s=1 m=1, dense, computes": (
        [planned(SLOW_PAIRS), planned(PAIRS, low=LOW)],
        [planned(), planned(PAIRS)],
    ),
    "approximately, uncoded, dense, first 6 of 8: 4 s for each full batch that is used, but every "
    "step loses 25.0% of the data": ([planned(FIRST)], [planned(), planned(PAIRS)]),
    "redundancy pays at no bandwidth": ([planned()], [planned(bandwidth=(0.0, math.inf))]),
    "redundancy pays at any bandwidth": ([planned(bandwidth=(0.0, math.inf))], [planned()]),
    "redundancy pays below 70 bytes/s": ([planned(bandwidth=(0.0, 70.0))], [planned()]),
    "redundancy pays above 7 bytes/s": ([planned(bandwidth=(7.0, math.inf))], [planned()]),
    "redundancy pays from 7 to 70 bytes/s": ([planned(bandwidth=(7.0, 70.0))], [planned()]),
    "up to 3 times is faster than once": ([planned(redundancy=3.0)], [planned()]),
    "none, computing anything twice is slower": ([planned()], [planned(redundancy=3.0)]),
    "never ends with probability 0.25": ([planned(best=ENDLESS)], [planned()]),
    "every design waits for ever on average": ([planned(best=ENDLESS)], [planned()]),
}


@pytest.mark.parametrize("phrase", LINES)
def test_a_line_is_said_where_it_is_so(phrase):
    where, elsewhere = LINES[phrase]
    for found in where:
        assert sum(phrase in line for line in said(found)) == 1
    for found in elsewhere:
        assert not any(phrase in line for line in said(found))


def test_the_choice_comes_first_and_lines_are_single():
    lines = said(planned(PAIRS, FIRST, low=LOW))
    assert lines[0].startswith("uncoded, dense: 10 s a step, 1 times as fast")
    assert len(set(lines)) == len(lines)
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("product_share", "seconds", "undercut", "expected"),
    [
        (0.5, 12.0, None, "takes 8 s of the 12 s"),
        (0.1, 15.9, None, "takes 1.6 s of the 15.9 s"),
        (0.1, 16.1, None, None),  # less than a tenth
        (0.0, 1.0, None, None),
        (0.1, 16.1, "uncoded, factors", "if it were free, uncoded, factors would be best"),
        (0.5, 12.0, "uncoded, factors", "if it were free, uncoded, factors would be best"),
    ],
)
def test_products_are_said_where_they_are_much_or_decide(
    product_share, seconds, undercut, expected
):
    best = row(None, seconds, FACTORS, size=400.0)
    lines = said(planned(best=best, low=best), undercut, product_share=product_share)
    about = [line for line in lines if "multiplying factors out" in line]
    assert len(about) == (expected is not None)
    if expected:
        assert expected in about[0]
    dense = said(planned(low=LOW), product_share=product_share)  # it is not part of that
    assert not any("multiplying" in line for line in dense)


def test_what_a_step_is_made_of_adds_up():
    """16 s of computing by 8 workers, 2,400 bytes at 1,000 a second; in factors 2/3 and 400."""
    (line,) = (x for x in said(planned()) if "without redundancy a step" in x)
    assert "2 s of computing, 2.4 s of sending and 5.6 s of waiting" in line
    low = row(None, 9.0, FACTORS, size=400.0, decode=16 / 3)
    (line,) = (x for x in said(planned(low=low)) if "without redundancy a step" in x)
    assert "1.33 s of computing, 0.4 s of sending, 5.33 s of decoding and 1.93 s of wait" in line


def test_with_a_deadline_a_step_is_not_over_by_it():
    (line,) = (x for x in said(planned(best=ENDLESS), deadline=3.0) if "probability" in x)
    assert line == "caution: a step is not over by the deadline with probability 0.25"


@pytest.mark.parametrize("name", ["slowdown", "pause", "network"])
def test_workers_that_are_not_alike_are_named(name):
    (line,) = (x for x in said(planned(), **{name: SLOWER}) if "differs" in x)
    assert f"{name} differs from worker to worker (medians 1 to 1.3)" in line
    assert not any("differs" in x for x in said(planned(), **{name: ALIKE}))


def test_workers_that_differ_for_good_are_named():
    slow = trace(np.where(np.arange(16) == 3, 3.0, 1.0)[None])
    found = plan(VECTOR, **FOUR, bandwidth=1e6, slowdown=slow)
    assert any(
        "slowdown differs from worker to worker (medians 1 to 3)" in x for x in found.reasons
    )
    alike = plan(VECTOR, **FOUR, bandwidth=1e6, slowdown=bimodal(1.0, 3.0, 1 / 16))
    assert not any("differs" in x for x in alike.reasons)
    assert found.uncoded.seconds == pytest.approx(alike.uncoded.seconds, rel=0.03)
    (truth,) = simulate(
        Design(uncoded(16)), VECTOR, examples=16, seconds_per_example=1.0, bandwidth=1e6,
        slowdown=slow, steps=3,
    )  # fmt: skip
    assert truth.mean > 1.2 * found.uncoded.seconds
