"""The workers as the driver sees them: alive, busy, behind, or to be started again."""

import dataclasses
import logging
import math
import os
import time
from typing import Any, Literal

import ray

from jaxcode.checks import first_line
from jaxcode.cluster.actor import WorkerProcess
from jaxcode.cluster.faults import Fault

log = logging.getLogger("jaxcode.cluster")

Doing = Literal["starting", "idle", "computing", "exchanging", "following", "resting", "gone"]
# Faults that end a process: one that was started again does not meet them once more.
_LETHAL = ("kill", "vanish", "raise", "memory")
# Threads of a worker that hand out parts: each may wait for one that is on its way.
SERVING = 64
# Seconds before the first restart; doubled with each further one.
BACK_OFF = 0.5


class WorkerError(RuntimeError):
    """A worker's exception, with its index and its own traceback."""


@dataclasses.dataclass
class Member:
    """One worker.

    Attributes:
        index: of the worker.
        handle: its actor, None while there is none.
        doing: what it is at.
        task: the reference that says when that is done.
        about: the step or plan it is for.
        since: when it began.
        step: of its state, -1 where it is not known.
        restarts: how often it was started again.
        rest_until: when to try again.
        why: what it died of, for errors.
        born: when its process was started.
        knows: the version of the workers' list that it was told.
    """

    index: int
    handle: Any = None
    doing: Doing = "resting"
    task: Any = None
    about: Any = None
    since: float = 0.0
    step: int = -1
    restarts: int = 0
    rest_until: float = 0.0
    why: str = ""
    born: float = 0.0
    knows: int = -1

    def assign(self, doing: Doing, task: Any, about: Any = None) -> None:
        """Note what the worker was asked to do."""
        self.doing, self.task, self.about, self.since = doing, task, about, time.monotonic()

    def describe(self) -> str:
        """For an error: what the worker is doing."""
        state = f"{self.doing} for {time.monotonic() - self.since:.1f} s"
        return f"worker {self.index} ({self.why or state})"


class Members:
    """All workers, and Ray's word on them.

    Args:
        training: what they train.
        faults: to inject.
        timeout: seconds without a part after which its source counts as lost.
        max_restarts: of each worker, until it has run for ten minutes.
        options: of Ray for each worker's actor, such as ``num_cpus`` or ``num_gpus``.
    """

    def __init__(
        self,
        training: Any,
        faults: tuple[Fault, ...],
        timeout: float,
        max_restarts: int,
        options: dict[str, Any],
    ):
        self._training = ray.put(training)
        self._faults, self._timeout = faults, timeout
        self._max_restarts = max_restarts
        self._options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **options}
        self.all: list[Member] = []
        self.restarted: list[int] = []
        self.failure: str = ""
        self._version = 0

    def __iter__(self) -> Any:
        return iter(self.all)

    def __getitem__(self, index: int) -> Member:
        return self.all[index]

    def start(self, member: Member, step: int) -> Any:
        """Make the worker's process; returns its actor."""
        faults = tuple(
            fault
            for fault in self._faults
            if fault.worker == member.index
            and not (member.restarts and fault.kind in _LETHAL and fault.first <= step)
        )
        actor: Any = ray.remote(concurrency_groups={"serve": SERVING})  # type: ignore[call-overload]
        options = dict(self._options)
        environment = dict(options.pop("runtime_env", None) or {})
        own = variables(options["num_cpus"])
        environment["env_vars"] = {**own, **environment.get("env_vars", {})}
        member.handle = (
            actor(WorkerProcess)
            .options(max_restarts=0, max_task_retries=0, runtime_env=environment, **options)
            .remote(member.index, self._training, faults, _settings(), self._timeout)
        )
        member.step, member.why, member.knows = -1, "", -1
        member.born = time.monotonic()
        self._version += 1
        return member.handle

    def warn_of_room(self, number: int, seconds: float) -> None:
        """Say so where the cluster is too small for workers; it may be growing, so no more."""
        for text in lacking(number, self._options):
            log.warning("%s: waiting up to %g s for more", text, seconds)

    def failed(self, member: Member, error: Exception) -> None:
        """A worker died or raised: say so at once, and start it again after a while."""
        why = told(error)
        member.why = f"failed: {why.splitlines()[0]}"
        text = f"worker {member.index} failed while {member.doing}: {why}"
        self.failure = text
        log.warning("%s", text)
        self.stop(member)
        if member.restarts >= self._max_restarts:
            member.doing = "gone"
            log.warning("worker %d is given up after %d restarts", member.index, member.restarts)
            return
        member.rest_until = time.monotonic() + BACK_OFF * 2**member.restarts
        member.restarts += 1
        self.restarted.append(member.index)

    def stop(self, member: Member) -> None:
        """End a worker's process."""
        if member.handle is not None:
            ray.kill(member.handle)
        member.handle, member.task, member.about, member.step = None, None, None, -1
        member.doing, member.since = "resting", time.monotonic()

    def news(self, member: Member) -> dict[int, Any] | None:
        """All workers' actors, where this worker was not told yet: sending them takes time."""
        if member.knows == self._version:
            return None
        member.knows = self._version
        return {m.index: m.handle for m in self.all if m.handle is not None}

    def wait(self, timeout: float) -> list[tuple[Member, Any, Exception | None]]:
        """Who finished, with the result or the exception; waits for one at least."""
        busy = {member.task: member for member in self.all if member.task is not None}
        if not busy:
            time.sleep(min(max(timeout, 0.0), 0.02))
            return []
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=max(timeout, 0.0))
        if ready:
            ready, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0)
        found: list[tuple[Member, Any, Exception | None]] = []
        for task in ready:
            member, member_task = busy[task], task
            member.task = None
            try:
                found.append((member, ray.get(member_task), None))
            except (ray.exceptions.RayError, Exception) as error:
                found.append((member, None, error))
        return found


def _settings() -> dict[str, Any]:
    """The driver's settings of JAX that decide numbers."""
    import jax

    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
    return {name: getattr(jax.config, name) for name in names}


def variables(num_cpus: float | int) -> dict[str, str]:
    """As many threads of XLA as CPUs, and not as the host has: others run there too.

    And replicas compute alike to the last bit only with threads alike.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = " ".join(x for x in flags if "host_platform_device_count" not in x)
    return {"XLA_FLAGS": own, "PJRT_NPROC": str(max(1, math.ceil(num_cpus)))}


def lacking(number: int, options: dict[str, Any]) -> list[str]:
    """What Ray knows too little of by now for so many workers with these options."""
    there = ray.cluster_resources()
    texts = []
    for name, option in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        needed, has = number * (options.get(option) or 0), there.get(name, 0)
        if needed > has:
            texts.append(f"{number} workers need {needed:g} {name}s, and there are {has:g}")
    return texts


def told(error: Exception) -> str:
    """What a worker raised in a line, and its traceback; or why it is gone."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {first_line(error.cause)}\n{error}"
    return first_line(error)  # of a death, Ray's guesses at the cause are no news
