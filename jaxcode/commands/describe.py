"""`jaxcode describe`: what a code is, what it costs, and how far that is from the least."""

import argparse
import math
import warnings
from typing import Any

import numpy as np

from jaxcode.bounds import lower_bound, optimal_regime
from jaxcode.code import Code
from jaxcode.commands.arguments import (
    APPROXIMATE,
    CODES,
    add_parameters,
    make_code,
    parameters,
)
from jaxcode.commands.converters import real, whole
from jaxcode.commands.output import Table, add_output, save, show
from jaxcode.load import Load, communication_load
from jaxcode.plot import load_against_rank
from jaxcode.shapes import Leaf

ABOUT = "What a code is: who computes what, what is sent, and how far that is from the least."
EXAMPLES = """\
examples:
  jaxcode describe fractional_repetition 8 1
  jaxcode describe polynomial 8 2 2 --shape 784 1024 --rows 32 --out load.png
  jaxcode describe expander 60 5                 approximate: 5 is its load d
"""
SCHEMES = ("dense", "ye_abbe", "factors", "normal_form", "power_sgd")
_SAMPLES = 400


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of `jaxcode describe`."""
    add = command.add_argument
    count = whole(0)
    add("code", choices=CODES, metavar="CODE", help=", ".join(CODES))
    add("workers", type=whole(1), metavar="n", help="workers")
    add("second", type=count, nargs="?", metavar="s", help="stragglers tolerated; or a load d")
    add("fragments", type=whole(1), nargs="?", metavar="m", help="fragments")
    add_parameters(add)
    add("--rows", type=whole(1), default=32, help="of a partition (default: 32)")
    add("--rank", type=whole(1), default=4, help="of PowerSGD (default: 4)")
    add("--speeds", type=real(0.0, above=True), nargs="+", help="of heterogeneous, one a worker")
    add("--seed", type=count, default=0, help="of random codes (default: 0)")
    add("--allow-ill-conditioned", action="store_true", help="of polynomial, whatever it loses")
    add_output(add, picture="load against rank, of the largest weight")


def run(args: argparse.Namespace) -> int:
    """Describe the code."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        code = make_code(
            args.code,
            args.workers,
            args.second,
            args.fragments,
            seed=args.seed,
            speeds=args.speeds,
            allow_ill_conditioned=args.allow_ill_conditioned,
        )
    leaves = parameters(args)
    notes = [optimal_regime(code), *(f"warning: {warning.message}" for warning in raised)]
    show(
        args,
        Table("code", _properties(code)),
        Table("stragglers", _beyond(code)),
        Table("loads", _loads(code, leaves, args.rows, args.rank), notes),
    )
    shape = max(leaves.values(), key=lambda leaf: leaf.size).matrix
    save(args.out, lambda ax: load_against_rank(ax, code, shape), size=(7, 5))
    return 0


def _properties(code: Code) -> list[dict[str, Any]]:
    error = code.float32_error
    facts = {
        "code": code.name,
        "n, workers": code.num_workers,
        "k, partitions": code.num_partitions,
        "s, stragglers tolerated exactly": code.num_stragglers,
        "m, fragments": code.num_fragments,
        "d, partitions a worker (at most)": code.load,
        "copies of the batch computed": float(code.computation.sum()),
        "batch a worker (at most)": float(code.computation.max()),
        "message, of a gradient": 1 / code.num_fragments,
        "gradients as factors": code.block is not None,
        "worst condition": code.worst_condition,
        "worst loss in float32": error,
        "worst loss in bfloat16": error * 2.0**16,  # 8 bits of precision instead of 24
    }
    if code.name in APPROXIMATE:
        del facts["worst condition"]
    return [{"property": name, "value": value} for name, value in facts.items()]


def _beyond(code: Code) -> list[dict[str, Any]]:
    """Errors with more and more workers missing at random."""
    n, rng = code.num_workers, np.random.default_rng(0)
    most = min(n - 1, code.num_stragglers + 4)
    rows = []
    for missing in range(max(0, code.num_stragglers - 1), most + 1):
        count = min(_SAMPLES, math.comb(n, missing))
        order = np.argsort(rng.random((count, n)), axis=1)
        survivors = order >= missing
        exact = code.is_decodable(survivors)
        error = np.where(exact, 0.0, code.decoding_error(survivors))  # short of rounding
        rows.append(
            {
                "missing": missing,
                "decodes exactly": float(exact.mean()),
                "mean error": float(error.mean()),
                "worst error": float(error.max()),
                "sets tried": count,
            }
        )
    return rows


def _loads(code: Code, leaves: dict[str, Leaf], rows: int, rank: int) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        if scheme in ("factors", "normal_form") and code.block is None:
            continue
        load = communication_load(code, leaves, method=scheme, rows=rows, rank=rank)  # type: ignore[arg-type]
        table.append(
            {
                "scheme": scheme.replace("_", " "),
                "numbers/worker": load.total,
                "bytes/worker": load.total_bytes,
                "optimal leaves": _optimal(load, scheme),
            }
        )
    if not code.is_decodable(np.ones(code.num_workers, bool)):
        return table
    held = [leaf for leaf in leaves.values() if leaf.size]
    bound = lower_bound(
        code,
        [leaf.matrix for leaf in held],
        [rows if len(leaf.shape) == 2 else None for leaf in held],
    )
    table.append(
        {
            "scheme": "lower bound",
            "numbers/worker": bound,
            "bytes/worker": min(leaf.itemsize for leaf in held) * bound,
            "optimal leaves": "",
        }
    )
    return table


def _optimal(load: Load, scheme: str) -> str:
    if load.bounds:
        return f"{sum(load.optimal.values())} of {len(load.bounds)}"
    return "lossy" if scheme == "power_sgd" else "no bound"
