"""Recordings from arrays and files, and what a broken file says."""

import numpy as np
import pytest

from jaxcode.seconds import draw, recording
from jaxcode.stragglers import trace

RECORDED = np.array([[1.0, 2.5, 3.0], [4.0, np.inf, 6e-3]])


@pytest.mark.parametrize(
    "text",
    [
        "1,2.5,3\n4,inf,0.006\n",
        "worker 0,worker 1,worker 2\n1,2.5,3\n4,inf,0.006",
        "\ufeffa,b,c\r\n\r\n 1 , 2.5 , 3.0\r\n4,Infinity,6e-3\r\n\r\n",
        '"a","b","c, the last"\n1,2.5,3\n4,inf,0.006\n',
    ],
)
def test_csv(tmp_path, text):
    path = tmp_path / "seconds.csv"
    path.write_text(text, encoding="utf-8", newline="")
    np.testing.assert_array_equal(recording("trace", path), RECORDED)
    np.testing.assert_array_equal(recording("trace", str(path)), RECORDED)


def test_npz(tmp_path):
    path = tmp_path / "seconds.NPZ"
    with path.open("wb") as file:
        np.savez(file, whatever=RECORDED)
    np.testing.assert_array_equal(recording("trace", path), RECORDED)
    with path.open("wb") as file:
        np.savez_compressed(file, other=np.zeros(3), seconds=RECORDED)
    np.testing.assert_array_equal(recording("trace", path), RECORDED)
    replay = trace(path)(np.random.default_rng(0), (3, 3))
    np.testing.assert_array_equal(replay, RECORDED[[0, 1, 0]])


def test_one_column_and_one_row_keep_two_axes(tmp_path):
    path = tmp_path / "one.csv"
    for text, shape in [("1\n2\n", (2, 1)), ("1,2\n", (1, 2)), ("7", (1, 1))]:
        path.write_text(text)
        assert recording("trace", path).shape == shape


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.csv", None, "cannot read '.*gone.csv': it does not exist"),
        ("empty.csv", b"", "it has no row of numbers"),
        ("header.csv", b"a,b\n", "it has no row of numbers"),
        ("comments.csv", b"# 1\n# 2\n", "it has no row of numbers|got shape"),
        ("word.csv", b"1,2\n3,late\n", "'late'"),
        ("gap.csv", b"1,2\n3,\n", "convert string ''"),
        ("ragged.csv", b"1,2\n3\n", "number of columns"),
        ("nan.csv", b"1,2\n3,nan\n", "got 1 negative or NaN"),
        ("negative.csv", b"1,2\n3,-1\n", "got 1 negative or NaN"),
        ("binary.csv", bytes(range(128, 256)), "cannot read"),
        ("semicolon.csv", b"1;2\n3;4\n", "convert string '3;4'"),
        ("other.txt", b"1,2\n", "the path of a .csv or .npz file"),
        ("text.npz", b"1,2\n", "cannot read"),
        ("nothing.npz", b"", "cannot read"),
        ("folder.csv", "folder", "cannot read"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        trace(path)
    assert str(raised.value).startswith("`trace` needs ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones((2, 2)), "b": np.ones((2, 2))}, 'none of them called "seconds"'),
        ({"a": np.array([[None, {}]])}, "allow_pickle|cannot read"),
        ({"a": np.ones(3)}, r"got shape \(3,\)"),
        ({"a": np.ones((2, 2)) * 1j}, "got complex128"),
        ({}, "holds 0 arrays"),
    ],
)
def test_other_archives_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        trace(tmp_path / "x.npz")


def test_a_truncated_archive_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, seconds=np.ones((20, 20)))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ValueError, match="cannot read"):
        trace(path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3.0, "to be a latency model, a function of a generator and a shape; got 3.0"),
        (
            lambda rng, shape: np.full(shape, np.nan),
            "to draw seconds of shape .* 6 negative or NaN",
        ),
        (lambda rng, shape: np.ones(shape) > 0, "to draw seconds .* got bool of shape"),
    ],
)
def test_what_is_no_latency_model_is_refused(model, message):
    with pytest.raises(ValueError, match=f"`simulate` needs pause {message}"):
        draw("simulate", "pause", model, np.random.default_rng(0), (2, 3))
