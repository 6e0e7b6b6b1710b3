"""Training on a Ray cluster, with stragglers that are real: `Cluster`. Needs the extra ``ray``."""

from jaxcode.cluster.deadlines import AdaptiveDeadline
from jaxcode.cluster.faults import Fault, fail_at, parse_faults

try:
    from jaxcode.cluster.cluster import Cluster
    from jaxcode.cluster.display import live
    from jaxcode.cluster.history import History, StepReport
    from jaxcode.cluster.members import WorkerError
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError(
        '`jaxcode.cluster` needs Ray: pip install "jaxcode[ray]"', name="ray"
    ) from error

__all__ = [
    "AdaptiveDeadline",
    "Cluster",
    "Fault",
    "History",
    "StepReport",
    "WorkerError",
    "fail_at",
    "live",
    "parse_faults",
]
