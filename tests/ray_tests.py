"""Ray for tests, started once, and what must not be left of it.

Only where nothing but the loopback interface is up: ``tests/loopback.sh pytest -m ray``.
"""

import inspect
import os
import socket
import time
from pathlib import Path

import cluster_problem
import pytest
from cluster_problem import OPTIMIZER, data, mean, params

ray = pytest.importorskip("ray")

from jaxcode.cluster import Cluster  # noqa: E402
from jaxcode.cluster.actor import WorkerProcess  # noqa: E402

# Not from /sys/class/net, which shows the namespace it was mounted in.
LOOPBACK_ONLY = [name for _, name in socket.if_nameindex()] == ["lo"]


def on_ray(function):
    """Marks a test that starts Ray; it has the time that the first one, which starts it, takes."""
    reason = "needs a network namespace with nothing but the loopback interface: unshare -n"
    function = pytest.mark.skipif(not LOOPBACK_ONLY, reason=reason)(function)
    function = pytest.mark.timeout(240)(function)
    return pytest.mark.ray(function)


@pytest.fixture(name="address", scope="session")
def ray_address():
    """Of Ray."""
    if not ray.is_initialized():  # for tests of another module
        start_ray()
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def start_ray():
    ray.cloudpickle.register_pickle_by_value(cluster_problem)  # workers cannot import it
    # Ray reads marks of the innermost function, and conftest's type checks are wrapped around it.
    for method in vars(WorkerProcess).values():
        if group := getattr(method, "__ray_concurrency_group__", None):
            inspect.unwrap(method).__ray_concurrency_group__ = group
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )


def start(code, loss=mean, source=data, **options):
    given = {"params": params(), "optimizer": OPTIMIZER, "max_restarts": 10} | options
    given["worker_options"] = {"num_cpus": 0.5}  # so that two clusters have room
    return Cluster(code, loss, source, **given)


def processes(name):
    """Those of this name in this network namespace: other people's Ray is not ours."""
    here, found = os.readlink("/proc/self/ns/net"), set()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            if name in command and os.readlink(entry / "ns/net") == here:
                found.add(int(entry.name))
        except (OSError, ValueError):  # no process, or it is gone
            continue
    return found


def workers_here():
    return processes(b"ray::WorkerProcess")


def eventually(condition, seconds=10):
    """Whether it holds within some seconds; returns as soon as it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def stored():
    """Objects that this driver keeps, and the bytes of the object store's shared memory."""
    objects = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    lines = []
    for pid in processes(b"raylet/raylet"):
        lines += Path(f"/proc/{pid}/status").read_text().splitlines()
    (shared,) = (int(line.split()[1]) for line in lines if line.startswith("RssShmem"))
    return objects, shared * 1024
