"""Checkpoints that are whole or refused: an Orbax tree beside a manifest of its every file.

A checkpoint is a directory ``checkpoint-00000020`` with Orbax's files in ``state/`` and a
``manifest.json`` that holds the run's configuration, each array's shape and type, and each file's
SHA-256. It is written under another name and renamed when complete, so that it exists whole or not
at all; and since the manifest is compared before Orbax reads a byte, a file that was cut or lost
later is found by name.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcode.leaves import is_key

_NAME = re.compile(r"checkpoint-(\d{8,})")


def save(directory: Path, state: Any, *, step: int, config: dict[str, Any]) -> Path:
    """Write a checkpoint atomically, then remove the older ones.

    Args:
        directory: the run's directory; exists.
        state: pytree of arrays; typed PRNG keys are stored as data and implementation name.
        step: names the checkpoint.
        config: the run's configuration, plain JSON values.

    Returns:
        The checkpoint's path.

    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> path = save(directory, {"w": np.ones(2)}, step=20, config={"seed": 0})
        >>> path.name, latest(directory) == path
        ('checkpoint-00000020', True)
        >>> restore(path, {"w": np.zeros(2)})["w"].tolist()
        [1.0, 1.0]
    """
    import orbax.checkpoint as ocp

    path = directory / f"checkpoint-{step:08d}"
    partial = directory / f"{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(partial.resolve() / "state", args=ocp.args.StandardSave(_plain(state)))
    manifest = {
        "step": step,
        "config": config,
        "leaves": _leaves(state),
        "files": {
            file.relative_to(partial).as_posix(): _sha256(file)
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        },
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    for other in directory.iterdir():
        if other != path and _NAME.fullmatch(other.name.removesuffix(".partial")):
            shutil.rmtree(other)
    return path


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, from its name.

    Example:
        >>> step_of(Path("run/checkpoint-00000020"))
        20
    """
    return int(path.name.removeprefix("checkpoint-"))


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint of a run's directory, or None.

    Example:
        >>> latest(Path("absent")) is None
        True
    """
    if not directory.is_dir():
        return None
    return max(
        (path for path in directory.iterdir() if _NAME.fullmatch(path.name)),
        key=step_of,
        default=None,
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest.

    Args:
        path: a checkpoint, as `latest` returns it.

    Returns:
        The manifest: step, config, leaves and files.

    Raises:
        ValueError: a file is missing, cut or changed; names it.

    Example:
        >>> import tempfile
        >>> path = save(Path(tempfile.mkdtemp()), {"w": np.ones(2)}, step=3, config={})
        >>> read_manifest(path)["leaves"]
        {"['w']": [[2], 'float64']}
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = dict(manifest["files"])
        manifest["step"], manifest["config"], manifest["leaves"]  # noqa: B018
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"checkpoint `{path}` is damaged: its manifest.json is missing or truncated"
        ) from error
    for name, digest in files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"checkpoint `{path}` is damaged: its file {name} is missing")
        if _sha256(file) != digest:
            raise ValueError(
                f"checkpoint `{path}` is damaged: its file {name} is truncated or changed"
            )
    return manifest


def restore(path: Path, like: Any) -> Any:
    """Read a checkpoint into a tree like the given one.

    Args:
        path: a checkpoint, as `latest` returns it.
        like: pytree of arrays, or of `jax.ShapeDtypeStruct`, with the structure, shapes and types
            to expect; keys are real ones.

    Returns:
        The stored tree, on the host; PRNG keys typed again.

    Raises:
        ValueError: the checkpoint is damaged, or holds another model's arrays; names the first.

    Example:
        >>> import tempfile
        >>> path = save(Path(tempfile.mkdtemp()), {"w": np.ones(2)}, step=3, config={})
        >>> restore(path, {"w": np.zeros(5)})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: checkpoint `...` is another model's: ['w'] is [2] float64, needs [5] float64
    """
    import orbax.checkpoint as ocp

    stored, needed = read_manifest(path)["leaves"], _leaves(like)
    for name in sorted(stored.keys() | needed.keys()):
        if stored.get(name) != needed.get(name):
            got, needs = (
                " ".join(map(str, leaves[name])) if name in leaves else "absent"
                for leaves in (stored, needed)
            )
            raise ValueError(
                f"checkpoint `{path}` is another model's: {name} is {got}, needs {needs}"
            )
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        plain = checkpointer.restore(
            path.resolve() / "state", args=ocp.args.StandardRestore(_plain(like))
        )
    return jax.tree.map(
        lambda old, new: (
            jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if is_key(old) else new
        ),
        like,
        plain,
    )


def _plain(tree: Any) -> Any:
    """Bring a tree to the host, with keys as their data and shapes as zeros."""

    def plain(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return np.zeros(leaf.shape, leaf.dtype)
        return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)

    return jax.tree.map(plain, tree)


def _leaves(tree: Any) -> dict[str, list[Any]]:
    """Map each leaf's path to its shape and its type; a key's type is its implementation."""
    return {
        jax.tree_util.keystr(path): [
            list(np.shape(leaf)),
            f"key<{jax.random.key_impl(leaf)}>" if is_key(leaf) else np.dtype(leaf.dtype).name,
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
