"""Decoding inside an Optax chain: messages in, gradients out.

`decode_gradients` takes the place of gradients in a chain by workers' messages, so that everything
after it (clipping, accumulation, weight decay, the optimizer) sees the decoded gradient, once per
step, as it would see an ordinary one.
"""

from typing import Any

import jax.numpy as jnp
import optax

from jaxcode.codes import Code
from jaxcode.coding import decode
from jaxcode.leaves import shapes_where
from jaxcode.lowrank import to_dense


def decode_gradients(code: Code) -> optax.GradientTransformationExtraArgs:
    """Decode the messages of the workers that answered, as the first link of an Optax chain.

    Updates are ``coded.messages(params, batch).grads``: the parameters' tree with stacked messages
    for leaves. Put what needs the whole gradient (clipping, weight decay, ``optax.MultiSteps``)
    behind this link: what comes before it, or wraps it, would see coded numbers in other shapes.

    Args:
        code: the code of the messages.

    Returns:
        A transformation whose ``update(messages, state, params, weights=...)`` needs the parameters
        (for their shapes) and the decoding weights (m, n) of the step. It has no state.

    Raises:
        ValueError: at update, when the parameters or the weights are missing or do not fit.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxcode import coded_value_and_grad, fractional_repetition
        >>> code = fractional_repetition(num_workers=4, num_stragglers=1)
        >>> coded = coded_value_and_grad(lambda w, x: jnp.mean(x @ w), code)
        >>> tx = optax.chain(decode_gradients(code), optax.sgd(0.5))
        >>> params = jnp.zeros(3)
        >>> messages = coded.messages(params, jnp.ones((4, 3))).grads
        >>> weights = code.decoding_weights([False, True, True, False])
        >>> updates, _ = tx.update(messages, tx.init(params), params, weights=weights)
        >>> updates.tolist()
        [-0.5, -0.5, -0.5]
    """

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        messages: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        weights: Any = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra
        if params is None or weights is None:
            missing = "params" if params is None else "weights"
            raise ValueError(
                f"`decode_gradients` needs {missing}: call `tx.update(messages, state, params, "
                "weights=code.decoding_weights(survivors))`"
            )
        weights = jnp.asarray(weights, jnp.result_type(float))
        like = shapes_where(messages, params)
        return to_dense(decode(messages, code, weights, like=like), params), state

    return optax.GradientTransformationExtraArgs(init, update)
