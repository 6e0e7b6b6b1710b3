"""Loads against their formulas."""

import collections
import inspect

import jax
import numpy as np
import pytest
from code_cases import CODES

from jaxcode.codes import cyclic_mds, fractional_repetition, uncoded
from jaxcode.load import communication_load

Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("m", "method", "expected"),
    [
        (1, "dense", 784 * 1024),
        (2, "dense", 784 * 1024 / 2),
        (1, "factors", 32 * (784 + 1024)),
        (2, "factors", 32 * (784 + 1024) / 2),
        (1, "normal_form", 32 * (784 + 1024 - 32)),
        (2, "normal_form", 32 * (784 + 1024 - 32) / 2),
        (1, "ye_abbe", 784 * 1024),  # groups of two
        (2, "ye_abbe", 784 * 1024 / 3),  # groups of four, of which three must be heard
        (2, "power_sgd", 4 * (784 + 1024)),
    ],
)
def test_loads_of_the_schemes(m, method, expected):
    code = fractional_repetition(8, 1, num_fragments=m)
    load = communication_load(code, np.zeros((784, 1024)), method=method, rows=32)
    assert load.per_leaf == {"": expected}
    assert load.total == expected
    assert load.total_bytes == 8 * expected  # float64


@pytest.mark.parametrize("rows", [1, 19, 20, 21, 1000])
def test_factors_are_sent_only_where_they_are_shorter(rows):
    shapes = {"w": np.zeros((40, 40)), "b": np.zeros(7), "conv": np.zeros((3, 3, 4, 4))}
    load = communication_load(uncoded(4), shapes, method="factors", rows=rows)
    assert load.per_leaf == {"w": min(1600, 80 * rows), "b": 7, "conv": 144}
    assert load.total == sum(load.per_leaf.values())


@pytest.mark.parametrize("rank", [1, 4, 17])
def test_power_sgd_sends_two_factors_of_each_matrix_view(rank):
    shapes = {"w": (40, 30), "b": (30,), "conv": (3, 3, 8, 16), "s": 1.0}
    load = communication_load(cyclic_mds(8, 2), shapes, method="power_sgd", rank=rank)
    conv = min(3 * 3 * 8 * 16, rank * (3 + 3 * 8 * 16))
    assert load.per_leaf == {"w": min(1200, 70 * rank), "b": 30, "conv": conv, "s": 1}
    assert load.optimal == {}  # lossy: no bound on it


def test_published_comparison_of_the_schemes():
    """Per worker and parameter, (p, q) = (784, 1024), groups of s + m = 4 with s = m = 2."""
    code, weight, rho = fractional_repetition(8, 2, num_fragments=2), (784, 1024), 32
    found = {
        method: communication_load(code, weight, method=method, rows=rho).total
        for method in ("dense", "ye_abbe", "factors", "normal_form")
    }
    assert communication_load(uncoded(8), weight).total == 802_816
    assert communication_load(fractional_repetition(8, 2), weight).total == 802_816  # Tandon
    assert found == {
        "dense": 401_408,
        "ye_abbe": 401_408,
        "factors": 28_928,
        "normal_form": 28_416,
    }


def test_bytes_are_each_leafs_own():
    params = {
        "half": jax.ShapeDtypeStruct((8, 4), "bfloat16"),
        "single": np.zeros((8, 4), np.float32),
        "double": np.zeros(4),
        "plain": (8, 4),
    }
    load = communication_load(fractional_repetition(4, 1), params)
    assert load.bytes_per_leaf == {"half": 64, "single": 128, "double": 32, "plain": 128}
    assert load.total_bytes == 352


def test_leaves_are_named_by_their_path():
    params = {
        "layers": [{"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}, (np.zeros(()), None)],
        "scale": 1.0,
        0: Pair(jax.ShapeDtypeStruct((5, 2), "float32"), jax.numpy.ones(4)),
        "empty": {},
        "none": np.zeros((0, 3)),
    }
    load = communication_load(uncoded(2), params)
    assert load.per_leaf == {
        "layers/0/kernel": 6,
        "layers/0/bias": 3,
        "layers/1/0": 1,
        "scale": 1,
        "0/0": 10,
        "0/1": 4,
        "none": 0,
    }
    empty = communication_load(uncoded(2), {})
    assert (empty.per_leaf, empty.total, empty.optimal) == ({}, 0, {})


def test_total_agrees_with_jax_flattening():
    rng = np.random.default_rng(0)
    params = {f"layer{i}": [np.zeros(rng.integers(1, 9, size=i)), {"x": 2.0}] for i in range(5)}
    expected = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    assert communication_load(uncoded(3), params).total == expected


@pytest.mark.parametrize(
    ("code", "shapes", "kwargs", "message"),
    [
        ("pairs", {"w": "kernel"}, {}, "got str at w"),
        ("pairs", object(), {}, "got object at the top"),
        ("pairs", {}, {"method": "factor"}, "got 'factor'"),
        ("pairs", {}, {"method": "factors"}, "needs rows .* at least 1; got None"),
        ("pairs", {}, {"method": "factors", "rows": 0}, "got 0"),
        ("cyclic", {}, {"method": "factors", "rows": 3}, "needs a block code"),
        ("cyclic", {}, {"method": "normal_form", "rows": 3}, "needs a block code"),
        ("pairs", {}, {"method": "normal_form"}, "needs rows .* at least 1; got None"),
        ("pairs", {}, {"rows": -1}, "needs rows .* got -1"),
        ("pairs", {}, {"method": "power_sgd", "rank": 0}, "needs rank .* got 0"),
        ("pairs", {"w": (3, -1)}, {}, r"none negative; got \(3, -1\) at w"),
    ],
)
def test_loads_refuse(code, shapes, kwargs, message):
    with pytest.raises(ValueError, match=f"`communication_load` .*{message}"):
        inspect.unwrap(communication_load)(CODES[code], shapes, **kwargs)
