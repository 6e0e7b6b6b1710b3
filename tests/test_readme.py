"""The README's diff is a diff: both sides run, and train to the same parameters."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from problems import DEVICE, relative_error

README = (Path(__file__).parent.parent / "README.md").read_text()


def sides():
    block = re.search(r"<!-- diff -->\n```diff\n(.*?)```", README, re.DOTALL).group(1)
    lines = block.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    changed = [line for line in lines if line.startswith("+") and line[1:].strip()]
    return "\n".join(before), "\n".join(after), changed


def start():
    """Everything the diff takes for granted: a model, a loss, batches, and who arrived."""
    model = nn.Dense(10)
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))

    def loss(params, batch):
        logits = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    return {
        "state": TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)),
        "loss": loss,
        "mean_loss": lambda params, batch: loss(params, batch).mean(),
        "batches": [
            {"x": rng.normal(size=(20, 64)).astype(np.float32), "y": rng.integers(0, 10, 20)}
            for _ in range(5)
        ],
        "arrived": lambda: np.arange(8) != rng.integers(8),
    }


def test_the_six_line_diff():
    before, after, changed = sides()
    assert len(changed) == 6
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain, coded = start(), start()
        exec(before, plain)
        exec(after, coded)
    assert relative_error(coded["state"].params, plain["state"].params) < DEVICE
    assert relative_error(plain["state"].params, start()["state"].params) > 1e-2  # it trained


@pytest.mark.parametrize("part", ["support table", "benchmark"])
def test_generated_parts_are_there(part):
    found = re.search(rf"<!-- {part} -->\n(.+?)\n<!-- /{part} -->", README, re.DOTALL)
    assert found, f"the {part} is missing from the README"
    assert found.group(1).count("\n|") >= 4


def test_relative_links_and_images_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (root / target).exists(), target
