"""Coded steps in Flax and Optax loops: NNX, Linen with TrainState, and plain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from problems import DEVICE, METHODS, relative_error

import jaxcode as jc

CODE = jc.fractional_repetition(8, 1, num_fragments=2)
STEPS = 5


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Flax and Optax rely on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield {
            "x": rng.normal(size=(16, 64)).astype(np.float32),
            "y": rng.integers(0, 10, 16),
        }


def survivors(seed):
    rng = np.random.default_rng(seed)
    arrived = np.ones(8, bool)
    arrived[rng.integers(8)] = False
    return arrived


def train(update, state):
    """Run the loop with one straggler a step, and once with none and no code."""
    for step, batch in enumerate(batches()):
        state = update(state, batch, CODE.decoding_weights(survivors(step)))
    return state


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 96, rngs=rngs)
        self.norm = nnx.LayerNorm(96, rngs=rngs)
        self.second = nnx.Linear(96, 10, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def nnx_start():
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_ordinary():
    model, optimizer = nnx_start()
    for batch in batches():
        grads = nnx.grad(lambda m, b=batch: cross_entropy(m(b["x"]), b["y"]).mean())(model)
        optimizer.update(model, grads)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("method", METHODS)
def test_an_nnx_loop(method):
    model, optimizer = nnx_start()
    graphdef, _ = nnx.split(model)

    def loss(params, batch):
        return cross_entropy(nnx.merge(graphdef, params)(batch["x"]), batch["y"])

    coded = jc.coded_value_and_grad(loss, CODE, method=method)
    for step, batch in enumerate(batches()):
        weights = CODE.decoding_weights(survivors(step))
        _, grads = coded(nnx.state(model, nnx.Param), batch, weights)
        optimizer.update(model, grads)
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert relative_error(got, nnx_ordinary()) < DEVICE


@pytest.mark.parametrize("method", METHODS)
def test_an_nnx_optimizer_that_decodes(method):
    """`nnx.Optimizer.update` forwards the weights to the chain's first link."""
    model, _ = nnx_start()
    tx = optax.chain(jc.decode_gradients(CODE), optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graphdef, _ = nnx.split(model)

    def loss(params, batch):
        return cross_entropy(nnx.merge(graphdef, params)(batch["x"]), batch["y"])

    coded = jc.coded_value_and_grad(loss, CODE, method=method)
    for step, batch in enumerate(batches()):
        messages = coded.messages(nnx.state(model, nnx.Param), batch).grads
        optimizer.update(model, messages, weights=CODE.decoding_weights(survivors(step)))
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert relative_error(got, nnx_ordinary()) < DEVICE


class LinenNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.LayerNorm()(nn.Dense(96)(x)))
        return nn.Dense(10)(x)


MODEL = LinenNetwork()


def linen_loss(params, batch):
    return cross_entropy(MODEL.apply({"params": params}, batch["x"]), batch["y"])


def linen_start(tx):
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    return train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)


def linen_ordinary(tx):
    state = linen_start(tx)
    for batch in batches():
        grads = jax.grad(lambda p, b=batch: linen_loss(p, b).mean())(state.params)
        state = state.apply_gradients(grads=grads)
    return state.params


@pytest.mark.parametrize("method", METHODS)
def test_a_linen_train_state(method):
    coded = jc.coded_value_and_grad(linen_loss, CODE, method=method)

    @jax.jit
    def update(state, batch, weights):
        _, grads = coded(state.params, batch, weights)
        return state.apply_gradients(grads=grads)

    state = train(update, linen_start(optax.adam(1e-2)))
    assert relative_error(state.params, linen_ordinary(optax.adam(1e-2))) < DEVICE


RECIPES = {
    "clip after decode": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3)),
    "decoupled weight decay": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "accumulate decoded steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_follows_decoding_sees_an_ordinary_gradient(recipe, method):
    """Linen calls `tx.update` itself when the chain decodes."""
    ordinary = RECIPES[recipe]()
    coded = jc.coded_value_and_grad(linen_loss, CODE, method=method)
    decode = jc.decode_gradients(CODE)

    @jax.jit
    def update(state, batch, weights):
        messages = coded.messages(state.params, batch).grads
        grads, _ = decode.update(messages, decode.init(state.params), state.params, weights=weights)
        updates, opt_state = ordinary.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    state = train(update, linen_start(ordinary))
    assert relative_error(state.params, linen_ordinary(ordinary)) < DEVICE


def test_one_chain_clips_after_it_decodes():
    tx = optax.chain(jc.decode_gradients(CODE), optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    coded = jc.coded_value_and_grad(linen_loss, CODE)

    def update(state, batch, weights):
        messages = coded.messages(state.params, batch).grads
        updates, opt_state = tx.update(messages, state.opt_state, state.params, weights=weights)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state)

    state = train(update, linen_start(tx))
    ordinary = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    assert relative_error(state.params, linen_ordinary(ordinary)) < DEVICE


def test_clipping_before_decoding_is_something_else():
    """The control of the recipe: coded numbers have another norm."""
    wrong = optax.chain(optax.clip_by_global_norm(0.1), jc.decode_gradients(CODE), optax.sgd(0.3))
    coded = jc.coded_value_and_grad(linen_loss, CODE)

    def update(state, batch, weights):
        messages = coded.messages(state.params, batch).grads
        updates, opt_state = wrong.update(messages, state.opt_state, state.params, weights=weights)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    state = train(update, linen_start(wrong))
    assert relative_error(state.params, linen_ordinary(RECIPES["clip after decode"]())) > 1e-2


def test_accumulation_encodes_once_per_optimizer_step():
    """Micro-batches go through the loss, by `lax.map` over them; one message a step is sent."""

    def accumulated(params, batch):
        micro = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        return jnp.concatenate(jax.lax.map(lambda part: linen_loss(params, part), micro))

    code = jc.fractional_repetition(8, 1)
    state = linen_start(optax.sgd(0.1))
    batch = next(batches())
    for method in METHODS:
        coded = jc.coded_value_and_grad(accumulated, code, method=method)
        value, grads = coded(state.params, batch, code.decoding_weights(survivors(0)))
        want = jax.grad(lambda p: linen_loss(p, batch).mean())(state.params)
        assert relative_error(grads, want) < DEVICE


@pytest.mark.parametrize(("params", "weights"), [(None, np.ones((1, 8))), (jnp.ones(2), None)])
def test_decoding_in_a_chain_needs_parameters_and_weights(params, weights):
    tx = jc.decode_gradients(CODE)
    with pytest.raises(ValueError, match="`decode_gradients` needs"):
        tx.update(jnp.ones((8, 1)), tx.init(jnp.ones(2)), params, weights=weights)
