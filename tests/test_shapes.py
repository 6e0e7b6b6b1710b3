"""Shapes of parameters from arrays, shapes, modules and files."""

import subprocess
import sys
import zipfile

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
    half = jax.numpy.zeros((6, 4), "bfloat16")  # stored as raw bytes, two a number
    save(path, w=half, b=np.zeros(4))
    expected = {"w": Leaf((6, 4), 2), "b": Leaf((4,), 8)}
    assert leaf_shapes(path) == leaf_shapes(str(path)) == expected
    assert communication_load(uncoded(2), path).total == 28


def test_a_file_of_other_things_is_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", w=np.zeros(3), o=np.array([{}], object))
    with pytest.raises(ValueError, match="arrays of numbers; got object at o"):
        leaf_shapes(tmp_path / "objects.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"cannot read .*one\.npy"):
        leaf_shapes(tmp_path / "one.npy")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("readme.txt", "weights of a model")
    with pytest.raises(ValueError, match="needs an .npz file of arrays"):
        leaf_shapes(tmp_path / "text.npz")


def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path):
    path = tmp_path / "model.npz"
    np.savez_compressed(path, w=np.random.default_rng(0).normal(size=(20, 20)))
    whole = path.read_bytes()
    refusals = []
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            leaf_shapes(path)
        except ValueError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < len(whole) // 7  # damage among the numbers is not looked for
    assert all(line.startswith("`leaf_shapes` needs") for line in refusals)
    assert not any("\n" in line for line in refusals)


class Described:
    def __init__(self, shape, dtype=None):
        self.shape = shape
        if dtype is not None:
            self.dtype = dtype


class Foreign:  # a dtype of another library
    itemsize = 2


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [(None, 4), (np.float16, 2), ("float64", 8), (jax.numpy.bfloat16, 2), (Foreign(), 2)],
)
def test_types_however_named(dtype, itemsize):
    assert leaf_shapes(Described((3, 4), dtype)) == {"": Leaf((3, 4), itemsize)}


def test_leaves_come_back_as_they_are():
    leaves = leaf_shapes({"a": [np.zeros((3, 4), np.float16), (2, 2)], "b": np.zeros(4)})
    assert leaf_shapes(leaves) == leaves


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (Described(None), "got None at the top"),
        ({"w": Described(3)}, "got 3 at w"),
        ({"w": Described((None, 3))}, r"none negative; got \(None, 3\) at w"),
        ({"w": Described((-1, 3))}, r"got \(-1, 3\) at w"),
        ({"w": [(3, 4), (-1, 3)]}, r"got \(-1, 3\) at w/1"),
        ({"w": (2**40, 2**40)}, r"at most 2\*\*53 numbers; got about 2\*\*80 at w"),
        ({"w": (10**400, 2)}, r"at most 2\*\*53 numbers"),
        ({"w": np.array([{}], object)}, "arrays of numbers; got object at w"),
        ({"w": np.array("kernel")}, "arrays of numbers; got <U6 at w"),
        ({"a/b": (2,), "a": {"b": (3,)}}, "two leaves at a/b"),
        ({0: (2,), "0": (3,)}, "two leaves at 0"),
        ({"w": {3, 4}}, "got set at w"),
        ({"w": np.ndarray}, "got type at w"),
        (b"model.npz", "got bytes at the top"),
    ],
)
def test_shapes_refuse(params, message):
    with pytest.raises(ValueError, match=f"`leaf_shapes` needs .*{message}"):
        leaf_shapes(params)


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
