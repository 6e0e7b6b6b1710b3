"""Messages between hosts: plain numbers behind a small header, checked before anything uses them.

A message is a header of 64 bytes and then the arrays of a payload, one after the other, in the
order and layout that sender and receiver know from the model. Nothing in it is ever executed or
unpickled. Whatever does not fit is `Rejected`, with one of `REASONS`.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# Why a message is not used. Its sender counts as absent.
REASONS = {
    "header": "its header is damaged or of another program",
    "step": "it is of another step",
    "sender": "its sender is not who was asked, or is unknown",
    "block": "it is of a block that its sender does not hold",
    "fragment": "it is another fragment than its sender's",
    "dtype": "its numbers are of another type",
    "length": "it is longer or shorter than the model's message",
    "checksum": "it was damaged on the way",
    "not finite": "it holds NaN or infinity",
    "duplicate": "its sender sent one already",
    "disagrees": "its integers are not those of the majority of its block",
    "lost": "it could not be fetched",
}

_MAGIC = b"jaxcode1"
_FORM = struct.Struct("<8sqiii16sQI8x")
HEADER_BYTES = _FORM.size


class Rejected(ValueError):
    """A message that is not used, and why.

    Attributes:
        reason: a key of `REASONS`.

    Example:
        >>> str(Rejected("step", "needed 7, got 6"))
        'rejected: it is of another step: needed 7, got 6'
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"rejected: {REASONS[reason]}" + (f": {detail}" if detail else ""))
        self.reason = reason


class Header(NamedTuple):
    """What a message says of itself.

    Attributes:
        step: of the training.
        sender: the worker's index.
        block: the worker's group, -1 for a code without blocks.
        fragment: the worker's place in its group.
        dtype: of the numbers, the widest where a message has several.
        length: of the numbers, in bytes.
        crc: CRC-32 of the numbers.
    """

    step: int
    sender: int
    block: int
    fragment: int
    dtype: str
    length: int
    crc: int

    def pack(self) -> bytes:
        """The header as it stands before a message.

        Example:
            >>> header = Header(3, 1, 0, 1, "float32", 8, 99)
            >>> Header.unpack(header.pack()) == header
            True
        """
        step, sender, block, fragment, dtype, length, crc = self
        return _FORM.pack(
            _MAGIC, step, sender, block, fragment, dtype.encode().ljust(16), length, crc
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "Header":
        """Read a header.

        Raises:
            Rejected: there is none.
        """
        if len(data) < HEADER_BYTES:
            raise Rejected("header", f"needed {HEADER_BYTES} bytes, got {len(data)}")
        raw = bytes(data[:HEADER_BYTES])
        magic, step, sender, block, fragment, name, length, crc = _FORM.unpack(raw)
        if magic != _MAGIC:
            raise Rejected("header", f"needed {_MAGIC!r}, got {magic!r}")
        if not name.isascii():
            raise Rejected("header", f"needed a dtype in ASCII, got {name!r}")
        head = cls(step, sender, block, fragment, name.decode().rstrip(" "), length, crc)
        # Neither the checksum nor a field covers the padding, so one form only is a header.
        if head.pack() != raw:
            raise Rejected("header", "its padding is not empty")
        return head

    def check(self, expected: "Header") -> None:
        """Compare with what was asked for; the checksum is the numbers' to match.

        Raises:
            Rejected: with the first field that differs.
        """
        for name, got, needed in zip(self._fields[:-1], self, expected, strict=False):
            if got != needed:
                raise Rejected(name, f"needed {needed!r}, got {got!r}")


class Layout(NamedTuple):
    """Shapes and types of the arrays of a message, which both sides know from the model.

    Attributes:
        shapes: of each array.
        dtypes: names of their types.

    Example:
        >>> layout = Layout.of([np.zeros((2, 3), np.float32), np.zeros(4, np.int32)])
        >>> layout.nbytes, layout.dtype
        (40, 'float32')
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> "Layout":
        """The layout of arrays, or of anything with shapes and types."""
        return cls(
            tuple(tuple(array.shape) for array in arrays),
            tuple(np.dtype(array.dtype).name for array in arrays),
        )

    @property
    def types(self) -> tuple[np.dtype, ...]:
        """The arrays' types."""
        return tuple(map(_dtype, self.dtypes))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(
            int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.types, strict=True)
        )

    @property
    def dtype(self) -> str:
        """The header's dtype: the widest floating-point one, if there is any."""
        floating = [x for x in self.types if _is_floating(x)]
        return max(floating or self.types or (np.dtype("uint8"),), key=lambda x: x.itemsize).name

    def first(self, count: int) -> "Layout":
        """The layout of the first so many arrays."""
        return Layout(self.shapes[:count], self.dtypes[:count])

    def join(self, arrays: Sequence[np.ndarray]) -> bytes:
        """The arrays' numbers, one after the other."""
        return b"".join(np.ravel(array).view(np.uint8).data for array in arrays)

    def split(self, numbers: bytes | bytearray | memoryview) -> list[np.ndarray]:
        """Arrays that read from these numbers, without a copy."""
        arrays, start = [], 0
        for shape, dtype in zip(self.shapes, self.types, strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(numbers, dtype, count, start).reshape(shape))
            start += count * dtype.itemsize
        return arrays


def header(
    numbers: bytes, layout: Layout, *, step: int, sender: int, block: int, fragment: int
) -> Header:
    """The header of numbers that `Layout.join` put together."""
    crc = zlib.crc32(numbers)
    return Header(step, sender, block, fragment, layout.dtype, len(numbers), crc)


def verify(numbers: bytes | bytearray | memoryview, head: Header, layout: Layout) -> None:
    """Check numbers against their header and the model's layout.

    Raises:
        Rejected: they are damaged, of another length, or not finite.

    Example:
        >>> layout = Layout.of([np.zeros(2, np.float32)])
        >>> numbers = layout.join([np.ones(2, np.float32)])
        >>> head = header(numbers, layout, step=0, sender=0, block=0, fragment=0)
        >>> verify(numbers, head, layout)
        >>> verify(numbers[:-1] + b"!", head, layout)
        Traceback (most recent call last):
        ...
        jaxcode.cluster.wire.Rejected: rejected: it was damaged on the way
    """
    if head.length != layout.nbytes or len(numbers) != layout.nbytes:
        got = head.length if head.length != layout.nbytes else len(numbers)
        raise Rejected("length", f"needed {layout.nbytes} bytes, got {got}")
    if head.dtype != layout.dtype:
        raise Rejected("dtype", f"needed {layout.dtype!r}, got {head.dtype!r}")
    if zlib.crc32(numbers) != head.crc:
        raise Rejected("checksum")
    if not all_finite(layout.split(numbers)):
        raise Rejected("not finite")


def all_finite(arrays: Sequence[np.ndarray]) -> bool:
    """Whether the floating-point numbers among the arrays are neither NaN nor infinite.

    Example:
        >>> all_finite([np.ones(2), np.array([1])]), all_finite([np.array([np.inf])])
        (True, False)
    """
    return all(bool(np.isfinite(array).all()) for array in arrays if _is_floating(array.dtype))


class Inbox:
    """The messages of one step, each taken once, from whom it may come.

    Args:
        expected: headers by sender; their checksums are not read.
        layout: of every message.

    Example:
        >>> layout = Layout.of([np.zeros(1, np.float32)])
        >>> numbers = layout.join([np.ones(1, np.float32)])
        >>> head = header(numbers, layout, step=0, sender=2, block=1, fragment=0)
        >>> inbox = Inbox({2: head}, layout)
        >>> inbox.accept(head.pack() + numbers)
        2
        >>> inbox.accept(head.pack() + numbers)
        Traceback (most recent call last):
        ...
        jaxcode.cluster.wire.Rejected: rejected: its sender sent one already: worker 2
    """

    def __init__(self, expected: dict[int, Header], layout: Layout):
        self.expected, self.layout = expected, layout
        self.accepted: dict[int, memoryview] = {}

    def accept(self, data: bytes | bytearray | memoryview) -> int:
        """Take a message, and return its sender.

        Raises:
            Rejected: it does not fit; nothing is kept of it.
        """
        head = Header.unpack(data)
        if head.sender not in self.expected:
            raise Rejected("sender", f"needed one of {sorted(self.expected)}, got {head.sender}")
        head.check(self.expected[head.sender])
        numbers = memoryview(data)[HEADER_BYTES:]
        verify(numbers, head, self.layout)
        if head.sender in self.accepted:
            raise Rejected("duplicate", f"worker {head.sender}")
        self.accepted[head.sender] = numbers
        return head.sender


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _is_floating(dtype: np.dtype) -> bool:
    # By name as well: to NumPy, bfloat16 and int4 are both of kind V.
    return dtype.kind in "fc" or "float" in dtype.name
