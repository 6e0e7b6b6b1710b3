"""Everything `jaxcode train --cluster` checks before it connects to Ray or writes a byte."""

import argparse
import dataclasses
import os
import re
from typing import Any

import jax
import numpy as np

from jaxcode.code import Code
from jaxcode.codes import fractional_repetition
from jaxcode.train import checkpoint, datasets, problem
from jaxcode.train.problem import Problem
from jaxcode.train.rundir import RunDirectory
from jaxcode.train.session import (
    STEPS,
    check_data,
    check_size,
    configured,
    open_directory,
    require_extras,
)
from jaxcode.train.training import Config, Trainer

LOCAL = "local"


@dataclasses.dataclass(frozen=True)
class ClusterConfig(Config):
    """What decides a run on a cluster; the fields of `Config`, and of the cluster.

    Attributes:
        workers: n, each a process.
        straggler_model: of no use here, where stragglers are real.
        problem: MODULE:NAME, or None for the classifier.
        topology: "peers" or "master".
        deadline: seconds, or "adaptive".
        on_undecodable: "raise", "skip" or "approximate".
        cpus_per_worker: for Ray to reserve.
        gpus_per_worker: for Ray to reserve; without any, workers compute on the CPU.

    Example:
        >>> ClusterConfig().workers
        4
    """

    workers: int = 4
    straggler_model: str = "none"
    problem: str | None = None
    topology: str = "peers"
    deadline: float | str = 60.0
    on_undecodable: str = "raise"
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0


FIELDS = tuple(field.name for field in dataclasses.fields(ClusterConfig))
FACTS = ("cluster", "config", "data_digest", "steps", "jax", "blocks")
# What a resumed run may be given anew: none of it changes what is learnt, but for rounding.
MAY_CHANGE = (
    "workers",
    "stragglers",
    "fragments",
    "method",
    "topology",
    "deadline",
    "on_undecodable",
    "cpus_per_worker",
    "gpus_per_worker",
)
# What belongs to the classifier and its data.
OF_THE_CLASSIFIER = ("data", "hidden", "dropout", "learning_rate", "batch_size", "seed")


@dataclasses.dataclass(frozen=True)
class ClusterSession:
    """A run that has passed every check.

    Attributes:
        config: the options.
        code: who computes what.
        problem: what is trained.
        trainer: of the classifier, or None.
        faults: to inject.
        steps: the step to stop after.
        start: steps taken before a resume.
        address: of the cluster, or "local".
        directory: where to write, or None.
        facts: what ``run.json`` is to hold.
        history: metrics of the steps before a resume.
        checkpoint_every: steps between checkpoints; 0 for none.
        verify: compare with ordinary training.
        verbose: show what workers print, and what is sent for each parameter.
        notes: lines to show before the training.
    """

    config: ClusterConfig
    code: Code
    problem: Problem
    trainer: Trainer | None
    faults: tuple[Any, ...]
    steps: int
    start: int
    address: str
    directory: RunDirectory | None
    facts: dict[str, Any]
    history: list[dict[str, Any]]
    checkpoint_every: int
    verify: bool
    verbose: bool
    notes: list[str]


def prepare(args: argparse.Namespace) -> ClusterSession:
    """Check options, data, problem, code, directory and checkpoint.

    Args:
        args: as `jaxcode.cli.parser` returns them; None for options not given.

    Raises:
        ValueError: something does not fit; one sentence that names it.
        ModuleNotFoundError: an extra is not installed.

    Example:
        >>> from jaxcode.cli import parser
        >>> prepare(parser().parse_args(["train", "--cluster", "--straggler-model", "fixed"]))
        Traceback (most recent call last):
        ...
        ValueError: `--straggler-model fixed`: simulates, and on a cluster stragglers are real: ...
    """
    _check_options(args)
    directory, stored = open_directory(args, FACTS, FIELDS)
    config = configured(args, stored, ClusterConfig, may_change=MAY_CHANGE)
    given = [name for name in OF_THE_CLASSIFIER if getattr(args, name) is not None]
    if config.problem and given:
        raise ValueError(
            f"`--{given[0].replace('_', '-')}`: is of the built-in classifier; {config.problem} "
            "decides that itself: leave it out"
        )
    import jaxcode.cluster  # noqa: F401  without Ray, this says what to install

    require_extras(args)
    steps = args.steps or stored.get("steps", STEPS)
    faults = _faults(args.inject, config, steps)
    n, s, m = config.workers, config.stragglers, config.fragments
    code = fractional_repetition(n, s, num_fragments=m)
    _stay_on_the_cpu()
    trainer, digest = None, ""
    if config.problem:
        chosen = problem.load(config.problem)
        problem.evaluated(chosen, chosen.params)
    else:
        data = datasets.load(config.data, seed=config.seed)
        check_data(config, data, stored)
        trainer, digest = Trainer(config, data), data.digest
        check_size(config, trainer.expected_state())
        chosen = problem.classifier(trainer, code)
    blocks = list(dict.fromkeys([*stored.get("blocks", []), code.num_partitions]))
    start, history = _start(directory, steps) if stored and directory else (0, [])
    plain = {name: _plain(value) for name, value in dataclasses.asdict(config).items()}
    facts: dict[str, Any] = {"cluster": chosen.name, "config": plain, "data_digest": digest}
    return ClusterSession(
        config=config,
        code=code,
        problem=chosen,
        trainer=trainer,
        faults=faults,
        steps=steps,
        start=start,
        address=args.cluster,
        directory=directory,
        facts={**facts, "steps": steps, "jax": jax.__version__, "blocks": blocks},
        history=history,
        checkpoint_every=args.checkpoint_every or 0,
        verify=args.verify,
        verbose=args.verbose,
        notes=_changes(config, blocks, verify=args.verify),
    )


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that make no sense on a cluster."""
    if args.straggler_model is not None:
        raise ValueError(
            f"`--straggler-model {args.straggler_model}`: simulates, and on a cluster stragglers "
            "are real: leave it out, or have some with --inject"
        )
    address = args.cluster
    if re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", address):
        raise ValueError(
            f"`--cluster {address}`: needs an address with a port, auto or local; write a problem "
            f"of yours before it: jaxcode train {address} --cluster"
        )
    if address.startswith("ray://"):
        raise ValueError(
            f"`--cluster {address}`: is of Ray's client, and this has to run on one of the "
            "cluster's hosts: log in there, or use `ray job submit`, and write --cluster auto"
        )
    if not re.fullmatch(r"auto|local|[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
        raise ValueError(
            f"`--cluster {address}`: needs an address with a port, such as 10.0.0.1:6379, auto or "
            "local"
        )
    if args.inject is not None and not args.inject.strip(" ,"):
        raise ValueError("`--inject`: needs a fault such as kill:2@10; got none")


def _faults(text: str | None, config: ClusterConfig, steps: int) -> tuple[Any, ...]:
    """Return the faults to inject, of workers and at steps that there are."""
    from jaxcode.cluster import parse_faults

    if text is None:
        return ()
    try:
        faults = parse_faults(text)
    except ValueError as error:
        raise ValueError(re.sub(r"^`\w+`", f"`--inject {text}`:", str(error))) from error
    for fault in faults:
        for what, value, end in (
            ("worker", fault.worker, config.workers),
            ("step", fault.first, steps),
        ):
            if value >= end:
                raise ValueError(
                    f"`--inject {text}`: {what} {value} of {fault.kind} is not there: {what}s are "
                    f"0 to {end - 1}"
                )
    return faults


def _stay_on_the_cpu() -> None:
    """Leave GPUs to the workers: JAX would take most of a GPU's memory for this process."""
    if not os.environ.get("JAX_PLATFORMS") and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def _start(directory: RunDirectory, steps: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the newest checkpoint's step, and the metrics before it."""
    path = directory.latest()
    start = int(checkpoint.read_manifest(path)["step"])
    if start > steps:
        raise ValueError(f"`--steps {steps}`: `{path}` is already at step {start}: ask for more")
    return start, directory.records(until=start, first=0)


def _changes(config: ClusterConfig, blocks: list[int], *, verify: bool) -> list[str]:
    """Say where a resumed run's batches, or masks under dropout, are no longer what they were.

    Raises:
        ValueError: then there is nothing to compare with either.
    """
    if len(blocks) == 1 or not (config.problem or config.dropout):
        return []
    what = f"data(block, step) of {config.problem}" if config.problem else "dropout"
    text = (
        f"{', '.join(map(str, blocks[:-1]))} blocks before, {blocks[-1]} now: {what} goes by block"
    )
    if verify:
        raise ValueError(f"`--verify`: needs a run with the same blocks throughout; {text}")
    return [text]


def _plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    if isinstance(value, tuple):
        return list(value)
    return value.item() if isinstance(value, np.generic) else value
