"""Messages that are decoded while they arrive, against sums of products in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("ray")

from jaxcode import encode  # noqa: E402
from jaxcode.cluster import decoding  # noqa: E402
from jaxcode.cluster.decoding import Decoding, parts  # noqa: E402
from jaxcode.codes import cyclic_repetition, fractional_repetition  # noqa: E402
from jaxcode.lowrank import LowRank  # noqa: E402
from jaxcode.normal import normal_form  # noqa: E402

PAIRS = fractional_repetition(4, 1)
FRAGMENTS = fractional_repetition(6, 1, num_fragments=2)
PARAMS = {"a": (6, 4), "b": (5,), "c": (40, 30), "d": (3,), "e": (8, 10)}


def factors(rng, p, q, rank):
    P, Q = rng.normal(size=(p, rank)), rng.normal(size=(q, rank))
    return LowRank(jnp.asarray(P, jnp.float32), jnp.asarray(Q, jnp.float32))


def gradients(code, form=lambda x: x):
    """Of every partition, with the greatest product in the middle, and d without a gradient."""
    for seed in range(code.num_partitions):
        rng = np.random.default_rng(seed)
        yield {
            "a": form(factors(rng, 6, 4, 2)),
            "b": rng.normal(size=5).astype(np.float32),
            "c": form(factors(rng, 40, 30, 3)),
            "d": None,
            "e": form(factors(rng, 8, 10, 2)),
        }


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def dense(leaf):
    if isinstance(leaf, LowRank):
        return np.asarray(leaf.P, np.float64) @ np.asarray(leaf.Q, np.float64).T
    return np.asarray(leaf, np.float64)


@pytest.fixture
def any_product_is_worth_it(monkeypatch):
    monkeypatch.setattr(decoding, "WORTH_A_PART", 1)


def setting(code, form=lambda x: x):
    """The decoding, everybody's message, and the sum that they are to give, in tree order."""
    grads = list(gradients(code, form))
    messages = {
        i: encode(on_device(grads[code.block[i]]), code, i) for i in range(code.num_workers)
    }
    like = {
        name: None if name == "d" else jax.ShapeDtypeStruct(shape, np.float32)
        for name, shape in PARAMS.items()
    }
    decoder = Decoding(code, messages[0], like)
    numbers = {i: decoder.layout.join(decoder.arrays(x)) for i, x in messages.items()}
    plain = [{k: dense(x) for k, x in grad.items() if k != "d"} for grad in gradients(code)]
    return decoder, numbers, [sum(grad[name] for grad in plain) for name in "abce"]


def close(found, expected):
    found = [sum(terms) for terms in found]
    assert [x.shape for x in found] == [x.shape for x in expected]
    return all(np.allclose(x, y, atol=1e-4) for x, y in zip(found, expected, strict=True))


def noise(numbers, seed=0):
    return {i: np.random.default_rng([seed, i]).bytes(len(x)) for i, x in numbers.items()}


def so_far(numbers, stage):
    """What a stage may read: the beginning of its senders' messages, and noise for the rest."""
    there = noise(numbers)
    for i in stage.senders & set(numbers):
        there[i] = numbers[i][: stage.end] + there[i][stage.end :]
    return there


@pytest.mark.parametrize("form", [lambda x: x, normal_form], ids=["factors", "normal form"])
@pytest.mark.parametrize("code", [PAIRS, FRAGMENTS], ids=str)
@pytest.mark.usefixtures("any_product_is_worth_it")
def test_a_stage_needs_some_beginnings_only(code, form):
    decoder, numbers, expected = setting(code, form)
    sizes = {len(x) for x in numbers.values()}
    assert sizes == {decoder.layout.nbytes}
    pivots = 0 if form is not normal_form else 3
    numbers_of_c = 3 * (40 + 30 - pivots) // code.num_fragments
    for missing in range(code.num_workers):
        survivors = np.arange(code.num_workers) != missing
        weights = code.decoding_weights(survivors)
        used = {i: x for i, x in numbers.items() if survivors[i]}
        begun = decoder.begin(weights, int(code.block[missing]))
        mine, others = begun.early
        assert missing in mine.senders
        assert mine.senders | others.senders == set(range(code.num_workers))
        assert not mine.senders & others.senders
        for stage in (mine, others):
            assert abs(stage.end - 4 * (numbers_of_c + pivots)) <= 4
            begun.take(so_far(used, stage))
        assert close(begun.finish(used), expected)


@pytest.mark.parametrize("spoiled", range(4))
@pytest.mark.parametrize("form", [lambda x: x, normal_form], ids=["factors", "normal form"])
@pytest.mark.parametrize("code", [PAIRS, FRAGMENTS], ids=str)
@pytest.mark.usefixtures("any_product_is_worth_it")
def test_a_stage_needs_all_of_that(code, form, spoiled):
    """The control: what had not arrived when a stage was decoded shows."""
    decoder, numbers, expected = setting(code, form)
    weights = code.decoding_weights(np.ones(code.num_workers, bool))
    begun = decoder.begin(weights)
    for number, stage in enumerate(begun.early):
        short = stage._replace(end=stage.end - 8 * (number == spoiled))
        begun.take(so_far(numbers, short))
    last = noise(numbers) if spoiled == 2 else numbers
    assert close(begun.finish(last), expected) == (spoiled > 2)


@pytest.mark.parametrize("code", [PAIRS, FRAGMENTS, fractional_repetition(12, 1)], ids=str)
@pytest.mark.usefixtures("any_product_is_worth_it")
def test_all_replicas_come_to_the_same_sum(code):
    decoder, numbers, _ = setting(code)
    weights = code.decoding_weights(np.ones(code.num_workers, bool))
    sums, first = set(), set()
    for block in range(code.num_partitions):
        begun = decoder.begin(weights, block)
        first.add(begun.early[0].blocks)
        leaves = [sum(terms) for terms in begun.finish(numbers)]
        sums.add(b"".join(np.asarray(x).tobytes() for x in leaves))
    assert len(first) == 2
    assert len(sums) == 1


@pytest.mark.parametrize("code", [PAIRS, FRAGMENTS], ids=str)
@pytest.mark.usefixtures("any_product_is_worth_it")
def test_what_is_not_in_factors_is_counted_once(code):
    """With one leaf in factors all leaves are one part, and both halves of it decode them all."""
    grads = [{"b": grad["b"], "c": grad["c"]} for grad in gradients(code)]
    blocks = code.block.tolist()
    messages = [encode(on_device(grads[block]), code, i) for i, block in enumerate(blocks)]
    like = {name: jax.ShapeDtypeStruct(PARAMS[name], np.float32) for name in "bc"}
    decoder = Decoding(code, messages[0], like)
    numbers = {i: decoder.layout.join(decoder.arrays(x)) for i, x in enumerate(messages)}
    begun = decoder.begin(code.decoding_weights(np.ones(code.num_workers, bool)))
    (half,) = begun.early
    assert half.end == decoder.layout.nbytes
    begun.take(so_far(numbers, half))
    expected = [sum(dense(grad[name]) for grad in grads) for name in "bc"]
    assert close(begun.finish(numbers), expected)


@pytest.mark.usefixtures("any_product_is_worth_it")
def test_narrow_numbers_are_rounded_once():
    rng = np.random.default_rng(0)
    grad = jax.tree.map(lambda x: x.astype(jnp.bfloat16), factors(rng, 40, 30, 3))
    grad = LowRank(grad.P, grad.Q, dtype=jnp.bfloat16)
    decoder = Decoding(PAIRS, grad, jax.ShapeDtypeStruct((40, 30), jnp.bfloat16))
    assert decoder.begin(PAIRS.decoding_weights(np.ones(4, bool))).early == []


@pytest.mark.usefixtures("any_product_is_worth_it")
def test_what_is_given_up_leaves_nothing():
    decoder, numbers, expected = setting(PAIRS)
    weights = PAIRS.decoding_weights(np.ones(4, bool))
    for seed in range(5):
        decoder.begin(7 * weights).take(noise(numbers, seed))
        decoder.begin(weights)
        assert close(decoder.begin(weights).finish(numbers), expected)


@pytest.mark.parametrize("threshold", [1, 10**9])
def test_a_master_decodes_the_same(monkeypatch, threshold):
    monkeypatch.setattr(decoding, "WORTH_A_PART", threshold)
    decoder, numbers, expected = setting(FRAGMENTS)
    weights = FRAGMENTS.decoding_weights(np.arange(6) != 2)
    assert len(decoder.begin(weights).early) == 2 * (threshold == 1)
    payload = decoder.recover(numbers, weights)
    assert len(payload) == decoder.recovered_layout.nbytes
    assert close(decoder.finish(payload), expected)
    assert close(decoder.begin(weights).finish(numbers), expected)


def test_a_dense_code_is_one_part():
    code = cyclic_repetition(4, 1, seed=0)
    grads = [np.random.default_rng(i).normal(size=(3, 2)).astype(np.float32) for i in range(4)]
    held = [np.stack([grads[p] for p in code.partitions[i]]) for i in range(4)]
    messages = {i: encode(jnp.asarray(x), code, i) for i, x in enumerate(held)}
    decoder = Decoding(code, messages[0], jax.ShapeDtypeStruct((3, 2), np.float32))
    numbers = {i: decoder.layout.join(decoder.arrays(x)) for i, x in messages.items()}
    weights = code.decoding_weights(np.arange(4) != 3)
    assert decoder.begin(weights).early == []
    assert close(decoder.begin(weights).finish(numbers), [sum(grads)])


@pytest.mark.usefixtures("any_product_is_worth_it")
def test_parts_are_all_leaves_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        leaves = [
            factors(rng, *rng.integers(1, 20, 3)) if rng.random() < 0.7 else np.ones(4)
            for _ in range(rng.integers(1, 8))
        ]
        found = parts(leaves, 2)
        assert sorted(i for part in found for i in part) == list(range(len(leaves)))
        structured = [i for i, leaf in enumerate(leaves) if isinstance(leaf, LowRank)]
        if len(found) == 2:
            assert set(found[0]) < set(structured)  # and some are in the rest
            costs = [leaves[i].rank * np.prod(leaves[i].shape) for i in structured]
            mine = sum(leaves[i].rank * np.prod(leaves[i].shape) for i in found[0])
            assert 2 * mine >= sum(costs)
