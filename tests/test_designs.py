"""Designs, and the bytes of their messages against the formulas of the loads."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neutral import NEUTRAL

from jaxcode.codes import cyclic_mds, fractional_repetition, heterogeneous, uncoded
from jaxcode.designs import Conditions, Design, conditions, groups, message
from jaxcode.load import communication_load
from jaxcode.planning import plan
from jaxcode.shapes import leaf_shapes
from jaxcode.simulation import simulate
from jaxcode.stragglers import bimodal, pareto, shifted_exponential

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
    given = {"examples": 60, "seconds_per_example": 0.1, "bandwidth": 1e6}
    return conditions("simulate", SHAPES, **NEUTRAL | given | options)


@pytest.mark.parametrize("examples", [1, 7, 49, 60])
def test_rows_are_the_largest_partitions(examples):
    setting = checked(examples=examples, positions=5)
    assert isinstance(setting, Conditions)
    for k in (1, 3, 7, 49, 60):
        assert setting.rows(1 / k) == 5 * len(np.array_split(np.arange(examples), k)[0])


def test_what_factors_leave_to_the_decoder():
    """All products of the matrices in factors and in normal form, and of nothing else."""
    setting = checked(product_share=0.25)
    numbers = 784 * 1024 + 12 * 9 + 1024 + 3 * 3 * 16 * 32
    _, factors = message(LEAVES, "factors", 4)
    assert setting.product(factors) == pytest.approx(0.25 * (784 * 1024 + 12 * 9) / numbers)
    _, full_rank = message(LEAVES, "factors", 784)
    assert full_rank["small"] == "dense"
    for form in (full_rank, message(LEAVES, "dense", 4)[1], message(LEAVES, "power_sgd", 4)[1]):
        assert setting.product(form) == 0  # whoever sends it forms it
    assert checked(product_share=0).product(factors) == 0
    assert setting.batch_seconds == pytest.approx(6)
    assert checked(seconds_per_example=[0.1, 0.3]).batch_seconds == pytest.approx(12)


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
        ({"bandwidth": 0}, "bandwidth of at least 1e-30; got 0"),
        ({"bandwidth": [1.0, 0.0]}, "bandwidth of at least 1e-30; got 0"),
        ({"bandwidth": 1e-31}, "bandwidth of at least 1e-30; got 1e-31"),
        ({"bandwidth": 1e31}, "bandwidth .* from 0 to 1e.30; got 1e.31"),
        ({"bandwidth": [1.0, 1e31]}, "bandwidth .* from 0 to 1e.30, or one a worker; got"),
        ({"bandwidth": True}, "bandwidth .* got True"),
        ({"seconds_per_example": 1e31}, "seconds_per_example .* from 0 to 1e.30; got 1e.31"),
        ({"seconds_per_example": [1e31]}, "seconds_per_example .* got .1e.31"),
        ({"examples": 2**53 + 1}, "examples .* from 1 to 9007199254740992; got 9007199254740993"),
        ({"positions": 10**300}, "positions .* got 1000"),
        ({"master_bandwidth": 1e300}, "master_bandwidth .* from 1e-30 to 1e.30; got 1e.300"),
        ({"master_bandwidth": [1.0, 2.0]}, "master_bandwidth .* got .1.0, 2.0."),
        ({"decode_rate": -math.inf}, "decode_rate .* got -inf"),
        ({"deadline": 1e300}, "deadline .* got 1e.300"),
        ({"product_share": 1}, "product_share below 1; got 1"),
        ({"product_share": -0.1}, "product_share .* from 0 to 1; got -0.1"),
        ({"product_share": math.nan}, "product_share .* got nan"),
        ({"product_share": "a third"}, "product_share .* got 'a third'"),
        ({"product_share": True}, "product_share .* got True"),
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


EXTREMES = st.one_of(
    st.integers(-30, 30).map(lambda x: 10.0**x),
    st.integers(-300, 300).map(lambda x: 10.0**x),
    st.sampled_from([0.0, 5e-324, 1e-30, 1e30, 1.7e308, math.inf]),
)
AMOUNTS = st.one_of(
    st.integers(0, 15).map(lambda x: 10**x),
    st.integers(0, 300).map(lambda x: 10**x),
    st.sampled_from([1, 2**53, 2**53 + 1]),
)


@st.composite
def extreme(draw):
    """One argument far out, or all of them anywhere."""
    numbers = ("seconds_per_example", "bandwidth", "master_bandwidth", "decode_rate", "deadline")
    pool = {
        name: EXTREMES
        for name in (*numbers, "product_share", "slow", "rate", "scale", "probability")
    }
    pool |= {name: AMOUNTS for name in ("examples", "positions")}
    some = draw(st.sets(st.sampled_from(sorted(pool)), min_size=1))
    return {name: draw(pool[name]) for name in sorted(some)}


def outcome(slow=2.0, rate=2.0, scale=2.0, probability=None, **options):
    """Simulations and a plan, or the message of the error."""
    options = {"examples": 60, "seconds_per_example": 0.1, "bandwidth": 1e6} | options
    designs = [Design(fractional_repetition(4, 1), method=x) for x in ("dense", "factors")]
    designs += [Design(uncoded(4), wait_for=3), Design(cyclic_mds(4, 2))]
    try:
        options["pause"] = bimodal(0.0, slow, 0.5)
        options["slowdown"] = shifted_exponential(1.0, rate)
        options["network"] = pareto(1.5, scale)
        results = simulate(designs, {"w": (30, 20)}, steps=20, **options)
        return results, plan({"w": (30, 20)}, num_workers=4, probability=probability, **options)
    except ValueError as error:
        return str(error)


@given(extreme())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_numbers_far_out_give_a_result_or_one_error(options):
    """Warnings are errors: no product of theirs may overflow unseen."""
    found = outcome(**options)
    if isinstance(found, str):
        assert re.match(r"`\w+` needs .* (got|the best has) .*\. [A-Z].*\.$", found, re.DOTALL)
        assert any(name in found for name in options) or {"slow", "deadline"} & options.keys()
        return
    results, planned = found
    for result in results:
        assert not np.isnan(result.seconds).any()
        assert not math.isnan(result.mean)
        assert not any(math.isnan(x) for x in result.parts.values())
    for estimate in planned.rows:
        assert not any(math.isnan(x) for x in estimate[1:7])
    assert "nan" not in str(planned)


def test_the_largest_numbers_allowed_give_a_result():
    """The control: not everything far out is refused."""
    largest = {
        "examples": 2**53, "positions": 2**53, "seconds_per_example": 1e30, "bandwidth": 1e-30,
        "master_bandwidth": 1e-30, "decode_rate": 1e-30, "slow": 1.7e308,
        "scale": 1.7e308,
    }  # fmt: skip
    results, planned = outcome(**largest)
    assert all(result.mean >= 1e30 for result in results)
    assert planned.rows
    assert not isinstance(outcome(**largest, deadline=1e30), str)
    assert isinstance(outcome(**largest | {"seconds_per_example": 1.1e30}), str)
    assert isinstance(outcome(**largest | {"bandwidth": 0.9e-30}), str)
