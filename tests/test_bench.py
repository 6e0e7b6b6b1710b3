"""`jaxcode bench`: what it prints, and that the programs it times compute the same thing."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcode.bench import cases
from jaxcode.bench import command as bench
from jaxcode.bench.cases import QUICK, Pair
from jaxcode.bench.steps import Setting
from jaxcode.cli import main
from jaxcode.lowrank import LowRank, to_dense

GOALS = {"capture": {0.75}, "coding": {1.25}, "mesh": {1.05}, "product": set()}
DEVICE = 1e-5  # float32 on the device


def close(ours, theirs):
    ours, theirs = (jax.tree.map(np.asarray, tree) for tree in (ours, theirs))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=DEVICE, atol=DEVICE)
    assert any(np.abs(y).max() > 100 * DEVICE for y in jax.tree.leaves(theirs))


@pytest.fixture(scope="module")
def printed():
    """The JSON of each case, and what else was printed."""
    found = {}
    for case in bench.CASES:
        command = [sys.executable, "-c", f"import sys; {RUN}", "bench", "--only", case]
        found[case] = subprocess.Popen(
            [*command, "--quick", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    return {case: (*process.communicate(), process.returncode) for case, process in found.items()}


@pytest.fixture(scope="module")
def pairs():
    """The pairs of each case, built once."""
    return {case: list(build(QUICK)) for case, build in bench.CASES.items()}


RUN = "from jaxcode.cli import main; sys.exit(main())"


@pytest.mark.parametrize("case", bench.CASES)
def test_json_alone_is_on_standard_output(case, printed):
    out, err, code = printed[case]
    assert code == 0, err
    assert not err
    found = json.loads(out, parse_constant=pytest.fail)  # NaN and infinity are not JSON
    assert found["quick"] is True
    assert found["machine"]["devices"] == 8  # by itself, where there is one CPU
    fields = {field.name for field in dataclasses.fields(bench.Measurement)}
    for row in found["results"]:
        assert set(row) == fields
        assert row["case"] == case
        assert row["repeats"] == bench.QUICK_REPEATS
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert min(row["seconds"], row["seconds_against"]) > 0
        assert (row["goal"], row["met"]) == (None, None)
    assert found["results"]


@pytest.mark.parametrize("case", bench.CASES)
def test_the_goals_are_those_of_the_full_sizes(case, pairs):
    goals = {pair.goal for pair in pairs[case]} - {None}
    assert goals == GOALS[case]


def test_the_full_sizes():
    assert cases.FULL.layers == (784, 1024, 1024, 10)
    assert cases.FULL.rows == 32


def test_capture_compares_equal_gradients(pairs):
    for pair in pairs["capture"]:
        (value, grads), (expected, dense) = pair.ours(), pair.theirs()
        close((value, to_dense(grads, dense)), (expected, dense))
        assert any(isinstance(x, LowRank) for x in jax.tree.leaves(grads, is_leaf=is_low_rank))
        assert 0 < pair.details["numbers"] < pair.details["dense_numbers"]


def is_low_rank(leaf):
    return isinstance(leaf, LowRank)


def test_capture_runs_on_one_device(pairs):
    for pair in pairs["capture"]:
        assert all(len(x.devices()) == 1 for x in jax.tree.leaves((pair.ours(), pair.theirs())))


def test_coding_decodes_what_was_encoded_and_copies_as_many_bytes(pairs):
    for pair in pairs["coding"]:
        message, decoded = pair.ours()
        read = sum(x.nbytes for x in jax.tree.leaves(message))
        touched = pair.details["encode_bytes"] + pair.details["decode_bytes"]
        assert pair.theirs().nbytes == pair.details["copied_bytes"] == touched // 2
        assert touched > 8 * read  # eight messages are read, beside what is written
        if pair.name.startswith("factors"):
            (P, Q), *_ = (x for x in jax.tree.leaves(decoded, is_leaf=is_pair) if is_pair(x))
            assert P.shape[0] == Q.shape[0] == 4  # blocks


def is_pair(node):
    return isinstance(node, tuple) and len(node) == 2


def test_messages_decode_to_the_sum_of_the_blocks(pairs):
    dense, *_ = pairs["coding"]
    message, decoded = dense.ours()
    close(decoded, jax.tree.map(lambda x: 4 * x, message))  # four blocks with equal gradients


@pytest.mark.parametrize("case", ["mesh", "product"])
def test_steps_compute_the_same(case, pairs):
    for pair in pairs[case]:
        if not pair.name.startswith("decode product"):
            close(pair.ours(), pair.theirs())


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("scale", ["gradient", "loss"])
def test_uneven_groups_and_a_single_device(count, scale, monkeypatch):
    devices = jax.devices()[:count]
    monkeypatch.setattr("jaxcode.bench.steps.mesh_devices", lambda: devices)
    setting = Setting.on_mesh((6, 8, 5), 3)
    assert setting.code.num_workers == {1: 8, 5: 5}[count]
    close(setting.coded("dense")(), setting.uncoded(scale=scale)())


def test_flops_are_those_of_the_formula(pairs):
    *_, pair = pairs["product"]
    found = pair.details
    rows = 8  # of four blocks
    assert found["product_flops"] == 2 * rows * (12 * 16 + 16 * 10)
    assert found["backward_flops"] == 2 * 2 * (12 * 16 + 2 * 16 * 10)
    for name in ("product", "backward"):
        ratio = found[f"xla_{name}_flops"] / found[f"{name}_flops"]
        assert 0.9 < ratio < 1.5  # and a little elementwise work


def test_the_table_says_what_was_missed(capsys):
    assert main(["bench", "--quick", "--only", "coding", "--only", "mesh", "--repeats", "2"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    rows = [line for line in lines if line.startswith("| coding") or line.startswith("| mesh")]
    assert len(rows) == 5
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert "load average" in lines[-1]
    assert captured.err == ""


@pytest.mark.parametrize(("goal", "word"), [(1e-9, "missed"), (1e9, "yes")])
def test_goals_are_judged_by_the_median(goal, word):
    one = jnp.ones(3)
    pair = Pair("mesh", "ours", "theirs", lambda: one + 1, lambda: one + 2, goal=goal)
    result = bench.measure(pair, repeats=2)
    assert result.met is (word == "yes")
    assert bench.table([result]).splitlines()[-1].split("|")[-2].strip() == word


def test_pairs_take_turns_after_a_warm_up():
    calls = []
    pair = Pair("mesh", "", "", lambda: calls.append("a"), lambda: calls.append("b"))
    bench.measure(pair, repeats=4)
    assert calls[2 * bench.WARM_UP :] == list("abbaabba")
    assert sorted(calls[: 2 * bench.WARM_UP]) == ["a"] * bench.WARM_UP + ["b"] * bench.WARM_UP


BAD = [
    (["--repeats", "0"], "'0'"),
    (["--repeats", "-3"], "'-3'"),
    (["--repeats", "many"], "'many'"),
    (["--repeats", "2.5"], "'2.5'"),
    (["--repeats", "²"], "'²'"),
    (["--repeats"], "--repeats"),
    (["--only", "everything"], "'everything'"),
    (["--quik"], "--quik"),
    (["fast"], "fast"),
]


@pytest.mark.parametrize(("arguments", "mention"), BAD)
def test_bad_arguments_are_one_line(arguments, mention, capsys):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxcode: error: ")
    assert mention in captured.err


def test_help_describes_every_case(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {case} " in text for case in bench.CASES)
