"""Every case of the table: exact against `jax.grad`, stored as promised, and never formed."""

import dataclasses
import functools
import math
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import support_table
from case_table import CORNER, PLAIN, TOLERANCE, Case, every, kind, normal
from jax.tree_util import tree_leaves_with_path
from jaxpr_walk import equations
from layers import CASES

from jaxcode import IndexedRows, LowRank, factored_value_and_grad, to_dense
from jaxcode.lowrank import is_structured

NOISE = 1e-6  # a leaf is compared with this much of the whole gradient's norm, if it has less
ROUNDING = 1.05  # half precision: the error of a rounded sum is known to a few percent

every_case = every(lambda case: True)
structured_cases = every(lambda case: {"factors", "rows"} & set(case.kinds.values()))
half_cases = every(lambda case: case.wide)
# One operation at a time is slow to compile, and says nothing new of a library's layers.
eager_cases = every(
    lambda case: case.group in (PLAIN, CORNER) or case.name in ("Dense", "Linear", "Embed")
)


class Program:
    """A case as functions of arrays, and what JAX makes of it."""

    def __init__(self, case: Case, build):
        self.loss, self.params, self.args = build()
        self.has_aux = case.has_aux
        self.arrays, self._rest = eqx.partition(self.params, eqx.is_inexact_array_like)
        self.gradient = factored_value_and_grad(self.loss, has_aux=case.has_aux)

    def reference(self, arrays, args):
        """``((value, aux), gradient)`` by `jax.grad`."""

        def scalar(arrays):
            # New NNX variables, which this level of tracing may mutate.
            out = self.loss(eqx.combine(arrays, self._rest), *jax.tree.map(lambda x: x, args))
            return out if self.has_aux else (out, None)

        return jax.value_and_grad(scalar, has_aux=True)(arrays)

    def factored(self, arrays, args):
        """``((value, aux), gradient)`` by jaxcode."""
        out, grads = self.gradient(eqx.combine(arrays, self._rest), *args)
        return out if self.has_aux else (out, None), grads

    @functools.cached_property
    def expected(self):
        return jax.jit(self.reference)(self.arrays, self.args)

    @functools.cached_property
    def computed(self):
        return jax.jit(self.factored)(self.arrays, self.args)

    @property
    def leaves(self):
        """The gradient, leaf by leaf of the parameters."""
        return jax.tree.structure(self.params).flatten_up_to(self.computed[1])

    @functools.cached_property
    def summary(self):
        return self.gradient.summary(self.params, *self.args)

    @functools.cached_property
    def jaxpr(self):
        return jax.make_jaxpr(self.factored)(self.arrays, self.args)

    @functools.cached_property
    def reference_jaxpr(self):
        return jax.make_jaxpr(self.reference)(self.arrays, self.args)


@functools.cache
def _program(key):
    return Program(CASES[key], CASES[key].build)


def program(case):
    return _program((case.group, case.name))


def norm(array):
    array = np.asarray(array)
    return np.linalg.norm(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))


def errors(grads, params, expected):
    """Per leaf with a gradient, the error's norm over the leaf's; shapes and dtypes are equal."""
    whole = math.hypot(0.0, *map(norm, jax.tree.leaves(expected)))
    flat = jax.tree.structure(params).flatten_up_to
    found = []
    for grad, ours, exact in zip(
        flat(grads), flat(to_dense(grads, params)), flat(expected), strict=True
    ):
        if grad is None:
            assert exact is None or not np.any(exact)
            continue
        assert (ours.shape, ours.dtype) == (exact.shape, exact.dtype)
        wide = np.promote_types(exact.dtype, np.float32)
        difference = norm(np.asarray(ours).astype(wide) - np.asarray(exact).astype(wide))
        found.append(difference / max(norm(exact), NOISE * whole, np.finfo(float).tiny))
    return found


def assert_exact(case, result, expected, params):
    (head, grads), (exact_head, exact) = result, expected
    # A half-precision gradient is rounded after each sum by `jax.grad`, and after all by us.
    bound = 2**-6 if case.wide else TOLERANCE
    assert max(errors(grads, params, exact), default=0) < bound
    assert jax.tree.structure(head) == jax.tree.structure(exact_head)
    for ours, theirs in zip(jax.tree.leaves(head), jax.tree.leaves(exact_head), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=bound, atol=bound)


@every_case
def test_exact_under_jit(case):
    this = program(case)
    assert_exact(case, this.computed, this.expected, this.params)


@eager_cases
def test_exact_without_jit(case):
    this = program(case)
    assert_exact(case, this.factored(this.arrays, this.args), this.expected, this.params)


@half_cases
def test_half_precision_is_no_worse_than_autodiff(case):
    # The oracle is the same loss in float32: our sums are wider, so our rounding is no larger.
    this, wide = program(case), Program(case, case.wide)
    exact = wide.expected[1]

    def distance(grads):
        widened = jax.tree.map(lambda x: x.astype(jnp.float32), to_dense(grads, this.params))
        return np.array(errors(widened, wide.params, exact))

    assert np.all(distance(this.computed[1]) <= ROUNDING * distance(this.expected[1]) + TOLERANCE)


@every_case
def test_stored_as_the_table_says(case):
    this = program(case)
    paths = [path for path, _ in tree_leaves_with_path(this.params)]
    types = {LowRank: "factors", IndexedRows: "rows", type(None): "none"}
    for path, grad, row in zip(paths, this.leaves, this.summary.rows, strict=True):
        assert row.path == jax.tree_util.keystr(path)
        assert row.kind == kind(case, path) == types.get(type(grad), "dense")
        assert bool(row.reason) == (row.kind in ("dense", "none"))
        assert row.numbers == sum(x.size for x in jax.tree.leaves(grad))
        assert row.numbers <= math.prod(row.shape)
    assert this.summary.numbers <= this.summary.dense_numbers


@structured_cases
def test_the_comparison_notices_a_wrong_factor(case):
    this = program(case)

    def wrong(grad):
        if isinstance(grad, LowRank):
            return dataclasses.replace(grad, P=jnp.roll(grad.P, 1, axis=-2))
        if isinstance(grad, IndexedRows):
            return IndexedRows(
                (grad.indices + 1) % grad.shape[0], grad.rows, grad.shape, grad.dtype
            )
        return grad

    grads = jax.tree.map(wrong, this.computed[1], is_leaf=is_structured)
    found = iter(errors(grads, this.params, this.expected[1]))
    for grad, row in zip(this.leaves, this.summary.rows, strict=True):
        if grad is not None:
            assert (next(found) > 100 * TOLERANCE) == (is_structured(grad) and row.numbers > 0)


FORMING = {"dot_general", "scatter-add", "add_any", "reduce_sum", "mul"}


def formed(jaxpr, sizes):
    """Equations that compute, or start to sum in zeros, arrays of some numbers of numbers."""
    for eqn in equations(jaxpr):
        size = eqn.outvars[0].aval.size if eqn.outvars else 0
        zeros = eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1
        if size in sizes and (zeros or eqn.primitive.name in FORMING):
            yield eqn.primitive.name


@structured_cases
def test_neither_dense_nor_per_example_gradients_are_formed(case):
    this = program(case)
    examples = {x.shape[0] for x in jax.tree.leaves(this.args) if np.ndim(x)}
    for grad in filter(is_structured, this.leaves):
        size = math.prod(grad.shape)
        matrix = grad.P.shape[-2] * grad.Q.shape[-2] if isinstance(grad, LowRank) else size
        assert list(formed(this.reference_jaxpr, {matrix, size}))  # the control
        sizes = {n * number for n in (matrix, size) for number in (1, *examples)} - {0}
        assert not list(formed(this.jaxpr, sizes))


@every_case
def test_no_product_is_computed_twice(case):
    this = program(case)

    def products(jaxpr):
        names = [eqn.primitive.name for eqn in equations(jaxpr)]
        return names.count("dot_general") + names.count("conv_general_dilated")

    saved = sum(isinstance(grad, LowRank) for grad in this.leaves)
    assert products(this.jaxpr) <= products(this.reference_jaxpr) - saved


def test_the_readme_shows_the_support_table():
    readme = Path(__file__).parents[1] / "README.md"
    text = readme.read_text(encoding="utf-8")
    start, end = support_table.START, support_table.END
    for mark in (start, end):
        assert mark in text, f"README.md needs the line {mark}"
    shown = text.split(start)[1].split(end)[0]
    cure = (
        "README.md is not what `python tests/support_table.py` prints: paste it between the marks"
    )
    assert shown == support_table.markdown(), cure


X, IDS = normal(5, 31), np.array([1, 1, 4])
PARAMS = {"w": normal(31, 23), "table": normal(50, 31), "b": normal(23), "step": np.int32(4)}


def loss(params, x, ids):
    hidden = jnp.tanh(x + jnp.sum(params["table"][ids], 0, keepdims=True))
    return jnp.sum(jnp.sin(hidden @ params["w"] + params["b"][None]))


def test_the_summary_is_a_table():
    summary = factored_value_and_grad(loss).summary(PARAMS, X, IDS)
    assert str(summary).splitlines() == [
        "parameter  shape     kind     numbers  reason",
        "['b']      (23,)     dense    23       a vector",
        "['step']   ()        none     0        int32 has no gradient",
        "['table']  (50, 31)  rows     96",
        "['w']      (31, 23)  factors  270",
        "389 numbers of 2,286 dense",
    ]
    shapes = jax.eval_shape(lambda: (PARAMS, X, IDS))
    assert factored_value_and_grad(loss).summary(*shapes) == summary


def test_the_loss_is_traced_once_a_call_and_runs_once():
    traces, runs = [], []

    def counted(params, x, ids):
        traces.append(1)
        jax.debug.callback(lambda: runs.append(1))
        return loss(params, x, ids)

    gradient = factored_value_and_grad(counted)
    gradient(PARAMS, X, IDS)
    jax.effects_barrier()
    assert (len(traces), len(runs)) == (1, 1)
    step = jax.jit(gradient)
    jax.block_until_ready([step(PARAMS, X, IDS), step(PARAMS, X, IDS)])
    jax.effects_barrier()
    assert (len(traces), len(runs)) == (2, 3)


def test_vmap_and_a_second_derivative():
    gradient = factored_value_and_grad(loss)
    per_example = jax.vmap(lambda x: to_dense(gradient(PARAMS, x[None], IDS)[1], PARAMS))(X)
    exact = jax.vmap(jax.grad(lambda w, x: loss({**PARAMS, "w": w}, x[None], IDS)), (None, 0))
    np.testing.assert_allclose(per_example["w"], exact(PARAMS["w"], X), atol=TOLERANCE)

    def penalty(grad):
        return lambda w: jnp.sum(grad({**PARAMS, "w": w}, X, IDS) ** 2)

    ours = jax.grad(penalty(lambda p, *args: gradient(p, *args)[1]["w"].to_dense()))(PARAMS["w"])
    theirs = jax.grad(penalty(lambda p, *args: jax.grad(loss, allow_int=True)(p, *args)["w"]))
    np.testing.assert_allclose(ours, theirs(PARAMS["w"]), rtol=1e-4, atol=1e-4)


def test_float64():
    with jax.enable_x64(True):
        params = {name: np.asarray(x, np.float64) for name, x in PARAMS.items() if x.ndim}
        args = X.astype(np.float64), np.array([1, 4, 1 << 40], np.int64)
        _, grads = factored_value_and_grad(loss)(params, *args)
        expected = jax.grad(loss)(params, *args)
        assert isinstance(grads["w"], LowRank)
        assert isinstance(grads["table"], IndexedRows)
        assert max(errors(grads, params, expected)) < 1e-12


def test_memory_of_the_compiled_gradient():
    params, x = {"w": jnp.zeros((1024, 1024))}, jnp.zeros((4, 1024))

    def large(params, x):
        return jnp.sum(jnp.sin(x @ params["w"]))

    def bytes_needed(gradient):
        memory = jax.jit(gradient).lower(params, x).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    dense = 4 * 1024 * 1024
    assert bytes_needed(jax.value_and_grad(large)) >= dense  # the control
    assert bytes_needed(factored_value_and_grad(large)) < dense / 10
