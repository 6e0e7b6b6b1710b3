"""What the commands print and save: tables for people, JSON and CSV for programs, pictures."""

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PICTURES = (".png", ".pdf", ".svg")


class Table(NamedTuple):
    """Rows of named values, and lines below them.

    Attributes:
        name: the key in JSON, and the title.
        rows: dictionaries of the same keys, in order; values are text, numbers or bools.
        notes: lines below the table.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    def without_zeros(self, *keys: str) -> "Table":
        """The table without those of these columns that are 0 in all rows."""
        empty = {key for key in keys if not any(row[key] for row in self.rows)}
        rows = [{k: v for k, v in row.items() if k not in empty} for row in self.rows]
        return self._replace(rows=rows)


def add_output(add: Callable[..., Any], *, picture: str) -> None:
    """Options that say how to print and what to save."""
    add("--json", action="store_true", help="print JSON")
    add("--csv", action="store_true", help="print CSV, of the last table")
    add("--out", type=picture_path, metavar="FILE.png", help=f"save a picture: {picture}")


def picture_path(text: str) -> str:
    """A path that a picture can be written to.

    Example:
        >>> picture_path("load.png")
        'load.png'
    """
    folder = os.path.dirname(text) or "."
    if os.path.splitext(text)[1].lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"needs a name in {', '.join(PICTURES)}; got {text!r}")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"needs a folder to write to; {folder!r} is not one")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"needs a file; {text!r} is a folder")
    return text


def show(args: argparse.Namespace, *tables: Table) -> None:
    """Print the tables in the form that the options ask for.

    Raises:
        ValueError: Both JSON and CSV were asked for.

    Example:
        >>> options = argparse.Namespace(json=False, csv=True)
        >>> show(options, Table("loads", [{"scheme": "dense", "numbers": 12.0}]))
        scheme,numbers
        dense,12.0
    """
    if args.json and args.csv:
        raise ValueError("give one of --json and --csv, not both")
    if args.json:
        print(json.dumps(_document(tables), indent=2, allow_nan=False))
    elif args.csv:
        rows = tables[-1].rows
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print(tables)


def _document(tables: Sequence[Table]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for table in tables:
        document[table.name] = [{k: _plain(v) for k, v in row.items()} for row in table.rows]
        if table.notes:
            document[f"{table.name} notes"] = list(table.notes)
    return document


def _plain(value: Any) -> Any:
    """JSON has no infinity: it is the text "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _print(tables: Sequence[Table]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = 10_000  # a file has no margin to fold at
    for table in tables:
        if table.rows:
            drawn = Drawn(title=table.name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            for key, value in table.rows[0].items():
                right = isinstance(value, int | float) and not isinstance(value, bool)
                justify: Any = "right" if right else "left"
                drawn.add_column(key, justify=justify, overflow="fold", no_wrap=right)
            for row in table.rows:
                drawn.add_row(*map(_text, row.values()))
            console.print(drawn)
        for note in table.notes:
            console.print(note, markup=False)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return (
            f"{value:,.0f}" if whole else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        )
    return f"{value:,}" if isinstance(value, int) else str(value)


def save(
    path: str | None, draw: Callable[[Any], Any], *, size: tuple[float | int, float | int]
) -> None:
    """Save the picture that `draw` makes on an Axes, if there is a path.

    Raises:
        OSError: It cannot be written.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)
