"""Normal forms in a coded step: every leaf and pattern, and replicas that disagree, everywhere."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import DEVICE, EXECUTORS, mesh, relative_error, run
from test_spmd import collective_sizes

import jaxcode as jc
from jaxcode.lowrank import LowRank
from jaxcode.normal import normal_form


def normal(seed, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def matrix_loss(w, batch):
    return jnp.sum(jnp.sin(batch["x"] @ w) * batch["y"], axis=1)


def matrix_problem(p, q, examples, seed=0):
    x, y, w = (normal(seed, *s).astype(np.float32) for s in ((examples, p), (examples, q), (p, q)))
    return w, {"x": x, "y": y}


def uncoded(w, batch, loss=matrix_loss):
    return jax.grad(lambda w: jnp.mean(loss(w, batch).astype(jnp.float32)))(w)


# p, q, rows a partition, s, m: with groups of s + m.
PROBLEMS = [(40, 30, 16, 1, 1), (30, 40, 20, 1, 2), (64, 64, 32, 2, 2), (47, 59, 23, 1, 3)]


@pytest.mark.parametrize(("p", "q", "r", "s", "m"), PROBLEMS)
def test_every_pattern_of_stragglers(p, q, r, s, m):
    n = 2 * (s + m)
    code = jc.fractional_repetition(n, s, num_fragments=m)
    w, batch = matrix_problem(p, q, 2 * r)
    coded = jc.coded_value_and_grad(matrix_loss, code, method="factors")
    for size in range(s + 1):
        for missing in itertools.combinations(range(n), size):
            survivors = ~np.isin(np.arange(n), missing)
            _, grad = coded(w, batch, code.decoding_weights(survivors))
            assert relative_error(grad, uncoded(w, batch)) < DEVICE
    assert coded._compiled._cache_size() == 1


LEAVES = {
    "transposed": ((30, 40), lambda w, x: x @ w.T),
    "reshaped": ((40, 5, 6), lambda w, x: x @ w.reshape(40, 30)),
    "merged": ((8, 5, 30), lambda w, x: jnp.einsum("nab,abc->nc", x.reshape(-1, 8, 5), w)),
    "used twice": ((40, 40), lambda w, x: jnp.tanh(x @ w) @ w),
    "experts": (
        (2, 40, 30),
        lambda w, x: jnp.einsum("end,edf->nef", jnp.stack([x, x * x]), w).reshape(len(x), -1),
    ),
    "scanned layers": (
        (3, 40, 40),
        lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
    ),
}


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("name", LEAVES)
def test_parameters_whose_matrix_stands_otherwise(name, m):
    shape, model = LEAVES[name]
    code = jc.fractional_repetition(8, 2, num_fragments=m)
    w = normal(3, *shape).astype(np.float32) / 6
    rows = 8 if name == "used twice" else 14
    x = normal(1, rows * code.num_partitions, 40).astype(np.float32)
    coded = jc.coded_value_and_grad(
        lambda w, x: jnp.sum(jnp.sin(model(w, x)), axis=1), code, method="factors"
    )
    assert coded.summary(w, x).rows[0].kind == "normal form"
    _, grad = coded(w, x, code.decoding_weights(np.arange(8) != 1))
    want = uncoded(w, x, lambda w, x: jnp.sum(jnp.sin(model(w, x)), axis=1))
    assert relative_error(grad, want) < DEVICE


def test_a_mixture_of_precisions_keeps_its_factors():
    """The product of bfloat16 operands in float32 is finer than a normal form in bfloat16."""
    code = jc.fractional_repetition(4, 1)

    def loss(w, x):
        dims = (((1,), (0,)), ((), ()))
        out = jax.lax.dot_general(
            x.astype(jnp.bfloat16), w, dims, preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.sin(out), axis=1)

    w, x = normal(0, 40, 30).astype(np.float32), normal(1, 24, 40).astype(np.float32)
    coded = jc.coded_value_and_grad(loss, code, method="factors")
    assert coded.summary(w, x).rows[0].kind == "factors"
    _, grad = coded(w, x, code.decoding_weights([True] * 4))
    assert relative_error(grad, uncoded(w, x, loss)) < DEVICE


def test_bfloat16_parameters():
    code = jc.fractional_repetition(8, 2, num_fragments=2)
    w, batch = matrix_problem(40, 30, 24)
    half = jnp.asarray(w, jnp.bfloat16)
    small = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), batch)
    coded = jc.coded_value_and_grad(matrix_loss, code, method="factors")
    summary = coded.summary(half, small)
    assert summary.rows[0].kind == "normal form"
    _, grad = coded(half, small, code.decoding_weights(np.arange(8) % 4 > 0))
    want = uncoded(*jax.tree.map(lambda x: x.astype(jnp.float32), (half, small)))
    assert grad.dtype == jnp.bfloat16
    assert relative_error(grad, want) < 0.05


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_all_reduce_has_the_bytes_that_the_summary_says(kind, m):
    where, axis = mesh(kind)
    code = jc.fractional_repetition(8, 2, num_fragments=m)
    w, batch = matrix_problem(41, 31, 13 * code.num_partitions)  # of odd sizes
    coded = jc.coded_value_and_grad(matrix_loss, code, method="factors", mesh=where, axis_name=axis)
    weights = code.decoding_weights(np.ones(8, bool))
    carried = collective_sizes(jax.jit(coded).lower(w, batch, weights).compile())
    summary = coded.summary(w, batch)
    assert summary.rows[0].kind == "normal form"
    assert 4 * sum(carried) == summary.reduced_bytes


# Replicas of one group that disagree: half of the examples of some workers are others.
CODE = jc.fractional_repetition(8, 2, num_fragments=2)  # groups of four, any two are enough
WEIGHTS = CODE.decoding_weights([True] * 8)


def corrupted(batch, *workers, code=CODE):
    """The workers' partitions, some with other examples, which they take for their own."""
    parts = jc.assign(batch, code)
    x = np.array(parts.examples["x"])
    x[list(workers)] = normal(77, *x.shape[1:])
    return dataclasses.replace(parts, examples={**parts.examples, "x": x})


def step(parts, weights, w, executor="one device", **options):
    return run(executor, matrix_loss, CODE, w, parts, weights, method="factors", **options)[1]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_replica_that_disagrees_is_not_mixed_in(executor):
    w, batch = matrix_problem(40, 30, 24)
    want = uncoded(w, batch)
    for workers in ((0,), (3, 6)):
        parts = corrupted(batch, *workers)
        assert relative_error(step(parts, WEIGHTS, w, executor), want) < DEVICE
        # The control: in factors nothing tells them apart, and the result is garbage.
        assert relative_error(step(parts, WEIGHTS, w, executor, normal_form=False), want) > 1e-2


def test_the_majority_of_those_that_count_decides():
    w, batch = matrix_problem(40, 30, 24)
    want = uncoded(w, batch)
    coded = jc.coded_value_and_grad(matrix_loss, CODE, method="factors")
    for bad in range(4):
        parts = corrupted(batch, bad)
        for missing in range(4):
            survivors = np.arange(8) != missing
            _, grad = coded(w, parts, CODE.decoding_weights(survivors))
            assert relative_error(grad, want) < DEVICE
    assert coded._compiled._cache_size() == 1


def test_too_few_that_agree_are_no_gradient():
    w, batch = matrix_problem(40, 30, 24)
    parts = corrupted(batch, 1)
    got = step(parts, CODE.decoding_weights(np.array([1, 1, 0, 0, 1, 1, 1, 1], bool)), w)
    assert np.isnan(got).all()


def other_pivots(form, code, worker):
    """The same matrix by its last rows: as right as the worker's own, and another normal form."""
    G = np.float64(form.factors().P) @ np.float64(form.factors().Q).T
    p, r = len(G), form.place.rank
    rows = G[p - r :]
    X = np.linalg.lstsq(rows.T, G[: p - r].T, rcond=None)[0].T
    arrays = np.arange(p - r, p, dtype=np.int32), X.astype(np.float32), rows.astype(np.float32)
    other = dataclasses.replace(form, **dict(zip(("pivots", "X", "rows"), arrays, strict=True)))
    assert relative_error(other.to_dense(), form.to_dense()) < 1e-3
    return jc.encode(jax.tree.map(jnp.asarray, other), code, worker)


def test_two_right_forms_of_one_matrix_mixed_are_garbage():
    P, Q = normal(0, 8, 30, 9).astype(np.float32), normal(1, 8, 40, 9).astype(np.float32)
    P, Q = P[CODE.block], Q[CODE.block]
    forms = jax.vmap(normal_form)(LowRank(P, Q, (30, 40), (0,), (), P.dtype, 9, P.dtype))
    messages = jax.vmap(lambda form, i: jc.encode(form, CODE, i))(forms, jnp.arange(8))
    want = np.einsum("kpr,kqr->pq", np.float64(P[::4]), np.float64(Q[::4]))
    own = other_pivots(jax.tree.map(lambda x: x[5], forms), CODE, 5)
    mixed = jax.tree.map(lambda x, y: x.at[5].set(y), messages, own)
    decode = jax.jit(lambda messages: jc.decode(messages, CODE, WEIGHTS, like=jnp.zeros((30, 40))))
    assert relative_error(decode(mixed), want) < DEVICE
    hidden = dataclasses.replace(mixed, pivots=messages.pivots)  # the control: nothing shows it
    assert relative_error(decode(hidden), want) > 0.1
    for pivots in (2**31 - 1, -1, 0):  # not those of any matrix
        broken = dataclasses.replace(mixed, pivots=messages.pivots.at[5].set(pivots))
        assert relative_error(decode(broken), want) < DEVICE


def test_replicas_that_round_differently_are_mixed_all_the_same():
    w, batch = matrix_problem(40, 30, 24)
    parts = jc.assign(batch, CODE)
    x = parts.examples["x"]
    noisy = (x * (1 + 1e-7 * normal(5, *x.shape))).astype(np.float32)
    assert not np.array_equal(noisy[0], noisy[1])
    parts = dataclasses.replace(parts, examples={**parts.examples, "x": noisy})
    assert relative_error(step(parts, WEIGHTS, w), uncoded(w, batch)) < 10 * DEVICE


def test_a_gradient_that_is_not_finite_shows():
    w, batch = matrix_problem(40, 30, 24)
    for name in batch:
        bad = {**batch, name: np.where(np.arange(24)[:, None] == 3, np.nan, batch[name])}
        bad = jax.tree.map(lambda x: x.astype(np.float32), bad)
        assert not np.isfinite(step(jc.assign(bad, CODE), WEIGHTS, w)).any()


@pytest.mark.parametrize("pivots", ["outside", "below", "twice", "descending"])
def test_the_only_answer_of_a_block_is_not_taken_with_impossible_pivots(pivots):
    code = jc.fractional_repetition(4, 1)
    w, batch = matrix_problem(40, 30, 24)
    coded = jc.coded_value_and_grad(matrix_loss, code, method="factors")
    messages = coded.messages(w, batch).grads
    right = messages.pivots[0]
    wrong = {
        "outside": right.at[-1].set(max(messages.place.factor_shapes[0][-2], 30)),
        "below": right.at[0].set(-1),
        "twice": right.at[1].set(right[0]),
        "descending": right[::-1],
    }[pivots]
    spoiled = dataclasses.replace(messages, pivots=messages.pivots.at[0].set(wrong))
    want = uncoded(w, batch)

    def decoded(messages, survivors):
        weights = code.decoding_weights(np.array(survivors, bool))
        return jc.decode(messages, code, weights, like=w)

    alone, other = [1, 0, 1, 1], [0, 1, 1, 1]
    assert relative_error(decoded(messages, alone), want) < DEVICE  # the control
    assert np.isnan(decoded(spoiled, alone)).all()
    assert relative_error(decoded(spoiled, other), want) < DEVICE


def test_a_block_that_is_lost_stays_lost_when_its_answers_disagree():
    """Of three workers needed two answer in part of the groups: zeros there, agreed or not."""
    code = jc.fractional_repetition(8, 1, num_fragments=3)  # groups of four, three are enough
    w, batch = matrix_problem(60, 70, 40)
    parts = jc.assign(batch, code)
    coded = jc.coded_value_and_grad(matrix_loss, code, method="factors")
    weights = code.decoding_weights(np.array([1, 1, 0, 0, 1, 1, 1, 1], bool))
    _, lost = coded(w, parts, weights)
    _, disputed = coded(w, corrupted(batch, 1, code=code), weights)
    assert coded.summary(w, parts).rows[0].kind == "normal form"
    assert np.linalg.norm(lost) > 0
    np.testing.assert_array_equal(disputed, lost)
    # The control: a block that is not lost, of which too few agree, shows.
    _, control = coded(w, corrupted(batch, 4, 5, code=code), weights)
    assert np.isnan(control).all()
