"""The exact gradient of a training step from whichever workers answer, in few bytes."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxcode.approximate import one_step_weights
from jaxcode.bounds import lower_bound
from jaxcode.codes import (
    Code,
    bernoulli,
    cyclic_mds,
    cyclic_repetition,
    expander,
    fractional_repetition,
    general_placement,
    graph_code,
    heterogeneous,
    polynomial,
    uncoded,
)
from jaxcode.designs import Design
from jaxcode.fitting import fit
from jaxcode.load import communication_load
from jaxcode.planning import plan
from jaxcode.rounds import Round, wait
from jaxcode.simulation import simulate
from jaxcode.stragglers import bimodal, failures, markov, pareto, shifted_exponential, trace

if TYPE_CHECKING:
    from jaxcode.aggregate import CodedGradient, coded_value_and_grad
    from jaxcode.coding import decode, encode
    from jaxcode.factors import factored_value_and_grad
    from jaxcode.lowrank import IndexedRows, LowRank, to_dense
    from jaxcode.partitions import Partitions, assign, partition_sizes
    from jaxcode.payload import pack, unpack
    from jaxcode.transforms import decode_gradients

__all__ = [
    "Code",
    "CodedGradient",
    "Design",
    "IndexedRows",
    "LowRank",
    "Partitions",
    "Round",
    "assign",
    "bernoulli",
    "bimodal",
    "coded_value_and_grad",
    "communication_load",
    "cyclic_mds",
    "cyclic_repetition",
    "decode",
    "decode_gradients",
    "encode",
    "expander",
    "factored_value_and_grad",
    "failures",
    "fit",
    "fractional_repetition",
    "general_placement",
    "graph_code",
    "heterogeneous",
    "lower_bound",
    "markov",
    "one_step_weights",
    "pack",
    "pareto",
    "partition_sizes",
    "plan",
    "polynomial",
    "shifted_exponential",
    "simulate",
    "to_dense",
    "trace",
    "uncoded",
    "unpack",
    "wait",
]

# Loaded on first use: a code is designed on a login node, where JAX takes seconds to import.
_NEED_JAX = {
    "aggregate": ("CodedGradient", "coded_value_and_grad"),
    "coding": ("decode", "encode"),
    "factors": ("factored_value_and_grad",),
    "lowrank": ("IndexedRows", "LowRank", "to_dense"),
    "partitions": ("Partitions", "assign", "partition_sizes"),
    "payload": ("pack", "unpack"),
    "transforms": ("decode_gradients",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NEED_JAX.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxcode.{module}"), name)
    raise AttributeError(f"module 'jaxcode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
