"""SGLang: each worker's model is, bit for bit, its part of the version that it was told."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparcel.errors import CommunicationError, InputError
from sparcel.integrations.sglang import Server
from sparcel.products.delta import Folder, Publisher, Version
from sparcel.products.delta.mirror import PAGE, Page
from tests.integrations.stand_ins import sglang as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, install, parameters
from tests.integrations.stand_ins.server import serving

ROOT = Path(__file__).parents[2]

Checkpoint = dict[str, Tensor]


def checkpoint() -> Checkpoint:
    torch.manual_seed(3)
    return {
        "q": torch.randn(4, 6).bfloat16(),
        "scale": torch.randn(6),
        "packed": torch.randint(0, 255, (8, 3), dtype=torch.uint8),
    }


class Half:
    """What one of two workers holds of the checkpoint: every other row."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: Checkpoint = {}
        self.failing: list[Exception] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.held[name] = weight[self.rank :: 2].clone()
            if self.failing:
                raise self.failing.pop()

    def assert_holds(self, weights: Checkpoint) -> None:
        assert self.held.keys() == weights.keys()
        for name, held in self.held.items():
            own = weights[name][self.rank :: 2].contiguous()
            assert torch.equal(held.view(torch.uint8), own.view(torch.uint8)), name


class SGLang:
    """A server with two workers on one host, as far as its control routes go."""

    def __init__(self, stages: int = 1) -> None:
        register = plugin()
        self.models = [Half(0), Half(1)]
        self.called: list[tuple[str, Any]] = []
        self.paused, self.weight_version = False, "default"
        group, self.threads, self.updaters = stand_ins.Group(2), ThreadPoolExecutor(2), []
        updating = import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
        managing = import_module("sglang.srt.managers.tokenizer_manager")
        for rank, model in enumerate(self.models):  # each in what would be a process of its own
            updating.WeightUpdater = type("WeightUpdater", (stand_ins.WeightUpdater,), {})
            managing.TokenizerManager = type("Manager", (stand_ins.TokenizerManager,), {})
            register()
            stand_ins.HookRegistry.apply_hooks()
            updater = updating.WeightUpdater(
                tp_rank=rank,
                device="cpu",
                gpu_id=rank,
                model_config=None,
                custom_weight_loaders={},
                get_model=lambda model=model: model,
                update_model_fields=lambda *_, **__: None,
                recapture_cuda_graph=lambda: None,
                get_model_runner=lambda: None,
            )
            self.updaters.append((updater, rank, group, stages))
        self.manager = managing.TokenizerManager()
        self.manager.model_path, self.manager.served_model_name = "my/model", "tiny"
        self.manager.load_format = "auto"

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        self.called.append((route, body))
        if route == "/pause_generation":
            self.paused = True
        elif route == "/continue_generation":
            self.paused = False
        else:
            assert route == "/update_weights_from_disk"
            return self._update(**body)
        return 200, {"status": "ok"}

    def _update(
        self,
        model_path: str,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[int, Any]:
        told = load_format or self.manager.load_format

        def update(one: Any) -> tuple[bool, str]:
            updater, *place = one
            stand_ins.be(*place)
            ok, message = updater.update_weights_from_disk(
                model_path, told, recapture_cuda_graph=False
            )
            return ok, message

        (ok, message), _ = self.threads.map(update, self.updaters)  # that of the first worker
        if ok:
            self.manager._update_model_path_info(model_path, told)
            self.weight_version = weight_version or self.weight_version
        return 200 if ok else 400, {"success": ok, "message": message, "num_paused_requests": 0}

    def assert_serves(self, version: Version, weights: Checkpoint) -> None:
        assert not self.paused
        assert self.weight_version == str(version.number)
        for model in self.models:
            model.assert_holds(weights)


def plugin() -> Callable[[], None]:
    """Return what SGLang calls in each process."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["sparcel"].partition(":")
    found: Callable[[], None] = getattr(import_module(module), name)
    return found


Start = Callable[..., tuple[SGLang, Server]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    install(monkeypatch, "sglang", stand_ins.MODULES)
    with ExitStack() as running:

        def starting(stages: int = 1) -> tuple[SGLang, Server]:
            engine = SGLang(stages)
            server = Server(running.enter_context(serving(engine.answer)))
            running.callback(engine.threads.shutdown)
            server.connect(tmp_path / "store", tmp_path / "mirror")
            return engine, server

        yield starting


def changed(weights: Checkpoint, number: int) -> Checkpoint:
    new = {name: tensor.clone() for name, tensor in weights.items()}
    new["q"][number % 4, 1] = (-0.0, float("inf"), float("nan"), 1)[number % 4]
    new["packed"].view(-1)[:: number + 2] += 1
    return new


@pytest.fixture
def history(tmp_path: Path) -> list[tuple[Version, Checkpoint]]:
    """Return three versions that are in the store."""
    weights, publisher, found = checkpoint(), Publisher(Folder(tmp_path / "store")), []
    for number in range(3):
        found.append((publisher.publish(weights), weights))
        weights = changed(weights, number)
    return found


def test_each_version_is_loaded_bit_for_bit_forth_and_back(
    start: Start, history: list[tuple[Version, Checkpoint]], tmp_path: Path
) -> None:
    engine, server = start()
    for number in (0, 1, 2, 0, 2, 2, 1):
        version, weights = history[number]
        server.serve(version)
        engine.assert_serves(version, weights)
    assert [file.name for file in tmp_path.glob("mirror/*.safetensors")] == ["model.safetensors"]
    manager = engine.manager
    told = manager.model_path, manager.served_model_name, manager.load_format
    assert told == ("my/model", "tiny", "auto")


def test_a_server_is_led_through_an_update_in_order(
    start: Start, history: list[tuple[Version, Checkpoint]]
) -> None:
    engine, server = start()
    server.serve(history[1][0])
    (pause, how), (update, body), (go_on, nothing) = engine.called
    assert (pause, how) == ("/pause_generation", {"mode": "retract"})
    assert (go_on, nothing) == ("/continue_generation", {})
    path = body.pop("model_path")
    # SGLang takes what is not on its disk for a repository, whose names have none of these.
    assert path.startswith("sparcel:") and not {"/", "\\", " "} & set(path)
    assert update == "/update_weights_from_disk"
    assert body == {"load_format": "safetensors", "weight_version": "1", "flush_cache": True}


def test_other_updates_go_their_way_untouched(
    start: Start, history: list[tuple[Version, Checkpoint]], tmp_path: Path
) -> None:
    engine, server = start()
    server.serve(history[0][0])
    other = changed(checkpoint(), 7)
    (tmp_path / "plain").mkdir()
    save_file(other, tmp_path / "plain" / "model.safetensors")
    told = engine.answer("/update_weights_from_disk", {"model_path": str(tmp_path / "plain")})
    assert told[0] == 200
    for model in engine.models:
        model.assert_holds(other)
    assert engine.manager.served_model_name == str(tmp_path / "plain")
    for path in ("/nowhere", "sparcel:", "sparcel:7", "sparcel:{}"):
        assert engine.answer("/update_weights_from_disk", {"model_path": path})[0] == 400
    server.serve(history[1][0])
    engine.assert_serves(*history[1])


def test_a_version_that_is_not_there_leaves_the_weights_and_the_pause(
    start: Start, history: list[tuple[Version, Checkpoint]]
) -> None:
    engine, server = start()
    with pytest.raises(CommunicationError, match=r"400 .*no version 7"):
        server.serve(Version(7, 1))
    server.serve(history[1][0])
    with pytest.raises(CommunicationError, match=r"400 .*VersionError: .*no version 7"):
        server.serve(Version(7, 1))
    assert engine.paused and engine.weight_version == "1"
    for model in engine.models:
        model.assert_holds(history[1][1])
    server.serve(history[2][0])
    engine.assert_serves(*history[2])


@pytest.mark.parametrize("times", [1, 2])  # SGLang tries once more, and does not catch that
@pytest.mark.parametrize("rank", [0, 1])
def test_what_any_worker_fails_at_is_told(
    start: Start, history: list[tuple[Version, Checkpoint]], rank: int, times: int
) -> None:
    engine, server = start()
    server.serve(history[0][0])
    engine.models[rank].failing = [RuntimeError("no memory")] * times
    with pytest.raises(CommunicationError, match=r"400 .*no memory"):
        server.serve(history[1][0])
    assert engine.paused
    server.serve(history[1][0])
    engine.assert_serves(*history[1])


def test_what_another_run_has_left_in_the_mirror_is_replaced(
    start: Start, history: list[tuple[Version, Checkpoint]], tmp_path: Path
) -> None:
    engine, server = start()
    server.serve(history[0][0])
    other = changed(checkpoint(), 5)
    version = Publisher(Folder(tmp_path / "other")).publish(other)
    server.connect(tmp_path / "other", tmp_path / "mirror")
    server.serve(version)
    engine.assert_serves(version, other)
    server.connect(tmp_path / "store", tmp_path / "mirror")
    with pytest.raises(CommunicationError, match=r"400 .*store has version 0 .*, and not 0 "):
        server.serve(version)
    server.serve(history[0][0])
    engine.assert_serves(*history[0])


def test_weights_that_change_while_they_are_loaded_are_told(
    start: Start,
    history: list[tuple[Version, Checkpoint]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, server = start()
    server.serve(history[0][0])
    load = Half.load_weights

    def load_late(half: Half, weights: Iterable[tuple[str, Tensor]]) -> None:
        load(half, weights)
        page = Page(tmp_path / "mirror" / PAGE, writes=True)
        with page.writing():  # as the worker of another server does
            page.tell(history[2][0], page.told()[1])

    monkeypatch.setattr(Half, "load_weights", load_late)
    with pytest.raises(CommunicationError, match=r"400 .*went to another version while version 1 "):
        server.serve(history[1][0])
    assert engine.paused


def test_pipeline_stages_are_refused(
    start: Start, history: list[tuple[Version, Checkpoint]]
) -> None:
    _, server = start(stages=2)
    with pytest.raises(CommunicationError, match=r"400 .*pipeline stages"):
        server.serve(history[0][0])


def test_a_server_without_a_store_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="call connect first"):
        Server("http://127.0.0.1:1").serve(Version(0, 0))


@pytest.mark.parametrize("module", stand_ins.MODULES)
def test_the_stand_ins_are_like_sglang(module: str) -> None:
    real = pytest.importorskip(module, reason="without SGLang")
    for name, stand_in in stand_ins.MODULES[module].items():
        if name == "HookRegistry":  # whose default is a HookType, which equals itself alone
            ours, its = (parameters(one.register) for one in (stand_in, real.HookRegistry))
            assert [one[:2] for one in ours] == [one[:2] for one in its]
        else:
            assert_alike(stand_in, getattr(real, name))
    if module.endswith("tokenizer_manager"):
        hooked = "_update_model_path_info"
        ours, its = (
            getattr(one, hooked) for one in (stand_ins.TokenizerManager, real.TokenizerManager)
        )
        assert_alike(ours, its)
