"""Arguments that the commands share: codes, designs, parameters and latency models, from text."""

import argparse
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from jaxcode import codes, stragglers
from jaxcode.code import Code
from jaxcode.commands.converters import real, whole
from jaxcode.designs import METHODS, Design
from jaxcode.seconds import Latency
from jaxcode.shapes import Leaf, leaf_shapes

# The second number of an approximate code is its load d, for it tolerates nobody exactly.
APPROXIMATE = ("bernoulli", "expander", "graph_code")
FRAGMENTED = ("fractional_repetition", "heterogeneous", "polynomial")
RANDOM = ("cyclic_repetition", *APPROXIMATE)
CODES = (
    "uncoded", "fractional_repetition", "heterogeneous", "cyclic_repetition", "cyclic_mds",
    "polynomial", *APPROXIMATE,
)  # fmt: skip
# What is trained where no option says so.
LAYERS = (784, 1024, 1024, 10)
MODELS = ("shifted_exponential", "pareto", "bimodal", "markov", "failures", "trace")

DESIGN_HELP = "CODE[:S[:M]][/METHOD][@K]: uncoded, fractional_repetition:1:2/factors, uncoded@7"
LATENCY_HELP = "MODEL:NAME=VALUE,..., such as bimodal:fast=0,slow=5,probability=0.05 or trace:FILE"


def make_code(
    name: str,
    num_workers: int,
    second: int | None = None,
    num_fragments: int | None = None,
    *,
    seed: int = 0,
    speeds: list[float] | None = None,
    allow_ill_conditioned: bool = False,
) -> Code:
    """The code of that name.

    Args:
        name: one of `CODES`.
        num_workers: n.
        second: s; the load d of an approximate code; None for the least there is.
        num_fragments: m, for codes with fragments.
        seed: of random codes.
        speeds: of "heterogeneous".
        allow_ill_conditioned: of "polynomial".

    Raises:
        ValueError: The numbers do not fit the code.

    Example:
        >>> make_code("fractional_repetition", 8, 1)
        <Code fractional_repetition [n=8, k=4, s=1, m=1]>
        >>> make_code("expander", 8, 3)
        <Code expander [n=8, k=8, s=0, m=1]>
    """
    if num_fragments not in (None, 1) and name not in FRAGMENTED:
        raise ValueError(
            f"`{name}` needs one fragment; got {num_fragments}. Use {', '.join(FRAGMENTED)}."
        )
    if name == "uncoded":
        if second not in (None, 0):
            raise ValueError(f"`uncoded` needs 0 stragglers; got {second}. Choose another code.")
        return codes.uncoded(num_workers)
    options: dict[str, Any] = {"seed": seed} if name in RANDOM else {}
    if name in FRAGMENTED:
        options["num_fragments"] = num_fragments or 1
    if name == "polynomial":
        options["allow_ill_conditioned"] = allow_ill_conditioned
    first: Any = num_workers
    if name == "heterogeneous":
        first = speeds or []
        if len(first) != num_workers:
            raise ValueError(
                f"`heterogeneous` needs --speeds, one for each of {num_workers} workers; got "
                f"{len(first)}. Give examples per second, or ratios."
            )
    least = {"graph_code": 2}.get(name, 1)
    return getattr(codes, name)(first, least if second is None else second, **options)


def parse_design(text: str, num_workers: int) -> Design:
    """A design from `CODE[:S[:M]][/METHOD][@K]`.

    Raises:
        ValueError: The text is not of that form, or its parts do not fit each other.

    Example:
        >>> parse_design("fractional_repetition:1/factors", 8).name
        'fractional_repetition s=1 m=1, factors'
        >>> parse_design("uncoded@7", 8).wait_for
        7
    """
    rest, _, first = text.partition("@")
    rest, _, method = rest.partition("/")
    name, *sizes = rest.split(":")
    numbers = [*sizes, first] if first or "@" in text else sizes
    method = method.replace("-", "_") or "dense"
    known = name in CODES and name != "heterogeneous" and method in METHODS
    if not known or len(sizes) > 2 or not all(number.isdecimal() for number in numbers):
        names = ", ".join(code for code in CODES if code != "heterogeneous")
        raise ValueError(
            f"a design is {DESIGN_HELP}; got {text!r}. Codes: {names}. Methods: "
            f"{', '.join(METHODS)}."
        )
    code = make_code(name, num_workers, *map(int, sizes))
    return Design(code, method=method, wait_for=int(first) if first else None)  # type: ignore[arg-type]


def parse_latency(text: str) -> Latency:
    """A latency model from `MODEL:NAME=VALUE,...`; the values may stand alone, in order.

    Raises:
        ValueError: The text is not of that form, or a value is out of range.

    Example:
        >>> import numpy as np
        >>> parse_latency("bimodal:fast=0,slow=5,probability=1")(np.random.default_rng(0), (2,))
        array([5., 5.])
        >>> parse_latency("pareto:1.5,2")(np.random.default_rng(0), (1,)) >= 2
        array([ True])
    """
    name, _, given = text.partition(":")
    if name not in MODELS:
        raise ValueError(f"a latency is {LATENCY_HELP}; got {text!r}. Models: {', '.join(MODELS)}.")
    if name == "trace":
        return stragglers.trace(given)
    model: Callable[..., Latency] = getattr(stragglers, name)
    parameters = list(inspect.signature(model).parameters)
    values: dict[str, float] = {}
    for place, item in enumerate(filter(None, given.split(","))):
        key, found, value = item.rpartition("=")
        key = key.strip() if found else parameters[min(place, len(parameters) - 1)]
        if key in values:
            raise ValueError(f"`{name}` takes {key} once; got it twice in {text!r}.")
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(
                f"`{name}` needs a number for {key}; got {value!r}. Write {LATENCY_HELP}."
            ) from None
    try:
        bound = inspect.signature(model).bind(**values)
    except TypeError:
        raise ValueError(
            f"`{name}` needs {', '.join(parameters)}; got {text!r}. Write {LATENCY_HELP}."
        ) from None
    return model(**bound.arguments)


def converted(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser for argparse, whose errors are those of `parse`."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_parameters(add: Callable[..., Any]) -> None:
    """Options that say what is trained; `parameters` reads them."""
    add(
        "--layers",
        type=whole(1),
        nargs="+",
        metavar="WIDTH",
        help=f"a perceptron of these widths, with biases (default: {' '.join(map(str, LAYERS))})",
    )
    add("--params", metavar="FILE.npz", help="the arrays of a model; only their shapes are read")
    add(
        "--shape",
        type=whole(1),
        nargs=2,
        metavar=("P", "Q"),
        help="a single P x Q weight",
    )


def parameters(args: argparse.Namespace) -> dict[str, Leaf]:
    """The leaves that the options name.

    Raises:
        ValueError: Several of them were given, or the file cannot be read.

    Example:
        >>> none = argparse.Namespace(layers=None, params=None, shape=None)
        >>> [leaf.shape for leaf in parameters(none).values()][:2]
        [(784, 1024), (1024,)]
    """
    given = [name for name in ("layers", "params", "shape") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {' and '.join('--' + name for name in given)}, not both")
    if args.params is not None:
        if not os.path.splitext(args.params)[1] == ".npz":
            raise ValueError(f"--params needs an .npz file; got {args.params!r}")
        leaves = leaf_shapes(args.params, call="--params")
        if not any(leaf.size for leaf in leaves.values()):
            raise ValueError(f"--params needs a file with parameters; {args.params!r} has none")
        return leaves
    if args.shape is not None:
        return leaf_shapes({"weight": tuple(args.shape)})
    widths = args.layers or LAYERS
    if len(widths) < 2:
        raise ValueError(f"--layers needs two widths or more; got {widths}")
    layers = enumerate(zip(widths[:-1], widths[1:], strict=True))
    return leaf_shapes({f"layer{i}": {"kernel": (p, q), "bias": (q,)} for i, (p, q) in layers})


def add_conditions(add: Callable[..., Any]) -> None:
    """Options that say under which conditions; `conditions_of` reads them."""
    positive = real(0.0, above=True)
    add("--examples", type=whole(1), default=256, help="of a batch (default: 256)")
    add(
        "--positions",
        type=whole(1),
        default=1,
        help="rows of a layer's input per example, such as tokens (default: 1)",
    )
    add(
        "--seconds-per-example",
        type=real(0.0),
        default=0.01,
        metavar="SECONDS",
        help="a worker's computing (default: 0.01)",
    )
    add(
        "--bandwidth",
        type=positive,
        default=1000.0,
        metavar="MBIT/S",
        help="from a worker to the master (default: 1000)",
    )
    add(
        "--master-bandwidth",
        type=positive,
        default=math.inf,
        metavar="MBIT/S",
        help="of the master's own link (default: inf)",
    )
    latency = converted(parse_latency)
    add("--slowdown", type=latency, metavar="MODEL", help="multiplies computing; " + LATENCY_HELP)
    add("--pause", type=latency, metavar="MODEL", help="adds seconds, however little is computed")
    add("--network", type=latency, metavar="MODEL", help="multiplies a message's seconds")
    add("--deadline", type=positive, metavar="SECONDS", help="after which a step goes on")
    add(
        "--product-share",
        type=real(0.0, 1.0),
        default=1 / 3,
        metavar="SHARE",
        help="of computing that forms weights' gradients; factors leave it to the decoder "
        "(default: 1/3)",
    )
    add("--seed", type=whole(0), default=0, help="of what is drawn (default: 0)")


def conditions_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `simulate` and `plan` that the options name; Mbit/s in bytes/s."""
    names = (
        "examples", "positions", "seconds_per_example", "slowdown", "pause", "network", "deadline",
        "product_share", "seed",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names}
    megabit = 1e6 / 8
    return options | {
        "bandwidth": args.bandwidth * megabit,
        "master_bandwidth": args.master_bandwidth * megabit,
    }
