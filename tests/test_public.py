"""What the package promises to importers: names, docstrings, and what it leaves unloaded."""

import inspect
import subprocess
import sys

import pytest

import jaxcode

PROBE = """
import sys
import jaxcode
heavy = {"jax", "ray", "matplotlib", "flax", "orbax", "sklearn", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in jaxcode.__all__:
    getattr(jaxcode, name)
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
heavy -= {"jax"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import jax
assert not jax.config.jax_enable_x64
"""


def test_importing_starts_and_loads_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", jaxcode.__all__)
def test_every_public_name_is_documented(name):
    public = getattr(jaxcode, name)
    text = inspect.unwrap(public).__doc__ or ""
    # A class made by a function that shows the example points to that function.
    assert ">>>" in text or "see `" in text or "Attributes:" in text, name
    assert text.splitlines()[0].rstrip().endswith((".", "`.")), name


def test_all_lists_every_name():
    assert sorted(jaxcode.__all__) == list(jaxcode.__all__)
    assert all(hasattr(jaxcode, name) for name in jaxcode.__all__)
    assert set(jaxcode.__all__) <= set(dir(jaxcode))
    with pytest.raises(AttributeError, match="no attribute 'encod'"):
        _ = jaxcode.encod
