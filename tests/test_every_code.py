"""The gradient of a step through codes of every kind, and partitions of unequal shares."""

import numpy as np
import pytest
from code_cases import CODES
from problems import (
    DEVICE,
    missing,
    mlp_batch,
    mlp_params,
    mlp_values,
    relative_error,
    uncoded_value_and_grad,
)

import jaxcode as jc
from jaxcode.codes import bernoulli, expander, graph_code, heterogeneous
from jaxcode.partitions import partition_sizes


@pytest.mark.parametrize("name", CODES)
def test_the_gradient_is_the_uncoded_one(name):
    code = CODES[name]
    params, batch = mlp_params(), mlp_batch(23)
    stragglers = list(range(1, 1 + code.num_stragglers))
    survivors = ~np.isin(np.arange(code.num_workers), stragglers)
    assert code.is_decodable(survivors)
    value, grads = jc.coded_value_and_grad(mlp_values, code)(
        params, batch, code.decoding_weights(survivors)
    )
    want_value, want = uncoded_value_and_grad(params, batch)
    bound = max(DEVICE, 4 * code.float32_error)
    assert relative_error(value, want_value) < bound
    assert relative_error(grads, want) < bound
    survivors[-1 - code.num_stragglers :] = False  # the control: too many are missing
    if not code.is_decodable(survivors):
        weights = code.decoding_weights(survivors)
        _, wrong = jc.coded_value_and_grad(mlp_values, code)(params, batch, weights)
        assert relative_error(wrong, want) > 1e-3


@pytest.mark.parametrize("code", [expander(8, 3), graph_code(9, 3), bernoulli(8, 3)], ids=repr)
def test_an_approximate_gradient_errs_by_what_the_code_says(code):
    params, batch = mlp_params(), mlp_batch(24)
    survivors = np.arange(code.num_workers) >= 2
    weights = code.decoding_weights(survivors)
    _, grads = jc.coded_value_and_grad(mlp_values, code)(params, batch, weights)
    _, want = uncoded_value_and_grad(params, batch)
    shares = weights[0] @ code.encoding_matrix[..., 0]  # of each partition in the decoded sum
    parts = jc.assign(batch, jc.uncoded(code.num_partitions))
    assert not parts.padded
    total = {name: 0.0 for name in want}
    for p, share in enumerate(shares):
        part = {name: leaf[p, 0] for name, leaf in parts.examples.items()}
        for name, leaf in uncoded_value_and_grad(params, part)[1].items():
            total[name] += share / code.num_partitions * np.asarray(leaf, float)
    assert relative_error({name: grads[name] for name in want}, total) < DEVICE
    assert (relative_error(grads, want) > 1e-3) == (code.decoding_error(survivors) > 1e-9)


@pytest.mark.parametrize("method", ["dense", "factors"])
def test_blocks_of_unequal_shares(method):
    code = heterogeneous([1, 1, 2, 2, 5, 5, 1], 1)
    params, batch = mlp_params(), mlp_batch(40)
    sizes = partition_sizes(40, code.num_partitions, shares=code.shares)
    assert sizes.tolist() == [25, 10, 5]
    parts = jc.assign(batch, code)
    assert parts.share.sum(-1)[:, 0].round(6).tolist() == pytest.approx(
        code.computation.round(6).tolist()
    )
    _, want = uncoded_value_and_grad(params, batch)
    for stragglers in ([0], [4], [6], []):
        weights = code.decoding_weights(missing(code, *stragglers))
        _, grads = jc.coded_value_and_grad(mlp_values, code, method=method)(params, batch, weights)
        assert relative_error(grads, want) < DEVICE


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (10, [3, 1], [8, 2]),
        (0, [3, 1], [0, 0]),
        (1, [1, 5, 1], [0, 1, 0]),
        (7, [1, 1, 1], [3, 2, 2]),
        (100, [0.5, 0.3, 0.2], [50, 30, 20]),
        (3, [1e-9, 1], [0, 3]),
    ],
)
def test_sizes_follow_shares_to_the_largest_remainders(total, shares, sizes):
    found = partition_sizes(total, len(shares), shares=shares)
    assert found.tolist() == sizes
    assert found.sum() == total


def test_bad_shares_of_partitions():
    with pytest.raises(ValueError, match="shares to be 2 finite numbers, all above 0"):
        partition_sizes(10, 2, shares=[1, 0])
