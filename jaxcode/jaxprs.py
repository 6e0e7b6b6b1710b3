"""Reading and rewriting jaxprs: the one module that touches JAX's internals.

`Graph` is a jaxpr with its jit calls inlined and a map from each variable to the equation that
produces it. `Graph.expose` returns the same program with other outputs: any variable, also one
`Inside` the body of a scan or a remat, becomes an output, and what is no longer needed is dropped.
Rewriting the program instead of interpreting it leaves JAX's own evaluation, sharding and
differentiation rules in charge of every equation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import typeof
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, unmapped_aval
from jax.interpreters.partial_eval import dce_jaxpr

_JIT = {"jit", "pjit", "closed_call", "core_call"}
_KEEP_ZERO = {"broadcast_in_dim", "convert_element_type", "pvary", "pcast"}
_REMAT = {"remat", "remat2", "checkpoint"}


@dataclass(frozen=True, eq=False)
class Inside:
    """A value computed in the body of a scan (stacked over its iterations) or of a remat."""

    eqn: JaxprEqn
    value: "Var | Literal | Inside"

    @cached_property
    def aval(self) -> Any:
        """Shape and dtype as seen outside the equation."""
        if is_scan(self.eqn):
            return unmapped_aval(self.eqn.params["length"], 0, self.value.aval)
        return self.value.aval


Value = Var | Literal | Inside


def shape_of(value: Value) -> tuple[int, ...]:
    """The value's shape."""
    aval: Any = value.aval
    return tuple(aval.shape)


def dtype_of(value: Value) -> Any:
    """The value's dtype."""
    aval: Any = value.aval
    return aval.dtype


def is_scan(eqn: JaxprEqn) -> bool:
    """Whether the equation is a `jax.lax.scan`."""
    return eqn.primitive.name == "scan"


def is_remat(eqn: JaxprEqn) -> bool:
    """Whether the equation is a `jax.checkpoint`."""
    return eqn.primitive.name in _REMAT


def _without_names(jaxpr: Jaxpr, **changes: Any) -> Jaxpr:
    # Debug info counts inputs and outputs, which change here.
    return jaxpr.replace(**changes, debug_info=jaxpr.debug_info.with_unknown_names())


class Graph:
    """A jaxpr that can be asked where a value comes from."""

    def __init__(self, jaxpr: Jaxpr):
        """Inline the jit calls of ``jaxpr``."""
        # Effects on mutable references name the variables they are on, so those must stay.
        self.has_references = _has_references(jaxpr)
        if self.has_references:
            self.jaxpr, self._producers = jaxpr, {}
            return
        eqns, outvars = _inline(jaxpr.eqns, jaxpr.outvars, {})
        self.jaxpr = _without_names(jaxpr, eqns=eqns, outvars=outvars)
        self._producers = {var: (eqn, i) for eqn in eqns for i, var in enumerate(eqn.outvars)}
        self._bodies: dict[int, Graph] = {}

    def producer(self, value: Value) -> tuple[JaxprEqn | None, int]:
        """The equation that computes ``value`` and which of its outputs it is, or (None, 0)."""
        if not isinstance(value, Var):
            return None, 0
        return self._producers.get(value, (None, 0))

    def body(self, eqn: JaxprEqn) -> "Graph":
        """The graph of the body of a scan or remat equation of this graph."""
        if id(eqn) not in self._bodies:
            jaxpr = eqn.params["jaxpr"]
            self._bodies[id(eqn)] = Graph(jaxpr.jaxpr if is_scan(eqn) else jaxpr)
        return self._bodies[id(eqn)]

    def is_zero(self, value: Value) -> bool:
        """Whether ``value`` is zero by construction: a literal, or a broadcast one."""
        eqn, _ = self.producer(value)
        if eqn is not None and eqn.primitive.name in _KEEP_ZERO:
            return self.is_zero(eqn.invars[0])
        return isinstance(value, Literal) and not shape_of(value) and bool(value.val == 0)

    def expose(self, outputs: Sequence[Value]) -> Jaxpr:
        """The program with ``outputs`` as its outputs and nothing that they do not need."""
        if self.has_references:
            return self.jaxpr
        jaxpr = self._with_outputs(outputs)
        pruned, _ = dce_jaxpr(jaxpr, [True] * len(outputs), instantiate=True)
        return pruned

    def _with_outputs(self, outputs: Sequence[Value]) -> Jaxpr:
        unique = {id(value): value for value in outputs if isinstance(value, Inside)}
        new_vars = {key: Var(value.aval) for key, value in unique.items()}
        inside: dict[int, list[Inside]] = {}
        for value in unique.values():
            inside.setdefault(id(value.eqn), []).append(value)
        outer = [new_vars.get(id(value), value) for value in outputs]
        eqns = [
            self._extended(eqn, inside[id(eqn)], new_vars) if id(eqn) in inside else eqn
            for eqn in self.jaxpr.eqns
        ]
        return _without_names(self.jaxpr, eqns=eqns, outvars=outer)

    def _extended(self, eqn: JaxprEqn, wanted: list[Inside], new_vars: dict[int, Any]) -> JaxprEqn:
        body = self.body(eqn)
        jaxpr = body._with_outputs([*body.jaxpr.outvars, *(value.value for value in wanted)])
        closed = ClosedJaxpr(jaxpr, eqn.params["jaxpr"].consts) if is_scan(eqn) else jaxpr
        outvars = [*eqn.outvars, *(new_vars[id(value)] for value in wanted)]
        return eqn.replace(params={**eqn.params, "jaxpr": closed}, outvars=outvars)


def _has_references(jaxpr: Jaxpr) -> bool:
    values = (value for eqn in jaxpr.eqns for value in (*eqn.invars, *eqn.outvars))
    return any(hasattr(value.aval, "inner_aval") for value in values)


def _can_inline(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _JIT:
        return False
    jaxpr: Any = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if isinstance(jaxpr, ClosedJaxpr) and jaxpr.consts:
        return False
    if _has_references(getattr(jaxpr, "jaxpr", jaxpr)):
        return False
    # A user's sharding on a jit belongs to the call, and would be lost with it.
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


def _inline(
    eqns: list[JaxprEqn], outvars: list[Any], names: dict[Any, Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Replace jit calls by their bodies, with fresh variables: bodies are shared between calls."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    result: list[JaxprEqn] = []
    for eqn in eqns:
        invars = [read(atom) for atom in eqn.invars]
        if _can_inline(eqn):
            body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            body = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            inner, outs = _inline(
                body.eqns, body.outvars, dict(zip(body.invars, invars, strict=True))
            )
            result += inner
            names.update(zip(eqn.outvars, outs, strict=True))
        else:
            fresh = [Var(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, fresh, strict=True))
            result.append(eqn.replace(invars=invars, outvars=fresh))
    return result, [read(atom) for atom in outvars]


def varying_axes(array: Any) -> frozenset[Any]:
    """Manual mesh axes over which ``array`` is tracked to differ; empty where nothing is tracked.

    Tracking is on inside `jax.shard_map` (``check_vma``), and off under vmap and pmap.
    """
    aval = typeof(array)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10; before that, `vma`
    return aval.vma if manual is None else manual.varying
