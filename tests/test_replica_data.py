"""What a replica makes of batches and losses that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from cluster_problem import OPTIMIZER, ROWS, data, mean, params, uneven

pytest.importorskip("ray")

from jaxcode.cluster.replica import Replica, Training, num_rows  # noqa: E402
from jaxcode.codes import fractional_repetition  # noqa: E402

PAIRS = fractional_repetition(4, 1)


def training(loss=mean, source=data):
    return Training(loss, source, params(), OPTIMIZER)


@pytest.mark.parametrize(
    "batch",
    [
        (),
        (np.zeros((0, 3)),),
        (np.float32(1),),
        (np.zeros((3, 2)), np.zeros(4)),
        {"x": np.zeros((3, 2)), "scale": np.float32(1)},
    ],
    ids=str,
)
def test_batches_without_a_common_length(batch):
    with pytest.raises(ValueError, match=r"`data\(1, 5\)` needs to return arrays with one common"):
        num_rows(batch, 1, 5)


def test_a_batch_that_grows():
    def growing(block, step):
        return tuple(np.concatenate([x] * (1 + step)) for x in data(block, step))

    replica = Replica(training(source=growing), PAIRS, ROWS)
    assert replica.compute(0).finite
    replica.skip((0, 1))
    replica.commit((0, 1))
    with pytest.raises(ValueError, match=r"`data\(0, 1\)` needs at most the 16 .* got 32"):
        replica.compute(int(np.flatnonzero(PAIRS.block == 0)[0]))


def test_a_mean_of_a_shorter_batch_is_refused():
    replica = Replica(training(source=uneven), PAIRS, ROWS)
    with pytest.raises(ValueError, match="return one value an example"):
        replica.compute(int(np.flatnonzero(PAIRS.block == 1)[0]))


def test_a_loss_that_is_not_finite_is_reported():
    def diverged(params, batch):
        return mean(params, batch) * jnp.inf

    replica = Replica(training(diverged), PAIRS, ROWS)
    assert not replica.compute(0).finite
