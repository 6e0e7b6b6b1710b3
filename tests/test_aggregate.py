"""Coded gradients equal uncoded ones, whoever is missing and wherever they run."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    DEVICE,
    EXECUTORS,
    MESHES,
    METHODS,
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

GARBAGE = {"nan": np.nan, "inf": np.inf, "huge": 1e38, "stale": 3.0}
CODES = {
    "uncoded": jc.uncoded(8),
    "s=1": jc.fractional_repetition(8, 1),
    "s=2, uneven groups": jc.fractional_repetition(8, 2),
    "s=7, one group": jc.fractional_repetition(8, 7),
    "s=1, m=2, uneven groups": jc.fractional_repetition(8, 1, num_fragments=2),
    "s=2, m=2": jc.fractional_repetition(8, 2, num_fragments=2),
    "s=1, m=3": jc.fractional_repetition(8, 1, num_fragments=3),
}


def spoiled(parts, survivors, garbage):
    """Partitions with garbage in the stragglers' data, and so in all they compute and send."""
    y = np.array(parts.examples["y"])
    y[~survivors] = garbage
    return dataclasses.replace(parts, examples={**parts.examples, "y": y})


WHERE = [("one device", name) for name in CODES]
WHERE += itertools.product(EXECUTORS[1:], ["s=1", "s=1, m=2, uneven groups"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("executor", "name"), WHERE)
def test_the_gradient_is_the_uncoded_one(executor, name, method):
    code = CODES[name]
    params, batch = mlp_params(), mlp_batch(19)
    parts = jc.assign(batch, code)
    survivors = missing(code, 2, 7, 0, 1, 3, 4, 5)
    value, grads = run(
        executor, mlp_values, code, params, parts, code.decoding_weights(survivors), method=method
    )
    want_value, want = uncoded_value_and_grad(params, batch)
    assert relative_error(value, want_value) < DEVICE
    assert relative_error(grads, want) < DEVICE
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("executor", ["one device", "two workers a device", "pmap"])
def test_what_a_straggler_holds_does_not_matter(executor, method, garbage):
    code = CODES["s=1, m=2, uneven groups"]
    params, batch = mlp_params(), mlp_batch(16)
    survivors = missing(code, 3)
    parts = spoiled(jc.assign(batch, code), survivors, GARBAGE[garbage])
    weights = code.decoding_weights(survivors)
    value, grads = run(executor, mlp_values, code, params, parts, weights, method=method)
    want_value, want = uncoded_value_and_grad(params, batch)
    assert relative_error(value, want_value) < DEVICE
    assert relative_error(grads, want) < DEVICE
    # The control: with the straggler counted, its garbage does matter. (In normal form its pivots
    # would give it away.)
    weights = code.decoding_weights(np.ones(8, bool))
    _, wrong = run(
        executor, mlp_values, code, params, parts, weights, method=method, normal_form=False
    )
    assert not relative_error(wrong, want) < 1e-2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", range(1, 10))
def test_every_pattern_of_every_block_code(n, method):
    params, batch = mlp_params(), mlp_batch(11)
    _, want = uncoded_value_and_grad(params, batch)
    for s, m in itertools.product(range(n), range(1, 4)):
        if s + m > n or (s, m) not in {(1, 1), (1, 2), (2, 1), (n - 2, 2)}:
            continue
        code = jc.fractional_repetition(n, s, num_fragments=m)
        coded = jc.coded_value_and_grad(mlp_values, code, method=method, normal_form=n == 4)
        sets = [c for size in range(s + 1) for c in itertools.combinations(range(n), size)]
        survivors = np.ones((len(sets), n), bool)
        for row, stragglers in zip(survivors, sets, strict=True):
            row[list(stragglers)] = False
        weights = jnp.asarray(code.decoding_weights(survivors), jnp.float32)
        _, grads = jax.lax.map(lambda w, coded=coded: coded(params, batch, w), weights)
        errors = [
            relative_error(jax.tree.map(lambda x, i=i: x[i], grads), want) for i in range(len(sets))
        ]
        assert max(errors) < DEVICE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 7, 8, 33])
def test_any_batch_size_gives_the_mean_over_the_batch(num_examples, method):
    code = jc.fractional_repetition(8, 1)  # four partitions: some empty, some short
    params, batch = mlp_params(), mlp_batch(num_examples)
    weights = code.decoding_weights(missing(code, 5))
    value, grads = jc.coded_value_and_grad(mlp_values, code, method=method)(params, batch, weights)
    want_value, want = uncoded_value_and_grad(params, batch)
    assert relative_error(value, want_value) < DEVICE
    assert relative_error(grads, want) < DEVICE


def test_padding_cannot_spoil_the_mean():
    # An example that makes the loss infinite where it is padding would show up here.
    def loss(w, x):
        return jnp.log(x) * w

    code = jc.fractional_repetition(6, 1)
    x = jnp.arange(1.0, 6.0)
    weights = code.decoding_weights(np.ones(6, bool))
    value, grad = jc.coded_value_and_grad(loss, code)(jnp.float32(2), x, weights)
    np.testing.assert_allclose(grad, np.log(np.arange(1.0, 6.0)).mean(), rtol=DEVICE)
    np.testing.assert_allclose(value, 2 * np.log(np.arange(1.0, 6.0)).mean(), rtol=DEVICE)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_may_return_the_mean(method):
    code = jc.fractional_repetition(8, 1)
    params, batch = mlp_params(), mlp_batch(12)
    weights = code.decoding_weights(missing(code, 0))
    value, grads = jc.coded_value_and_grad(mlp_mean, code, method=method)(params, batch, weights)
    want_value, want = uncoded_value_and_grad(params, batch)
    assert relative_error(value, want_value) < DEVICE
    assert relative_error(grads, want) < DEVICE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beyond", ["least_squares", "mean"])
def test_more_than_s_missing_is_what_the_weights_say(beyond, method):
    code = jc.fractional_repetition(8, 1, num_fragments=2)  # groups of four, two lost here
    params, batch = mlp_params(), mlp_batch(12)
    survivors = np.array([0, 0, 0, 1, 1, 1, 0, 1], bool)  # one answer, and three
    assert code.decoding_error(survivors) > 0.1
    weights = code.decoding_weights(survivors, beyond=beyond)
    value, grads = jc.coded_value_and_grad(mlp_values, code, method=method)(params, batch, weights)
    half = {k: v[6:] for k, v in batch.items()}
    scale = 1.0 if beyond == "mean" else 0.5
    want_value, want = uncoded_value_and_grad(params, half)
    if method == "factors" or beyond == "mean":  # half a factorisation is no gradient: left out
        assert relative_error(value, scale * want_value) < DEVICE
        assert relative_error(grads, jax.tree.map(lambda x: scale * x, want)) < DEVICE
    else:  # the lost block's one answer still brings the least-squares result closer
        _, full = uncoded_value_and_grad(params, batch)
        assert relative_error(grads, full) < relative_error(
            jax.tree.map(lambda x: x / 2, want), full
        )


def test_nobody_gives_zeros():
    code = jc.fractional_repetition(4, 1)
    weights = code.decoding_weights(np.zeros(4, bool))
    for method in METHODS:
        coded = jc.coded_value_and_grad(mlp_values, code, method=method)
        value, grads = coded(mlp_params(), mlp_batch(8), weights)
        assert value == 0
        assert all(not np.any(np.asarray(g, np.float32)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("executor", ["one device", "auto", "explicit"])
def test_coded_training_with_stragglers_is_uncoded_training_without(executor, method):
    code = jc.fractional_repetition(8, 2)
    start = mlp_params()
    options = {"method": method}
    if executor != "one device":
        options |= dict(zip(("mesh", "axis_name"), mesh(executor), strict=True))
    coded = jc.coded_value_and_grad(mlp_values, code, **options)
    tx = optax.adam(3e-3)
    floating = {k: start[k] for k in ("table", "w1", "b1", "w2")}
    rng = np.random.default_rng(0)

    @jax.jit
    def update(params, state, grads):
        with jax.numpy_dtype_promotion("standard"):  # Optax counts its steps in integers
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    coded_params = uncoded_params = dropped = floating
    states = [tx.init(floating)] * 3
    step = jax.jit(lambda p, b, w: coded(p, b, w)[1])
    uncoded = jax.jit(lambda p, b: uncoded_value_and_grad(p, b)[1])
    for i in range(50):
        batch = mlp_batch(16, seed=i)
        survivors = np.ones(8, bool)
        survivors[rng.permutation(8)[:2]] = False
        weights = jnp.asarray(code.decoding_weights(survivors), jnp.float32)
        coded_params, states[0] = update(
            coded_params, states[0], step(coded_params, batch, weights)
        )
        uncoded_params, states[1] = update(
            uncoded_params, states[1], uncoded(uncoded_params, batch)
        )
        kept = {k: v[np.repeat(survivors, 2)] for k, v in batch.items()}
        dropped, states[2] = update(dropped, states[2], uncoded(dropped, kept))
    assert relative_error(coded_params, uncoded_params) < DEVICE
    assert relative_error(dropped, uncoded_params) > 1e-2  # the control: who is missing matters


@pytest.mark.parametrize("where", ["one device", *MESHES[:2]])
@pytest.mark.parametrize("method", METHODS)
def test_one_compilation_serves_every_pattern(method, where):
    code = jc.fractional_repetition(8, 1)
    traces = []

    def loss(params, batch):
        traces.append(1)
        return mlp_values(params, batch)

    options = (
        {} if where == "one device" else dict(zip(("mesh", "axis_name"), mesh(where), strict=True))
    )
    coded = jc.coded_value_and_grad(loss, code, method=method, **options)
    params, batch = mlp_params(), mlp_batch(16)
    coded(params, batch, code.decoding_weights(np.ones(8, bool)))
    first = len(traces)
    for worker in range(8):
        coded(params, batch, code.decoding_weights(missing(code, worker)))
    assert len(traces) == first
    assert coded._compiled._cache_size() == 1
