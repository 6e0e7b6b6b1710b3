"""The layers of Flax Linen, Flax NNX and Equinox; importing this fills the whole table of cases."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import parameters  # noqa: F401
import programs  # noqa: F401
from case_table import (
    CASES,
    EQUINOX,
    LINEN,
    NNX,
    case,
    equinox,
    half,
    linen,
    network,
    normal,
    score,
)
from flax import linen as nn
from flax import nnx

__all__ = ["CASES"]

IDS = np.array([[3, 0, 3], [49, 7, 8]])
IMAGES = normal(2, 6, 6, 4)
SEQUENCE = normal(2, 3, 32)
DENSE = {"kernel": "factors", "bias": "dense"}


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(50, 16)
        return embed.attend(nn.tanh(nn.Dense(16)(embed(ids))))


class Block(nn.Module):
    """A pre-norm transformer block with a causal mask."""

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(32)(nn.gelu(nn.Dense(80)(nn.RMSNorm()(x))))


class Step(nn.Module):
    """A layer as `nn.scan` wants it."""

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(31)(x)), None


STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}

linen("Dense", nn.Dense(23), normal(5, 31), **DENSE)
linen("Dense, no batch axis", nn.Dense(23), normal(31), **DENSE)
linen("Dense, batch and position axes", nn.Dense(23), normal(2, 3, 31), **DENSE)
linen("Dense, more rows than pay", nn.Dense(7), normal(40, 9), kernel="dense", bias="dense")
linen("DenseGeneral, two axes", nn.DenseGeneral((5, 7), axis=(-2, -1)), normal(3, 4, 9), **DENSE)
linen("DenseGeneral, a batch axis", nn.DenseGeneral(21, batch_dims=(0,)), normal(2, 3, 19), **DENSE)
linen(
    "Einsum",
    nn.Einsum((31, 3, 9), "btd,dhk->bthk"),
    normal(2, 3, 31),
    kernel="factors",
    bias="dense",
)
linen(
    "MultiHeadDotProductAttention", nn.MultiHeadDotProductAttention(num_heads=4), SEQUENCE, **DENSE
)
linen("transformer block", Block(), SEQUENCE, **DENSE, scale="dense")
linen("Embed", nn.Embed(50, 16), IDS, embedding="rows")
linen("Embed and attend, tied", Tied(), IDS, embedding="dense", **DENSE)
linen("LayerNorm", nn.LayerNorm(), normal(5, 31), scale="dense", bias="dense")
linen("RMSNorm", nn.RMSNorm(), normal(5, 31), scale="dense")
linen("GroupNorm", nn.GroupNorm(2), IMAGES, scale="dense", bias="dense")
linen(
    "WeightNorm of Dense",
    nn.WeightNorm(nn.Dense(23)),
    normal(5, 31),
    **{"kernel": "dense", "layer_instance/kernel/scale": "dense", "bias": "dense"},
)
linen("PReLU", nn.PReLU(), normal(5, 31), negative_slope="dense")
linen("Conv", nn.Conv(7, (3, 3)), IMAGES, kernel="dense", bias="dense")
linen(
    "Conv, depthwise",
    nn.Conv(8, (3, 3), feature_group_count=4),
    IMAGES,
    kernel="dense",
    bias="dense",
)
linen(
    "ConvTranspose",
    nn.ConvTranspose(3, (3, 3), strides=(2, 2)),
    IMAGES,
    kernel="dense",
    bias="dense",
)
linen("RNN of LSTMCell", nn.RNN(nn.LSTMCell(17)), normal(2, 3, 29), **DENSE)
linen("RNN of GRUCell", nn.RNN(nn.GRUCell(17)), normal(2, 3, 29), **DENSE)
linen("remat of Dense", nn.remat(nn.Dense)(23), normal(5, 31), **DENSE)
linen(
    "scan over layers, remat inside",
    nn.scan(nn.remat(Step), length=3, **STACKED)(),
    normal(4, 31),
    None,
    **DENSE,
)
linen("vmap over models", nn.vmap(nn.Dense, **STACKED)(23), normal(2, 4, 31), **DENSE)

for dtype in (jnp.bfloat16, jnp.float16):

    @half(f"Dense computing in {dtype.__name__}", LINEN, dtype, **DENSE)
    def _dense(dtype):
        module, x = nn.Dense(23, dtype=dtype), normal(2, 3, 31)
        params = module.init(jax.random.key(0), x)
        return (lambda params, x: score(module.apply(params, x))), params, (x,)


@half("attention computing in bfloat16", LINEN, jnp.bfloat16, **DENSE)
def _attention(dtype):
    module = nn.MultiHeadDotProductAttention(num_heads=4, dtype=dtype)
    params = module.init(jax.random.key(0), SEQUENCE)
    return (lambda params, x: score(module.apply(params, x))), params, (SEQUENCE,)


@case("BatchNorm, statistics as auxiliary outputs", LINEN, has_aux=True, **DENSE, scale="dense")
def _batch_norm():
    module = nn.Sequential([nn.Dense(23), nn.BatchNorm(use_running_average=False)])
    x = normal(5, 31)
    params, stats = (module.init(jax.random.key(0), x)[name] for name in ("params", "batch_stats"))

    def loss(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        out, updated = module.apply(variables, x, mutable=["batch_stats"])
        return score(out * out), updated

    return loss, params, (stats, x)


@case("Dropout, with its key", LINEN, **DENSE)
def _dropout():
    module = nn.Sequential([nn.Dense(23), nn.Dropout(0.5, deterministic=False)])
    x, key = normal(5, 31), jax.random.key(1)
    params = module.init({"params": key, "dropout": key}, x)
    return (
        (lambda params, x, key: score(module.apply(params, x, rngs={"dropout": key}))),
        params,
        (x, key),
    )


class Language(nnx.Module):
    """An NNX language model whose output layer is its embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        self.dense = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(nnx.tanh(self.dense(self.embed(ids))))


class Layers(nnx.Module):
    """Layers stacked by `nnx.vmap` and run by `nnx.scan`, with a remat inside."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return nnx.Linear(31, 31, rngs=rngs)

        self.layers = stack(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return nnx.tanh(layer(x))

        return run(self.layers, x)


network("Linear", lambda rngs: nnx.Linear(31, 23, rngs=rngs), normal(2, 3, 31), **DENSE)
network(
    "LinearGeneral, two axes",
    lambda rngs: nnx.LinearGeneral((4, 9), (5, 7), axis=(-2, -1), rngs=rngs),
    normal(3, 4, 9),
    **DENSE,
)
network(
    "Einsum",
    lambda rngs: nnx.Einsum("btd,dhk->bthk", (31, 3, 9), rngs=rngs),
    normal(2, 3, 31),
    kernel="factors",
)
network(
    "MultiHeadAttention",
    lambda rngs: nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs),
    SEQUENCE,
    **DENSE,
)
network(
    "LoRALinear",
    lambda rngs: nnx.LoRALinear(61, 59, lora_rank=8, rngs=rngs),
    normal(3, 61),
    **DENSE,
    lora_a="factors",
    lora_b="factors",
)
network("Embed", lambda rngs: nnx.Embed(50, 16, rngs=rngs), IDS, embedding="rows")
network("Embed and attend, tied", Language, IDS, embedding="dense", **DENSE)
network(
    "Conv", lambda rngs: nnx.Conv(4, 7, (3, 3), rngs=rngs), IMAGES, kernel="dense", bias="dense"
)
network(
    "LayerNorm",
    lambda rngs: nnx.LayerNorm(31, rngs=rngs),
    normal(5, 31),
    scale="dense",
    bias="dense",
)
network(
    "RNN of LSTMCell",
    lambda rngs: nnx.RNN(nnx.LSTMCell(29, 17, rngs=rngs)),
    normal(2, 3, 29),
    **DENSE,
)
network("scan over layers, remat inside", Layers, normal(4, 31), **DENSE)
network(
    "Sequential with Dropout",
    lambda rngs: nnx.Sequential(
        nnx.Linear(31, 23, rngs=rngs), nnx.relu, nnx.Dropout(0.5, rngs=rngs)
    ),
    normal(5, 31),
    **DENSE,
)


@case("Module, as it is", NNX, **DENSE)
def _nnx_module():
    module = nnx.Sequential(nnx.Linear(31, 23, rngs=nnx.Rngs(0)), nnx.tanh)
    return (lambda module, x: score(module(x))), module, (normal(5, 31),)


@case("BatchNorm, statistics as auxiliary outputs", NNX, has_aux=True, **DENSE, scale="dense")
def _nnx_batch_norm():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(31, 23, rngs=rngs), nnx.BatchNorm(23, rngs=rngs))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest)
        out = model(x)
        return score(out * out), nnx.state(model, nnx.BatchStat)

    return loss, params, (rest, normal(5, 31))


WEIGHT = {"weight": "factors", "bias": "dense"}
equinox(
    "Linear", lambda key: eqx.nn.Linear(31, 23, key=key), normal(5, 31), **WEIGHT, use_bias="none"
)
equinox(
    "MLP, functions among its leaves",
    lambda key: eqx.nn.MLP(31, 23, 29, 2, key=key),
    normal(4, 31),
    **WEIGHT,
    activation="none",
    final_activation="none",
)
equinox(
    "Embedding",
    lambda key: eqx.nn.Embedding(50, 16, key=key),
    np.array([3, 0, 3, 49]),
    weight="rows",
)
equinox(
    "MultiheadAttention",
    lambda key: eqx.nn.MultiheadAttention(4, 32, inference=True, key=key),
    SEQUENCE,
    SEQUENCE,
    SEQUENCE,
    weight="factors",
    p="none",
    inference="none",
)
equinox("LayerNorm", lambda key: eqx.nn.LayerNorm(31), normal(5, 31), weight="dense", bias="dense")
equinox(
    "Conv1d",
    lambda key: eqx.nn.Conv1d(3, 5, 3, key=key),
    normal(2, 3, 11),
    weight="dense",
    bias="dense",
)
equinox(
    "GRUCell",
    lambda key: eqx.nn.GRUCell(29, 17, key=key),
    normal(4, 29),
    normal(4, 17),
    weight_ih="factors",
    weight_hh="factors",
    bias="dense",
    bias_n="dense",
)


@case("partition, None in place of the rest", EQUINOX, **WEIGHT)
def _partition():
    params, rest = eqx.partition(eqx.nn.MLP(31, 23, 29, 1, key=jax.random.key(0)), eqx.is_array)
    return (
        (lambda params, x: score(jax.vmap(eqx.combine(params, rest))(x))),
        params,
        (normal(4, 31),),
    )
