"""Arrivals against loops: products, order statistics, and a queue as a machine of events."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.arrivals import smallest, through_master, times
from jaxcode.codes import fractional_repetition
from jaxcode.designs import Design
from jaxcode.simulation import simulate


def queue(arrival, each, lots):
    """One step: a link that is idle or busy, and messages that wait in front of it."""
    events = [(time, 1, lot, i) for i, (time, lot) in enumerate(zip(arrival, lots, strict=True))]
    heapq.heapify(events)
    waiting, busy, finish = [], False, [math.inf] * len(arrival)
    while events:
        now, arrives, lot, i = heapq.heappop(events)
        if math.isinf(now):
            break
        if arrives:
            heapq.heappush(waiting, (now, lot, i))
        else:
            busy, finish[i] = False, now
        # Only once everything that happens now has happened: lots decide among what is there.
        if waiting and not busy and not (events and events[0][0] == now):
            _, _, first = heapq.heappop(waiting)
            busy = True
            heapq.heappush(events, (now + each, 0, 0.0, first))
    return finish


@st.composite
def steps(draw):
    n = draw(st.integers(1, 7))
    # Quarters, so that sums are exact and many arrive at the same time.
    seconds = st.one_of(st.integers(0, 12).map(lambda x: x / 4), st.just(math.inf))
    arrival = draw(st.lists(seconds, min_size=n, max_size=n))
    lots = draw(st.permutations(range(n)))
    return np.array([arrival]), np.array([lots]) / n, draw(st.integers(1, 8)) / 4


@given(steps())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_queue_is_a_machine_of_events(step):
    arrival, lots, each = step
    found = through_master(arrival, each, lots)
    assert found[0].tolist() == queue(arrival[0], each, lots[0])
    assert np.isinf(found[np.isinf(arrival)]).all()


def test_lots_decide_among_what_arrives_together():
    arrival = np.zeros((1, 3))
    found = [
        through_master(arrival, 1.0, np.array([lots]))
        for lots in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])
    ]
    assert [x[0].tolist() for x in found] == [[1, 2, 3], [3, 2, 1]]
    late = np.array([[0.0, 5.0, 0.0]])  # the control: they do not decide otherwise
    assert through_master(late, 1.0, np.array([[0.1, 0.0, 0.2]]))[0].tolist() == [1, 6, 2]


def test_a_link_that_takes_no_time_or_for_ever():
    arrival, lots = np.array([[1.0, math.inf]]), np.zeros((1, 2))
    assert through_master(arrival, 0.0, lots) is arrival
    assert through_master(arrival, 2.0, None) is arrival
    assert np.isinf(through_master(arrival, math.inf, lots)).all()


def test_messages_that_arrive_together_are_queued_in_random_order():
    """Were the workers of a pair taken one after the other, all but one message would be needed."""
    options = {"examples": 8, "seconds_per_example": 0, "bandwidth": math.inf}
    design = Design(fractional_repetition(16, 1))
    (result,) = simulate(design, {"w": (50, 40)}, **options, master_bandwidth=8000.0, steps=4000)
    orders = np.random.default_rng(5).permuted(np.tile(np.arange(16), (4000, 1)), axis=1)
    needed = np.sort(orders.reshape(-1, 8, 2).min(-1), axis=1)[:, -1] + 1
    assert result.mean == pytest.approx(needed.mean(), rel=0.01)
    assert result.mean < 14


@pytest.mark.parametrize("n", [1, 2, 9])
def test_the_smallest_are_those_of_a_sorted_list(n):
    seconds = np.random.default_rng(n).integers(0, 5, (4, 3, n)).astype(float)
    seconds[0, 0, 0] = math.inf
    for count in range(1, n + 1):
        found = smallest(seconds, count)
        assert found.shape == (4, 3)
        for index in np.ndindex(4, 3):
            assert found[index] == sorted(seconds[index])[count - 1]


def test_products_with_workers_that_are_gone():
    factors = np.array([[1.0, math.inf, 0.0], [2.0, 0.5, 1e300]])
    found = times(np.array([0.0, 0.0, 1e30]), factors)
    assert found.tolist() == [[0, math.inf, 0], [0, 0, math.inf]]
    assert times(3.0, None) == 3.0
    assert times(2.0, factors)[1].tolist() == [4, 1, 2e300]
