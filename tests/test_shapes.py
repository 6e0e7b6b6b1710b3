"""Shapes of parameters from arrays, shapes, modules and files."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import linen, nnx

from jaxcode.codes import uncoded
from jaxcode.load import communication_load
from jaxcode.shapes import Leaf, leaf_shapes


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def test_a_module_has_its_parameters_and_nothing_else():
    assert leaf_shapes(Net()) == {
        "first/bias": Leaf((3,), 4),
        "first/kernel": Leaf((5, 3), 4),
        "norm/bias": Leaf((3,), 4),
        "norm/scale": Leaf((3,), 4),
    }
    assert leaf_shapes(nnx.state(Net(), nnx.Param)) == leaf_shapes(Net())


def test_linen_variables():
    variables = jax.eval_shape(
        lambda: linen.Dense(3).init(jax.random.key(0), np.zeros((1, 5), np.float32))
    )
    assert leaf_shapes(variables) == {
        "params/kernel": Leaf((5, 3), 4),
        "params/bias": Leaf((3,), 4),
    }


def test_shapes_stand_for_arrays():
    assert leaf_shapes((3, 4)) == {"": Leaf((3, 4), 4)}
    assert leaf_shapes({"a": [3, 4], "b": (np.int64(5),), "c": [(2, 2), (3,)]}) == {
        "a": Leaf((3, 4), 4),
        "b": Leaf((5,), 4),
        "c/0": Leaf((2, 2), 4),
        "c/1": Leaf((3,), 4),
    }
    assert leaf_shapes({"a": 2.5, "b": True, "none": None, "empty": ()}) == {
        "a": Leaf((), 4),
        "b": Leaf((), 4),
    }
    assert Leaf((), 4).matrix == (1, 1)
    assert Leaf((5,), 4).matrix == (5, 1)
    assert Leaf((5, 2, 3), 4).matrix == (5, 6)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_is_read_by_its_headers(tmp_path, save):
    path = tmp_path / "model.npz"
    save(path, w=np.zeros((6, 4), np.float16), b=np.zeros(4), o=np.array([{}], object))
    expected = {"w": Leaf((6, 4), 2), "b": Leaf((4,), 8), "o": Leaf((1,), 8)}
    assert leaf_shapes(path) == leaf_shapes(str(path)) == expected
    assert communication_load(uncoded(2), path).total == 29


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_a_broken_file_is_one_line(tmp_path, content):
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="`leaf_shapes` needs an .npz file of arrays") as raised:
        leaf_shapes(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="it does not exist"):
        leaf_shapes(str(tmp_path / "none.npz"))


def test_theory_needs_no_accelerator_library():
    """A design is compared on a login node: neither JAX nor Flax is loaded for it."""
    program = (
        "import sys, jaxcode as jc; c = jc.fractional_repetition(8, 1); "
        "jc.communication_load(c, (30, 20)); jc.lower_bound(c, (30, 20), 2); jc.cyclic_mds(8, 2); "
        "loaded = {'jax', 'flax', 'optax', 'matplotlib', 'ray'} & set(sys.modules); "
        "assert not loaded, loaded; jc.encode; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
