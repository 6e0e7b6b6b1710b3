"""From the survivors' messages to a dense gradient, begun while they still arrive.

Most of the work are the products of factors, and most of these belong to few leaves. Their numbers
stand first in a message, and are multiplied while the rest of it travels: in two halves of the
blocks, and first the half with the worker's own block, which it has not to fetch. The halves are
added last, and always in the same order, so that all replicas come to the same sum, to the last
bit. What comes of them is staged only once the whole messages are there and right.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcode.cluster.buffers import room_for, writing_over
from jaxcode.cluster.wire import Layout
from jaxcode.code import Code
from jaxcode.coding import combine, decode
from jaxcode.lowrank import LowRank, NormalForm, is_structured

# Multiplications from which on a part of its own pays for its dispatch.
WORTH_A_PART = 10**8


class Stage(NamedTuple):
    """What is decoded at once: some leaves, over some blocks.

    Attributes:
        part: number of the leaves' part.
        blocks: the first, and the one behind the last.
        senders: of these blocks.
        end: bytes from the beginning of their messages that it needs.
    """

    part: int
    blocks: tuple[int, int]
    senders: frozenset[int]
    end: int

    @property
    def name(self) -> tuple[int, tuple[int, int]]:
        """Tells it from the others."""
        return self.part, self.blocks


class Decoding:
    """What a code makes of messages.

    Args:
        code: who computes what.
        message: a message, or its shapes.
        like: the parameters' shapes, and None where there is no gradient.

    Attributes:
        layout: of a message as it travels.
        recovered_layout: of what `recover` returns.
    """

    def __init__(self, code: Code, message: Any, like: Any):
        self._code = code
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
        self._stages = self._all_stages(leaves)
        self._decode = {stage.name: writing_over(self._decoder(stage)) for stage in self._stages}
        # Written over: fresh memory for every step would cost as much time as the numbers in it.
        self._old: dict[tuple[int, tuple[int, int]], Any] = {}

    def _all_stages(self, leaves: list[Any]) -> list[Stage]:
        """The first part over either half of the blocks, where that pays; the rest over all."""
        k = self._code.num_partitions
        halves = [(0, k // 2), (k // 2, k)]
        narrow = any(x.dtype.itemsize < 4 for x in self._likes[0])  # would be rounded once more
        if k < 2 or narrow or _cost(leaves, k) < 2 * WORTH_A_PART:
            halves = [(0, k)]
        return [
            Stage(
                part,
                blocks,
                self._senders(*blocks),
                self.layout.first(stop).nbytes,
            )
            for part, (_, stop) in enumerate(self._spans)
            for blocks in (halves if part == 0 else [(0, k)])
        ]

    def _senders(self, first: int, stop: int) -> frozenset[int]:
        block = self._code.block
        if block is None:
            return frozenset(range(self._code.num_workers))
        return frozenset(np.flatnonzero((first <= block) & (block < stop)).tolist())

    def _decoder(self, stage: Stage) -> Callable[[Any, Any], Any]:
        """What decodes a stage, from stacked messages and weights."""
        code, like, (first, stop) = self._code, self._likes[stage.part], stage.blocks
        if stop - first == code.num_partitions:
            return lambda stacked, weights: decode(stacked, code, weights, like=like)
        counts = np.isin(np.arange(code.num_workers), list(stage.senders))

        def some(stacked: Any, weights: Any) -> Any:
            own = jnp.where(counts, weights, 0)
            found = decode(stacked, code, own, like=like, combined=False)
            return combine([_of_blocks(x, first, stop) for x in found], like)

        return some

    def _in_order(self, leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves([leaves[i] for i in self._order])

    def arrays(self, message: Any) -> list[np.ndarray]:
        """The arrays of a message on the host, in the order in which they travel."""
        leaves = jax.tree.leaves(message, is_leaf=is_structured)
        return [np.asarray(x) for x in self._in_order(leaves)]

    def begin(self, weights: np.ndarray, block: int = 0) -> "Begun":
        """Begin a gradient, with D (m, n); the half with this block, the worker's, comes first."""
        jax.block_until_ready(self._old)  # one that was given up may still read what is in buffers
        stages = sorted(
            self._stages, key=lambda x: (x.part, not x.blocks[0] <= block < x.blocks[1])
        )
        return Begun(self, weights.astype(np.float32), stages)

    def run(self, stage: Stage, messages: dict[int, Any], weights: np.ndarray) -> None:
        """Decode a stage, from messages that need not be there any further."""
        own = {i: x for i, x in messages.items() if i in stage.senders}
        self._fill(own, *self._spans[stage.part])
        old, stacked = self._room(*stage.name), self._stacked(stage.part)
        self._old[stage.name] = self._decode[stage.name](old, stacked, weights)

    def recover(self, messages: dict[int, Any], weights: np.ndarray) -> bytes:
        """What `finish` needs, in factors where they are: a master's payload."""
        self._fill(messages, 0, len(self._buffers))
        found = self._recover(self._all_stacked(), weights.astype(np.float32))
        return self.recovered_layout.join([np.asarray(x) for x in jax.tree.leaves(found)])

    def _fill(self, messages: dict[int, Any], first: int, stop: int) -> None:
        """Copy some arrays of messages to where they are decoded from."""
        layout = self.layout.first(stop)
        for worker, numbers in messages.items():
            arrays = layout.split(numbers)
            for place in range(first, stop):
                self._buffers[place][worker] = arrays[place]
        # Rows of others hold what they held: their weights are 0, and they are not read.

    def finish(self, numbers: Any) -> list[list[Any]]:
        """The leaves of the gradient, from what `recover` returned; see `Begun.finish`."""
        found = jax.tree.unflatten(self._recovered_tree, self.recovered_layout.split(numbers))
        names = [(part, (0, self._code.num_partitions)) for part in range(len(self._parts))]
        old = [leaf for name in names for leaf in self._room(*name)]
        leaves = iter(self._finish(old, found))
        self._old |= {name: [next(leaves) for _ in self._parts[name[0]]] for name in names}
        return self._gradient(names)

    def decoded(self) -> list[list[Any]]:
        """The leaves whose stages have all been run; see `Begun.finish`."""
        return self._gradient([stage.name for stage in self._stages])

    def _gradient(self, names: list[tuple[int, tuple[int, int]]]) -> list[list[Any]]:
        """The leaves in the tree's order, each the sum of what stands under these names."""
        leaves = []
        for part in range(len(self._parts)):
            terms = [self._old[name] for name in names if name[0] == part]
            leaves += [list(leaf) for leaf in zip(*terms, strict=True)]
        return [leaves[place] for place in self._places]

    def _room(self, part: int, blocks: tuple[int, int]) -> list[Any]:
        """Where a part's gradient may be written: over its last one, if there is one."""
        old = self._old.pop((part, blocks), None)
        return room_for(self._likes[part]) if old is None else old

    def _stacked(self, part: int) -> Any:
        first, stop = self._spans[part]
        return jax.tree.unflatten(self._trees[part], self._buffers[first:stop])

    def _all_stacked(self) -> list[Any]:
        return [self._stacked(part) for part in range(len(self._parts))]


class Begun:
    """A gradient that is being decoded, stage by stage.

    Attributes:
        early: the stages for which whole messages need not be there.
    """

    def __init__(self, decoding: Decoding, weights: np.ndarray, stages: list[Stage]):
        self._decoding, self._weights, self._left = decoding, weights, list(stages)
        self.early = stages[:-1]

    def take(self, messages: dict[int, Any]) -> None:
        """Decode the next stage; returns while that still goes on."""
        self._decoding.run(self._left.pop(0), messages, self._weights)

    def finish(self, messages: dict[int, Any]) -> list[list[Any]]:
        """Decode what is left; the leaves of the gradient, in the tree's order.

        Returns:
            For each leaf the arrays whose sum it is, in this order.
        """
        while self._left:
            self.take(messages)
        return jax.block_until_ready(self._decoding.decoded())


def parts(leaves: list[Any], blocks: int) -> list[list[int]]:
    """Which leaves are decoded together: two parts where that pays, the greater products first.

    Example:
        >>> small, large = (LowRank(np.ones((p, 1)), np.ones((p, 1))) for p in (10_000, 20_000))
        >>> parts([np.ones(3), small, large], 2)
        [[2], [0, 1]]
        >>> parts([np.ones(3), small], 2)
        [[0, 1]]
    """
    costs = {i: _cost([x], blocks) for i, x in enumerate(leaves) if is_structured(x)}
    half, first = sum(costs.values()) / 2, list[int]()
    for i in sorted(costs, key=lambda i: -costs[i]):
        if sum(costs[j] for j in first) < half:
            first.append(i)
    rest = [i for i in range(len(leaves)) if i not in first]
    # What is not in factors goes with some that are: with them it is known which blocks are lost.
    if half < WORTH_A_PART or not set(rest) & set(costs):
        return [list(range(len(leaves)))]
    return [sorted(first), rest]


def _cost(leaves: list[Any], blocks: int) -> int:
    """Multiplications for the products of factors."""
    places = [x.place if isinstance(x, NormalForm) else x for x in leaves]
    return sum(blocks * math.prod(x.shape) * x.rank for x in places if isinstance(x, LowRank))


def _of_blocks(leaf: Any, first: int, stop: int) -> Any:
    """Some blocks of a leaf's factors; of other leaves, the others' weights are 0."""
    if isinstance(leaf, LowRank | NormalForm):
        return jax.tree.map(lambda x: x[first:stop], leaf)
    return leaf
