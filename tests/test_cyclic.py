"""Cyclic codes against the definitions in the papers, and all patterns they promise to tolerate."""

import math

import numpy as np
import pytest
from code_cases import TOLERANCE, all_patterns, decodes, dense
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.codes import cyclic_mds, cyclic_repetition

CONSTRUCTORS = {"cyclic_repetition": cyclic_repetition, "cyclic_mds": cyclic_mds}
both = pytest.mark.parametrize("construct", CONSTRUCTORS.values(), ids=CONSTRUCTORS)


@both
@pytest.mark.parametrize("n", range(1, 10))
def test_all_patterns_of_at_most_s_stragglers_decode_and_no_run_of_s_plus_1(construct, n):
    patterns = all_patterns(n)
    for s in range(n):
        code = construct(n, s)
        B = dense(code)[..., 0]
        held = np.zeros((n, n), bool)
        for i in range(n):
            held[i, [(i + j) % n for j in range(s + 1)]] = True
        assert not B[~held].any()
        assert (np.abs(B[held]) > 1e-4).all()
        assert code.computation == pytest.approx(np.full(n, (s + 1) / n))
        missing = (~patterns).sum(1)
        survivors = patterns[missing <= s]
        weights = code.decoding_weights(survivors)
        assert decodes(code, weights, dense(code)).all(), (n, s)
        assert code.is_decodable(survivors).all(), (n, s)
        lost = held[: n if s + 1 < n else 1]  # all holders of one partition: data nobody has
        assert not code.is_decodable(~lost).any(), (n, s)


@pytest.mark.parametrize(("n", "s"), [(6, 2), (9, 3), (12, 4)])
def test_rows_of_the_random_code_are_orthogonal_to_s_checks_that_annihilate_ones(n, s):
    code = cyclic_repetition(n, s, seed=3)
    B = dense(code)[..., 0]
    np.testing.assert_array_equal(np.diag(B), 1)
    checks = np.linalg.svd(B)[2][n - s :]
    np.testing.assert_allclose(B @ checks.T, 0, atol=TOLERANCE)
    np.testing.assert_allclose(checks.sum(1), 0, atol=1e-7)
    assert np.linalg.matrix_rank(B) == n - s


def test_more_draws_make_the_worst_pattern_milder():
    one, ten = (cyclic_repetition(12, 3, num_draws=draws).worst_amplification for draws in (1, 10))
    assert ten < one / 2
    assert cyclic_repetition(12, 3, seed=1).worst_amplification != ten


def test_equal_seeds_make_equal_codes():
    first, again = (cyclic_repetition(10, 3, seed=7).encoding_matrix for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(("n", "s"), [(8, 1), (8, 3), (9, 2), (12, 5), (5, 4), (7, 0)])
def test_odd_n_minus_s_is_the_code_of_the_roots_of_unity(n, s):
    """Row i holds the coefficients of g(x) / g(1), whose zeros are s consecutive roots of unity."""
    assert (n - s) % 2 == 1
    exponents = np.arange((n - s + 1) // 2, (n + s - 1) // 2 + 1) if s else []
    g = np.atleast_1d(np.poly(np.exp(2j * np.pi * np.array(exponents) / n)))[::-1]
    assert np.abs(g.imag).max() < TOLERANCE
    row = np.zeros(n)
    row[: s + 1] = g.real / g.real.sum()
    B = np.array([np.roll(row, i) for i in range(n)])
    np.testing.assert_allclose(dense(cyclic_mds(n, s))[..., 0], B, atol=TOLERANCE)


@pytest.mark.parametrize(("n", "s"), [(8, 2), (9, 3), (12, 4), (7, 1)])
def test_even_n_minus_s_is_in_the_span_of_the_divided_half_integer_frame(n, s):
    angle = 2 * math.pi * (np.arange(n) + (0.5 if n % 2 == 0 else 0)) / n
    waves = [f((j - 0.5) * angle) for j in range(1, (n - s) // 2 + 1) for f in (np.cos, np.sin)]
    frame = np.stack(waves, axis=1) / np.cos(angle / 2)[:, None]
    for vector in [*dense(cyclic_mds(n, s))[..., 0], np.ones(n)]:
        residual = vector - frame @ np.linalg.lstsq(frame, vector)[0]
        assert np.abs(residual).max() < TOLERANCE
    other = np.roll(dense(cyclic_mds(n, s))[0, :, 0], 1)  # the control: not just any vector is
    assert np.abs(other - frame @ np.linalg.lstsq(frame, other)[0]).max() > 1e-3


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_any_numbers_make_a_real_mds_code(data):
    n = data.draw(st.integers(1, 20), "n")
    s = data.draw(st.integers(0, min(n - 1, 4)), "s")
    code = cyclic_mds(n, s)
    missing = data.draw(st.lists(st.integers(0, n - 1), max_size=s, unique=True), "missing")
    assert code.is_decodable(~np.isin(np.arange(n), missing))
    assert code.float32_error < 1e-3


def test_a_thousand_workers():
    code = cyclic_mds(1000, 2)
    survivors = np.ones(1000, bool)
    survivors[[3, 500]] = False
    assert code.is_decodable(survivors)


def test_a_code_unfit_for_float32_warns_and_names_a_better_one():
    with pytest.warns(UserWarning, match=r"may lose 8e-02 .* float32.*fractional_repetition"):
        code = cyclic_mds(64, 7)
    assert code.float32_error == pytest.approx(8e-2, rel=0.1)
    with pytest.warns(UserWarning, match="cyclic_repetition.*fractional_repetition"):
        cyclic_repetition(32, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "num_workers to be an integer of at least 1; got 0"),
        ((4, 4), "num_stragglers to be an integer from 0 to 3; got 4"),
        ((4, -1), "num_stragglers"),
        ((True, 0), "num_workers"),
    ],
)
@both
def test_bad_arguments_are_one_line(construct, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        construct(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("keyword", [{"seed": -1}, {"num_draws": 0}])
def test_bad_options_of_the_random_code(keyword):
    with pytest.raises(ValueError, match=next(iter(keyword))):
        cyclic_repetition(5, 2, **keyword)
