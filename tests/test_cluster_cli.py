"""`jaxcode train --cluster`: the README's drill and problem as they stand, and what is refused."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_cli import refused

from jaxcode.cli import main
from jaxcode.codes import fractional_repetition
from jaxcode.train import problem
from jaxcode.train.verification import difference, ordinary, without_absent

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LOOPBACK_ONLY = [name for _, name in socket.if_nameindex()] == ["lo"]
EXACT, DROPPED = 1e-5, 1e-4  # relative differences of parameters


def part(name):
    """A block of code in the README."""
    return re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README, re.DOTALL).group(1)


def on_ray(function):
    """Mark a test that starts Ray, which is to listen on no real network."""
    reason = "needs a network namespace with nothing but the loopback interface: unshare -n"
    function = pytest.mark.skipif(not LOOPBACK_ONLY, reason=reason)(function)
    function = pytest.mark.timeout(150)(function)
    return pytest.mark.ray(function)


def command(*arguments, **options):
    """Start the command line as a user does."""
    pytest.importorskip("ray")
    return subprocess.Popen(
        [sys.executable, "-m", "jaxcode", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def assert_nothing_left(session):
    """Assert that no process of a session that was started here lives on."""
    for _ in range(100):
        left = subprocess.run(
            ["ps", "-s", str(session), "-o", "stat=,args="], capture_output=True, text=True
        ).stdout.splitlines()
        left = [line for line in left if not line.startswith("Z")]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


@on_ray
def test_the_drill_in_the_readme_is_survived():
    words = shlex.split(part("drill"))
    assert words[0] == "jaxcode"
    process = command(*words[1:], env=os.environ | {"COLUMNS": "120"})
    out, err = process.communicate(timeout=140)
    assert process.returncode == 0, err
    exact, control = (float(x) for x in re.findall(r"relative (\S+)", out))
    assert exact < EXACT < DROPPED < control  # the control: late workers' data dropped
    assert float(re.search(r"without stragglers +(\S+)", out).group(1)) < EXACT
    assert re.search(r"test accuracy +9\d\.\d%", out)
    assert re.search(r"workers restarted +1 +of worker 2: 1", out)
    # Worker 0's messages are damaged in ten steps, and it is noticed in those that use them.
    rejected = re.search(r"messages rejected +(\d+) +worker 0, checksum: (\d+) *\n", out)
    assert rejected
    assert 1 <= int(rejected[1]) == int(rejected[2]) <= 10
    rows = [line.split() for line in out[out.index("worker reports") :].splitlines()[1:]]
    dropped = {row[0]: int(row[7]) for row in rows}
    assert dropped["1"] >= 1  # its late answer came, and was not used
    assert re.search(r"step 12\d: worker 0's message is rejected: it was damaged on the way", err)
    assert "worker 2 failed" in err
    assert "Traceback" not in err
    assert_nothing_left(process.pid)


@on_ray
def test_a_problem_of_yours_is_stopped_and_resumed(tmp_path):
    (tmp_path / "my_module.py").write_text(part("problem"))
    arguments = ["train", "my_module:problem", "--cluster", "--workers", 2, "--out", "run"]
    process = command(*arguments, "--steps", 100_000, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 5_000):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "continue with: jaxcode train --out run --resume --cluster" in err
    assert_nothing_left(process.pid)
    steps = len(metrics.read_text().splitlines())
    with metrics.open("a") as file:  # what a driver that was killed leaves behind
        file.write(json.dumps({"step": steps}) + "\n")
    arguments = ["train", "--out", "run", "--resume", "--cluster", "--topology", "master"]
    process = command(*arguments, "--steps", steps + 10, "--verify", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert float(re.search(r"relative (\S+)", out).group(1)) < EXACT
    assert re.search(r"^error +\d\.\d+", out, re.MULTILINE)
    lines = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert lines == list(range(steps + 10))


@on_ray
def test_the_lines_of_python_in_the_readme(tmp_path):
    (tmp_path / "my_module.py").write_text(part("problem"))
    lines = part("cluster").replace('address="auto"', "num_cpus=4, include_dashboard=False")
    assert "num_cpus=4" in lines
    script = (
        "import ray, optax, jaxcode as jc\n"
        "from jaxcode.cluster import Cluster\n"
        "import my_module\n"
        "from my_module import *\n"
        "globals().update(my_module.problem())\n"
        f"{lines}\n"
        "print('error', evaluate(params)['error'])\n"
    )
    (tmp_path / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "step 49: loss" in result.stdout


BAD_ARGUMENTS = [
    (["--topology", "peers"], "`--topology`: needs --cluster"),
    (["--inject", "kill:2@10"], "`--inject`: needs --cluster"),
    (["my_module:problem"], "`my_module:problem`: needs --cluster"),
    (["--cpus-per-worker", "1"], "`--cpus-per-worker`: needs --cluster"),
    (["--cluster", "--straggler-model", "none"], "--straggler-model none", "real"),
    (["--cluster", "my_module:problem"], "jaxcode train my_module:problem --cluster"),
    (["--cluster", "ray://10.0.0.1:10001"], "auto"),
    (["--cluster", "10.0.0.1"], "10.0.0.1:6379"),
    (["--cluster", ""], "`--cluster `"),
    (["--cluster", "--inject", ""], "kill:2@10"),
    (["--cluster", "--inject", " , "], "kill:2@10"),
    (["--cluster", "--deadline", "0"], "--deadline", "adaptive"),
    (["--cluster", "--deadline", "soon"], "--deadline", "'soon'"),
    (["--cluster", "--on-undecodable", "pray"], "pray"),
    (["--cluster", "--topology", "ring"], "ring"),
    (["--cluster", "--cpus-per-worker", "0"], "above 0"),
    (["--cluster", "--gpus-per-worker", "1.5"], "fraction below 1"),
    (["--cluster", "--gpus-per-worker", "nan"], "'nan'"),
    (["--cluster", "--workers", "1"], "workers >= stragglers + fragments = 2"),
    (["--cluster", "--resume"], "--out"),
    (["--cluster", "--checkpoint-every", "5"], "--out"),
]
# Beyond what needs no Ray to be refused.
WITH_RAY = [
    (["--inject", "kill"], "`--inject kill`: needs KIND:WORKER@STEP"),
    (["--inject", "melt:1@2"], "melt", "vanish"),
    (["--inject", "kill:4@2"], "worker 4", "0 to 3"),
    (["--inject", "kill:2@200"], "step 200", "0 to 199"),
    (["--inject", "stall:2@5-3"], "until"),
    (["--batch-size", "1", "--workers", "8"], "--batch-size 1", "4 blocks"),
    (["--data", "absent.npz"], "absent.npz"),
    (["absent:problem"], "No module named 'absent'"),
    (["json:problem"], "has no `problem`"),
    (["json"], "MODULE:NAME"),
    (["a b:c"], "MODULE:NAME"),
    (["my_module:problem", "--hidden", "8"], "`--hidden`", "my_module:problem"),
    (["my_module:problem", "--seed", "1"], "`--seed`"),
]


@pytest.mark.parametrize(("argv", "mentions"), [(a, m) for a, *m in BAD_ARGUMENTS])
def test_bad_arguments_are_one_line(argv, mentions, capsys):
    refused(capsys, ["train", *argv], *mentions)


@pytest.mark.parametrize(("argv", "mentions"), [(a, m) for a, *m in WITH_RAY])
def test_bad_arguments_of_a_cluster_are_one_line(argv, mentions, capsys, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    refused(capsys, ["train", *argv, "--cluster", "--out", "run"], *mentions)
    assert not list(tmp_path.iterdir())


def test_nothing_listens_at_the_address(capsys):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["train", "--cluster", f"127.0.0.1:{port}"]) == 2
    assert f"`--cluster 127.0.0.1:{port}`: cannot connect" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxcode.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(capsys, ["train", "--cluster"], 'pip install "jaxcode[ray]"')


def test_runs_with_and_without_a_cluster_are_told_apart(capsys, tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "run.json").write_text(json.dumps({"cluster": "digits", "config": {}}))
    refused(capsys, ["train", "--out", tmp_path, "--resume"], "add --cluster")
    (tmp_path / "run.json").write_text(json.dumps({"config": {}}))
    refused(capsys, ["train", "--cluster", "--out", tmp_path, "--resume"], "leave --cluster out")


GOOD = """
import numpy as np, optax
class problem:
    params = {"w": np.zeros(3, np.float32)}
    loss = staticmethod(lambda params, batch: batch @ params["w"])
    data = staticmethod(lambda block, step: np.ones((2, 3), np.float32))
    optimizer = optax.sgd(0.1)
"""
BROKEN = {
    "syntax": ("def problem(:", "importing broken failed: SyntaxError"),
    "raises": ("x = 1\nraise OSError('disk')", "OSError: disk", "broken.py, line 2"),
    "import": ("import absent_thing", "No module named 'absent_thing'", "line 1"),
    "missing": ("problem = {'params': 1, 'loss': abs}", "data, optimizer missing"),
    "unknown": (
        "problem = dict(params=1, loss=abs, data=abs, optimizer=1, optimiser=2, evaluate=None)",
        "problem has 'optimiser'; it may have params, loss, data, optimizer,",
    ),
    "function": ("def problem(): return 7", "params, loss, data, optimizer missing", "int"),
    "arguments": ("def problem(x): return x", "problem() failed: TypeError"),
    "nothing": ("problem = None", "NoneType"),
    "loss": (GOOD + "    loss = 3", "loss to be a function; got 3"),
    "data": (GOOD + "    data = [1]", "data to be a function"),
    "optimizer": (GOOD + "    optimizer = 0.1", "an Optax optimizer"),
    "params": (GOOD + "    params = {}", "tree of arrays; got {}"),
    "text": (GOOD + "    params = {'w': 'x'}", "tree of arrays"),
    "has_aux": (GOOD + "    has_aux = 1", "has_aux to be a bool; got 1"),
    "seed": (GOOD + "    seed = -1", "seed to be a whole number"),
    "evaluate": (GOOD + "    evaluate = staticmethod(lambda params: 3)", "numbers by name; got 3"),
    "evaluates": (GOOD + "    def evaluate(params): 1 / 0", "ZeroDivisionError", "line 8"),
}


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Write a module and be where it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    yield lambda text: (tmp_path / "broken.py").write_text(text)
    sys.modules.pop("broken", None)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_problem_is_one_line(name, imported, capsys):
    pytest.importorskip("ray")
    text, *mentions = BROKEN[name]
    imported(text)
    refused(capsys, ["train", "broken:problem", "--cluster"], "`broken:problem`", *mentions)


def test_a_problem_is_an_object_a_dictionary_or_a_function(imported):
    imported(GOOD + "keys = 'params', 'loss', 'data', 'optimizer'\n"
             "as_dict = {key: getattr(problem, key) for key in keys}\n"
             "def made(): return as_dict | {'seed': 3, 'has_aux': True}\n")  # fmt: skip
    for name in ("problem", "as_dict", "made"):
        found = problem.load(f"broken:{name}")
        assert found.params["w"].shape == (3,)
        assert (found.seed, found.has_aux) == ((3, True) if name == "made" else (None, False))
        assert found.evaluate is None


def test_blocks_are_the_shares_that_assign_cuts():
    from jaxcode.partitions import assign
    from jaxcode.train.datasets import load
    from jaxcode.train.training import Config, Trainer

    trainer = Trainer(Config(workers=7, stragglers=1, batch_size=32, hidden=(8,)), load())
    code = fractional_repetition(7, 1)
    chosen = problem.classifier(trainer, code)
    for step in (0, 40):  # of the first epoch, and of the second
        parts = assign(trainer.batch(step), code)
        for worker, block in enumerate(code.block):
            x, y = chosen.data(int(block), step)
            kept = parts.share[worker, 0] > 0
            np.testing.assert_array_equal(x, parts.examples[0][worker, 0][kept])
            np.testing.assert_array_equal(y, parts.examples[1][worker, 0][kept])


def quadratic():
    """Least squares of which the gradient is known, on blocks of two and of three examples."""
    import optax

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 5, 3)).astype(np.float32), rng.normal(size=(9, 5)).astype(np.float32)
    cut = (slice(0, 3), slice(3, 5))
    return x, y, problem.Problem(
        name="quadratic",
        params={"w": np.zeros(3, np.float32), "count": np.int32(1)},
        loss=lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2, batch[1]),
        data=lambda block, step: (x[step, cut[block]], y[step, cut[block]]),
        optimizer=optax.sgd(0.1),
        has_aux=True,
    )  # fmt: skip


def descent(x, y, rows):
    """Gradient descent written down: w -= 0.1 * mean of 2 (x w - y) x over some rows."""
    w = np.zeros(3)
    for step, kept in enumerate(rows):
        residual = x[step, kept] @ w - y[step, kept]
        w = w - 0.1 * 2 * residual @ x[step, kept] / len(residual)
    return {"w": w}


def test_ordinary_training_and_its_control_are_what_they_say():
    x, y, chosen = quadratic()
    everything = [np.arange(5)] * 6
    *_, params = ordinary(chosen, 2, 6)
    expected = descent(x, y, everything)
    assert difference({"w": params["w"]}, expected).relative < EXACT
    assert int(params["count"]) == 1
    code = fractional_repetition(
        4, 1
    )  # workers 0, 1 hold rows 0 1 and 2; workers 2, 3 rows 3 and 4
    absent = [set(), {1}, {0, 3}, set(), {2}, {0, 1}]
    rows = [[0, 1, 2, 3, 4], [0, 1, 3, 4], [2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 4], [3, 4]]
    *_, dropped = without_absent(chosen, code, absent)
    assert difference({"w": dropped["w"]}, descent(x, y, rows)).relative < EXACT
    assert difference({"w": dropped["w"]}, expected).relative > DROPPED


def test_keys_are_those_of_the_cluster():
    import dataclasses

    import jax

    x, y, chosen = quadratic()

    def loss(params, batch, key):
        rows, values = batch
        return ((rows * jax.random.normal(key, (1, 3))) @ params["w"] - values) ** 2

    chosen = dataclasses.replace(chosen, loss=loss, has_aux=False, seed=5)
    *_, params = ordinary(chosen, 2, 3)
    root, w = jax.random.key(5), np.zeros(3)
    for step in range(3):
        total = np.zeros(3)
        for block in range(2):
            key = jax.random.fold_in(jax.random.fold_in(root, step), block)
            rows, values = chosen.data(block, step)
            rows = rows * np.asarray(jax.random.normal(key, (1, 3)))
            total += 2 * (rows @ w - values) @ rows
        w = w - 0.1 * total / 5
    assert difference({"w": params["w"]}, {"w": w}).relative < EXACT
