"""sparcel: sparse collectives for data-parallel training, native to PyTorch."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparcel import comm as comm
    from sparcel import training as training
    from sparcel.comm import simulate
    from sparcel.core.api import all_gather, all_reduce, all_reduce_topk, broadcast, reduce_scatter
    from sparcel.core.attaching import attach
    from sparcel.core.ops import Op
    from sparcel.core.stream import SparseStream
    from sparcel.schemes import Hierarchical, scheme
    from sparcel.selectors import topk
    from sparcel.training import Handle, Phase, Schedule

__version__ = version("sparcel")

__all__ = [
    "Handle",
    "Hierarchical",
    "Op",
    "Phase",
    "Schedule",
    "SparseStream",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_topk",
    "attach",
    "broadcast",
    "reduce_scatter",
    "scheme",
    "simulate",
    "topk",
]

_HOMES = {
    **dict.fromkeys(
        ("all_gather", "all_reduce", "all_reduce_topk", "broadcast", "reduce_scatter"), "api"
    ),
    **dict.fromkeys(("Hierarchical", "scheme"), "schemes"),
    **dict.fromkeys(("Handle", "Phase", "Schedule"), "training"),
    "Op": "ops",
    "SparseStream": "stream",
    "attach": "attaching",
    "simulate": "comm",
    "topk": "selectors",
}
"""The room in the core that has each public name."""

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Import a name when it is first used.

        Importing torch takes seconds. Commands must be able to end in one line before that, and
        those that need no torch do not wait for it.
        """
        if name in _HOMES:
            found = getattr(import_module(f"sparcel.core.{_HOMES[name]}"), name)
            return globals().setdefault(name, found)
        if not name.startswith("_") and find_spec(f"sparcel.{name}") is not None:
            return import_module(f"sparcel.{name}")
        raise AttributeError(f"module 'sparcel' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names and modules, also those not imported yet."""
        modules = {module.name for module in iter_modules(__path__)}
        return sorted({*globals(), *__all__, *modules})
