"""A training whose driver prints a line a step, for tests/test_netns.py to cut off a host."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import jaxcode as jc
from jaxcode.cluster import Cluster

STEPS, ROWS = 60, 8


def loss(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["a"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["b"], y)


def data(block, step):
    rng = np.random.default_rng([step, block])
    x = rng.normal(size=(ROWS, 30)).astype(np.float32)
    return x, (x[:, :5]).argmax(1)


def reference(params, optimizer, partitions, steps):
    """Plain JAX on all blocks' examples."""
    state = optimizer.init(params)
    for step in range(steps):
        blocks = [data(block, step) for block in range(partitions)]
        batch = tuple(np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        grads = jax.grad(lambda p, batch=batch: jnp.mean(loss(p, batch)))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def main(address, pause):
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(30, 40)).astype(np.float32) / 6,
        "b": rng.normal(size=(40, 5)).astype(np.float32) / 6,
    }
    code, optimizer = jc.fractional_repetition(4, 1), optax.adam(1e-2, eps=1e-5)
    with Cluster(
        code, loss, data, params=params, optimizer=optimizer, method="factors", deadline=20,
        fetch_timeout=1,
    ) as cluster:  # fmt: skip
        print("hosts", *(worker.host for worker in cluster.workers), flush=True)
        for _ in range(STEPS):
            report = cluster.step()
            missing = [i for i, seconds in enumerate(report.arrivals) if seconds == float("inf")]
            print("step", report.step, "without", *missing, "error", report.error, flush=True)
            time.sleep(float(pause))
        got = cluster.params
    want = reference(params, optimizer, code.num_partitions, STEPS)
    off = max(float(np.abs(got[name] - want[name]).max()) for name in params)
    control = max(float(np.abs(params[name] - want[name]).max()) for name in params)
    print("difference", off, "control", control, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
