"""The exact gradient of a training step from whichever workers answer, in few bytes."""

from jaxcode.aggregate import CodedGradient, coded_value_and_grad
from jaxcode.codes import Code, fractional_repetition, uncoded
from jaxcode.coding import decode, encode
from jaxcode.factors import factored_value_and_grad
from jaxcode.lowrank import IndexedRows, LowRank, to_dense
from jaxcode.partitions import Partitions, assign
from jaxcode.payload import pack, unpack
from jaxcode.transforms import decode_gradients

__all__ = [
    "Code",
    "CodedGradient",
    "IndexedRows",
    "LowRank",
    "Partitions",
    "assign",
    "coded_value_and_grad",
    "decode",
    "decode_gradients",
    "encode",
    "factored_value_and_grad",
    "fractional_repetition",
    "pack",
    "to_dense",
    "uncoded",
    "unpack",
]
