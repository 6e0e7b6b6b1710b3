"""What `jaxcode bench` times: pairs of programs, one of this library and one to compare it with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcode.bench.models import Problem, Transformer, perceptron, transformer
from jaxcode.bench.steps import Setting, cpu_device, design, some_missing
from jaxcode.codes import Code, fractional_repetition
from jaxcode.coding import Decoder, decode, encode
from jaxcode.factors import factored_value_and_grad
from jaxcode.lowrank import LowRank, concatenate, is_structured
from jaxcode.payload import num_bytes

CAPTURE_GOAL, CODING_GOAL, MESH_GOAL = 0.75, 1.25, 1.05


class Sizes(NamedTuple):
    """How large the models are."""

    layers: tuple[int, ...]
    rows: int
    other_rows: tuple[int, ...]
    transformers: tuple[Transformer, ...]


FULL = Sizes(
    layers=(784, 1024, 1024, 10),
    rows=32,
    other_rows=(8, 128),
    transformers=(Transformer(2, 128, 4, 64, 2, 1000), Transformer(2, 512, 4, 32, 1, 1000)),
)
QUICK = Sizes((12, 16, 10), 2, (), (Transformer(1, 16, 2, 4, 1, 20),))


@dataclass(frozen=True)
class Pair:
    """Two programs to time against each other.

    Attributes:
        case: the case it belongs to.
        name: what ``ours`` computes.
        against: what ``theirs`` computes.
        ours: computes and returns arrays.
        theirs: likewise.
        goal: the largest ratio of their times that is good enough, if one is set.
        details: counts that belong with the times, ready for JSON.
    """

    case: str
    name: str
    against: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    goal: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def capture(sizes: Sizes) -> Iterator[Pair]:
    """Factored gradients against ``jax.value_and_grad``, on one CPU device.

    The goal is for the perceptron at `Sizes.rows`.

    Example:
        >>> next(capture(QUICK)).name
        'MLP 12-16-10, 2 rows'
    """
    device = cpu_device()
    for rows in (sizes.rows, *sizes.other_rows):
        goal = CAPTURE_GOAL if rows == sizes.rows else None
        yield _captured(perceptron(sizes.layers, rows, device), goal)
    for shape in sizes.transformers:
        yield _captured(transformer(shape, device), None)


def _captured(problem: Problem, goal: float | None) -> Pair:
    gradient = factored_value_and_grad(problem.loss)
    arguments = (problem.params, problem.batch)
    ours, theirs = (
        jax.jit(function).lower(*arguments).compile()
        for function in (gradient, jax.value_and_grad(problem.loss))
    )
    summary = gradient.summary(*arguments)
    details = {
        "numbers": summary.numbers,
        "dense_numbers": summary.dense_numbers,
        "flops": _flops(ours),
        "dense_flops": _flops(theirs),
    }
    return Pair(
        "capture",
        problem.name,
        "jax.value_and_grad",
        lambda: ours(*arguments),
        lambda: theirs(*arguments),
        goal,
        details,
    )


def coding(sizes: Sizes) -> Iterator[Pair]:
    """Encode one worker's gradient and decode all workers', against copying the bytes touched.

    ``numpy.copyto`` of B bytes touches 2 B, so it copies half of what encode and decode read and
    write. All messages count as read, also those of stragglers. Factors are decoded to all blocks'
    factors; their product is in the case "product".

    Example:
        >>> [pair.name for pair in coding(QUICK)]
        ['dense, n=8 s=1 m=1', 'dense, n=8 s=2 m=2', 'factors, n=8 s=1 m=1']
    """
    problem = perceptron(sizes.layers, sizes.rows, cpu_device())
    arguments = (problem.params, problem.batch)
    dense = jax.jit(jax.grad(problem.loss))(*arguments)
    factors = jax.jit(factored_value_and_grad(problem.loss))(*arguments)[1]
    repetition = fractional_repetition(8, 1)
    yield _coded(f"dense, {design(repetition)}", dense, repetition, decode)
    fragments = fractional_repetition(8, 2, num_fragments=2)
    yield _coded(f"dense, {design(fragments)}", dense, fragments, decode)
    yield _coded(f"factors, {design(repetition)}", factors, repetition, _decode_factors)


def _coded(name: str, payload: Any, code: Code, decoder: Callable[..., Any]) -> Pair:
    n = code.num_workers
    worker, weights = jax.device_put((np.int32(n - 1), some_missing(code)), cpu_device())
    encoding = jax.jit(lambda payload, worker: encode(payload, code, worker))
    decoding = jax.jit(lambda messages, weights: decoder(messages, code, weights, like=payload))
    messages = jax.jit(jax.vmap(encoding, in_axes=(None, 0)))(payload, np.arange(n))
    encoded = num_bytes(payload) + num_bytes(encoding(payload, worker))
    decoded = num_bytes(messages) + num_bytes(decoding(messages, weights))
    source = np.ones((encoded + decoded) // 2, np.uint8)
    target = np.zeros_like(source)

    def ours() -> Any:
        message = jax.block_until_ready(encoding(payload, worker))
        return message, decoding(messages, weights)

    def theirs() -> Any:
        np.copyto(target, source)
        return target

    details = {
        "encode_bytes": encoded,
        "decode_bytes": decoded,
        "copied_bytes": source.nbytes,
    }
    return Pair("coding", name, "numpy.copyto", ours, theirs, CODING_GOAL, details)


def _decode_factors(messages: Any, code: Code, weights: Any, *, like: Any) -> Any:
    """`decode`, short of the product: factors of all blocks, (k, p, r) and (k, q, r)."""
    decoder = Decoder(code, weights, np.arange(code.num_workers), None)

    def decoded(message: Any, like: Any) -> Any:
        if not isinstance(message, LowRank):  # the perceptron has no `IndexedRows`
            return decoder.total(message, tuple(like.shape), drop=True)
        P_shape, Q_shape = message.factor_shapes
        P = decoder.blocks(message.P, P_shape, scaled=False)
        return P, decoder.blocks(message.Q, Q_shape, scaled=True)

    return jax.tree.map(decoded, messages, like, is_leaf=is_structured)


def mesh(sizes: Sizes) -> Iterator[Pair]:
    """A coded step on a mesh against the same computation without a code.

    Each device computes its block's gradient either way. With a code it is encoded, and decoded
    from the messages of all devices but one. Without, it is scaled and summed over the devices.
    Scaling the gradient, as `jax.lax.pmean` does, takes a pass over it, as the code does; scaling
    the loss before it is differentiated takes none, and shows what the code's pass costs. The goal
    is held against both.

    Example:
        >>> [pair.goal for pair in mesh(QUICK)]
        [1.05, 1.05]
    """
    setting = Setting.on_mesh(sizes.layers, sizes.rows)
    name = f"coded step, {setting.name}"
    details = {"devices": setting.num_devices, "workers": setting.code.num_workers}
    ours = setting.coded("dense")
    theirs = setting.uncoded(scale="gradient")
    yield Pair("mesh", name, "gradients scaled and summed", ours, theirs, MESH_GOAL, details)
    theirs = setting.uncoded(scale="loss")
    yield Pair("mesh", name, "gradients of scaled losses, summed", ours, theirs, MESH_GOAL, details)


def product(sizes: Sizes) -> Iterator[Pair]:
    """What decoding factors costs: every replica multiplies the factors of the whole batch.

    Flops are 2 p q N for a p x q parameter and a batch of N rows, beside those of the backward
    pass of one block, and of both as XLA counts them.

    Example:
        >>> [pair.against for pair in product(QUICK)]
        ['dense', 'dense', "one block's value_and_grad"]
    """
    setting = Setting.on_mesh(sizes.layers, sizes.rows)
    block = perceptron(sizes.layers, sizes.rows, cpu_device())
    arguments = (block.params, block.batch)
    factors = jax.jit(factored_value_and_grad(block.loss))(*arguments)[1]
    factors = [x for x in jax.tree.leaves(factors, is_leaf=is_structured) if is_structured(x)]
    blocks = setting.code.num_partitions
    stacked = jax.tree.map(lambda x: jnp.tile(x[None], (blocks, *[1] * x.ndim)), factors)
    products = jax.jit(lambda stacked: [_product(factors, blocks) for factors in stacked])
    multiply = products.lower(stacked).compile()
    gradient, loss = (
        jax.jit(function).lower(*arguments).compile()
        for function in (jax.value_and_grad(block.loss), block.loss)
    )
    details = {
        "product_flops": sum(2 * np.prod(x.shape).item() * setting.rows for x in factors),
        "backward_flops": _backward_flops(sizes),
        "xla_product_flops": _flops(multiply),
        "xla_backward_flops": _flops(gradient) - _flops(loss),
    }
    for place in (setting, setting.on_one_device()):
        ours, theirs = place.coded("factors"), place.coded("dense")
        yield Pair("product", f"factors, {place.name}", "dense", ours, theirs)
    yield Pair(
        "product",
        f"decode product, {setting.rows} rows",
        "one block's value_and_grad",
        lambda: multiply(stacked),
        lambda: gradient(*arguments),
        details=details,
    )


def _product(stacked: LowRank, blocks: int) -> Any:
    """The sum over blocks of ``P Q^T``, from factors stacked on a leading axis of blocks."""
    parts = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(blocks)]
    return concatenate(parts).to_dense()


def _backward_flops(sizes: Sizes) -> int:
    """Of one block: each layer multiplies twice, and the first has no use for its input's."""
    shapes = list(zip(sizes.layers, sizes.layers[1:], strict=False))
    first, every = np.prod(shapes[0]).item(), sum(p * q for p, q in shapes)
    return 2 * sizes.rows * (2 * every - first)


def _flops(compiled: Any) -> int:
    """As XLA counts them; 0 where it does not."""
    cost = compiled.cost_analysis() or {}
    return int(max(0, cost.get("flops", 0)))
