"""Conditioning by enumeration, and what is solved how often."""

import itertools
import math
import pickle

import numpy as np
import pytest
from code_cases import all_patterns, cyclic, decodes, dense, every_code

from jaxcode import conditioning, solve
from jaxcode.code import Code
from jaxcode.codes import fractional_repetition


@pytest.mark.parametrize(
    ("group", "m", "expected"),
    [(4, 2, "2.4"), (6, 3, "5.8"), (8, 4, "15"), (8, 6, "7.2"), (12, 6, "1.2e+02"), (3, 1, "1")],
)
def test_worst_condition_of_harmonic_groups(group, m, expected):
    code = fractional_repetition(group, group - m, num_fragments=m)
    assert f"{code.worst_condition:.2g}" == expected


@every_code
def test_worst_condition_is_the_worst_of_all_sets(code):
    B = dense(code)
    if code.block is None:
        sets = itertools.combinations(
            range(code.num_workers), code.num_workers - code.num_stragglers
        )
    else:
        groups = [np.flatnonzero(code.block == p) for p in range(code.num_partitions)]
        sets = [x for g in groups for x in itertools.combinations(g, code.num_fragments)]
    worst = 0
    for chosen in sets:
        values = np.linalg.svd(B[list(chosen)].reshape(len(chosen), -1), compute_uv=False)
        values = values[values > 1e-12 * values[0]]
        worst = max(worst, values[0] / values[-1])
    assert code.worst_condition == pytest.approx(worst, rel=1e-6)


def test_worst_condition_is_infinite_where_a_set_does_not_decode():
    parallel = np.zeros((3, 1, 2))
    parallel[:, 0] = [[1, 0], [2, 0], [0, 1]]
    assert Code(parallel, 1).worst_condition == math.inf
    assert Code(np.random.default_rng(0).normal(size=(5, 4)), 2).worst_condition == math.inf


def test_sampled_condition_is_a_reproducible_lower_bound(monkeypatch):
    exact = fractional_repetition(12, 6, num_fragments=6).worst_condition
    random = Code(np.random.default_rng(4).normal(size=(12, 1, 6)), 6)
    exact_random = random.worst_condition
    monkeypatch.setattr(conditioning, "SETS", 1)
    sampled = fractional_repetition(12, 6, num_fragments=6).worst_condition
    assert sampled == pytest.approx(exact)  # contiguous sets are the worst on a circle
    first, second = (pickle.loads(pickle.dumps(random)).worst_condition for _ in range(2))
    assert 1 < first == second <= exact_random


def test_groups_wider_than_a_machine_word_decode():
    code = fractional_repetition(150, 70, num_fragments=5)
    rng = np.random.default_rng(5)
    survivors = np.ones((20, 150), bool)
    for row in survivors:
        row[rng.choice(150, 70, replace=False)] = False
    weights = code.decoding_weights(survivors)
    assert decodes(code, weights, dense(code)).all()
    np.testing.assert_array_equal(weights[3], code.decoding_weights(survivors[3]))


def test_each_pattern_of_a_group_is_solved_once(monkeypatch):
    calls = []
    lstsq = np.linalg.lstsq
    monkeypatch.setattr(np.linalg, "lstsq", lambda *a, **k: calls.append(1) or lstsq(*a, **k))
    code = fractional_repetition(12, 1, num_fragments=2)
    survivors = np.ones((5, 12), bool)
    code.decoding_weights(survivors)  # four equal groups with everybody there
    assert len(calls) == 1
    survivors[1, 4] = survivors[2, 7] = False  # the second worker of its group, in two groups
    code.decoding_weights(survivors)
    code.is_decodable(survivors)
    code.decoding_error(survivors[::-1])
    assert len(calls) == 2
    pickle.loads(pickle.dumps(code)).decoding_weights(survivors)  # solutions are not sent along
    assert len(calls) == 4


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(solve, "CACHED_PATTERNS", 8)
    code = Code(cyclic(7, 2), 2)
    patterns = all_patterns(7)
    weights = code.decoding_weights(patterns)
    assert code._kinds[0]._solve.cache_info().currsize == 8
    np.testing.assert_array_equal(code.decoding_weights(patterns), weights)
