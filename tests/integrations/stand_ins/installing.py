"""Stand-ins as modules, and how far they are like what they stand for."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest


def install(patch: pytest.MonkeyPatch, package: str, modules: dict[str, dict[str, Any]]) -> None:
    """Let imports of a package find the contents of stand-in modules, and nothing else of it."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        patch.delitem(sys.modules, name)
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                patch.setitem(sys.modules, path, ModuleType(path))
                sys.modules[path].__path__ = []
        vars(sys.modules[name]).update(contents)


def fresh(patch: pytest.MonkeyPatch, module: str) -> Any:
    """Import one of our modules anew, with what is installed now."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{module}.")]:
        patch.delitem(sys.modules, name)
    return import_module(module)


def assert_alike(stand_in: Any, real: Any) -> None:
    """Check that a class or function can be called as the real one is, and is made of the same."""
    if not inspect.isclass(stand_in):
        assert parameters(stand_in) == parameters(real), stand_in.__qualname__
        return
    assert getattr(stand_in, "_fields", ()) == getattr(real, "_fields", ())
    assert is_dataclass(stand_in) == is_dataclass(real)
    if is_dataclass(stand_in):
        assert [field.name for field in fields(stand_in)] == [field.name for field in fields(real)]
    abstract = getattr(stand_in, "__abstractmethods__", frozenset())
    assert abstract == getattr(real, "__abstractmethods__", frozenset()), stand_in.__qualname__
    for name, member in vars(stand_in).items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            found = inspect.getattr_static(real, name)
            assert_alike(function, getattr(found, "__func__", found))


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    told = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in told]
