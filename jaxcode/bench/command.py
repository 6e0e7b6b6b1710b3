"""`jaxcode bench`: ratios of times, measured on this machine.

Two programs take turns, and the ratio is the median over the pairs, so that what else the machine
does meets both alike. Compilation and the first calls are not counted. Ratios of one run compare;
times of different runs do not.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxcode.bench import cases
from jaxcode.bench.cases import Pair, Sizes

CASES: dict[str, Callable[[Sizes], Iterator[Pair]]] = {
    "capture": cases.capture,
    "coding": cases.coding,
    "mesh": cases.mesh,
    "product": cases.product,
}
REPEATS = 100
QUICK_REPEATS = 3
WARM_UP = 3
VIRTUAL_DEVICES = 8

ABOUT = """\
Time this library against what it is compared with, in pairs that take turns, and show the median
of the ratios.

  capture   gradients in factors against jax.value_and_grad, on one CPU device
  coding    encode and decode against numpy.copyto of as many bytes as they touch
  mesh      a coded step against the same computation without a code, on all devices
  product   what decoding costs where gradients are sent as factors, with its flops

A goal that is missed is shown as missed; the exit code is 0 all the same.
"""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How long two programs took, in turns.

    Attributes:
        case: the case it belongs to.
        name: the program that was timed.
        against: the program it was timed against.
        seconds: median time of the first.
        seconds_against: median time of the second.
        ratio: median of the ratios of the pairs.
        low: their lower quartile.
        high: their upper quartile.
        repeats: pairs.
        goal: the largest ratio that is good enough, or None.
        met: whether the median is, or None.
        details: counts that belong with the times.
    """

    case: str
    name: str
    against: str
    seconds: float
    seconds_against: float
    ratio: float
    low: float
    high: float
    repeats: int
    goal: float | None
    met: bool | None
    details: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jaxcode bench`.

    Args:
        parser: the parser to add to.

    Example:
        >>> options = argparse.ArgumentParser()
        >>> add_arguments(options)
        >>> options.parse_args(["--only", "mesh", "--repeats", "7"]).repeats
        7
    """
    parser.description = ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only",
        choices=tuple(CASES),
        action="append",
        help="leave out the other cases; may be given several times",
    )
    parser.add_argument(
        "--repeats",
        type=_repeats,
        metavar="PAIRS",
        help=f"pairs of each comparison (default: {REPEATS})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models: see that it runs; has no goals"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON on standard output.

    Args:
        args: as parsed with `add_arguments`.

    Returns:
        The exit code: 0, or 2 where JAX finds no device.

    Example:
        >>> options = argparse.ArgumentParser()
        >>> add_arguments(options)
        >>> run(options.parse_args(["--quick", "--only", "coding", "--repeats", "1"]))
        | case ...
        0
    """
    try:
        _use_virtual_devices()
    except RuntimeError as error:
        message = " ".join(f"JAX finds no device to run on: {error}".split())
        print(f"jaxcode: error: {message}", file=sys.stderr)
        return 2
    sizes = cases.QUICK if args.quick else cases.FULL
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    facts = machine()
    results = []
    for case in args.only or CASES:
        for pair in CASES[case](sizes):
            _progress(f"{pair.case}: {pair.name}")
            if args.quick:  # the goals are for the full sizes
                pair = dataclasses.replace(pair, goal=None)
            results.append(measure(pair, repeats=repeats))
    _progress("")
    if args.json:
        rows = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"machine": facts, "quick": args.quick, "results": rows}, indent=2))
    else:
        print(table(results))
        print()
        print("\n".join(remarks(results, facts)))
    return 0


def measure(pair: Pair, *, repeats: int) -> Measurement:
    """Time a pair of programs in turns; who goes first alternates.

    Args:
        pair: the programs.
        repeats: how often each is timed.

    Returns:
        The median of the ratios, and what it was taken from.

    Example:
        >>> import time
        >>> pair = Pair("nap", "long", "short", lambda: time.sleep(0.02), lambda: None)
        >>> measure(pair, repeats=3).ratio > 1
        True
    """
    programs = (pair.ours, pair.theirs)
    for program in programs:
        for _ in range(WARM_UP):
            jax.block_until_ready(program())
    seconds = np.zeros((repeats, 2))
    for i in range(repeats):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            start = time.perf_counter()
            jax.block_until_ready(programs[which]())
            seconds[i, which] = time.perf_counter() - start
    ours, theirs = np.median(seconds, axis=0).tolist()
    low, ratio, high = np.percentile(seconds[:, 0] / seconds[:, 1], [25, 50, 75]).tolist()
    met = None if pair.goal is None else ratio <= pair.goal
    return Measurement(
        pair.case,
        pair.name,
        pair.against,
        ours,
        theirs,
        ratio,
        low,
        high,
        repeats,
        pair.goal,
        met,
        pair.details,
    )


def machine() -> dict[str, Any]:
    """Return what the ratios depend on: versions, devices, and how busy the machine is.

    Example:
        >>> sorted(machine())
        ['cpus', 'devices', 'jax', 'load_average', 'platform', 'python']
    """
    devices = jax.devices()
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "devices": len(devices),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def table(results: Sequence[Measurement]) -> str:
    """Return a table that reads as text and as Markdown.

    Args:
        results: its rows.

    Returns:
        The lines, without the last line break.

    Example:
        >>> row = Measurement("mesh", "a", "b", 0.0011, 0.001, 1.1, 1.0, 1.2, 9, 1.05, False, {})
        >>> print(table([row]))
        | case | measured | against |   ms | against ms | ratio | middle half |   goal | met    |
        | ---- | -------- | ------- | ---: | ---------: | ----: | ----------: | -----: | ------ |
        | mesh | a        | b       | 1.10 |       1.00 |  1.10 |   1.00-1.20 | ≤ 1.05 | missed |
    """
    header = ("case", "measured", "against", "ms", "against ms", "ratio", "middle half")
    lines = [(*header, "goal", "met"), *map(_cells, results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = (3, 4, 5, 6, 7)
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    lines.insert(1, tuple(rule))
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join(padded) + " |"


def _cells(result: Measurement) -> tuple[str, ...]:
    return (
        result.case,
        result.name,
        result.against,
        _milliseconds(result.seconds),
        _milliseconds(result.seconds_against),
        f"{result.ratio:.2f}",
        f"{result.low:.2f}-{result.high:.2f}",
        "" if result.goal is None else f"≤ {result.goal:.2f}",
        {None: "", True: "yes", False: "missed"}[result.met],
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"


def remarks(results: Sequence[Measurement], facts: dict[str, Any]) -> list[str]:
    """Return lines on what was counted, and on the machine.

    Args:
        results: the measurements.
        facts: from `machine`.

    Returns:
        The lines.

    Example:
        >>> remarks([], {"jax": "1.0", "platform": "cpu", "devices": 1, "cpus": 2,
        ...     "load_average": 0.5})
        ['jax 1.0, 1 cpu device, 2 CPUs, load average 0.5']
    """
    lines = [line for result in results if (line := _counts(result))]
    products = [r.details for r in results if "product_flops" in r.details][:1]
    lines += [_flops(details) for details in products]
    count = facts["devices"]
    devices = f"{count} {facts['platform']} device" + ("s" if count != 1 else "")
    load = facts["load_average"]
    line = f"jax {facts['jax']}, {devices}, {facts['cpus']} CPUs, load average {load}"
    busy = load is not None and facts["cpus"] and load > facts["cpus"] / 2
    return [*lines, line + ": other work ran beside this" if busy else line]


def _counts(result: Measurement) -> str:
    found = result.details
    if "numbers" in found:
        share = found["numbers"] / found["dense_numbers"]
        line = (
            f"{result.case}, {result.name}: {found['numbers']:,} numbers of "
            f"{found['dense_numbers']:,} dense ({share:.3f})"
        )
        flops, dense_flops = found["flops"], found["dense_flops"]
        return f"{line}, {flops / dense_flops:.2f} of the flops" if flops and dense_flops else line
    if "copied_bytes" in found:
        return (
            f"{result.case}, {result.name}: encode reads and writes {found['encode_bytes']:,} "
            f"bytes and decode {found['decode_bytes']:,}; one thread copies half of both"
        )
    return ""


def _flops(details: dict[str, Any]) -> str:
    multiply, backward = details["product_flops"], details["backward_flops"]
    counts = [details[f"xla_{name}_flops"] for name in ("product", "backward")]
    counted = "XLA counts {:.3g} and {:.3g}" if all(counts) else "XLA does not count them"
    return (
        f"product: the decode product takes {multiply:.3g} flops on every replica, the backward "
        f"pass of one block {backward:.3g} ({counted.format(*counts)})"
    )


def _repeats(text: str) -> int:
    """Convert an option, within bounds."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 to 1000000; got {text!r}")
    return number


def _progress(text: str) -> None:
    """Show on a terminal what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _use_virtual_devices() -> None:
    """Ask for eight CPU devices, unless the user chose a number or a backend already runs.

    Raises:
        RuntimeError: there is no device.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and jax.config.jax_num_cpu_devices == -1:  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
        except RuntimeError:
            return
    jax.devices()
