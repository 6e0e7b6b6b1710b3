"""The command line: every bad argument and file is one line, exit code 2, and nothing written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxcode.cli import main

ROOT = Path(__file__).parents[1]
SMALL = ["--hidden", "8", "--batch-size", "16"]


@pytest.fixture(scope="module")
def arrays():
    """Three classes that a linear model can tell apart, x of shape (120, 2, 3)."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = rng.normal(size=(120, 2, 3)) + y[:, None, None] * np.array([1.0, -1.0, 2.0])
    return x.astype(np.float32), y


@pytest.fixture(scope="module")
def data(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("data") / "clouds.npz"
    np.savez(path, x=arrays[0], y=arrays[1])
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """The directory of a run of four steps."""
    path = tmp_path_factory.mktemp("run") / "done"
    assert main(["train", "--data", data, *SMALL, "--steps", "4", "--out", str(path)]) == 0
    return path


def snapshot(directory):
    """Every path below a directory, with the bytes of the files."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(directory).rglob("*"))
    }


def refused(capsys, argv, *mentions, code=2):
    """Assert that a command is refused in one line that mentions these things."""
    capsys.readouterr()
    assert main(list(map(str, argv))) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxcode: error: ")
    for mention in mentions:
        assert mention in captured.err, captured.err


BAD_ARGUMENTS = [
    ([], "COMMAND"),
    (["fly"], "fly"),
    (["train", "--wokers", "8"], "--wokers"),
    (["train", "--work", "8"], "--work"),
    (["train", "--workers", "0"], "--workers"),
    (["train", "--workers", "eight"], "'eight'"),
    (["train", "--workers", "1000000000"], "4096"),
    (["train", "--workers", "2.5"], "'2.5'"),
    (["train", "--stragglers", "-1"], "--stragglers"),
    (["train", "--stragglers", "8"], "workers >= stragglers + fragments = 9"),
    (["train", "--workers", "1"], "--workers 1 --stragglers 1"),
    (["train", "--fragments", "0"], "--fragments"),
    (["train", "--fragments", "8"], "= 9"),
    (["train", "--method", "magic"], "magic"),
    (["train", "--straggler-model", "weather"], "weather"),
    (["train", "--hidden"], "--hidden"),
    (["train", "--hidden", "16", "0"], "'0'"),
    (["train", "--hidden", "1000000", "1000000"], "parameters"),
    (["train", "--dropout", "1"], "--dropout"),
    (["train", "--dropout", "nan"], "'nan'"),
    (["train", "--learning-rate", "0"], "--learning-rate"),
    (["train", "--learning-rate", "inf"], "'inf'"),
    (["train", "--batch-size", "0"], "--batch-size"),
    (["train", "--batch-size", "1439"], "use at most 1438"),
    (["train", "--steps", "0"], "--steps"),
    (["train", "--seed", "-1"], "--seed"),
    (["train", "--seed", str(2**32)], "--seed"),
    (["train", "--checkpoint-every", "0", "--out", "x"], "--checkpoint-every"),
    (["train", "--checkpoint-every", "5"], "--out"),
    (["train", "--resume"], "--out"),
    (["train", "--out", ""], "--out"),
    (["train", "--data", ""], "--data"),
]


@pytest.mark.parametrize(("argv", "mention"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(argv, mention, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, argv, mention)
    if argv[:1] == ["train"] and "--out" not in argv and "--checkpoint-every" not in argv:
        refused(capsys, [*argv, "--out", "run"], *([] if "--resume" in argv else [mention]))
    assert snapshot(tmp_path) == {}


X, Y = np.zeros((20, 3)), np.arange(20) % 2
X = X + np.arange(60).reshape(20, 3)


def holding(values, *changes):
    """A copy with some entries replaced."""
    values = np.array(values, float)
    for index, value in changes:
        values[index] = value
    return values


BAD_DATA = {
    "no y": ({"x": X}, "y missing"),
    "no arrays": ({}, "x and y missing"),
    "other names": ({"images": X, "labels": Y}, "holds images, labels"),
    "lengths": ({"x": X, "y": Y[:-1]}, "(20, 3) and y (19,)"),
    "column": ({"x": X, "y": Y[:, None]}, "ravel"),
    "one-hot": ({"x": X, "y": np.eye(2)[Y]}, "argmax"),
    "x scalar": ({"x": np.float64(1), "y": Y}, "x ()"),
    "y scalar": ({"x": X, "y": np.int64(1)}, "y ()"),
    "no examples": ({"x": X[:0], "y": Y[:0]}, "at least two examples"),
    "one example": ({"x": X[:1], "y": Y[:1]}, "got 1"),
    "no features": ({"x": X[:, :0], "y": Y}, "feature"),
    "NaN in x": ({"x": holding(X, ((4, 1), np.nan)), "y": Y}, "the first in example 4"),
    "infinity in x": ({"x": holding(X, ((4, 1), np.inf)), "y": Y}, "`x`"),
    "NaN label": ({"x": X, "y": holding(Y, (7, np.nan))}, "example 7"),
    "negative label": ({"x": X, "y": holding(Y, (7, -1))}, "-1.0 in example 7"),
    "fraction": ({"x": X, "y": holding(Y, (7, 0.5))}, "0.5 in example 7"),
    "huge label": ({"x": X, "y": holding(Y, (7, 1e300))}, "example 7"),
    "text labels": ({"x": X, "y": np.array(["a", "b"] * 10)}, "dtype <U1"),
    "complex": ({"x": X + 1j, "y": Y}, "complex128"),
    "objects": ({"x": np.array([None] * 20), "y": Y}, "`--data"),
    "one class": ({"x": X, "y": 0 * Y + 5}, "two classes"),
    "too large": ({"x": X * 1e306, "y": Y}, "too large"),
    "too few": ({"x": X, "y": Y}, "--batch-size 64"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, tmp_path, capsys):
    contents, mention = BAD_DATA[case]
    np.savez(tmp_path / "bad.npz", **contents)
    before = snapshot(tmp_path)
    argv = ["train", "--data", tmp_path / "bad.npz", "--out", tmp_path / "run"]
    refused(capsys, argv, mention)
    assert snapshot(tmp_path) == before


def truncated(path, data):
    path.write_bytes(Path(data).read_bytes()[:-300])


def bare(path, data):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def damaged(path, data):
    content = bytearray(Path(data).read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)


BAD_FILES = {
    "missing": (lambda path, data: None, "no such file"),
    "directory": (lambda path, data: path.mkdir(), "a directory"),
    "empty": (lambda path, data: path.touch(), ".npz"),
    "text": (lambda path, data: path.write_text("x,y\n1,2\n"), ".npz"),
    "array": (bare, "bare array"),
    "truncated": (truncated, "bad.npz"),
    "damaged": (damaged, "damaged"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, tmp_path, data, capsys):
    make, mention = BAD_FILES[case]
    make(tmp_path / "bad.npz", data)
    before = snapshot(tmp_path)
    argv = ["train", "--data", tmp_path / "bad.npz", "--out", tmp_path / "run"]
    refused(capsys, argv, mention)
    assert snapshot(tmp_path) == before


def test_a_path_with_a_line_break_is_still_one_line(capsys):
    refused(capsys, ["train", "--data", "no\nsuch\nfile.npz"], "no such file.npz")


def test_directories_that_cannot_be_written(tmp_path, data, finished, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    train = ["train", "--data", data, *SMALL, "--out"]
    refused(capsys, [*train, file], "got a file")
    refused(capsys, [*train, file / "below"], "is not a directory")
    before = snapshot(finished)
    refused(capsys, [*train, finished], "--resume")
    assert snapshot(finished) == before
    assert file.read_text() == "mine"


def test_resume_needs_a_run(tmp_path, capsys):
    refused(capsys, ["train", "--resume", "--out", tmp_path / "absent"], "holds no run")
    refused(capsys, ["train", "--resume", "--out", tmp_path], "holds no run")
    assert snapshot(tmp_path) == {}


OTHER_RUNS = [
    (["--hidden", "128"], "hidden is 8, not 128"),
    (["--hidden", "8", "8"], "hidden is 8, not 8 8"),
    (["--seed", "3"], "seed is 0, not 3"),
    (["--workers", "6", "--fragments", "2"], "workers is 8, not 6, fragments is 1, not 2"),
    (["--method", "dense"], "method is factors, not dense"),
    (["--straggler-model", "fixed"], "straggler-model is uniform, not fixed"),
    (["--learning-rate", "0.5"], "learning-rate is 0.001, not 0.5"),
    (["--batch-size", "17"], "batch-size is 16, not 17"),
    (["--dropout", "0.5"], "dropout is 0.0, not 0.5"),
    (["--steps", "3"], "already at step 4"),
]


@pytest.mark.parametrize(("options", "mention"), OTHER_RUNS, ids=str)
def test_resume_refuses_another_run(options, mention, finished, capsys):
    before = snapshot(finished)
    refused(capsys, ["train", "--out", finished, "--resume", *options], mention)
    assert snapshot(finished) == before


def test_resume_refuses_other_data(tmp_path, finished, arrays, capsys):
    np.savez(tmp_path / "other.npz", x=arrays[0] + 1, y=arrays[1])
    argv = ["train", "--out", finished, "--resume", "--data", tmp_path / "other.npz"]
    refused(capsys, argv, "other.npz", "the data that the run began with")


def remove(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [remove, cut])
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_resume_refuses_a_damaged_directory(damage, name, tmp_path, finished, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    damage(run / name)
    before = snapshot(run)
    refused(capsys, ["train", "--out", run, "--resume", "--steps", "5"], str(run / name))
    assert snapshot(run) == before


def test_resume_refuses_any_damaged_file_of_the_checkpoint(tmp_path, finished, capsys):
    files = [path for path in finished.glob("checkpoint-*/**/*") if path.is_file()]
    assert len(files) > 5
    for damage in (remove, cut):
        for file in files:
            if damage is cut and file.stat().st_size == 0:
                continue  # an empty file cannot be cut
            run = shutil.copytree(finished, tmp_path / "run")
            damage(run / file.relative_to(finished))
            before = snapshot(run)
            argv = ["train", "--out", run, "--resume", "--steps", "5"]
            refused(capsys, argv, str(run / "checkpoint-00000004"), file.name)
            assert snapshot(run) == before
            shutil.rmtree(run)


def test_resume_refuses_another_models_checkpoint(tmp_path, finished, data, capsys):
    other = tmp_path / "other"
    argv = ["train", "--data", data, "--batch-size", "16", "--hidden", "4", "5", "--steps", "4"]
    assert main([*argv, "--out", str(other)]) == 0
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoint-00000004")
    refused(capsys, ["train", "--out", run, "--resume"], "no checkpoint")
    shutil.copytree(other / "checkpoint-00000004", run / "checkpoint-00000004")
    refused(capsys, ["train", "--out", run, "--resume"], "another run's", "hidden is 4 5, not 8")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("rich.progress", []),
        ("sklearn.datasets", []),
        ("orbax.checkpoint", ["--out", "run"]),
        ("matplotlib.figure", ["--out", "run"]),
    ],
)
def test_missing_extras(module, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    refused(capsys, ["train", *options], 'pip install "jaxcode[train]"', module.split(".")[0])
    assert snapshot(tmp_path) == {}


def test_metrics_and_table(finished, capsys):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["survivors"] == 7
        assert len(line["missing"]) == 1
        assert line["bytes_received"] == 7 * line["bytes_per_worker"] > 0
    assert (finished / "metrics.png").read_bytes().startswith(b"\x89PNG")
    # A run that is complete is only reported again.
    before = snapshot(finished)
    assert main(["train", "--out", str(finished), "--resume", "--verify", "--verbose"]) == 0
    assert snapshot(finished) == before
    captured = capsys.readouterr()
    for row in ("test accuracy", "without stragglers", "dense", "Ye-Abbe", "lower bound", "kernel"):
        assert row in captured.out
    assert "answered" not in captured.out


def run_module(*argv, module="jaxcode"):
    return subprocess.run(
        [sys.executable, "-m", module, *argv], cwd=ROOT, capture_output=True, text=True, timeout=55
    )


def test_as_a_module():
    """`python -m jaxcode` is the command; test_training trains with it."""
    wrong = run_module("train", "--workers", "0")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_help(capsys):
    assert main(["--help"]) == 0
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--workers", "--straggler-model", "--resume", "--verify", "--data"):
        assert option in text


def test_the_package_imports_no_extra():
    program = (
        "import sys, jaxcode, jaxcode.cli; "
        "print([m for m in ('matplotlib', 'flax', 'orbax', 'sklearn', 'rich', 'ray') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=55
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxcode ")


def test_bench_has_its_own_options(capsys):
    assert main(["bench", "--help"]) == 0
    assert "usage: jaxcode bench" in capsys.readouterr().out
