"""Designs, and the bytes of their messages against the formulas of the loads."""

import math

import numpy as np
import pytest

from jaxcode.codes import cyclic_mds, fractional_repetition, heterogeneous, uncoded
from jaxcode.designs import Conditions, Design, conditions, groups, message
from jaxcode.load import communication_load
from jaxcode.shapes import leaf_shapes

SHAPES = {"w": (784, 1024), "small": (12, 9), "b": (1024,), "conv": (3, 3, 16, 32), "none": (0, 5)}
LEAVES = leaf_shapes(SHAPES)


@pytest.mark.parametrize("rows", [1, 4, 9, 100, 500, 784, 5000])
@pytest.mark.parametrize("m", [1, 3])
def test_bytes_are_those_of_the_loads(rows, m):
    code = fractional_repetition(8, 1, num_fragments=m)
    loads = {
        method: communication_load(code, SHAPES, method=method, rows=rows).bytes_per_leaf
        for method in ("dense", "factors", "normal_form")
    }
    dense, _ = message(LEAVES, "dense", rows)
    assert dense / m == pytest.approx(sum(loads["dense"].values()))
    whole, forms = message(LEAVES, "factors", rows)
    expected = 0.0
    for name, form in forms.items():
        least = min(loads["factors"][name], loads["dense"][name])
        saves = loads["normal_form"][name] < 0.9 * least
        assert (form == "normal form") == saves
        expected += loads["normal_form"][name] if saves else least
    assert whole / m == pytest.approx(expected)


def test_each_leaf_takes_the_form_that_suits_it():
    _, forms = message(LEAVES, "factors", 4)
    chosen = {
        "w": "factors", "small": "normal form", "b": "dense", "conv": "dense", "none": "dense"
    }  # fmt: skip
    assert forms == chosen
    assert message(LEAVES, "factors", 784)[1]["w"] == "dense"  # the control: full rank
    assert message({"w": LEAVES["w"]}, "factors", 784) == message({"w": LEAVES["w"]}, "dense", 1)


@pytest.mark.parametrize("rank", [1, 4, 500])
def test_power_sgd_is_that_of_the_loads(rank):
    load = communication_load(uncoded(4), SHAPES, method="power_sgd", rank=rank)
    assert message(LEAVES, "power_sgd", 1, rank)[0] == load.total_bytes


def checked(**options):
    given = {
        "examples": 60, "positions": 1, "seconds_per_example": 0.1, "bandwidth": 1e6,
        "master_bandwidth": math.inf, "decode_rate": math.inf, "slowdown": None, "pause": None,
        "network": None, "deadline": None,
    }  # fmt: skip
    return conditions("simulate", SHAPES, **given | options)


@pytest.mark.parametrize("examples", [1, 7, 49, 60])
def test_rows_are_the_largest_partitions(examples):
    setting = checked(examples=examples, positions=5)
    assert isinstance(setting, Conditions)
    for k in (1, 3, 7, 49, 60):
        assert setting.rows(1 / k) == 5 * len(np.array_split(np.arange(examples), k)[0])


def test_groups_hold_a_partition_each():
    for code in (fractional_repetition(11, 2), heterogeneous([3, 1, 1, 3, 2, 2, 1], 1)):
        found = [members for size in groups(code) for members in size.tolist()]
        assert sorted(i for members in found for i in members) == list(range(code.num_workers))
        for members in found:
            assert len({int(code.block[i]) for i in members}) == 1
        assert len(found) == code.num_partitions


def test_names_and_messages_used():
    assert Design(uncoded(4), name="mine").name == "mine"
    assert Design(cyclic_mds(8, 2)).name == "cyclic_mds s=2 m=1, dense"
    assert Design(uncoded(4), method="power_sgd", rank=2).name == "uncoded, power_sgd 2"
    used = [
        Design(x).messages_used
        for x in (uncoded(8), cyclic_mds(8, 2), fractional_repetition(8, 1, num_fragments=3))
    ]
    assert used == [8, 6, 6]
    assert Design(uncoded(8), wait_for=5).messages_used == 5


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (None, {}, "a code; got None"),
        (uncoded(4), {"method": "normal_form"}, "one of dense, factors, power_sgd; got 'normal"),
        (cyclic_mds(8, 2), {"method": "factors"}, "a block code for .*cyclic_mds"),
        (fractional_repetition(8, 1, num_fragments=2), {"method": "power_sgd"}, "one fragment"),
        (uncoded(4), {"wait_for": 0}, "wait_for to be an integer from 1 to 4; got 0"),
        (uncoded(4), {"wait_for": 5}, "from 1 to 4; got 5"),
        (uncoded(4), {"wait_for": True}, "got True"),
        (uncoded(4), {"rank": 0}, "rank .* got 0"),
        (uncoded(4), {"name": 3}, "name to be text; got 3"),
    ],
)
def test_designs_refuse(code, options, message):
    design = object.__new__(Design)  # without the types that tests check at run time
    design.__dict__.update(vars(Design(uncoded(1))) | {"code": code} | options)
    with pytest.raises(ValueError, match=f"`Design` needs .*{message}"):
        design.__post_init__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples .* got 0"),
        ({"examples": 2.5}, "examples .* got 2.5"),
        ({"positions": -1}, "positions .* got -1"),
        ({"seconds_per_example": math.nan}, "seconds_per_example .* got nan"),
        ({"seconds_per_example": math.inf}, "seconds_per_example .* got inf"),
        ({"seconds_per_example": [1.0, math.inf]}, "seconds_per_example .* got .1.0, inf."),
        ({"seconds_per_example": "1"}, "seconds_per_example .* got '1'"),
        ({"seconds_per_example": [[1.0], [1.0, 2.0]]}, "seconds_per_example"),
        ({"bandwidth": 0}, "bandwidth above 0; got 0"),
        ({"bandwidth": [1.0, 0.0]}, "bandwidth above 0; got 0"),
        ({"bandwidth": -1.0}, "bandwidth .* got -1.0"),
        ({"bandwidth": []}, "bandwidth"),
        ({"master_bandwidth": 0}, "master_bandwidth .* got 0"),
        ({"decode_rate": math.nan}, "decode_rate .* got nan"),
        ({"deadline": 0.0}, "deadline .* got 0.0"),
        ({"deadline": math.inf}, "deadline .* got inf"),
    ],
)
def test_conditions_refuse(options, message):
    with pytest.raises(ValueError, match=f"`simulate` needs {message}"):
        checked(**options)
