"""The worker's process: a replica, the messages it hands out, and the faults that are injected."""

import os
import signal
import threading
import time
import zlib
from typing import Any, NamedTuple

import ray

from jaxcode.cluster.faults import Fault, of_worker
from jaxcode.cluster.plans import Plan, Report
from jaxcode.cluster.states import STATE_PART_BYTES, fetch_state
from jaxcode.cluster.transfer import Puller, Store
from jaxcode.cluster.wire import HEADER_BYTES, Header, Layout, Rejected, header
from jaxcode.code import Code

# How long one who hands on waits while nothing arrives; who asked then asks the maker.
HAND_ON_SECONDS = 0.25
Token = tuple[int, int] | None


class Ready(NamedTuple):
    """Where a worker runs: its node's address, its process, its devices, CPUs it may use."""

    host: str
    pid: int
    devices: str
    cpus: int


class Outcome(NamedTuple):
    """What came of a plan at one worker.

    Attributes:
        done: how many plans were followed: all of them, if the state after them is staged.
        failed: messages that could not be used, and why.
        bytes_in: fetched for this plan.
        bytes_out: handed out since the worker started.
        seconds: fetching, decoding and applying.
    """

    done: int
    failed: dict[int, str]
    bytes_in: int
    bytes_out: int
    seconds: tuple[float, float, float]


class WorkerProcess:
    """One worker; all its methods are called through Ray, those of the group "serve" at any time.

    Args:
        worker: its index.
        training: what is trained; a `jaxcode.cluster.replica.Training`.
        faults: to inject.
        settings: JAX's, as they are at the driver.
        timeout: seconds without a part after which its source counts as lost.
    """

    def __init__(
        self,
        worker: int,
        training: Any,
        faults: tuple[Fault, ...],
        settings: dict[str, Any],
        timeout: float,
    ):
        import jax

        for name, value in settings.items():
            jax.config.update(name, value)
        self._worker, self._training = worker, training
        self._faults, self._timeout = faults, timeout
        self._replica: Any = None
        self._store = Store()
        self._peers: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._sent = 0
        self._silent = threading.Event()
        self._snapshot: tuple[int, bytes] | None = None

    def rows(self, blocks: list[int]) -> int:
        """Examples in the largest of some partitions at step 0."""
        from jaxcode.cluster.replica import num_rows

        return max(num_rows(self._training.data(int(b), 0), b, 0) for b in blocks)

    def configure(self, code: Code, rows: int, master: int) -> Ready:
        """Take a code, and compile for it; `master` is 1 where a master decodes."""
        import jax

        from jaxcode.cluster.replica import Replica

        if self._replica is None:
            self._replica = Replica(self._training, code, rows)
        else:
            self._replica.configure(code, rows)
        self._store = Store()
        self._replica.warm_up(self._worker, master=bool(master))
        devices = ", ".join(str(d) for d in jax.local_devices())
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Ready(ray.util.get_node_ip_address(), os.getpid(), devices, cpus or 1)

    def compute(self, step: int, commit: Token) -> Report:
        """Compute and keep this step's message."""
        replica = self._replica
        self._commit(commit)
        if replica.step != step:
            raise RuntimeError(f"worker {self._worker} is at step {replica.step}, not {step}")
        faults = of_worker(self._faults, self._worker, step)
        started = time.perf_counter()
        self._fail(faults, step)
        computed = replica.compute(self._worker)
        numbers = self._spoiled(computed.numbers, faults)
        head = self._header(numbers, step, faults)
        if "corrupt" in faults:
            numbers = bytes([numbers[0] ^ 0x40]) + numbers[1:]
        if "cut" in faults:
            numbers = numbers[: len(numbers) // 2]
        self._store.put(step, self._worker, head.pack(), numbers)
        if "vanish" in faults:
            self._silent.set()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        seconds = time.perf_counter() - started
        finite = computed.finite and "nan" not in faults
        return Report(head, computed.values, computed.integers, finite, seconds)

    def _header(self, numbers: bytes, step: int, faults: dict[str, Fault]) -> Header:
        code, worker = self._replica.code, self._worker
        block, fragment = -1, 0
        if code.block is not None:
            block = int(code.block[worker])
            fragment = int((code.block[:worker] == block).sum())
        head = header(
            numbers, self._replica.layout, step=step, sender=worker, block=block, fragment=fragment
        )
        if "stale" in faults:
            head = head._replace(step=step - 1)
        return head._replace(sender=code.num_workers) if "stranger" in faults else head

    def _spoiled(self, numbers: bytes, faults: dict[str, Fault]) -> bytes:
        """The numbers with NaN in the first place where they are floating-point, if asked for."""
        if "nan" not in faults:
            return numbers
        data = bytearray(numbers)
        for array in self._replica.layout.split(data):
            if array.dtype.kind != "i" and array.size:
                array.reshape(-1)[0] = float("nan")
        return bytes(data)

    def _fail(self, faults: dict[str, Fault], step: int) -> None:
        if "stall" in faults:
            time.sleep(faults["stall"].seconds)
        if "kill" in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "memory" in faults:
            raise MemoryError(f"injected at worker {self._worker}, step {step}")
        if "raise" in faults:
            raise RuntimeError(f"injected at worker {self._worker}, step {step}")

    def exchange(
        self,
        plans: list[Plan],
        commit: Token,
        peers: dict[int, Any] | None,
        *,
        at_once: bool = False,
    ) -> Outcome:
        """Fetch what the plans use, and stage the state after them; each but the last is final.

        Args:
            plans: of consecutive steps, from this replica's on.
            commit: what was staged before and is now final.
            peers: all workers' actors, where they are others than before.
            at_once: the last is final too.
        """
        self._commit(commit)
        self._peers = self._peers if peers is None else peers
        bytes_in, spent = 0, (0.0, 0.0, 0.0)
        for number, plan in enumerate(plans):
            if plan.step != self._replica.step:
                return Outcome(number, {}, bytes_in, self._sent, spent)
            try:
                failed, taken, spent = self._follow(plan)
            except Rejected as error:
                failed, taken = dict.fromkeys(plan.headers, error.reason), 0
            bytes_in += taken
            if failed:
                return Outcome(number, failed, bytes_in, self._sent, spent)
            if at_once or number < len(plans) - 1:
                self._commit(plan.token)
        return Outcome(len(plans), {}, bytes_in, self._sent, spent)

    def _follow(self, plan: Plan) -> tuple[dict[int, str], int, tuple[float, float, float]]:
        started = time.perf_counter()
        if not plan.headers:
            self._replica.skip(plan.token)
            return {}, 0, (0.0, 0.0, 0.0)
        if plan.recovered is not None:
            numbers = ray.get(plan.recovered[0], timeout=max(self._timeout, 30.0))
            if zlib.crc32(numbers) != plan.recovered[1]:
                raise Rejected("checksum", "of the master's payload")
            fetched = time.perf_counter() - started
            spent = self._replica.stage_recovered(plan.token, numbers)
            return {}, len(numbers), (fetched, *spent)
        self._reproduce(plan)
        puller = Puller(self._worker, self._store, self._replica.layout, ask, take, self._timeout)
        peers = {i: self._peers[i] for i in plan.there if i in self._peers}
        begun = self._replica.begin(plan.weights, self._worker)
        early = [(stage.senders, stage.end) for stage in begun.early]
        messages, failed = puller.fetch(plan._replace(handles=peers), early, begun.take)
        fetched = time.perf_counter() - started
        if failed:
            return failed, puller.bytes_in, (fetched, 0.0, 0.0)
        spent = self._replica.stage(plan.token, messages, plan.weights, begun)
        return {}, puller.bytes_in, (fetched, *spent)

    def _reproduce(self, plan: Plan) -> None:
        """Messages of this worker's own block that it computed itself, to the last bit."""
        code, replica = self._replica.code, self._replica
        own = self._store.get(plan.step, self._worker)
        if code.block is None or own is None:
            return
        for sender, head in plan.headers.items():
            if code.block[sender] == code.block[self._worker] and sender != self._worker:
                numbers: bytes | memoryview = own[HEADER_BYTES:]
                if Header.unpack(own).crc != head.crc:  # with several fragments, as a rule
                    numbers = replica.message_of(sender)
                if zlib.crc32(numbers) == head.crc:
                    self._store.put(plan.step, sender, head.pack(), numbers)

    def _commit(self, token: Token) -> None:
        with self._lock:
            self._replica.commit(token)

    def adopt(self, donor: Any, commit: Token) -> int:
        """Take over a donor's state; returns the step it is at, or -1 where it could not be had."""
        try:
            step, layout, numbers = fetch_state([donor], commit)
        except Exception:  # a donor that is gone, whichever way Ray says so
            return -1
        with self._lock:
            self._replica.load(layout.split(numbers), step)
        return step

    def restore(self, layout: Layout, numbers: bytes, step: int) -> None:
        """Take over a state from a checkpoint."""
        with self._lock:
            self._replica.load(layout.split(numbers), step)

    @ray.method(concurrency_group="serve")
    def part(self, step: int, sender: int, part: int) -> bytes | None:
        """A part of a message that is here, or on its way here."""
        if self._silent.is_set():
            time.sleep(60)
        data = self._store.part(step, sender, part, HAND_ON_SECONDS)
        self._sent += len(data or b"")
        return data

    @ray.method(concurrency_group="serve")
    def snapshot(self, commit: Token) -> tuple[int, Layout, int, int]:
        """The state as it now is, to be fetched in parts: its step, layout, length, checksum."""
        with self._lock:
            self._replica.commit(commit)
            leaves, step = self._replica.leaves(), self._replica.step
            layout = Layout.of(leaves)
            numbers = layout.join(leaves)
        self._snapshot = (step, numbers)
        return step, layout, len(numbers), zlib.crc32(numbers)

    @ray.method(concurrency_group="serve")
    def snapshot_part(self, step: int, part: int) -> bytes:
        """A part of the last snapshot, which must be of this step."""
        if self._snapshot is None or self._snapshot[0] != step:
            raise RuntimeError(f"worker {self._worker} has no snapshot of step {step}")
        start = part * STATE_PART_BYTES
        return self._snapshot[1][start : start + STATE_PART_BYTES]


def ask(handle: Any, step: int, sender: int, part: int) -> Any:
    """Ask a worker for a part."""
    return handle.part.remote(step, sender, part)


def take(reference: Any, timeout: float) -> bytes | None:
    """What was asked for."""
    return ray.get(reference, timeout=timeout)
