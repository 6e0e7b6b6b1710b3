"""Faults as data: which worker fails at which step, and how. For drills and tests."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxcode.checks import integer, real

KINDS = {
    "kill": "the process is killed, before it computes",
    "vanish": "the process is killed after it reported, before others fetched its message",
    "stall": "the worker sleeps for some seconds before it computes",
    "raise": "the loss raises an exception",
    "memory": "the worker runs out of memory",
    "corrupt": "bytes of the message are flipped on the way",
    "cut": "half of the message is missing",
    "stale": "the message is that of another step",
    "stranger": "the message says it comes from a worker that does not exist",
    "nan": "the message holds NaN",
}
# Kinds that last for some seconds.
_TIMED = {"stall": 3.0}
_FORM = re.compile(r"([a-z]+):(\d+)@(\d+)(?:-(\d+))?(?::([0-9.]+))?", re.ASCII)


class Fault(NamedTuple):
    """One fault; made by `fail_at` or `parse_faults`.

    Attributes:
        worker: index.
        kind: a key of `KINDS`.
        first: the first step it happens at.
        last: the last step.
        seconds: how long, of those kinds that last.
    """

    worker: int
    kind: str
    first: int
    last: int
    seconds: float


def fail_at(
    worker: int,
    step: int,
    kind: str,
    *,
    until: int | None = None,
    seconds: float | int | None = None,
) -> Fault:
    """A fault of one worker, at one step or up to another, the last one included.

    Args:
        worker: index.
        step: counted from 0.
        kind: a key of `KINDS`: kill, vanish, stall, raise, memory, corrupt, cut, stale, stranger
            or nan.
        until: the last step, by default the first.
        seconds: of a stall; 3 by default.

    Raises:
        ValueError: There is no such fault.

    Example:
        >>> fail_at(1, 5, "stall", until=8).seconds
        3.0
    """
    call = "fail_at"
    worker = integer(call, "worker", worker, 0, None, "Count workers from 0.")
    step = integer(call, "step", step, 0, None, "Count steps from 0.")
    last = step if until is None else until
    last = integer(call, "until", last, step, None, "Give the last step, or leave it out.")
    if kind not in KINDS:
        raise ValueError(
            f"`{call}` needs kind to be one of {', '.join(KINDS)}; got {kind!r}. Choose one."
        )
    if seconds is not None and kind not in _TIMED:
        raise ValueError(
            f"`{call}` needs no seconds for {kind!r}; got {seconds!r}. Leave them out."
        )
    duration = _TIMED.get(kind, 0.0) if seconds is None else seconds
    duration = real(call, "seconds", duration, low=0, high=1e6, cure="Give seconds.")
    return Fault(worker, kind, step, last, duration)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from a text such as ``kill:2@10,stall:1@5-8:3.0,corrupt:3@12``.

    Each is ``KIND:WORKER@STEP``, ``@FIRST-LAST`` for several steps, and ``:SECONDS`` for a stall.

    Raises:
        ValueError: A part is none of these.

    Example:
        >>> [fault.kind for fault in parse_faults("kill:2@10,stall:1@5-8:3.0")]
        ['kill', 'stall']
    """
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FORM.fullmatch(part)
        if not match:
            raise ValueError(
                "`parse_faults` needs KIND:WORKER@STEP, @FIRST-LAST or :SECONDS, such as "
                f"kill:2@10 or stall:1@5-8:3.0; got {part!r}. Separate faults by commas."
            )
        kind, worker, first, last, seconds = match.groups()
        try:
            until = None if last is None else int(last)
            duration = None if seconds is None else float(seconds)
            fault = fail_at(int(worker), int(first), kind, until=until, seconds=duration)
        except ValueError as error:
            raise ValueError(f"`parse_faults` cannot read {part!r}: {error}") from error
        faults.append(fault)
    return tuple(faults)


def of_worker(faults: Iterable[Fault], worker: int, step: int) -> dict[str, Fault]:
    """The faults of one worker at one step, by kind.

    Example:
        >>> sorted(of_worker(parse_faults("kill:2@10,nan:2@9-12"), 2, 10))
        ['kill', 'nan']
    """
    return {
        fault.kind: fault
        for fault in faults
        if fault.worker == worker and fault.first <= step <= fault.last
    }
