"""Everything random about one step, as a pure function of the seed and the step.

Which examples are in the batch and which workers are late depends on nothing else: not on how many
steps there will be, nor on where a run was resumed. That is what lets a resumed run, and the same
training without stragglers, see exactly the same batches.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from jaxcode.stragglers import Round, bimodal, markov, pareto, shifted_exponential, wait

# Latencies are drawn for so many steps at once, each such block from its own generator. A bursty
# worker's state starts afresh in each block.
BLOCK = 1024

Model = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.random(shape)


def _jittered(model: Model) -> Model:
    """Add up to 0.1 s: among equally fast workers it must not always be the last who is missing."""
    return lambda rng, shape: model(rng, shape) + 0.1 * rng.random(shape)


def _fixed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(1.0, shape[-1] + 1), shape)


# Simulated seconds until a worker answers; the last s to answer are missing. `uniform` and `fixed`
# say only who is missing, not how long the others take.
MODELS: dict[str, Model] = {
    "uniform": _uniform,
    "exponential": shifted_exponential(shift=1.0, rate=2.0),
    "pareto": pareto(alpha=1.5, scale=1.0),
    "bimodal": _jittered(bimodal(fast=1.0, slow=10.0, probability=0.1)),
    "bursty": _jittered(markov(fast=1.0, slow=10.0, probability=0.1, persistence=0.9)),
    "fixed": _fixed,
    "none": _uniform,
}
TIMED = ("exponential", "pareto", "bimodal", "bursty")


def batch_indices(
    num_examples: int, batch_size: int, *, seed: int, step: int
) -> Int64[np.ndarray, " batch"]:
    """Return the examples of one step's batch.

    Each epoch is a new permutation; the examples beyond its last whole batch wait for another one.

    Args:
        num_examples: examples to draw from.
        batch_size: at most `num_examples`.
        seed: of the run.
        step: from 0.

    Returns:
        `batch_size` different indices.

    Example:
        >>> first, second = (batch_indices(6, 3, seed=0, step=step) for step in range(2))
        >>> sorted([*first.tolist(), *second.tolist()])
        [0, 1, 2, 3, 4, 5]
    """
    epoch, position = divmod(step, num_examples // batch_size)
    order = _permutation(num_examples, seed, epoch)
    return order[position * batch_size : (position + 1) * batch_size]


@functools.lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 1, epoch]).permutation(num_examples)


def round_at(model: str, num_workers: int, num_stragglers: int, *, seed: int, step: int) -> Round:
    """Return who answers in one step, and when: the first n - s workers to arrive.

    Args:
        model: a name in `MODELS`; with "none" nobody is missing.
        num_workers: n.
        num_stragglers: s.
        seed: of the run.
        step: from 0.

    Returns:
        The step's `Round`: survivors (n,), latency (n,) and elapsed, both in simulated seconds.

    Example:
        >>> round_at("fixed", 4, 1, seed=0, step=7).survivors.tolist()
        [True, True, True, False]
    """
    block, row = divmod(step, BLOCK)
    rounds = _rounds(model, num_workers, num_stragglers, seed, block)
    return Round(*(field[row] for field in rounds))


@functools.lru_cache(maxsize=4)
def _rounds(model: str, n: int, s: int, seed: int, block: int) -> Round:
    latency = MODELS[model](np.random.default_rng([seed, 2, block]), (BLOCK, n))
    return wait(latency, until=n if model == "none" else n - s)
