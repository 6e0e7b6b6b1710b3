"""Data sets: what is accepted, how it is split and scaled. What is refused is in test_cli."""

import numpy as np
import pytest

from jaxcode.train.datasets import check, load

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 3, 2))
Y = RNG.integers(0, 3, 50)


def saved(tmp_path, x, y, **others):
    np.savez(tmp_path / "data.npz", x=x, y=y, **others)
    return str(tmp_path / "data.npz")


def test_digits():
    data = load(seed=0)
    assert data.name == "digits"
    assert data.num_classes == 10
    assert len(data.y_train) + len(data.y_test) == 1797
    assert data.digest == load(seed=1).digest


def test_split_and_scale(tmp_path):
    data = load(saved(tmp_path, X, Y))
    assert data.x_train.shape == (40, 6)
    assert data.x_test.shape == (10, 6)
    np.testing.assert_allclose(data.x_train.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(data.x_train.std(0), 1, atol=1e-6)
    assert abs(data.x_test.mean()) > 1e-3  # not scaled by its own statistics


def test_the_seed_draws_the_split(tmp_path):
    path = saved(tmp_path, X, Y)
    first, again, other = load(path, seed=0), load(path, seed=0), load(path, seed=1)
    np.testing.assert_array_equal(first.x_train, again.x_train)
    assert not np.array_equal(first.x_train, other.x_train)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float32, np.float16])
def test_label_types(dtype, tmp_path):
    data = load(saved(tmp_path, X, Y.astype(dtype)))
    np.testing.assert_array_equal(data.y_train, load(saved(tmp_path, X, Y)).y_train)
    assert data.y_train.dtype == np.int32


def test_boolean_labels_and_integer_features(tmp_path):
    data = load(saved(tmp_path, RNG.integers(0, 255, (50, 4)).astype(np.uint8), Y > 0))
    assert data.num_classes == 2
    assert data.x_train.dtype == np.float32


def test_labels_need_not_be_consecutive(tmp_path):
    data = load(saved(tmp_path, X, np.array([3, 70, 1000])[Y]))
    assert data.num_classes == 3
    assert set(data.y_train.tolist()) == {0, 1, 2}


def test_one_number_an_example_and_other_arrays(tmp_path):
    data = load(saved(tmp_path, X[:, 0, 0], Y, notes=np.arange(3)))
    assert data.x_train.shape == (40, 1)


def test_a_constant_feature_becomes_zero_not_noise(tmp_path):
    x = X.copy()
    x[:, 0, 0] = 0.1  # the mean of many 0.1 is not 0.1
    data = load(saved(tmp_path, x, Y))
    assert not data.x_train[:, 0].any()
    assert not data.x_test[:, 0].any()


def test_large_offsets_keep_their_digits(tmp_path):
    shifted, plain = load(saved(tmp_path, X + 1e6, Y)), load(saved(tmp_path, X, Y))
    np.testing.assert_allclose(shifted.x_train, plain.x_train, atol=1e-6)


def test_the_digest_tells_data_apart(tmp_path):
    plain = load(saved(tmp_path, X, Y)).digest
    assert load(saved(tmp_path, X, Y)).digest == plain
    assert load(saved(tmp_path, X.reshape(50, 6), Y)).digest != plain
    assert load(saved(tmp_path, X, 2 - Y)).digest != plain


def test_check_keeps_the_features_as_they_are():
    features, labels = check(X.astype(np.float32), Y.astype(float))
    assert features.dtype == np.float32
    assert labels.dtype == np.int64


def test_objects_are_refused_for_what_they_are(tmp_path):
    path = saved(tmp_path, X, np.array([{}] * 50, dtype=object))
    with pytest.raises(ValueError, match="holds Python objects, which only pickle reads"):
        load(path)
