"""Counted traffic equals the formulas that are read from docs/explanation/algorithms.md."""

import re
from itertools import product
from math import ceil, lcm, log2
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core.collectives import ALGORITHMS, gathered_topk, gtopk
from sparcel.core.formats import RAW, Format
from sparcel.core.wire import Wire
from tests.sampling import meeting
from tests.strategies import SUM, case_of, layouts, make_stream, sizes, worlds

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 31, 32, 33, 64)
PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "algorithms.md").read_text()


def table(columns):
    """Return the formulas of the table with these columns, by algorithm."""
    header = re.escape("| " + " | ".join(columns) + " |")
    body = re.search(rf"^{header}\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE).group(1)
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in body.splitlines()
    ]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


COSTS = table(
    ["algorithm", "rounds", "messages", "bytes, identical", "bytes, disjoint", "bytes, at most"]
)
SECOND_PHASE = table(["second phase", "bytes"])


def all_reduce_by(algorithm):
    return lambda stream, comm, k: algorithm(stream, Wire(comm), SUM, k)


COLLECTIVES = {
    **{name: all_reduce_by(algorithm) for name, algorithm in ALGORITHMS.items()},
    "gtopk": lambda stream, comm, k: gtopk(stream, Wire(comm), k),
    "gathered_topk": lambda stream, comm, k: gathered_topk(stream, Wire(comm), k),
    "all_gather": lambda stream, comm, k: sparcel.all_gather(stream, comm),
    "reduce_scatter": lambda stream, comm, k: sparcel.reduce_scatter(stream, group=comm),
    "broadcast": lambda stream, comm, k: sparcel.broadcast(stream, 0, comm),
}


def bins(ranks):
    return 2 ** int(log2(512 // max(1, ranks - 1))) if ranks <= 8 else 1024


def edges(ranks):
    later = max(bins(ranks), 4 * ranks)
    return (4 * ranks if ranks <= 8 else later), later


def levels(ranks, size):
    """Return the most sums of counts that finding the boundaries takes."""
    first, later = edges(ranks)
    cell, sums = ceil(size / first), 1
    while cell > 1 and ranks > 1:
        cell, sums = ceil(cell / (later // (ranks - 1))), sums + 1
    return sums


def evaluate(expression, ranks, size, count, value_bytes, bits=4):
    """Evaluate a formula of the page; names are defined in the page's table of symbols."""

    def up(nbytes):
        return ceil(nbytes / 8) * 8

    def sparse(k):
        return 40 + up(value_bytes * k) + up(4 * k)

    def dense(n):
        return 40 + up(value_bytes * n)

    def few(n):
        return 40 + up(2 * ceil(n / 64)) + up(ceil(n * bits / 8))

    def bits_of(n):
        return 8 * ceil(n / 64)

    def packed(k, n):
        low = int(log2(n // k)) if k else 0
        return bits_of(n if k > n // 4 else k + ((n - 1) >> low) + k * low)

    def thin(k, n):
        raw = few(k) + up(4 * k)
        return raw if raw <= few(n) else min(few(k) + packed(k, n), few(n))

    def spread(nbytes):
        lg = ceil(log2(ranks))
        if ranks <= 2 or nbytes <= 4096:
            return lg * nbytes
        gathered = sum(min(2**t, ranks - 2**t) * nbytes // ranks for t in range(lg))
        return nbytes - nbytes // ranks + gathered

    powers = 1 << (ranks.bit_length() - 1)
    direct, some = ranks <= 8, ranks <= 16
    adding = "allgather" if direct else "recursive_doubling" if some else "halving_doubling"
    doubling = (1 + (not some)) * (powers.bit_length() - 1) + (ranks > powers)
    names = {
        "P": ranks,
        "Q": powers,
        "F": ranks - powers,
        "lg": ceil(log2(ranks)),
        "gather": ranks - 1 if direct else ceil(log2(ranks)),
        "n": size,
        "m": ceil(size / ranks),
        "k": count,
        "v": value_bytes,
        "i": 4,
        "sparse": sparse,
        "dense": dense,
        "few": few,
        "bits": bits_of,
        "packed": packed,
        "thin": thin,
        "most": lambda k, n: min(sparse(k), dense(n) + 8),
        "part": lambda k, n: min(sparse(k), dense(n) + bits_of(n)),
        "long": ranks > 2 and sparse(count) > 4096,
        "spread": spread,
        "shared": lambda t: 2 ** (t - 1) + ceil((ranks - powers) * 2 ** (t - 1) / powers),
        "ceil": ceil,
        "max": max,
        "E": edges(ranks)[0],
        "C": edges(ranks)[1],
        "H": bins(ranks),
        "h": ceil((8 * value_bytes - 1 - max(8, log2(2 * bins(ranks)))) / log2(bins(ranks))),
        "levels": levels(ranks, size),
        "counting": ranks - 1 if direct else doubling,
        "counts": lambda m: evaluate(COSTS[adding]["bytes, at most"], ranks, m, m, 4),
        "total": lambda f, a, b: sum(map(f, range(a, b))),
        "log2": lambda number: number.bit_length() - 1,
        "min": min,
    }
    return eval(expression, names)


def test_page_has_a_row_for_every_collective():
    assert set(COSTS) == set(COLLECTIVES)


def evenly(layout, ranks, count, spacing):
    """Return each rank's indices, ``count`` at equal distances, identical or disjoint ones."""
    return [
        torch.arange(count) * spacing + (rank if layout == "disjoint" else 0)
        for rank in range(ranks)
    ]


def measured(name, streams, count):
    report = simulate(
        len(streams),
        lambda comm: COLLECTIVES[name](streams[comm.rank], comm, count),
        latency_s=1,
    )
    return (
        report.seconds,
        max(traffic.messages_sent for traffic in report.traffic),
        max(traffic.volume for traffic in report.traffic),
    )


@pytest.mark.parametrize(
    ("name", "place"), meeting(COSTS, product(WORLDS, ["identical", "disjoint"]), each=10)
)
def test_rounds_messages_and_bytes_equal_the_page(name, place):
    ranks, layout = place
    dtype = torch.float16 if ranks % 2 else torch.float32
    count, spacing = 3 * lcm(ranks, 1 << (ranks.bit_length() - 1)), 4 * ranks
    size = count * spacing
    streams = [
        make_stream(indices, rank, size, dtype)
        for rank, indices in enumerate(evenly(layout, ranks, count, spacing))
    ]
    for stream in streams:  # no zeros, which gtopk would drop
        stream.values = 1 + torch.arange(count, dtype=dtype) % 5
    row = COSTS[name]
    expected = [row["rounds"], row["messages"], row[f"bytes, {layout}"]]
    assert measured(name, streams, count) == tuple(
        evaluate(cost, ranks, size, count, dtype.itemsize) for cost in expected
    )


@pytest.mark.parametrize(
    ("ranks", "kind"),
    meeting(
        [rank for rank in WORLDS if 3 <= rank <= 32],
        product(["plain", "few bits"], [2, 40]),
        each=2,
    ),
)
def test_dense_second_phase_costs_what_the_page_says(ranks, kind):
    phase, each = kind
    region = each * ranks
    streams = [
        make_stream(indices, rank, ranks * region)
        for rank, indices in enumerate(evenly("disjoint", ranks, region, ranks))
    ]

    def on_rank(comm):
        wire = Wire(comm, Format("raw", 4) if phase == "few bits" else RAW)
        return ALGORITHMS["split_allgather"](streams[comm.rank], wire, SUM, region)

    volume = max(traffic.volume for traffic in simulate(ranks, on_rank).traffic)
    assert volume == evaluate(SECOND_PHASE[phase]["bytes"], ranks, ranks * region, region, 4)


@pytest.mark.parametrize("name", COSTS)
@given(layouts, worlds, sizes.filter(bool), st.integers(0, 12), st.integers(0, 99))
def test_no_input_exceeds_the_bound_of_the_page(name, layout, ranks, size, count, seed):
    case = case_of(layout, ranks, size, count=count, seed=seed)
    if layout == "dense" and name not in ("dense", "reduce_scatter"):
        case.streams[:] = [SparseStream.from_dense(s.to_dense()) for s in case.streams]
    count = case.max_nnz
    _, messages, volume = measured(name, case.streams, max(count, 1))
    assert messages <= evaluate(COSTS[name]["messages"], ranks, size, count, 4)
    assert volume <= evaluate(COSTS[name]["bytes, at most"], ranks, size, count, 4)
