"""Loads against their formulas, and the lower bound against all sets of partitions."""

import collections
import inspect
import itertools

import jax
import numpy as np
import pytest
from code_cases import CODES, TOLERANCE, cyclic, dense, every_code
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.code import Code
from jaxcode.codes import fractional_repetition, uncoded
from jaxcode.load import Load, communication_load, lower_bound

SIZES = st.integers(1, 60)
Pair = collections.namedtuple("Pair", "first second")


def bound_by_enumeration(code, leaves):
    """The definition, for a list of (p, q, r): the worst of all non-empty sets T."""
    held = (dense(code) != 0).any(-1)
    worst = 0
    for bits in itertools.product([False, True], repeat=code.num_partitions):
        workers = held[:, list(bits)].any(1).sum()
        if any(bits):
            ranks = [min(sum(bits) * r, p, q) for p, q, r in leaves]
            dimension = sum(
                rho * (p + q - rho) for rho, (p, q, _) in zip(ranks, leaves, strict=True)
            )
            worst = max(worst, dimension / (workers - code.num_stragglers))
    return worst


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
        load = communication_load(code, weight, method="factors", rows=rows)
        assert load.total >= lower_bound(code, (p, q), rows)


def test_full_rank_bound_is_the_published_one():
    n, s = 9, 2  # cyclic: each partition on d = s + 1 workers, and one fragment
    assert lower_bound(Code(cyclic(n, s), s), (20, 30), None) == 20 * 30


def test_many_partitions_give_a_bound_from_single_ones_and_all():
    code, leaf = Code(cyclic(14, 3), 3), (30, 20, 2)
    coarse = lower_bound(code, leaf[:2], leaf[2])
    assert coarse == pytest.approx(max(2 * 48 / (4 - 3), 600 / (14 - 3)))
    assert coarse <= bound_by_enumeration(code, [leaf]) + TOLERANCE


@pytest.mark.parametrize(
    ("m", "method", "expected"),
    [
        (1, "dense", 784 * 1024),
        (2, "dense", 784 * 1024 / 2),
        (1, "factors", 32 * (784 + 1024)),
        (2, "factors", 32 * (784 + 1024) / 2),
    ],
)
def test_loads_of_the_schemes(m, method, expected):
    code = fractional_repetition(8, 1, num_fragments=m)
    load = communication_load(code, np.zeros((784, 1024)), method=method, rows=32)
    assert load == Load({"": expected}, expected)


@pytest.mark.parametrize("rows", [1, 19, 20, 21, 1000])
def test_factors_are_sent_only_where_they_are_shorter(rows):
    shapes = {"w": np.zeros((40, 40)), "b": np.zeros(7), "conv": np.zeros((3, 3, 4, 4))}
    load = communication_load(uncoded(4), shapes, method="factors", rows=rows)
    assert load.per_leaf == {"w": min(1600, 80 * rows), "b": 7, "conv": 144}
    assert load.total == sum(load.per_leaf.values())


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
    assert communication_load(uncoded(2), {}) == Load({}, 0)


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
    ],
)
def test_loads_refuse(code, shapes, kwargs, message):
    with pytest.raises(ValueError, match=f"`communication_load` .*{message}"):
        inspect.unwrap(communication_load)(CODES[code], shapes, **kwargs)


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
    ],
)
def test_bounds_refuse(shape, rank, message):
    with pytest.raises(ValueError, match=f"`lower_bound` needs .*{message}"):
        lower_bound(CODES["pairs"], shape, rank)
