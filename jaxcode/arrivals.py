"""When messages are there: what workers take, and a master that takes one message at a time."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float


def times(seconds: Any, factors: Float[np.ndarray, "*steps workers"] | None) -> Any:
    """The product, of one number or (workers,); on a worker that is gone even 0 takes for ever.

    Example:
        >>> times(np.array([0.0, 2.0]), np.array([[np.inf, 3.0]])).tolist()
        [[inf, 6.0]]
    """
    if factors is None:
        return seconds
    with np.errstate(invalid="ignore", over="ignore"):
        product = seconds * factors
    product[np.isnan(product)] = np.inf
    return product


def smallest(seconds: Float[np.ndarray, "... workers"], count: int) -> Float[np.ndarray, "..."]:
    """The count-th smallest along the last axis.

    Example:
        >>> smallest(np.array([[3.0, 1.0, 2.0]]), 2).tolist()
        [2.0]
    """
    if count == 1:
        return seconds.min(-1)
    if count == seconds.shape[-1]:
        return seconds.max(-1)
    return np.partition(seconds, count - 1, axis=-1)[..., count - 1]


def through_master(
    arrival: Float[np.ndarray, "steps workers"],
    each: float,
    lots: Float[np.ndarray, "steps workers"] | None,
) -> Float[np.ndarray, "steps workers"]:
    """When each message is through a link that takes them in order, `each` seconds a message.

    In order of arrival a_0, a_1, ... message j is through at `max_{l <= j} a_l + (j - l + 1) each`:
    the link was last idle before some message l, and has been busy since. Of those that arrive at
    the same time the one with the lower lot goes first.

    Example:
        >>> through_master(np.array([[5.0, 0.0, 0.0]]), 2.0, np.array([[0, 0.7, 0.2]])).tolist()
        [[7.0, 4.0, 2.0]]
    """
    if not each or lots is None:
        return arrival
    if not math.isfinite(each):
        return np.full_like(arrival, np.inf)
    order = np.lexsort((lots, arrival), axis=1)
    place = np.arange(arrival.shape[1])
    began = np.take_along_axis(arrival, order, axis=1) - place * each
    finish = np.empty_like(arrival)
    through = np.maximum.accumulate(began, axis=1) + (place + 1) * each
    np.put_along_axis(finish, order, through, axis=1)
    return finish
