"""How much rounding is magnified: predictions against float32 arithmetic, and published tables."""

import itertools
import math
import warnings

import numpy as np
import pytest
from code_cases import CODES, all_patterns, dense

from jaxcode import conditioning
from jaxcode.code import Code
from jaxcode.codes import cyclic_mds, cyclic_repetition, fractional_repetition, polynomial


def float32_errors(code, survivors, length=200):
    """Relative errors of the decoded sum: gradients, messages and weights rounded to float32."""
    m = code.num_fragments
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(code.num_partitions, m, length)).astype(np.float32)
    B = dense(code).astype(np.float32)
    messages = np.einsum("ipj,pjl->il", B, gradients, dtype=np.float32)
    exact = gradients.astype(float).sum(0)
    weights = code.decoding_weights(survivors).astype(np.float32)
    decoded = np.einsum("tji,il->tjl", weights, messages, dtype=np.float32)
    error = np.linalg.norm((decoded - exact).reshape(len(survivors), -1), axis=1)
    return error / np.linalg.norm(exact)


def patterns_of(n, s, samples=300):
    """Random sets of s stragglers, all contiguous bursts, and evenly spread sets."""
    rng = np.random.default_rng(0)
    missing = [rng.choice(n, s, replace=False) for _ in range(samples)]
    missing += [(i + np.arange(s)) % n for i in range(n)]
    missing += [(i + np.arange(s) * (n // s)) % n for i in range(n)]
    survivors = np.ones((len(missing), n), bool)
    survivors[np.arange(len(missing))[:, None], missing] = False
    return survivors


def worst_by_definition(code):
    """The largest sqrt(sum D^2 ||B_i||^2 / (k m)) over all sets of exactly s stragglers."""
    B = dense(code).reshape(code.num_workers, -1)
    k, m = code.num_partitions, code.num_fragments
    target = np.tile(np.eye(m), k)
    worst = 0.0
    for missing in itertools.combinations(range(len(B)), code.num_stragglers):
        alive = np.setdiff1d(np.arange(len(B)), missing)
        D = np.linalg.pinv(B[alive].T, rcond=1e-12) @ target.T
        size = (np.linalg.norm(D, axis=1) * np.linalg.norm(B[alive], axis=1)) ** 2
        worst = max(worst, math.sqrt(size.sum() / (k * m)))
    return worst


@pytest.mark.parametrize("code", [c for c in CODES.values() if c.block is None], ids=repr)
def test_amplification_is_the_worst_over_all_sets(code):
    assert code.worst_amplification == pytest.approx(worst_by_definition(code), rel=1e-6)


def test_amplification_of_blocks_is_that_of_one_group():
    assert fractional_repetition(9, 2).worst_amplification == pytest.approx(1)
    code = fractional_repetition(8, 2, num_fragments=2)
    one = fractional_repetition(4, 2, num_fragments=2)
    assert code.worst_amplification == pytest.approx(worst_by_definition(one))


@pytest.mark.parametrize(
    "code",
    [
        cyclic_repetition(8, 2),
        cyclic_mds(12, 4),
        cyclic_repetition(10, 3, seed=2),
        polynomial(9, 2, num_fragments=3),
        fractional_repetition(8, 4, num_fragments=4),
    ],
    ids=repr,
)
def test_the_estimate_is_what_float32_loses(code):
    patterns = all_patterns(code.num_workers)
    survivors = patterns[(~patterns).sum(1) == code.num_stragglers]
    worst = float32_errors(code, survivors).max()
    assert code.float32_error / 8 < worst < 4 * code.float32_error


def test_a_code_that_does_not_decode_has_infinite_amplification():
    code = Code([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]], 1)
    assert not code.is_decodable([True, True, False, False])
    assert code.worst_amplification < math.inf  # any one may be missing
    assert Code([[1, 0], [1, 0], [0, 1], [1, 1]], 1).worst_amplification < math.inf
    assert Code([[1, 2], [1, 3]], 1).worst_amplification == math.inf
    assert Code([[1, 2], [1, 3]], 1).worst_condition == math.inf


def test_samples_are_reproducible_and_below_the_enumeration(monkeypatch):
    exact = cyclic_mds(14, 4).worst_amplification
    random = cyclic_repetition(14, 4, seed=3)
    every = random.worst_amplification
    monkeypatch.setattr(conditioning, "SETS", 50)
    sampled = [cyclic_mds(14, 4).worst_amplification for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert sampled[0] == pytest.approx(exact)  # the contiguous sets are its worst, and always there
    few = Code(random.encoding_matrix, 4).worst_amplification
    assert 0.01 * every < few < every


@pytest.mark.parametrize(
    ("n", "s", "median", "worst"),
    [(8, 1, 5e-8, 5e-8), (16, 3, 1e-7, 9e-7), (32, 3, 1e-7, 5e-6), (32, 7, 4e-7, 2e-3)],
)
def test_measured_rounding_of_cyclic_mds(n, s, median, worst):
    """The conditioning table for one fragment: cyclic MDS fails on bursts, blocks never."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = cyclic_mds(n, s)
    errors = float32_errors(code, patterns_of(n, s))
    assert median / 5 < np.median(errors) < 5 * median
    assert worst / 5 < errors.max() < 5 * worst
    blocks = float32_errors(fractional_repetition(n, s), patterns_of(n, s))
    assert blocks.max() < 3e-7


@pytest.mark.parametrize(
    ("n", "s", "median", "worst"), [(8, 1, 1e-7, 5e-7), (16, 3, 7e-7, 2e-3), (32, 3, 1e-6, 2e-4)]
)
def test_measured_rounding_of_random_cyclic_codes(n, s, median, worst):
    """One draw has a heavy tail, so the published worst is a matter of luck; ten draws cut it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes = [cyclic_repetition(n, s, seed=seed, num_draws=1) for seed in range(3)]
    single = [float32_errors(code, patterns_of(n, s)) for code in codes]
    assert median / 5 < np.median(single) < 10 * median
    chosen = float32_errors(cyclic_repetition(n, s), patterns_of(n, s))
    assert chosen.max() < max(errors.max() for errors in single)
    assert chosen.max() < worst


@pytest.mark.parametrize(
    ("n", "s", "m", "median", "worst"),
    [
        (8, 2, 2, 2e-7, 1e-6),
        (16, 2, 2, 6e-7, 5e-6),
        (16, 4, 4, 1e-3, 1e-2),
        (20, 4, 4, 8e-3, 1e-1),
        (26, 2, 2, 1e-6, 2e-5),
    ],
)
def test_measured_rounding_of_polynomial_codes(n, s, m, median, worst):
    """The conditioning table for several fragments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = polynomial(n, s, num_fragments=m, allow_ill_conditioned=True)
    errors = float32_errors(code, patterns_of(n, s))
    assert median / 5 < np.median(errors) < 5 * median
    assert worst / 6 < errors.max() < 5 * worst
    blocks = fractional_repetition(n, s, num_fragments=m)
    assert float32_errors(blocks, patterns_of(n, s)).max() < min(worst, 5e-6)
