"""Messages on their way: each stays with its maker, in parts that others fetch.

Parts are small enough to travel inside the reply of an actor's call, which is quicker than a shared
object store: nothing is allocated, located or pinned. Where several workers hold a message each is
asked for its share, and where one link would have to serve several readers, every reader fetches
other parts first and hands them on: each byte leaves the maker once.
"""

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jaxcode.cluster.plans import Plan
from jaxcode.cluster.wire import HEADER_BYTES, Header, Inbox, Layout, Rejected

# Below Ray's limit (100 KiB) for what a reply carries itself.
PART_BYTES = 96_000
# What is longer than so many parts travels in few and large ones, through the object store.
MOST_PARTS, LARGE_PARTS = 256, 64
# Parts of one message that a worker has asked for at once; others have to wait for theirs too.
WINDOW = 4
# Steps whose messages are kept for those who catch up, and bytes of them, the newest step aside.
KEPT_STEPS, KEPT_BYTES = 8, 256_000_000


def part_bytes(length: int) -> int:
    """The size of a message's parts.

    Example:
        >>> part_bytes(1_000_000), part_bytes(64_000_000)
        (96000, 1000000)
    """
    return PART_BYTES if length <= MOST_PARTS * PART_BYTES else -(-length // LARGE_PARTS)


def spans(length: int) -> Iterator[tuple[int, int]]:
    """Where the parts of a message begin and end; its header counts as part of it.

    Example:
        >>> list(spans(200_000 - HEADER_BYTES))
        [(0, 96000), (96000, 192000), (192000, 200000)]
    """
    size, whole = part_bytes(length), length + HEADER_BYTES
    for start in range(0, whole, size):
        yield start, min(start + size, whole)


class Store:
    """Messages of recent steps, whole or arriving, that other threads wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: OrderedDict[int, dict[int, _Held]] = OrderedDict()

    def put(self, step: int, sender: int, *pieces: bytes | memoryview) -> None:
        """Keep a copy of a whole message, which may be given in pieces."""
        with self._changed:
            held, start = self._message(step, sender, sum(map(len, pieces))), 0
            for piece in pieces:
                held.data[start : start + len(piece)] = piece
                start += len(piece)
            held.there = set(range(len(held.spans)))
            self._changed.notify_all()

    def begin(self, step: int, sender: int, length: int) -> "_Held":
        """Make room for a message that arrives in parts; keeps what is there of it."""
        with self._changed:
            return self._message(step, sender, length + HEADER_BYTES)

    def arrived(self, held: "_Held", part: int, data: Any) -> None:
        """Add a part."""
        start, stop = held.spans[part]
        if len(data) != stop - start:
            raise Rejected("length", f"part {part} has {len(data)} bytes, not {stop - start}")
        held.data[start:stop] = data
        with self._changed:
            held.there.add(part)
            self._changed.notify_all()

    def drop(self, step: int, sender: int) -> None:
        """Forget a message that was damaged."""
        with self._changed:
            self._steps.get(step, {}).pop(sender, None)

    def get(self, step: int, sender: int) -> memoryview | None:
        """A message, if it is all there."""
        with self._changed:
            held = self._steps.get(step, {}).get(sender)
            return memoryview(held.data) if held is not None and held.whole else None

    def part(self, step: int, sender: int, part: int, patience: float) -> bytes | None:
        """One part; None if for so many seconds neither it nor another of its message arrives."""
        end, seen = time.monotonic() + patience, 0
        with self._changed:
            while True:
                held = self._steps.get(step, {}).get(sender)
                there = set() if held is None else held.there
                if held is not None and part in there:
                    start, stop = held.spans[part]
                    return bytes(held.data[start:stop])
                if len(there) > seen:
                    end, seen = time.monotonic() + patience, len(there)
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _message(self, step: int, sender: int, nbytes: int) -> "_Held":
        messages = self._steps.setdefault(step, {})
        if sender not in messages or len(messages[sender].data) != nbytes:
            messages[sender] = _Held(nbytes)
        self._forget(max(self._steps))
        return messages[sender]

    def _forget(self, newest: int) -> None:
        used = 0
        for step in sorted(self._steps, reverse=True):
            used += sum(len(held.data) for held in self._steps[step].values())
            if step <= newest - KEPT_STEPS or (step < newest and used > KEPT_BYTES):
                del self._steps[step]


class _Held:
    """A message, and which of its parts are there."""

    def __init__(self, nbytes: int):
        self.data = bytearray(nbytes)
        self.spans = list(spans(nbytes - HEADER_BYTES))
        self.there: set[int] = set()

    @property
    def whole(self) -> bool:
        return len(self.there) == len(self.spans)


def sources(plan: Plan, sender: int, me: int, part: int, parts: int) -> list[int]:
    """Whom to ask for a part of a message, in order; those who merely hand it on come first.

    Example:
        >>> plan = Plan(0, 0, None, {}, {2: [2]}, {2: [0, 1]}, {})
        >>> [sources(plan, 2, 0, part, 8) for part in range(4)]
        [[2], [1, 2], [2], [1, 2]]
    """
    holders, pullers = plan.holders[sender], plan.pullers[sender]
    if me not in pullers:  # catching up: everybody has it by now
        everyone = [i for i in [*holders, *pullers] if i != me]
        turn = (part + me) % max(len(everyone), 1)
        return everyone[turn:] + everyone[:turn]
    place = pullers.index(me)
    turn = (part + place) % len(holders)
    rotated = holders[turn:] + holders[:turn]
    if len(holders) >= len(pullers) or parts < 2 * len(pullers):
        return rotated
    first = pullers[part % len(pullers)]
    return rotated if first == me else [first, *rotated]


@dataclasses.dataclass
class _Asked:
    """A part that is fetched: whom to ask, in order, and the reference of the first's answer."""

    part: int
    sources: list[int]
    reference: Any = None


class _Requested(NamedTuple):
    """A message that is fetched, and the parts that are still to come, in order."""

    held: _Held
    asked: list[_Asked]

    def lacks(self, end: int) -> bool:
        """Whether something is still to come of so many bytes of the numbers."""
        return bool(self.asked) and (self.held.spans[self.asked[0].part][0] < end + HEADER_BYTES)


class Puller:
    """Fetches the messages of a plan that are not here.

    Args:
        me: the worker's index, or -1 for a master.
        store: where messages are kept, and handed on from.
        layout: of every message.
        ask: ``ask(handle, step, sender, part)`` returns a reference to a part.
        take: ``take(reference, timeout)`` returns its bytes, or raises.
        timeout: seconds without a part after which its source counts as lost.
    """

    def __init__(self, me: int, store: Store, layout: Layout, ask: Any, take: Any, timeout: float):
        self.me, self.store, self.layout = me, store, layout
        self._ask, self._take, self._timeout = ask, take, timeout
        self.bytes_in = 0

    def fetch(
        self,
        plan: Plan,
        early: Sequence[tuple[Collection[int], int]] = (),
        ready: Callable[[dict[int, memoryview]], None] = lambda messages: None,
    ) -> tuple[dict[int, memoryview], dict[int, str]]:
        """The numbers of every message of the plan, and why those are missing that are.

        Args:
            plan: whose messages.
            early: what is worth to be told: that of these senders' messages so many bytes are here.
            ready: called at each of these in turn with their messages, if all have the right
                length; nothing beyond is there for sure, and whether they are right is known only
                at the end. After what cannot be had it is not called again.
        """
        wanted = [i for i in plan.headers if self.store.get(plan.step, i) is None]
        asked = {sender: self._request(plan, sender) for sender in wanted}
        failed: dict[int, str] = {}
        left = list(early)
        while True:
            self._tell(plan, asked, left, ready)
            going = [i for i in wanted if i not in failed and asked[i].asked]
            if not going:
                break
            # One part of each message in turn, at all workers alike: nobody who hands on a part
            # waits, for one before it, for who waits for him.
            for sender in going:
                try:
                    self._collect(plan, sender, asked[sender])
                except Rejected as error:
                    failed[sender] = error.reason
                    left.clear()
        inbox = Inbox(plan.headers, self.layout)
        for sender in [i for i in plan.headers if i not in failed]:
            try:
                self._accept(inbox, plan.step, sender)
            except Rejected as error:
                self.store.drop(plan.step, sender)
                failed[sender] = error.reason
        return {i: x for i, x in inbox.accepted.items() if i not in failed}, failed

    def _tell(
        self,
        plan: Plan,
        asked: dict[int, _Requested],
        left: list[tuple[Collection[int], int]],
        ready: Callable[[dict[int, memoryview]], None],
    ) -> None:
        """Tell, and take from the list, what by now is here; nothing more after a wrong length."""
        while left and not any(asked[i].lacks(left[0][1]) for i in left[0][0] if i in asked):
            senders, _ = left.pop(0)
            found = {i: self._so_far(plan, i, asked) for i in plan.headers if i in senders}
            if any(len(numbers) != self.layout.nbytes for numbers in found.values()):
                left.clear()
            else:
                ready(found)

    def _so_far(self, plan: Plan, sender: int, asked: dict[int, _Requested]) -> memoryview:
        """The numbers of a message that is here, or on its way."""
        data = asked[sender].held.data if sender in asked else self.store.get(plan.step, sender)
        return memoryview(data or b"")[HEADER_BYTES:]

    def _request(self, plan: Plan, sender: int) -> _Requested:
        """Ask for the first parts of a message that is not here."""
        held = self.store.begin(plan.step, sender, plan.headers[sender].length)
        parts = len(held.spans)
        asked = []
        for part in (x for x in range(parts) if x not in held.there):
            order = sources(plan, sender, self.me, part, parts)
            asked.append(_Asked(part, [i for i in order if i in plan.handles]))
        for item in asked[:WINDOW]:
            self._begin(plan, sender, item)
        return _Requested(held, asked)

    def _begin(self, plan: Plan, sender: int, item: _Asked) -> None:
        if item.sources:
            handle = plan.handles[item.sources[0]]
            item.reference = self._ask(handle, plan.step, sender, item.part)

    def _collect(self, plan: Plan, sender: int, requested: _Requested) -> None:
        """Take the next part that is not here."""
        held, asked = requested
        item = asked[0]
        while (data := self._answer(item)) is None:
            if not item.sources:
                raise Rejected("lost", f"part {item.part} of worker {sender}'s message")
            self._do_without(item.sources[0], plan, sender, asked)
        self.bytes_in += len(data)
        self.store.arrived(held, item.part, data)
        for following in asked[WINDOW : WINDOW + 1]:
            self._begin(plan, sender, following)
        del asked[0]

    def _do_without(self, lost: int, plan: Plan, sender: int, asked: list[_Asked]) -> None:
        """Ask a source for nothing more; what it was asked for, the next one is."""
        for number, item in enumerate(asked):
            affected = item.sources[:1] == [lost]
            item.sources = [i for i in item.sources if i != lost]
            if affected and number < WINDOW:
                self._begin(plan, sender, item)

    def _answer(self, item: _Asked) -> bytes | None:
        """What the part's first source gave, if it gives it in time."""
        if not item.sources:
            return None
        try:
            return self._take(item.reference, self._timeout)
        except Exception:  # a source that is gone, whichever way Ray says so
            return None

    def _accept(self, inbox: Inbox, step: int, sender: int) -> None:
        """Take a message that is here: it has to be its sender's, and the one that was reported."""
        data = self.store.get(step, sender)
        if data is None:
            raise Rejected("lost")
        head, expected = Header.unpack(data), inbox.expected[sender]
        head.check(expected)
        if head.crc != expected.crc:
            raise Rejected("checksum")
        inbox.accept(data)
