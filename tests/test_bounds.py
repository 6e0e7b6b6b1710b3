"""The lower bound against all sets of partitions, and who meets it."""

import itertools

import numpy as np
import pytest
from code_cases import CODES, TOLERANCE, all_patterns, cyclic, dense, every_code
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.bounds import fewest_workers, lower_bound, optimal_regime
from jaxcode.code import Code
from jaxcode.codes import (
    cyclic_mds,
    expander,
    fractional_repetition,
    general_placement,
    polynomial,
    uncoded,
)
from jaxcode.load import communication_load

SIZES = st.integers(1, 60)


def bound_by_enumeration(code, leaves, largest=None):
    """The definition, for a list of (p, q, r): the worst of all non-empty sets T.

    Or only of those with up to `largest` partitions.
    """
    held = (dense(code) != 0).any(-1)
    sets = all_patterns(code.num_partitions)[1:]
    workers = np.array([held[:, chosen].any(1).sum() for chosen in sets])
    size = sets.sum(1)
    ranks = [np.minimum(size * r, min(p, q)) for p, q, r in leaves]
    dimension = sum(rho * (p + q - rho) for rho, (p, q, _) in zip(ranks, leaves, strict=True))
    allowed = size <= (largest or len(size))
    return (dimension / (workers - code.num_stragglers))[allowed].max()


@every_code
@pytest.mark.parametrize("leaf", [(30, 20, 1), (30, 20, 7), (30, 20, 25), (5, 400, 3), (9, 1, 1)])
def test_bound_is_the_maximum_over_all_sets(code, leaf):
    expected = bound_by_enumeration(code, [leaf])
    assert lower_bound(code, leaf[:2], leaf[2]) == pytest.approx(expected)
    together = [leaf, (8, 8, 2), (6, 1, 1)]
    expected = bound_by_enumeration(code, together)
    shapes, ranks = [x[:2] for x in together], [leaf[2], 2, None]
    assert lower_bound(code, shapes, ranks) == pytest.approx(expected)
    assert lower_bound(code, tuple(shapes), tuple(ranks)) == pytest.approx(expected)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SIZES, SIZES, st.integers(1, 80), st.integers(1, 4), st.integers(0, 4), st.integers(0, 20))
def test_blocks_in_normal_form_meet_the_bound(p, q, r, m, s, more):
    code = fractional_repetition(s + m + more, s, num_fragments=m)
    rank = min(r, p, q)
    normal_form = rank * (p + q - rank) / m
    if np.bincount(code.block).min() == s + m:
        assert lower_bound(code, (p, q), r) == pytest.approx(normal_form)
        assert lower_bound(code, (p, q), None) == pytest.approx(p * q / m)
    assert lower_bound(code, (p, q), r) <= normal_form + TOLERANCE
    assert lower_bound(code, (p, q), r) <= lower_bound(code, (p, q), r + 1) + TOLERANCE


@every_code
def test_no_load_is_below_the_bound(code):
    p, q, rows = 40, 30, 4
    weight = {"w": np.zeros((p, q))}
    assert communication_load(code, weight).total >= lower_bound(code, (p, q), None) - TOLERANCE
    if code.block is not None:
        for method in ("factors", "normal_form"):
            load = communication_load(code, weight, method=method, rows=rows)
            assert load.total >= lower_bound(code, (p, q), rows) - TOLERANCE
            assert load.bounds["w"] == pytest.approx(lower_bound(code, (p, q), rows))
    ye_abbe = communication_load(code, weight, method="ye_abbe")
    assert ye_abbe.total >= lower_bound(code, (p, q), None) - TOLERANCE


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SIZES, SIZES, st.integers(1, 80), st.integers(1, 4), st.integers(0, 4), st.integers(0, 20))
def test_blocks_never_exceed_ye_abbe_which_is_optimal_at_full_rank(p, q, r, m, s, more):
    code = fractional_repetition(s + m + more, s, num_fragments=m)
    loads = {
        method: communication_load(code, (p, q), method=method, rows=r)
        for method in ("ye_abbe", "factors", "normal_form", "dense")
    }
    totals = {method: load.total for method, load in loads.items()}
    assert totals["normal_form"] <= totals["factors"] + TOLERANCE
    assert totals["factors"] <= totals["dense"] + TOLERANCE
    if code.replication.min() == s + m:
        assert totals["dense"] == pytest.approx(totals["ye_abbe"])
        assert totals["ye_abbe"] == pytest.approx(lower_bound(code, (p, q), None))
        if r < min(p, q):  # strictly: equal only at full rank
            assert totals["normal_form"] < totals["ye_abbe"]


def test_full_rank_bound_is_the_published_one():
    n, s = 9, 2  # cyclic: each partition on d = s + 1 workers, and one fragment
    assert lower_bound(Code(cyclic(n, s), s), (20, 30), None) == 20 * 30


def test_single_partitions_alone_bound_less():
    code, leaf = CODES["polynomial"], (30, 20, 2)
    found = lower_bound(code, leaf[:2], leaf[2])
    assert found == pytest.approx(bound_by_enumeration(code, [leaf]))
    assert found > 1.3 * bound_by_enumeration(code, [leaf], largest=1)
    # Another placement with the same d and s, and another bound.
    apart = Code(np.kron(np.eye(2), np.ones((4, 4))), 2)
    assert (apart.load, *apart.replication) == (code.load, *code.replication)
    assert lower_bound(apart, leaf[:2], leaf[2]) != pytest.approx(found)


def test_large_parameters_do_not_overflow():
    code, size = fractional_repetition(8, 1), 2**32
    assert lower_bound(code, (size, size), None) == float(size) ** 2
    assert lower_bound(code, (30, 20), 10**30) == 600


@pytest.mark.parametrize("n", range(1, 13))
def test_runs_are_the_worst_sets_of_cyclic_placements(n):
    rng = np.random.default_rng(n)
    for d, leaf in itertools.product(range(1, n + 1), [(30, 20, 2), (6, 6, None), (40, 9, 1)]):
        held = np.array([np.roll(np.arange(n) < d, i) for i in rng.permutation(n)])
        code = Code(held * 1.0, d - 1)
        p, q, r = leaf
        expected = bound_by_enumeration(code, [(p, q, r or min(p, q))])
        assert lower_bound(code, (p, q), r) == pytest.approx(expected)


def test_sixteen_partitions_are_enumerated_and_more_are_bounded_from_below():
    rng = np.random.default_rng(3)
    for k in (14, 17):
        held = rng.random((9, k)) < 0.4
        held[rng.integers(0, 9, (3, k)), np.arange(k)] = True
        code = Code(held * 1.0, 1)
        for leaf in [(30, 20, 2), (50, 50, 1)]:
            found = lower_bound(code, leaf[:2], leaf[2])
            best = bound_by_enumeration(code, [leaf])
            if k == 14:
                assert found == pytest.approx(best)
            else:
                singles = (held.sum(0).min() - 1, 9 - 1)
                assert found <= best + TOLERANCE
                p, q, r = leaf
                assert found >= r * (p + q - r) / singles[0] - TOLERANCE
                assert found >= p * q * (k * r >= min(p, q)) / singles[1] - TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_grown_sets_are_true_and_often_the_best(seed, monkeypatch):
    monkeypatch.setattr("jaxcode.bounds._ENUMERATED_PARTITIONS", 0)
    code = expander(12, 4, seed=seed)
    ratios = []
    for leaf in [(30, 20, 1), (30, 20, 4), (30, 20, 20), (200, 100, 2)]:
        found, best = lower_bound(code, leaf[:2], leaf[2]), bound_by_enumeration(code, [leaf])
        ratios.append(found / best)
    assert 0.9 < min(ratios) <= max(ratios) < 1 + TOLERANCE
    assert lower_bound(code, (30, 20), None) == pytest.approx(600 / code.replication.min())


def test_a_code_of_every_leaf_is_searched_once(monkeypatch):
    calls = []

    def counted(code):
        calls.append(code)
        return fewest_workers(code)

    monkeypatch.setattr("jaxcode.load.fewest_workers", counted)
    code = expander(16, 4)
    params = {str(i): (30 + i, 20) for i in range(40)}
    load = communication_load(code, params, rows=2)
    assert calls == [code]
    assert load.bounds == {i: lower_bound(code, shape, 2) for i, shape in params.items()}


def test_a_thousand_workers_have_a_bound():
    code = cyclic_mds(1000, 2)
    assert lower_bound(code, (300, 200), 1) == pytest.approx(
        max(min(t, 200) * (500 - min(t, 200)) / (t + 2 - 2) for t in range(1, 999))
    )


@pytest.mark.parametrize(
    ("code", "regime", "factors", "full"),
    [
        (uncoded(5), "every rank", True, True),
        (fractional_repetition(8, 1), "every rank", True, True),
        (fractional_repetition(8, 2, num_fragments=2), "every rank", True, True),
        (fractional_repetition(9, 3), "every rank", True, True),  # groups of 5 and 4
        (fractional_repetition(8, 1, num_fragments=2), "nowhere", False, False),
        (cyclic_mds(8, 2), "full rank only", None, True),
        (polynomial(8, 2, num_fragments=2), "full rank only", None, True),
        (general_placement([[0, 1]] * 5, 1, num_fragments=2), "nowhere", None, False),
        (expander(8, 3), "nowhere", None, False),
    ],
    ids=repr,
)
def test_the_regime_stated_is_the_regime_measured(code, regime, factors, full):
    assert regime in optimal_regime(code)
    weight = {"w": (30, 20)}
    assert communication_load(code, weight).optimal["w"] == full
    if factors is not None:
        for rank in range(1, 21):
            load = communication_load(code, weight, method="normal_form", rows=rank)
            assert load.optimal["w"] == factors, rank
    elif full:
        assert not communication_load(code, weight, rows=1).optimal["w"]


def test_no_regime_where_not_even_all_decode():
    code = Code([[1, 2], [1, 2]], 0)
    assert not code.is_decodable([True, True])
    assert "no bound applies" in optimal_regime(code)
    assert communication_load(code, (30, 20)).bounds == {}


@pytest.mark.parametrize(
    ("shape", "rank", "message"),
    [
        ((3, 4), 0, "rank .* at least 1; got 0"),
        ((3, 4), 1.5, "rank .* got 1.5"),
        ((3, 0), 1, "shape .* got 0"),
        ((3,), 1, "two-dimensional"),
        ((3, 4, 5), 1, "two-dimensional"),
        ((), 1, "one rank"),
        ([(3, 4)], 2, "one rank"),
        ([(3, 4), (5, 6)], [2], "one rank"),
        ([(3, 4), 5], [2, 2], "two-dimensional"),
        (3, 1, "one rank"),
        (3.5, None, "one rank"),
        ("ab", None, "one rank"),
        ((10**400, 2), None, "from 1 to"),
        (None, None, "one rank"),
    ],
)
def test_bounds_refuse(shape, rank, message):
    with pytest.raises(ValueError, match=f"`lower_bound` needs .*{message}"):
        lower_bound(CODES["pairs"], shape, rank)
