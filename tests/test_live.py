"""What is shown of a training while it goes, in a pipe, a terminal and a notebook."""

import functools
import io
import math
import re
import time

import numpy as np
import pytest

pytest.importorskip("ray")

import rich.console  # noqa: E402
from reports import report  # noqa: E402

from jaxcode.cluster import Cluster, History, live  # noqa: E402
from jaxcode.cluster.display import became_of, picture  # noqa: E402

CONSOLE = rich.console.Console
SECONDS = {"step": 0.08}


class Steps(Cluster):
    """As much of a cluster as `live` uses: worker 3 is silent from step 2 on, 1 is damaged at 4."""

    def __init__(self, fails_at=None):  # nothing is started
        self.taken, self._fails_at = 0, fails_at

    def step(self):
        step = self.taken
        if step == self._fails_at:
            raise TimeoutError("too few")
        self.taken += 1
        silent = step >= 2
        arrivals = [0.01, 0.02, 0.03, math.inf if silent else 0.04]
        return report(
            step,
            arrivals,
            seconds=SECONDS,
            late={3: 0.1} if silent else {},
            survivors=np.array([True, step != 4, False, False]),
            rejected={1: "checksum"} if step == 4 else {},
            restarts=[3] if step == 5 else [],
            bytes_in=[2000, 4000, -1, -1],
        )


def text(renderable):
    file = io.StringIO()
    CONSOLE(file=file, width=100).print(renderable)
    return file.getvalue()


def drawn(reports, steps, seconds):
    history = History()
    for item in reports:
        history.append(item)
    return picture(history, len(reports), steps, seconds)


def test_the_picture_tells_how_far_and_who():
    cluster = Steps()
    reports = [cluster.step() for _ in range(5)]
    head, names, *rows = text(drawn(reports, 8, 0.5)).splitlines()
    assert "5/8, loss 0.2, 80 ms a step, 3.0 kB fetched by each" in head
    assert "waiting" not in head
    assert re.split(" {2,}", names.strip()) == ["worker", "answers in", "late", "in the last step"]
    assert [row.split(maxsplit=4)[:4] for row in rows] == [
        ["0", "10", "ms", "0"],
        ["1", "20", "ms", "0"],
        ["2", "30", "ms", "0"],
        ["3", "40", "ms", "3"],
    ]
    assert [became_of(worker, reports) for worker in range(4)] == [
        "used",
        "rejected: it was damaged on the way",
        "answered, not needed",
        "no answer since step 1",
    ]
    assert became_of(3, [*reports, cluster.step()]) == "failed, is started again"
    assert became_of(3, reports[3:]) == "no answer yet"


def test_a_step_that_waits_says_so_and_the_last_does_not():
    reports = [Steps().step()]
    assert "waiting for 3 s" in text(drawn(reports, 2, 3.2))
    assert "waiting" not in text(drawn(reports, 1, 3.2))
    assert "0/2" in text(drawn([], 2, 0.0))


def test_workers_are_those_of_the_last_step():
    reports = [Steps().step(), report(1, [0.1, 0.1], seconds=SECONDS)]
    assert len(text(drawn(reports, 9, 0.0)).splitlines()) == 2 + 2
    reports = [report(0, [0.1, 0.1], seconds=SECONDS), Steps().step()]
    assert len(text(drawn(reports, 9, 0.0)).splitlines()) == 2 + 4


def test_a_pipe_gets_one_picture_at_the_end(capsys):
    assert [r.step for r in live(Steps(), 4)] == [0, 1, 2, 3]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("in the last step") == 1
    assert "4/4" in err


def test_a_terminal_gets_it_live(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: CONSOLE(file=file, force_terminal=True, width=100)
    )
    for seen in live(Steps(), 3):
        while seen.step == 0 and "1/3" not in file.getvalue():
            time.sleep(0.01)  # it is drawn while a step goes on
    shown = file.getvalue()
    assert "3/3" in shown
    assert shown.count("in the last step") > 1
    assert shown.endswith("\x1b[?25h")  # the cursor is there again


def test_a_notebook_gets_one_that_changes(monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []

    class Handle:
        def update(self, picture):
            shown.append(text(picture))

    def show(picture, *, display_id):
        assert display_id
        assert "text/html" in picture._repr_mimebundle_([], [])
        shown.append(text(picture))
        return Handle()

    monkeypatch.setattr(rich.console, "Console", functools.partial(CONSOLE, force_jupyter=True))
    monkeypatch.setattr(rich, "_console", None)  # the one that Rich keeps, back again afterwards
    monkeypatch.setattr(display, "display", show)
    cluster = Steps(fails_at=3)
    with pytest.raises(TimeoutError, match="too few"):
        list(live(cluster, 9))
    assert "0/9" in shown[0]
    assert "1/9" in shown[1]
    assert "3/9" in shown[-1]  # what was reached is shown, however it ends
    assert len(shown) == 3  # and not every step of a fast training


def test_who_stops_looking_stops_the_steps():
    cluster = Steps()
    for seen in live(cluster, 9):
        if seen.step == 1:
            break
    assert cluster.taken == 2


@pytest.mark.parametrize("steps", [-1, True])
def test_steps_are_counted(steps):
    with pytest.raises(ValueError, match="steps"):
        list(live(Steps(), steps))
