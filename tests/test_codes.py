"""Each constructor against its definition, and all patterns it promises to tolerate."""

import inspect
import math
import pickle

import numpy as np
import pytest
from code_cases import TOLERANCE, all_patterns, decodes
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.code import Code
from jaxcode.codes import fractional_repetition, heterogeneous


def repetition_by_definition(n, s, m):
    B = np.zeros((n, n // (s + m), m))
    for p, group in enumerate(np.array_split(np.arange(n), n // (s + m))):
        for row, i in enumerate(group):
            turn = 2 * math.pi * row / len(group)
            columns = [math.sqrt(0.5)] if m % 2 else []
            for j in range(1, m // 2 + 1):
                frequency = j if m % 2 else j - 0.5
                columns += [math.cos(frequency * turn), math.sin(frequency * turn)]
            B[i, p] = math.sqrt(2 / m) * np.array(columns)
    return B


@pytest.mark.parametrize("n", range(1, 10))
def test_every_block_code_decodes_every_pattern_of_at_most_s_stragglers(n):
    patterns = all_patterns(n)
    for s, m in ((n - a - b, b) for a in range(n) for b in range(1, n - a + 1)):
        code = fractional_repetition(n, s, num_fragments=m)
        B = repetition_by_definition(n, s, m)
        np.testing.assert_allclose(code.encoding_matrix, B, atol=TOLERANCE)
        survivors = patterns[(~patterns).sum(1) <= s]
        weights = code.decoding_weights(survivors)
        assert decodes(code, weights, B).all(), (s, m)
        assert code.is_decodable(survivors).all(), (s, m)
        assert not weights[np.broadcast_to(~survivors[:, None], weights.shape)].any(), (s, m)
        wrong = weights.copy()
        wrong[:, 0, :] += 1e-6 * survivors  # the control: the check above is able to fail
        assert not decodes(code, wrong, B).any(), (s, m)


def slowest_step(speeds, groups):
    """The least time of a step with these groups: shares that make all groups take equally long."""
    return 1 / sum(min(speeds[i] for i in group) for group in groups)


def set_partitions(items):
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    for smaller in set_partitions(items[1:]):
        yield [[items[0]], *smaller]
        for i, group in enumerate(smaller):
            yield [*smaller[:i], [items[0], *group], *smaller[i + 1 :]]


@pytest.mark.parametrize(("s", "m"), [(0, 1), (1, 1), (1, 2), (2, 1), (3, 3)])
def test_blocks_for_unequal_speeds_are_the_fastest_there_are(s, m):
    rng = np.random.default_rng(5)
    for _ in range(3):
        speeds = rng.choice([1.0, 1.1, 2.0, 4.0, 5.0], size=7)
        code = heterogeneous(speeds, s, num_fragments=m)
        groups = [np.flatnonzero(code.block == p) for p in range(code.num_partitions)]
        assert min(map(len, groups)) >= s + m
        times = code.computation / speeds
        best = min(
            slowest_step(speeds, split)
            for split in set_partitions(list(range(7)))
            if min(map(len, split)) >= s + m
        )
        assert times.max() == pytest.approx(best)
        by_group = [times[group].max() for group in groups]  # all groups take equally long
        assert by_group == pytest.approx([best] * len(groups))
        assert code.shares.sum() == pytest.approx(1)
        survivors = all_patterns(7)
        assert code.is_decodable(survivors[(~survivors).sum(1) <= s]).all()


def test_speeds_that_come_in_groups_make_all_workers_equally_long():
    code = heterogeneous([30, 10, 30, 10, 20, 20, 10, 10], 1)
    np.testing.assert_allclose(code.computation / [30, 10, 30, 10, 20, 20, 10, 10], 1 / 70)
    equal = fractional_repetition(8, 1)  # the control: with equal shares the slow ones hold it up
    assert (equal.computation / 10).max() > 1.5 / 70


def test_equal_speeds_make_fractional_repetition():
    for n, s, m in [(8, 1, 1), (9, 2, 1), (9, 1, 2), (1, 0, 1)]:
        even, code = (
            fractional_repetition(n, s, num_fragments=m),
            heterogeneous([2] * n, s, num_fragments=m),
        )
        assert code.num_partitions == even.num_partitions
        np.testing.assert_allclose(code.shares, even.shares)


def test_one_fragment_takes_the_first_survivor_of_a_group_exactly():
    code = fractional_repetition(9, 2)
    survivors = np.array([0, 1, 1, 1, 1, 1, 0, 0, 1], bool)
    np.testing.assert_array_equal(
        code.decoding_weights(survivors), [[0, 1, 0, 1, 0, 0, 0, 0, 1]], strict=False
    )
    assert code.decoding_error(survivors) == 0


@pytest.mark.parametrize("stragglers", range(9))
def test_mean_error_of_random_stragglers_is_the_published_formula(stragglers):
    n, d = 8, 2
    code = fractional_repetition(n, d - 1)
    patterns = all_patterns(n)
    error = code.decoding_error(patterns[(~patterns).sum(1) == stragglers]).mean()
    lost = math.comb(n - d, stragglers - d) if stragglers >= d else 0
    assert error == pytest.approx(lost / math.comb(n, stragglers), abs=TOLERANCE)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_any_numbers_that_fit_make_a_code(data):
    n = data.draw(st.integers(1, 200), "n")
    m = data.draw(st.integers(1, min(n, 6)), "m")
    s = data.draw(st.integers(0, n - m), "s")
    code = fractional_repetition(num_workers=n, num_stragglers=s, num_fragments=m)
    sizes = np.bincount(code.block)
    assert (code.num_workers, code.num_partitions, code.load) == (n, n // (s + m), 1)
    assert (code.num_stragglers, code.num_fragments) == (s, m)
    assert len(sizes) == code.num_partitions
    assert s + m <= sizes.min() <= sizes.max() <= sizes.min() + 1
    assert (np.diff(code.block) >= 0).all()
    np.testing.assert_allclose((code.coefficients**2).sum(-1), 1, atol=TOLERANCE)
    if m == 1:
        assert (code.coefficients == 1).all()
    missing = data.draw(st.lists(st.integers(0, n - 1), max_size=s, unique=True), "missing")
    survivors = ~np.isin(np.arange(n), missing)
    assert code.is_decodable(survivors)


@pytest.mark.parametrize(("s", "m"), [(0, 1), (1, 1), (3, 2), (2, 3)])
def test_ten_thousand_workers_without_the_dense_matrix(s, m, monkeypatch):
    def refuse(self):
        raise AssertionError("the dense matrix was made")

    monkeypatch.setattr(Code, "encoding_matrix", property(refuse))
    n = 10_000
    code = fractional_repetition(n, s, num_fragments=m)
    assert code.partitions.nbytes + code.coefficients.nbytes <= 8 * n * (1 + m)
    survivors = np.ones(n, bool)
    survivors[np.random.default_rng(7).choice(n, s, replace=False)] = False
    weights = code.decoding_weights(survivors)
    assert code.is_decodable(survivors)
    assert code.decoding_error(survivors) <= 1e-18
    assert math.isfinite(code.worst_condition)
    assert len(pickle.dumps(code)) < 8 * n * (1 + m) + 8 * code.num_partitions + 1000
    shares = np.zeros((code.num_partitions, m, m))
    np.add.at(shares, code.block, weights.T[:, :, None] * code.coefficients)
    np.testing.assert_allclose(shares, np.broadcast_to(np.eye(m), shares.shape), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(0, 0), "`fractional_repetition` needs num_workers .* at least 1; got 0"),
        (lambda f: f(-4, 1), "num_workers .* got -4"),
        (lambda f: f(2.5, 1), r"num_workers .* got 2\.5"),
        (lambda f: f(True, 0), "num_workers .* got True"),
        (lambda f: f("8", 1), "num_workers .* got '8'"),
        (lambda f: f(8, -1), "num_stragglers .* from 0 to 7; got -1"),
        (lambda f: f(8, 8), "num_stragglers .* from 0 to 7; got 8"),
        (lambda f: f(1, 1), "num_stragglers .* from 0 to 0; got 1"),
        (lambda f: f(8, 1.0), r"num_stragglers .* got 1\.0"),
        (lambda f: f(8, False), "num_stragglers .* got False"),
        (lambda f: f(8, 6, num_fragments=3), "num_stragglers .* from 0 to 5; got 6"),
        (lambda f: f(8, 0, num_fragments=0), "num_fragments .* from 1 to 8; got 0"),
        (lambda f: f(8, 0, num_fragments=9), "num_fragments .* from 1 to 8; got 9"),
    ],
)
def test_impossible_numbers_name_the_valid_ones(call, message):
    with pytest.raises(ValueError, match=message):
        call(inspect.unwrap(fractional_repetition))


def test_numpy_integers_are_integers():
    code = inspect.unwrap(fractional_repetition)(np.int64(6), np.int32(1))
    assert repr(code) == repr(fractional_repetition(6, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: heterogeneous([], 0), "the number of speeds to be an integer of at least 1"),
        (lambda: heterogeneous([1, 0], 1), "speeds to be 2 finite numbers, all above 0"),
        (lambda: heterogeneous([1, math.nan], 1), "speeds"),
        (lambda: heterogeneous([1, math.inf], 1), "speeds"),
        (lambda: heterogeneous([1, -1], 1), "speeds"),
        (lambda: heterogeneous([[1, 2]], 1), "speeds"),
        (lambda: heterogeneous(["a", "b"], 1), "speeds"),
        (lambda: heterogeneous([1, 2], 2), "num_stragglers .* from 0 to 1"),
        (lambda: heterogeneous([1, 2], 0, num_fragments=3), "num_fragments"),
        (lambda: Code([[1], [1, 2]], 0), "`Code` needs .* rows of one length"),
        (lambda: Code([[1, 1]] * 2, 1, shares=[1, 0]), "shares to be 2 finite numbers, all above"),
        (lambda: Code([[1, 1]] * 2, 1, shares=[1]), "shares"),
        (
            lambda: fractional_repetition(4, 1).decoding_error([True] * 4, np.ones((1, 3))),
            "weights",
        ),
        (
            lambda: fractional_repetition(4, 1).decoding_error(
                [True, True, True, False], np.array([[0.0, 0, 0, 1]])
            ),
            "weights of 0 where a worker is missing",
        ),
    ],
)
def test_bad_speeds_shares_and_weights_are_one_line(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_shares_travel_with_the_code():
    code = Code([[1, 1]] * 2, 1, shares=[1, 3])
    assert code.shares.tolist() == [0.25, 0.75]
    assert code.computation.tolist() == [1, 1]
    assert pickle.loads(pickle.dumps(code)).shares.tolist() == [0.25, 0.75]
    assert not code.shares.flags.writeable


def test_the_mean_weighs_partitions_by_their_shares():
    code = heterogeneous([3, 3, 1, 1], 1)
    lost = np.array([False, False, True, True])
    assert code.decoding_weights(lost, beyond="mean")[0].tolist() == [0, 0, 4, 0]
    assert code.decoding_weights(lost, beyond="mean", sizes=[1, 1])[0].tolist() == [0, 0, 2, 0]
