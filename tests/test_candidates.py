"""Candidates: the designs they make, and all that enumeration finds."""

import math

import pytest
from neutral import NEUTRAL

from jaxcode.candidates import candidates
from jaxcode.codes import fractional_repetition
from jaxcode.designs import conditions
from jaxcode.expectation import Need
from jaxcode.simulation import simulate

WEIGHT = {"w": (50, 40)}
GIVEN = {"examples": 24, "seconds_per_example": 0.25, "bandwidth": 4000.0}


def setting(**options):
    return conditions("plan", WEIGHT, **NEUTRAL | GIVEN | options)


def need_of(design):
    """What a step waits for, from the code."""
    code, n = design.code, design.code.num_workers
    if design.wait_for is not None:
        return {n: 1}, design.wait_for
    if code.block is None:
        return {n: 1}, n - code.num_stragglers
    sizes = [int((code.block == p).sum()) for p in range(code.num_partitions)]
    return {size: sizes.count(size) for size in sizes}, code.num_fragments


@pytest.mark.parametrize("n", [1, 2, 7, 12, 64])
def test_candidates_are_the_designs_they_make(n):
    conditions_ = setting(examples=4 * n)
    found = candidates(conditions_, n, approximate=True)
    kinds = set()
    for candidate in found[:: max(1, len(found) // 40)]:
        design = candidate.design()
        if design is None:
            continue
        kinds.add(candidate.kind)
        code = design.code
        assert code.num_stragglers == candidate.num_stragglers
        assert code.num_fragments == candidate.num_fragments
        assert code.computation == pytest.approx(candidate.task.computation)
        assert candidate.copies == pytest.approx(n * code.computation[0])
        assert design.messages_used == candidate.task.used
        (result,) = simulate(design, WEIGHT, **GIVEN | {"examples": 4 * n}, steps=1)
        assert result.worker_bytes == candidate.task.message_bytes
        assert candidate.task.need.workers == n
        assert (dict(candidate.task.need.groups), candidate.task.need.least) == need_of(design)
        decode = candidate.task.product * setting(examples=4 * n).batch_seconds
        assert result.parts["decode"] == pytest.approx(decode)
        assert code.float32_error < 1e-2
    assert "blocks" in kinds
    assert ("first" in kinds) == (n > 1)
    assert not any(x.kind == "first" for x in candidates(conditions_, n, approximate=False))


def blocks(n):
    """(s, m) of every partition of n workers in k groups, as even as can be, that is no worse."""
    found = set()
    for size in {n // k for k in range(1, n + 1)}:  # the smaller size of groups
        k = max(k for k in range(1, n + 1) if n // k == size)
        larger = size + (n % k > 0)
        for m in range(1, min(size, 8) + 1):
            code = fractional_repetition(larger, larger - m, num_fragments=m)
            if code.worst_condition <= 1e3:
                found.add((size - m, m))
    return found


@pytest.mark.parametrize("n", [1, 2, 5, 8, 12])
def test_all_blocks_are_considered_once_a_method(n):
    found = [x for x in candidates(setting(), n, approximate=False) if x.kind == "blocks"]
    for method in ("dense", "factors"):
        sizes = [(x.num_stragglers, x.num_fragments) for x in found if x.method == method]
        assert len(sizes) == len(set(sizes))
        if method == "dense":
            assert set(sizes) == blocks(n)
    shorter = [x for x in found if x.method == "factors"]
    for x in found:
        rows = math.ceil(24 * x.copies / n - 1e-9)  # times 50 + 40, or in normal form
        pays = rows * 90 < 2000 or (rows < 40 and rows * (90 - rows) < 0.9 * 2000)
        twins = [y for y in shorter if (y.copies, y.num_fragments) == (x.copies, x.num_fragments)]
        assert len(twins) == pays


@pytest.mark.parametrize("n", [3, 8, 12, 24, 25])
def test_sum_codes_are_considered_where_blocks_compute_more(n):
    found = [x for x in candidates(setting(), n, approximate=False) if x.kind == "sum"]
    expected = {
        (d - m, m) for d in range(2, n) if n % d for m in range(1, min(d, 8) + 1)
    }  # fmt: skip
    assert {(x.num_stragglers, x.num_fragments) for x in found} == (expected if n <= 24 else set())
    assert all(x.method == "dense" and x.task.product == 0 for x in found)


def dropped(n):
    found = [x for x in candidates(setting(examples=n), n, approximate=True) if not x.exact]
    return sorted({n - x.wait_for for x in found if x.method == "dense"}), found


@pytest.mark.parametrize("n", [1, 2, 3, 13, 64])
def test_any_number_of_workers_may_be_dropped_up_to_half(n):
    numbers, found = dropped(n)
    assert numbers == list(range(1, n // 2 + 1))
    for x in found:
        assert x.task.need == Need(((n, 1),), x.wait_for)
        assert x.tolerated == n - x.wait_for
        assert x.num_stragglers == 0


@pytest.mark.parametrize("n", [65, 1000, 10_000])
def test_of_many_workers_steps_are_a_quarter(n):
    numbers, _ = dropped(n)
    assert numbers[:6] == [1, 2, 3, 4, 5, 6]
    assert 2 * numbers[-1] <= n < 2 * math.ceil(1.25 * numbers[-1] + 1)
    for low, high in zip(numbers[:-1], numbers[1:], strict=True):
        assert low + 1 <= high <= max(low + 1, 1.25 * low + 0.5)
    assert len(numbers) < 50  # the control: not all of them


def test_exact_designs_tolerate_their_stragglers():
    for x in candidates(setting(), 12, approximate=False):
        assert x.tolerated == x.num_stragglers
