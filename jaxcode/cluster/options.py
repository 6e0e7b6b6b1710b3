"""Checks of a cluster's arguments, and the code it has for another number of workers."""

from typing import Any

from jaxcode.code import Code
from jaxcode.codes import fractional_repetition, uncoded

CLOSED = (
    "the cluster is closed, and its workers are gone: take `params` before that, or go on from a "
    "checkpoint with `Cluster.resume(directory, ...)`"
)
TOPOLOGIES = ("peers", "master")
UNDECODABLE = ("approximate", "skip", "raise")


def resized(code: Code, n: int) -> Code:
    """The same construction for n workers, with the same s and m, where there is one.

    Example:
        >>> resized(fractional_repetition(4, 1), 6)
        <Code fractional_repetition [n=6, k=3, s=1, m=1]>
    """
    s, m = code.num_stragglers, code.num_fragments
    if code.name == "uncoded":
        return uncoded(n)
    if code.name == "fractional_repetition":
        return fractional_repetition(n, s, num_fragments=m)
    raise ValueError(
        f"`resize` needs a code for {n} workers, since {code.name!r} may not have one like {code!r}"
        ". Give code=."
    )


def check(
    call: str, code: Any, loss: Any, data: Any, method: str, topology: str, undecodable: str
) -> None:
    """Raise a ValueError where arguments are wrong, or do not fit each other."""
    if not isinstance(code, Code):
        raise ValueError(
            f"`{call}` needs a code; got {code!r}. Make one, such as fractional_repetition(4, 1)."
        )
    for name, value in (("loss", loss), ("data", data)):
        if not callable(value):
            raise ValueError(f"`{call}` needs {name} to be a function; got {value!r}. Give one.")
    choices = {
        "method": (method, ("dense", "factors")),
        "topology": (topology, TOPOLOGIES),
        "on_undecodable": (undecodable, UNDECODABLE),
    }
    for name, (choice, valid) in choices.items():
        if choice not in valid:
            raise ValueError(
                f"`{call}` needs {name} to be one of {', '.join(valid)}; got {choice!r}. "
                "Choose one."
            )
    if method == "factors" and code.block is None:
        raise ValueError(
            f'`{call}` needs a block code for method="factors"; got {code!r}. Use '
            'fractional_repetition, or method="dense".'
        )
