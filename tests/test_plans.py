"""What the driver decides: who agrees, whose means are reported, who fetches from whom."""

import itertools
import math

import numpy as np
import pytest
from code_cases import CODES

pytest.importorskip("ray")

from jaxcode.cluster.plans import Plan, Report, agreeing, transfers, values_of  # noqa: E402
from jaxcode.cluster.wire import Header  # noqa: E402
from jaxcode.codes import cyclic_repetition, fractional_repetition, uncoded  # noqa: E402

FRAGMENTS = fractional_repetition(6, 1, num_fragments=2)  # groups of three
PAIRS = fractional_repetition(4, 1)


def report(worker, values, crc=0):
    return Report(Header(0, worker, 0, 0, "float32", 8, crc), values, 0, True, 0.1)


def everybody(code):
    return np.ones(code.num_workers, bool)


# ------------------------------------------------------------------ agreeing


def agreeing_by_definition(code, integers, arrived):
    """The largest set of those of a block who say the same; of equal ones that of the first."""
    kept = np.zeros(code.num_workers, bool)
    for block in range(code.num_partitions):
        members = [i for i in range(code.num_workers) if arrived[i] and code.block[i] == block]
        sets = [[i for i in members if integers[i] == integers[j]] for j in members]
        kept[max(sets, key=len, default=[])] = True
    return kept


def test_agreeing_is_the_majority():
    for said in itertools.product([5, 6, 7], repeat=3):
        integers = dict(enumerate([*said, 1, 1, 1]))
        for absent in range(-1, 6):
            arrived = everybody(FRAGMENTS)
            if absent >= 0:
                arrived[absent] = False
            heard = {i: x for i, x in integers.items() if arrived[i]}
            expected = agreeing_by_definition(FRAGMENTS, heard, arrived)
            np.testing.assert_array_equal(agreeing(FRAGMENTS, heard, arrived), expected)
            assert not agreeing(FRAGMENTS, heard, arrived)[absent] or absent < 0


@pytest.mark.parametrize("code", [PAIRS, uncoded(3), cyclic_repetition(4, 1, seed=0)], ids=str)
def test_messages_that_are_not_mixed_need_not_agree(code):
    integers = {i: i for i in range(code.num_workers)}
    arrived = everybody(code)
    arrived[0] = False
    np.testing.assert_array_equal(agreeing(code, integers, arrived), arrived)


def test_nobody_there():
    assert not agreeing(FRAGMENTS, {}, np.zeros(6, bool)).any()


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", ["pairs", "two fragments", "uncoded", "cyclic", "repeated"])
def test_means_over_what_was_computed(name):
    code, rng = CODES[name], np.random.default_rng(0)
    k = code.num_partitions
    counts, losses = rng.integers(1, 20, k), rng.normal(size=k)
    aux = rng.normal(size=(k, 2))
    values = {
        block: (int(counts[block]), float(losses[block] * counts[block]), aux[block])
        for block in range(k)
    }
    for heard in [range(code.num_workers), [0], [1, code.num_workers - 1]]:
        reports = {i: report(i, {int(b): values[b] for b in code.partitions[i]}) for i in heard}
        blocks = sorted({int(b) for i in heard for b in code.partitions[i]})
        examples, loss, means, missing = values_of(code, reports)
        assert examples == counts[blocks].sum()
        assert loss == pytest.approx(np.average(losses[blocks], weights=counts[blocks]))
        np.testing.assert_allclose(means, aux[blocks].sum(0) / counts[blocks].sum())
        assert missing == [block for block in range(k) if block not in blocks]


def test_no_values():
    examples, loss, aux, missing = values_of(PAIRS, {})
    assert (examples, aux, missing) == (0, None, [0, 1])
    assert math.isnan(loss)


# ------------------------------------------------------------------ transfers


def test_replicas_hold_each_others_messages():
    a, b, c, d = (*np.flatnonzero(PAIRS.block == 0), *np.flatnonzero(PAIRS.block == 1))
    a, b, c, d = map(int, (a, b, c, d))
    reports = {i: report(i, {}, crc=10 + int(PAIRS.block[i])) for i in range(4)}
    holders, pullers = transfers(PAIRS, [b, c], reports, [0, 1, 2, 3])
    assert holders == {b: [b, a], c: [c, d]}
    assert pullers == {b: sorted([c, d]), c: sorted([a, b])}
    reports[d] = report(d, {}, crc=99)  # not to the last bit
    holders, pullers = transfers(PAIRS, [b, c], reports, [0, 1, 2, 3])
    assert holders == {b: [b, a], c: [c]}
    assert pullers[c] == sorted([a, b, d])
    del reports[a]  # has not computed it
    holders, _ = transfers(PAIRS, [b, c], reports, [0, 1, 2, 3])
    assert holders == {b: [b], c: [c]}
    holders, pullers = transfers(PAIRS, [b, c], reports, [b, c])  # the others are not there
    assert holders == {b: [b], c: [c]}
    assert pullers == {b: [c], c: [b]}


@pytest.mark.parametrize("code", [FRAGMENTS, cyclic_repetition(4, 1, seed=0)], ids=str)
def test_other_messages_are_their_senders_alone(code):
    workers = list(range(code.num_workers))
    reports = {i: report(i, {}, crc=1) for i in workers}
    holders, pullers = transfers(code, [1, 2], reports, workers)
    assert holders == {1: [1], 2: [2]}
    assert pullers == {i: [j for j in workers if j != i] for i in (1, 2)}


def test_a_plan_names_its_state():
    plan = Plan(7, 2, np.zeros((1, 4)), {}, {}, {}, {})
    assert plan.token == (7, 2)
    assert plan.recovered is None
    assert plan.there == ()
