"""Load a classification data set and refuse, in one line, whatever cannot be trained on.

A data set is arrays ``x`` and ``y`` of equal length. A fifth of the examples, drawn by the seed, is
held out for the test accuracy; the features are standardised with the training examples' statistics
alone.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from jaxcode.checks import first_line

HELD_OUT = 0.2


class Dataset(NamedTuple):
    """Standardised examples, split into training and test.

    Attributes:
        x_train: training features, float32.
        y_train: training classes, 0 .. num_classes - 1.
        x_test: held-out features, float32.
        y_test: held-out classes.
        num_classes: number of distinct labels in the file.
        name: what to call the data on a terminal.
        digest: SHA-256 of the arrays as they were loaded, to recognise them on resume.
    """

    x_train: Float32[np.ndarray, "train features"]
    y_train: Int32[np.ndarray, " train"]
    x_test: Float32[np.ndarray, "test features"]
    y_test: Int32[np.ndarray, " test"]
    num_classes: int
    name: str
    digest: str


def load(path: str | None = None, *, seed: int = 0) -> Dataset:
    """Load scikit-learn's bundled digits, or the arrays x and y of an ``.npz`` file.

    Args:
        path: the file; None for the digits. ``x`` is (examples, ...) numbers, flattened; ``y`` is
            (examples,) whole numbers from 0 up, in an integer, boolean or floating type.
        seed: draws the held-out fifth.

    Returns:
        The standardised `Dataset`.

    Raises:
        ValueError: the file or its arrays cannot be used; the message says which and why.

    Example:
        >>> data = load()
        >>> data.x_train.shape, data.x_test.shape, data.num_classes
        ((1438, 64), (359, 64), 10)
    """
    if path is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        name = "digits"
    else:
        x, y = read_npz(path)
        name = Path(path).name
    features, labels = check(x, y)
    train, test = _split(len(labels), seed)
    classes, indices = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"`y` needs at least two classes; got only the label {classes[0]}")
    standardised = _standardise(features, train)
    indices = indices.astype(np.int32)
    return Dataset(
        x_train=standardised[train],
        y_train=indices[train],
        x_test=standardised[test],
        y_test=indices[test],
        num_classes=len(classes),
        name=name,
        digest=_digest(x, y),
    )


def read_npz(path: str) -> tuple[Shaped[np.ndarray, "..."], Shaped[np.ndarray, "..."]]:
    """Read arrays ``x`` and ``y`` of an ``.npz`` file without unpickling anything.

    Args:
        path: the file.

    Returns:
        The two arrays as stored.

    Raises:
        ValueError: the file is missing, is no ``.npz`` file, is damaged or lacks an array.

    Example:
        >>> read_npz("absent.npz")
        Traceback (most recent call last):
        ...
        ValueError: `--data absent.npz`: there is no such file
    """
    if not Path(path).exists():
        raise ValueError(f"`--data {path}`: there is no such file")
    if not Path(path).is_file():
        raise ValueError(f"`--data {path}`: needs an .npz file; got a directory or a device")
    # Whatever goes wrong while a stranger's file is read is the file's fault: zip, zlib, header and
    # pickle troubles share no base class.
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:
            raise ValueError(
                f"`--data {path}`: needs an .npz file as numpy.savez writes it; {first_line(error)}"
            ) from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(
                f"`--data {path}`: needs an .npz file with arrays x and y; got one bare array: "
                "write it with numpy.savez(file, x=..., y=...)"
            )
        absent = [name for name in ("x", "y") if name not in archive.files]
        if absent:
            raise ValueError(
                f"`--data {path}`: needs arrays x and y; {' and '.join(absent)} missing, "
                f"the file holds {', '.join(sorted(archive.files)) or 'nothing'}"
            )
        try:
            return archive["x"], archive["y"]
        except Exception as error:
            if "allow_pickle" in str(error):
                raise ValueError(
                    f"`--data {path}`: holds Python objects, which only pickle reads, and that may "
                    "run code: save x and y as arrays of numbers"
                ) from error
            raise ValueError(f"`--data {path}`: is damaged: {first_line(error)}") from error


def check(
    x: Shaped[np.ndarray, "..."], y: Shaped[np.ndarray, "..."]
) -> tuple[Shaped[np.ndarray, "examples features"], Shaped[np.ndarray, " examples"]]:
    """Check shapes, types and values, and flatten the features.

    Args:
        x: (examples, ...) finite real numbers.
        y: (examples,) whole numbers from 0 up, in any real type.

    Returns:
        The features as (examples, features) in their own type, and the labels as integers.

    Raises:
        ValueError: names the array, what it needs and what it got.

    Example:
        >>> features, labels = check(np.zeros((3, 2, 2)), np.array([0.0, 1.0, 1.0]))
        >>> features.shape, labels.tolist()
        ((3, 4), [0, 1, 1])
    """
    if x.ndim == 0 or y.ndim != 1 or len(x) != len(y):
        cure = ": flatten y with y.ravel()" if y.ndim == 2 and 1 in y.shape else ""
        cure = ": take y.argmax(1) of one-hot labels" if y.ndim == 2 and not cure else cure
        raise ValueError(
            "`x`, `y` need shapes (examples, ...) and (examples,); "
            f"got x {x.shape} and y {y.shape}{cure}"
        )
    if len(x) < 2:
        raise ValueError(f"`x`, `y` need at least two examples, one to hold out; got {len(x)}")
    features = x.reshape(len(x), -1) if x.size else x.reshape(len(x), 0)
    if features.shape[1] == 0:
        raise ValueError(f"`x` needs at least one feature an example; got shape {x.shape}")
    for name, array in (("x", features), ("y", y)):
        if array.dtype.kind not in "fiub":
            raise ValueError(f"`{name}` needs real numbers; got dtype {array.dtype}")
        finite = np.isfinite(array).reshape(len(array), -1).all(1)
        if not finite.all():
            raise ValueError(
                f"`{name}` needs finite numbers; got NaN or infinity in {np.sum(~finite)} of "
                f"{len(finite)} examples, the first in example {np.argmin(finite)}"
            )
    values = y.astype(np.float64)  # narrower types cannot hold the bound
    bad = (values < 0) | (values != np.floor(values)) | (values > np.iinfo(np.int32).max)
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            "`y` needs whole numbers from 0 up, the classes; "
            f"got {y[first]} in example {first} ({np.sum(bad)} such)"
        )
    return features, y.astype(np.int64)


def _split(num_examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and of the held-out examples."""
    num_test = max(1, round(HELD_OUT * num_examples))
    order = np.random.default_rng([seed, 0]).permutation(num_examples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def _standardise(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Scale to zero mean and unit deviation over the training examples, as float32.

    A feature that is constant over the training examples becomes exactly 0: dividing by its
    rounding error instead would make noise of it.
    """
    known = x[train]
    constant = (known == known[:1]).all(0)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = known.mean(0, dtype=np.float64)
        deviation = known.std(0, dtype=np.float64)
        scaled = (x - mean) / np.where(constant | (deviation == 0), 1.0, deviation)
        result = np.where(constant, 0.0, scaled).astype(np.float32)
    if not (np.isfinite(deviation).all() and np.isfinite(result).all()):
        raise ValueError("`x` holds numbers too large to standardise in float64: rescale it")
    return result


def _digest(*arrays: np.ndarray) -> str:
    """SHA-256 over the arrays' types, shapes and bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
