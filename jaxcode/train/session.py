"""Everything `jaxcode train` checks before it writes a byte or compiles its step.

Options not given are those of the run that is resumed, and otherwise the defaults; whatever is
wrong with an option or a file is one `ValueError`.
"""

import argparse
import dataclasses
import importlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxcode.train import checkpoint, datasets
from jaxcode.train.rundir import RunDirectory
from jaxcode.train.training import Config, State, Traffic, Trainer

STEPS = 200
VIRTUAL_DEVICES = 8
# More parameters than this are not for a trainer that simulates every worker on one machine.
MAX_PARAMETERS = 2**28
# What run.json holds, and the options among it, by the names that `argparse` gives them.
FACTS = {"config", "data_digest", "steps", "devices", "jax"}
FIELDS = {field.name: None for field in dataclasses.fields(Config)}.keys()
# Options that say something of a cluster.
CLUSTER_OPTIONS = (
    "problem",
    "topology",
    "deadline",
    "on_undecodable",
    "inject",
    "cpus_per_worker",
    "gpus_per_worker",
)

C = TypeVar("C", bound=Config)


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that has passed every check.

    Attributes:
        trainer: the step and its data.
        state: where to start from.
        steps: the step to stop after.
        traffic: bytes per worker and step.
        directory: where to write, or None.
        facts: what ``run.json`` is to hold.
        history: metrics of the steps before a resume.
        checkpoint_every: steps between checkpoints, or None.
        verify: compare with the training without stragglers.
        verbose: show what is sent for each parameter.
        notes: lines to show before the training.
    """

    trainer: Trainer
    state: State
    steps: int
    traffic: Traffic
    directory: RunDirectory | None
    facts: dict[str, Any]
    history: list[dict[str, Any]]
    checkpoint_every: int | None
    verify: bool
    verbose: bool
    notes: list[str]


def prepare(args: argparse.Namespace) -> Session:
    """Check options, data, code, directory and checkpoint.

    Args:
        args: as `jaxcode.cli.parser` returns them; None for options not given.

    Returns:
        All that the training needs.

    Raises:
        ValueError: something does not fit; one sentence that names it.
        ModuleNotFoundError: an extra is not installed.

    Example:
        >>> from jaxcode.cli import parser
        >>> prepare(parser().parse_args(["train", "--workers", "2", "--stragglers", "2"]))
        Traceback (most recent call last):
        ...
        ValueError: `--workers 2 --stragglers 2 --fragments 1`: needs workers >= stragglers + ...
    """
    _refuse_cluster_options(args)
    require_extras(args)
    directory, stored = open_directory(args, FACTS, FIELDS)
    config = configured(args, stored, Config)
    data = datasets.load(config.data, seed=config.seed)
    check_data(config, data, stored)
    _use_virtual_devices()
    trainer = Trainer(config, data)
    expected = trainer.expected_state()
    check_size(config, expected)
    facts = _facts(trainer, args.steps or stored.get("steps", STEPS))
    state, history, notes = None, list[dict[str, Any]](), list[str]()
    if stored and directory:
        state = _restored(directory, expected, stored, steps=facts["steps"])
        history = directory.records(until=int(state.step))
        notes = _changes(facts, stored)
    return Session(
        trainer=trainer,
        state=state or trainer.initial_state(),
        steps=facts["steps"],
        traffic=trainer.traffic(expected.params),
        directory=directory,
        facts=facts,
        history=history,
        checkpoint_every=args.checkpoint_every,
        verify=args.verify,
        verbose=args.verbose,
        notes=notes,
    )


def _refuse_cluster_options(args: argparse.Namespace) -> None:
    """Refuse what says something of a cluster, where there is none."""
    given = [name for name in CLUSTER_OPTIONS if getattr(args, name, None) is not None]
    if given:
        name = getattr(args, "problem", None) or f"--{given[0].replace('_', '-')}"
        raise ValueError(
            f"`{name}`: needs --cluster, which trains on Ray; without it, one process here trains "
            "the built-in classifier: add --cluster, or leave it out"
        )


def require_extras(args: argparse.Namespace) -> None:
    """Import what will be needed later on, while nothing has been written."""
    names = ["rich.progress"]
    if args.out is not None:
        names += ["orbax.checkpoint", "matplotlib.figure"]
    for name in names:
        importlib.import_module(name)


def open_directory(
    args: argparse.Namespace, facts: Collection[str], fields: Collection[str]
) -> tuple[RunDirectory | None, dict[str, Any]]:
    """Return the run's directory and, for a resume, what its ``run.json`` holds.

    Args:
        args: with out, resume and checkpoint_every.
        facts: the names in ``run.json``, "cluster" among them for a run on one.
        fields: the names in its configuration.

    Raises:
        ValueError: there is nothing to resume, or something that would be overwritten.
    """
    if args.out is None:
        for option, given in (("resume", args.resume), ("checkpoint-every", args.checkpoint_every)):
            if given:
                raise ValueError(f"`--{option}`: needs `--out DIR`; got none")
        return None, {}
    if not args.out:
        raise ValueError("`--out`: needs the name of a directory; got an empty one")
    directory = RunDirectory(Path(args.out))
    if args.resume:
        stored = directory.read_facts()
        if "cluster" in stored and "cluster" not in facts:
            raise ValueError(
                f"`--resume`: the run in `{args.out}` is one on a cluster: add --cluster"
            )
        if "cluster" in facts and "cluster" not in stored:
            raise ValueError(
                f"`--resume`: the run in `{args.out}` is not one on a cluster: leave --cluster out"
            )
        if stored.keys() != set(facts) or stored["config"].keys() != set(fields):
            raise ValueError(
                f"`--resume`: run.json in `{args.out}` was written by another version of jaxcode"
            )
        return directory, stored
    directory.check_new()
    return directory, {}


def configured(
    args: argparse.Namespace,
    stored: dict[str, Any],
    kind: type[C],
    *,
    may_change: Collection[str] = (),
) -> C:
    """Return the options given, over the resumed run's, over the defaults.

    Args:
        args: None for options not given.
        stored: what ``run.json`` holds, for a resume.
        kind: of configuration.
        may_change: options of which a resumed run may be given others.

    Raises:
        ValueError: the run to resume is another one, or there are too few workers.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "data" in given:
        given["data"] = os.path.abspath(given["data"])
    old = stored.get("config", {})
    # A data set is compared by its contents, once they are loaded.
    free = {"data", *may_change}
    others = {name: value for name, value in given.items() if name not in free}
    differ = [name for name in others if name in old and _plain(others[name]) != old[name]]
    if differ:
        raise ValueError(
            f"`--resume`: the run in `{args.out}` is another one: "
            + ", ".join(_is_not(name, old[name], given[name]) for name in differ)
            + ": leave these options out, or start a new directory"
        )
    values = {**old, **given}
    if "hidden" in values:
        values["hidden"] = tuple(values["hidden"])
    config = kind(**values)
    n, s, m = config.workers, config.stragglers, config.fragments
    if n < s + m:
        raise ValueError(
            f"`--workers {n} --stragglers {s} --fragments {m}`: needs workers >= stragglers + "
            f"fragments = {s + m}; got {n}: add workers or lower the others"
        )
    return config


def check_data(config: Config, data: datasets.Dataset, stored: dict[str, Any]) -> None:
    """Refuse a batch larger than the data, and other data than the resumed run's."""
    known = len(data.y_train)
    if config.batch_size > known:
        raise ValueError(
            f"`--batch-size {config.batch_size}`: needs so many training examples; {data.name} has "
            f"{known} beside the {len(data.y_test)} held out: use at most {known}"
        )
    if stored and data.digest != stored["data_digest"]:
        raise ValueError(
            f"`--resume`: needs the data that the run began with; the arrays of {data.name} are "
            "others: give that file with --data, or start a new directory"
        )


def check_size(config: Config, expected: State) -> None:
    """Refuse a model that memory could not hold, before it is made."""
    count = sum(leaf.size for leaf in jax.tree.leaves(expected.params))
    if count > MAX_PARAMETERS:
        raise ValueError(
            f"`--hidden {_text(config.hidden)}`: needs a model of at most "
            f"{MAX_PARAMETERS:,} parameters; got {count:,}"
        )


def _use_virtual_devices() -> None:
    """Ask for eight CPU devices, unless the user chose a number or a backend already runs.

    The setting concerns the CPU alone: where there are accelerators, they are used.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and jax.config.jax_num_cpu_devices == -1:  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
        except RuntimeError:
            return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where no platform is left to try
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(
            f"`JAX_PLATFORMS={platforms}`: JAX finds no such device. {error}"
        ) from error


def _facts(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Return what identifies a run, as plain JSON values."""
    devices = 1 if trainer.mesh is None else trainer.mesh.size
    return {
        "config": {
            name: _plain(value) for name, value in dataclasses.asdict(trainer.config).items()
        },
        "data_digest": trainer.data.digest,
        "steps": steps,
        "devices": f"{devices} {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }


def _restored(
    directory: RunDirectory, expected: State, stored: dict[str, Any], *, steps: int
) -> State:
    """Return the newest checkpoint's state, if it is whole and this run's."""
    path = directory.latest()
    config = checkpoint.read_manifest(path)["config"]
    old = {**stored["config"], "data_digest": stored["data_digest"]}
    differ = [name for name in old if name != "data" and config.get(name) != old[name]]
    if differ:
        raise ValueError(
            f"checkpoint `{path}` is another run's than run.json beside it: "
            + ", ".join(_is_not(name, config.get(name), old[name]) for name in differ)
        )
    state = checkpoint.restore(path, expected)
    if int(state.step) > steps:
        raise ValueError(
            f"`--steps {steps}`: `{path}` is already at step {int(state.step)}: ask for more"
        )
    return state


def _changes(facts: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Say what differs from the machine that a resumed run began on."""
    return [
        f"{name}: {stored[name]} before, {facts[name]} now: "
        "the last digits may differ from those of an uninterrupted run"
        for name in ("devices", "jax")
        if stored[name] != facts[name]
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    return json.loads(json.dumps(value))


def _is_not(name: str, old: Any, new: Any) -> str:
    """Word one mismatch."""
    return f"{name.replace('_', '-')} is {_text(old)}, not {_text(new)}"


def _text(value: Any) -> str:
    """Return an option's value as a user types it, and a digest by its start."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text[:12] if len(text) == 64 else text
