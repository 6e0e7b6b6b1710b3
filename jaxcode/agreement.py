"""Only those replicas are mixed whose normal forms have the same pivots.

Two workers of a group compute the same gradient up to rounding, and rounding may make them choose
different pivot rows. Coefficients and rows then mean different things, and a combination of their
fragments means nothing. The pivots travel with each message, so the receiver sees it: a worker that
differs from the majority of its group counts as a straggler, and its group is decoded from others.
So does one whose pivots are those of no matrix, even where it is the only one that answered.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcode.decoder import Decoder, members
from jaxcode.lowrank import NormalForm


def agreed_weights(decoder: Decoder, forms: list[NormalForm]) -> Array:
    """The decoder's weights, without workers whose pivots are not those of their group.

    Args:
        decoder: with the weights (m, n) for those who arrived.
        forms: the messages of every leaf in normal form, stacked over the workers here.

    Returns:
        (m, n) weights: as they were in groups that agree, else solved for the members that do; NaN
        where fewer than m are left, so that it shows. A block that was lost all the same stays so.
    """
    code, m = decoder.code, decoder.code.num_fragments
    groups = members(code)  # (k, largest group), n where a group is smaller
    counted = jnp.any(decoder.weights != 0, axis=0)
    pivots = [form.pivots.reshape(len(form.pivots), -1) for form in forms]
    flat = jnp.concatenate([x.astype(jnp.uint32) for x in pivots], axis=1)
    possible = functools.reduce(jnp.logical_and, map(_are_rows, forms))
    digests = decoder.gather(_digest(flat) * 2 + possible.astype(jnp.uint32))
    votes = counted & (digests % 2 == 1)
    chosen = _majority(jnp.pad(digests, (0, 1))[groups], jnp.pad(votes, (0, 1))[groups])
    leader = jnp.take_along_axis(jnp.asarray(groups), chosen[:, None], axis=1)[:, 0]  # (k,)
    is_leader = (leader[code.block] == jnp.arange(code.num_workers)).astype(jnp.uint32)
    reference = decoder.sum_by_block(flat, is_leader)
    own = jnp.asarray(code.block)[decoder.workers]
    same = jnp.all(flat == reference[own], axis=1)
    agrees = votes & (decoder.gather(same.astype(jnp.uint32)) == 1)
    disputed = jnp.zeros(code.num_partitions, bool).at[code.block].max(counted & ~agrees)
    disputed &= decoder.recovered

    inside = jnp.pad(agrees, (0, 1))[groups]
    coefficients = jnp.asarray(code.coefficients[:, 0], decoder.weights.dtype)
    C = jnp.where(inside[..., None], jnp.pad(coefficients, ((0, 1), (0, 0)))[groups], 0)
    enough = jnp.sum(inside, axis=1) >= m
    solved = jax.lax.cond(
        jnp.any(disputed & enough), _pseudoinverse, lambda C: jnp.swapaxes(C, 1, 2), C
    )
    solved = jnp.where(inside[:, None], solved * decoder.scale[:, None, None], 0)
    solved = jnp.where(enough[:, None, None], solved, jnp.nan)
    again = jnp.zeros((code.num_workers + 1, m), solved.dtype)
    again = again.at[groups.reshape(-1)].set(jnp.swapaxes(solved, 1, 2).reshape(-1, m))[:-1].T
    return jnp.where(disputed[code.block][None], again, decoder.weights)


def _pseudoinverse(C: Array) -> Array:
    """Of (k, g, m), by QR rather than normal equations, which would square the condition."""
    Q, R = jnp.linalg.qr(C)
    inverse = jax.scipy.linalg.solve_triangular(R, jnp.swapaxes(Q, 1, 2), lower=False)
    return jnp.where(jnp.isfinite(inverse), inverse, 0)


def _are_rows(form: NormalForm) -> Array:
    """For each worker here, whether the pivots ascend among the rows of the matrix."""
    p, pivots = form.place.factor_shapes[0][-2], form.pivots
    ascend = jnp.all(pivots[..., 1:] > pivots[..., :-1], axis=-1)
    inside = jnp.all((pivots >= 0) & (pivots < p), axis=-1)
    return jnp.all((ascend & inside).reshape(len(pivots), -1), axis=1)


def _digest(flat: Array) -> Array:
    """A number for each row, that rows which differ do not share, save one time in billions."""
    mixed = (flat + jnp.uint32(1)) * jnp.arange(1, 2 * flat.shape[1], 2, dtype=jnp.uint32)[None]
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 13), axis=1, dtype=jnp.uint32)


def _majority(digests: Array, counted: Array) -> Array:
    """The place in each group (k, g) of a member that most others agree with, the first of them."""
    equal = (digests[:, :, None] == digests[:, None, :]) & counted[:, None, :]
    votes = jnp.where(counted, jnp.sum(equal, axis=2), -1)
    return jnp.argmax(votes, axis=1)
