"""Training on a Ray cluster, one process a worker, without waiting for stragglers."""

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import ray

from jaxcode.checks import integer, real
from jaxcode.cluster.actor import Ready, ask, take
from jaxcode.cluster.deadlines import AdaptiveDeadline, Deadline, checked_deadline
from jaxcode.cluster.faults import Fault
from jaxcode.cluster.history import History, StepReport
from jaxcode.cluster.members import Member, Members, WorkerError, told
from jaxcode.cluster.options import CLOSED, check, resized
from jaxcode.cluster.plans import Plan
from jaxcode.cluster.replica import Replica, State, Training
from jaxcode.cluster.reporting import Reporter
from jaxcode.cluster.states import Writer, fetch_state, read_state
from jaxcode.cluster.step import Step, Undecodable
from jaxcode.cluster.transfer import KEPT_BYTES, KEPT_STEPS, Puller, Store
from jaxcode.cluster.wire import Layout
from jaxcode.code import Code
from jaxcode.worker import Method

Topology = Literal["peers", "master"]


class Cluster:
    """Trains on the Ray cluster that this process is connected to; see README, "On a cluster".

    Every worker is a process with a replica of the parameters and the optimizer's state. In a step
    each computes the coded gradient of its partitions; as soon as the answers decode, all replicas
    take the same step from the same answers. A worker that is late, damaged or dead is left out,
    and follows when it can. Up to the code's s of them make no difference to the parameters.

    Args:
        code: who computes what; one worker of the cluster for each of the code's.
        loss: as of `jaxcode.coded_value_and_grad`; called on a worker.
        data: ``data(block, step)`` returns the batch of a partition, arrays with a common leading
            axis; called on a worker. It must depend on nothing else: replicas of a partition have
            to agree, and then nothing of it needs to be restored.
        params: the first parameters.
        optimizer: an Optax transformation.
        method: "dense", or "factors" for block codes.
        topology: "peers": workers fetch messages from each other. "master": the driver fetches and
            decodes them, and sends the decoded payload back.
        deadline: seconds a step may wait for answers, or an `AdaptiveDeadline`.
        on_undecodable: what to do if too few answered by then: "approximate": the mean of what can
            be recovered, with its error in the report. "skip": leave the parameters. "raise".
        has_aux: the loss returns ``(value, aux)``; the averages are in the report's `metrics`.
        trainable: which leaves get a gradient; see `jaxcode.factored_value_and_grad`.
        wire_dtype: of messages; default is each leaf's own.
        normal_form: whether factors may be brought into normal form.
        seed: the loss is called with a key of this seed, the step and the partition.
        directory: for checkpoints and ``metrics.jsonl``; made if it is not there.
        checkpoint_every: steps; 0 for none.
        max_restarts: of each worker that failed; forgiven when it has run for ten minutes.
        start_timeout: seconds to start, import and compile, which no deadline counts.
        fetch_timeout: seconds without a part after which whoever should send it counts as lost.
        worker_options: of Ray for each worker: ``{"num_gpus": 1}``, ``{"num_cpus": 8}``.
        faults: to inject, from `fail_at` or `parse_faults`.

    Attributes:
        code: the code.
        history: a `History` of all reports.
        step_number: the next step, counted from 0.

    Raises:
        ValueError: an argument is wrong.
        RuntimeError: there is no connection to a Ray cluster, or it has no room.
        WorkerError: a worker could not start; shows its traceback.
    """

    def __init__(
        self,
        code: Code,
        loss: Callable[..., Any],
        data: Callable[[int, int], Any],
        *,
        params: Any,
        optimizer: Any,
        method: Method = "dense",
        topology: Topology = "peers",
        deadline: Deadline = 60.0,
        on_undecodable: Undecodable = "raise",
        has_aux: bool = False,
        trainable: Any = None,
        wire_dtype: Any = None,
        normal_form: bool = True,
        seed: int | None = None,
        directory: str | Path | None = None,
        checkpoint_every: int = 0,
        max_restarts: int = 3,
        start_timeout: float | int = 300.0,
        fetch_timeout: float | int = 2.0,
        worker_options: dict[str, Any] | None = None,
        faults: Sequence[Fault] = (),
    ):
        call = "Cluster"
        check(call, code, loss, data, method, topology, on_undecodable)
        self.deadline = checked_deadline(call, deadline)
        cure = "Count steps, or 0 for none."
        self._every = integer(call, "checkpoint_every", checkpoint_every, 0, None, cure)
        if self._every and directory is None:
            raise ValueError(
                f"`{call}` needs a directory for checkpoint_every; got none. Give one."
            )
        restarts = integer(call, "max_restarts", max_restarts, 0, None, "Count restarts.")
        cure = "Give seconds."
        self._start_timeout = real(call, "start_timeout", start_timeout, low=1, high=1e6, cure=cure)
        timeout = real(call, "fetch_timeout", fetch_timeout, low=0.01, high=1e6, cure=cure)
        host = jax.tree.map(np.asarray, params)
        training = Training(
            loss, data, host, optimizer, method, has_aux, trainable, wire_dtype, normal_form, seed
        )
        if not ray.is_initialized():
            raise RuntimeError(
                "`Cluster` needs a connection to Ray; there is none: call "
                '`ray.init(address="auto")` on a running cluster, or `ray.init()` for this machine'
            )
        self.code, self.step_number = code, 0
        self._training, self._topology, self._on_undecodable = training, topology, on_undecodable
        self._fetch_timeout = timeout
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self.history = History(self._directory and self._directory / "metrics.jsonl")
        self._past: dict[int, Plan] = {}
        self._commit: tuple[int, int] | None = None
        self._attempts = 0
        self._reporter = Reporter()
        self._master: Replica | None = None
        self._closed = False
        self._writer = Writer(self._directory)
        self._members = Members(training, tuple(faults), timeout, restarts, worker_options or {})
        try:
            self._start(code)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":
        """Return the cluster, which is already running."""
        return self

    def __exit__(self, *_: Any) -> None:
        """End the workers, whatever happened."""
        self.close()

    def close(self) -> None:
        """End the workers' processes; the last checkpoint is finished first."""
        self._closed = True
        try:
            self._writer.finish()
        finally:
            for member in self._members:
                self._members.stop(member)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(CLOSED)

    def _start(self, code: Code, kept: int = 0) -> None:
        """Start the workers from the `kept`-th on, and configure all for a code."""
        self._members.warn_of_room(code.num_workers, self._start_timeout)
        self._members.all += [Member(i) for i in range(kept, code.num_workers)]
        for member in self._members.all[kept:]:
            self._members.start(member, self.step_number)
        blocks: list[list[int]] = [[] for _ in range(code.num_workers)]
        for block in range(code.num_partitions):
            blocks[block % code.num_workers].append(block)
        sizes = [m.handle.rows.remote(b) for m, b in zip(self._members, blocks, strict=True) if b]
        self._rows = max(self._ready(sizes, "read their first batch"))
        master = int(self._topology == "master")
        tasks = [m.handle.configure.remote(code, self._rows, master) for m in self._members]
        self.workers: list[Ready] = self._ready(tasks, "start and compile")
        if master:
            if self._master is None:
                self._master = Replica(self._training, code, self._rows)
            else:
                self._master.configure(code, self._rows)
            self._master.warm_up_master()
        for member in self._members:
            member.doing = "idle"
            member.step = 0 if member.step < 0 else member.step

    def _ready(self, tasks: list[Any], what: str) -> list[Any]:
        """Results of the first tasks; start-up has a time of its own."""
        left = list(tasks)
        end = time.monotonic() + self._start_timeout
        while left:
            done, left = ray.wait(left, timeout=max(end - time.monotonic(), 0))
            if not done:
                busy = [i for i, task in enumerate(tasks) if task in left]
                raise TimeoutError(
                    f"`Cluster` needs its workers to {what} within {self._start_timeout:g} s; "
                    f"still waiting for workers {busy}: does the cluster have the CPUs and GPUs "
                    f"for {self.code.num_workers} of them? ({ray.available_resources()})"
                )
            for task in done:
                try:
                    ray.get(task)
                except Exception as error:
                    raise WorkerError(
                        f"worker {tasks.index(task)} could not {what}: {told(error)}"
                    ) from error
        return ray.get(tasks)

    def step(self, deadline: Deadline | None = None) -> StepReport:
        """Take one step.

        Args:
            deadline: for this step; by default the cluster's.

        Returns:
            What happened.

        Raises:
            TimeoutError: too few answered, and on_undecodable is "raise", or nobody did. The step
                can be tried again.
            WorkerError: more workers than the code tolerates raised an exception.
        """
        self._check_open()
        chosen = self.deadline if deadline is None else checked_deadline("step", deadline)
        seconds = chosen.seconds if isinstance(chosen, AdaptiveDeadline) else float(chosen)
        self._members.restarted = []
        step = Step(
            self.step_number,
            self.code,
            self._members,
            self._past,
            self._commit,
            self._rows,
            self._attempts,
            self.history.usual_wait,
            None if self._master is None else self._decode_for_all,
        )
        try:
            updated = step.run(seconds, self._on_undecodable)
        finally:
            made, self._attempts = step.attempts - self._attempts, step.attempts
        plan = step.plan
        assert plan is not None
        step.finish()
        self._commit = plan.token
        self._remember(plan)
        self.step_number += 1
        restarts = list(self._members.restarted)
        report = self._reporter.report(step, self.code, restarts, made, skipped=not updated)
        if isinstance(chosen, AdaptiveDeadline):
            chosen.observe([report.arrivals[i] for i in np.flatnonzero(report.survivors)])
        self.history.append(report)
        if self._every and self.step_number % self._every == 0:
            self.save()
        return report

    def _remember(self, plan: Plan) -> None:
        """Keep a plan for those who are behind."""
        self._past[plan.step] = plan
        payload = sum(head.length for head in plan.headers.values())
        kept = KEPT_STEPS - 1 if payload * KEPT_STEPS <= KEPT_BYTES else 1
        for step in [x for x in self._past if x <= plan.step - kept]:
            del self._past[step]

    def _decode_for_all(
        self, plan: Plan, store: Store
    ) -> tuple[Any, dict[int, str], tuple[int, int]]:
        """At the master: fetch and decode the messages, and offer the payload to all."""
        master = self._master
        assert master is not None
        puller = Puller(-1, store, master.layout, ask, take, self._fetch_timeout)
        alone = plan._replace(pullers={sender: [-1] for sender in plan.headers})
        messages, failed = puller.fetch(alone)
        if failed:
            return None, failed, (puller.bytes_in, 0)
        payload = master.recover(messages, plan.weights)
        return (ray.put(payload), zlib.crc32(payload)), {}, (puller.bytes_in, len(payload))

    @property
    def state(self) -> State:
        """Parameters and the optimizer's state at `step_number`, from a replica that is there."""
        _, layout, numbers = fetch_state(self._up_to_date(), self._commit)
        return self._as_state(layout.split(numbers))

    @property
    def params(self) -> Any:
        """The parameters at `step_number`, NumPy arrays in the structure they were given in."""
        return self.state.params

    def _as_state(self, leaves: list[np.ndarray]) -> State:
        params = self._training.params
        opt_state = jax.eval_shape(self._training.optimizer.init, params)
        return jax.tree.unflatten(jax.tree.structure(State(params, opt_state)), leaves)

    def _up_to_date(self) -> list[Any]:
        """The workers that have the state of `step_number`."""
        self._check_open()
        there = [m for m in self._members if m.step == self.step_number and m.handle is not None]
        if not there:
            raise RuntimeError(
                f"no worker that is there has the state of step {self.step_number}: go on from the "
                "last checkpoint with `Cluster.resume(directory, ...)`"
            )
        return [m.handle for m in there]

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint to the directory, beside the training; one is written at a time.

        Args:
            wait: until it is there.

        Raises:
            ValueError: the cluster has no directory.
            OSError: the last checkpoint could not be written.
        """
        self._writer.start(self._up_to_date(), self._commit, {"workers": self.code.num_workers})
        if wait:
            self._writer.finish()

    @classmethod
    def resume(cls, directory: str | Path, code: Code, *args: Any, **options: Any) -> "Cluster":
        """Start a cluster that goes on from the last checkpoint of a directory.

        Args:
            directory: of the cluster that wrote it.
            code: need not be the same.
            *args: as of `Cluster`.
            **options: as of `Cluster`.

        Raises:
            ValueError: there is no checkpoint, it is damaged, or another model's.
        """
        from jaxcode.train.checkpoint import latest

        if latest(Path(directory)) is None:
            raise ValueError(f"`Cluster.resume` needs a checkpoint in {directory}; there is none.")
        cluster = cls(code, *args, directory=directory, **options)
        try:
            training = cluster._training
            like = jax.eval_shape(lambda p: State(p, training.optimizer.init(p)), training.params)
            step, arrays = read_state(Path(directory), like)
            layout = Layout.of(arrays)
            numbers = ray.put(layout.join(arrays))
            tasks = [m.handle.restore.remote(layout, numbers, step) for m in cluster._members]
            cluster._ready(tasks, "take over the checkpoint")
            cluster.step_number = step
            cluster.history.rewind(step)
            for member in cluster._members:
                member.step = step
        except BaseException:
            cluster.close()
            raise
        return cluster

    def resize(self, num_workers: int, code: Code | None = None) -> None:
        """Go on with another number of workers, from the next step.

        Those that stay keep their state and their compiled loss; new ones take it over.

        Args:
            num_workers: n.
            code: for n workers; by default the same construction with the same s and m, which
                `fractional_repetition` and `uncoded` have for every n.

        Raises:
            ValueError: the code does not fit, or has to be given.
        """
        self._check_open()
        n = integer("resize", "num_workers", num_workers, 1, None, "Count the workers.")
        code = resized(self.code, n) if code is None else code
        check("resize", code, self._training.loss, self._training.data, self._training.method,
               self._topology, self._on_undecodable)  # fmt: skip
        if code.num_workers != n:
            raise ValueError(f"`resize` needs a code for {n} workers; got {code!r}. Give another.")
        if not any(m.step == self.step_number and m.handle for m in self._members.all[:n]):
            raise ValueError(
                f"`resize` needs a worker that stays and is up to date; of the first {n} none is. "
                "Take a step first."
            )
        for member in self._members.all[n:]:
            self._members.stop(member)
        del self._members.all[n:]
        kept = len(self._members.all)
        commits = []
        for member in self._members.all:
            if member.handle is None or member.step != self.step_number:  # gone or behind
                self._members.stop(member)
                self._members.start(member, self.step_number)
            else:
                commits.append(member.handle.exchange.remote([], self._commit, None))
            member.task = None
        self._start(code, kept)
        ray.get(commits)
        self.code, self._past = code, {}
