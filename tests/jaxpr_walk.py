"""Looking through a jaxpr, bodies included."""

from jax.extend.core import ClosedJaxpr, Jaxpr


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside its equations."""
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else [param]:
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from equations(inner)
