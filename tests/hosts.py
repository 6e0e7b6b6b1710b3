"""Several hosts on one machine: network namespaces on a bridge, each link as slow as asked.

Needs Linux, root and iproute2. As a program: ``python tests/hosts.py NUMBER RATE COMMAND...`` runs
a command on the first of that many hosts, on which an authenticated Ray cluster is running.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETWORK = "10.90.7"
PORT = 6379


def available():
    """Whether this process may make network namespaces."""
    tools = all(shutil.which(name) for name in ("ip", "tc"))
    return sys.platform == "linux" and tools and os.geteuid() == 0


class Hosts:
    """Hosts ``0 .. number - 1`` at 10.90.7.1 and up, while the context lasts."""

    def __init__(self, number, rate=None):
        self.number, self.rate = number, rate
        self.name = f"jx{os.getpid() % 10000}"
        self.state = Path(tempfile.mkdtemp(prefix="jx", dir="/tmp"))  # short: holds sockets
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def namespace(self, host):
        return f"{self.name}h{host}"

    def address(self, host):
        return f"{NETWORK}.{host + 1}"

    def _make(self):
        hub = f"{self.name}hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for host in range(self.number):
            space, inner, outer = self.namespace(host), f"{self.name}i{host}", self.outer(host)
            _ip("netns", "add", space)
            _ip("link", "add", inner, "type", "veth", "peer", "name", outer)
            _ip("link", "set", inner, "netns", space)
            _ip("link", "set", outer, "netns", hub)
            _ip("-n", hub, "link", "set", outer, "master", "bridge")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", inner)
            for link in ("lo", inner):
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", hub, "link", "set", outer, "up")
            for where, device in ((space, inner), (hub, outer)) if self.rate else ():
                shape = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms"]
                _run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, *shape)

    def outer(self, host):
        return f"{self.name}o{host}"

    def command(self, host, *command):
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def run(self, host, *command, **options):
        """Run a command on a host."""
        options = {"env": self.environment, "text": True, **options}
        return subprocess.run(self.command(host, *command), **options)

    def start_ray(self, cpus=1, store=300_000_000):
        """Start a Ray node on every host; returns the cluster's address."""
        for host in range(self.number):
            self.start_node(host, cpus, store)
        return f"{self.address(0)}:{PORT}"

    def start_node(self, host, cpus=1, store=300_000_000):
        """Start a Ray node on a host; the first is the head."""
        role = (
            ["--head", f"--port={PORT}", "--include-dashboard=false", "--disable-usage-stats",
             f"--temp-dir={self.state}"]
            if host == 0
            else [f"--address={self.address(0)}:{PORT}"]
        )  # fmt: skip
        node = [f"--node-ip-address={self.address(host)}", f"--num-cpus={cpus}"]
        self.run(
            host, "ray", "start", *role, *node, f"--object-store-memory={store}",
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kill(self, host):
        """End all that runs on a host at once, as a power cut would."""
        for pid in _pids(self.namespace(host)):
            os.kill(pid, signal.SIGKILL)

    def cut(self, host, *, mend=False):
        """Take a host's link down, or up again."""
        _ip("-n", f"{self.name}hub", "link", "set", self.outer(host), "up" if mend else "down")

    def close(self):
        """End what runs on the hosts, and remove them."""
        spaces = [self.namespace(host) for host in range(self.number)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in [pid for space in spaces for pid in _pids(space)]:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            time.sleep(0.5)
        for space in [*spaces, f"{self.name}hub"]:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.state, ignore_errors=True)


def _pids(space):
    found = subprocess.run(
        ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def _ip(*arguments):
    _run("ip", *arguments)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    with Hosts(int(sys.argv[1]), sys.argv[2]) as hosts:
        address = hosts.start_ray()
        sys.exit(hosts.run(0, *sys.argv[3:], address).returncode)
