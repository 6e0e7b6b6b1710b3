"""Designs, a code and what its workers send and wait for; and the conditions they run under."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxcode.checks import as_array, integer, real
from jaxcode.code import Code
from jaxcode.load import normal_form_numbers, rank_numbers
from jaxcode.seconds import Latency, draw
from jaxcode.shapes import Leaf, leaf_shapes
from jaxcode.solve import groups_by_size

Method = Literal["dense", "factors", "power_sgd"]
Form = Literal["dense", "factors", "normal form", "rank"]
METHODS = ("dense", "factors", "power_sgd")
# Forms whose gradient is formed by whoever decodes.
_FACTORED = ("factors", "normal form")
# Normal form takes the place of factors, and costs a factorisation, where it saves this much.
_NORMAL_FORM = 0.9
# Seconds, and bytes per second, beyond which is a slip: within, every product is a finite number.
_LEAST, _MOST = 1e-30, 1e30
# Up to here a count is exact in float64.
_LARGEST = 2**53


@dataclasses.dataclass(frozen=True)
class Design:
    """One way to train: a code, what is sent for each parameter, and for whom a step waits.

    Args:
        code: The code.
        method: "dense": gradients as they are. "factors": each weight in the shortest of factors,
            normal form (where that saves more than 10 %) and dense; for block codes. Whoever
            decodes multiplies factors out. "power_sgd": matrices in factors of a given rank, lossy;
            for codes with one fragment. Its two rounds count as one message.
        wait_for: How many arrivals a step waits for, whether or not they decode: approximate. None
            waits until the gradient is exact.
        rank: Of "power_sgd".
        name: What to call the design in tables; by default what it consists of.

    Raises:
        ValueError: The parts do not fit each other.

    Example:
        >>> from jaxcode.codes import fractional_repetition, uncoded
        >>> Design(fractional_repetition(8, 1), method="factors").name
        'fractional_repetition s=1 m=1, factors'
        >>> Design(uncoded(8), wait_for=7).name
        'uncoded, dense, first 7 of 8'
    """

    code: Code
    _: dataclasses.KW_ONLY
    method: Method = "dense"
    wait_for: int | None = None
    rank: int = 4
    name: str = ""

    def __post_init__(self) -> None:
        """Checks the parts against each other, and names the design."""
        code, call = self.code, "Design"
        if not isinstance(code, Code):
            raise ValueError(f"`{call}` needs a code; got {code!r}. Make one, such as uncoded(8).")
        if self.method not in METHODS:
            raise ValueError(
                f"`{call}` needs method to be one of {', '.join(METHODS)}; got {self.method!r}. "
                "Choose one."
            )
        if self.method == "factors" and code.block is None:
            raise ValueError(
                f'`{call}` needs a block code for method="factors"; got {code!r}. Use '
                'fractional_repetition, or method="dense".'
            )
        if self.method == "power_sgd" and code.num_fragments > 1:
            raise ValueError(
                f'`{call}` needs one fragment for method="power_sgd"; got {code!r}. Use '
                "num_fragments=1."
            )
        integer(call, "rank", self.rank, 1, None, "Give the rank of the approximation.")
        if self.wait_for is not None:
            cure = "Give how many arrivals to wait for, or None."
            integer(call, "wait_for", self.wait_for, 1, code.num_workers, cure)
        if not isinstance(self.name, str):
            raise ValueError(f"`{call}` needs name to be text; got {self.name!r}. Give a string.")
        object.__setattr__(self, "name", self.name or self._described())

    @property
    def messages_used(self) -> int:
        """How many messages decoding reads."""
        if self.wait_for is not None:
            return self.wait_for
        if self.code.block is not None:
            return self.code.num_fragments * self.code.num_partitions
        return self.code.num_workers - self.code.num_stragglers

    def _described(self) -> str:
        code = self.code
        redundant = code.num_stragglers > 0 or code.num_fragments > 1
        size = f" s={code.num_stragglers} m={code.num_fragments}" if redundant else ""
        rank = f" {self.rank}" if self.method == "power_sgd" else ""
        first = f", first {self.wait_for} of {code.num_workers}" if self.wait_for else ""
        return f"{code.name}{size}, {self.method}{rank}{first}"


class Conditions(NamedTuple):
    """What is trained, and on what: the arguments that `simulate` and `plan` share, checked.

    A worker that sends a weight in factors leaves out the product that forms its gradient, and
    whoever decodes forms it, for all rows of the batch. `product_share` is the share that such
    products have in `seconds_per_example`: a third, where a backward pass costs two forward ones
    and half of it goes to the weights.
    """

    leaves: dict[str, Leaf]
    examples: int
    positions: int
    seconds_per_example: Float[np.ndarray, "*workers"]
    bandwidth: Float[np.ndarray, "*workers"]
    master_bandwidth: float
    decode_rate: float
    slowdown: Latency | None
    pause: Latency | None
    network: Latency | None
    deadline: float | None
    product_share: float

    @property
    def batch_seconds(self) -> float:
        """What the mean worker would take to compute the whole batch."""
        return self.examples * float(self.seconds_per_example.mean())

    def product(self, forms: dict[str, Form]) -> float:
        """The share of the computing that leaves in these forms leave to the decoder.

        `product_share` times the numbers in factors or normal form over all numbers: the products
        of a matrix cost as many operations a row as it has numbers. Decoding then takes this share
        of `batch_seconds`, and as much where messages are missing: shapes are fixed, so their
        factors are multiplied too, by 0.
        """
        sizes = {name: leaf.size for name, leaf in self.leaves.items()}
        left = sum(sizes[name] for name, form in forms.items() if form in _FACTORED)
        return self.product_share * left / sum(sizes.values())

    def draws(
        self, call: str, shape: tuple[int, ...], seed: int
    ) -> dict[str, Float[np.ndarray, "*steps workers"] | None]:
        """What each model draws, from a stream of its own; None where there is no model."""
        drawn: dict[str, np.ndarray | None] = {}
        for index, name in enumerate(("slowdown", "pause", "network")):
            model, rng = getattr(self, name), np.random.default_rng([seed, index])
            drawn[name] = None if model is None else draw(call, name, model, rng, shape)
        return drawn

    def rows(self, share: float) -> int:
        """Rows of a partition that is this share of the batch: its examples times positions."""
        return math.ceil(self.examples * share - 1e-9) * self.positions


def conditions(call: str, params: Any, **options: Any) -> Conditions:
    """The checked arguments of `call`; models of latency are checked when they draw."""
    leaves = leaf_shapes(params, call=call)
    if not any(leaf.size for leaf in leaves.values()):
        raise ValueError(f"`{call}` needs parameters; got none in {params!r}. Give their shapes.")
    cure = "Count the whole batch's."
    options["examples"] = integer(call, "examples", options["examples"], 1, _LARGEST, cure)
    cure = "Give the rows of a weight's input per example, such as a text's length."
    options["positions"] = integer(call, "positions", options["positions"], 1, _LARGEST, cure)
    cure = "Give seconds: one number, or one a worker."
    options["seconds_per_example"] = _per_worker(call, "seconds_per_example", options, cure)
    cure = "Give bytes per second, 1.25e8 for 1 Gbit/s: one number, or one a worker."
    options["bandwidth"] = _per_worker(call, "bandwidth", options, cure)
    cure = "Give bytes per second, or infinity."
    for name in ("master_bandwidth", "decode_rate"):
        if not (isinstance(options[name], float) and options[name] == math.inf):
            options[name] = real(call, name, options[name], low=_LEAST, high=_MOST, cure=cure)
    if options["deadline"] is not None:
        cure = "Give seconds."
        options["deadline"] = real(
            call, "deadline", options["deadline"], low=_LEAST, high=_MOST, cure=cure
        )
    cure = "Give the share of the computing that forms the gradients of the weights, such as 1/3."
    share = real(call, "product_share", options["product_share"], low=0, high=1, cure=cure)
    if share == 1:
        raise ValueError(f"`{call}` needs product_share below 1; got 1. {cure}")
    return Conditions(leaves, **options | {"product_share": share})


def _per_worker(call: str, name: str, options: dict[str, Any], cure: str) -> np.ndarray:
    """A number of at least 0, or an array of them; a bandwidth is above 0, and may be infinite."""
    value, links = options[name], name == "bandwidth"
    array = as_array(value)
    if array.ndim == 0:
        infinite = links and value == math.inf
        given = math.inf if infinite else real(call, name, value, low=0, high=_MOST, cure=cure)
        array = np.asarray(given)
    fits = array.ndim <= 1 and array.size and array.dtype.kind in "iuf" and (array >= 0).all()
    within = fits and ((array <= _MOST) | (np.isinf(array) & links)).all()
    if not within:
        raise ValueError(
            f"`{call}` needs {name} to be a number from 0 to {_MOST:g}, or one a worker; got "
            f"{value!r}. {cure}"
        )
    if links and not (array >= _LEAST).all():
        raise ValueError(
            f"`{call}` needs {name} of at least {_LEAST:g}; got {float(array.min()):g}. {cure}"
        )
    return array.astype(float)


def message(
    leaves: dict[str, Leaf], method: Method, rows: int, rank: int = 4
) -> tuple[float, dict[str, Form]]:
    """The bytes of one partition's payload, before it is cut in fragments, and each leaf's form.

    Row numbers that travel with normal forms and lookups are not counted.

    Example:
        >>> message({"w": Leaf((784, 1024), 4), "b": Leaf((1024,), 4)}, "factors", rows=32)
        (235520.0, {'w': 'factors', 'b': 'dense'})
    """
    forms = {name: _form(leaf, method, rows, rank) for name, leaf in leaves.items()}
    total = sum(numbers * leaves[name].itemsize for name, (numbers, _) in forms.items())
    return float(total), {name: form for name, (_, form) in forms.items()}


def _form(leaf: Leaf, method: Method, rows: int, rank: int) -> tuple[int, Form]:
    """Numbers of a leaf, and the form it is sent in."""
    if method == "power_sgd":
        lossy = rank_numbers(leaf, rank)
        return (
            (lossy, "rank") if len(leaf.shape) > 1 and lossy < leaf.size else (leaf.size, "dense")
        )
    if method == "dense" or len(leaf.shape) != 2:
        return leaf.size, "dense"
    factors, normal = rank_numbers(leaf, rows), normal_form_numbers(leaf, rows)
    if normal < _NORMAL_FORM * min(factors, leaf.size):
        return normal, "normal form"
    return (factors, "factors") if factors < leaf.size else (leaf.size, "dense")


def groups(code: Code) -> list[Int[np.ndarray, "groups members"]]:
    """The workers of each group of a block code, groups of one size together."""
    block = code.block
    if block is None:
        raise ValueError(f"`groups` needs a block code; got {code!r}. Use fractional_repetition.")
    return [members for _, members in groups_by_size(block)]
