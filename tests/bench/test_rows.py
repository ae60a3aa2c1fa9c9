"""Names of rows, detection of engines and nodes, and the verdict on predictions."""

import pytest

from sparcel import simulate
from sparcel.core.comm import launched
from sparcel.errors import InputError
from sparcel.tools.bench.contenders import connected, names
from sparcel.tools.bench.results import Cell, summarized, verdict
from sparcel.tools.bench.run import network
from sparcel.tools.bench.settings import BenchSettings


def test_baselines_come_first_and_dense_is_always_included() -> None:
    assert names("oktopk,dense bf16,gtopk", False, 1) == [
        *("dense fp32", "dense bf16"),
        *("oktopk", "gtopk"),
    ]


def test_whole_steps_are_included_if_asked_for() -> None:
    assert names("oktopk,topk", True, 1) == ["dense fp32", "oktopk", "step:oktopk", "step:topk"]
    assert names("step:topk", False, 1) == ["dense fp32", "step:topk"]
    assert not [name for name in names("all", False, 2) if name.startswith("step:")]
    with pytest.raises(InputError, match="algorithm cannot be"):
        names("topk", False, 1)


def test_schemes_on_two_levels_need_several_ranks_a_node() -> None:
    assert "step:hitopk" not in names("all", True, 1)
    assert {"step:hitopk", "step:torus2d"} <= set(names("all", True, 2))


@pytest.mark.parametrize(
    ("environment", "nodes", "each"),
    [
        ({}, 3, 2),  # mpiexec sets no such variable
        ({"LOCAL_WORLD_SIZE": "3"}, 2, 3),
        ({"SPARCEL_LAB_RANKS_PER_NODE": "1", "SPARCEL_LAB_NODES": "6"}, 6, 1),
    ],
)
def test_the_launcher_or_the_communicator_tells_the_nodes(
    environment: dict[str, str], nodes: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SPARCEL_LAB_RANKS_PER_NODE", "SPARCEL_LAB_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = BenchSettings()
    for found in simulate(6, lambda comm: network(settings, comm), ranks_per_node=2).results:
        assert (found["nodes"], found["ranks_per_node"]) == (nodes, each)


@pytest.mark.parametrize(
    ("environment", "engines"),
    [
        ({}, ()),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, ("gloo",)),
        ({"PMI_RANK": "0"}, ("gloo", "mpi")),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ("gloo", "mpi")),
    ],
)
def test_the_environment_tells_the_launcher(
    environment: dict[str, str], engines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched() == engines
    if "mpi" not in engines:
        with pytest.raises(InputError, match="engine 'mpi' needs"), connected(("mpi",)):
            pass


def test_a_verdict_on_predictions() -> None:
    def cell(algorithm: str, seconds: float, predicted: float | None) -> Cell:
        return Cell(
            *("gloo", algorithm, 1000, 0.01, 10, "uniform", "float32"),
            *(summarized([seconds]), {}, 8, None, None, 0, predicted),
        )

    cells = [cell("ring", 1.0, 1.2), cell("allgather", 2.0, 1.1), cell("oktopk", 3.0, None)]
    assert verdict(cells) == (
        "1 of 2 predictions within 25 % of the measured time; the sum predicted to be the fastest"
        " took at most 2.00× the time of the fastest"
    )
    assert verdict(cells[2:]) == ""
