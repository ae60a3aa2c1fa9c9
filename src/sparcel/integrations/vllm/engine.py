"""The engine in vLLM's workers: versions come from a store, and go to vLLM's loaders as patches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sparcel.errors import InputError, VersionError, few, optional
from sparcel.products.delta import (
    Change,
    HostSubscriber,
    Seen,
    Store,
    Subscriber,
    Update,
    Version,
    store_at,
)

with optional("sparcel.integrations.vllm"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.platforms import current_platform

try:
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patching
except ImportError:  # vLLM had none once
    patching = None

Mirror: TypeAlias = Subscriber | HostSubscriber

_PATCHED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of checkpoints whose elements can be patched on every device."""
_AT_ONCE = 1 << 24
"""How many changes are on the device at a time: about 100 MB of bfloat16."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions are: a path or URL, as for `sparcel.delta.store_at`.

    ``mirror`` is a folder on each host in which the workers there keep one copy of the checkpoint
    together; by default each worker keeps one.
    """

    store: str
    mirror: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The number of the version to go to; by default the newest, for one worker without mirror."""

    version: int | None = None


class Engine(WeightTransferEngine):  # type: ignore[misc]
    """Keeps a worker's model at the versions of a store.

    Deltas are steps from old values, in the coordinates of a checkpoint, and a worker's model is
    cut, joined and maybe quantised. So the host keeps a mirror of the checkpoint: a delta is
    applied to it, and the new values go to the models of its workers. These share a folder
    (`sparcel.delta.HostSubscriber`), or each keeps a copy (`sparcel.delta.Subscriber`).

    The first version is loaded whole, and so is any that patches cannot make: where a tensor
    appears, vanishes, or is not of a plain float dtype; where a new value is NaN, which means
    "unchanged" to vLLM; and always where vLLM keeps weights in another form than checkpoints do:
    quantised models, experts unless ``moe_backend`` is ``triton``, multi-head latent attention,
    models whose loader refuses patches, and all models on CPUs.

    If vLLM fails while it loads a version, the error says so, and the next update loads the whole
    model from the mirror, even if there is no newer version.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._mirror: Mirror | None = None
        self._store: Store | None = None
        self._loaded: Version | None = None
        """What the model is, if it is a version."""
        self._patchable = _keeps_checkpoints(vllm_config, model)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin with an empty mirror."""
        self.shutdown()
        self._store, place = store_at(init_info.store), init_info.mirror
        self._mirror = HostSubscriber(self._store, place) if place else Subscriber(self._store)

    def start_weight_update(self) -> None:
        """Do nothing: each update is whole by itself."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Forget the mirror."""
        self._mirror = self._loaded = None

    @staticmethod
    def trainer_send_weights(*args: Any, **arguments: Any) -> None:
        """Refuse what vLLM asked of engines until 0.26: a publisher sends the weights."""
        raise NotImplementedError("publish weights by sparcel.delta.Publisher")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Go to a version, also on a machine without an accelerator, where vLLM's own raises."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Go to a version.

        Raises
        ------
        InputError
            If the engine was told no store, or no version where several workers would look for the
            newest one, and may find different ones.
        VersionError
            If the store does not lead there, or vLLM fails to load what does.
        """
        mirror, to = self._mirror, update_info.version
        if mirror is None:
            raise InputError("there is no store yet; POST /init_weight_transfer_engine first")
        together = isinstance(mirror, HostSubscriber)
        if to is None and (together or self.parallel_config.world_size_across_dp > 1):
            raise InputError("several workers must be told the version, such as {'version': 7}")
        for update in mirror.updates(to):  # type: ignore[arg-type]  # a number, if together
            self._patch(update, mirror)
        if mirror.version is None:
            raise VersionError(f"{self._store} has no version yet")
        if self._loaded != mirror.version:
            with self._loading(mirror.version):
                self._load_whole(mirror)

    def _patch(self, update: Update | Seen, mirror: Mirror) -> None:
        """Patch a delta into the model, or leave it to be loaded whole."""
        before, self._loaded = self._loaded, None
        if not self._patchable or update.base is None or update.base != before:
            return
        changes = _by_name(update)
        if changes is None:
            return
        with self._loading(update.version):
            try:
                for patches in _batches(changes, self.device):
                    patching.load_checkpoint_weight_patches(
                        self.model, patches, validate_unique_indices=False
                    )
            except NotImplementedError:  # the model's loader does more than copy
                self._patchable = False
                self._load_whole(mirror)

    def _load_whole(self, mirror: Mirror) -> None:
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(iter(mirror.tensors.items()))
        finally:  # half of a load would count in the next one
            finalize_layerwise_reload(self.model, self.model_config)
        if mirror.version and isinstance(mirror, HostSubscriber):
            mirror.check_at(mirror.version)
        if loaded is not None and not loaded:
            raise InputError(
                f"vLLM's model has none of the tensors that were published: {few(mirror.tensors)}"
            )

    @contextmanager
    def _loading(self, version: Version) -> Iterator[None]:
        """Note that the model is a version, if the block does not fail."""
        try:
            yield
        except Exception as error:
            raise VersionError(
                f"vLLM failed to load version {version}, and its model may be no version now; keep"
                f" it paused, and update again, which loads the whole model: {error!r}"
            ) from error
        self._loaded = version


def _keeps_checkpoints(vllm_config: Any, model: Any) -> bool:
    """Whether vLLM keeps the values of checkpoints as they are, only cut and joined.

    On CPUs it computes with packed copies of some, which patches do not reach.
    """
    if patching is None or current_platform.is_cpu():
        return False
    forms = {
        form
        for module in model.modules()
        for form in ("w13_weight", "W_UV")  # experts; what latent attention derives from weights
        if hasattr(module, form)
    }
    if "w13_weight" in forms and vllm_config.kernel_config.moe_backend == "triton":
        forms.remove("w13_weight")
    return vllm_config.quant_config is None and not forms


def _by_name(update: Update | Seen) -> dict[str, list[Change]] | None:
    """Return a delta's changes of each tensor, or None if patches cannot make them."""
    found: dict[str, list[Change]] = {}
    for change in update.changes():
        if change.new or change.values is None or change.dtype not in _PATCHED:
            return None
        if change.values.isnan().any():
            return None
        found.setdefault(change.name, []).append(change)
    return found


def _batches(changes: dict[str, list[Change]], device: torch.device) -> Iterator[list[Any]]:
    """Yield patches, one a tensor, with `_AT_ONCE` changes or a few more at a time."""
    batch, size = [], 0
    for name, parts in changes.items():
        values = torch.cat([part.values for part in parts if part.values is not None])
        indices = torch.cat([part.indices for part in parts])
        shape, dtype = parts[0].shape, parts[0].dtype
        batch.append(
            patching.CheckpointWeightPatch(
                name, shape, dtype, values.to(device), indices.to(device)
            )
        )
        size += len(values)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
