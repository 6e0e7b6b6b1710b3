"""Encoding and decoding as linear maps, against dense NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcode as jc
from jaxcode.payload import fragment, join

CODES = {
    "n=4, s=1": jc.fractional_repetition(4, 1),
    "n=5, s=1, m=2": jc.fractional_repetition(5, 1, num_fragments=2),
    "n=7, s=2, m=2": jc.fractional_repetition(7, 2, num_fragments=2),
    "n=7, s=1, m=4": jc.fractional_repetition(7, 1, num_fragments=4),
    "dense": jc.Code(np.random.default_rng(0).normal(size=(4, 3, 2)), 0),
}


def dense_fragments(vector, m):
    """The definition: m consecutive pieces of equal length, the last padded with zeros."""
    length = -(-len(vector) // m)
    padded = np.zeros(m * length)
    padded[: len(vector)] = vector
    return padded.reshape(m, length)


@pytest.mark.parametrize("name", CODES)
def test_messages_are_the_defining_sum(name):
    code = CODES[name]
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(code.num_partitions, 11))
    for worker in range(code.num_workers):
        held = jnp.asarray(gradients[code.partitions[worker]], jnp.float32)
        message = jc.encode(held if code.load > 1 else held[0], code, worker)
        want = sum(
            code.encoding_matrix[worker, p] @ dense_fragments(gradients[p], code.num_fragments)
            for p in range(code.num_partitions)
        )
        np.testing.assert_allclose(np.ravel(message), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CODES)
def test_decoding_undoes_encoding_for_every_tolerated_pattern(name):
    code = CODES[name]
    n, k, s = code.num_workers, code.num_partitions, code.num_stragglers
    gradients = np.random.default_rng(2).normal(size=(k, 3, 5)).astype(np.float32)
    held = jnp.asarray(gradients[code.partitions if code.load > 1 else code.partitions[:, 0]])
    messages = jax.vmap(lambda g, i: jc.encode(g, code, i))(held, jnp.arange(n))
    decode = jax.jit(lambda w: jc.decode(messages, code, w, like=jnp.zeros((3, 5))))
    for stragglers in itertools.chain(*(itertools.combinations(range(n), i) for i in range(s + 1))):
        survivors = np.ones(n, bool)
        survivors[list(stragglers)] = False
        if not code.is_decodable(survivors):
            assert name == "dense"
            continue
        total = decode(code.decoding_weights(survivors))
        np.testing.assert_allclose(total, gradients.sum(0), rtol=1e-4, atol=1e-4)
    assert code.num_partitions == 3 or decode._cache_size() == 1


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (0, 4), (2, 1, 3)])
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_fragments_join_to_the_array(shape, m):
    array = jnp.arange(float(np.prod(shape))).reshape(shape)
    pieces = fragment(array, m)
    assert pieces.shape[0] == m
    assert np.array_equal(join(pieces, shape), array)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_messages_have_the_leafs_dtype_or_the_wires(dtype):
    code = jc.fractional_repetition(4, 1, num_fragments=2)
    leaf = jnp.ones(6, dtype)
    assert jc.encode(leaf, code, 0).dtype == dtype
    assert jc.encode(leaf, code, 0, wire_dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert jc.encode(jnp.arange(3), code, 0).dtype == jnp.int32  # indices travel whole


def test_sums_are_in_float32():
    # In bfloat16, 256 + 1 is 256: adding 300 ones would stop there.
    code = jc.uncoded(300)
    messages = jnp.ones((300, 2), jnp.bfloat16)
    total = jc.decode(messages, code, np.ones((1, 300)), like=jnp.zeros(2, jnp.bfloat16))
    assert total.dtype == jnp.bfloat16
    assert total.tolist() == [300, 300]


def test_the_worst_pattern_in_bfloat16_costs_only_rounding():
    """Blocks do not amplify the rounding of a narrow wire; errors are near its resolution."""
    code = jc.fractional_repetition(12, 3, num_fragments=1)
    gradients = np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32)
    messages = jnp.asarray(gradients[code.block], jnp.bfloat16)
    patterns = np.array(list(itertools.combinations(range(12), 3)))
    survivors = np.ones((len(patterns), 12), bool)
    survivors[np.arange(len(patterns))[:, None], patterns] = False
    weights = jnp.asarray(code.decoding_weights(survivors), jnp.float32)
    totals = jax.vmap(lambda w: jc.decode(messages, code, w, like=jnp.zeros(50)))(weights)
    want = gradients.sum(0)
    errors = np.linalg.norm(totals - want[None], axis=1) / np.linalg.norm(want)
    assert errors.max() < 4e-3


def test_a_payload_packs_to_one_flat_message_and_back():
    payload = {
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "matrix": jnp.arange(6.0).reshape(2, 3),
        "empty": jnp.zeros((0, 3)),
        "factors": jc.LowRank(jnp.ones((4, 2)), jnp.full((3, 2), 2.0)),
        "rows": jc.IndexedRows(jnp.array([70000, 1]), jnp.ones((2, 3)), (80000, 3), jnp.float32),
        "nothing": None,
    }
    message = jax.jit(jc.pack)(payload)
    assert message.dtype == jnp.uint8
    assert message.size == 2 * 5 + 4 * (6 + 4 * 2 + 3 * 2 + 2 + 2 * 3)
    shapes = jax.eval_shape(lambda: payload)
    back = jax.jit(lambda m: jc.unpack(m, shapes))(message)
    assert jax.tree.structure(back) == jax.tree.structure(payload)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(payload), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    assert jc.pack({}).size == 0
    assert jc.unpack(jc.pack({}), {}) == {}


def test_a_message_of_another_payload_is_refused():
    with pytest.raises(
        ValueError, match=r"`unpack` needs a message of 12 bytes, got uint8 of shape \(8,\)"
    ):
        jc.unpack(jc.pack(jnp.ones(2)), jnp.ones(3))


def test_assign_covers_every_example_once_per_replica():
    code = jc.fractional_repetition(7, 2)
    parts = jc.assign(np.arange(10), code)
    for block in range(code.num_partitions):
        workers = np.flatnonzero(code.block == block)
        assert (parts.examples[workers] == parts.examples[workers[0]]).all()
    one_each = [np.flatnonzero(code.block == b)[0] for b in range(code.num_partitions)]
    seen = parts.examples[one_each][parts.share[one_each] > 0]
    assert sorted(seen) == list(range(10))
    np.testing.assert_allclose(parts.share[one_each].sum(), 1, rtol=1e-6)
    assert isinstance(parts.examples, np.ndarray)  # host data stays on the host


@pytest.mark.parametrize("leaf", [np.ones(2, bool), np.ones(2, complex), np.full(2, 1 << 40)])
def test_what_a_message_cannot_hold_is_refused(leaf):
    with pytest.raises(ValueError, match="`pack` needs arrays of real numbers"):
        jc.pack({"x": leaf})
    with pytest.raises(ValueError, match="`pack` needs"):
        jc.pack(jax.random.key(0))


def test_a_gradient_in_place_of_messages_is_refused():
    with pytest.raises(ValueError, match="`decode` needs messages stacked on a leading axis of 8"):
        jc.decode(jnp.ones((3, 2)), jc.uncoded(8), np.ones((1, 8)), like=jnp.ones((3, 2)))
