"""What a coded step takes and refuses: keys, metrics, frozen leaves, dtypes, wrong calls."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    DEVICE,
    METHODS,
    floats,
    mesh,
    missing,
    mlp_batch,
    mlp_mean,
    mlp_params,
    mlp_values,
    relative_error,
    run,
    uncoded_value_and_grad,
)

import jaxcode as jc


def test_keys_belong_to_partitions():
    code = jc.fractional_repetition(8, 1)

    def loss(params, batch, key):
        noise = jax.random.bernoulli(key, 0.5, (30,)).astype(jnp.float32)
        hidden = params["table"][batch["tokens"]] @ params["w1"] * noise[None]
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=1)

    params, batch, key = mlp_params(), mlp_batch(16), jax.random.key(5)
    want = None
    for executor, worker in [("one device", 0), ("one device", 1), ("auto", 6), ("pmap", 1)]:
        weights = code.decoding_weights(missing(code, worker))
        parts = jc.assign(batch, code)
        _, grads = run(executor, loss, code, params, parts, weights, key=key)
        want = grads if want is None else want
        assert relative_error(grads["w1"], want["w1"]) < DEVICE
    partitions = [{k: v[4 * p : 4 * p + 4] for k, v in batch.items()} for p in range(4)]
    part = {k: params[k] for k in ("table", "w1", "w2")}
    oracle = jax.grad(
        lambda q: sum(
            jnp.sum(loss(q, batch, jax.random.fold_in(key, p))) / 16
            for p, batch in enumerate(partitions)
        )
    )(part)
    assert relative_error(want, oracle) < DEVICE
    weights = code.decoding_weights(np.ones(8, bool))
    _, other = jc.coded_value_and_grad(loss, code)(params, batch, weights, key=jax.random.key(6))
    assert relative_error(other["w1"], oracle["w1"]) > 1e-2


def test_auxiliary_outputs_are_averaged_with_the_gradient():
    code = jc.fractional_repetition(8, 1)

    def loss(params, batch):
        values = mlp_values(params, batch)
        return values, {"mean of y": jnp.mean(batch["y"]), "half": jnp.bfloat16(0.5)}

    params, batch = mlp_params(), mlp_batch(16)
    weights = code.decoding_weights(missing(code, 1))
    for executor in ("one device", "auto", "pmap"):
        parts = jc.assign(batch, code)
        (_, aux), _ = run(executor, loss, code, params, parts, weights, has_aux=True)
        np.testing.assert_allclose(aux["mean of y"], batch["y"].mean(), rtol=1e-4)
        assert aux["half"] == 0.5


@pytest.mark.parametrize("method", METHODS)
def test_leaves_without_a_gradient_are_untouched_and_not_sent(method):
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(16)
    frozen = {k: None if v is None else k in ("w2", "b1") for k, v in params.items()}
    coded = jc.coded_value_and_grad(mlp_values, code, method=method, trainable=frozen)
    _, grads = coded(params, batch, code.decoding_weights(missing(code, 1)))
    _, want = uncoded_value_and_grad(params, batch)
    assert relative_error(grads["w2"], want["w2"]) < DEVICE
    new = optax.apply_updates(params, grads)
    for name in ("table", "w1", "steps", "flag"):
        assert new[name].dtype == params[name].dtype
        assert np.array_equal(new[name], params[name])
    assert new["nothing"] is None
    assert not np.array_equal(new["w2"], params["w2"])
    rows = {row.path: row for row in coded.summary(params, batch).rows}
    assert rows["['table']"].reason == "frozen"
    assert [row.numbers for row in rows.values() if row.kind == "none"] == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_comes_back_as_it_went_in(method, dtype):
    code = jc.fractional_repetition(8, 1, num_fragments=2)
    params, batch = mlp_params(dtype), mlp_batch(16)
    coded = jc.coded_value_and_grad(mlp_values, code, method=method)
    value, grads = coded(params, batch, code.decoding_weights(missing(code, 1)))
    part, whole = floats(params)
    wide = whole({k: v.astype(jnp.float32) for k, v in part.items()})
    _, want = uncoded_value_and_grad(wide, batch)
    assert value.dtype == jnp.float32
    assert all(grads[k].dtype == params[k].dtype for k in params if params[k] is not None)
    assert relative_error(grads, want) < 16 * jnp.finfo(dtype).eps


@pytest.mark.parametrize("method", METHODS)
def test_a_wire_dtype_halves_the_bytes_and_rounds_once(method):
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(16)
    weights = code.decoding_weights(missing(code, 1))
    wide = jc.coded_value_and_grad(mlp_values, code, method=method)
    narrow = jc.coded_value_and_grad(mlp_values, code, method=method, wire_dtype=jnp.bfloat16)
    exact, rounded = wide(params, batch, weights)[1], narrow(params, batch, weights)[1]
    assert rounded["w1"].dtype == jnp.float32
    assert 0 < relative_error(rounded["w1"], exact["w1"]) < 2 * float(jnp.finfo(jnp.bfloat16).eps)
    ratio = narrow.summary(params, batch).message_bytes / wide.summary(params, batch).message_bytes
    assert 0.5 <= ratio < 0.52  # row indices keep their size


def test_the_summary_counts_what_messages_hold():
    params, batch = mlp_params(), mlp_batch(16)
    for method, m in itertools.product(METHODS, (1, 2)):
        code = jc.fractional_repetition(8, 2, num_fragments=m)
        coded = jc.coded_value_and_grad(mlp_values, code, method=method)
        summary = coded.summary(params, batch)
        first = jax.tree.map(lambda x: x[0], coded.messages(params, batch))
        assert summary.message_bytes == jc.pack(first).size
        assert summary.numbers == sum(x.size for x in jax.tree.leaves(first))
        dense = 4 * (1 + sum(params[k].size for k in ("table", "w1", "b1", "w2")))
        assert summary.dense_bytes == dense
        assert "of dense" in str(summary)


def test_factors_send_what_the_design_says():
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(16)  # four examples a partition
    rows = jc.coded_value_and_grad(mlp_values, code, method="factors").summary(params, batch).rows
    sent = {row.path: (row.kind, row.numbers) for row in rows}
    assert sent["['w1']"] == ("factors", 4 * (40 + 30))
    assert sent["['w2']"] == ("factors", 4 * (30 + 24))
    assert sent["['table']"] == ("rows", 4 * (40 + 1))
    assert sent["['b1']"] == ("dense", 30)


def test_n_1_and_s_0_are_ordinary_training():
    params, batch = mlp_params(), mlp_batch(16)
    _, want = uncoded_value_and_grad(params, batch)
    for code in (jc.uncoded(1), jc.uncoded(8), jc.fractional_repetition(1, 0)):
        weights = code.decoding_weights(np.ones(code.num_workers, bool))
        for method in METHODS:
            _, grads = jc.coded_value_and_grad(mlp_values, code, method=method)(
                params, batch, weights
            )
            assert relative_error(grads, want) < DEVICE


def sum_code():
    """A code that is no block code: each worker sends a sum of two partitions."""
    matrix = np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])
    return jc.Code(matrix, num_stragglers=1, name="three workers")


@pytest.mark.parametrize("straggler", [None, 0, 1, 2])
def test_a_code_whose_workers_hold_several_partitions(straggler):
    code, params, batch = sum_code(), mlp_params(), mlp_batch(10)
    survivors = np.arange(3) != straggler
    weights = code.decoding_weights(survivors)
    value, grads = jc.coded_value_and_grad(mlp_values, code)(params, batch, weights)
    want_value, want = uncoded_value_and_grad(params, batch)
    assert relative_error(value, want_value) < DEVICE
    assert relative_error(grads, want) < DEVICE
    with pytest.raises(ValueError, match="needs a block code"):
        jc.coded_value_and_grad(mlp_values, code, method="factors")


def unchecked(function):
    """The function without the run-time type check of the tests, as a user calls it."""
    return inspect.unwrap(function)


BAD_CALLS = {
    "mean of an uneven batch": ({"batch": mlp_batch(17), "loss": mlp_mean}, "one value an example"),
    "no examples": ({"batch": mlp_batch(0)}, "at least one example"),
    "ragged batch": ({"batch": {"x": np.ones(8), "y": np.ones(7)}}, "leading axis"),
    "scalar in batch": ({"batch": {"x": np.ones(8), "t": np.float32(1)}}, "leading axis"),
    "matrix of values": ({"loss": lambda p, b: mlp_values(p, b)[:, None]}, "shape"),
    "weights of several steps": ({"weights": np.ones((3, 1, 8))}, "one step"),
    "weights of another code": ({"weights": np.ones((1, 4))}, "decoding_weights"),
    "integer aux": ({"has_aux": True, "loss": lambda p, b: (mlp_values(p, b), 3)}, "float32"),
    "integer loss": ({"loss": lambda p, b: b["tokens"]}, "floating-point"),
    "no loss": ({"loss": lambda p, b: None}, "floating-point"),
    "no pair": ({"has_aux": True}, "pair"),
    "text aux": ({"has_aux": True, "loss": lambda p, b: (mlp_values(p, b), "x")}, "float32"),
    "no weights": ({"weights": None}, "decoding_weights"),
    "number for a key": ({"key": 0}, r"jax.random.key\(0\)"),
    "integer wire": ({"wire_dtype": jnp.int8}, "bfloat16"),
    "another code's partitions": ({"batch": jc.assign(mlp_batch(8), jc.uncoded(8))}, "assign"),
    "method": ({"method": "sketch"}, 'method="dense"'),
    "axis of no mesh": ({"axis_name": "w", "batch": jc.assign(mlp_batch(8), jc.uncoded(8))}, "map"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_wrong_call_is_one_clear_line(name):
    call, match = BAD_CALLS[name]
    names = ("has_aux", "method", "axis_name", "wire_dtype")
    options = {k: v for k, v in call.items() if k in names}
    code = jc.fractional_repetition(8, 1)
    batch, weights = call.get("batch", mlp_batch(16)), call.get("weights", np.ones((1, 8)))

    def step():
        coded = unchecked(jc.coded_value_and_grad)(call.get("loss", mlp_values), code, **options)
        return coded(mlp_params(), batch, weights, key=call.get("key"))

    with pytest.raises(ValueError, match=match) as error:
        step()
    assert "`" in str(error.value)


BAD_MESHES = {
    "no such axis": ({"axis_name": "rows"}, "'workers'"),
    "which axis?": ({"kind": "auto, two axes"}, "axis_name="),
    "three workers": ({"code": jc.uncoded(3)}, "multiple"),
}


@pytest.mark.parametrize("name", BAD_MESHES)
def test_a_mesh_that_does_not_fit_is_refused(name):
    options, match = BAD_MESHES[name]
    where, _ = mesh(options.get("kind", "auto"))
    code = options.get("code", jc.uncoded(8))
    with pytest.raises(ValueError, match=match):
        jc.coded_value_and_grad(mlp_values, code, mesh=where, axis_name=options.get("axis_name"))


def test_an_axis_of_another_length_is_refused():
    """Otherwise workers would be left out, or counted twice."""
    code = jc.fractional_repetition(4, 1)
    coded = jc.coded_value_and_grad(mlp_values, code, axis_name="mine")
    parts = jc.assign(mlp_batch(16), code)
    longer = jax.tree.map(lambda x: np.concatenate([x, x]), parts)
    mapped = jax.vmap(coded, axis_name="mine", in_axes=(None, 0, None), out_axes=None)
    with pytest.raises(ValueError, match="map over an axis of 4"):
        mapped(mlp_params(), longer, jnp.ones((1, 4)))


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_numbers_show(method):
    code = jc.fractional_repetition(4, 1)
    coded = jc.coded_value_and_grad(mlp_values, code, method=method)
    value, grads = coded(mlp_params(), mlp_batch(16), np.full((1, 4), np.nan))
    assert np.isnan(value)
    assert np.isnan(grads["w1"]).all()


def test_flags_in_the_parameters_stay_python_values():
    def loss(params, batch):
        values = mlp_values(params, batch)
        return values * 2 if params["twice"] and params["layers"] == 3 else values

    code, batch = jc.fractional_repetition(4, 1), mlp_batch(16)
    params = {**mlp_params(), "twice": True, "layers": 3}
    value, _ = jc.coded_value_and_grad(loss, code)(params, batch, np.ones((1, 4)) / 2)
    np.testing.assert_allclose(value, 2 * uncoded_value_and_grad(mlp_params(), batch)[0], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_complex_parameters_and_integer_factors_are_never_silently_wrong(method):
    code = jc.fractional_repetition(4, 1, num_fragments=2)
    weights = code.decoding_weights(np.ones(4, bool))

    def quantised(w, x):
        dims = (((1,), (0,)), ((), ()))
        out = jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.tanh(out / 100), axis=-1)

    x, w = jnp.ones((4, 30), jnp.int8), jnp.ones((30, 20))
    _, grads = jc.coded_value_and_grad(quantised, code, method=method)(w, x, weights)
    assert relative_error(grads, jax.grad(lambda w: jnp.mean(quantised(w, x)))(w)) < DEVICE

    def complex_loss(w, x):
        return jnp.sum(jnp.abs(x @ w) ** 2, axis=-1)

    coded = jc.coded_value_and_grad(complex_loss, code, method=method)
    with pytest.raises(ValueError, match="real floating-point numbers"):
        coded(jnp.ones((30, 20), jnp.complex64), jnp.ones((4, 30), jnp.complex64), weights)


def test_weights_of_a_traced_pattern_are_refused():
    code = jc.fractional_repetition(4, 1)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda survivors: unchecked_weights(code, survivors))(np.ones(4, bool))


def unchecked_weights(code, survivors):
    return inspect.unwrap(jc.Code.decoding_weights)(code, survivors)
