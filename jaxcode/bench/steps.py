"""Steps to time: one problem, dealt out to workers on a mesh or on one device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcode.aggregate import coded_value_and_grad
from jaxcode.bench.models import Problem, perceptron
from jaxcode.codes import Code, fractional_repetition
from jaxcode.partitions import Partitions, assign
from jaxcode.worker import Method

AXIS = "workers"


def cpu_device() -> Any:
    """Return the device of what runs on one: the first CPU, or the first there is.

    Example:
        >>> cpu_device().platform
        'cpu'
    """
    return _cpu_devices()[0]


def mesh_devices() -> Sequence[Any]:
    """Return the devices of what runs on a mesh: several of the default kind, or else all CPUs.

    Example:
        >>> len(mesh_devices()) >= 1
        True
    """
    devices = jax.devices()
    return devices if len(devices) > 1 else _cpu_devices()


def _cpu_devices() -> Sequence[Any]:
    try:
        return jax.devices("cpu")
    except RuntimeError:  # the user allows JAX other platforms only
        return jax.devices()


def design(code: Code) -> str:
    """Return a code's numbers as the table shows them.

    Example:
        >>> design(fractional_repetition(8, 1))
        'n=8 s=1 m=1'
    """
    return f"n={code.num_workers} s={code.num_stragglers} m={code.num_fragments}"


def some_missing(code: Code) -> Any:
    """Return the decoding weights of a step whose first s workers are missing.

    Example:
        >>> some_missing(fractional_repetition(4, 1)).tolist()
        [[0.0, 1.0, 1.0, 0.0]]
    """
    arrived = np.arange(code.num_workers) >= code.num_stragglers
    return code.decoding_weights(arrived).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, who computes what of it, and where.

    Attributes:
        problem: with the whole batch.
        code: a block code with one fragment.
        mesh: the workers' devices; None for all workers on one.
    """

    problem: Problem
    code: Code
    mesh: Mesh | None

    @classmethod
    def on_mesh(cls, layers: Sequence[int], rows: int) -> "Setting":
        """A perceptron with one worker a device, or eight on a single one.

        Args:
            layers: widths.
            rows: examples of each block.
        """
        devices = mesh_devices()
        code = fractional_repetition(len(devices) if len(devices) > 1 else 8, 1)
        problem = perceptron(layers, rows * code.num_partitions, devices[0])
        mesh = jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)
        return cls(problem, code, mesh)

    def on_one_device(self) -> "Setting":
        """The same with all workers on the first CPU."""
        params, batch = jax.device_put((self.problem.params, self.problem.batch), cpu_device())
        return Setting(self.problem._replace(params=params, batch=batch), self.code, None)

    @property
    def rows(self) -> int:
        """Examples of the whole batch."""
        return len(self.problem.batch["y"])

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def name(self) -> str:
        """The code, the rows, and where it runs."""
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"{design(self.code)}, {self.rows} rows, {devices}"

    def coded(self, method: Method) -> Callable[[], Any]:
        """A coded step with s workers missing; ``(value, grads)``."""
        step = coded_value_and_grad(self.problem.loss, self.code, method=method, mesh=self.mesh)
        params, parts = self._replicated(self.problem.params), self._parts()
        weights = some_missing(self.code)
        return lambda: step(params, parts, weights)

    def uncoded(self, *, scale: Literal["gradient", "loss"]) -> Callable[[], Any]:
        """The same gradients of the same partitions, summed over the devices as they are.

        Args:
            scale: what is multiplied by a worker's share of the mean: its gradient, as
                `jax.lax.pmean` does, or its loss, which saves a pass over the gradient.
        """
        loss, replicated, spread = self.problem.loss, PartitionSpec(), PartitionSpec(AXIS)

        def one(params: Any, examples: Any, share: Any) -> Any:
            if scale == "loss":
                return jax.value_and_grad(lambda params: loss(params, examples) * share)(params)
            pair = jax.value_and_grad(loss)(params, examples)
            return jax.tree.map(lambda x: x * share, pair)

        def body(params: Any, examples: Any, share: Any) -> Any:
            params = jax.tree.map(lambda x: jax.lax.pcast(x, AXIS, to="varying"), params)
            if len(share) == 1:
                mine = one(params, jax.tree.map(lambda x: x[0], examples), share[0])
            else:
                each = jax.vmap(one, (None, 0, 0))(params, examples, share)
                mine = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
            return jax.lax.psum(mine, AXIS)

        specs = (replicated, spread, spread)
        step = jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=replicated))
        parts = self._parts()
        examples = jax.tree.map(lambda x: x[:, 0], parts.examples)
        # A block's share of the mean is divided among the workers that compute it.
        group = np.bincount(self.code.partitions[:, 0])[self.code.partitions[:, 0]]
        share = self._placed(np.sum(parts.share[:, 0], axis=1) / np.float32(group), spread)
        params = self._replicated(self.problem.params)
        return lambda: step(params, examples, share)

    def _parts(self) -> Partitions:
        batch = jax.tree.map(np.asarray, self.problem.batch)
        return self._placed(assign(batch, self.code), PartitionSpec(AXIS))

    def _replicated(self, tree: Any) -> Any:
        return self._placed(tree, PartitionSpec())

    def _placed(self, tree: Any, spec: PartitionSpec) -> Any:
        where = cpu_device() if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.device_put(tree, where)
