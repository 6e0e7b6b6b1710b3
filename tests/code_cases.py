"""Codes of every kind, and dense arithmetic on them written from the definitions."""

import itertools

import numpy as np
import pytest

from jaxcode.code import Code
from jaxcode.codes import (
    cyclic_mds,
    cyclic_repetition,
    expander,
    fractional_repetition,
    general_placement,
    graph_code,
    heterogeneous,
    polynomial,
    uncoded,
)

TOLERANCE = 1e-9  # float64 on the host


def cyclic(n, s):
    """Tandon et al.'s cyclic repetition: row i is orthogonal to H, which annihilates ones."""
    H = np.random.default_rng(0).normal(size=(s, n))
    H[:, -1] = -H[:, :-1].sum(1)
    B = np.zeros((n, n))
    for i in range(n):
        rest = [(i + j) % n for j in range(1, s + 1)]
        B[i, i], B[i, rest] = 1, np.linalg.solve(H[:, rest], -H[:, i])
    return B


def shuffled_blocks():
    """Groups of 3, 4 and 3 workers with random coefficients of two fragments, in random order."""
    rng = np.random.default_rng(1)
    B = np.zeros((10, 3, 2))
    B[rng.permutation(10), np.repeat([0, 1, 2], [3, 4, 3])] = rng.normal(size=(10, 2))
    return B


REPEATED = np.kron(np.eye(3), np.ones((2, 2)))  # Tandon et al.'s layout: pairs hold two partitions
RAGGED = [[1, 1, 1], [0, 2, 0], [1, 0, 0], [0, 0, 3], [0, 1, 1.5]]

# Two partitions on three workers and two on four, each to be held by two at least.
PLACED = [[0, 1], [0, 2, 3], [1, 3], [0, 2], [2, 3], [1, 2, 3]]

# Exact with any num_stragglers missing.
CODES = {
    "uncoded": uncoded(5),
    "pairs": fractional_repetition(8, 1),
    "uneven": fractional_repetition(8, 2),
    "one group": fractional_repetition(5, 3, num_fragments=2),
    "two fragments": fractional_repetition(9, 1, num_fragments=2),
    "three fragments": fractional_repetition(9, 1, num_fragments=3),
    "no stragglers": fractional_repetition(8, 0, num_fragments=4),
    "shuffled blocks": Code(shuffled_blocks(), 1),
    "cyclic": Code(cyclic(7, 2), 2, name="cyclic"),
    "repeated": Code(REPEATED, 1),
    "ragged": Code(RAGGED, 1),
    "speeds": heterogeneous([1, 3, 2, 1, 3, 3, 2], 1),
    "speeds, two fragments": heterogeneous([5, 1, 4, 1, 1, 2, 2, 3], 1, num_fragments=2),
    "cyclic repetition": cyclic_repetition(8, 2),
    "cyclic MDS, odd": cyclic_mds(7, 2),
    "cyclic MDS, even": cyclic_mds(8, 2),
    "cyclic MDS, even of odd": cyclic_mds(7, 3),
    "polynomial": polynomial(8, 2, num_fragments=2),
    "polynomial, three fragments": polynomial(7, 1, num_fragments=3),
    "placed": general_placement(PLACED, 1),
    "placed, two fragments": general_placement(PLACED, 1, num_fragments=2),
    "expander": expander(8, 3),
    "graph": graph_code(9, 3),
    "dense fragments": Code(np.random.default_rng(2).normal(size=(6, 3, 2)), 0),
}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)
block_codes = pytest.mark.parametrize(
    "code", [c for c in CODES.values() if c.block is not None], ids=lambda code: repr(code)
)


def all_patterns(n):
    return np.array(list(itertools.product([False, True], repeat=n)))


def dense(code):
    B = np.zeros((code.num_workers, code.num_partitions, code.num_fragments))
    for i, row in enumerate(code.partitions):
        for p, coefficient in zip(row, code.coefficients[i], strict=True):
            B[i, p] += coefficient
    return B


def target(code):
    return np.tile(np.eye(code.num_fragments), code.num_partitions)


def residuals(code, weights, B):
    """The squared norm of D B - [I ... I], for each D."""
    product = weights @ B.reshape(len(B), -1)
    return ((product - target(code)) ** 2).sum((-2, -1))


def decodes(code, weights, B):
    return residuals(code, weights, B) < TOLERANCE**2
