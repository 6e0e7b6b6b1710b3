"""Milliseconds per step of four hosts at 200 Mbit/s, one of them stalled: what is sent decides.

Run as root: ``python tests/hosts.py 4 200mbit python tests/bench_hosts.py --hidden 1024``. The last
argument is the cluster's address. 784-H-H-10 perceptron, 32 examples a worker, float32, s = 1 but
for the uncoded run, which no host may leave.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import jaxcode as jc
from jaxcode.cluster import Cluster, fail_at

WORKERS, EXAMPLES, FEATURES, CLASSES = 4, 32, 784, 10


def make(hidden, partitions):
    rng = np.random.default_rng(0)
    sizes = [FEATURES, hidden, hidden, CLASSES]
    params = {
        f"layer{i}": {
            "kernel": (rng.normal(size=(p, q)) / np.sqrt(p)).astype(np.float32),
            "bias": np.zeros(q, np.float32),
        }
        for i, (p, q) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    }

    def loss(params, batch):
        x, y = batch
        for i in range(3):
            x = x @ params[f"layer{i}"]["kernel"] + params[f"layer{i}"]["bias"]
            x = jax.nn.gelu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y)

    rows = WORKERS * EXAMPLES // partitions

    def data(block, step):
        rng = np.random.default_rng([step, block])
        x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
        return x, (x[:, :CLASSES] > 0.5).argmax(1)

    return params, loss, data


CASES = {
    "uncoded, dense": (lambda: jc.uncoded(WORKERS), "dense", False),
    "uncoded, factors": (lambda: jc.uncoded(WORKERS), "factors", False),
    "repetition, dense": (lambda: jc.fractional_repetition(WORKERS, 1), "dense", True),
    "Ye-Abbe, m = 2": (lambda: jc.polynomial(WORKERS, 1, num_fragments=2), "dense", True),
    "repetition, factors": (lambda: jc.fractional_repetition(WORKERS, 1), "factors", True),
}


def measure(name, hidden, steps, topology, all_answer):
    make_code, method, stalled = CASES[name]
    code = make_code()
    params, loss, data = make(hidden, code.num_partitions)
    faults = [fail_at(WORKERS - 1, 2, "stall", seconds=3600)] if stalled and not all_answer else []
    with Cluster(
        code, loss, data, params=params, optimizer=optax.sgd(0.05), method=method,
        topology=topology, faults=faults, deadline=120,
    ) as cluster:  # fmt: skip
        reports = [cluster.step() for _ in range(steps)]
    kept = reports[min(4, steps // 2) :]
    mean = {
        part: statistics.median(r.seconds[part] for r in kept) * 1e3 for part in kept[0].seconds
    }
    fetched = statistics.median(max(r.bytes_in) for r in kept)
    parts = ", ".join(f"{part} {x:.0f}" for part, x in mean.items() if part != "step")
    print(f"{name:20} {mean['step']:8.0f} {fetched / 1e6:10.2f}   {parts}", flush=True)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--hidden", type=int, default=1024)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--topology", default="peers")
    options.add_argument("--all-answer", action="store_true", help="nobody is stalled")
    options.add_argument("--cases", nargs="+", default=list(CASES))
    options.add_argument("address")
    args = options.parse_args()
    ray.init(address=args.address, logging_level="ERROR", log_to_driver=False)
    print(f"{'':20} {'ms/step':>8} {'MB fetched':>10}   median milliseconds in each part")
    began = time.monotonic()
    for name in args.cases:
        measure(name, args.hidden, args.steps, args.topology, args.all_answer)
    print(f"({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    jnp.zeros(())
    main()
