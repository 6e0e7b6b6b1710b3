"""A small training problem for clusters, with plain JAX and Optax on all of its data as the oracle.

As a program, ``python tests/cluster_problem.py ADDRESS``, it is a driver to be killed: it connects
to a Ray cluster, prints its worker's process, and is then in the middle of a step for minutes.
"""

import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, INPUTS, HIDDEN, CLASSES = 16, 40, 60, 10
SEED = 5
OPTIMIZER = optax.adam(1e-2, eps=1e-3)  # a larger eps would amplify rounding where gradients are 0
ABSOLUTE = 1e-5  # of parameters, which are of the order of 1


def params():
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(0, 0.2, (INPUTS, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, 0.1, (HIDDEN, CLASSES)).astype(np.float32),
    }


def data(block, step):
    """A batch of 16 examples that only the block and the step decide."""
    rng = np.random.default_rng([step, block])
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    return x, np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)


def uneven(block, step):
    """As `data`, with fewer examples in some."""
    count = ROWS - 5 * ((block + step) % 3)  # all of them in block 0 at step 0
    return tuple(x[:count] for x in data(block, step))


def mistaken(block, step):
    """Fails at step 3, as a user's own function may."""
    if step == 3:
        raise KeyError("the user's own mistake")
    return data(block, step)


def values(params, batch, key=None):
    """The loss of each example; with a key, with dropout."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.75, hidden.shape), hidden / 0.75, 0.0)
    logits = hidden @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def mean(params, batch):
    return values(params, batch).mean()


def mean_and_aux(params, batch, key):
    """With dropout, and the largest loss as an auxiliary output."""
    each = values(params, batch, key)
    return each.mean(), {"largest": each.max(), "both": jnp.stack([each.min(), each.mean()])}


def broken(params, batch):
    raise ZeroDivisionError("the user's own loss")


def trajectory(steps, *, first=None, source=data, seed=None, start=0):
    """Losses and the last parameters of ordinary training; no step changes what it was given.

    Args:
        steps: the blocks of each step's batch, or None where there is no update.
        first: parameters and the optimizer's state to start from.
        source: the data.
        seed: of dropout, or None.
        start: the first step's number.
    """

    def loss(params, batches, keys):
        each = [values(params, *args) for args in zip(batches, keys, strict=True)]
        return jnp.concatenate(each).mean()

    @jax.jit
    def update(params, state, batches, keys):
        value, grads = jax.value_and_grad(loss)(params, batches, keys)
        with jax.numpy_dtype_promotion("standard"):  # Adam raises floats to integers
            updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    if first is None:
        given = jax.tree.map(jnp.asarray, params())
        first = given, OPTIMIZER.init(given)
    now, losses = first, []
    for step, blocks in enumerate(steps, start):
        if blocks is None:
            losses.append(None)
            continue
        batches = [source(block, step) for block in blocks]
        keys = [key_of(seed, step, block) for block in blocks]
        *now, value = update(*now, batches, keys)
        losses.append(float(value))
    return losses, now


def key_of(seed, step, block):
    if seed is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), block)


def distance(got, want):
    """The largest difference of two trees' numbers."""
    differences = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), got, want)
    return max(jax.tree.leaves(differences))


def drive(address):
    import ray

    from jaxcode.cluster import Cluster, fail_at
    from jaxcode.codes import uncoded

    signal.signal(signal.SIGINT, signal.default_int_handler)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    options = {"params": params(), "optimizer": OPTIMIZER}
    stall = [fail_at(0, 1, "stall", seconds=600)]
    with Cluster(uncoded(1), mean, data, faults=stall, deadline=600, **options) as cluster:
        cluster.step()
        print(cluster.workers[0].pid, flush=True)
        cluster.step()


if __name__ == "__main__":
    drive(sys.argv[1])
