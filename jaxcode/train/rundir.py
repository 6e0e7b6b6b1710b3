"""The directory of one training run: configuration, metrics, picture and checkpoint.

Nothing is created before `start`, and every file but the growing ``metrics.jsonl`` is written under
another name and renamed. A resumed run cuts ``metrics.jsonl`` back to the checkpoint's step, so
that no step appears twice.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcode.train import checkpoint


class RunDirectory:
    """A run's files under one path.

    Args:
        path: the directory; need not exist.

    Example:
        >>> import tempfile
        >>> run = RunDirectory(Path(tempfile.mkdtemp()) / "digits")
        >>> run.check_new()
        >>> run.start({"seed": 0}, [])
        >>> run.append({"step": 1, "loss": 2.3})
        >>> run.read_facts(), run.records(until=1)
        ({'seed': 0}, [{'step': 1, 'loss': 2.3}])
    """

    def __init__(self, path: Path):
        self.path = path
        self._facts = path / "run.json"
        self._metrics = path / "metrics.jsonl"

    def check_new(self) -> None:
        """Refuse a path that holds a run or that cannot become a directory.

        Raises:
            ValueError: says which.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"`--out {self.path}`: needs a directory; got a file")
        if self._facts.exists() or self._metrics.exists() or checkpoint.latest(self.path):
            raise ValueError(
                f"`--out {self.path}`: holds a run already: continue it with --resume, "
                "or choose another directory"
            )
        existing = self.path.absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"`--out {self.path}`: {existing} is not a directory to write in")

    def read_facts(self) -> dict[str, Any]:
        """Return what `start` was given.

        Raises:
            ValueError: there is no run, or its ``run.json`` is damaged.
        """
        if not self._facts.exists() and checkpoint.latest(self.path) is None:
            raise ValueError(f"`--resume`: `--out {self.path}` holds no run to continue")
        try:
            facts = json.loads(self._facts.read_text())
            if not isinstance(facts, dict):
                raise ValueError(facts)
        except (OSError, ValueError) as error:
            raise ValueError(f"`{self._facts}` is missing or truncated: cannot resume") from error
        return facts

    def latest(self) -> Path:
        """Return the newest checkpoint.

        Raises:
            ValueError: there is none.
        """
        path = checkpoint.latest(self.path)
        if path is None:
            raise ValueError(
                f"`--resume`: `{self.path}` has no checkpoint, for the run was killed before its "
                "first: remove the directory and start again"
            )
        return path

    def records(self, *, until: int, first: int = 1) -> list[dict[str, Any]]:
        """Return the metrics of the first steps.

        Args:
            until: so many.
            first: the number of the first.

        Raises:
            ValueError: a step's line is missing or truncated.
        """
        try:
            with self._metrics.open() as file:
                lines = [line for _, line in zip(range(until), file, strict=False)]
            records = [json.loads(line) for line in lines]
            steps = [record["step"] for record in records]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`{self._metrics}` is missing or damaged: cannot resume") from error
        if steps != list(range(first, first + until)):
            raise ValueError(
                f"`{self._metrics}` lacks steps before the checkpoint's {until}: cannot resume"
            )
        return records

    def start(self, facts: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
        """Create the directory where needed, and write the configuration and the first metrics.

        Args:
            facts: plain JSON values that describe the run.
            records: metrics to keep, of the steps before a resume.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._replace(self._facts, json.dumps(facts, indent=1) + "\n")
        self._replace(self._metrics, "".join(json.dumps(record) + "\n" for record in records))

    def append(self, record: dict[str, Any]) -> None:
        """Add one step's metrics."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save_picture(self, figure: Any) -> Path:
        """Write a Matplotlib Figure as ``metrics.png``."""
        path = self.path / "metrics.png"
        partial = self.path / "metrics.partial.png"
        figure.savefig(partial, dpi=120)
        partial.replace(path)
        return path

    def _replace(self, path: Path, text: str) -> None:
        """Write a file in one move."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)
