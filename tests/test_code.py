"""Decoding against dense least squares, for all survivor patterns of every kind of code."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
from code_cases import (
    CODES,
    TOLERANCE,
    all_patterns,
    block_codes,
    decodes,
    dense,
    every_code,
    residuals,
    target,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.code import Code
from jaxcode.codes import fractional_repetition, uncoded


@every_code
def test_decodable_is_when_the_target_is_in_the_row_space(code):
    patterns, B = all_patterns(code.num_workers), dense(code)
    rows, rank = B.reshape(len(B), -1), np.linalg.matrix_rank
    expected = [
        bool(pattern.any())
        and rank(rows[pattern]) == rank(np.vstack([rows[pattern], target(code)]))
        for pattern in patterns
    ]
    decodable = code.is_decodable(patterns)
    np.testing.assert_array_equal(decodable, expected)
    np.testing.assert_array_equal(decodable, decodes(code, code.decoding_weights(patterns), B))
    assert decodable[(~patterns).sum(1) <= code.num_stragglers].all()


@block_codes
def test_block_codes_decode_with_m_survivors_in_every_group(code):
    patterns = all_patterns(code.num_workers)
    groups = code.block == np.arange(code.num_partitions)[:, None]
    answers = (patterns[:, None] & groups).sum(-1)
    expected = (answers >= code.num_fragments).all(-1)
    np.testing.assert_array_equal(code.is_decodable(patterns), expected)


@every_code
def test_weights_are_least_squares_and_the_error_is_theirs(code):
    patterns, B = all_patterns(code.num_workers), dense(code)
    rows, scale = B.reshape(len(B), -1), code.num_partitions * code.num_fragments
    weights, errors = code.decoding_weights(patterns), code.decoding_error(patterns)
    assert not weights[np.broadcast_to(~patterns[:, None], weights.shape)].any()
    np.testing.assert_allclose(residuals(code, weights, B) / scale, errors, atol=TOLERANCE)
    for pattern, D, error in zip(patterns, weights, errors, strict=True):
        best = np.linalg.lstsq(rows[pattern].T, target(code).T)[0].T if pattern.any() else D[:, :0]
        least = ((best @ rows[pattern] - target(code)) ** 2).sum() / scale
        assert error == pytest.approx(least, abs=TOLERANCE)
        lone = code.num_fragments == 1 and (
            code.block is not None or (rows[pattern] == 1).all(1).any()
        )
        if not lone:  # there one message is the answer, and is taken instead
            np.testing.assert_allclose(D[:, pattern], best, atol=TOLERANCE)


@every_code
def test_error_is_zero_where_decodable_and_one_where_nobody_is(code):
    patterns = all_patterns(code.num_workers)
    error = code.decoding_error(patterns)
    np.testing.assert_array_equal(error < 1e-15, code.is_decodable(patterns))
    assert error[0] == 1
    assert not code.decoding_weights(patterns[0]).any()


@pytest.mark.parametrize("sizes", [None, [3, 1, 0, 4, 3, 1], [0.1, 0.2, 0.3, 0.7, 0.1, 0.0]])
@pytest.mark.parametrize("m", [1, 2])
def test_mean_is_over_the_recovered_examples(sizes, m):
    code = fractional_repetition(12, 1, num_fragments=m)
    k = code.num_partitions
    sizes = None if sizes is None else sizes[:k]
    share = np.ones(k) / k if sizes is None else np.array(sizes) / sum(sizes)
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(k, 4))  # each the mean over its partition's examples
    payload = (gradients * share[:, None]).reshape(k, m, -1)
    messages = np.einsum("ipj,pjl->il", dense(code), payload)
    survivors = rng.random((200, 12)) < 0.5
    groups = code.block == np.arange(k)[:, None]
    recovered = (groups & survivors[:, None]).sum(-1) >= m
    weights = code.decoding_weights(survivors, beyond="mean", sizes=sizes)
    for D, these in zip(weights, recovered, strict=True):
        some = share[these].sum() > 0
        mean = np.average(gradients[these], axis=0, weights=share[these]) if some else np.zeros(4)
        np.testing.assert_allclose((D @ messages).reshape(-1), mean, atol=TOLERANCE)
        assert D.any() == some
    whole = recovered.all(1)
    assert 0 < whole.sum() < 200
    np.testing.assert_array_equal(weights[whole], code.decoding_weights(survivors[whole]))


@every_code
@pytest.mark.parametrize("uneven", [False, True])
def test_mean_rescales_until_shares_add_to_one(code, uneven):
    patterns = all_patterns(code.num_workers)
    sizes = 1 + uneven * np.arange(code.num_partitions)
    weights = code.decoding_weights(patterns, beyond="mean", sizes=sizes)
    some = weights.any((-2, -1))
    assert some[-1]
    assert not some[0]
    shares = np.einsum("ujn,npj->up", weights, dense(code)) / code.num_fragments
    np.testing.assert_allclose((shares @ sizes)[some], sizes.sum(), atol=TOLERANCE)
    if code.block is None and not uneven:  # a projection: the shares' mean is 1 - err
        kept = 1 - code.decoding_error(patterns)[:, None, None]
        np.testing.assert_allclose(weights * kept, code.decoding_weights(patterns), atol=TOLERANCE)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 4), st.integers(1, 3))
def test_any_matrix_survives_being_stored_sparsely(seed, n, k, m):
    rng = np.random.default_rng(seed)
    B = rng.normal(size=(n, k, m)) * (rng.random((n, k, 1)) < 0.5)
    B[rng.integers(n, size=k), range(k)] = 1
    B = np.concatenate([B, np.ones((m, k, m))])
    B = B[(B != 0).any((1, 2))]
    code = Code(B, 0)
    np.testing.assert_array_equal(code.encoding_matrix, B)
    np.testing.assert_array_equal(dense(code), B)
    assert code.load == (B != 0).any(-1).sum(1).max()


def test_rows_are_padded_with_their_own_first_partition():
    code = CODES["ragged"]
    expected = [[0, 1, 2], [1, 1, 1], [0, 0, 0], [2, 2, 2], [1, 2, 1]]
    np.testing.assert_array_equal(code.partitions, expected)
    np.testing.assert_array_equal(code.coefficients[4, :, 0], [1, 1.5, 0])
    assert code.block is None


def test_a_message_that_is_the_answer_is_taken_alone():
    weights = CODES["ragged"].decoding_weights(np.ones(5, bool))
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0, 0]])


def test_leading_axes_are_kept():
    code = CODES["two fragments"]
    survivors = np.random.default_rng(6).random((3, 4, 9)) < 0.8
    weights = code.decoding_weights(survivors)
    assert weights.shape == (3, 4, 2, 9)
    np.testing.assert_array_equal(weights[1, 2], code.decoding_weights(survivors[1, 2]))
    assert code.decoding_error(survivors).shape == code.is_decodable(survivors).shape == (3, 4)
    assert code.decoding_weights(survivors[:0]).shape == (0, 4, 2, 9)
    assert code.is_decodable(survivors[:0]).shape == (0, 4)
    np.testing.assert_array_equal(
        code.decoding_weights(survivors[0].tolist(), beyond="mean"),
        code.decoding_weights(survivors[0], beyond="mean"),
    )


@every_code
def test_codes_are_immutable_and_pickle(code):
    code.decoding_weights(np.ones(code.num_workers, bool))
    for twin in (pickle.loads(pickle.dumps(code)), copy.deepcopy(code)):
        assert repr(twin) == repr(code)
        for field in dataclasses.fields(code):
            np.testing.assert_array_equal(getattr(twin, field.name), getattr(code, field.name))
        with pytest.raises(ValueError, match="read-only"):
            twin.partitions[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            twin.coefficients[0, 0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        code.num_stragglers = 0


def test_a_callers_matrix_stays_writable_and_apart():
    B = np.ones((3, 1, 1))
    code = Code(B, 2)
    B[:] = 7
    assert (code.coefficients == 1).all()


def test_names_in_the_fields_form():
    assert repr(uncoded(4)) == "<Code uncoded [n=4, k=4, s=0, m=1]>"
    assert repr(CODES["cyclic"]) == "<Code cyclic [n=7, k=7, s=2, m=1]>"
    np.testing.assert_array_equal(uncoded(4).block, range(4))


NAN = np.array([[1.0, np.nan]])


@pytest.mark.parametrize(
    ("matrix", "s", "message"),
    [
        (np.ones(3), 0, "needs a real encoding_matrix"),
        (np.ones((0, 2)), 0, "needs a real encoding_matrix"),
        (np.ones((2, 2)) * 1j, 0, "complex128"),
        ([["a"]], 0, "needs a real encoding_matrix"),
        (NAN, 0, "finite encoding_matrix; got 1"),
        ([[1, 1], [0, 0], [1, 1]], 0, "zero row for worker 1"),
        ([[1, 1], [1, 0], [1, 1]], 2, "= 3 workers; got partition 1 held by 2"),
        ([[1, 0]], 0, "got partition 1 held by 0"),
        (np.ones((3, 1)), 3, "num_stragglers .* from 0 to 2; got 3"),
        (np.ones((1, 1, 2)), 0, "= 2 workers; got partition 0 held by 1"),
    ],
)
def test_matrices_that_are_no_code_are_refused(matrix, s, message):
    with pytest.raises(ValueError, match=message):
        Code(matrix, s)


@pytest.mark.parametrize("call", ["decoding_weights", "decoding_error", "is_decodable"])
@pytest.mark.parametrize(
    "survivors",
    [np.ones(8), np.ones(8, int), np.ones(7, bool), np.array(True), np.ones((8, 1)) > 0],
)
def test_survivors_must_be_bool_with_one_entry_a_worker(call, survivors):
    method = inspect.unwrap(getattr(Code, call))
    with pytest.raises(ValueError, match=rf"`Code.{call}` needs survivors .*\(..., 8\)"):
        method(CODES["pairs"], survivors)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"beyond": "zero"}, "got 'zero'"),
        ({"beyond": "mean", "sizes": [1, 2, 3]}, "needs sizes to be 4"),
        ({"beyond": "mean", "sizes": [1, 2, 3, -1]}, "none negative"),
        ({"beyond": "mean", "sizes": [0, 0, 0, 0]}, "not all 0"),
        ({"beyond": "mean", "sizes": [1, 2, 3, np.inf]}, "finite"),
        ({"beyond": "mean", "sizes": ["1", "2", "3", "4"]}, "needs sizes"),
    ],
)
def test_modes_and_sizes_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(Code.decoding_weights)(CODES["pairs"], np.ones(8, bool), **kwargs)
