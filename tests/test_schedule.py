"""The schedule: pure in the seed and the step, exactly s missing, every example once an epoch."""

import numpy as np
import pytest

from jaxcode.train.schedule import BLOCK, MODELS, batch_indices, round_at

STEPS = [0, 1, 2, BLOCK - 1, BLOCK, 5 * BLOCK + 3]


def test_an_epoch_has_every_example_once():
    epochs = [
        np.concatenate([batch_indices(12, 4, seed=0, step=3 * epoch + i) for i in range(3)])
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert not np.array_equal(*epochs)


def test_a_batch_depends_on_seed_and_step_alone():
    forwards = [batch_indices(50, 8, seed=3, step=step).tolist() for step in range(30)]
    backwards = [batch_indices(50, 8, seed=3, step=step).tolist() for step in reversed(range(30))]
    assert forwards == backwards[::-1]
    assert forwards[0] != batch_indices(50, 8, seed=4, step=0).tolist()


def test_a_batch_may_be_all_of_the_data():
    assert sorted(batch_indices(5, 5, seed=0, step=9)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("n", "s"), [(8, 1), (8, 0), (5, 3), (1, 0)])
def test_exactly_s_are_missing(model, n, s):
    for step in STEPS:
        arrived = round_at(model, n, s, seed=0, step=step)
        assert (~arrived.survivors).sum() == (0 if model == "none" else s)
        waited_for = arrived.latency[arrived.survivors]
        assert arrived.elapsed == waited_for.max()
        assert (arrived.latency[~arrived.survivors] >= arrived.elapsed).all()


@pytest.mark.parametrize("model", MODELS)
def test_a_round_depends_on_seed_and_step_alone(model):
    forwards = [round_at(model, 6, 2, seed=1, step=step).latency.tolist() for step in STEPS]
    backwards = [round_at(model, 6, 2, seed=1, step=step).latency.tolist() for step in STEPS[::-1]]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"fixed", "none"}))
def test_everybody_is_missing_sometimes(model):
    counts = sum(~round_at(model, 6, 1, seed=0, step=step).survivors for step in range(BLOCK))
    assert counts.min() > BLOCK / 20


def test_fixed_is_the_last_workers():
    for step in STEPS:
        survivors = round_at("fixed", 5, 2, seed=0, step=step).survivors
        assert survivors.tolist() == [True, True, True, False, False]


def test_bursty_stragglers_stay():
    """A worker that was missing is missing again far more often than under `uniform`."""

    def repeated(model):
        rounds = [round_at(model, 8, 1, seed=0, step=step).survivors for step in range(400)]
        missing = np.argmin(rounds, axis=1)
        return (missing[1:] == missing[:-1]).mean()

    assert repeated("bursty") > 2 * repeated("uniform")
