"""The models that the benchmark times: a multilayer perceptron and a small transformer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Problem(NamedTuple):
    """A loss and what to call it on.

    Attributes:
        name: what the table calls it.
        loss: ``loss(params, batch)``, a mean.
        params: the parameters.
        batch: the batch, leaves (N, ...).
    """

    name: str
    loss: Callable[..., Any]
    params: Any
    batch: Any


def perceptron(layers: Sequence[int], rows: int, device: Any) -> Problem:
    """Return a ReLU classifier and random examples.

    Args:
        layers: widths, from the inputs' to the number of classes.
        rows: examples.
        device: where the arrays are.

    Returns:
        The problem.

    Example:
        >>> problem = perceptron((4, 8, 3), 2, jax.devices()[0])
        >>> problem.name, problem.loss(problem.params, problem.batch).shape
        ('MLP 4-8-3, 2 rows', ())
    """
    rng = np.random.default_rng(0)
    params = [
        {"w": rng.normal(size=(p, q)) / np.sqrt(p), "b": np.zeros(q)}
        for p, q in zip(layers, layers[1:], strict=False)
    ]
    batch = {"x": rng.normal(size=(rows, layers[0])), "y": rng.integers(layers[-1], size=rows)}
    name = f"MLP {'-'.join(map(str, layers))}, {rows} rows"
    return Problem(name, _perceptron_loss, *_placed((params, batch), device))


def _perceptron_loss(params: Any, batch: Any) -> Any:
    *hidden, last = params
    x = batch["x"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return _cross_entropy(x @ last["w"] + last["b"][None], batch["y"])


class Transformer(NamedTuple):
    """Sizes of a transformer and its batch."""

    layers: int
    width: int
    heads: int
    length: int
    sequences: int
    vocabulary: int


def transformer(sizes: Transformer, device: Any) -> Problem:
    """Return a causal language model in Flax Linen and random tokens.

    Args:
        sizes: of the model and the batch.
        device: where the arrays are.

    Returns:
        The problem; a row is a position of a sequence.

    Example:
        >>> problem = transformer(Transformer(1, 8, 2, 4, 2, 11), jax.devices()[0])
        >>> problem.name, problem.loss(problem.params, problem.batch).shape
        ('transformer 1 x 8, 8 rows', ())
    """
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            attention = nn.MultiHeadDotProductAttention(num_heads=sizes.heads)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            wide = nn.gelu(nn.Dense(4 * sizes.width)(nn.LayerNorm()(x)))
            return x + nn.Dense(sizes.width)(wide)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(sizes.vocabulary, sizes.width)(tokens)
            initial = nn.initializers.normal(0.02)
            x = x + self.param("positions", initial, (sizes.length, sizes.width))[None]
            mask = nn.make_causal_mask(tokens)
            for _ in range(sizes.layers):
                x = Block()(x, mask)
            return nn.Dense(sizes.vocabulary)(nn.LayerNorm()(x))

    model = Model()
    shape = (sizes.sequences, sizes.length)
    text = np.random.default_rng(0).integers(sizes.vocabulary, size=(2, *shape))
    with jax.default_device(device):
        params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(text[0], jnp.int32))

    def loss(params: Any, batch: Any) -> Any:
        return _cross_entropy(model.apply(params, batch["tokens"]), batch["next"])

    rows = sizes.sequences * sizes.length
    name = f"transformer {sizes.layers} x {sizes.width}, {rows} rows"
    batch = {"tokens": text[0], "next": text[1]}
    return Problem(name, loss, *_placed((params, batch), device))


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def _placed(tree: Any, device: Any) -> Any:
    """Put arrays on a device, in single precision."""

    def place(array: Any) -> Any:
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return jax.device_put(array.astype(jnp.float32 if floating else jnp.int32), device)

    return jax.tree.map(place, tree)
