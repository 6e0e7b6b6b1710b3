"""A message is what the table of its bytes says; every other is rejected, with a reason."""

import struct
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import (
    DTYPES,
    FINITE,
    GOOD,
    NOT_FINITE,
    PAIR,
    PAIR_NUMBERS,
    crc32,
    inbox_of,
    message,
    reason_of,
)

from jaxcode.cluster.wire import (
    HEADER_BYTES,
    REASONS,
    Header,
    Layout,
    Rejected,
    all_finite,
    header,
    verify,
)

few = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def test_the_checksum_by_hand_is_the_usual_one():
    assert crc32(b"123456789") == 0xCBF43926 == zlib.crc32(b"123456789")
    assert crc32(b"") == 0


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5, 1)])
def test_bytes_of_a_message(name, shape):
    dtype, values, numbers = DTYPES[name]
    array = np.array(values, dtype).reshape(shape)
    layout = Layout.of([array])
    assert layout == Layout((shape,), (name,))
    assert layout.join([array]) == numbers
    head = header(numbers, layout, step=7, sender=2, block=1, fragment=0)
    assert head.pack() + numbers == message(numbers, name)
    assert Header.unpack(message(numbers, name)) == head
    (back,) = layout.split(numbers)
    assert back.dtype == dtype
    assert back.shape == shape
    assert back.tobytes() == numbers
    np.testing.assert_array_equal(back, array)
    inbox = inbox_of(layout)
    assert inbox.accept(message(numbers, name)) == 2
    assert bytes(inbox.accepted[2]) == numbers
    # The control: another number is another message.
    changed = array.copy()
    changed.flat[2] = 1
    assert layout.join([changed]) != numbers


@pytest.mark.parametrize("name", DTYPES)
def test_empty_arrays_and_arrays_without_axes(name):
    dtype, values, numbers = DTYPES[name]
    size = np.dtype(dtype).itemsize
    arrays = [
        np.zeros((0, 3), dtype),
        np.array(values[1], dtype),
        np.zeros(0, dtype),
        np.array(values[2:4], dtype),
        np.zeros((2, 0), dtype),
    ]
    layout = Layout.of(arrays)
    assert layout.shapes == ((0, 3), (), (0,), (2,), (2, 0))
    assert layout.nbytes == 3 * size
    assert layout.join(arrays) == numbers[size : 4 * size]
    for got, array in zip(layout.split(numbers[size : 4 * size]), arrays, strict=True):
        assert got.shape == array.shape
        np.testing.assert_array_equal(got, array)
    assert reason_of(message(numbers[size : 4 * size], name), layout) is None


@pytest.mark.parametrize("shapes", [(), ((0,),), ((0, 2), (3, 0))])
def test_a_message_without_numbers(shapes):
    layout = Layout(shapes, ("float32",) * len(shapes))
    assert layout.nbytes == 0
    assert layout.join([np.zeros(shape, np.float32) for shape in shapes]) == b""
    assert [array.shape for array in layout.split(b"")] == list(shapes)
    name = "float32" if shapes else "uint8"
    assert reason_of(message(b"", name), layout) is None
    assert reason_of(message(b"", name) + b"\0", layout) == "length"
    assert reason_of(message(b"", name, crc=1), layout) == "checksum"


def test_several_arrays_follow_one_another():
    numbers = b"".join(data for _, _, data in DTYPES.values())
    arrays = [np.array(values, dtype) for dtype, values, _ in DTYPES.values()]
    layout = Layout.of(arrays)
    assert layout.nbytes == len(numbers) == 5 * (4 + 2 + 2 + 8 + 4 + 1)
    assert layout.join(arrays) == numbers
    for got, array in zip(layout.split(numbers), arrays, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)
    assert reason_of(message(numbers, "float64"), layout) is None
    assert Layout.of(arrays[::-1]).join(arrays[::-1]) != numbers


def test_rows_are_written_one_after_the_other_however_they_lie_in_memory():
    array = np.array([[1, 4], [2, 5], [3, 6]], np.float32, order="F")
    by_rows = struct.pack("<6f", 1, 4, 2, 5, 3, 6)
    layout = Layout.of([array])
    assert layout.join([array]) == by_rows
    assert layout.join([np.repeat(array, 2, axis=0)[::2]]) == by_rows
    assert layout.join([array.T]) != by_rows


@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [
        (("int32", "float16"), "float16"),
        (("float64", "float32", "bfloat16"), "float64"),
        (("bfloat16", "float32", "int32"), "float32"),
        (("bool", "int32"), "int32"),
        (("bool", "int4"), "bool"),
        (("bool", "bfloat16"), "bfloat16"),
        (("float8_e4m3fn", "int32"), "float8_e4m3fn"),
        ((), "uint8"),
    ],
)
def test_the_dtype_of_a_message_is_its_widest_floating_point_one(dtypes, widest):
    assert Layout(((2,),) * len(dtypes), dtypes).dtype == widest


def test_split_does_not_copy():
    numbers = bytearray(PAIR_NUMBERS)
    (array,) = PAIR.split(numbers)
    numbers[:4] = struct.pack("<f", 9.0)
    np.testing.assert_array_equal(array, np.float32([9, -3]))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_a_message(kind):
    assert reason_of(kind(GOOD), PAIR) is None
    assert reason_of(kind(GOOD[:-1]), PAIR) == "length"


def test_fields_reach_their_ends():
    for step, sender, block, fragment, length, crc in [
        (2**63 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**64 - 1, 2**32 - 1),
        (-(2**63), -(2**31), -1, -(2**31), 0, 0),
    ]:
        head = Header(step, sender, block, fragment, "float8_e4m3fnuz", length, crc)
        data = message(b"", head.dtype, **{k: v for k, v in head._asdict().items() if k != "dtype"})
        assert head.pack() == data
        assert Header.unpack(data) == head


def test_every_shorter_message_is_rejected():
    assert reason_of(GOOD, PAIR) is None
    for end in range(len(GOOD)):
        expected = "header" if end < HEADER_BYTES else "length"
        assert reason_of(GOOD[:end], PAIR) == expected
        # Without its first bytes it has no header; without some in the middle it is too short.
        assert reason_of(GOOD[len(GOOD) - end :], PAIR) == "header"
    assert reason_of(b"", PAIR) == "header"
    assert reason_of(GOOD[HEADER_BYTES:], PAIR) == "header"


@pytest.mark.parametrize("more", [b"\0", b"\0" * 8, GOOD, b"\xff" * 1000])
def test_a_longer_message_is_rejected(more):
    assert reason_of(GOOD + more, PAIR) == "length"
    assert reason_of(GOOD, PAIR) is None
    # Also one whose header says so, and whose checksum is right.
    assert reason_of(message(PAIR_NUMBERS + more, "float32"), PAIR) == "length"


# Where a flipped bit falls, and what may be said of it: a name of a dtype may cease to be one.
PLACES = [
    (0, 8, {"header"}),
    (8, 16, {"step"}),
    (16, 20, {"sender"}),
    (20, 24, {"block"}),
    (24, 28, {"fragment"}),
    (28, 44, {"dtype", "header"}),
    (44, 52, {"length"}),
    (52, 56, {"checksum"}),
    (56, 64, {"header"}),
    (64, len(GOOD), {"checksum"}),
]


@pytest.mark.parametrize(("start", "stop", "reasons"), PLACES)
def test_every_flipped_bit_is_rejected(start, stop, reasons):
    assert reason_of(GOOD, PAIR) is None
    for bit in range(8 * start, 8 * stop):
        data = bytearray(GOOD)
        data[bit // 8] ^= 1 << (bit % 8)
        assert reason_of(data, PAIR) in reasons, f"bit {bit}"


def test_the_places_cover_the_message():
    assert [start for start, _, _ in PLACES] == [0, *(stop for _, stop, _ in PLACES[:-1])]
    assert PLACES[-1][1] == len(GOOD) == HEADER_BYTES + 8


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("step", 6, "step"),
        ("step", -7, "step"),
        ("step", 7 + 2**32, "step"),
        ("sender", 4, "sender"),
        ("sender", 2**31 - 1, "sender"),
        # Known, but not where that worker stands.
        ("sender", 3, "fragment"),
        ("block", 0, "block"),
        ("block", -1, "block"),
        ("fragment", 1, "fragment"),
        ("dtype", "float16", "dtype"),
        ("dtype", "", "dtype"),
        ("dtype", "float32\0", "dtype"),
        ("dtype", "float32\t", "dtype"),
        ("dtype", " float32", "dtype"),
        ("dtype", "float32\n\r\x1b[2J", "dtype"),
        ("dtype", b"float32\x85", "header"),
        ("dtype", "flöat32".encode(), "header"),
        ("dtype", b"\xff" * 16, "header"),
        ("length", 0, "length"),
        ("length", 8 + 2**32, "length"),
        ("length", 2**64 - 1, "length"),
        ("crc", 0, "checksum"),
        ("crc", crc32(PAIR_NUMBERS) ^ 1, "checksum"),
    ],
)
def test_another_field_is_rejected(field, value, reason):
    right = {"dtype": "float32"}
    assert reason_of(message(PAIR_NUMBERS, **right), PAIR, (2, 3)) is None
    assert reason_of(message(PAIR_NUMBERS, **{**right, field: value}), PAIR, (2, 3)) == reason


@pytest.mark.parametrize("field", Header._fields)
def test_headers_are_compared_field_by_field(field):
    head = Header(7, 2, 1, 0, "float32", 8, 99)
    head.check(head)
    value = getattr(head, field)
    other = head._replace(**{field: "int32" if field == "dtype" else value + 1})
    if field == "crc":
        other.check(head)
        return
    with pytest.raises(Rejected) as caught:
        other.check(head)
    assert caught.value.reason == field
    assert str(caught.value).endswith(f"needed {value!r}, got {getattr(other, field)!r}")


@pytest.mark.parametrize(
    "magic", [b"jaxcode0", b"jaxcode2", b"JAXCODE1", b"\x80\x04\x95pickle"[:8]]
)
def test_another_program_is_rejected(magic):
    assert reason_of(magic + GOOD[8:], PAIR) == "header"


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("place", [0, 3, 5])
def test_what_is_not_finite_is_rejected_where_ever_it_is(name, place):
    size, bits = NOT_FINITE[name]
    layout = Layout(((2, 2), (), (), (1,)), (name, name, "int32", name))

    def data(value):
        values = [0] * 6
        values[place] = value
        words = [x.to_bytes(size, "little") for x in values]
        # An integer whose bits are those of a NaN in float32 is a number.
        words.insert(5, (0x7FC00000).to_bytes(4, "little"))
        return message(b"".join(words), name)

    for value in bits:
        assert reason_of(data(value), layout) == "not finite", hex(value)
    for value in FINITE[name]:
        assert reason_of(data(value), layout) is None, hex(value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*NOT_FINITE, "float8_e5m2"])
def test_all_finite(name, value):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    fine = [
        np.ones((2, 2), dtype),
        np.zeros((0, 2), dtype),
        np.array(1, np.int32),
        np.zeros(1, bool),
    ]
    assert all_finite(fine)
    assert all_finite([])
    assert not all_finite([*fine, np.array(value).astype(dtype)])
    assert not all_finite([np.array([[0, 1], [0, value]]).astype(dtype), *fine])


def test_numbers_alone_are_verified():
    """As they are when they come without their header."""
    head = Header(7, 2, 1, 0, "float32", 8, crc32(PAIR_NUMBERS))
    verify(PAIR_NUMBERS, head, PAIR)
    nan = struct.pack("<2f", 1.0, np.nan)
    for numbers, other, reason in [
        (PAIR_NUMBERS[:-1], head, "length"),
        (PAIR_NUMBERS + b"\0", head, "length"),
        (b"", head, "length"),
        (PAIR_NUMBERS, head._replace(length=2**64 - 1), "length"),
        (PAIR_NUMBERS, head._replace(dtype="int32"), "dtype"),
        (PAIR_NUMBERS, head._replace(crc=head.crc ^ 1), "checksum"),
        (PAIR_NUMBERS[4:] + PAIR_NUMBERS[:4], head, "checksum"),
        (nan, head._replace(crc=crc32(nan)), "not finite"),
    ]:
        with pytest.raises(Rejected) as caught:
            verify(numbers, other, PAIR)
        assert caught.value.reason == reason


def test_each_sender_is_taken_once():
    inbox = inbox_of(PAIR, (2, 3))
    other = message(struct.pack("<2f", 4, 5), "float32", sender=3, fragment=1)
    assert inbox.accept(GOOD) == 2
    changed = message(struct.pack("<2f", 8, 9), "float32")
    for again in (GOOD, changed):
        with pytest.raises(Rejected, match="worker 2") as caught:
            inbox.accept(again)
        assert caught.value.reason == "duplicate"
    assert inbox.accept(other) == 3
    assert reason_of(GOOD, PAIR, ()) == "sender"
    assert {i: bytes(x) for i, x in inbox.accepted.items()} == {
        2: PAIR_NUMBERS,
        3: struct.pack("<2f", 4, 5),
    }


def test_a_damaged_message_does_not_stand_in_the_way_of_the_right_one():
    inbox = inbox_of(PAIR)
    for damaged in (GOOD[:-1], GOOD[:-1] + b"!", b"", message(PAIR_NUMBERS, "float32", step=6)):
        with pytest.raises(Rejected):
            inbox.accept(damaged)
        assert not inbox.accepted
    assert inbox.accept(GOOD) == 2


@few
@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(data):
    assert reason_of(data, PAIR) is not None
    assert reason_of(b"jaxcode1" + data, PAIR) is not None


def signed(bits):
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@few
@given(
    numbers=st.just(PAIR_NUMBERS) | st.binary(max_size=16) | st.binary(min_size=8, max_size=8),
    step=st.just(7) | signed(64),
    sender=st.sampled_from([2, 3]) | signed(32),
    block=st.just(1) | signed(32),
    fragment=st.sampled_from([0, 1]) | signed(32),
    dtype=st.just(b"float32") | st.binary(max_size=16) | st.text(max_size=4).map(str.encode),
    length=st.none() | st.integers(0, 2**64 - 1),
    crc=st.none() | st.integers(0, 2**32 - 1),
)
def test_a_hostile_header_is_accepted_if_it_is_the_right_one_and_else_rejected(numbers, **fields):
    data = message(numbers, **fields)
    right = (
        (fields["step"], fields["block"]) == (7, 1)
        and (fields["sender"], fields["fragment"]) in {(2, 0), (3, 1)}
        and fields["dtype"].rstrip(b" ") == b"float32"
        and fields["length"] in (None, 8)
        and len(numbers) == 8
        and fields["crc"] in (None, crc32(numbers))
        and all(np.isfinite(struct.unpack("<2f", numbers)))
    )
    assert (reason_of(data, PAIR, (2, 3)) is None) == right


@few
@given(st.integers(0, len(GOOD) - 1), st.integers(0, len(GOOD)), st.binary(max_size=12))
def test_a_message_with_other_bytes_in_its_middle_is_rejected(start, stop, middle):
    data = GOOD[:start] + middle + GOOD[max(start, stop) :]
    assert (reason_of(data, PAIR) is None) == (data == GOOD)


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_read_as_sentences(reason):
    error = Rejected(reason)
    assert isinstance(error, ValueError)
    assert error.reason == reason
    assert str(error) == f"rejected: {REASONS[reason]}"
    assert str(Rejected(reason, "detail")) == f"rejected: {REASONS[reason]}: detail"
