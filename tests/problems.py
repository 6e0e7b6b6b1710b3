"""Small training problems and the executors a coded step runs under."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxcode as jc

DEVICE = 1e-5  # relative, float32 on the device
METHODS = ("dense", "factors")


def mlp_params(dtype=jnp.float32):
    """A table, two weights and a bias, and leaves that have no gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "table": jax.random.normal(keys[0], (60, 40), dtype) / 4,
        "w1": jax.random.normal(keys[1], (40, 30), dtype) / 6,
        "b1": jnp.zeros(30, dtype),
        "w2": jax.random.normal(keys[2], (30, 24), dtype) / 5,
        "steps": jnp.int32(7),
        "flag": jnp.array(True),
        "nothing": None,
    }


def mlp_batch(num_examples, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60, num_examples)
    return {"tokens": tokens, "y": rng.normal(size=(num_examples, 24)).astype(np.float32)}


def mlp_values(params, batch):
    """The loss of each example."""
    hidden = jnp.tanh(params["table"][batch["tokens"]] @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"] - batch["y"].astype(hidden.dtype)) ** 2, axis=1)


def mlp_mean(params, batch):
    """The mean loss of the examples."""
    return jnp.mean(mlp_values(params, batch))


def floats(params):
    """The differentiable part of `mlp_params`, and how to put it back."""
    part = {k: v for k, v in params.items() if k not in ("steps", "flag", "nothing")}
    rest = {k: params[k] for k in ("steps", "flag", "nothing") if k in params}
    return part, lambda new: {**rest, **new}


def uncoded_value_and_grad(params, batch):
    """The oracle: automatic differentiation of the mean over the whole batch."""
    part, whole = floats(params)
    return jax.value_and_grad(lambda new: jnp.mean(mlp_values(whole(new), batch)))(part)


def relative_error(got, want):
    """The largest error of a leaf, relative to the leaf's norm."""

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)

    got = {k: got[k] for k in want} if isinstance(want, dict) else got
    return max(jax.tree.leaves(jax.tree.map(error, got, want)))


def mesh(kind):
    """A mesh by name: the type of its axes, and which axis the workers are on."""
    auto, explicit = AxisType.Auto, AxisType.Explicit
    shapes = {
        "auto": ((8,), ("workers",), (auto,)),
        "explicit": ((8,), ("hosts",), (explicit,)),
        "two workers a device": ((4,), ("workers",), (auto,)),
        "auto, two axes": ((2, 4), ("model", "data"), (auto, auto)),
        "explicit, two axes": ((2, 4), ("model", "data"), (explicit, explicit)),
    }
    shape, names, types = shapes[kind]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=types, devices=devices), names[-1]


MESHES = ("auto", "explicit", "two workers a device", "auto, two axes", "explicit, two axes")
OWN_MAPS = ("vmap", "pmap", "shard_map")
EXECUTORS = ("one device", *MESHES, *OWN_MAPS)


def run(executor, loss, code, params, parts, weights, *, key=None, **options):
    """One coded step on assigned partitions under an executor; returns ``(value, grads)``."""
    if executor == "one device":
        return jc.coded_value_and_grad(loss, code, **options)(params, parts, weights, key=key)
    if executor in MESHES:
        where, axis = mesh(executor)
        coded = jc.coded_value_and_grad(loss, code, mesh=where, axis_name=axis, **options)
        return coded(params, parts, weights, key=key)
    coded = jc.coded_value_and_grad(loss, code, axis_name="mine", **options)

    def step(params, part, weights):
        return coded(params, part, weights, key=key)

    if executor == "vmap":
        mapped = jax.vmap(step, in_axes=(None, 0, None), out_axes=None, axis_name="mine")
    elif executor == "pmap":
        mapped = jax.pmap(step, in_axes=(None, 0, None), out_axes=None, axis_name="mine")
    else:
        spec = jax.sharding.PartitionSpec
        where = jax.make_mesh((8,), ("mine",), axis_types=(AxisType.Auto,))

        def one(params, part, weights):
            return step(params, jax.tree.map(lambda x: x[0], part), weights)

        mapped = jax.jit(
            jax.shard_map(
                one, mesh=where, in_specs=(spec(), spec("mine"), spec()), out_specs=spec()
            )
        )
    return mapped(params, parts, jnp.asarray(weights, jnp.float32))


def missing(code, *workers):
    """Survivors with these workers missing, as many as the code tolerates."""
    survivors = np.ones(code.num_workers, bool)
    survivors[list(workers[: code.num_stragglers])] = False
    return survivors
