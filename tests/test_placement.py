"""Ye and Abbe's codes against the paper's polynomials, and any placement at all."""

import numpy as np
import pytest
from code_cases import PLACED, TOLERANCE, all_patterns, decodes, dense
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.codes import general_placement, polynomial


def polynomial_by_definition(n, s, m):
    """The recursion of Ye and Abbe with numpy's polynomials, rows scaled to norm 1."""
    d = s + m
    nodes = [sign * (1 + i / 2) for i in range(n // 2) for sign in (1, -1)]
    nodes = ([0.0] if n % 2 else []) + nodes
    B = np.zeros((n, n, m))
    for i in range(n):
        absent = [(i + j) % n for j in range(1, n - d + 1)]
        roots = [nodes[w] for w in absent]
        p = first = np.polynomial.Polynomial(np.polynomial.polynomial.polyfromroots(roots))
        x = np.polynomial.Polynomial([0, 1])
        for u in range(m):
            for w in range(n):
                B[w, i, u] = 0 if w in absent else p(nodes[w])
            c = p.coef[n - d - 1] if n > d else 0
            p = x * p - c * first
    return B / np.sqrt((B**2).sum((1, 2), keepdims=True))


@pytest.mark.parametrize("n", range(1, 10))
def test_polynomial_codes_decode_every_pattern_of_at_most_s_stragglers(n):
    patterns = all_patterns(n)
    for s, m in ((n - a - b, b) for a in range(n) for b in range(1, n - a + 1)):
        code = polynomial(n, s, num_fragments=m, allow_ill_conditioned=True)
        B = polynomial_by_definition(n, s, m)
        np.testing.assert_allclose(dense(code), B, atol=TOLERANCE)
        assert (code.load, code.num_fragments) == (s + m, m)
        survivors = patterns[(~patterns).sum(1) <= s]
        assert code.is_decodable(survivors).all(), (s, m)
        assert decodes(code, code.decoding_weights(survivors), B).all(), (s, m)
        if m == 1 or s + 1 == n:
            assert not code.is_decodable(patterns[(~patterns).sum(1) == s + 1]).all(), (s, m)


@pytest.mark.parametrize(("n", "d", "s", "m"), [(8, 4, 2, 2), (9, 5, 2, 3), (10, 4, 1, 3)])
def test_a_published_size_end_to_end(n, d, s, m):
    """Messages of L/m numbers give the sum back from any n - s workers."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(n, 5, m))  # fragment j of gradient p: gradients[p, :, j]
    code = polynomial(n, s, num_fragments=m)
    assert code.load == d
    messages = np.einsum("npm,plm->nl", dense(code), gradients)
    for missing in (range(s), rng.choice(n, s, replace=False)):
        survivors = ~np.isin(np.arange(n), list(missing))
        weights = code.decoding_weights(survivors)
        decoded = np.einsum("mn,nl->lm", weights, np.where(survivors[:, None], messages, 0))
        np.testing.assert_allclose(decoded, gradients.sum(0), atol=TOLERANCE)


@pytest.mark.parametrize(("n", "s", "m"), [(16, 4, 4), (20, 4, 4), (32, 4, 4)])
def test_sizes_that_lose_float32_are_refused_unless_asked_for(n, s, m):
    with pytest.raises(ValueError, match=r"`polynomial` needs .* may lose .*fractional_repetition"):
        polynomial(n, s, num_fragments=m)
    if n <= 20:
        with pytest.warns(UserWarning, match="may lose"):
            code = polynomial(n, s, num_fragments=m, allow_ill_conditioned=True)
        survivors = np.arange(n) >= s
        assert code.is_decodable(survivors)
        assert code.float32_error > 1e-3


@pytest.mark.parametrize(("s", "m"), [(1, 1), (0, 2), (1, 2), (0, 1)])
def test_uneven_placements_decode_every_pattern(s, m):
    code = general_placement(PLACED, s, num_fragments=m)
    held = np.zeros((6, 4), bool)
    for worker, partitions in enumerate(PLACED):
        held[worker, partitions] = True
    assert not dense(code)[~held].any()
    np.testing.assert_array_equal(code.replication, held.sum(0))
    patterns = all_patterns(6)
    survivors = patterns[(~patterns).sum(1) <= s]
    assert code.is_decodable(survivors).all()
    assert decodes(code, code.decoding_weights(survivors), dense(code)).all()
    np.testing.assert_array_equal(
        dense(general_placement(held, s, num_fragments=m)), dense(code), strict=True
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data())
def test_any_placement_with_enough_copies_decodes(data):
    n = data.draw(st.integers(2, 8), "n")
    m = data.draw(st.integers(1, min(3, n)), "m")
    s = data.draw(st.integers(0, n - m), "s")
    k = data.draw(st.integers(1, 6), "k")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31), "seed"))
    held = np.zeros((n, k), bool)
    for p in range(k):
        held[rng.choice(n, rng.integers(s + m, n + 1), replace=False), p] = True
    held[~held.any(1), 0] = True
    code = general_placement(held, s, num_fragments=m, shares=rng.random(k) + 0.1)
    missing = rng.choice(n, s, replace=False)
    assert code.is_decodable(~np.isin(np.arange(n), missing))
    assert code.computation == pytest.approx((held * code.shares).sum(1))


@pytest.mark.parametrize(
    ("assignment", "s", "m", "message"),
    [
        ([[0], [1]], 1, 1, "partition 0 on 1. Place it"),
        ([[0, 1], [1], [0, 1], [0]], 1, 3, "every partition on at least .* = 4 workers"),
        ([[0, 0], [0]], 0, 1, "assignment to be"),
        ([[-1], [0]], 0, 1, "assignment to be"),
        ([[0], []], 0, 1, "zero row for worker 1"),
        ([[0, 2], [2]], 0, 1, "got partition 1 held by 0"),
        ([], 0, 1, "assignment to be"),
        (np.ones((2, 2)), 0, 1, "assignment to be"),
        ([[True], [False]], 0, 1, "zero row"),
        ([[0], [0]], 2, 1, "num_stragglers to be an integer from 0 to 1"),
        ([[0], [0]], 0, 3, "num_fragments"),
    ],
)
def test_malformed_placements_are_one_line(assignment, s, m, message):
    with pytest.raises(ValueError, match=message) as raised:
        general_placement(assignment, s, num_fragments=m)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4, 4), "num_stragglers"), ((0, 0), "num_workers"), ((4, 3, 2), "from 0 to 2; got 3")],
)
def test_bad_sizes_of_a_polynomial_code(arguments, message):
    with pytest.raises(ValueError, match=message):
        polynomial(*arguments[:2], num_fragments=(*arguments, 1)[2])
