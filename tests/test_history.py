"""Reports of steps, and the table of slow workers against NumPy."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("ray")

from reports import report  # noqa: E402

from jaxcode.cluster.history import History  # noqa: E402


def random_arrivals(steps=150, workers=4):
    rng = np.random.default_rng(0)
    arrivals = rng.exponential(0.1, (steps, workers)) * [1, 2, 3, 4]
    arrivals[rng.random((steps, workers)) < 0.2] = math.inf
    return arrivals


def filled(arrivals, **options):
    history = History(**options)
    for step, row in enumerate(arrivals):
        late = {i: 0.1 for i in np.flatnonzero(np.isinf(row)).tolist()}
        dropped = [(i, step - 1, 0.2) for i in late if i != 3]
        history.append(report(step, row.tolist(), late=late, dropped=dropped))
    return history


def test_the_table_is_what_numpy_says():
    arrivals = random_arrivals()
    rows = filled(arrivals).table()
    assert sorted(row["worker"] for row in rows) == [0, 1, 2, 3]
    for row in rows:
        times = arrivals[:, row["worker"]]
        late, times = int(np.isinf(times).sum()), times[np.isfinite(times)]
        assert row["reports"] == len(times)
        assert row["min"] == times.min()
        assert row["median"] == pytest.approx(np.median(times))
        assert row["p99"] == pytest.approx(np.percentile(times, 99))
        assert row["worst"] == times.max()
        assert row["late"] == late
        assert row["dropped"] == (0 if row["worker"] == 3 else late)
    assert [row["late"] for row in rows] == sorted((row["late"] for row in rows), reverse=True)


def test_equally_late_workers_are_sorted_by_their_median():
    rows = filled(np.array([[0.1, 0.3, 0.2]] * 5)).table()
    assert [row["worker"] for row in rows] == [1, 2, 0]


def test_a_worker_that_never_reported():
    rows = filled(np.array([[0.1, math.inf]] * 5)).table()
    assert [row["worker"] for row in rows] == [1, 0]
    assert rows[0]["reports"] == 0
    assert rows[0]["late"] == 5
    assert math.isnan(rows[0]["median"])
    assert math.isnan(rows[0]["worst"])


def test_workers_that_came_later():
    history = filled(np.array([[0.1, 0.2]] * 3))
    history.append(report(3, [0.1, 0.2, 0.3, 0.4]))
    assert {row["worker"]: row["reports"] for row in history.table()} == {0: 4, 1: 4, 2: 1, 3: 1}
    history.append(report(4, [0.1]))
    assert {row["worker"]: row["reports"] for row in history.table()} == {0: 5, 1: 4, 2: 1, 3: 1}


def test_the_table_in_milliseconds():
    lines = str(filled(np.array([[0.1, 0.25]] * 4))).splitlines()
    assert lines[0].split()[:6] == ["worker", "reports", "min", "median", "p99", "worst"]
    assert lines[1].split() == ["1", "4", "250", "250", "250", "250", "0", "0"]
    assert lines[2].split() == ["0", "4", "100", "100", "100", "100", "0", "0"]
    assert len(str(History()).splitlines()) == 1


def test_so_many_reports_are_kept():
    history = filled(random_arrivals(50), kept=20)
    assert [x.step for x in history.reports] == list(range(30, 50))
    assert sum(history.late.values()) == np.isinf(random_arrivals(50)).sum()  # all are counted


def test_rejected_messages_are_counted_by_reason():
    history = History()
    history.append(report(0, [0.1] * 3, rejected={0: "checksum", 2: "checksum"}))
    history.append(report(1, [0.1] * 3, rejected={0: "step"}))
    assert dict(history.rejected) == {"checksum": 2, "step": 1}


def test_a_line_of_json_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    history.append(report(0, [0.1] * 3, bytes_in=[5, -1, 7], rejected={1: "length"}))
    history.append(report(1, [0.1, 0.1, math.inf], loss=math.nan, late={2: 0.5}, skipped=True))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["bytes/in"] == 12  # -1 is not known
    assert first["rejected"] == first["rejected/length"] == 1
    assert (first["step"], first["loss"], first["survivors"]) == (0, 1.0, 3)
    assert first["seconds/step"] == 0.5
    assert second["loss"] is None  # JSON has no NaN
    assert (second["late"], second["skipped"], second["survivors"]) == (1, 1, 2)
    assert all(isinstance(x, int | float | None) for x in [*first.values(), *second.values()])


def test_steps_that_are_taken_again_are_not_there_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    history.rewind(0)  # there is no file
    for step in range(10):
        history.append(report(step, [0.1]))
    again = History(path)
    again.rewind(6)
    again.append(report(6, [0.1], loss=9.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert lines[-1]["loss"] == 9.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "step 3: loss 0.25, 500 ms"),
        ({"survivors": np.array([True, False, True])}, "step 3: loss 0.25, 500 ms, without 1"),
        ({"rejected": {1: "not finite"}}, "step 3: loss 0.25, 500 ms, 1: not finite"),
        ({"skipped": True, "error": 1.0}, "step 3: loss 0.25, 500 ms, skipped"),
        ({"error": 0.5}, "step 3: loss 0.25, 500 ms, approximate (0.5)"),
    ],
    ids=str,
)
def test_one_line_for_a_person(changes, text):
    assert str(report(3, [0.1] * 3, **changes)) == text


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (None, {}),
        (0.5, {"metrics": 0.5}),
        (
            {"mae": 0.25, "by": [1.0, np.ones(3)], "bad": math.nan},
            {"metrics/mae": 0.25, "metrics/by/0": 1.0},
        ),
    ],
)
def test_metrics_of_the_loss_are_scalars(metrics, expected):
    scalars = report(0, [0.1], metrics=metrics).scalars()
    assert {k: x for k, x in scalars.items() if k.startswith("metrics")} == expected
    json.dumps(scalars, allow_nan=False)
