"""vLLM: each worker's model is, bit for bit, its part of the version that it was told."""

from __future__ import annotations

import math
import socket
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from sparcel.errors import CommunicationError, InputError, MissingDependencyError, VersionError
from sparcel.integrations.vllm import Server, register
from sparcel.products.delta import Folder, Publisher, Version
from tests.integrations.stand_ins import vllm as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, fresh, install
from tests.integrations.stand_ins.server import serving

ROOT = Path(__file__).parents[2]
PLACES = {"q": ("qk", 0), "k": ("qk", 2), "mlp": ("mlp", 0)}
"""The parameter that holds a rank's rows of each tensor of the checkpoint, and where they begin."""

Checkpoint = dict[str, Tensor]


def checkpoint() -> Checkpoint:
    torch.manual_seed(3)
    return {
        "q": torch.randn(4, 6).bfloat16(),
        "k": torch.randn(4, 6).bfloat16(),
        "mlp": torch.randn(8, 6).bfloat16(),
        "norm": torch.randn(6),
        "count": torch.tensor([7]),
    }


def load_rows(param: Tensor, loaded_weight: Tensor, name: str, rank: int) -> None:
    rows = len(loaded_weight) // 2
    own = loaded_weight[rank * rows : (rank + 1) * rows]
    param.data.narrow(0, PLACES[name][1], rows).copy_(own)


def load_all(param: Tensor, loaded_weight: Tensor, name: str, rank: int) -> None:
    param.data.copy_(loaded_weight)


class Packed(nn.Module):
    """What one of two workers holds of the checkpoint: some rows, joined; and small tensors."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.loads: list[str] = []
        """``whole`` or ``patch`` for each call of `load_weights`."""
        self.failing: Exception | None = None
        for name, shape, dtype in [
            ("qk", (4, 6), torch.bfloat16),
            ("mlp", (4, 6), torch.bfloat16),
            ("norm", (6,), torch.float32),
            ("count", (1,), torch.int64),
        ]:
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            parameter.weight_loader = load_all if len(shape) == 1 else load_rows  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names, parameters = [], dict(self.named_parameters())
        for number, (name, weight) in enumerate(weights):
            if self.failing is not None and number:
                error, self.failing = self.failing, None
                raise error
            parameter = parameters[PLACES.get(name, (name, 0))[0]]
            parameter.weight_loader(parameter, weight, name, self.rank)
            names.append(name)
        self.loads.append("whole" if "count" in names else "patch")
        return set(names)


def assert_holds(model: Packed, weights: Checkpoint) -> None:
    wanted = Packed(model.rank)
    wanted.load_weights(weights.items())
    for name, parameter in wanted.named_parameters():
        held = getattr(model, name)
        assert torch.equal(held.view(torch.uint8), parameter.view(torch.uint8)), name


@pytest.fixture(params=["stand-in", "real"])
def workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Any]]:
    """Return what makes the engines of two workers."""
    if request.param == "real":
        pytest.importorskip("vllm.distributed.weight_transfer.factory", reason="without vLLM")
    else:
        install(monkeypatch, "vllm", stand_ins.MODULES)
    fresh(monkeypatch, "sparcel.integrations.vllm")
    register()
    register()  # plugins are called several times
    reload = import_module("vllm.model_executor.model_loader.reload")
    factory = import_module("vllm.distributed.weight_transfer.factory")

    def make(
        store: Path | None, size: int = 1, mirror: Path | None = None, **settings: Any
    ) -> list[Any]:
        told = {
            "parallel_config": SimpleNamespace(world_size_across_dp=size),
            "model_config": SimpleNamespace(dtype=torch.bfloat16),
            "kernel_config": SimpleNamespace(moe_backend="auto"),
            "quant_config": None,
        }
        engines = []
        for rank in range(2):
            model = Packed(rank)
            reload.record_metadata_for_reloading(model)
            engine = factory.WeightTransferEngineFactory.create_engine(
                SimpleNamespace(backend="sparcel"),
                SimpleNamespace(**told | settings),
                torch.device("cpu"),
                model,
            )
            if store is not None:
                place = {"store": str(store)} | ({"mirror": str(mirror)} if mirror else {})
                engine.init_transfer_engine(engine.parse_init_info(place))
            engines.append(engine)
        return engines

    return make


def updated(engines: list[Any], version: int | None = None) -> None:
    for engine in engines:
        engine.start_weight_update()
        engine.update_weights({} if version is None else {"version": version})
        engine.finish_weight_update()


def loads(engines: list[Any]) -> list[str]:
    """Return how the workers loaded since this was asked last; all do the same."""
    one, *others = [engine.model.loads for engine in engines]
    assert all(one == other for other in others)
    for engine in engines:
        engine.model.loads = []
    return one


@pytest.mark.parametrize("place", [None, "mirror"])
def test_a_whole_model_then_patches_each_version_bit_for_bit(
    workers: Callable[..., list[Any]], tmp_path: Path, place: str | None
) -> None:
    """From copies of their own, or from one that the workers share, which one of them keeps."""
    mirror = tmp_path / place if place else None
    weights, publisher = checkpoint(), Publisher(Folder(tmp_path / "store"))
    engines = workers(tmp_path / "store", mirror=mirror)
    for number in range(5):
        publisher.publish(weights)
        updated(engines, number)
        assert loads(engines) == ["patch" if number else "whole"]
        for engine in engines:
            assert_holds(engine.model, weights)
        weights["q"][number % 4, 1] = (-0.0, math.inf, 0.0, 1e-40, 1)[number]
        weights["mlp"].view(-1)[:: number + 2] *= 1.5
        weights["norm"][number] = -0.0
    updated(engines, 0)
    assert loads(engines) == ["whole"]
    if place:
        with pytest.raises(InputError, match="told the version"):
            updated(engines)
        assert [one._mirror._follower is not None for one in engines] == [True, False]
        engines[0].shutdown()
        updated(engines[1:], 4)


def test_a_model_that_takes_nothing_is_told(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    Publisher(Folder(tmp_path)).publish(checkpoint())
    for engine in workers(tmp_path):
        with (
            patch.object(type(engine.model), "load_weights", return_value=set()),
            pytest.raises(VersionError, match="has none of the tensors that were published"),
        ):
            updated([engine], 0)


def test_a_worker_goes_over_several_versions_to_the_newest(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights, publisher, engines = checkpoint(), Publisher(Folder(tmp_path)), workers(tmp_path)
    for _ in range(2):
        for _ in range(3):
            weights["k"] += 1
            publisher.publish(weights)
        updated(engines)
        for engine in engines:
            assert_holds(engine.model, weights)
    assert loads(engines) == ["whole", "patch", "patch", "patch"]
    updated(engines)
    assert loads(engines) == []


def no_number(weights: Checkpoint) -> None:
    weights["norm"][3] = math.nan


def count(weights: Checkpoint) -> None:
    weights["count"] += 1


def other_dtype(weights: Checkpoint) -> None:
    weights["norm"] = weights["norm"].double()


@pytest.mark.parametrize("change", [no_number, count, other_dtype])
def test_what_no_patch_can_say_is_loaded_whole(
    workers: Callable[..., list[Any]], tmp_path: Path, change: Callable[[Checkpoint], None]
) -> None:
    weights, publisher, engines = checkpoint(), Publisher(Folder(tmp_path)), workers(tmp_path)
    publisher.publish(weights)
    updated(engines, 0)
    change(weights)
    weights["q"] += 1
    publisher.publish(weights)
    updated(engines, 1)
    weights["q"] += 1
    publisher.publish(weights)
    updated(engines, 2)
    assert loads(engines) == ["whole", "whole", "patch"]
    for engine in engines:
        assert_holds(engine.model, weights)


@pytest.mark.parametrize("form", ["quantised", "experts", "latent attention", "packed on CPUs"])
def test_weights_in_another_form_are_always_loaded_whole(
    workers: Callable[..., list[Any]],
    tmp_path: Path,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if form == "packed on CPUs":
        monkeypatch.setattr(
            import_module("vllm.platforms").current_platform, "is_cpu", lambda: True
        )
    elif form != "quantised":
        attribute = "w13_weight" if form == "experts" else "W_UV"
        monkeypatch.setattr(Packed, attribute, None, raising=False)
    settings = {"quant_config": object()} if form == "quantised" else {}
    weights, publisher = checkpoint(), Publisher(Folder(tmp_path))
    engines = workers(tmp_path, **settings)
    triton = workers(tmp_path, kernel_config=SimpleNamespace(moe_backend="triton"))
    for number in range(2):
        weights["q"] += 1
        publisher.publish(weights)
        updated(engines, number)
        updated(triton, number)
    assert loads(engines) == ["whole", "whole"]
    assert loads(triton) == ["whole", "patch" if form in ("quantised", "experts") else "whole"]


def test_after_a_failure_the_next_update_loads_the_whole_model(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights, publisher, engines = checkpoint(), Publisher(Folder(tmp_path)), workers(tmp_path)
    publisher.publish(weights)
    updated(engines, 0)
    old = {name: tensor.clone() for name, tensor in weights.items()}
    weights["q"] += 1
    weights["mlp"] -= 1
    publisher.publish(weights)
    for version, wanted in [(1, weights), (0, old)]:
        for engine in engines:
            for _ in range(2):  # a patch, then a whole load
                engine.model.failing = RuntimeError("no memory")
                with pytest.raises(VersionError, match=r"may be no version now.*no memory"):
                    updated([engine], 1)
        updated(engines, version)
        for engine in engines:
            assert_holds(engine.model, wanted)
        updated(engines, 0)
    assert loads(engines) == ["whole"] * 4


def test_a_loader_that_refuses_patches_gets_whole_models(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights, publisher, engines = checkpoint(), Publisher(Folder(tmp_path)), workers(tmp_path)
    for number in range(3):
        weights["q"] += 1
        weights["mlp"] -= 1
        publisher.publish(weights)
        if number == 1:
            for engine in engines:
                engine.model.failing = NotImplementedError("composed")
        updated(engines, number)
        for engine in engines:
            assert_holds(engine.model, weights)
    assert loads(engines) == ["whole", "whole", "whole"]


def test_a_version_that_is_not_there_leaves_the_model_as_it_is(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    weights, publisher, engines = checkpoint(), Publisher(Folder(tmp_path)), workers(tmp_path)
    with pytest.raises(VersionError, match="has no version yet"):
        updated(engines)
    publisher.publish(weights)
    updated(engines, 0)
    with pytest.raises(VersionError, match="no version 7"):
        updated(engines, 7)
    updated(engines, 0)
    assert loads(engines) == ["whole"]


def test_workers_are_not_left_to_find_different_newest_versions(
    workers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    Publisher(Folder(tmp_path)).publish(checkpoint())
    engines = workers(tmp_path, size=2)
    with pytest.raises(InputError, match="told the version"):
        updated(engines)
    updated(engines, 0)


def test_an_engine_without_a_store_says_what_is_missing(
    workers: Callable[..., list[Any]],
) -> None:
    with pytest.raises(InputError, match="POST /init_weight_transfer_engine first"):
        updated(workers(None))


def test_a_server_is_led_through_an_update_in_order() -> None:
    called: list[Any] = []
    with serving(lambda route, body: called.append((route, body))) as url:
        server = Server(url)
        server.connect(Path("/models"))
        server.serve(Version(7, 1))
    assert called == [
        ("/init_weight_transfer_engine", {"init_info": {"store": "/models"}}),
        ("/pause?mode=keep", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"version": 7}}),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/resume", None),
    ]


def test_what_a_server_says_is_told_and_it_stays_paused() -> None:
    called = []

    def answer(route: str, body: Any) -> None:
        called.append(route)
        if route == "/update_weights":
            raise ValueError("there is no version 7")

    with serving(answer) as url, pytest.raises(CommunicationError, match="500 there is no version"):
        Server(url).serve(Version(7, 1))
    assert called[-1] == "/update_weights"
    with pytest.raises(CommunicationError, match="refused"):
        Server(url).serve(Version(7, 1))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"garbage\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 500 no\r\nContent-Length: 99\r\n\r\nno memo", "500 no memo$"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_a_server_that_breaks_off_is_told(answer: bytes, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:

        def break_off() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        broken = thread.submit(break_off)
        with pytest.raises(CommunicationError, match=told):
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}").serve(Version(7, 1))
        broken.result()


def test_what_an_update_that_failed_has_left_open_is_ended() -> None:
    called = []

    def answer(route: str, body: Any) -> None:
        called.append(route)
        if route == "/start_weight_update" and "/finish_weight_update" not in called:
            raise RuntimeError("a weight update is already active")

    with serving(answer) as url:
        Server(url).serve(Version(7, 1))
    assert called[1:4] == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    assert called[-1] == "/resume"


def test_the_entry_point_is_there_and_does_nothing_without_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "vllm", {"vllm": {}})  # one that has no weight transfer
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["sparcel"].partition(":")
    getattr(import_module(module), name)()
    with pytest.raises(MissingDependencyError, match="needs vllm: install it"):
        fresh(monkeypatch, "sparcel.integrations.vllm.engine")


@pytest.mark.parametrize("module", stand_ins.MODULES)
def test_the_stand_ins_are_like_vllm(module: str) -> None:
    real = pytest.importorskip(module, reason="without vLLM")
    for name, stand_in in stand_ins.MODULES[module].items():
        if name != "current_platform":
            assert_alike(stand_in, getattr(real, name))
