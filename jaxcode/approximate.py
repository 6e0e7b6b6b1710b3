"""Approximate codes: less redundancy than s + 1, an error that is small instead of zero.

A worker computes d partitions and sends their sum; from those who answered, the decoding weights
give the vector closest to the sum of all. The error `err(K) = ||a B - 1||^2 / k`, from 0 to 1, is
what `code.decoding_error` computes exactly for every pattern; the formulas here are the papers' for
what to expect.

These codes tolerate nobody *exactly*. At n = k = 60, d = 3 and 20 % of the workers missing,
optimal decoding errs by 0.6 % with fractional repetition, 0.7 % with `graph_code`, 3 % with
`expander` and 12 % with `bernoulli`. Fractional repetition beyond its s is the best or tied there;
the merit of the others is that no small set of workers is fatal.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxcode.checks import arrived, integer, real
from jaxcode.code import Code

# Graphs are drawn so often, and the best expander of them is kept.
_GRAPHS = 10


def bernoulli(num_workers: int, load: int, *, seed: int = 0) -> Code:
    """The Bernoulli gradient code: each worker holds each of n partitions with probability d / n.

    A partition that nobody drew is given to one worker at random, and a worker that drew nothing
    gets one partition, for training must not drop data for certain (the paper leaves them out).

    Choose it to study random placement: at equal d every other code here loses less. Its merit is
    that no adversary who sees only d finds a small fatal set.

    Args:
        num_workers: n, also the number of partitions.
        load: d, the *expected* number of partitions a worker computes, from 1 to n.
        seed: of the draw.

    Returns:
        The code, with s = 0; not even all workers need decode exactly.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> code = bernoulli(20, 3, seed=1)
        >>> code
        <Code bernoulli [n=20, k=20, s=0, m=1]>
        >>> 0 < float(code.decoding_error([True] * 16 + [False] * 4)) < 0.5
        True

    References:
        Charles, Papailiopoulos and Ellenberg, "Approximate gradient coding via sparse random
        graphs", 2017.
    """
    call = "bernoulli"
    n = integer(call, "num_workers", num_workers, 1, None, "Count the workers.")
    d = integer(call, "load", load, 1, n, "Choose a load of at most n.")
    rng = np.random.default_rng(integer(call, "seed", seed, 0, None, "Give an integer."))
    held = rng.random((n, n)) < d / n
    nobodys = np.flatnonzero(~held.any(0))
    held[rng.integers(n, size=nobodys.size), nobodys] = True
    idle = np.flatnonzero(~held.any(1))
    held[idle, rng.integers(n, size=idle.size)] = True
    return Code(held, 0, call)


def expander(num_workers: int, load: int, *, seed: int = 0) -> Code:
    """The expander code: A / d for the adjacency A of a d-regular graph on the workers.

    Worker i holds the d neighbours of i among n = k partitions. All together decode exactly; with s
    missing the error is at most `expander_error_bound`, with lambda the graph's second eigenvalue
    in modulus. Random regular graphs are near the least possible lambda, `2 sqrt(d - 1)`; the best
    of ten is taken.

    Choose it where an adversary, or a whole rack, may pick the stragglers: the bound holds for
    every set of them.

    Args:
        num_workers: n, also the number of partitions; n d must be even.
        load: d, from 1 to n - 1.
        seed: of the draws.

    Returns:
        The [n, n, 0, 1] code of load d.

    Raises:
        ValueError: No such graph exists.

    Example:
        >>> code = expander(20, 4)
        >>> survivors = [True] * 16 + [False] * 4
        >>> bound = expander_error_bound(20, 4, 4, second_eigenvalue(code))
        >>> 0 < float(code.decoding_error(survivors)) <= bound
        True

    References:
        Raviv, Tamo, Tandon and Dimakis, "Gradient coding from cyclic MDS codes and expander
        graphs", 2020, section V.
    """
    call = "expander"
    n = integer(call, "num_workers", num_workers, 2, None, "Use two workers or more.")
    d = integer(call, "load", load, 1, n - 1, "Choose a load below n.")
    adjacency = _expander_graph(call, n, d, seed)
    return Code(adjacency / d, 0, call)


def graph_code(num_workers: int, replication: int, *, seed: int = 0) -> Code:
    """The graph code: workers are the edges of a d-regular graph, and partitions its vertices.

    Each worker computes the 2 partitions at its ends, and each partition is held by d workers, so
    k = 2 n / d and a worker computes d / n of the batch, as in the other codes of load d. All of a
    component of the surviving graph decodes exactly if it is not bipartite, and a bipartite one
    with sides of l and r vertices loses `(l - r)^2 / (l + r)` partitions.

    Choose it for random stragglers where blocks are unwanted: the error falls with d almost as fast
    as fractional repetition's p^d, and no set of d workers is as bad as a whole group.

    Args:
        num_workers: n; 2 n must be a multiple of d, and the graph has 2 n / d > d vertices.
        replication: d, how many workers hold each partition, at least 2.
        seed: of the draws of the graph, as in `expander`.

    Returns:
        The [n, 2 n / d, 0, 1] code of load 2.

    Raises:
        ValueError: No such graph exists; the valid replications are named.

    Example:
        >>> code = graph_code(12, 3)
        >>> code, code.load
        (<Code graph_code [n=12, k=8, s=0, m=1]>, 2)
        >>> code.replication.tolist()
        [3, 3, 3, 3, 3, 3, 3, 3]

    References:
        Glasgow and Wootters, "Approximate gradient coding with optimal decoding", 2021.
    """
    call = "graph_code"
    n = integer(call, "num_workers", num_workers, 1, None, "Count the workers.")
    valid = [d for d in range(2, 2 * n + 1) if 2 * n % d == 0 and 2 * n // d > d]
    if replication not in valid or isinstance(replication, bool):
        raise ValueError(
            f"`{call}` needs a replication d with 2 n / d vertices, more than d; got "
            f"{replication!r} for n = {n}, where {_listed(valid)}. Choose one, or another n."
        )
    vertices = 2 * n // replication
    adjacency = _expander_graph(call, vertices, replication, seed)
    ends = np.argwhere(np.triu(adjacency))
    B = np.zeros((n, vertices))
    B[np.arange(n)[:, None], ends] = 1
    return Code(B, 0, call)


def _listed(valid: list[int]) -> str:
    if not valid:
        return "there is none"
    return f"the valid ones are {', '.join(map(str, valid))}"


def one_step_weights(
    code: Code, survivors: Bool[Any, "*steps workers"] | list[Any]
) -> Float[np.ndarray, "*steps 1 workers"]:
    """One weight for all who answered, from their number alone: one-step decoding.

    For 0/1 codes of k = n partitions and load d the weight is `n / (|K| d)`. In general it is
    `n / |K|` times what makes the decoded sum right on average over the entries of B. It needs no
    solve, and errs 3 to 100 times more than `code.decoding_weights`.

    Args:
        code: The code, with one fragment.
        survivors: (..., n) bool, True where the worker's message arrived.

    Returns:
        (..., 1, n) float64. Zeros where nobody answered.

    Raises:
        ValueError: The code has several fragments or entries that add to zero, or `survivors` has
            the wrong type or shape.

    Example:
        >>> from jaxcode.codes import fractional_repetition
        >>> one_step_weights(fractional_repetition(4, 1), [True, True, True, False]).round(3)
        array([[0.667, 0.667, 0.667, 0.   ]])

    References:
        Charles, Papailiopoulos and Ellenberg, 2017, section 3.
    """
    survivors = arrived("one_step_weights", survivors, code.num_workers)
    total = code.coefficients.sum()
    if code.num_fragments > 1 or total <= 0:
        raise ValueError(
            "`one_step_weights` needs one fragment and entries with a positive sum; got "
            f"{code!r} with {total:g}. Use code.decoding_weights."
        )
    count = survivors.sum(-1, keepdims=True)
    weight = code.num_partitions / total * code.num_workers / np.maximum(count, 1)
    return np.asarray(survivors * weight)[..., None, :]


def repetition_error(
    num_workers: int, load: int, num_missing: int, *, one_step: bool = False
) -> float:
    """Expected error of fractional repetition with this many random workers missing.

    Optimal decoding loses a partition when its d holders are all missing:
    `C(n - d, s - d) / C(n, s)`, about p^d. One-step decoding errs by
    `(n - d) s / ((n - s) d (n - 1))`, about p / ((1 - p) d).

    Args:
        num_workers: n, a multiple of d.
        load: d, the size of a group.
        num_missing: s, from 0 to n - 1.
        one_step: whether to decode by `one_step_weights`.

    Returns:
        The expected `code.decoding_error` over all sets of s workers.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> round(repetition_error(60, 2, 6), 4)
        0.0085
        >>> round(repetition_error(60, 2, 6, one_step=True), 4)
        0.0546

    References:
        Charles, Papailiopoulos and Ellenberg, 2017.
    """
    n, d, s = _missing("repetition_error", num_workers, load, num_missing)
    if n % d:
        raise ValueError(
            f"`repetition_error` needs groups of equal size; got n = {n}, d = {d}. Choose a load "
            "that divides n."
        )
    if one_step:
        return (n - d) * s / ((n - s) * d * (n - 1)) if n > 1 else 0.0
    return math.comb(n - d, s - d) / math.comb(n, s) if s >= d else 0.0


def bernoulli_error(num_workers: int, load: int, num_missing: int) -> float:
    """Expected one-step error of the Bernoulli code, partitions that nobody drew left out.

    A partition's weight in the decoded sum is `n / (r d)` times a binomial of r = n - s draws of
    d / n: mean 1, variance `(n - d) / (d (n - s))`. Optimal decoding errs by less.

    Args:
        num_workers: n.
        load: d, expected.
        num_missing: s, from 0 to n - 1.

    Returns:
        The expected error over draws of the code.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> round(bernoulli_error(60, 2, 6), 3)
        0.537
    """
    n, d, s = _missing("bernoulli_error", num_workers, load, num_missing)
    return (n - d) / (d * (n - s))


def expander_error_bound(
    num_workers: int, load: int, num_missing: int, second_eigenvalue: float | int
) -> float:
    """What an expander code errs by at most, whichever s workers are missing.

    `||a B - 1|| <= (lambda / d) sqrt(n s / (n - s))` for one-step decoding, and optimal decoding
    is no worse; as an error, its square over n: `(lambda / d)^2 s / (n - s)`.

    Args:
        num_workers: n.
        load: d.
        num_missing: s, from 0 to n - 1.
        second_eigenvalue: lambda, see `second_eigenvalue`.

    Returns:
        The bound on `code.decoding_error`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> round(expander_error_bound(60, 5, 12, second_eigenvalue=4.0), 3)
        0.16

    References:
        Raviv, Tamo, Tandon and Dimakis, 2020, theorem on normalised adjacency matrices.
    """
    call = "expander_error_bound"
    n, d, s = _missing(call, num_workers, load, num_missing)
    size = real(call, "second_eigenvalue", second_eigenvalue, low=0, high=d, cure="It is below d.")
    return (size / d) ** 2 * s / (n - s)


def second_eigenvalue(code: Code) -> float:
    """Lambda of an `expander` code: the second largest modulus of its graph's eigenvalues.

    Args:
        code: made by `expander`.

    Returns:
        Lambda, from about `2 sqrt(d - 1)` (the best there is) to d (not an expander).

    Raises:
        ValueError: The code is not that of a graph.

    Example:
        >>> round(second_eigenvalue(expander(6, 5)), 6)  # the complete graph
        1.0
    """
    B = code.encoding_matrix[..., 0] * code.load
    if code.num_workers != code.num_partitions or not np.allclose(B, B.T):
        raise ValueError(
            f"`second_eigenvalue` needs a code made by `expander`; got {code!r}. For other codes "
            "measure code.decoding_error."
        )
    return _second(B)


def _missing(call: str, num_workers: int, load: int, num_missing: int) -> tuple[int, int, int]:
    n = integer(call, "num_workers", num_workers, 1, None, "Count the workers.")
    d = integer(call, "load", load, 1, n, "Choose a load of at most n.")
    s = integer(call, "num_missing", num_missing, 0, n - 1, "Somebody must answer.")
    return n, d, s


def _second(adjacency: Float[np.ndarray, "vertices vertices"]) -> float:
    return float(np.sort(np.abs(np.linalg.eigvalsh(adjacency)))[-2])


def _expander_graph(call: str, n: int, d: int, seed: int) -> Float[np.ndarray, "n n"]:
    """The best expander of several random d-regular simple graphs."""
    if n * d % 2:
        raise ValueError(
            f"`{call}` needs a {d}-regular graph on {n} vertices, which exists for an even product "
            f"only; got {n} x {d}. Use {d - 1} or {d + 1}, or an even number of workers."
        )
    rng = np.random.default_rng(integer(call, "seed", seed, 0, None, "Give an integer."))
    graphs = [_regular_graph(rng, n, d) for _ in range(_GRAPHS if d < n - 1 else 1)]
    return min(graphs, key=_second) if n > 1 else graphs[0]


def _regular_graph(rng: np.random.Generator, n: int, d: int) -> Float[np.ndarray, "n n"]:
    """A random d-regular simple graph: pair stubs, keep what fits, pair the rest again."""
    if d > (n - 1) // 2:  # the complement is sparser, and easier to draw
        return 1 - np.eye(n) - _regular_graph(rng, n, n - 1 - d)
    while True:
        edges = np.zeros((n, n), bool)
        stubs = np.repeat(np.arange(n), d)
        for _ in range(100):
            rng.shuffle(stubs)
            left = []
            for a, b in stubs.reshape(-1, 2).tolist():
                if a == b or edges[a, b]:
                    left += [a, b]
                else:
                    edges[a, b] = edges[b, a] = True
            stubs = np.array(left, int)
            if not stubs.size:
                return edges.astype(float)
