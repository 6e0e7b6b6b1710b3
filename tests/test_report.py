"""The progress bar in terminals of all widths."""

import io

import numpy as np
import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxcode.train.report import Meter
from jaxcode.train.training import Record

RECORD = Record(1, 1.25, np.array([True, False]), 1.0, 2.0, 0.1)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_count_is_always_there(width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        meter = Meter(progress, 1000)
        meter.start("training", total=200)
        meter.advance(RECORD)
    assert "1/200" in file.getvalue()
    assert ("answered" in file.getvalue()) == (width >= 90)
