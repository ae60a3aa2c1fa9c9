"""Numbers and links at the edges of what files hold: each is read, or refused in a sentence."""

from pathlib import Path

import numpy as np
import pytest

from sparcel.errors import InputError
from sparcel.products.rows import SvmLight, cached, make_cache, read_svmlight


def written(folder: Path, text: bytes) -> Path:
    path = folder / "rows"
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    "text",
    ["1e-400", "-1e-400", "1e-99999999999", f"0.{'0' * 400}1", f"{'9' * 400}e-900", "-0.0e-999"],
)
def test_what_is_too_small_for_a_float_is_zero(text: str, tmp_path: Path) -> None:
    read = read_svmlight(written(tmp_path, f"{text} 1:{text}".encode()))
    assert read.labels is not None
    for found in (read.labels[0], read.values[0]):
        assert found == 0 and np.signbit(found) == text.startswith("-")


@pytest.mark.parametrize(
    "text", ["1e400", "-1e400", "1e99999999999", f"0.{'0' * 400}1e900", "9" * 400]
)
def test_what_is_too_large_for_a_float_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rows:1: the value in '1:.* is no finite number"):
        read_svmlight(written(tmp_path, f"1 1:{text}".encode()))
    with pytest.raises(InputError, match=r"rows:1: the label '.* is no finite number"):
        read_svmlight(written(tmp_path, f"{text} 1:1".encode()))


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["9007199254740992", "9007199254740993"], "U"),
        (["-9007199254740993.0", "1"], "U"),
        (["18446744073709551615", "18446744073709551616"], "U"),
        (["9007199254740992", "-0009007199254740994.", "9007199254740991", "1e300"], "f"),
        (["1_0", "1_1"], "U"),
    ],
)
def test_labels_that_a_float_would_merge_are_texts(
    labels: list[str], kind: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "".join(f"{label} 1:1\n" for label in labels).encode())
    make_cache(tmp_path / "cache", path, SvmLight())
    for read in (read_svmlight(path), cached(tmp_path / "cache", path, SvmLight())):
        assert read.labels is not None and read.labels.dtype.kind == kind
        expected = [float(label) for label in labels] if kind == "f" else labels
        assert read.labels.tolist() == expected
    if kind == "U":
        with pytest.raises(InputError, match=r"rows:\d: the label .*; labels='texts' takes any"):
            read_svmlight(path, labels="numbers")


@pytest.mark.parametrize("label", ["nan", "NaN", "inf", "-Infinity"])
def test_labels_that_are_not_finite_are_no_classes(label: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"1 1:1\n{label} 2:1\n".encode())
    for read in (read_svmlight, lambda path: make_cache(tmp_path / "cache", path, SvmLight())):
        with pytest.raises(InputError, match=f"rows:2: the label '{label}' is no finite number"):
            read(path)


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="loop is a link that leads to no file"):
        read_svmlight(loop)
    path = written(tmp_path, b"1 1:1\n")
    with pytest.raises(InputError, match="loop can't be read: Too many levels of symbolic links"):
        make_cache(loop, path, SvmLight())
