"""Reports of steps that nobody took."""

import numpy as np

from jaxcode.cluster.history import StepReport


def report(step, arrivals, **changes):
    n = len(arrivals)
    fields = {
        "step": step,
        "loss": 1.0 / (step + 1),
        "metrics": None,
        "survivors": np.isfinite(arrivals),
        "late": {},
        "dropped": [],
        "rejected": {},
        "error": 0.0,
        "skipped": False,
        "missing": [],
        "bytes_in": [10] * n,
        "bytes_out": [20] * n,
        "driver_bytes": (0, 0),
        "seconds": {"step": 0.5, "wait": 0.25},
        "arrivals": list(arrivals),
        "attempts": 1,
        "restarts": [],
    }
    return StepReport(**fields | changes)
