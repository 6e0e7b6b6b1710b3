"""What one worker does in a step: the payload of its partitions, and the message it sends."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcode.codes import Code
from jaxcode.coding import encode_unchecked
from jaxcode.factors import UNUSED, FactoredGradient, LeafSummary
from jaxcode.leaves import Call, as_pair
from jaxcode.partitions import Partitions
from jaxcode.payload import is_coded
from jaxcode.precision import widen

Method = Literal["dense", "factors"]


class Payload(NamedTuple):
    """What a worker computes on a partition, scaled by the partition's share of the batch."""

    value: Any
    aux: Any
    grads: Any


@dataclass(frozen=True)
class Worker:
    """The program of one worker: payload of a partition, message of all its partitions."""

    loss: Callable[..., Any]
    code: Code
    method: Method
    has_aux: bool
    trainable: Any
    wire_dtype: Any
    normal_form: bool

    def scaled(self, *, padded: bool) -> Callable[..., Any]:
        """The loss and auxiliary outputs of a partition, times its share of the batch."""

        def loss(params: Any, examples: Any, share: Any, *key: Any) -> Any:
            value, aux = as_pair(self.loss(params, examples, *key), has_aux=self.has_aux)
            weight = jnp.sum(share)
            aux = jax.tree.map(lambda x: _scaled_metric(x, weight), aux)
            return _mean(value, share, padded=padded), aux

        return loss

    def payload(self, params: Any, examples: Any, share: Any, key: Any, *, padded: bool) -> Payload:
        """The scaled loss, gradient and auxiliary outputs of one partition."""
        loss = self.scaled(padded=padded)
        args = (examples, share) if key is None else (examples, share, key)
        if self.method == "factors":
            (value, aux), grads = self._factored(loss)(params, *args)
        else:
            call = Call.of(params, args, {}, self.trainable)
            (value, aux), leaves = call.value_and_grad(loss, has_aux=True)(*call.inputs)
            grads = call.full(leaves)
        return Payload(value, aux, grads)

    def _factored(self, loss: Callable[..., Any]) -> FactoredGradient:
        return FactoredGradient(
            loss, has_aux=True, trainable=self.trainable, normal_form=self.normal_form
        )

    def message(
        self, params: Any, part: Partitions, worker: Any, key: Any
    ) -> tuple[Payload, Payload]:
        """The coded sum of the payloads of one worker's partitions, leaves (d, ...) of ``part``.

        Returns:
            The message, and the shapes of one partition's payload.
        """
        if isinstance(key, int):
            raise ValueError(
                f"`key` needs to be a PRNG key, got {key}: pass `jax.random.key({key})`"
            )

        def one(examples: Any, share: Any, partition: Any) -> Payload:
            # Replicas of a partition must agree, so its key does not depend on the worker.
            folded = None if key is None else jax.random.fold_in(key, partition)
            return self.payload(params, examples, share, folded, padded=part.padded)

        each = (part.examples, part.share, jnp.asarray(self.code.partitions, jnp.int32)[worker])
        if self.code.load == 1:
            payload = one(*jax.tree.map(lambda x: x[0], each))
            shapes = jax.eval_shape(lambda: payload)
        else:
            payload = jax.lax.map(lambda args: one(*args), each)
            shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], payload))
        return encode_unchecked(payload, self.code, worker, self.wire_dtype), shapes

    def summary(self, params: Any, parts: Partitions, key: Any) -> tuple[LeafSummary, ...]:
        """How each leaf of the gradient of one partition is represented."""
        part = _one_partition(parts)
        args = (part.examples, part.share) if key is None else (part.examples, part.share, key)
        loss = self.scaled(padded=parts.padded)
        rows = self._factored(loss).summary(params, *args).rows
        return rows if self.method == "factors" else tuple(map(_as_dense, rows))


def _one_partition(parts: Partitions) -> Partitions:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), parts)


def _as_dense(row: LeafSummary) -> LeafSummary:
    if row.kind == "none" and row.reason != UNUSED:
        return row
    return row._replace(kind="dense", reason='method="dense"', numbers=math.prod(row.shape))


def _mean(value: Any, share: Any, *, padded: bool) -> Any:
    """A partition's part of the mean over the batch, of a mean or of per-example values."""
    if not jax.tree_util.all_leaves([value]) or not is_coded(jnp.asarray(value)):
        raise ValueError(
            "`loss` needs to return floating-point numbers, a mean or one value an example; got "
            f"{value!r}: return auxiliary outputs with has_aux=True"
        )
    value = widen(jnp.asarray(value))
    if value.shape == share.shape:
        return jnp.sum(jnp.where(share > 0, value, 0) * share.astype(value.dtype))
    if value.shape != ():
        raise ValueError(
            "`loss` needs to return a scalar mean or one value an example, shape "
            f"{share.shape}; got shape {value.shape}: average over the other axes"
        )
    if padded:
        raise ValueError(
            "a `loss` that returns a mean needs batches that divide by the number of partitions; "
            "return one value an example, shape (b,), and any batch size is exact"
        )
    return value * jnp.sum(share).astype(value.dtype)


def _scaled_metric(output: Any, weight: Any) -> Any:
    if isinstance(output, str) or not is_coded(output := jnp.asarray(output)):
        raise ValueError(
            "`has_aux` needs floating-point outputs, averaged over the batch like the loss; got "
            f"{getattr(output, 'dtype', repr(output))}: convert counts and flags to float32"
        )
    output = widen(output)
    return output * weight.astype(output.dtype)
