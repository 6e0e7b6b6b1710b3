"""The designs that a plan considers, as a few numbers each: only codes that are shown are made."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from jaxcode.codes import cyclic_mds, fractional_repetition, polynomial, uncoded
from jaxcode.designs import Conditions, Design, Form, Method, message
from jaxcode.expectation import Need, Task

# Fragments and their worst condition number: 1e3 loses about 1e-4 of a float32 gradient.
_FRAGMENTS, _CONDITION = 8, 1e3
# The largest n of a code that is not a block code, for what a float32 loses.
_SUM_WORKERS, _LOST = 24, 1e-3
# Of up to so many workers every number is tried as the number to drop; beyond, steps by a factor.
_EVERY, _STEP = 64, 1.25

Kind = Literal["blocks", "sum", "first"]


class Candidate(NamedTuple):
    """A design, before it is made.

    Attributes:
        kind: "blocks", "sum" (a code whose workers hold several partitions) or "first" (no code,
            and only the first to arrive).
        num_workers: n.
        num_stragglers: s.
        num_fragments: m.
        copies: how often the batch is computed.
        method: what is sent.
        forms: the form each leaf is sent in.
        wait_for: arrivals, of "first".
        task: what the expected seconds depend on.
    """

    kind: Kind
    num_workers: int
    num_stragglers: int
    num_fragments: int
    copies: float
    method: Method
    forms: dict[str, Form]
    wait_for: int | None
    task: Task

    @property
    def exact(self) -> bool:
        """Whether a step waits until the gradient is exact."""
        return self.wait_for is None

    @property
    def tolerated(self) -> int:
        """How many workers may be missing: approximately, those that are not waited for."""
        return self.num_stragglers if self.wait_for is None else self.num_workers - self.wait_for

    @property
    def redundant(self) -> bool:
        """Whether anything is computed twice."""
        return self.copies > 1

    def design(self) -> Design | None:
        """The design, or None where its code is not fit for float32 messages."""
        n, s, m = self.num_workers, self.num_stragglers, self.num_fragments
        if not self.redundant:
            code = uncoded(n)
        elif self.kind == "blocks":
            code = fractional_repetition(n, s, num_fragments=m)
        else:
            try:
                code = cyclic_mds(n, s) if m == 1 else polynomial(n, s, num_fragments=m)
            except ValueError:  # ill conditioned
                return None
            if code.float32_error > _LOST:
                return None
        return Design(code, method=self.method, wait_for=self.wait_for)


def candidates(setting: Conditions, num_workers: int, *, approximate: bool) -> list[Candidate]:
    """Every design considered: uncoded, blocks, sum codes where blocks compute more, the first."""
    found = [*_blocks(setting, num_workers), *_sums(setting, num_workers)]
    if approximate:
        found += _first(setting, num_workers)
    return found


def _messages(setting: Conditions, share: float) -> Iterator[tuple[Method, float, dict[str, Form]]]:
    """Dense messages, and factors where they are shorter."""
    rows = setting.rows(share)
    dense, forms = message(setting.leaves, "dense", rows)
    yield "dense", dense, forms
    factors, forms = message(setting.leaves, "factors", rows)
    if factors < dense:
        yield "factors", factors, forms


def _blocks(setting: Conditions, n: int) -> Iterator[Candidate]:
    """For every number k of groups, and every number of fragments: s is what is left."""
    for k in sorted({n // size for size in range(1, n + 1)}, reverse=True):
        size, larger = divmod(n, k)
        groups = tuple(x for x in ((size, k - larger), (size + 1, larger)) if x[1])
        for m in range(1, min(size, _FRAGMENTS) + 1):
            if _condition(size + (larger > 0), m) > _CONDITION:
                continue
            need = Need(groups, m)
            for method, whole, forms in _messages(setting, 1 / k):
                task = Task(1 / k, whole / m, m * k, need, setting.product(forms))
                yield Candidate("blocks", n, size - m, m, n / k, method, forms, None, task)


def _sums(setting: Conditions, n: int) -> Iterator[Candidate]:
    """Where d divides n, blocks compute as much, and decode whenever these do."""
    if n > _SUM_WORKERS:
        return
    whole, forms = message(setting.leaves, "dense", 1)
    for d in (d for d in range(2, n) if n % d):
        for m in range(1, min(d, _FRAGMENTS) + 1):
            need = Need(((n, 1),), n - d + m)
            task = Task(d / n, whole / m, n - d + m, need)
            yield Candidate("sum", n, d - m, m, float(d), "dense", forms, None, task)


def _first(setting: Conditions, n: int) -> Iterator[Candidate]:
    """No code, and some of the slowest dropped, up to a half."""
    for method, whole, forms in _messages(setting, 1 / n):
        for kept in (n - dropped for dropped in _dropped(n)):
            need = Need(((n, 1),), kept)
            task = Task(1 / n, whole, kept, need, setting.product(forms))
            yield Candidate("first", n, 0, 1, 1.0, method, forms, kept, task)


def _dropped(n: int) -> Iterator[int]:
    """How many to drop: any number; of many workers, each a quarter more than the last."""
    dropped = 1
    while 2 * dropped <= n:
        yield dropped
        dropped = dropped + 1 if n <= _EVERY else max(dropped + 1, round(_STEP * dropped))


def _condition(size: int, m: int) -> float:
    """Of the worst m members of a group, which are consecutive: rows are points on a circle."""
    code = fractional_repetition(size, size - m, num_fragments=m)
    return float(np.linalg.cond(code.coefficients[:m, 0]))
