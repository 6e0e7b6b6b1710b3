"""What the driver decides in a step: whose messages are used, and who fetches them from whom."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxcode.cluster.wire import Header
from jaxcode.code import Code


class Plan(NamedTuple):
    """One decision, the same for every replica.

    Attributes:
        step: it is for.
        attempt: how many plans this step had before.
        weights: D (m, n) of the survivors, divided by the number of examples in the mean, in
            multiples of a partition's rows.
        headers: of the survivors' messages that are used, by worker.
        holders: per message the workers that hold its numbers before any of it is fetched.
        pullers: per message the workers that fetch it.
        handles: actors by worker, of all who take part; put in by whoever fetches.
        recovered: a reference to the decoded payload, and its checksum, where a master decodes.
        there: who takes part.
    """

    step: int
    attempt: int
    weights: Float[np.ndarray, "fragments workers"]
    headers: dict[int, Header]
    holders: dict[int, list[int]]
    pullers: dict[int, list[int]]
    handles: dict[int, Any]
    recovered: Any = None
    there: tuple[int, ...] = ()

    @property
    def token(self) -> tuple[int, int]:
        """Names the state that this plan leads to."""
        return self.step, self.attempt


class Report(NamedTuple):
    """What a worker reported of its step; see `jaxcode.cluster.replica.Computed`.

    Attributes:
        header: of its message.
        values: per partition examples, loss, auxiliary outputs.
        integers: checksum of the payload's integers.
        finite: whether the message is.
        seconds: it computed.
    """

    header: Header
    values: dict[int, tuple[int, float, Any]]
    integers: int
    finite: bool
    seconds: float


def agreeing(
    code: Code, integers: dict[int, int], arrived: Bool[np.ndarray, " workers"]
) -> Bool[np.ndarray, " workers"]:
    """Those who arrived, without members of a block whose integers differ from its majority.

    Only messages of which several are mixed have to agree, and only blocks mix.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> code = fractional_repetition(3, 1, num_fragments=2)
        >>> agreeing(code, {0: 7, 1: 8, 2: 7}, np.ones(3, bool)).tolist()
        [True, False, True]
    """
    if code.block is None or code.num_fragments == 1:
        return arrived
    kept = np.zeros_like(arrived)
    for block in np.unique(code.block):
        members = np.flatnonzero(arrived & (code.block == block))
        seen = [integers[int(i)] for i in members]
        if seen:
            most = max(seen, key=lambda x: (seen.count(x), -seen.index(x)))
            kept[members[np.asarray(seen) == most]] = True
    return kept


def values_of(code: Code, reports: dict[int, Report]) -> tuple[int, float, Any, list[int]]:
    """Examples, and means of the loss and of auxiliary outputs, over partitions somebody computed.

    Returns:
        Number of examples, loss, auxiliary outputs, and the partitions that are missing.
    """
    found: dict[int, tuple[int, float, Any]] = {}
    for worker in sorted(reports):
        for block, value in reports[worker].values.items():
            found.setdefault(block, value)
    missing = [block for block in range(code.num_partitions) if block not in found]
    if not found:
        return 0, math.nan, None, missing
    examples = sum(value[0] for value in found.values())
    loss = sum(value[1] for value in found.values()) / examples
    aux = jax.tree.map(lambda *x: sum(x) / examples, *(value[2] for value in found.values()))
    return examples, loss, aux, missing


def weights_of(
    code: Code, survivors: Bool[np.ndarray, " workers"]
) -> tuple[Float[np.ndarray, "fragments workers"], Bool[np.ndarray, " workers"]]:
    """D, and whose partitions are in the sum: a block that is lost is left out of both.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> weights_of(fractional_repetition(4, 0, num_fragments=2), np.arange(4) > 0)[0].any(0)
        array([False, False,  True,  True])
    """
    weights = code.decoding_weights(survivors)
    if code.block is None or bool(code.is_decodable(survivors)):
        return weights, survivors
    answers = np.bincount(code.block[survivors], minlength=code.num_partitions)
    kept = survivors & (answers >= code.num_fragments)[code.block]
    return np.where(kept, weights, 0.0), kept


def transfers(
    code: Code, used: list[int], reports: dict[int, Report], participants: list[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Who holds the numbers of each message that is used, its sender first, and who fetches them.

    Replicas of one block with one fragment compute the same numbers, and most often to the last
    bit: then each of them holds all their messages.
    """
    holders: dict[int, list[int]] = {}
    pullers: dict[int, list[int]] = {}
    for sender in used:
        crc, group = reports[sender].header.crc, set()
        if code.block is not None and code.num_fragments == 1:
            group = {
                i
                for i in participants
                if code.block[i] == code.block[sender]
                and i in reports
                and reports[i].header.crc == crc
            }
        holders[sender] = [sender, *sorted(group - {sender})]
        pullers[sender] = [i for i in participants if i not in holders[sender]]
    return holders, pullers
