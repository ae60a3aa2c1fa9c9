"""The demo reads all supported formats, and names the fault of other files."""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.demo.data import batch_order, load
from sparcel.errors import InputError

_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def _arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (12, 4, 3), dtype=np.uint8),
        "y_train": (np.arange(12) % 5).astype(np.uint8),
        "x_test": generator.integers(0, 256, (7, 4, 3), dtype=np.uint8),
        "y_test": (np.arange(7) % 6).astype(np.uint8),
    }


def _idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape)
    return header + array.tobytes()


def _write_idx(folder: Path, zipped: bool) -> None:
    for key, array in _arrays().items():
        if zipped:
            (folder / f"{_FILES[key]}.gz").write_bytes(gzip.compress(_idx(array)))
        else:
            (folder / _FILES[key]).write_bytes(_idx(array))


@pytest.mark.parametrize("kind", ["idx", "gzipped idx", "npz"])
def test_all_formats_give_the_same(kind: str, tmp_path: Path) -> None:
    path = tmp_path
    if kind == "npz":
        path = tmp_path / "some.npz"
        np.savez(path, **_arrays())
    else:
        _write_idx(tmp_path, zipped=kind != "idx")
    dataset, arrays = load(str(path)), _arrays()
    raw = torch.from_numpy(arrays["x_train"].reshape(12, 12).astype(np.float32))
    assert torch.equal(dataset.x_train, (raw - raw.mean()) / raw.std())
    assert dataset.y_train.tolist() == arrays["y_train"].tolist()
    assert dataset.y_test.tolist() == arrays["y_test"].tolist()
    assert dataset.x_test.shape == (7, 12)
    assert (dataset.features, dataset.classes) == (12, 6)
    assert dataset.name == path.stem


def test_digits_are_split_without_overlap() -> None:
    dataset = load(None)
    assert len(dataset.y_train) + len(dataset.y_test) == 1797
    assert abs(dataset.x_train.mean()) < 1e-5
    assert abs(dataset.x_train.std() - 1) < 1e-5
    for labels in (dataset.y_train, dataset.y_test):
        counts = labels.bincount(minlength=10)
        assert counts.max() <= 1.1 * counts.min()
    assert dataset.description == "digits, 1433 samples to train on and 364 held out"


def _break(arrays: dict[str, np.ndarray], how: str) -> dict[str, np.ndarray]:
    broken = {
        "y_train": arrays["y_train"][:-1],
        "x_train": arrays["x_train"][:, :2],
        "y_test": arrays["y_test"].astype(np.float32),
        "x_test": arrays["x_test"].reshape(-1),
    }
    return {**arrays, how: broken[how]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("y_train", r"x_train must be \[samples, ...\] .* got \[12, 4, 3\] and \[11\]"),
        ("x_train", "6 features to train, 12 to test"),
        ("y_test", "y_test must be integers from 0 on, got float32"),
        ("x_test", r"x_test must be \[samples, ...\]"),
    ],
)
def test_arrays_that_do_not_match_are_named(how: str, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **_break(_arrays(), how))
    with pytest.raises(InputError, match=message):
        load(str(tmp_path / "bad.npz"))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", x_train=np.zeros((2, 2)))
    with pytest.raises(InputError, match=r"missing: .*y_train"):
        load(str(tmp_path / "bad.npz"))
    with pytest.raises(InputError, match="has no train-images-idx3-ubyte"):
        load(str(tmp_path))
    with pytest.raises(InputError, match=r"a folder of IDX files or an \.npz file, got /nowhere"):
        load("/nowhere")


@given(st.integers(0, 16 + 12 * 12))
def test_a_file_cut_short_is_never_read(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _write_idx(Path(folder), zipped=False)
        victim = Path(folder) / _FILES["x_train"]
        whole = victim.read_bytes()
        if length == len(whole):
            return
        victim.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"not an IDX file|cut short"):
            load(folder)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "some.npz"])
def test_a_damaged_archive_is_named(name: str, tmp_path: Path) -> None:
    _write_idx(tmp_path, zipped=True)
    np.savez(tmp_path / "some.npz", **_arrays())
    victim = tmp_path / name
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(InputError, match=f"{name} can't be read"):
        load(str(victim if name.endswith("npz") else tmp_path))


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3))
def test_every_epoch_takes_every_sample_once(
    samples: int, batch: int, steps: int, seed: int
) -> None:
    order = batch_order(samples, batch, steps, seed)
    assert order.shape == (steps, batch)
    assert torch.equal(order, batch_order(samples, batch, steps, seed))
    for epoch in order.flatten().split(samples):
        assert len(epoch.unique()) == len(epoch)
        assert 0 <= int(epoch.min()) <= int(epoch.max()) < samples
