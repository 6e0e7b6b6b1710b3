"""Normal form: exact, as short as the lower bound, and never mixed with one of other pivots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcode as jc
from jaxcode.agreement import agreed_weights
from jaxcode.coding import Decoder, decode
from jaxcode.lowrank import LowRank, NormalForm
from jaxcode.normal import normal_form, normal_form_saves

TOLERANCE = 1e-5
PAIRS = jc.fractional_repetition(8, 2, num_fragments=2)  # two groups of four, two of which decode


@jax.jit
def there_and_back(P, Q):
    return normal_form(LowRank(P, Q)).to_dense()


def factor(kind, p, r, rng):
    if kind == "graded":
        return rng.normal(size=(p, r)) * np.logspace(0, -6, r)
    if kind == "units that are dead or alive":
        return np.maximum(rng.normal(size=(p, r)) - 0.8, 0)
    if kind == "repeated examples":
        return rng.normal(size=(p, r))[:, rng.integers(0, max(1, r // 4), r)]
    if kind == "of lower rank":
        return rng.normal(size=(p, 2)) @ rng.normal(size=(2, r))
    if kind == "one-hot":
        return np.eye(p)[:, rng.integers(0, p, r)]
    if kind == "zero":
        return np.zeros((p, r))
    return rng.normal(size=(p, r))


KINDS = (
    "normal", "graded", "units that are dead or alive", "repeated examples", "of lower rank",
    "one-hot", "zero",
)  # fmt: skip


def relative(got, want):
    want = np.asarray(want, float)
    return np.linalg.norm(np.asarray(got, float) - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(40, 30, 12), (30, 40, 29), (9, 200, 5), (64, 64, 40)])
def test_the_matrix_comes_back(kind, sizes):
    p, q, r = sizes
    worst = 0.0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        P = factor(kind, p, r, rng).astype(np.float32)
        Q = rng.normal(size=(q, r)).astype(np.float32)
        worst = max(worst, relative(there_and_back(P, Q), P.astype(float) @ Q.astype(float).T))
    assert worst < TOLERANCE
    form = jax.eval_shape(lambda P, Q: normal_form(LowRank(P, Q)), P, Q)
    assert form.X.size + form.rows.size == r * (p + q - r)
    assert form.pivots.shape == (r,)


def test_stacks_of_matrices():
    rng = np.random.default_rng(0)
    P, Q = (jnp.asarray(rng.normal(size=(3, n, 4)), jnp.float32) for n in (12, 10))
    form = normal_form(LowRank(P, Q))
    assert form.pivots.shape == (3, 4)
    want = np.einsum("bpr,bqr->bpq", P, Q, dtype=float)
    assert relative(form.to_dense(), want) < TOLERANCE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_and_no_worse(dtype):
    rng = np.random.default_rng(0)
    P, Q = (jnp.asarray(rng.normal(size=(n, 16)), dtype) for n in (50, 40))
    form = normal_form(LowRank(P, Q))
    assert form.X.dtype == form.rows.dtype == dtype
    want = np.asarray(P, float) @ np.asarray(Q, float).T
    assert relative(form.to_dense(), want) < 8 * float(jnp.finfo(dtype).eps)


def test_numbers_that_are_not_finite_show():
    P = jnp.ones((6, 2)).at[3, 1].set(jnp.nan)
    assert not np.isfinite(normal_form(LowRank(P, jnp.ones((5, 2)))).to_dense()).all()


def mean_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=1)


def problem(p, q, examples):
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=(examples, n)).astype(np.float32) for n in (p, q))
    return {"w": jnp.asarray(rng.normal(size=(p, q)), jnp.float32)}, {"x": x, "y": y}


@pytest.mark.parametrize(
    ("p", "q", "rows", "n", "s", "m"),
    [(40, 30, 10, 8, 1, 1), (40, 30, 20, 8, 2, 2), (30, 60, 20, 6, 1, 2), (24, 24, 12, 9, 0, 3)],
)
def test_measured_bytes_meet_the_lower_bound(p, q, rows, n, s, m):
    code = jc.fractional_repetition(n, s, num_fragments=m)
    assert code.replication.min() == s + m
    params, batch = problem(p, q, rows * code.num_partitions)
    coded = jc.coded_value_and_grad(mean_loss, code, method="factors")
    message = jax.tree.map(lambda x: x[0], coded.messages(params, batch).grads)
    bound = jc.lower_bound(code, (p, q), rows)
    padding = 4 * 2 * (m - 1)  # of X and of the rows, to a multiple of m
    measured = jc.pack(message).size - 4 * rows  # less the pivots
    assert 4 * bound <= measured <= 4 * bound + padding
    load = jc.communication_load(code, (p, q), method="normal_form", rows=rows)
    assert load.optimal == {"": True}
    assert load.total == pytest.approx(bound)
    summary = coded.summary(params, batch)
    assert summary.rows[0].kind == "normal form"
    plain = jc.coded_value_and_grad(mean_loss, code, method="factors", normal_form=False)
    assert plain.summary(params, batch).message_bytes > 1.1 * (measured - padding)
    want = jax.grad(lambda params: jnp.mean(mean_loss(params, batch)))(params)["w"]
    survivors = np.arange(n) >= s
    _, grads = coded(params, batch, code.decoding_weights(survivors))
    assert relative(grads["w"], want) < TOLERANCE


def test_it_is_used_where_it_saves_a_tenth():
    assert [normal_form_saves(512, 512, r) for r in (32, 64, 128, 256, 480)] == [
        False, False, True, True, False,
    ]  # fmt: skip
    for rows, kind in [(1, "factors"), (2, "factors"), (8, "normal form"), (20, "dense")]:
        params, batch = problem(20, 20, 2 * rows)
        coded = jc.coded_value_and_grad(mean_loss, jc.uncoded(2), method="factors")
        assert coded.summary(params, batch).rows[0].kind == kind
    alone = jc.factored_value_and_grad(lambda w, x: jnp.sum((x @ w) ** 2))
    grad = alone(jnp.ones((20, 20)), jnp.ones((8, 20)))[1]
    assert isinstance(grad, LowRank)  # only messages are in normal form


def stacked(code, rows=10, seed=5):
    """All workers' messages, and the gradient."""
    params, batch = problem(24, 20, rows * code.num_partitions)
    coded = jc.coded_value_and_grad(mean_loss, code, method="factors")
    messages = coded.messages(params, batch).grads
    assert isinstance(messages["w"], NormalForm)
    want = jax.grad(lambda params: jnp.mean(mean_loss(params, batch)))(params)
    return messages, params, want["w"]


def moved(messages, worker):
    """A replica that chose other pivots, which is a message of another meaning altogether."""
    form = messages["w"]
    pivots = form.pivots.at[worker].set((form.pivots[worker] + 1) % 24)
    garbage = form.X.at[worker].multiply(-3.0)
    return {"w": NormalForm(pivots, garbage, form.rows, form.place)}


@functools.cache
def messages_of(code):
    return stacked(code)


def decoded(messages, code, survivors, params, how):
    weights = jnp.asarray(code.decoding_weights(survivors), jnp.float32)
    return _decode(messages, weights, params, code=code, how=how)


@functools.partial(jax.jit, static_argnames=("code", "how"))
def _decode(messages, weights, params, *, code, how):
    if how == "one device":
        return decode(messages, code, weights, like=params)["w"]

    def one(message, worker):
        message = jax.tree.map(lambda x: x[None], message)
        return decode(
            message, code, weights, like=params, axis_name="workers", workers=worker[None]
        )["w"]

    n = code.num_workers
    return jax.vmap(one, axis_name="workers", out_axes=None)(messages, jnp.arange(n))


@pytest.mark.parametrize("how", ["one device", "a map"])
@pytest.mark.parametrize("bad", [0, 2, 3, 7])
def test_a_replica_of_other_pivots_is_a_straggler(how, bad):
    code = PAIRS
    messages, params, want = messages_of(code)
    spoiled = moved(messages, bad)
    everybody = np.ones(8, bool)
    found = decoded(spoiled, code, everybody, params, how)
    assert relative(found, want) < TOLERANCE
    assert relative(decoded(messages, code, everybody, params, how), want) < TOLERANCE
    one_missing = everybody.copy()
    one_missing[(bad + 1) % 4 + 4 * (bad // 4)] = False  # of the same group: two are left
    assert relative(decoded(spoiled, code, one_missing, params, how), want) < TOLERANCE
    # The control: mixed, as if pivots did not matter, the gradient is far off.
    forms = spoiled["w"]
    mixed = NormalForm(messages["w"].pivots, forms.X, forms.rows, forms.place)
    assert relative(decode({"w": mixed}, code, code.decoding_weights(everybody), like=params)["w"],
                    want) > 0.05  # fmt: skip


@pytest.mark.parametrize("how", ["one device", "a map"])
def test_too_few_that_agree_show(how):
    code = PAIRS
    messages, params, _ = messages_of(code)
    spoiled = moved(moved(moved(messages, 0), 1), 2)
    spoiled = {"w": NormalForm(
        spoiled["w"].pivots.at[1].set((spoiled["w"].pivots[1] + 5) % 24)
        .at[2].set((spoiled["w"].pivots[2] + 9) % 24),
        spoiled["w"].X, spoiled["w"].rows, spoiled["w"].place,
    )}  # fmt: skip
    found = decoded(spoiled, code, np.ones(8, bool), params, how)
    assert not np.isfinite(found).all()  # never silently wrong


def test_weights_stay_as_they_were_where_replicas_agree():
    code = PAIRS
    messages, _, _ = messages_of(code)
    for survivors in (np.arange(8) != 3, np.arange(8) > 1):
        weights = jnp.asarray(code.decoding_weights(survivors), jnp.float32)
        decoder = Decoder(code, weights, np.arange(8), None)
        kept = agreed_weights(decoder, [messages["w"]])
        np.testing.assert_array_equal(kept, weights)
        if not survivors[:2].any():
            continue  # without worker 2 one is left of the two that it takes
        spoiled = moved(messages, 2)["w"]
        changed = np.asarray(agreed_weights(decoder, [spoiled]))
        assert not changed[:, 2].any()
        np.testing.assert_array_equal(changed[:, 4:], weights[:, 4:])  # the other group


def test_a_straggler_may_hold_any_pivots():
    code = jc.fractional_repetition(8, 1)
    messages, params, want = stacked(code)
    spoiled = moved(messages, 4)
    survivors = np.arange(8) != 4
    assert relative(decoded(spoiled, code, survivors, params, "one device"), want) < TOLERANCE
