"""The exact gradient of a training step from whichever workers answer, in few bytes."""

from jaxcode.aggregate import CodedGradient, coded_value_and_grad
from jaxcode.codes import Code, fractional_repetition, uncoded
from jaxcode.coding import decode, encode
from jaxcode.factors import factored_value_and_grad
from jaxcode.load import communication_load, lower_bound
from jaxcode.lowrank import IndexedRows, LowRank, to_dense
from jaxcode.partitions import Partitions, assign, partition_sizes
from jaxcode.payload import pack, unpack
from jaxcode.stragglers import Round, bimodal, markov, pareto, shifted_exponential, trace, wait
from jaxcode.transforms import decode_gradients

__all__ = [
    "Code",
    "CodedGradient",
    "IndexedRows",
    "LowRank",
    "Partitions",
    "Round",
    "assign",
    "bimodal",
    "coded_value_and_grad",
    "communication_load",
    "decode",
    "decode_gradients",
    "encode",
    "factored_value_and_grad",
    "fractional_repetition",
    "lower_bound",
    "markov",
    "pack",
    "pareto",
    "partition_sizes",
    "shifted_exponential",
    "to_dense",
    "trace",
    "uncoded",
    "unpack",
    "wait",
]
