"""Ranks share files evenly, by names and sizes alone."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sparcel.products.rows.files import COMPRESSED_WEIGHT, FilePiece, is_compressed, parts

FILES = st.lists(
    st.tuples(st.sampled_from(["a", "b.svm", "c.gz", "d.xz", "e.zst"]), st.integers(0, 50)),
    max_size=8,
).map(lambda files: [(Path(f"{n}.{name}"), size) for n, (name, size) in enumerate(files)])


def load(pieces: list[FilePiece]) -> int:
    return sum(
        (piece.stop - piece.start) * (COMPRESSED_WEIGHT if is_compressed(piece.path) else 1)
        for piece in pieces
    )


@given(FILES, st.integers(1, 9))
def test_every_byte_is_in_one_piece(files: list[tuple[Path, int]], ranks: int) -> None:
    given = parts(files, ranks)
    assert len(given) == ranks
    for path, size in files:
        own = [piece for pieces in given for piece in pieces if piece.path == path]
        bytes_of = [place for piece in own for place in range(piece.start, piece.stop)]
        assert bytes_of == list(range(size))  # of a plain file in the order of the ranks
        assert len(own) == 1 or not is_compressed(path)
    order = [path for path, _ in files]
    for pieces in given:
        places = [order.index(piece.path) for piece in pieces]
        assert places == sorted(places)


@given(FILES, st.integers(1, 9))
def test_plain_files_level_the_loads(files: list[tuple[Path, int]], ranks: int) -> None:
    given = parts(files, ranks)
    least = min(map(load, given))
    for pieces in given:
        if any(not is_compressed(piece.path) for piece in pieces):
            assert load(pieces) <= least + 1


@given(FILES, st.integers(1, 9))
def test_compressed_files_are_apart_by_the_largest(
    files: list[tuple[Path, int]], ranks: int
) -> None:
    loads = [load(pieces) for pieces in parts(files, ranks)]
    largest = max((size for path, size in files if is_compressed(path)), default=0)
    assert max(loads) - min(loads) <= max(1, largest * COMPRESSED_WEIGHT)


def test_an_example() -> None:
    files = [(Path("a"), 100), (Path("b.gz"), 10), (Path("c.gz"), 20)]
    assert parts(files, 3) == [
        [FilePiece(Path("c.gz"), 0, 20)],
        [FilePiece(Path("a"), 0, 30), FilePiece(Path("b.gz"), 0, 10)],
        [FilePiece(Path("a"), 30, 100)],
    ]
