"""What a cluster trains: the classifier of `jaxcode train`, or a problem in a module of the user's.

All of it travels to the workers: the classifier as objects of this package, which is installed
there, and a user's module by value, so that only what it imports has to be there too.
"""

import dataclasses
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32, PyTree

from jaxcode.checks import first_line
from jaxcode.code import Code
from jaxcode.partitions import partition_sizes
from jaxcode.train.schedule import batch_indices
from jaxcode.train.training import Trainer

REQUIRED = ("params", "loss", "data", "optimizer")
OPTIONAL = {"evaluate": None, "has_aux": False, "seed": None}
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, as `jaxcode.cluster.Cluster` takes it.

    Attributes:
        name: "digits", a file's name, or MODULE:NAME.
        params: the first parameters.
        loss: of parameters, a batch and, with a seed, a key.
        data: ``data(block, step)`` returns a block's batch.
        optimizer: an Optax transformation.
        evaluate: of parameters, gives numbers by name; or None.
        has_aux: whether the loss returns ``(value, aux)``.
        seed: of the keys given to the loss, or None.
    """

    name: str
    params: PyTree
    loss: Callable[..., Any]
    data: Callable[[int, int], Any]
    optimizer: Any
    evaluate: Callable[[Any], Mapping[str, Any]] | None = None
    has_aux: bool = False
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Shares:
    """The blocks of each step's batch: contiguous shares of it, cut as `jaxcode.assign` does.

    Attributes:
        x: training features.
        y: training classes.
        sizes: examples of each block.
        seed: of the batches.

    Example:
        >>> data = Shares(np.zeros((9, 2), np.float32), np.arange(9, dtype=np.int32), (2, 1), 0)
        >>> data(0, 5)[1].shape, data(1, 5)[1].shape
        ((2,), (1,))
    """

    x: Float32[np.ndarray, "train features"]
    y: Int32[np.ndarray, " train"]
    sizes: tuple[int, ...]
    seed: int

    def __call__(self, block: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the features and classes of one block."""
        total = sum(self.sizes)
        indices = batch_indices(len(self.y), total, seed=self.seed, step=step)
        start = sum(self.sizes[:block])
        mine = indices[start : start + self.sizes[block]]
        return self.x[mine], self.y[mine]


def classifier(trainer: Trainer, code: Code) -> Problem:
    """Return what `jaxcode train` trains without a cluster: same data, model, batches and Adam.

    Under dropout, the masks are others: they come from the cluster's keys.

    Args:
        trainer: of the classifier.
        code: whose blocks each batch is cut into.

    Raises:
        ValueError: there are fewer examples in a batch than blocks.
    """
    config, data = trainer.config, trainer.data
    k = code.num_partitions
    if config.batch_size < k:
        raise ValueError(
            f"`--batch-size {config.batch_size}`: needs an example at least for each of the {k} "
            f"blocks of {config.workers} workers: use {k} or more"
        )
    sizes = partition_sizes(config.batch_size, k, shares=code.shares)
    shares = Shares(data.x_train, data.y_train, tuple(map(int, sizes)), config.seed)
    return Problem(
        name=data.name,
        params=jax.tree.map(np.asarray, trainer.initial_state().params),
        loss=trainer.loss,
        data=shares,
        optimizer=trainer.optimizer,
        evaluate=lambda params: {"test accuracy": trainer.accuracy(params)},
        seed=config.seed if config.dropout else None,
    )


def load(text: str) -> Problem:
    """Import a problem of the user's; the current directory is searched first.

    Args:
        text: MODULE:NAME. NAME is an object or a mapping with params, loss, data and optimizer, and
            perhaps evaluate, has_aux and seed; or a function without arguments that returns one.

    Raises:
        ValueError: there is no such thing, it raised an exception, or something in it is missing
            or not what it should be.

    Example:
        >>> load("absent:problem")
        Traceback (most recent call last):
        ...
        ValueError: `absent:problem`: importing absent failed: No module named 'absent'
    """
    if not _FORM.fullmatch(text):
        raise ValueError(f"`{text}`: needs MODULE:NAME, such as my_module:problem")
    module, name = text.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _guarded(text, f"importing {module}", lambda: importlib.import_module(module))
    if not hasattr(found, name):
        raise ValueError(f"`{text}`: {module} ({_file(found)}) has no `{name}`")
    source = getattr(found, name)
    if callable(source) and not any(_has(source, key) for key in REQUIRED):
        source = _guarded(text, f"{name}()", source)
    missing = [key for key in REQUIRED if not _has(source, key)]
    if missing:
        raise ValueError(
            f"`{text}`: needs {', '.join(REQUIRED)}; {', '.join(missing)} missing in {name}, "
            f"{type(source).__name__}"
        )
    keys = source if isinstance(source, Mapping) else ()
    if unknown := [key for key in keys if key not in (*REQUIRED, *OPTIONAL)]:
        raise ValueError(
            f"`{text}`: {name} has {', '.join(map(repr, unknown))}; it may have "
            f"{', '.join([*REQUIRED, *OPTIONAL])} only"
        )
    values = {key: _get(source, key) for key in REQUIRED}
    values |= {key: _get(source, key) if _has(source, key) else OPTIONAL[key] for key in OPTIONAL}
    _check(text, values)
    values["params"] = _guarded(text, "params", lambda: jax.tree.map(np.asarray, values["params"]))
    return Problem(name=text, **values)


def evaluated(problem: Problem, params: PyTree) -> dict[str, float]:
    """Return what the problem's `evaluate` says, as plain numbers.

    Raises:
        ValueError: it raised an exception, or returned something else.

    Example:
        >>> toy = Problem("toy", {}, abs, abs, None, evaluate=lambda params: {"error": 1})
        >>> evaluated(toy, {})
        {'error': 1.0}
    """
    evaluate = problem.evaluate
    if evaluate is None:
        return {}
    found = _guarded(problem.name, "evaluate(params)", lambda: evaluate(params))
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{problem.name}`: needs evaluate(params) to return numbers by name; got {found!r}"
        ) from error


def _check(text: str, values: Mapping[str, Any]) -> None:
    """Refuse what no cluster could train."""
    for key in ("loss", "data", "evaluate"):
        if not (callable(values[key]) or (key == "evaluate" and values[key] is None)):
            raise ValueError(f"`{text}`: needs {key} to be a function; got {values[key]!r}")
    if not (hasattr(values["optimizer"], "init") and hasattr(values["optimizer"], "update")):
        raise ValueError(
            f"`{text}`: needs an Optax optimizer, with init and update; got {values['optimizer']!r}"
        )
    leaves = jax.tree.leaves(values["params"])
    bad = next((x for x in leaves if not hasattr(x, "dtype") and not np.isscalar(x)), None)
    if not leaves or bad is not None or any(isinstance(x, str) for x in leaves):
        raise ValueError(
            f"`{text}`: needs params to be a tree of arrays; got {bad or values['params']!r}"
        )
    if not isinstance(values["has_aux"], bool):
        raise ValueError(f"`{text}`: needs has_aux to be a bool; got {values['has_aux']!r}")
    seed = values["seed"]
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if seed is not None and not (whole and 0 <= seed < 2**32):
        raise ValueError(f"`{text}`: needs seed to be a whole number from 0 or None; got {seed!r}")


def _has(source: Any, key: str) -> bool:
    return key in source if isinstance(source, Mapping) else hasattr(source, key)


def _get(source: Any, key: str) -> Any:
    return source[key] if isinstance(source, Mapping) else getattr(source, key)


def _guarded(text: str, what: str, call: Callable[[], Any]) -> Any:
    """Call the user's code; whatever it raises becomes a line that says where."""
    try:
        return call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [x for x in frames if x.filename != __file__ and "importlib" not in x.filename]
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise ValueError(f"`{text}`: {what} failed: {kind}{first_line(error)}{where}") from error


def _file(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "built in")
