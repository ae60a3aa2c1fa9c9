"""What `auto` takes the cluster to be good for is given, measured or assumed, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparcel import scheme, simulate
from sparcel.core.comm import Communicator
from sparcel.core.cost import default_rates, stated_rates
from sparcel.core.schemes import Auto, Hierarchical
from sparcel.errors import InputError, MismatchError
from tests.evenly import even_averager

TENSORS = {"weight": torch.zeros(200, 100)}
FAST = stated_rates(bandwidth=1e12, latency_s=1e-7, ranks=3, description="a very fast network")
SLOW = stated_rates(bandwidth=1e5, latency_s=1e-7, ranks=3, description="a very slow network")


def train(comm: Communicator, rates: Any) -> tuple[str, dict[str, str]]:
    averager = even_averager(TENSORS, scheme("auto"), group=comm, rates=rates)
    averager.average({"weight": torch.randn(200, 100)})
    return averager.handle.stats().rates, averager.handle.chosen


def test_without_rates_the_assumption_is_said() -> None:
    said, _ = simulate(3, lambda comm: train(comm, None)).results[0]
    assert said == default_rates().description
    assert "assumed" in said


def test_given_rates_decide_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(SLOW.to_json())
    for given in (path, str(path), SLOW):
        said, chosen = simulate(3, lambda comm, given=given: train(comm, given)).results[0]
        assert said == "a very slow network"
        assert chosen["weight"] != "dense"
    said, chosen = simulate(3, lambda comm: train(comm, FAST)).results[0]
    assert (said, chosen) == ("a very fast network", {"weight": "dense"})


def test_rates_reach_a_scheme_between_nodes() -> None:
    def on_rank(comm: Communicator, rates: Any) -> str | None:
        inner = scheme("auto")
        averager = even_averager(
            TENSORS, Hierarchical(inner, ranks_per_node=2), group=comm, rates=rates
        )
        averager.average({"weight": torch.randn(200, 100)})
        vector, _ = averager._session.residuals._vectors["weight"]
        assert isinstance(vector.scheme, Hierarchical) and isinstance(vector.scheme.inner, Auto)
        return vector.scheme.inner.chosen

    assert set(simulate(4, lambda comm: on_rank(comm, FAST)).results) == {"dense"}
    assert "dense" not in simulate(4, lambda comm: on_rank(comm, SLOW)).results


def test_rates_given_later_reach_a_scheme_between_nodes_too() -> None:
    def on_rank(comm: Communicator) -> object:
        assert comm.grid(2).across.rates is None
        even_averager(TENSORS, scheme("auto"), group=comm, rates=SLOW)
        assert comm.grid(2).across.rates is comm.grid(2).across.rates  # or auto would begin anew
        return comm.grid(2).across.rates

    for rates in simulate(4, on_rank).results:
        assert (rates.description, rates.ranks_per_node) == (SLOW.description, 1)


def test_ranks_with_other_rates_are_refused() -> None:
    for given in ("measure", None):
        with pytest.raises(MismatchError, match="rates to all or to none"):
            simulate(2, lambda comm, given=given: train(comm, given if comm.rank else SLOW))
    with pytest.raises(MismatchError, match=r"ranks \[1\] have other rates than rank 0"):
        simulate(2, lambda comm: train(comm, FAST if comm.rank else SLOW))


def test_one_rank_has_nothing_to_measure() -> None:
    said, _ = simulate(1, lambda comm: train(comm, "measure")).results[0]
    assert "assumed" in said


def test_a_file_without_rates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't read rates"):
        simulate(2, lambda comm: train(comm, tmp_path / "nothing"))
    (tmp_path / "other").write_text("{}")
    with pytest.raises(InputError, match="not rates as"):
        simulate(2, lambda comm: train(comm, tmp_path / "other"))


def measured(comm: Communicator) -> tuple[str, str]:
    averager = even_averager(TENSORS, scheme("auto"), group=comm, rates="measure")
    assert comm.rates is not None and comm.rates.measured
    return averager.handle.stats().rates, comm.rates.to_json()


@pytest.mark.slow
@pytest.mark.processes
def test_measured_rates_are_the_same_on_all_ranks(run_on: Any) -> None:
    (said, rates), other = run_on(2, measured)
    assert "measured" in said
    assert other == (said, rates)


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_small_tensors_are_averaged_alike_by_whatever_algorithm(poison: float) -> None:
    small = {f"{number}": torch.zeros(1000) for number in range(40)}
    given = torch.arange(40_000.0).view(40, 1000)

    def on_rank(comm: Communicator, rates: Any) -> torch.Tensor:
        averager = even_averager(small, scheme("topk"), group=comm, rates=rates)
        gradients = {name: given[int(name)] * comm.rank + poison * comm.rank for name in small}
        updates = averager.average(gradients)
        return torch.stack([updates[name] for name in small])

    for rates in (FAST, SLOW):
        for average in simulate(3, lambda comm, rates=rates: on_rank(comm, rates)).results:
            assert torch.equal(average, given) if poison == 0 else average.isnan().all()
