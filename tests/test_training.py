"""Training: as without stragglers, compiled once, resumed bit for bit, stopped cleanly."""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxcode.cli import main
from jaxcode.train import checkpoint, session
from jaxcode.train.datasets import Dataset
from jaxcode.train.schedule import MODELS
from jaxcode.train.training import Config, Diverged, Trainer, worker_mesh
from jaxcode.train.verification import difference, dropping_data, without_stragglers

ROOT = Path(__file__).parents[1]
EXACT, DROPPED = 1e-5, 1e-3  # relative differences of parameters after a few float32 steps


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    """Most of the time here is XLA's; one test below has it optimise as it does for users."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def clouds():
    """Three Gaussian classes as a `Dataset`."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120).astype(np.int32)
    x = (rng.normal(size=(120, 24)) + y[:, None]).astype(np.float32)
    return Dataset(x[:96], y[:96], x[96:], y[96:], 3, "clouds", "digest")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same as a file, with the options of a small run."""
    path = tmp_path_factory.mktemp("data") / "clouds.npz"
    clouds_ = clouds()
    np.savez(path, x=clouds_.x_train, y=clouds_.y_train)
    return ["--data", str(path), "--hidden", "12", "--batch-size", "20"]


def train(trainer, steps):
    """The states and the records of the first steps."""
    return zip(*trainer.steps(trainer.initial_state(), steps), strict=True)


CONFIGS = {
    "factors": {},
    "fragments": {"stragglers": 2, "fragments": 2, "straggler_model": "bursty"},
    "uneven": {"workers": 7, "method": "dense", "batch_size": 21, "straggler_model": "fixed"},
    "short": {"dropout": 0.4, "batch_size": 3, "straggler_model": "pareto"},
    "spare": {"workers": 6, "stragglers": 2, "straggler_model": "none"},
    "alone": {"workers": 1, "stragglers": 0},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_stragglers_make_no_difference(name):
    config = Config(**{"hidden": (12,), "batch_size": 24, **CONFIGS[name]})
    trainer = Trainer(config, clouds())
    states, records = train(trainer, 8)
    *_, reference = without_stragglers(trainer, 8)
    assert difference(states[-1].params, reference.params).relative < EXACT
    missing = 0 if config.straggler_model == "none" else config.stragglers
    for record in records:
        assert (~record.survivors).sum() == missing
    if missing:  # the control: were the code to do nothing, it would be seen
        *_, dropped = dropping_data(trainer, 8)
        assert difference(dropped.params, reference.params).relative > DROPPED


def test_the_difference_notices_one_step_of_other_data():
    trainer = Trainer(Config(hidden=(12,), batch_size=24), clouds())
    *_, reference = without_stragglers(trainer, 8)
    batch = trainer.batch
    trainer.batch = lambda step: batch(step + (step == 5))
    states, _ = train(trainer, 8)
    assert difference(states[-1].params, reference.params).relative > DROPPED


def test_the_loss_is_the_mean_over_the_global_batch():
    trainer = Trainer(Config(hidden=(12,), batch_size=21), clouds())
    _, records = train(trainer, 1)
    expected = trainer.loss(trainer.initial_state().params, trainer.batch(0)).mean()
    np.testing.assert_allclose(records[0].loss, expected, rtol=1e-5)


def test_one_program_serves_every_pattern(caplog):
    trainer = Trainer(Config(hidden=(12,), batch_size=24, straggler_model="uniform"), clouds())
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        _, records = train(trainer, 12)
    assert len({tuple(record.survivors) for record in records}) > 3
    compiled = [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert sum("_coded_step" in record.getMessage() for record in compiled) == 1


def test_training_learns_and_reports_traffic():
    config = Config(hidden=(64, 64), batch_size=24, stragglers=2, learning_rate=1e-2)
    trainer = Trainer(config, clouds())
    states, records = train(trainer, 40)
    assert records[-1].loss < 0.3 * records[0].loss
    assert trainer.accuracy(states[-1].params) > 0.9
    traffic = trainer.traffic(states[0].params)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(states[0].params))
    assert traffic.dense == traffic.ye_abbe == 4 * (numbers + 1)  # and the loss
    # Two blocks of twelve examples: 12 (24 + 64 - 12) in normal form and its 12 pivots,
    # 12 (64 + 64) as factors, 64 x 3 dense, and the vectors.
    factors = 12 * (24 + 64 - 12 + 1) + 12 * (64 + 64) + 64 * 3 + 64 + 64 + 3
    assert traffic.message == 4 * (factors + 1)
    assert 0 < traffic.lower_bound < traffic.message


@pytest.mark.parametrize(
    ("workers", "size"), [(1, None), (2, 2), (7, 7), (8, 8), (11, None), (12, 6), (100, 5)]
)
def test_the_mesh_divides_the_workers(workers, size):
    mesh = worker_mesh(workers)
    assert (mesh.size if mesh else None) == size


def test_a_step_that_is_not_finite_is_not_accepted():
    trainer = Trainer(Config(hidden=(12,), batch_size=24, learning_rate=1e30), clouds())
    seen = []
    with pytest.raises(Diverged, match="--learning-rate"):
        seen.extend(trainer.steps(trainer.initial_state(), 10))
    state, record = seen[-1]
    assert record.step == int(state.step) == len(seen)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def contents(directory):
    """All arrays of a run's checkpoint as bytes, and its metrics without the times."""
    path = checkpoint.latest(directory)
    config = json.loads((directory / "run.json").read_text())["config"]
    config["hidden"] = tuple(config["hidden"])
    like = Trainer(Config(**config), clouds()).initial_state()
    state = checkpoint.restore(path, like)
    state = state._replace(key=jax.random.key_data(state.key))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(state)], metrics


RESUMED = {
    "factors": ["--dropout", "0.3", "--stragglers", "3"],
    "dense": ["--method", "dense", "--fragments", "2", "--straggler-model", "bursty"],
}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory, data):
    """Directories of uninterrupted runs of 20 steps."""
    directory = tmp_path_factory.mktemp("whole")
    for name, options in RESUMED.items():
        run = str(directory / name)
        assert main(["train", *data, *options, "--steps", "20", "--out", run]) == 0
    return directory


@pytest.mark.parametrize("case", RESUMED)
def test_resume_is_bit_for_bit(case, data, whole_runs, tmp_path):
    whole, parts = whole_runs / case, tmp_path / "parts"
    assert main(["train", *data, *RESUMED[case], "--steps", "10", "--out", str(parts)]) == 0
    assert contents(parts) != contents(whole)
    assert main(["train", "--steps", "20", "--out", str(parts), "--resume"]) == 0
    assert contents(parts) == contents(whole)
    assert [path.name for path in sorted(parts.iterdir())] == [
        "checkpoint-00000020",
        "metrics.jsonl",
        "metrics.png",
        "run.json",
    ]


def test_resume_from_a_run_that_was_killed(data, whole_runs, tmp_path, monkeypatch, capsys):
    """Steps beyond the last checkpoint are taken again, and are in the metrics once."""
    killed = tmp_path / "killed"
    argv = ["train", *data, *RESUMED["factors"], "--steps", "20", "--out", str(killed)]
    with monkeypatch.context() as patch:
        on_step(patch, 7, interrupt_at_once)
        assert main([*argv, "--checkpoint-every", "3"]) == 130
    assert checkpoint.latest(killed).name == "checkpoint-00000006"
    assert len((killed / "metrics.jsonl").read_text().splitlines()) == 7
    assert main(["train", "--out", str(killed), "--resume", "--verify"]) == 0
    assert contents(killed) == contents(whole_runs / "factors")
    assert "without stragglers" in capsys.readouterr().out


def on_step(patch, step, action):
    """Do something when a step (from 0) draws its survivors."""
    original = Trainer.round

    def round_(self, number):
        if number == step:
            action()
        return original(self, number)

    patch.setattr(Trainer, "round", round_)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def interrupt_at_once():
    interrupt()
    interrupt()


def test_interrupted_without_a_directory(data, monkeypatch, capsys):
    on_step(monkeypatch, 3, interrupt)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["train", *data, "--steps", "10"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped while training, after step 4 of 10; nothing was" in capsys.readouterr().err


def test_interrupted_while_verifying(data, tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "my run")
    argv = ["train", *data, "--steps", "6", "--out", run, "--verify"]
    counts = iter(range(100))
    original = Trainer.batch

    def batch(self, step):
        if next(counts) == 10:
            interrupt()
        return original(self, step)

    monkeypatch.setattr(Trainer, "batch", batch)
    assert main(argv) == 130
    assert f"jaxcode train --out '{run}' --resume --verify" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["train", "--out", run, "--resume", "--verify"]) == 0


@pytest.mark.parametrize("step", [3, 0])
def test_a_diverging_run_keeps_its_last_good_step(step, data, tmp_path, monkeypatch, capsys):
    original = Trainer.batch

    def batch(self, number):
        x, y = original(self, number)
        return (np.full_like(x, np.nan) if number == step else x), y

    monkeypatch.setattr(Trainer, "batch", batch)
    run = tmp_path / "run"
    assert main(["train", *data, "--out", str(run)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"jaxcode: error: step {step + 1}: the loss is nan")
    if step:
        assert f"step {step} is kept in {run}" in last
        assert checkpoint.latest(run).name == f"checkpoint-{step:08d}"
        assert len((run / "metrics.jsonl").read_text().splitlines()) == step
    else:
        assert not run.exists()


def wait_for_lines(path, count, process):
    """Wait until a file has so many lines."""
    limit = time.monotonic() + 50
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_preemption_stop_cleanly_and_resume_bit_for_bit(number, data, tmp_path):
    """A real process, a real signal; then the same steps without the interruption."""
    jax.config.update("jax_disable_most_optimizations", False)
    run, whole = tmp_path / "run", tmp_path / "whole"
    argv = ["train", *data, "--straggler-model", "bursty", "--dropout", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxcode", *argv, "--steps", "1000000", "--out", str(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(run / "metrics.jsonl", 5, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=50)
    assert "on 8 cpu devices" in output
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert f"continue with: jaxcode train --out {run} --resume" in errors.splitlines()[-1]
    steps = str(int(checkpoint.latest(run).name.removeprefix("checkpoint-")) + 5)
    assert main(["train", "--out", str(run), "--resume", "--steps", steps]) == 0
    assert main([*argv, "--steps", steps, "--out", str(whole)]) == 0
    assert contents(run) == contents(whole)
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(
    ("flags", "chosen", "asked"),
    [
        ("", -1, [("jax_num_cpu_devices", 8)]),
        ("", 3, []),
        ("--xla_force_host_platform_device_count=2", -1, []),
    ],
)
def test_the_users_device_count_is_respected(flags, chosen, asked, monkeypatch):
    calls = []
    config = SimpleNamespace(
        jax_num_cpu_devices=chosen, update=lambda *values: calls.append(values)
    )
    monkeypatch.setenv("XLA_FLAGS", flags)
    with monkeypatch.context() as patch:
        patch.setattr(session.jax, "config", config)
        session._use_virtual_devices()
    assert calls == asked


def test_every_straggler_model_has_an_option():
    from jaxcode.cli import STRAGGLER_MODELS

    assert set(STRAGGLER_MODELS) == set(MODELS)
