"""`jaxcode plot`: pictures of loads and of recorded latencies."""

import argparse
from typing import Any

from jaxcode.commands.arguments import CODES, make_code
from jaxcode.commands.converters import whole
from jaxcode.commands.output import Table, add_output, save, show
from jaxcode.load import communication_load, normal_form_numbers
from jaxcode.plot import load_against_rank, load_against_tolerance, trace_heatmap
from jaxcode.seconds import recording
from jaxcode.shapes import ITEMSIZE, Leaf

ABOUT = "Pictures: load against rank, load against tolerance, and who straggled in a trace."
EXAMPLES = """\
examples:
  jaxcode plot rank --code fractional_repetition --workers 8 --stragglers 1 --out rank.png
  jaxcode plot tolerance --workers 8 --rank 32 --out tolerance.png
  jaxcode plot trace seconds.csv --out trace.png
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `jaxcode plot`."""
    add = command.add_argument
    count = whole(1)
    add("figure", choices=("rank", "tolerance", "trace"), help="what to draw")
    add("file", nargs="?", metavar="FILE", help="of trace: .csv or .npz of seconds, a row a step")
    add("--code", choices=CODES, default="fractional_repetition", help="of rank")
    add("--workers", type=count, default=8, help="n (default: 8)")
    add("--stragglers", type=whole(0), default=1, help="s, of rank (default: 1)")
    add("--fragments", type=count, default=1, help="m, of rank (default: 1)")
    add("--shape", type=count, nargs=2, default=[784, 1024], help="p q (default: 784 1024)")
    add("--rank", type=count, help="of tolerance (default: full)")
    add_output(add, picture="the figure; required unless --json or --csv")


def run(args: argparse.Namespace) -> int:
    """Draw the figure, or print its numbers."""
    if args.figure == "trace" and args.file is None:
        raise ValueError("jaxcode plot trace needs a FILE of seconds, .csv or .npz")
    if args.figure != "trace" and args.file is not None:
        raise ValueError(f"jaxcode plot {args.figure} takes no FILE; got {args.file!r}")
    if not (args.out or args.json or args.csv):
        raise ValueError("give --out FILE.png for the picture, or --json or --csv for its numbers")
    rows, draw, size = {"rank": _rank, "tolerance": _tolerance, "trace": _trace}[args.figure](args)
    if args.json or args.csv:
        show(args, Table(args.figure, rows))
    save(args.out, draw, size=size)
    return 0


def _rank(args: argparse.Namespace) -> Any:
    shape = tuple(args.shape)
    second = args.stragglers if args.code != "uncoded" else None
    code = make_code(args.code, args.workers, second, args.fragments)
    schemes = ("ye_abbe", "factors", "normal_form") if code.block is not None else ("ye_abbe",)
    rows = []
    for rank in range(1, min(shape) + 1):
        loads = [communication_load(code, shape, method=x, rows=rank) for x in schemes]  # type: ignore[arg-type]
        found = {scheme: load.total for scheme, load in zip(schemes, loads, strict=True)}
        rows.append({"rank": rank, **found, "lower bound": loads[0].bounds.get("")})

    return rows, lambda ax: load_against_rank(ax, code, shape), (7, 5)


def _tolerance(args: argparse.Namespace) -> Any:
    p, q = args.shape
    numbers = normal_form_numbers(Leaf((p, q), ITEMSIZE), args.rank or p)
    rows = [
        {"d": d, "s": s, "m": d - s, "numbers/worker": numbers / (d - s)}
        for d in range(1, args.workers + 1)
        for s in range(d)
    ]

    return (
        rows,
        lambda ax: load_against_tolerance(ax, args.workers, (p, q), args.rank),
        (7, 5.5),
    )


def _trace(args: argparse.Namespace) -> Any:
    seconds = recording("plot trace", args.file)
    rows = [
        {"step": step, "worker": worker, "seconds": float(value)}
        for step, line in enumerate(seconds)
        for worker, value in enumerate(line)
    ]

    return rows, lambda ax: trace_heatmap(ax, seconds), (9, 5)
