"""Programs read and rewritten: the same values, and any other, from fewer equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_table import TOLERANCE, normal
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec
from jaxpr_walk import equations

from jaxcode.jaxprs import Graph, Inside, dtype_of, is_remat, is_scan, shape_of, varying_axes

X, W, STACK = normal(4, 5), normal(5, 5), normal(3, 5, 5)


def layer(x, w):
    return jnp.tanh(x @ w)


def twice(x, w):
    inner = jax.jit(layer)
    return inner(inner(x, w), w)


def over_layers(x, stack):
    return jax.lax.scan(lambda h, w: (layer(h, w), jnp.sum(h)), x, stack)


def nested(x, stack):
    body = lambda h, _: (over_layers(h, stack)[0], None)  # noqa: E731
    return jax.lax.scan(body, x, None, length=2)[0]


def closing_over(x, w):
    return jax.jit(lambda w: x * jnp.asarray(X) @ w)(w)


PROGRAMS = {
    "plain": (layer, X, W),
    "jit of jit, shared": (jax.jit(twice), X, W),
    "closure": (functools.partial(closing_over, X), W),
    "remat": (jax.checkpoint(twice), X, W),
    "scan": (over_layers, X, STACK),
    "scan in a scan": (nested, X, STACK),
    "remat in a scan": (
        lambda x, stack: jax.lax.scan(lambda h, w: (jax.checkpoint(twice)(h, w), None), x, stack)[
            0
        ],
        X,
        STACK,
    ),
    "cond": (lambda x, w: jax.lax.cond(True, layer, twice, x, w), X, W),
    "custom derivative": (lambda x: jax.nn.relu(jax.nn.silu(x)), X),
    "an output that is an input or a literal": (lambda x: (x, 2.0, x + 1), X),
}
GRADIENT = {
    f"gradient of {name}": (
        jax.grad(lambda x, *args, f=f: sum(map(jnp.sum, jax.tree.leaves(f(x, *args))))),
        *args,
    )
    for name, (f, *args) in PROGRAMS.items()
}
every_program = pytest.mark.parametrize(
    ("function", "args"),
    [(f, args) for f, *args in (PROGRAMS | GRADIENT).values()],
    ids=[*PROGRAMS, *GRADIENT],
)


def graph_of(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return Graph(closed.jaxpr), closed.consts


def run(graph, consts, outputs, *args):
    return jaxpr_as_fun(ClosedJaxpr(graph.expose(outputs), consts))(*args)


def of_kind(graph, name):
    return [eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name == name]


@every_program
def test_the_same_values(function, args):
    graph, consts = graph_of(function, *args)
    outputs = run(graph, consts, graph.jaxpr.outvars, *args)
    for ours, theirs in zip(outputs, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    calls = [eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name in {"jit", "pjit"}]
    assert all(eqn.params["jaxpr"].consts for eqn in calls)  # the others are inlined


@every_program
def test_every_intermediate_value(function, args):
    graph, consts = graph_of(function, *args)
    wanted = [var for eqn in graph.jaxpr.eqns for var in eqn.outvars]
    values = run(graph, consts, [*wanted, *graph.jaxpr.outvars], *args)
    for var, value in zip(wanted, values, strict=False):
        assert (shape_of(var), dtype_of(var)) == (value.shape, value.dtype)
        eqn, index = graph.producer(var)
        assert eqn is not None
        assert eqn.outvars[index] is var


def test_values_in_the_body_of_a_scan_are_stacked():
    graph, consts = graph_of(over_layers, X, STACK)
    (scan,) = filter(is_scan, graph.jaxpr.eqns)
    (product,) = of_kind(graph.body(scan), "dot_general")
    inside = [Inside(scan, value) for value in (product.outvars[0], *product.invars)]
    assert [shape_of(value) for value in inside] == [(3, 4, 5), (3, 4, 5), (3, 5, 5)]
    result, out, x, w = run(graph, consts, [graph.jaxpr.outvars[0], *inside], X, STACK)
    np.testing.assert_array_equal(w, STACK)
    np.testing.assert_allclose(out, np.einsum("lij,ljk->lik", x, STACK), rtol=1e-4)
    np.testing.assert_allclose(np.tanh(out[-1]), result, rtol=1e-4)
    np.testing.assert_allclose(x[1:], np.tanh(out[:-1]), rtol=1e-4)


def test_values_in_a_remat_in_a_scan_in_a_scan():
    def step(h, w):
        return jax.checkpoint(layer)(h, w), None

    def function(x, stack):
        body = lambda h, _: (jax.lax.scan(step, h, stack)[0], None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=2)[0]

    graph, consts = graph_of(function, X, STACK)
    (outer,) = filter(is_scan, graph.jaxpr.eqns)
    (inner,) = filter(is_scan, graph.body(outer).jaxpr.eqns)
    remat_graph = graph.body(outer).body(inner)
    (remat,) = filter(is_remat, remat_graph.jaxpr.eqns)
    (product,) = of_kind(remat_graph.body(remat), "dot_general")
    value = Inside(outer, Inside(inner, Inside(remat, product.outvars[0])))
    assert shape_of(value) == (2, 3, 4, 5)
    (out,) = run(graph, consts, [value], X, STACK)
    expected, h = [], X
    for w in [*STACK, *STACK]:
        expected.append(h @ w)
        h = np.tanh(expected[-1])
    np.testing.assert_allclose(out.reshape(6, 4, 5), expected, rtol=1e-4, atol=TOLERANCE)


def test_what_is_not_needed_is_dropped():
    def function(x, stack):
        h, sums = over_layers(x, stack)
        return jnp.sin(h), sums, x @ stack[0]

    graph, consts = graph_of(function, X, STACK)
    whole = graph.expose(graph.jaxpr.outvars)
    assert len(whole.eqns) == len(graph.jaxpr.eqns)
    only_product = graph.expose(graph.jaxpr.outvars[2:])
    assert not any(is_scan(eqn) for eqn in only_product.eqns)
    assert len(only_product.invars) == 2  # the arguments stay as they are
    # In a body too: the sums need no last product, but the scan must still run.
    sums = run(graph, consts, graph.jaxpr.outvars[1:2], X, STACK)[0]
    np.testing.assert_allclose(sums, over_layers(X, STACK)[1], rtol=1e-4)
    assert not list(equations(graph.expose([])))


def test_calls_of_one_function_are_kept_apart():
    graph, consts = graph_of(jax.jit(twice), X, W)
    first, second = of_kind(graph, "dot_general")
    one, two = run(graph, consts, [first.outvars[0], second.outvars[0]], X, W)
    np.testing.assert_allclose(one, X @ W, rtol=1e-4)
    np.testing.assert_allclose(two, np.tanh(X @ W) @ W, rtol=1e-4, atol=TOLERANCE)


def test_a_jit_with_a_sharding_is_left_alone():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    graph, consts = graph_of(jax.jit(layer, in_shardings=sharding), X, W)
    assert [eqn.primitive.name in ("jit", "pjit") for eqn in graph.jaxpr.eqns] == [True]
    (out,) = run(graph, consts, graph.jaxpr.outvars, X, W)
    np.testing.assert_allclose(out, np.tanh(X @ W), rtol=1e-4)


def test_zeros_by_construction():
    def function(x):
        zeros = jnp.zeros((2, 3)).astype(jnp.bfloat16)
        return zeros, jnp.ones(2), x, 0.0 * x, jnp.broadcast_to(zeros, (4, 2, 3)), 0.0

    graph, _ = graph_of(function, X)
    found = [graph.is_zero(value) for value in graph.jaxpr.outvars]
    assert found == [True, False, False, False, True, True]


def test_effects_are_kept():
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return x + 1, x * 2

    graph, consts = graph_of(jax.jit(function), X)
    run(graph, consts, graph.jaxpr.outvars[1:], X)
    jax.effects_barrier()
    assert calls == [1]


def test_varying_axes():
    mesh = jax.make_mesh((8,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def function(x, shared):
        seen.append((varying_axes(x), varying_axes(shared)))
        return x

    specs = (PartitionSpec("workers"), PartitionSpec())
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0])
    jax.jit(mapped)(jnp.arange(8.0), jnp.ones(2))
    jax.vmap(function, (0, None), axis_name="workers")(jnp.arange(8.0), jnp.ones(2))
    nothing = frozenset()
    assert seen == [(frozenset({"workers"}), nothing), (nothing, nothing)]
