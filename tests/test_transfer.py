"""Messages in parts between stores in one process: what arrives is what was sent, or a reason."""

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

from jaxcode.cluster import transfer  # noqa: E402
from jaxcode.cluster.plans import Plan  # noqa: E402
from jaxcode.cluster.transfer import (  # noqa: E402
    KEPT_STEPS,
    Puller,
    Store,
    part_bytes,
    sources,
    spans,
)
from jaxcode.cluster.wire import HEADER_BYTES, Layout, Rejected, header  # noqa: E402

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(transfer, "PART_BYTES", 100)


class Network:
    """Workers with stores, and calls between them; counts the bytes that each hands out."""

    def __init__(self, number):
        self.stores = [Store() for _ in range(number)]
        self.dead, self.sent, self.asked, self.in_vain = set(), [0] * number, [], 0
        self.pool = ThreadPoolExecutor(500)  # a part that is waited for holds a thread

    def ask(self, handle, step, sender, part):
        self.asked.append((handle, sender, part))
        return self.pool.submit(self.part, handle, step, sender, part)

    def part(self, handle, step, sender, part):
        if handle in self.dead:
            raise ConnectionError("it is gone")
        data = self.stores[handle].part(step, sender, part, 1.0)
        self.sent[handle] += len(data or b"")
        self.in_vain += data is None
        return data

    def take(self, reference, timeout):
        return reference.result(timeout)

    def puller(self, me, layout):
        store = self.stores[me] if me >= 0 else Store()
        return Puller(me, store, layout, self.ask, self.take, 5.0)

    def fetch(self, plan, layout, workers, early=lambda worker: ()):
        """All at once, as they would."""
        pullers = [self.puller(i, layout) for i in workers]

        def fetched(puller):
            return puller.fetch(plan, early(puller.me), lambda found: None)

        found = list(self.pool.map(fetched, pullers))
        return {i: (*x, p.bytes_in) for i, x, p in zip(workers, found, pullers, strict=True)}


def message(sender, count, step=3):
    """Layout, header and bytes of a message of so many random numbers."""
    numbers = np.random.default_rng(sender).normal(size=count).astype(np.float32)
    layout = Layout(((count,),), ("float32",))
    data = numbers.tobytes()
    head = header(data, layout, step=step, sender=sender, block=sender, fragment=0)
    return layout, head, head.pack() + data


def plan_of(heads, holders, pullers, number, step=3):
    handles = {i: i for i in range(number)}
    return Plan(step, 1, np.zeros((1, number)), heads, holders, pullers, handles)


def some_makers(count, number=4, makers=2):
    """The first workers each made a message that everybody else, other makers too, fetches."""
    network, heads = Network(number), {}
    for sender in range(makers):
        layout, heads[sender], data = message(sender, count)
        network.stores[sender].put(3, sender, data)
    pullers = {s: [i for i in range(number) if i != s] for s in heads}
    return network, layout, plan_of(heads, {s: [s] for s in heads}, pullers, number)


# ------------------------------------------------------------------ parts


@few
@given(st.integers(0, 10**9))
def test_parts_cover_a_message(length):
    parts = list(spans(length))
    assert parts[0][0] == 0
    assert parts[-1][1] == length + HEADER_BYTES
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    sizes = {stop - start for start, stop in parts[:-1]}
    assert sizes <= {part_bytes(length)}
    assert 0 < parts[-1][1] - parts[-1][0] <= part_bytes(length)
    assert len(parts) <= transfer.MOST_PARTS + 1


@few
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.data())
def test_sources_of_a_part(num_holders, num_pullers, parts, draw):
    workers = np.random.default_rng(0).permutation(num_holders + num_pullers).tolist()
    holders, pullers = workers[:num_holders], workers[num_holders:]
    plan = plan_of({}, {holders[0]: holders}, {holders[0]: pullers}, len(workers))
    me = draw.draw(st.sampled_from([*pullers, -1, len(workers)]))
    first = []
    for part in range(parts):
        order = sources(plan, holders[0], me, part, parts)
        assert me not in order
        assert len(set(order)) == len(order)
        assert set(order) >= set(holders)
        assert set(order) - set(holders) <= set(pullers)
        first.append(order[0])
    if me in pullers:  # as many of each holder's parts, but for those handed on
        counts = [first.count(i) for i in holders]
        if not set(first) & set(pullers):
            assert max(counts) - min(counts) <= 1


# ------------------------------------------------------------------ the store


def test_a_store_keeps_whole_messages(small_parts):
    store, (_, _, data) = Store(), message(1, 100)
    assert store.get(3, 1) is None
    store.put(3, 1, data)
    assert bytes(store.get(3, 1)) == data
    assert store.get(3, 2) is None
    assert store.get(4, 1) is None
    store.put(3, 2, data[:HEADER_BYTES], b"", memoryview(data)[HEADER_BYTES:])
    assert bytes(store.get(3, 2)) == data
    parts = [store.part(3, 1, i, 0.0) for i in range(5)]
    assert b"".join(parts) == data
    assert store.part(3, 1, 5, 0.0) is None
    store.drop(3, 1)
    assert store.get(3, 1) is None
    store.drop(3, 1)  # again is no harm
    store.drop(9, 1)


def test_parts_arrive_in_any_order(small_parts):
    store, (_, head, data) = Store(), message(1, 100)
    held = store.begin(3, 1, head.length)
    for i in (4, 0, 2, 1):
        start, stop = held.spans[i]
        store.arrived(held, i, data[start:stop])
        assert store.get(3, 1) is None
        assert store.part(3, 1, i, 0.0) == data[start:stop]
        assert store.begin(3, 1, head.length) is held  # what is there stays
    assert store.part(3, 1, 3, 0.01) is None
    store.arrived(held, 3, data[300:400])
    assert bytes(store.get(3, 1)) == data


@pytest.mark.parametrize("length", [0, 99, 101])
def test_a_part_of_another_length(small_parts, length):
    store = Store()
    held = store.begin(3, 1, 400)
    with pytest.raises(Rejected, match=f"part 0 has {length} bytes, not 100") as caught:
        store.arrived(held, 0, bytes(length))
    assert caught.value.reason == "length"
    assert store.part(3, 1, 0, 0.0) is None


def test_a_part_is_waited_for(small_parts):
    store = Store()
    held = store.begin(3, 1, 400)
    with ThreadPoolExecutor(1) as pool:
        asked = threading.Event()
        answer = pool.submit(lambda: (asked.set(), store.part(3, 1, 2, 30.0))[1])
        asked.wait()
        store.arrived(held, 0, bytes(100))
        store.arrived(held, 2, b"x" * 100)
        assert answer.result(30) == b"x" * 100


def test_a_part_is_waited_for_while_others_arrive(small_parts):
    store = Store()
    held = store.begin(3, 1, 1000 - HEADER_BYTES)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(store.part, 3, 1, 9, 2.0)
        never = pool.submit(store.part, 3, 2, 9, 2.0)  # the control: nothing of this one comes
        for part in range(10):  # in all longer than the patience of either
            time.sleep(0.3)
            store.arrived(held, part, bytes([part]) * 100)
        assert waiting.result(30) == bytes([9]) * 100
        assert never.result(30) is None


def test_old_steps_are_forgotten(monkeypatch):
    store, (_, _, data) = Store(), message(1, 100)
    for step in range(30):
        store.put(step, 1, data)
        there = [old for old in range(step + 1) if store.get(old, 1) is not None]
        assert there == list(range(max(0, step - KEPT_STEPS + 1), step + 1))
    monkeypatch.setattr(transfer, "KEPT_BYTES", 3 * len(data))
    store.put(30, 1, data)
    assert [old for old in range(31) if store.get(old, 1) is not None] == [28, 29, 30]
    monkeypatch.setattr(transfer, "KEPT_BYTES", 0)
    store.put(31, 1, data)  # the newest stays, however large it is
    assert [old for old in range(32) if store.get(old, 1) is not None] == [31]


# ------------------------------------------------------------------ pullers


@few
@given(st.integers(1, 2000))
def test_everybody_gets_what_was_sent(count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PART_BYTES", 100)
        network, layout, plan = some_makers(count)
        found = network.fetch(plan, layout, range(4))
    for worker, (numbers, failed, taken) in found.items():
        assert not failed
        for sender in (0, 1):
            expected = message(sender, count)[2][HEADER_BYTES:]
            assert bytes(numbers[sender]) == expected
        length = plan.headers[0].length + HEADER_BYTES
        assert taken == length * (1 if worker in (0, 1) else 2)  # not one's own


def test_each_byte_leaves_its_maker_once(small_parts):
    """Or a little more, where who was to hand on a part had not yet got it; not three times."""
    network, layout, plan = some_makers(2000)
    network.fetch(plan, layout, range(4))
    length = plan.headers[0].length + HEADER_BYTES
    handed_on = sum(network.sent) - 6 * length
    assert handed_on == 0  # in all, each message reaches three
    assert max(network.sent) < 2.5 * length
    alone, _, _ = some_makers(2000)
    holders_only = plan._replace(pullers={0: [], 1: []})  # as for who catches up: the control
    for me in (2, 3):
        alone.puller(me, layout).fetch(holders_only)
    assert alone.sent[0] + alone.sent[1] == 4 * length
    assert alone.sent[2] == alone.sent[3] == 0


def test_nobody_waits_for_who_waits_for_him(small_parts):
    """Everybody hands on messages to all others, and is told of one half before the other."""
    network, layout, plan = some_makers(2000, number=4, makers=4)
    halves = [({0, 1}, 4000), ({2, 3}, 4000)]
    found = network.fetch(plan, layout, range(4), lambda me: halves if me < 2 else halves[::-1])
    assert len(list(spans(8000))) > 3 * transfer.WINDOW
    assert not any(failed for _, failed, _ in found.values())
    assert network.in_vain == 0
    assert sum(network.sent) == 12 * (8000 + HEADER_BYTES)


def test_who_should_hand_on_and_never_comes_is_done_without(small_parts):
    network, (layout, head, data) = Network(4), message(0, 2000)
    network.stores[0].put(3, 0, data)
    plan = plan_of({0: head}, {0: [0]}, {0: [2, 3]}, 4)
    puller = network.puller(2, layout)
    numbers, failed = puller.fetch(plan)  # worker 3 fetches nothing
    assert not failed
    assert bytes(numbers[0]) == data[HEADER_BYTES:]
    assert network.sent[0] == puller.bytes_in == len(data)
    # It is given up after one part, with those that were asked for by then.
    asked = sum(handle == 3 for handle, *_ in network.asked)
    assert 0 < asked <= transfer.WINDOW


def test_several_holders_each_give_a_share(small_parts):
    network, (layout, head, data) = Network(5), message(0, 2000)
    for holder in (0, 1, 2):
        network.stores[holder].put(3, 0, data)
    plan = plan_of({0: head}, {0: [0, 1, 2]}, {0: [3, 4]}, 5)
    network.fetch(plan, layout, (3, 4))
    assert sum(network.sent) == 2 * len(data)
    assert max(network.sent[:3]) < 1.2 * 2 * len(data) / 3


def test_a_lost_holder_is_replaced_by_another(small_parts):
    network, (layout, head, data) = Network(5), message(0, 500)
    for holder in (0, 1):
        network.stores[holder].put(3, 0, data)
    plan = plan_of({0: head}, {0: [0, 1]}, {0: [2, 3, 4]}, 5)
    network.dead = {0, 3}
    found = network.fetch(plan, layout, (2, 4))
    for numbers, failed, _ in found.values():
        assert not failed
        assert bytes(numbers[0]) == data[HEADER_BYTES:]
    network = Network(5)  # the control: nobody has it
    network.stores[0].put(3, 0, data)
    network.dead = {0}
    for numbers, failed, _ in network.fetch(plan, layout, (2, 4)).values():
        assert failed == {0: "lost"}
        assert not numbers


def test_what_one_lost_source_does_to_the_others(small_parts):
    network, layout, plan = some_makers(500)
    network.dead = {1}
    numbers, failed, _ = network.fetch(plan, layout, (2,))[2]
    assert failed == {1: "lost"}
    assert list(numbers) == [0]
    assert sum(handle == 1 for handle, *_ in network.asked) <= len(list(spans(2000)))


@pytest.mark.parametrize("handles", [{}, {2: 2}])
def test_nobody_to_ask(handles):
    network, layout, plan = some_makers(10)
    numbers, failed, _ = network.fetch(plan._replace(handles=handles), layout, (2,))[2]
    assert (numbers, failed) == ({}, {0: "lost", 1: "lost"})


def test_an_answer_that_is_none(small_parts):
    """Who does not have it says so, and is not waited for."""
    network, (layout, head, data) = Network(3), message(0, 100)
    network.stores[1].put(3, 0, data)
    plan = plan_of({0: head}, {0: [0, 1]}, {0: [2]}, 3)
    numbers, failed, _ = network.fetch(plan, layout, (2,))[2]
    assert not failed
    assert bytes(numbers[0]) == data[HEADER_BYTES:]


def changed(head, data, name):
    body = data[HEADER_BYTES:]
    if name == "checksum":
        return head.pack() + body[:50] + bytes([body[50] ^ 1]) + body[51:]
    if name == "other numbers":
        return head._replace(crc=zlib.crc32(bytes(400))).pack() + bytes(400)
    other = {"step": 2, "sender": 1, "block": 7, "fragment": 1, "dtype": "int32", "length": 396}
    return head._replace(**{name: other[name]}).pack() + body


@pytest.mark.parametrize(
    "name", ["checksum", "other numbers", "step", "sender", "block", "fragment", "dtype", "length"]
)
def test_a_damaged_message_is_rejected_and_forgotten(small_parts, name):
    network, (layout, head, data) = Network(2), message(0, 100)
    network.stores[0].put(3, 0, changed(head, data, name))
    plan = plan_of({0: head}, {0: [0]}, {0: [1]}, 2)
    numbers, failed, _ = network.fetch(plan, layout, (1,))[1]
    assert failed == {0: "checksum" if name == "other numbers" else name}
    assert not numbers
    assert network.stores[1].get(3, 0) is None
    network.stores[0].put(3, 0, data)  # the control: the right one, asked for again
    numbers, failed, _ = network.fetch(plan, layout, (1,))[1]
    assert not failed
    assert bytes(numbers[0]) == data[HEADER_BYTES:]


def test_a_header_without_its_message(small_parts):
    network, (layout, head, data) = Network(2), message(0, 100)
    network.stores[0].put(3, 0, data[:HEADER_BYTES] + data[HEADER_BYTES : 200 + HEADER_BYTES])
    plan = plan_of({0: head}, {0: [0]}, {0: [1]}, 2)
    numbers, failed, _ = network.fetch(plan, layout, (1,))[1]
    assert failed == {0: "length"}
    assert not numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(bad):
    layout = Layout(((3,),), ("float32",))
    data = np.array([1, bad, 2], np.float32).tobytes()
    head = header(data, layout, step=3, sender=0, block=0, fragment=0)
    network = Network(2)
    network.stores[0].put(3, 0, head.pack() + data)
    plan = plan_of({0: head}, {0: [0]}, {0: [1]}, 2)
    assert network.fetch(plan, layout, (1,))[1][:2] == ({}, {0: "not finite"})
    assert network.stores[1].get(3, 0) is None


def test_a_master_fetches_for_itself():
    network, layout, plan = some_makers(300)
    puller = network.puller(-1, layout)
    everyone = plan._replace(pullers={0: [-1], 1: [-1]})
    numbers, failed = puller.fetch(everyone)
    assert not failed
    assert sorted(numbers) == [0, 1]
    assert puller.bytes_in == sum(network.sent) == 2 * (1200 + HEADER_BYTES)


def test_nothing_is_asked_for_twice(small_parts):
    network, layout, plan = some_makers(300)
    network.fetch(plan, layout, (2,))
    before = len(network.asked)
    _, failed, taken = network.fetch(plan, layout, (2,))[2]
    assert not failed
    assert len(network.asked) == before
    assert taken == 0


# ------------------------------------------------------------------ while it arrives


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", [1, 30, 200])
def test_what_has_arrived_is_told(count):
    network, layout, plan = some_makers(count)
    whole = {i: bytes(network.stores[i].get(3, i)[HEADER_BYTES:]) for i in (0, 1)}
    ends = sorted({4, count, 2 * count, 4 * count - 4} - {0})
    early = [(senders, end) for end in ends for senders in ({0}, {0, 1}, {1, 2})]
    for me in (2, 0):  # a maker has its own message from the beginning
        told = []

        def ready(messages, told=told):
            _, end = early[len(told)]
            told.append({i: bytes(x[:end]) for i, x in messages.items()})

        found, failed = network.puller(me, layout).fetch(plan, early, ready)
        assert not failed
        assert {i: bytes(x) for i, x in found.items()} == whole
        assert told == [{i: whole[i][:end] for i in whole if i in who} for who, end in early]


@pytest.mark.usefixtures("small_parts")
def test_what_is_here_is_told_before_anything_is_waited_for():
    network, layout, plan = some_makers(200)
    plan = plan._replace(pullers={0: [], 1: [0]})
    network.dead.add(1)
    told = []
    early = [({0}, 40), ({1}, 40)]
    _, failed = network.puller(0, layout).fetch(plan, early, told.append)
    assert failed == {1: "lost"}
    assert [sorted(x) for x in told] == [[0]]


@pytest.mark.usefixtures("small_parts")
def test_nothing_is_told_of_a_message_that_is_lost():
    network, layout, plan = some_makers(200)
    plan = plan._replace(pullers={0: [2], 1: [2]})
    network.dead.add(1)
    told = []
    _, failed = network.puller(2, layout).fetch(plan, [({0, 1}, 40), ({0}, 80)], told.append)
    assert failed == {1: "lost"}
    assert told == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("me", [0, 2])  # who made it, and who fetches it
def test_a_message_of_another_length_is_not_told_but_rejected(me):
    network, _, plan = some_makers(200)
    layout, head, data = message(0, 100)
    network.stores[0].put(3, 0, data)
    plan.headers[0] = head
    longer = Layout(((200,),), ("float32",))
    told = []
    _, failed = network.puller(me, longer).fetch(plan, [({0, 1}, 40), ({0}, 80)], told.append)
    assert failed == {0: "length"}
    assert told == []
    network.stores[0].put(3, 0, data)  # the control
    fits = plan._replace(headers={0: head})
    assert network.puller(me, layout).fetch(fits, [({0, 1}, 40), ({0}, 80)], told.append)[1] == {}
    assert [sorted(x) for x in told] == [[0], [0]]
