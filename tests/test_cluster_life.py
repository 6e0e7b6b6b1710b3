"""Clusters are started, resized, saved, resumed and ended, in every way."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cluster_problem import (
    ABSOLUTE,
    OPTIMIZER,
    broken,
    data,
    distance,
    mean,
    mistaken,
    params,
    trajectory,
    uneven,
    values,
)

ray = pytest.importorskip("ray")

from ray_tests import (  # noqa: E402
    LOOPBACK_ONLY,
    eventually,
    on_ray,
    ray_address,  # noqa: F401
    start,
    workers_here,
)

from jaxcode.cluster import Cluster, WorkerError, fail_at  # noqa: E402
from jaxcode.cluster.members import Members, variables  # noqa: E402
from jaxcode.cluster.wire import HEADER_BYTES  # noqa: E402
from jaxcode.codes import cyclic_repetition, fractional_repetition, uncoded  # noqa: E402

CODE = fractional_repetition(4, 1)
RELATIVE = 1e-5  # of losses


@on_ray
def test_resize_save_and_resume(address, tmp_path):
    """Fragments, factors, batches of several lengths, and 4, 6, then 3 workers."""
    plain = {"method": "factors", "normal_form": False}  # which takes long to compile
    options = {"loss": values, "source": uneven, "directory": tmp_path, **plain}
    code = fractional_repetition(4, 1, num_fragments=2)
    blocks = [[0]] * 3 + [[0, 1]] * 3 + [[0]] * 4 + [[0, 1, 2]] * 2
    stall = [fail_at(1, 10, "stall", seconds=1.5)]
    with start(code, faults=stall, **options) as cluster:
        reports = [cluster.step() for _ in range(3)]
        cluster.resize(6)
        reports += [cluster.step() for _ in range(3)]
        cluster.resize(3)
        assert eventually(lambda: len(workers_here()) == 3)
        reports += [cluster.step() for _ in range(2)]
        cluster.save(wait=True)
        reports += [cluster.step() for _ in range(2)]
        saved = cluster.state
        cluster.resize(3, uncoded(3))
        with pytest.raises(TimeoutError, match=r"step 10 needs .* got 2 of 3.* worker 1 \(comp"):
            cluster.step(deadline=0.4)
        reports += [cluster.step() for _ in range(2)]  # it can be tried again
        losses, (after, _) = trajectory(blocks, source=uneven)
        assert distance(cluster.params, after) < ABSOLUTE
        np.testing.assert_allclose([report.loss for report in reports], losses, rtol=RELATIVE)
        _, (other, _) = trajectory([[0]] * 12, source=uneven)
        assert distance(cluster.params, other) > 10 * ABSOLUTE
    uses = [cluster.step, cluster.save, lambda: cluster.params, lambda: cluster.resize(2)]
    for use in uses:
        with pytest.raises(RuntimeError, match="the cluster is closed"):
            use()
    assert eventually(lambda: not workers_here())  # none of that started any again
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [report.loss for report in reports]
    code = fractional_repetition(3, 1, num_fragments=2)
    given = {"params": params(), "optimizer": OPTIMIZER, **plain}
    with Cluster.resume(tmp_path, code, values, uneven, **given) as cluster:
        assert cluster.step_number == 8
        again = [cluster.step() for _ in range(2)]
        assert distance(cluster.state, saved) < 1e-6
        assert [report.step for report in again] == [8, 9]
        np.testing.assert_allclose(
            [report.loss for report in again], [report.loss for report in reports[8:10]], rtol=1e-6
        )


@on_ray
def test_a_narrow_wire_and_a_users_exception(address):
    with start(uncoded(2), source=mistaken, wire_dtype=jnp.bfloat16) as cluster:
        reports = [cluster.step() for _ in range(3)]
        _, (after, _) = trajectory([[0, 1]] * 3)
        assert ABSOLUTE / 100 < distance(cluster.params, after) < 3e-3
        dense = 2 * sum(x.size for x in params().values())
        assert set(reports[-1].bytes_in) == {HEADER_BYTES + dense}
        with pytest.raises(WorkerError, match="worker [01] failed") as caught:
            cluster.step()
    for text in ("the user's own mistake", "KeyError", "cluster_problem.py", "in mistaken"):
        assert text in str(caught.value)
    first = str(caught.value).splitlines()[0]
    assert re.fullmatch(r"worker [01] failed while computing: .*the user's own mistake.*", first)


@on_ray
def test_a_loss_that_cannot_start(address):
    with pytest.raises(WorkerError, match=r"worker 0 could not start and compile") as caught:
        start(uncoded(1), broken)
    assert "the user's own loss" in str(caught.value)
    assert "in broken" in str(caught.value)
    assert "the user's own loss" in str(caught.value).splitlines()[0]


@on_ray
def test_a_killed_driver_leaves_nothing(address):
    """One is killed, one is interrupted, in the middle of a step."""
    command = [sys.executable, str(Path(__file__).with_name("cluster_problem.py")), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    drivers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        pids = {int(driver.stdout.readline()) for driver in drivers}
        assert pids <= workers_here()
        for driver, number in zip(drivers, (signal.SIGKILL, signal.SIGINT), strict=True):
            driver.send_signal(number)
        errors = [driver.communicate(timeout=30)[1] for driver in drivers]
        assert eventually(lambda: not pids & workers_here())
        assert "KeyboardInterrupt" in errors[1]
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


# ------------------------------------------------------------------ without Ray

BAD = {
    "code": ({"code": 4}, r"a code; got 4\. Make one"),
    "loss": ({"loss": "mean"}, "loss to be a function; got 'mean'"),
    "data": ({"data": [1]}, r"data to be a function; got \[1\]"),
    "method": ({"method": "sparse"}, "method to be one of dense, factors; got 'sparse'"),
    "topology": ({"topology": "ring"}, "topology to be one of peers, master; got 'ring'"),
    "undecodable": (
        {"on_undecodable": "hope"},
        "on_undecodable to be one of approximate, skip, raise; got 'hope'",
    ),
    "factors": (
        {"code": cyclic_repetition(4, 1, seed=0), "method": "factors"},
        'a block code for method="factors"; got .*Use fractional_repetition',
    ),
    "deadline 0": ({"deadline": 0}, "a deadline above 0; got 0"),
    "deadline nan": ({"deadline": float("nan")}, "deadline .* got nan"),
    "every": ({"checkpoint_every": -1}, "checkpoint_every .* got -1"),
    "every half": ({"checkpoint_every": 0.5}, "checkpoint_every .* got 0.5"),
    "nowhere": ({"checkpoint_every": 5}, "a directory for checkpoint_every"),
    "restarts": ({"max_restarts": -1}, "max_restarts .* got -1"),
    "restarts true": ({"max_restarts": True}, "max_restarts .* got True"),
    "start": ({"start_timeout": 0}, "start_timeout .* got 0"),
    "fetch": ({"fetch_timeout": 0}, "fetch_timeout .* got 0"),
    "fetch inf": ({"fetch_timeout": float("inf")}, "fetch_timeout .* got inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    wrong, message = BAD[case]
    given = {"code": CODE, "loss": mean, "data": data, "params": params(), "optimizer": OPTIMIZER}
    given |= wrong
    with pytest.raises(ValueError, match=rf"`Cluster` needs {message}"):
        inspect.unwrap(Cluster.__init__)(object.__new__(Cluster), **given)


def test_too_little_room_is_told_at_once(monkeypatch, caplog):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "put", lambda training: training)

    def start(number, **options):
        Members(None, (), 1.0, 0, options).warn_of_room(number, 300.0)

    for number, fits in ((8, {}), (4, {"num_cpus": 2}), (16, {"num_cpus": 0.5, "num_gpus": 0})):
        start(number, **fits)
    assert not caplog.records
    start(9)  # a worker has one CPU where nothing else is said
    start(4, num_cpus=3, num_gpus=1)
    assert [record.getMessage() for record in caplog.records] == [
        "9 workers need 9 CPUs, and there are 8: waiting up to 300 s for more",
        "4 workers need 4 GPUs, and there are 0: waiting up to 300 s for more",
        "4 workers need 12 CPUs, and there are 8: waiting up to 300 s for more",
    ]


COUNT_THREADS = """
import jax.numpy as jnp, pathlib
jnp.ones(3).block_until_ready()
names = [x.read_text().strip() for x in pathlib.Path("/proc/self/task").glob("*/comm")]
print(jnp.ones(1).devices(), names.count("tf_XLAEigen"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("num_cpus", "threads"), [(0, 1), (1, 1), (2.5, 3), (4, 4)])
def test_a_worker_has_as_many_threads_as_cpus(monkeypatch, num_cpus, threads):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    environment = {**os.environ, **variables(num_cpus)}
    command = [sys.executable, "-c", COUNT_THREADS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["{CpuDevice(id=0)}", str(threads)]


@pytest.mark.skipif(LOOPBACK_ONLY, reason="Ray may be running here")
def test_no_connection_to_ray():
    with pytest.raises(RuntimeError, match=r"`Cluster` needs a connection to Ray.*ray\.init"):
        start(CODE)


def test_resume_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"`Cluster\.resume` needs a checkpoint in .*none"):
        Cluster.resume(tmp_path, CODE, mean, data, params=params(), optimizer=OPTIMIZER)
