"""Messages written by hand: `int.to_bytes`, `struct` for numbers, CRC-32 bit by bit."""

import struct

import ml_dtypes
import numpy as np

from jaxcode.cluster.wire import REASONS, Header, Inbox, Layout, Rejected

# Of each dtype some numbers, exact in it, and their bytes.
NUMBERS = [1.0, -2.5, 0.0, -0.0, 0.15625]


def upper_halves(numbers):
    """Numbers in bfloat16: the upper 16 bits of float32."""
    return b"".join(struct.pack("<f", x)[2:] for x in numbers)


DTYPES = {
    "float32": (np.float32, NUMBERS, struct.pack("<5f", *NUMBERS)),
    "float16": (np.float16, NUMBERS, struct.pack("<5e", *NUMBERS)),
    "bfloat16": (ml_dtypes.bfloat16, NUMBERS, upper_halves(NUMBERS)),
    "float64": (np.float64, NUMBERS, struct.pack("<5d", *NUMBERS)),
    "int32": (np.int32, [0, 1, -1, 2**31 - 1, -(2**31)], None),
    "bool": (np.bool_, [True, False, False, True, True], b"\1\0\0\1\1"),
}
DTYPES["int32"] = (*DTYPES["int32"][:2], struct.pack("<5i", *DTYPES["int32"][1]))

# Of each floating-point dtype: bytes a number, and the bits of NaN, infinity and the like.
NOT_FINITE = {
    "float32": (4, [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000]),
    "float16": (2, [0x7E00, 0xFE00, 0x7C01, 0x7C00, 0xFC00]),
    "bfloat16": (2, [0x7FC0, 0xFFC0, 0x7F81, 0x7F80, 0xFF80]),
    "float64": (8, [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, 0x7FF0 << 48, 0xFFF0 << 48]),
}
# The largest finite number and its negative, the smallest subnormal one, and -0.
FINITE = {
    "float32": [0x7F7FFFFF, 0xFF7FFFFF, 1, 1 << 31],
    "float16": [0x7BFF, 0xFBFF, 1, 1 << 15],
    "bfloat16": [0x7F7F, 0xFF7F, 1, 1 << 15],
    "float64": [(0x7FF0 << 48) - 1, (0xFFF0 << 48) - 1, 1, 1 << 63],
}


def crc32(data):
    """CRC-32 from its polynomial, bit by bit."""
    register = 0xFFFFFFFF
    for byte in bytes(data):
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0xEDB88320 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def message(numbers, dtype, *, step=7, sender=2, block=1, fragment=0, length=None, crc=None):
    """The bytes of a message, field by field."""
    dtype = dtype.encode() if isinstance(dtype, str) else dtype
    length = len(numbers) if length is None else length
    parts = [
        b"jaxcode1",
        step.to_bytes(8, "little", signed=True),
        sender.to_bytes(4, "little", signed=True),
        block.to_bytes(4, "little", signed=True),
        fragment.to_bytes(4, "little", signed=True),
        dtype + b" " * (16 - len(dtype)),
        length.to_bytes(8, "little"),
        (crc32(numbers) if crc is None else crc).to_bytes(4, "little"),
        b"\0" * 8,
    ]
    return b"".join(parts) + bytes(numbers)


def inbox_of(layout, senders=(2,)):
    """An inbox for step 7 in which sender i is fragment i - 2 of block 1."""
    length = layout.nbytes
    return Inbox({i: Header(7, i, 1, i - 2, layout.dtype, length, 0) for i in senders}, layout)


def reason_of(data, layout, senders=(2,)):
    """Why an inbox rejects a message; None if it is accepted."""
    inbox = inbox_of(layout, senders)
    rejected = None
    try:
        inbox.accept(data)
    except Rejected as error:
        rejected = error
    if rejected is None:
        return None
    assert not inbox.accepted
    assert str(rejected).startswith(f"rejected: {REASONS[rejected.reason]}")
    assert len(str(rejected).splitlines()) == 1
    return rejected.reason


PAIR = Layout(((2,),), ("float32",))
PAIR_NUMBERS = struct.pack("<2f", 1.5, -3.0)
GOOD = message(PAIR_NUMBERS, "float32")
