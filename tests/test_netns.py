"""Hosts whose links are real: one is cut off, or dies, during a step, and comes back."""

import subprocess
import sys
from operator import methodcaller
from pathlib import Path

import pytest
from hosts import Hosts, available

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not available(), reason="network namespaces need Linux, root and iproute2"),
]
LOST, MENDED = 5, 15


@pytest.mark.parametrize(
    ("hurt", "mend", "pause"),
    [
        pytest.param(methodcaller("cut", 3), methodcaller("cut", 3, mend=True), 0.3, id="link"),
        pytest.param(methodcaller("kill", 3), methodcaller("start_node", 3), 0.8, id="node"),
    ],
)
def test_a_host_that_is_lost_loses_nothing_and_comes_back(hurt, mend, pause):
    pytest.importorskip("ray")
    program = str(Path(__file__).with_name("cut_link.py"))
    steps, missing = 0, {}
    with Hosts(4, "200mbit") as hosts:
        address = hosts.start_ray()
        with subprocess.Popen(
            hosts.command(0, sys.executable, program, address, str(pause)),
            env=hosts.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as driver:  # fmt: skip
            for line in driver.stdout:
                word, *rest = line.split()
                if word == "hosts":
                    far = rest.index(hosts.address(3))  # the worker on that host
                elif word == "step":
                    steps += 1
                    at = rest.index("error")
                    missing[int(rest[0])] = [int(i) for i in rest[2:at]]
                    assert float(rest[at + 1]) == 0
                    if int(rest[0]) == LOST:
                        hurt(hosts)
                    if int(rest[0]) == MENDED:
                        mend(hosts)
                elif word == "difference":
                    difference, control = float(rest[0]), float(rest[2])
            errors = driver.stderr.read()
            assert driver.wait() == 0, errors
    assert steps == 60
    assert difference < 1e-5 < control
    assert all(far in missing[step] for step in range(LOST + 2, MENDED)), missing
    assert far not in missing[59]  # it follows again
