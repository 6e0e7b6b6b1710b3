"""`jaxcode train --cluster`: the same training on Ray, with stragglers that are real.

The library never starts Ray; this command does, or connects to a cluster that runs.
"""

import logging
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from rich.console import Console

from jaxcode.aggregate import coded_value_and_grad
from jaxcode.checks import first_line
from jaxcode.train import checkpoint, cluster_report, report
from jaxcode.train.clustered_session import LOCAL, ClusterSession
from jaxcode.train.command import Interruption, Stopped, handling, interruptible
from jaxcode.train.problem import evaluated
from jaxcode.train.verification import Differences, difference, ordinary, without_absent

STARTING = "stopped while the workers were starting"


def run(session: ClusterSession) -> int:
    """Connect, train, write what was asked for, and print the tables.

    Args:
        session: from `jaxcode.train.clustered_session.prepare`.

    Returns:
        0.

    Raises:
        ValueError: there is no cluster at the address, or the checkpoint is of another model.
        Stopped: by Ctrl-C, or since the training failed.
    """
    print("\n".join([*cluster_report.describe(session), *session.notes]), flush=True)
    if session.verbose:
        _print_summary(session)
    # What Ray and workers print, and it is much, is no part of the result.
    with redirect_stdout(sys.stderr), _connected(session), report.meter(message=0) as bar:
        with _logged(bar), _cluster(session, bar) as cluster, interruptible() as stop:
            params = _train(session, cluster, bar, stop)
            history, where = cluster.history, cluster_report.where(cluster.workers)
    with interruptible() as stop, report.meter(message=0) as bar:
        differences = None
        if session.verify:
            differences = _verify(session, params, history.reports, bar, stop)
    table = cluster_report.table(
        session, history.reports, evaluated(session.problem, params), differences, where
    )
    console = Console(highlight=False)
    console.print(table)
    if history.reports:
        print(history)
    if session.directory:
        print(f"written to {session.directory.path}")
    return 0


@contextmanager
def _connected(session: ClusterSession) -> Iterator[None]:
    """Be connected to Ray while the block runs; a local cluster ends with it."""
    import ray

    config, local = session.config, session.address == LOCAL
    options: dict[str, Any] = {"log_to_driver": session.verbose, "logging_level": logging.ERROR}
    if local:
        # A command that measures nothing of Ray's has no business to report to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["num_cpus"] = int(np.ceil(config.workers * config.cpus_per_worker))
        options["include_dashboard"] = False
    elif ":" in session.address:
        _check_port(session.address)
    try:
        # To be stopped half-way through this, Ray is not made for: it is stopped thereafter.
        with warnings.catch_warnings(), interruptible() as stop:
            # Ray starts its processes by fork and exec, of which JAX and Python warn.
            warnings.filterwarnings("ignore", message=".*fork")
            ray.init(address=session.address, **options)
    except Exception as error:
        ray.shutdown()
        if local:
            raise Stopped(f"Ray could not start: {first_line(error)}", code=1) from error
        raise ValueError(
            f"`--cluster {session.address}`: cannot connect: {first_line(error)}: is Ray running "
            "there, with the same token, and is this one of its hosts?"
        ) from error
    try:
        if stop.is_set():
            raise Stopped(STARTING, code=stop.code)
        _check_room(session)
        yield
    finally:
        ray.shutdown()


def _check_port(address: str) -> None:
    """Refuse an address where nothing listens: Ray would try for minutes."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"`--cluster {address}`: cannot connect: {first_line(error)}: is a cluster's head "
            "running there? `ray status` on one of its hosts tells"
        ) from error


def _check_room(session: ClusterSession) -> None:
    """Refuse more GPUs than this machine has; another cluster may grow, and is waited for."""
    from jaxcode.cluster.members import lacking

    config = session.config
    each = {"num_cpus": config.cpus_per_worker, "num_gpus": config.gpus_per_worker}
    if session.address == LOCAL and (texts := lacking(config.workers, each)):
        raise ValueError(f"`--gpus-per-worker {config.gpus_per_worker:g}`: {texts[0]}")


@contextmanager
def _cluster(session: ClusterSession, bar: report.Meter) -> Iterator[Any]:
    """Start the workers, from the checkpoint where there is one; they end with the block."""
    from jaxcode.cluster import Cluster

    problem, directory = session.problem, session.directory
    arguments = (session.code, problem.loss, problem.data)
    options = _options(session)
    made = directory is not None and not directory.path.exists()
    bar.start(f"starting {session.config.workers} workers", total=1)
    stopped = Interruption()

    def stop_at_once(number: int, frame: FrameType | None) -> None:
        stopped.code = 128 + number
        raise KeyboardInterrupt  # which Ray, unlike other exceptions, lets through

    try:
        with handling(stop_at_once):
            if session.start and directory:
                cluster = Cluster.resume(directory.path, *arguments, **options)
            else:
                path = None if directory is None else directory.path
                cluster = Cluster(*arguments, directory=path, **options)
    except (Exception, KeyboardInterrupt) as error:
        if made and directory:
            with suppress(OSError):  # it is not empty
                directory.path.rmdir()
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(STARTING, code=stopped.code) from error
        raise _failure(error) from error
    bar.advance()
    with cluster:
        if directory:
            directory.start(session.facts, session.history)
        yield cluster


def _options(session: ClusterSession) -> dict[str, Any]:
    """Return the keywords of `jaxcode.cluster.Cluster`."""
    from jaxcode.cluster import AdaptiveDeadline

    config, problem = session.config, session.problem
    worker: dict[str, Any] = {"num_cpus": _count(config.cpus_per_worker)}
    worker["num_gpus"] = _count(config.gpus_per_worker)
    if not config.gpus_per_worker:
        worker["runtime_env"] = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    if config.problem:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[config.problem.split(":")[0]])
    return {
        "params": problem.params,
        "optimizer": problem.optimizer,
        "method": config.method,
        "topology": config.topology,
        "deadline": AdaptiveDeadline() if config.deadline == "adaptive" else config.deadline,
        "on_undecodable": config.on_undecodable,
        "has_aux": problem.has_aux,
        "seed": problem.seed,
        "checkpoint_every": session.checkpoint_every,
        "worker_options": worker,
        "faults": session.faults,
    }


def _train(session: ClusterSession, cluster: Any, bar: report.Meter, stop: Interruption) -> PyTree:
    """Take the steps and return the parameters; what ends them early leaves a checkpoint."""
    bar.start("training", total=session.steps, completed=cluster.step_number)
    failure: Exception | None = None
    seen = set[tuple[int, str]]()
    while cluster.step_number < session.steps and not stop.is_set():
        try:
            taken = cluster.step()
        except (TimeoutError, RuntimeError, OSError) as error:
            failure = error
            break
        for event in cluster_report.events(taken, seen):
            bar.print(event)
        bar.advance_report(taken)
    step, kept = cluster.step_number, ""
    try:
        if session.directory and step > session.start:
            _save(session.directory.path, cluster)
            kept = f"; step {step} is kept in {session.directory.path}"
        params = cluster.params
    except (RuntimeError, OSError) as error:
        kept = f"; no checkpoint of step {step}: {first_line(error)}"
        failure = failure or error
    if failure:
        raise Stopped(f"{_failure(failure)}{kept}", code=1) from failure
    if stop.is_set() and step < session.steps:
        raise Stopped(_how_to_go_on(session, step), code=stop.code)
    return params


def _save(path: Path, cluster: Any) -> None:
    """Write the last checkpoint."""
    cluster.save(wait=True)
    latest = checkpoint.latest(path)
    if latest is None or latest.name != f"checkpoint-{cluster.step_number:08d}":
        raise OSError(f"it could not be written to {path}")


def _failure(error: Exception) -> Exception:
    """Show a worker's traceback at once, and return the line to end with."""
    from jaxcode.cluster import WorkerError

    if isinstance(error, ValueError | Stopped):
        return error
    if isinstance(error, WorkerError):
        lines = str(error).strip().splitlines()
        if len(lines) > 1:
            print(error, file=sys.stderr)
            return Stopped(lines[0], code=1)
    return Stopped(str(error) or type(error).__name__, code=1)


def _verify(
    session: ClusterSession,
    params: PyTree,
    reports: Sequence[Any],
    bar: report.Meter,
    stop: Interruption,
) -> Differences:
    """Repeat the training from step 0 in this process, and with the absent's data dropped."""
    problem, code = session.problem, session.code

    def last(name: str, states: Iterator[PyTree]) -> PyTree:
        bar.start(name, total=session.steps)
        final = problem.params
        for params in states:
            final = params
            bar.advance()
            if stop.is_set():
                text = _how_to_go_on(session, session.steps, during="verifying")
                raise Stopped(text, code=stop.code)
        return final

    reference = last("no stragglers", ordinary(problem, code.num_partitions, session.steps))
    control = None
    absent = [{*taken.late, *taken.rejected} for taken in reports]
    if len(absent) == session.steps and any(absent):
        dropped = last("dropping data", without_absent(problem, code, absent))
        control = difference(dropped, reference)
    return Differences(difference(params, reference), control)


def _how_to_go_on(session: ClusterSession, step: int, *, during: str = "training") -> str:
    """Say where a run was stopped and how to continue it."""
    where = f"stopped while {during}, after step {step} of {session.steps}"
    if not session.directory:
        return f"{where}; nothing was written, for there is no --out"
    path = shlex.quote(str(session.directory.path))
    address = "" if session.address == LOCAL else f" {session.address}"
    again = " --verify" if session.verify else ""
    return f"{where}; continue with: jaxcode train --out {path} --resume{again} --cluster{address}"


@contextmanager
def _logged(bar: report.Meter) -> Iterator[None]:
    """Show above the bar what the cluster logs; of long messages only tracebacks in full."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage().strip()
            bar.print(text if "Traceback" in text else text.splitlines()[0])

    logger, handler = logging.getLogger("jaxcode.cluster"), Handler(logging.WARNING)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _print_summary(session: ClusterSession) -> None:
    """Show what is sent for each parameter."""
    problem, code = session.problem, session.code
    blocks = [problem.data(block, 0) for block in range(code.num_partitions)]
    batch = jax.tree.map(lambda *x: np.concatenate([np.asarray(y) for y in x]), *blocks)
    coded = coded_value_and_grad(
        problem.loss, code, method=session.config.method, has_aux=problem.has_aux
    )
    key = None if problem.seed is None else jax.random.key(problem.seed)
    print(coded.summary(problem.params, batch, key=key), flush=True)


def _count(number: float) -> float | int:
    """Return a whole number as an int, which Ray asks for."""
    return int(number) if number == int(number) else number
