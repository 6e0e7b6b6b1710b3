"""`jaxcode train`, once `jaxcode.train.session` has found nothing wrong: train, write and report.

The directory is created with the first accepted step, so that a training that fails at once leaves
nothing behind.
"""

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console

from jaxcode import plot
from jaxcode.train import checkpoint, report
from jaxcode.train.rundir import RunDirectory
from jaxcode.train.session import Session
from jaxcode.train.training import Diverged, Record, State
from jaxcode.train.verification import Differences, difference, dropping_data, without_stragglers

_DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Stopped(Exception):
    """A training that ended early, with a line to say so and the exit code.

    Example:
        >>> Stopped("step 3: the loss is nan", code=1).code
        1
    """

    def __init__(self, message: str, *, code: int):
        super().__init__(message)
        self.code = code


class Interruption(threading.Event):
    """Set when the training should end early, with the exit code that says why.

    Example:
        >>> Interruption().code
        130
    """

    code = 130


def run(session: Session) -> int:
    """Train, write what was asked for, and print the table.

    Args:
        session: from `jaxcode.train.session.prepare`.

    Returns:
        0.

    Raises:
        Stopped: by Ctrl-C, or since a number was not finite.

    Example:
        >>> from jaxcode.cli import parser
        >>> from jaxcode.train.session import prepare
        >>> run(prepare(parser().parse_args(["train", "--steps", "2", "--hidden", "9"])))
        digits: 1,438 training and 359 test examples, layers 64-9-10
        ...
        0
    """
    trainer = session.trainer
    print("\n".join([report.describe(trainer), *session.notes]), flush=True)
    if session.verbose:
        print(trainer.summary(session.state.params), flush=True)
    with interruptible() as stop, report.meter(message=session.traffic.message) as bar:
        state, records = _train(session, bar, stop)
        differences = _verify(session, state, bar, stop) if session.verify else None
    table = report.table(
        trainer,
        records,
        accuracy=trainer.accuracy(state.params),
        traffic=session.traffic,
        differences=differences,
    )
    Console(highlight=False).print(table)
    if session.directory:
        print(f"written to {session.directory.path}")
    return 0


def _train(session: Session, bar: report.Meter, stop: Interruption) -> tuple[State, list[Record]]:
    """Take the steps; whatever ends them, the last good state is written."""
    state, records, failure = session.state, list[Record](), None
    bar.start("training", total=session.steps, completed=int(state.step))
    try:
        for new, record in session.trainer.steps(state, session.steps):
            state = new
            records.append(record)
            bar.advance(record)
            if session.directory:
                _write_step(session, session.directory, state, records)
            if stop.is_set():
                break
    except Diverged as error:
        failure = error
    kept = ""
    if session.directory and records:
        _write_end(session, session.directory, state, records)
        kept = f"; step {int(state.step)} is kept in {session.directory.path}"
    if failure:
        raise Stopped(f"{failure}{kept}", code=1) from failure
    if stop.is_set():
        raise Stopped(_how_to_go_on(session, int(state.step)), code=stop.code)
    return state, records


def _write_step(
    session: Session, directory: RunDirectory, state: State, records: list[Record]
) -> None:
    """Write the newest step's metrics, and the checkpoint where one is due."""
    if len(records) == 1:
        directory.start(session.facts, session.history)
    step = records[-1].step
    directory.append(_metrics(records[-1], session.traffic.message))
    if session.checkpoint_every and step % session.checkpoint_every == 0 and step < session.steps:
        _save(session, directory, state)


def _write_end(
    session: Session, directory: RunDirectory, state: State, records: list[Record]
) -> None:
    """Write the checkpoint and the picture of all steps, those before a resume too."""
    _save(session, directory, state)
    config, traffic = session.trainer.config, session.traffic
    sizes = {
        f"this run: {config.method}": traffic.message,
        "dense": traffic.dense,
        f"Ye-Abbe, fragments {config.fragments}": traffic.ye_abbe,
    }
    if traffic.lower_bound is not None:
        sizes["lower bound"] = traffic.lower_bound
    lines = [*session.history, *(_metrics(record, traffic.message) for record in records)]
    directory.save_picture(plot.training(lines, config.workers, sizes))


def _save(session: Session, directory: RunDirectory, state: State) -> None:
    """Write a checkpoint with what identifies the run."""
    identity = {**session.facts["config"], "data_digest": session.facts["data_digest"]}
    checkpoint.save(directory.path, state, step=int(state.step), config=identity)


def _metrics(record: Record, message: float | int) -> dict[str, Any]:
    """Return one line of ``metrics.jsonl``."""
    answered = int(record.survivors.sum())
    return {
        "step": record.step,
        "loss": record.loss,
        "survivors": answered,
        "missing": np.flatnonzero(~record.survivors).tolist(),
        "bytes_per_worker": message,
        "bytes_received": message * answered,
        "seconds": round(record.seconds, 6),
    }


def _verify(session: Session, state: State, bar: report.Meter, stop: Interruption) -> Differences:
    """Repeat the training from step 0 without stragglers, and with the missing data dropped."""
    trainer, steps = session.trainer, session.steps

    def last(name: str, states: Iterator[State]) -> Any:
        bar.start(name, total=steps)
        params = state.params
        for other in states:
            params = other.params
            bar.advance()
            if stop.is_set():
                raise Stopped(_how_to_go_on(session, steps, during="verifying"), code=stop.code)
        return params

    reference = last("no stragglers", without_stragglers(trainer, steps))
    control = None
    if trainer.config.stragglers and trainer.config.straggler_model != "none":
        dropped = last("dropping data", dropping_data(trainer, steps))
        control = difference(dropped, reference)
    return Differences(difference(state.params, reference), control)


def _how_to_go_on(session: Session, step: int, *, during: str = "training") -> str:
    """Say where a run was stopped and how to continue it."""
    where = f"stopped while {during}, after step {step} of {session.steps}"
    if not session.directory:
        return f"{where}; nothing was written, for there is no --out"
    again = " --verify" if session.verify else ""
    path = shlex.quote(str(session.directory.path))
    return f"{where}; continue with: jaxcode train --out {path} --resume{again}"


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn Ctrl-C, or the signal of a preemption, into a flag that is read between steps.

    A second one of the same kind ends the process as it would have without us.

    Yields:
        The flag.
    """
    stop = Interruption()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.code = 128 + number
        stop.set()
        signal.signal(number, _DEFAULTS[number])

    with handling(handle):
        yield stop


@contextmanager
def handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a function called on Ctrl-C and on the signal of a preemption, while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _DEFAULTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
