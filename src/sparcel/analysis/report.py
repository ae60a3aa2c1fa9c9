"""The output of ``sparcel density``."""

from __future__ import annotations

from rich import box
from rich.table import Table

from sparcel.analysis.density import delta, expected_nnz, ranks_until_dense, relative_volume


def table(size: int, k: int, ranks: int) -> Table:
    """Return the expected sum of k-sparse float32 vectors for 2, 4, 8 … ranks and for ``ranks``."""
    result = Table(
        title=f"{k:,} of {size:,} coordinates a rank ({100 * k / size:.3g} %), float32",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in (
        "ranks",
        "coordinates\nof the sum",
        "density\nof the sum",
        "sent, of a dense\nexchange",
    ):
        result.add_column(heading, justify="right")
    result.add_column("")
    most = delta(size)
    for world in sorted({2**i for i in range(1, ranks.bit_length())} | {ranks}):
        nnz = expected_nnz(size, k, world)
        result.add_row(
            f"{world:,}",
            f"{nnz:,.0f}",
            f"{100 * nnz / size:.3g} %",
            f"{100 * relative_volume(size, k, world):.3g} %",
            "dense" if nnz > most else "sparse",
        )
    return result


def summary(size: int, k: int) -> str:
    """Return the text below the table: from how many ranks the sum is dense, and what helps."""
    return (
        f"From {ranks_until_dense(size, k):,} ranks on, expect a dense sum: with more than"
        f" {delta(size):,} coordinates, the whole vector takes fewer bytes than coordinates with"
        " their indices. At least half of a dense exchange is then sent, however few coordinates"
        " each rank sends. If that is too much, send a smaller share, quantise the sum (sparcml"
        " with bits), or keep only its k largest coordinates (gtopk, oktopk).\n"
        "Real gradients fill in more slowly; sparcel.analysis.fill_in measures how fast."
    )
