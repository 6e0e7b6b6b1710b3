"""The `jaxcode` command: describe, plan, simulate, plot, train and bench.

A bad argument or file is one line on standard error and exit code 2, before anything is written or
compiled. What a command needs is imported only when that command runs.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from jaxcode.commands.converters import real, seconds_or_adaptive, share, whole

EXTRAS = {
    "matplotlib": "train",
    "orbax": "train",
    "rich": "train",
    "sklearn": "train",
    "ray": "ray",
}
METHODS = ("factors", "dense")
STRAGGLER_MODELS = ("uniform", "exponential", "pareto", "bimodal", "bursty", "fixed", "none")
TOPOLOGIES = ("peers", "master")
UNDECODABLE = ("raise", "skip", "approximate")
MAX_WORKERS = 4096
LARGEST_COUNT = 2**31 - 1

# The commands in jaxcode.commands, and their lines of help.
THEORY = {
    "describe": "what a code costs, and how far from the least",
    "plan": "which design is best here, if any code is",
    "simulate": "what the steps of designs would take",
    "plot": "loads and traces as pictures",
}

ABOUT = "Exact gradients from whichever workers answer, in few bytes."

TRAIN = """\
Train a classifier with workers missing at every step, and see that it makes no difference.

Every step, the workers compute coded gradients of their part of the batch, some of them never
answer, and the exact gradient is put together from the others. The workers run on this machine's
devices: eight virtual ones where there is a single CPU. With --cluster they are processes on Ray,
and their stragglers are real; then what is trained may be yours.
"""

EXAMPLES = """\
examples:
  jaxcode train --verify                      digits, one of eight workers missing
  jaxcode train --stragglers 3 --straggler-model bursty --out runs/bursty
  jaxcode train --out runs/bursty --resume --steps 500
  jaxcode train --data mine.npz               arrays x (examples, ...) and y (examples,)
  jaxcode train --cluster --verify --inject "kill:2@10,stall:1@50-53:1.0,corrupt:0@120-129"
  jaxcode train my_module:problem --cluster 10.0.0.1:6379 --workers 16 --stragglers 2

exit codes: 0 done, 1 the training failed, 2 a bad argument or file, 130 stopped by Ctrl-C,
143 stopped by SIGTERM
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(message))


def fail(message: object, code: int = 2) -> int:
    """Print one line on standard error and return the exit code.

    Args:
        message: what went wrong; line breaks become spaces.
        code: 2 where the user's arguments or files are at fault.

    Returns:
        The code.

    Example:
        >>> fail("no such file")
        2
    """
    print("jaxcode: error:", " ".join(str(message).split()), file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; those of this process by default.

    Returns:
        The exit code: 0 done, 1 the training failed, 2 a bad argument or file, 130 Ctrl-C.

    Example:
        >>> main(["train", "--workers", "0"])
        2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser(*arguments[:1]).parse_args(arguments)
        return args.run(args)
    except SystemExit as stop:
        return int(stop.code or 0)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        return fail(f'this needs {error.name}: pip install "jaxcode[{extra}]"')
    except KeyboardInterrupt:
        print("jaxcode: stopped", file=sys.stderr)
        return 130


def parser(command: str = "train") -> argparse.ArgumentParser:
    """Return the parser of every command.

    Args:
        command: the one that is to run: others are not imported, and have no options.

    Returns:
        A parser whose result has `run(args) -> int`.

    Example:
        >>> parser().parse_args(["train", "--hidden", "32", "16"]).hidden
        [32, 16]
    """
    top = _Parser(prog="jaxcode", description=ABOUT, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"jaxcode {version('jaxcode')}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in THEORY.items():
        if name == command:
            _add_theory(commands, name, line)
        else:
            commands.add_parser(name, help=line)
    train = commands.add_parser(
        "train",
        help="train a classifier with workers missing at every step",
        description=TRAIN,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_train_arguments(train)
    train.set_defaults(run=_train)
    timing = commands.add_parser("bench", help="time coded steps", allow_abbrev=False)
    if command == "bench":
        from jaxcode.bench.command import add_arguments, run

        add_arguments(timing)
        timing.set_defaults(run=run)
    return top


def _add_theory(commands: Any, name: str, line: str) -> None:
    """Add a command of jaxcode.commands, whose errors are one line."""
    module = importlib.import_module(f"jaxcode.commands.{name}")
    command = commands.add_parser(
        name,
        help=line,
        description=module.ABOUT,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(command)

    def run(args: argparse.Namespace) -> int:
        try:
            return module.run(args)
        except (ValueError, MemoryError) as error:
            return fail(error if str(error) else type(error).__name__)
        except BrokenPipeError:
            return 1
        except OSError as error:
            return fail(error)

    command.set_defaults(run=run)


def add_train_arguments(train: argparse.ArgumentParser) -> None:
    """Add the options of `jaxcode train`; those not given are None.

    Args:
        train: the parser to add to.

    Example:
        >>> options = argparse.ArgumentParser()
        >>> add_train_arguments(options)
        >>> options.parse_args(["--seed", "7"]).seed
        7
    """
    train.add_argument(
        "problem",
        nargs="?",
        metavar="MODULE:NAME",
        help="with --cluster: an object, a dictionary or a function that returns one, with params, "
        "loss, data(block, step), optimizer, and perhaps evaluate(params), has_aux and seed "
        "(default: the classifier)",
    )
    _add_model_arguments(train.add_argument_group("what to train").add_argument)
    _add_code_arguments(train.add_argument_group("workers and code").add_argument)
    _add_cluster_arguments(train.add_argument_group("on a Ray cluster").add_argument)
    _add_result_arguments(train.add_argument_group("results").add_argument)


def _add_model_arguments(add: Callable[..., Any]) -> None:
    """Add the options that decide what is learnt."""
    count = whole(1, LARGEST_COUNT)
    add("--data", metavar="FILE.npz", help="arrays x and y (default: scikit-learn's digits)")
    add(
        "--hidden",
        type=whole(1, 2**20),
        nargs="+",
        metavar="WIDTH",
        help="hidden layers (default: 256 256)",
    )
    add("--dropout", type=real(0.0, 1.0), metavar="RATE", help="default: 0")
    add("--learning-rate", type=real(0.0, 1e38, above=True), metavar="RATE", help="default: 0.001")
    add("--batch-size", type=count, metavar="EXAMPLES", help="default: 64")
    add("--steps", type=count, help="in all, those before a resume too (default: 200)")
    add("--seed", type=whole(0, 2**32 - 1), help="default: 0")


def _add_code_arguments(add: Callable[..., Any]) -> None:
    """Add the options that decide who computes and sends what, and who is missing."""
    add(
        "--workers", type=whole(1, MAX_WORKERS), metavar="N", help="default: 8, or 4 with --cluster"
    )
    add(
        "--stragglers",
        type=whole(0, MAX_WORKERS),
        metavar="S",
        help="workers missing at each step (default: 1)",
    )
    add(
        "--fragments",
        type=whole(1, MAX_WORKERS),
        metavar="M",
        help="a message is 1/M of the payload; needs N >= S + M (default: 1)",
    )
    add("--method", choices=METHODS, help="send gradients as factors or dense (default: factors)")
    add(
        "--straggler-model",
        choices=STRAGGLER_MODELS,
        help="who is late: S uniformly, by simulated latencies, always the last S, or nobody "
        "(default: uniform)",
    )


def _add_cluster_arguments(add: Callable[..., Any]) -> None:
    """Add the options of a Ray cluster."""
    add(
        "--cluster",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="train on Ray: on the cluster at HOST:PORT, auto for the one that this host is in, or "
        "local (default) to start one for this command",
    )
    add("--topology", choices=TOPOLOGIES, help="who decodes (default: peers)")
    add(
        "--deadline",
        type=seconds_or_adaptive,
        metavar="SECONDS",
        help="that a step may wait for answers, or adaptive (default: 60)",
    )
    add(
        "--on-undecodable",
        choices=UNDECODABLE,
        help="if too few answered by then (default: raise)",
    )
    add(
        "--inject",
        metavar="FAULTS",
        help="a drill: KIND:WORKER@STEP, @FIRST-LAST, and :SECONDS of a stall, between commas; "
        "kinds are kill, vanish, stall, raise, memory, corrupt, cut, stale, stranger, nan",
    )
    add("--cpus-per-worker", type=share(above=True), metavar="CPUS", help="default: 1")
    add("--gpus-per-worker", type=share(), metavar="GPUS", help="default: 0, compute on CPUs")


def _add_result_arguments(add: Callable[..., Any]) -> None:
    """Add the options that decide what is written and shown."""
    add("--out", metavar="DIR", help="write metrics.jsonl, metrics.png and an Orbax checkpoint")
    add(
        "--resume",
        action="store_true",
        help="continue DIR's run, bit for bit; options not given are its own",
    )
    add(
        "--checkpoint-every",
        type=whole(1, LARGEST_COUNT),
        metavar="STEPS",
        help="default: at the end and on Ctrl-C",
    )
    add("--verify", action="store_true", help="compare with the same training without stragglers")
    add("--verbose", action="store_true", help="show what is sent for each parameter")


def _train(args: argparse.Namespace) -> int:
    """Check everything, then train."""
    clustered = args.cluster is not None
    places = ("clustered_session", "clustered") if clustered else ("session", "command")
    prepare, run = (importlib.import_module(f"jaxcode.train.{name}") for name in places)
    try:
        session = prepare.prepare(args)
    except (ValueError, OSError, MemoryError) as error:
        return fail(error if str(error) else type(error).__name__)
    from jaxcode.train.command import Stopped

    try:
        return run.run(session)
    except ValueError as error:
        if not clustered:
            raise
        return fail(error)
    except Stopped as stopped:
        if stopped.code == 1:
            return fail(stopped, code=1)
        print("jaxcode:", stopped, file=sys.stderr)
        return stopped.code
    except OSError as error:
        return fail(error, code=1)
