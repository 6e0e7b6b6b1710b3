"""One replica in the place of every worker, without Ray, follows ordinary training.

It computes the messages of all workers, since their states are the same, and decodes them from
survivors that change from step to step.
"""

import dataclasses
import zlib

import cluster_problem as problem
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cluster_problem import ABSOLUTE, OPTIMIZER, ROWS, SEED, data, distance, mean, params, uneven

pytest.importorskip("ray")

from jaxcode.cluster.replica import Replica, Training  # noqa: E402
from jaxcode.cluster.wire import Rejected  # noqa: E402
from jaxcode.codes import (  # noqa: E402
    cyclic_repetition,
    fractional_repetition,
    uncoded,
)

PAIRS = fractional_repetition(4, 1)
FRAGMENTS = fractional_repetition(6, 1, num_fragments=2)
STEPS = 3


def training(loss=mean, source=data, **options):
    return Training(loss, source, params(), OPTIMIZER, **options)


def weights_of(code, survivors, source, step):
    examples = sum(len(source(block, step)[0]) for block in range(code.num_partitions))
    return code.decoding_weights(survivors) * (ROWS / examples)


def patterns(code, steps):
    """All are there, then everybody is missing once, as many at once as the code allows."""
    n, s = code.num_workers, code.num_stragglers
    yield np.ones(n, bool)
    for step in range(1, steps):
        yield ~np.isin(np.arange(n), np.arange(step, step + s) % n)


def one_step(replica, survivors, *, attempt=1, spoil=None):
    """As the runtime does it: compute, stage from what the weights use, commit."""
    code, step = replica.code, replica.step
    weights = weights_of(code, survivors, replica.training.data, step)
    computed = {i: replica.compute(i) for i in range(code.num_workers)}
    used = np.flatnonzero(np.any(weights != 0, axis=0)).tolist()
    messages = {i: computed[i].numbers for i in used}
    if spoil is not None:
        messages |= spoil(messages)
    replica.stage((step, attempt), messages, weights)
    replica.commit((step, attempt))
    return computed


CASES = {
    "factors": (PAIRS, {"method": "factors"}),
    "fragments": (FRAGMENTS, {"method": "factors"}),
    "uncoded": (uncoded(3), {"method": "factors"}),
    "uneven": (FRAGMENTS, {"method": "factors", "source": uneven, "loss": problem.values}),
    "uneven and cyclic": (
        cyclic_repetition(4, 1, seed=0),
        {"source": uneven, "loss": problem.values},
    ),
    "dropout": (PAIRS, {"loss": problem.mean_and_aux, "has_aux": True, "seed": SEED}),
}


@pytest.mark.parametrize("name", CASES)
def test_ordinary_training(name):
    code, options = CASES[name]
    replica = Replica(training(**options), code, ROWS)
    source, seed = options.get("source", data), options.get("seed")
    blocks = list(range(code.num_partitions))
    losses, (after, _) = problem.trajectory([blocks] * STEPS, source=source, seed=seed)
    for step, survivors in enumerate(patterns(code, STEPS)):
        assert replica.step == step
        found = {}
        for computed in one_step(replica, survivors).values():
            found |= computed.values
            assert computed.finite
        assert sorted(found) == blocks
        counts = [len(source(block, step)[0]) for block in blocks]
        assert [found[block][0] for block in blocks] == counts
        loss = sum(found[block][1] for block in blocks) / sum(counts)
        assert loss == pytest.approx(losses[step], rel=1e-5)
    assert distance(replica.state.params, after) < ABSOLUTE
    # The controls: one block's data missing once, or other keys.
    other = [blocks] * (STEPS - 1) + [blocks[1:] or None]
    _, (after, _) = problem.trajectory(other, source=source, seed=seed)
    assert distance(replica.state.params, after) > 10 * ABSOLUTE
    if seed is not None:
        _, (after, _) = problem.trajectory([blocks] * STEPS, seed=seed + 1)
        assert distance(replica.state.params, after) > 10 * ABSOLUTE


@pytest.mark.parametrize(
    "options", [{}, {"method": "factors", "normal_form": False}], ids=["dense", "factors"]
)
def test_a_narrow_wire(options):
    wide = Replica(training(**options), PAIRS, ROWS)
    narrow = Replica(training(wire_dtype=jnp.bfloat16, **options), PAIRS, ROWS)
    assert narrow.layout.nbytes < 0.6 * wide.layout.nbytes
    assert "bfloat16" in narrow.layout.dtypes
    for survivors in patterns(PAIRS, STEPS):
        one_step(wide, survivors)
        one_step(narrow, survivors)
    difference = distance(narrow.state.params, wide.state.params)
    assert ABSOLUTE / 100 < difference < 3e-3
    assert {x.dtype.name for x in jax.tree.leaves(narrow.state.params)} == {"float32"}


def test_factors_are_shorter():
    lengths = [
        Replica(training(**options), PAIRS, ROWS).layout.nbytes
        for options in (
            {"method": "factors"},
            {"method": "factors", "normal_form": False},
            {"method": "dense"},
        )
    ]
    assert lengths == sorted(set(lengths))
    inputs, hidden, classes = problem.INPUTS, problem.HIDDEN, problem.CLASSES
    dense = hidden + hidden * classes
    assert lengths[1] == 4 * (ROWS * (inputs + hidden) + dense)
    assert lengths[2] == 4 * (inputs * hidden + dense)


def test_replicas_of_a_block_compute_alike():
    replica = Replica(training(method="factors"), FRAGMENTS, ROWS)
    computed = {i: replica.compute(i) for i in range(6)}
    for i in range(6):
        replica.compute(i)
        for j in range(6):
            if FRAGMENTS.block[i] == FRAGMENTS.block[j]:
                assert replica.message_of(j) == computed[j].numbers
                assert computed[i].integers == computed[j].integers
    assert computed[0].numbers != computed[1].numbers  # fragments differ
    assert zlib.crc32(computed[0].numbers) == zlib.crc32(replica.compute(0).numbers)


# ------------------------------------------------------------------ staging


@pytest.fixture(scope="module")
def used_replica():
    return Replica(training(), PAIRS, ROWS)


@pytest.fixture
def replica(used_replica):
    """As new."""
    used_replica.load(Replica.leaves(used_replica), used_replica.step)
    given = jax.tree.map(jnp.asarray, params())
    fresh = jax.tree.leaves((given, OPTIMIZER.init(given)))
    used_replica.load([np.asarray(x) for x in fresh], 0)
    return used_replica


ALL = np.ones(4, bool)


def staged(replica, attempt=1, survivors=ALL):
    step = replica.step
    messages = {i: replica.compute(i).numbers for i in range(4)}
    replica.stage((step, attempt), messages, weights_of(PAIRS, survivors, data, step))
    return step, attempt


def copy(replica):
    return jax.tree.map(lambda x: np.array(x), replica.state)


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_nothing_changes_before_the_commit(replica):
    before = copy(replica)
    token = staged(replica)
    assert same(replica.state, before)
    assert replica.step == 0
    for other in (None, (0, 2), (1, 1), (0, 0)):
        replica.commit(other)
        assert same(replica.state, before)
        assert replica.step == 0
    replica.commit(token)
    assert replica.step == 1
    assert distance(replica.state.params, before.params) > 1e-3
    after = copy(replica)
    replica.commit(token)  # again is no harm
    assert same(replica.state, after)
    assert replica.step == 1


def test_the_last_staged_counts(replica):
    staged(replica, 1, np.array([True, False, True, True]))
    only = weights_of(PAIRS, ALL, data, 0) * 3.0
    messages = {i: replica.compute(i).numbers for i in range(4)}
    replica.stage((0, 2), messages, only)
    replica.commit((0, 1))
    assert replica.step == 0
    replica.commit((0, 2))
    assert replica.step == 1
    other = Replica(training(), PAIRS, ROWS)
    other.stage((0, 1), messages, only)
    other.commit((0, 1))
    assert same(replica.state, other.state)


def test_steps_whose_states_were_given_up(replica):
    """Memory is written over: what was staged in vain must not be in what comes after."""
    plain = Replica(training(), PAIRS, ROWS)
    for survivors in patterns(PAIRS, 6):
        staged(replica, 1, np.array([False, True, False, True]))
        staged(replica, 2)
        with pytest.raises(Rejected):
            one_step(replica, survivors, attempt=3, spoil=lambda x: {i: nan(x[i]) for i in x})
        replica.commit((replica.step, 1))
        replica.commit((replica.step, 2))
        one_step(replica, survivors, attempt=4)
        one_step(plain, survivors)
        assert same(replica.state, plain.state)


def test_what_was_handed_out_stays(replica):
    """Parameters given at first, and states that were copied."""
    given = replica.training.params
    one_step(replica, ALL)
    first = copy(replica)
    kept = [np.array(x) for x in replica.leaves()]
    for _ in range(4):
        one_step(replica, ALL)
    assert same(given, params())
    assert not same(first, replica.state)
    replica.load(kept, 1)
    for x in kept:
        x[...] = 7  # the replica has its own copy
    assert same(replica.state, first)


def nan(numbers):
    array = np.frombuffer(numbers, np.float32).copy()
    array[3] = np.nan
    return array.tobytes()


def test_a_state_that_is_not_finite_is_refused(replica):
    before = copy(replica)
    with pytest.raises(Rejected, match="the new parameters") as caught:
        one_step(replica, ALL, spoil=lambda x: {i: nan(x[i]) for i in x})
    assert caught.value.reason == "not finite"
    replica.commit((0, 1))
    assert same(replica.state, before)
    assert replica.step == 0


@pytest.mark.parametrize("code", [PAIRS, FRAGMENTS, cyclic_repetition(4, 1, seed=0)], ids=str)
def test_a_message_that_is_not_used_does_not_matter(code):
    replica, plain = (Replica(training(), code, ROWS) for _ in range(2))
    survivors = np.arange(code.num_workers) != 1
    one_step(replica, survivors, spoil=lambda x: {1: nan(next(iter(x.values())))})
    one_step(plain, survivors)
    one_step(replica, survivors)  # what was left in its place
    one_step(plain, survivors)
    assert same(replica.state, plain.state)


def test_a_skipped_step(replica):
    one_step(replica, ALL)
    before = copy(replica)
    replica.skip((1, 3))
    assert replica.step == 1
    replica.commit((1, 3))
    assert replica.step == 2
    assert same(replica.state, before)
    one_step(replica, ALL)
    one_step(replica, ALL)
    _, (after, _) = problem.trajectory([[0, 1], None, [0, 1], [0, 1]])
    assert distance(replica.state.params, after) < ABSOLUTE


def test_what_a_master_sends_back(replica):
    other = Replica(training(), PAIRS, ROWS)
    for survivors in patterns(PAIRS, 3):
        weights = weights_of(PAIRS, survivors, data, replica.step)
        messages = {i: replica.compute(i).numbers for i in np.flatnonzero(survivors).tolist()}
        payload = replica.recover(messages, weights)
        assert len(payload) == other.recovered_layout.nbytes
        other.stage_recovered((replica.step, 1), payload)
        other.commit((replica.step, 1))
        replica.stage((replica.step, 1), messages, weights)
        replica.commit((replica.step, 1))
        assert distance(other.state, replica.state) < 1e-6
    assert other.step == 3


def test_a_lost_block_leaves_the_mean_of_the_others(replica):
    present = PAIRS.block == 1
    weights = np.where(present, PAIRS.decoding_weights(present), 0.0)  # of as many examples as rows
    messages = {i: replica.compute(i).numbers for i in np.flatnonzero(present).tolist()}
    replica.stage((0, 1), messages, weights)
    replica.commit((0, 1))
    _, (after, _) = problem.trajectory([[1]])
    assert distance(replica.state.params, after) < ABSOLUTE
    _, (after, _) = problem.trajectory([[0, 1]])
    assert distance(replica.state.params, after) > 10 * ABSOLUTE


# ------------------------------------------------------------------ states


def noisy():
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    return dataclasses.replace(training(), optimizer=optimizer)


def test_a_state_moves_to_another_replica():
    """With a key among its leaves."""
    first, second = Replica(noisy(), PAIRS, ROWS), Replica(noisy(), PAIRS, ROWS)
    for survivors in patterns(PAIRS, 3):
        one_step(first, survivors)
    leaves = [np.array(x) for x in first.leaves()]
    assert all(type(x) is np.ndarray for x in leaves)
    second.skip((0, 1))
    second.load(leaves, 3)
    assert second.step == 3
    second.commit((0, 1))  # what was staged before is void
    assert second.step == 3
    assert same(second.leaves(), first.leaves())
    one_step(first, ALL)
    one_step(second, ALL)
    assert same(second.leaves(), first.leaves())
    with pytest.raises(ValueError, match="zip"):
        second.load(leaves[1:], 3)


def test_another_code_keeps_the_state_and_the_compiled_loss():
    traces = []

    def counted(params, batch):
        traces.append(1)
        return mean(params, batch)

    replica = Replica(training(counted), PAIRS, ROWS)
    replica.warm_up(0, master=False)
    one_step(replica, ALL)
    before = copy(replica)
    replica.configure(fractional_repetition(6, 1), ROWS)
    assert replica.step == 1
    assert same(replica.state, before)
    shapes_only = len(traces)
    for survivors in patterns(replica.code, 2):
        one_step(replica, survivors)
    assert len(traces) == shapes_only
    _, (after, _) = problem.trajectory([[0, 1], [0, 1, 2], [0, 1, 2]])
    assert distance(replica.state.params, after) < ABSOLUTE


@pytest.mark.parametrize("master", [False, True])
def test_warming_up_leaves_the_state(replica, master):
    one_step(replica, ALL)
    before = copy(replica)
    replica.warm_up(2, master=master)
    assert replica.step == 1
    assert same(replica.state, before)
    replica.commit((1, -1))
    assert same(replica.state, before)
