"""Cyclic codes: worker i holds partitions i, ..., i + s, cyclically, and sends one combination.

Every n - s rows of B span a space that contains the all-ones vector, so any s workers may be
missing. They need no divisibility, but they sum over partitions, so gradients cannot be sent as
factors, and worst-case rounding grows with n and s.
"""

import numpy as np

from jaxcode.checks import code_sizes, integer
from jaxcode.code import Code
from jaxcode.conditioning import warn_if_lossy

# Draws are compared on up to this many sets of stragglers; the chosen one is measured on all.
_COMPARED = 20_000


def cyclic_repetition(
    num_workers: int, num_stragglers: int, *, seed: int = 0, num_draws: int = 10
) -> Code:
    """Tandon et al.'s random cyclic code, the best of several draws.

    H (s, n) is Gaussian with `H 1 = 0`. Row i of B has 1 at i, and at the s following places what
    makes `H B_i = 0`; then any n - s rows span the null space of H, which contains the ones
    (their Algorithm 2 and Theorem 3). A draw has a heavy tail of bad sets of stragglers, so the one
    with the mildest worst set is kept: `code.worst_condition` and `code.float32_error` report it.

    Choose it as the baseline of the literature. `fractional_repetition` computes and sends as much,
    and `cyclic_mds` is better conditioned up to s of 4 or so.

    Args:
        num_workers: n.
        num_stragglers: s, from 0 to n - 1.
        seed: of the draws.
        num_draws: how many to choose from. Few: a worse code. Many: slower to construct.

    Returns:
        The [n, n, s, 1] code of load s + 1.

    Raises:
        ValueError: An argument is out of range.

    Warns:
        UserWarning: The worst set of stragglers loses more than 1e-3 in float32.

    Example:
        >>> code = cyclic_repetition(6, 2, seed=1)
        >>> code
        <Code cyclic_repetition [n=6, k=6, s=2, m=1]>
        >>> code.partitions[5].tolist()
        [0, 1, 5]
        >>> bool(code.is_decodable([True, False, True, True, False, True]))
        True

    References:
        Tandon, Lei, Dimakis and Karampatziakis, "Gradient coding", 2017, Algorithm 2.
    """
    call = "cyclic_repetition"
    n, s, _ = code_sizes(call, num_workers, num_stragglers)
    seed = integer(call, "seed", seed, 0, None, "Give an integer.")
    draws = integer(call, "num_draws", num_draws, 1, None, "Draw once or more.")
    rng = np.random.default_rng(seed)
    codes = [Code(_drawn(rng, n, s), s, call) for _ in range(draws if 0 < s < n - 1 else 1)]
    code = min(codes, key=lambda code: code._amplification(_COMPARED))
    warn_if_lossy(call, code.float32_error, "Use fractional_repetition, which computes as much.")
    return code


def _drawn(rng: np.random.Generator, n: int, s: int) -> np.ndarray:
    checks = rng.normal(size=(s, n))
    checks[:, -1] = -checks[:, :-1].sum(1)
    held = (np.arange(n)[:, None] + np.arange(s + 1)) % n
    B = np.zeros((n, n))
    B[np.arange(n), held[:, 0]] = 1
    if s:
        systems = np.moveaxis(checks[:, held[:, 1:]], 1, 0)
        right = -checks[:, held[:, 0]].T[..., None]
        B[np.arange(n)[:, None], held[:, 1:]] = np.linalg.solve(systems, right)[..., 0]
    return B


def cyclic_mds(num_workers: int, num_stragglers: int) -> Code:
    """The cyclic MDS code, real for every n and s, in closed form.

    A trigonometric polynomial of degree (n - s - 1)/2 has at most n - s - 1 zeros, so the vectors
    of its values at n points of the circle are an MDS code. Row i of B is the code word that
    vanishes outside partitions i, ..., i + s:

        `B[i, p] = prod over those q of sin((theta_p - theta_q) / 2)`,  `theta_p = 2 pi p / n`.

    For odd n - s these are the polynomials of whole frequencies, which contain the constant: the
    real Reed-Solomon (BCH) code of Raviv et al. For even n - s the frequencies are halves and the
    constant is missing, but cos(theta / 2) is there: dividing entry p by `cos(theta_p / 2)`, at
    angles where that is not zero, puts the ones into the code and keeps it MDS.

    Choose it where n has no good divisor and s is at most 4: rounding costs 1e-6 or so. Sets of
    stragglers that lie together are its weakness, exponentially in s: put the workers of one rack
    at places that are not adjacent, or use blocks.

    Args:
        num_workers: n.
        num_stragglers: s, from 0 to n - 1.

    Returns:
        The [n, n, s, 1] code of load s + 1.

    Raises:
        ValueError: An argument is out of range.

    Warns:
        UserWarning: The worst set of stragglers loses more than 1e-3 in float32.

    Example:
        >>> code = cyclic_mds(5, 2)
        >>> code.encoding_matrix[0, :3, 0].round(3).tolist()
        [0.276, 0.447, 0.276]
        >>> bool(code.is_decodable([False, True, True, False, True]))
        True

    References:
        Raviv, Tamo, Tandon and Dimakis, "Gradient coding from cyclic MDS codes and expander
        graphs", 2020, for odd n - s.
    """
    call = "cyclic_mds"
    n, s, _ = code_sizes(call, num_workers, num_stragglers)
    even = (n - s) % 2 == 0
    angle = 2 * np.pi * (np.arange(n) + (0.5 if even and n % 2 == 0 else 0.0)) / n
    held = (np.arange(n)[:, None] + np.arange(s + 1)) % n
    zeros = (np.arange(n)[:, None] + np.arange(s + 1, n)) % n
    factors = np.sin((angle[held][:, :, None] - angle[zeros][:, None]) / 2)
    size = np.log(np.abs(factors)).sum(-1)
    entries = np.prod(np.sign(factors), axis=-1) * np.exp(size - size.max())
    if even:
        entries /= np.cos(angle[held] / 2)
    entries /= np.abs(entries).sum(1, keepdims=True) if even else entries.sum(1, keepdims=True)
    B = np.zeros((n, n))
    B[np.arange(n)[:, None], held] = entries
    code = Code(B, s, call)
    warn_if_lossy(
        call, code.float32_error, "Use fractional_repetition, which computes as much, or s <= 4."
    )
    return code
