"""`jaxcode plan`: which design to train with, and whether to code at all."""

import argparse
from typing import Any

from jaxcode.commands.arguments import (
    add_conditions,
    add_parameters,
    conditions_of,
    parameters,
)
from jaxcode.commands.converters import real, whole
from jaxcode.commands.output import Table, add_output, save, show
from jaxcode.planning import Estimate, Plan, plan
from jaxcode.plot import step_times
from jaxcode.simulation import simulate

ABOUT = "Which design is best here, what it costs, and why; it may be not to code at all."
EXAMPLES = """\
examples:
  jaxcode plan --workers 16 --bandwidth 200 --pause bimodal:fast=0,slow=5,probability=0.05
  jaxcode plan --params model.npz --slowdown bimodal:1,1.3,0.02
  jaxcode plan --probability 0.999 --deadline 10 --pause failures:1e6,600,step=3
"""
_SIMULATED = 1000


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `jaxcode plan`."""
    add = command.add_argument
    add("--workers", type=whole(1), default=8, help="n (default: 8)")
    add("--stragglers", type=whole(0), help="only designs that go on without so many")
    add("--probability", type=real(0.0), help="only designs complete so often, by the deadline")
    add("--exact", action="store_true", help="leave out designs that drop the slowest")
    add_parameters(add)
    add_conditions(add)
    add_output(add, picture="simulated steps of the best designs")


def run(args: argparse.Namespace) -> int:
    """Rank the designs, and say why."""
    leaves = parameters(args)
    options = conditions_of(args)
    found = plan(
        leaves,
        num_workers=args.workers,
        num_stragglers=args.stragglers,
        probability=args.probability,
        approximate=not args.exact,
        **options,
    )
    rows = [_row(estimate, found) for estimate in found.rows]
    notes = [
        f"verdict: {found.verdict}",
        f"best exact design: {found.best_exact.design.name if found.best_exact else 'none'}",
        *(f"- {reason}" for reason in found.reasons),
    ]
    forms = [{"leaf": name, "sent as": form} for name, form in found.best.forms.items()]
    tables = [Table("leaves", forms), Table("plan", rows, notes)]
    if args.json:  # for people, the reasons say it
        low, high = (value * 8 / 1e6 for value in found.break_even_bandwidth)
        even = {"Mbit/s from": low, "Mbit/s to": high, "copies": found.break_even_redundancy}
        tables.insert(0, Table("redundancy breaks even", [even]))
    show(args, *tables)
    save(args.out, lambda ax: _draw(ax, found, leaves, options), size=(9, 6))
    return 0


def _row(estimate: Estimate, found: Plan) -> dict[str, Any]:
    return {
        "design": estimate.design.name,
        "seconds": estimate.seconds,
        "decode": estimate.decode,
        "speed": estimate.speedup,
        "copies": float(estimate.copies),
        "bytes/worker": estimate.worker_bytes,
        "exact": estimate.exact,
        "probability": estimate.probability,
        "error": estimate.error,
        "chosen": estimate == found.best,
    }


def _draw(ax: Any, found: Plan, leaves: Any, options: dict[str, Any]) -> None:
    designs = [estimate.design for estimate in found.rows]
    step_times(ax, simulate(designs, leaves, steps=_SIMULATED, **options))
