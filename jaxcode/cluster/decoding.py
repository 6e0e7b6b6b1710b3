"""From the survivors' messages to a dense gradient, begun while they still arrive.

Most of the work are the products of factors, and most of these belong to few leaves. Their numbers
stand first in a message, and are multiplied while the rest of it travels. What comes of them is
staged only once the whole messages are there and right.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxcode.cluster.buffers import room_for, writing_over
from jaxcode.cluster.wire import Layout
from jaxcode.code import Code
from jaxcode.coding import combine, decode
from jaxcode.lowrank import LowRank, NormalForm, is_structured

# Multiplications from which on a part of its own pays for its dispatch.
WORTH_A_PART = 10**8


class Decoding:
    """What a code makes of messages.

    Args:
        code: who computes what.
        message: a message, or its shapes.
        like: the parameters' shapes, and None where there is no gradient.

    Attributes:
        layout: of a message as it travels.
        recovered_layout: of what `recover` returns.
        ends: bytes of a message from its beginning that each part needs, but for the last part.
    """

    def __init__(self, code: Code, message: Any, like: Any):
        leaves = jax.tree.leaves(message, is_leaf=is_structured)
        likes = jax.tree.leaves(like)
        self._parts = parts(leaves, code.num_partitions)
        self._order = [i for part in self._parts for i in part]
        self._places = np.argsort(self._order).tolist()
        self.layout = Layout.of(self._in_order(leaves))
        self._trees = [jax.tree.structure([leaves[i] for i in part]) for part in self._parts]
        lengths = [len(jax.tree.leaves([leaves[i] for i in part])) for part in self._parts]
        counts = np.cumsum([0, *lengths]).tolist()
        self._spans = list(zip(counts[:-1], counts[1:], strict=True))
        self.ends = [
            Layout(self.layout.shapes[:stop], self.layout.dtypes[:stop]).nbytes
            for stop in counts[1:-1]
        ]
        self._buffers = [
            np.zeros((code.num_workers, *shape), dtype)
            for shape, dtype in zip(self.layout.shapes, self.layout.types, strict=True)
        ]

        self._likes = [[likes[i] for i in part] for part in self._parts]

        def whole(stacked: list[Any], weights: Any) -> list[Any]:
            found = []
            for part, like in zip(stacked, self._likes, strict=True):
                found += decode(part, code, weights, like=like, combined=False)
            return found

        weights = np.zeros((code.num_fragments, code.num_workers), np.float32)
        shapes = jax.eval_shape(whole, self._all_stacked(), weights)
        self._recovered_tree = jax.tree.structure(shapes)
        self.recovered_layout = Layout.of(jax.tree.leaves(shapes))
        self._recover = jax.jit(whole)
        self._finish = writing_over(
            lambda found: combine(found, [x for like in self._likes for x in like])
        )
        self._decode = [
            writing_over(lambda s, w, like=like: decode(s, code, w, like=like))
            for like in self._likes
        ]
        # Written over: fresh memory for every step would cost as much time as the numbers in it.
        self._old: list[Any] = [None] * len(self._parts)

    def _in_order(self, leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves([leaves[i] for i in self._order])

    def arrays(self, message: Any) -> list[np.ndarray]:
        """The arrays of a message on the host, in the order in which they travel."""
        leaves = jax.tree.leaves(message, is_leaf=is_structured)
        return [np.asarray(x) for x in self._in_order(leaves)]

    def begin(self, weights: np.ndarray) -> "Begun":
        """Begin a gradient, with D (m, n): give it the messages of every part in turn."""
        jax.block_until_ready(self._old)  # one that was given up may still read what is in buffers
        return Begun(self, weights.astype(np.float32))

    def part(self, number: int, messages: dict[int, Any], weights: np.ndarray) -> None:
        """Decode a part, from messages that need not be there any further."""
        self._fill(messages, *self._spans[number])
        old = self._room(number)
        self._old[number] = self._decode[number](old, self._stacked(number), weights)

    def recover(self, messages: dict[int, Any], weights: np.ndarray) -> bytes:
        """What `finish` needs, in factors where they are: a master's payload."""
        self._fill(messages, 0, len(self._buffers))
        found = self._recover(self._all_stacked(), weights.astype(np.float32))
        return self.recovered_layout.join([np.asarray(x) for x in jax.tree.leaves(found)])

    def _fill(self, messages: dict[int, Any], first: int, stop: int) -> None:
        """Copy some arrays of messages to where they are decoded from."""
        layout = Layout(self.layout.shapes[:stop], self.layout.dtypes[:stop])
        for worker, numbers in messages.items():
            arrays = layout.split(numbers)
            for place in range(first, stop):
                self._buffers[place][worker] = arrays[place]
        # Rows of others hold what they held: their weights are 0, and they are not read.

    def finish(self, numbers: Any) -> list[Any]:
        """The leaves of the gradient, from what `recover` returned."""
        found = jax.tree.unflatten(self._recovered_tree, self.recovered_layout.split(numbers))
        old = [leaf for part in range(len(self._parts)) for leaf in self._room(part)]
        leaves = iter(self._finish(old, found))
        self._old = [[next(leaves) for _ in part] for part in self._parts]
        return self.gradient()

    def gradient(self) -> list[Any]:
        """The leaves that were decoded last, in the tree's order."""
        leaves = [leaf for part in self._old for leaf in part]
        return [leaves[place] for place in self._places]

    def _room(self, part: int) -> list[Any]:
        """Where a part's gradient may be written: over its last one, if there is one."""
        old, self._old[part] = self._old[part], None
        return room_for(self._likes[part]) if old is None else old

    def _stacked(self, part: int) -> Any:
        first, stop = self._spans[part]
        return jax.tree.unflatten(self._trees[part], self._buffers[first:stop])

    def _all_stacked(self) -> list[Any]:
        return [self._stacked(part) for part in range(len(self._parts))]


class Begun:
    """A gradient that is being decoded, part by part."""

    def __init__(self, decoding: Decoding, weights: np.ndarray):
        self._decoding, self._weights = decoding, weights
        self._done = 0

    def take(self, messages: dict[int, Any]) -> None:
        """Decode the next part; returns while that still goes on."""
        self._decoding.part(self._done, messages, self._weights)
        self._done += 1

    def finish(self, messages: dict[int, Any]) -> list[Any]:
        """Decode what is left; the leaves of the gradient, in the tree's order."""
        while self._done <= len(self._decoding.ends):
            self.take(messages)
        return jax.block_until_ready(self._decoding.gradient())


def parts(leaves: list[Any], blocks: int) -> list[list[int]]:
    """Which leaves are decoded together: two parts where that pays, the greater products first.

    Example:
        >>> small, large = (LowRank(np.ones((p, 1)), np.ones((p, 1))) for p in (10_000, 20_000))
        >>> parts([np.ones(3), small, large], 2)
        [[2], [0, 1]]
        >>> parts([np.ones(3), small], 2)
        [[0, 1]]
    """
    costs = {i: blocks * _multiplications(x) for i, x in enumerate(leaves) if is_structured(x)}
    half, first = sum(costs.values()) / 2, list[int]()
    for i in sorted(costs, key=lambda i: -costs[i]):
        if sum(costs[j] for j in first) < half:
            first.append(i)
    rest = [i for i in range(len(leaves)) if i not in first]
    # What is not in factors goes with some that are: with them it is known which blocks are lost.
    if half < WORTH_A_PART or not set(rest) & set(costs):
        return [list(range(len(leaves)))]
    return [sorted(first), rest]


def _multiplications(leaf: Any) -> int:
    if isinstance(leaf, NormalForm):
        leaf = leaf.place
    return math.prod(leaf.shape) * leaf.rank if isinstance(leaf, LowRank) else 0
