"""`jaxcode simulate`: what the steps of several designs would take."""

import argparse
import sys
from typing import Any

from jaxcode.commands.arguments import (
    DESIGN_HELP,
    add_conditions,
    add_parameters,
    conditions_of,
    parameters,
    parse_design,
)
from jaxcode.commands.converters import whole
from jaxcode.commands.output import Table, add_output, save, show
from jaxcode.plot import step_times
from jaxcode.simulation import PARTS, Simulation, simulate

ABOUT = "What the steps of several designs would take, all under the same stragglers."
EXAMPLES = """\
examples:
  jaxcode simulate uncoded fractional_repetition:1/factors --pause bimodal:0,5,0.05
  jaxcode simulate uncoded uncoded@7 --slowdown pareto:1.5,1 --out steps.png
  jaxcode simulate uncoded/factors --workers 10000 --steps 1000
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `jaxcode simulate`."""
    add = command.add_argument
    add("designs", nargs="+", metavar="DESIGN", help=DESIGN_HELP)
    add("--workers", type=whole(1), default=8, help="n (default: 8)")
    add("--steps", type=whole(1), default=1000, help="to draw (default: 1000)")
    add_parameters(add)
    add_conditions(add)
    add_output(add, picture="the distribution of a step's seconds, by design")


def run(args: argparse.Namespace) -> int:
    """Simulate the designs."""
    results = simulate(
        [parse_design(text, args.workers) for text in args.designs],
        parameters(args),
        steps=args.steps,
        progress=sys.stderr.isatty() or None,
        **conditions_of(args),
    )
    table = Table("simulation", [_row(result) for result in results])
    show(args, table if args.json or args.csv else table.without_zeros(*PARTS, "error"))
    save(args.out, lambda ax: step_times(ax, results), size=(9, 1.2 + 0.5 * len(results)))
    return 0


def _row(result: Simulation) -> dict[str, Any]:
    return {
        "design": result.design.name,
        "seconds": result.mean,
        **{f"p{at}": value for at, value in result.percentiles.items()},
        **result.parts,
        "exact": result.exact,
        "error": result.error,
        "bytes/worker": result.worker_bytes,
        "bytes/master": result.master_bytes,
    }
