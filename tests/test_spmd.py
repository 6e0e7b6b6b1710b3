"""What devices exchange, and the trap of parameters that are the same on every device."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from problems import (
    DEVICE,
    METHODS,
    mesh,
    mlp_batch,
    mlp_params,
    mlp_values,
    relative_error,
    uncoded_value_and_grad,
)

import jaxcode as jc

COLLECTIVE = re.compile(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|permute)")


def collective_sizes(compiled):
    """Numbers in each array that a collective of the compiled program returns."""
    shapes = []
    for line in compiled.as_text().splitlines():
        found = COLLECTIVE.search(line)
        if found and "-done" not in line:
            shapes += re.findall(r"\w+\[([\d,]*)\]", found.group(1))
    return [math.prod(int(d) for d in shape.split(",") if d) for shape in shapes]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_collectives_carry_factors_and_not_matrices(kind):
    where, axis = mesh(kind)
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(8)  # two examples a partition
    weights = code.decoding_weights(np.ones(8, bool))
    carried = {}
    for method in METHODS:
        coded = jc.coded_value_and_grad(mlp_values, code, method=method, mesh=where, axis_name=axis)
        carried[method] = collective_sizes(jax.jit(coded).lower(params, batch, weights).compile())
        assert 4 * sum(carried[method]) == coded.summary(params, batch).reduced_bytes
    smallest_matrix = min(params[name].size for name in ("table", "w1", "w2"))
    assert max(carried["dense"]) >= params["table"].size  # the control
    assert max(carried["factors"]) < smallest_matrix
    # Four blocks of two examples: row indices, rows and both factors of two layers, a bias, a loss.
    expected = 4 * 2 * (1 + 40 + (40 + 30) + (30 + 24)) + 30 + 1
    assert sum(carried["factors"]) == expected


def four_workers(check):
    where = jax.make_mesh((4,), ("w",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("w")), "out_specs": PartitionSpec("w")}
    return lambda body: jax.jit(jax.shard_map(body, mesh=where, check_vma=check, **specs))


def test_the_gradient_of_replicated_parameters_is_already_summed():
    data = jnp.array([1.0, 2.0, 3.0, 4.0])
    grads = four_workers(True)(lambda w, x: jax.grad(lambda w: jnp.sum(w * x))(w) + 0 * x)
    assert grads(jnp.float32(1), data).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize("cast", [False, True])
def test_the_encoder_refuses_a_gradient_that_is_already_summed(cast):
    code = jc.uncoded(4)

    def body(w, x):
        if cast:
            w = jax.lax.pcast(w, "w", to="varying")
        grad = jax.grad(lambda w: jnp.sum(w["w"] * x))({"w": w})
        return jc.encode(grad, code, jax.lax.axis_index("w"))["w"][None]

    step = four_workers(True)(body)
    data = jnp.array([1.0, 2.0, 3.0, 4.0])
    if cast:
        assert step(jnp.float32(1), data).tolist() == [1, 2, 3, 4]
    else:
        with pytest.raises(ValueError, match=r"`encode` needs each worker's own gradient.*pcast"):
            step(jnp.float32(1), data)


def test_a_coded_step_casts_replicated_parameters_itself():
    """Without the cast every worker would report the sum, and decode it to a multiple."""
    code = jc.uncoded(4)
    coded = jc.coded_value_and_grad(lambda w, x: w * x, code, axis_name="w")
    weights = jnp.ones((1, 4))

    def body(w, parts):
        part = jax.tree.map(lambda x: x[0], parts)
        return coded(w, part, weights)[1][None]

    for check in (True, False):
        step = four_workers(check)(body)
        grads = step(jnp.float32(1), jc.assign(jnp.array([1.0, 2.0, 3.0, 4.0]), code))
        assert grads.tolist() == [2.5, 2.5, 2.5, 2.5]


@pytest.mark.parametrize("method", METHODS)
def test_data_and_parameters_placed_by_the_user(method):
    """Arguments may already be sharded over the mesh, on Auto and on Explicit axes."""
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(16)
    weights = code.decoding_weights(np.array([1, 0, 1, 1, 1, 1, 0, 1], bool))
    _, want = uncoded_value_and_grad(params, batch)
    for kind in ("auto", "explicit", "auto, two axes", "explicit, two axes"):
        where, axis = mesh(kind)
        coded = jc.coded_value_and_grad(mlp_values, code, method=method, mesh=where, axis_name=axis)
        everywhere = jax.sharding.NamedSharding(where, PartitionSpec())
        split = jax.sharding.NamedSharding(where, PartitionSpec(axis))
        placed = jax.device_put(params, everywhere)
        by_worker = jax.device_put(jc.assign(batch, code), split)
        for data in (batch, jax.device_put(batch, split), by_worker):
            with jax.set_mesh(where):
                _, grads = coded(placed, data, weights)
            assert relative_error(grads, want) < DEVICE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [(None, "model"), ("model",)])
def test_parameters_sharded_over_another_axis(spec, model, method):
    where = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, model))
    code, batch, params = jc.fractional_repetition(8, 1), mlp_batch(16), mlp_params()
    split = jax.sharding.NamedSharding(where, PartitionSpec(*spec))
    placed = {**params, "w1": jax.device_put(params["w1"], split)}
    coded = jc.coded_value_and_grad(mlp_values, code, method=method, mesh=where, axis_name="data")
    with jax.set_mesh(where):
        _, grads = coded(placed, batch, code.decoding_weights(np.arange(8) != 2))
    assert relative_error(grads, uncoded_value_and_grad(params, batch)[1]) < DEVICE
