"""The demo's data: scikit-learn's digits, or files in the formats of MNIST and Keras."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparcel.errors import InputError, optional

Array = npt.NDArray[np.generic]

_IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Dataset:
    """Samples for classification, split in two.

    Attributes
    ----------
    name
        Name in reports.
    x_train, x_test
        Inputs, ``[samples, features]`` float32, shifted and scaled so that the training inputs
        have mean 0 and variance 1 over all features together.
    y_train, y_test
        Classes, ``[samples]`` int64, counted from 0.
    """

    name: str
    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor

    @property
    def features(self) -> int:
        """Number of features of a sample."""
        return self.x_train.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 1 + int(max(self.y_train.max(), self.y_test.max()))

    @property
    def description(self) -> str:
        """Name and numbers of samples, in one line."""
        train, test = len(self.y_train), len(self.y_test)
        return f"{self.name}, {train} samples to train on and {test} held out"


def load(path: str | None) -> Dataset:
    """Load the data of the demo.

    Parameters
    ----------
    path
        A folder with the four IDX files of MNIST or Fashion-MNIST, gzipped or not; an ``.npz``
        with ``x_train``, ``y_train``, ``x_test`` and ``y_test``; or None for scikit-learn's digits.
        Every fifth sample of a class of the digits is held out for testing.

    Raises
    ------
    InputError
        When the path holds no such data, or the shapes of its arrays do not match.
    """
    if path is None:
        return _dataset("digits", _digits())
    where = Path(path)
    if where.is_dir():
        return _dataset(where.name, {key: _read_idx(where, _IDX_FILES[key]) for key in _IDX_FILES})
    if where.suffix == ".npz" and where.is_file():
        return _dataset(where.stem, _read_npz(where))
    raise InputError(f"data must be a folder of IDX files or an .npz file, got {path}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of reading and decompressing into an error that names the file."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} can't be read: {error}") from error


def _digits() -> Mapping[str, Array]:
    with optional("the demo", "demo"):
        from sklearn.datasets import load_digits

    digits = load_digits()
    held_out = np.zeros(len(digits.target), dtype=bool)
    for label in np.unique(digits.target):
        held_out[np.flatnonzero(digits.target == label)[::5]] = True
    return {
        "x_train": digits.data[~held_out],
        "y_train": digits.target[~held_out],
        "x_test": digits.data[held_out],
        "y_test": digits.target[held_out],
    }


def _read_npz(path: Path) -> Mapping[str, Array]:
    with _readable(path), np.load(path) as archive:
        missing = [key for key in _IDX_FILES if key not in archive]
        if missing:
            raise InputError(f"{path} must hold {', '.join(_IDX_FILES)}; missing: {missing}")
        return {key: archive[key] for key in _IDX_FILES}


def _read_idx(folder: Path, stem: str) -> Array:
    """Read one file of LeCun's IDX format: a magic number, the shape, and the values."""
    for path, opener in ((folder / stem, open), (folder / f"{stem}.gz", gzip.open)):
        if path.is_file():
            with _readable(path), opener(path, "rb") as file:
                content = file.read()
            return _parse_idx(content, path)
    raise InputError(f"{folder} has no {stem} and no {stem}.gz")


def _parse_idx(content: bytes, path: Path) -> Array:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_DTYPES:
        raise InputError(f"{path} is not an IDX file: it starts with {content[:4]!r}")
    dtype, dimensions = np.dtype(_IDX_DTYPES[content[2]]), content[3]
    values_at = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, values_at, 4)]
    expected = values_at + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise InputError(f"{path} is cut short or too long: {len(content)} bytes, not {expected}")
    return np.frombuffer(content, dtype, offset=values_at).reshape(shape)


def _dataset(name: str, arrays: Mapping[str, Array]) -> Dataset:
    for subset in ("train", "test"):
        x, y = arrays[f"x_{subset}"], arrays[f"y_{subset}"]
        if x.ndim < 2 or y.shape != x.shape[:1] or len(y) == 0:
            raise InputError(
                f"{name}: x_{subset} must be [samples, ...] and y_{subset} [samples], "
                f"got {list(x.shape)} and {list(y.shape)}"
            )
        if not np.issubdtype(y.dtype, np.integer) or int(y.min()) < 0:
            raise InputError(f"{name}: y_{subset} must be integers from 0 on, got {y.dtype}")
    x_train, x_test = (
        torch.from_numpy(arrays[key].reshape(len(arrays[key]), -1).astype(np.float32))
        for key in ("x_train", "x_test")
    )
    if x_train.shape[1] != x_test.shape[1]:
        raise InputError(f"{name}: {x_train.shape[1]} features to train, {x_test.shape[1]} to test")
    mean, deviation = x_train.mean(), x_train.std().clamp_min(1e-12)
    return Dataset(
        name,
        x_train.sub_(mean).div_(deviation),
        torch.from_numpy(arrays["y_train"].astype(np.int64)),
        x_test.sub_(mean).div_(deviation),
        torch.from_numpy(arrays["y_test"].astype(np.int64)),
    )


def batch_order(samples: int, batch: int, steps: int, seed: int) -> torch.Tensor:
    """Return the samples of each step: a new permutation every epoch, with no sample left out.

    Returns
    -------
    torch.Tensor
        Indices, ``[steps, batch]`` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / samples)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    return order[: steps * batch].view(steps, batch)
