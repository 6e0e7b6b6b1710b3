"""A replica's state on its way to another, to the driver, and to disk."""

import re
import threading
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray

from jaxcode.cluster.wire import Layout

# A state travels in parts of this size.
STATE_PART_BYTES = 4_000_000


def fetch_state(handles: list[Any], commit: Any) -> tuple[int, Layout, bytes]:
    """A state from the first of some workers that gives it: its step, layout and numbers."""
    for handle in handles:
        try:
            step, layout, length, crc = ray.get(handle.snapshot.remote(commit), timeout=60)
            parts = range(-(-length // STATE_PART_BYTES))
            tasks = [handle.snapshot_part.remote(step, part) for part in parts]
            numbers = b"".join(ray.get(tasks, timeout=600))
        except ray.exceptions.RayError:
            continue
        if zlib.crc32(numbers) == crc:
            return step, layout, numbers
    raise RuntimeError("no worker gave its state: all of those that had it are gone")


class Writer:
    """Writes one checkpoint at a time, in a thread beside the training.

    Args:
        directory: where to; None for nowhere.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, handles: list[Any], commit: Any, config: dict[str, Any]) -> None:
        """Begin to write the state of the first of some workers that gives it.

        Raises:
            ValueError: there is no directory.
            OSError: the last checkpoint could not be written.
        """
        if self._directory is None:
            raise ValueError("`save` needs the cluster's directory; there is none. Give one.")
        self.finish()
        self._thread = threading.Thread(
            target=self._write, args=(self._directory, handles, commit, config)
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            OSError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise OSError(f"the last checkpoint could not be written: {error}") from error

    def _write(
        self, directory: Path, handles: list[Any], commit: Any, config: dict[str, Any]
    ) -> None:
        from jaxcode.train import checkpoint

        try:
            step, layout, numbers = fetch_state(handles, commit)
            before = checkpoint.latest(directory)
            there = -1 if before is None else checkpoint.step_of(before)
            if there > step:
                raise ValueError(
                    f"{directory} holds step {there} of another training: give another directory, "
                    "or go on with that one by `Cluster.resume`"
                )
            tree = {f"{i:05d}": np.array(x) for i, x in enumerate(layout.split(numbers))}
            checkpoint.save(directory, tree, step=step, config=config)
        except Exception as error:  # raised where the user is, at the next checkpoint
            self._error = error


def read_state(directory: Path, like: Any) -> tuple[int, list[np.ndarray]]:
    """The step and the arrays of a directory's last checkpoint.

    Args:
        directory: of a `Writer`.
        like: a tree of the arrays' shapes and types, to compare with.

    Raises:
        ValueError: it is damaged, or another model's.
    """
    from jaxcode.train import checkpoint

    path = checkpoint.latest(directory)
    assert path is not None
    places, expected = zip(*jax.tree_util.tree_leaves_with_path(like), strict=True)
    try:
        leaves = checkpoint.restore(path, {f"{i:05d}": x for i, x in enumerate(expected)})
    except ValueError as error:  # it knows leaves by their numbers
        names = dict(enumerate(map(jax.tree_util.keystr, places)))
        text = re.sub(
            r"\['(\d{5})'\]", lambda found: names.get(int(found[1]), "one more array"), str(error)
        )
        raise ValueError(text) from error
    arrays = [np.asarray(leaves[name]) for name in sorted(leaves)]
    return checkpoint.step_of(path), arrays
