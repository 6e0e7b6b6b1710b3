"""Checkpoints of a cluster: which array differs, and whose directory it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("ray")

from jaxcode.cluster import states  # noqa: E402
from jaxcode.cluster.replica import State  # noqa: E402
from jaxcode.cluster.states import Writer, read_state  # noqa: E402
from jaxcode.cluster.wire import Layout  # noqa: E402


def state(width=3, optimizer=optax.adam):
    params = {"kernel": jnp.arange(2.0 * width).reshape(2, width), "bias": jnp.ones(width)}
    return State(params, optimizer(0.1).init(params))


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a state as a cluster does at a step."""

    def write(tree, step):
        arrays = leaves(tree)
        layout = Layout.of(arrays)
        monkeypatch.setattr(states, "fetch_state", lambda *_: (step, layout, layout.join(arrays)))
        writer = Writer(tmp_path)
        writer.start([], None, {})
        writer.finish()
        return tmp_path

    return write


def test_what_was_written_is_read(written):
    step, arrays = read_state(written(state(), 7), state())
    assert step == 7
    assert all(np.array_equal(x, y) for x, y in zip(arrays, leaves(state()), strict=True))


def test_the_array_that_differs_is_named(written):
    directory = written(state(), 7)
    with pytest.raises(ValueError, match=r"\.params\['bias'\] is \[3\] float32, needs \[4\]"):
        read_state(directory, state(4))
    with pytest.raises(ValueError, match=r"one more array is .*, needs absent"):
        read_state(directory, state(optimizer=optax.sgd))
    with pytest.raises(ValueError, match=r"\.opt_state\[0\]\.\w+.* is absent, needs"):
        read_state(written(state(optimizer=optax.sgd), 8), state())


def test_another_trainings_directory_is_not_written_to(written):
    directory = written(state(), 7)
    written(state(), 9)
    with pytest.raises(OSError, match="holds step 9 of another training: give another directory"):
        written(state(), 8)
    assert read_state(directory, state())[0] == 9
    written(state(), 9)  # a step that was taken again
