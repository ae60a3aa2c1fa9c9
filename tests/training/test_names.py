"""Names of a model's tensors, whatever it was wrapped in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core.training.driver import model_names
from sparcel.errors import InputError

WRAPPERS = st.sampled_from(["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."])
PATHS = st.lists(st.sampled_from(["0", "layers", "encoder", "weight"]), min_size=1, max_size=4)


@given(st.data(), st.lists(PATHS.map(tuple), unique=True, min_size=1, max_size=5))
def test_wrappers_are_taken_off(data: st.DataObject, paths: list[tuple[str, ...]]) -> None:
    outside = "".join(data.draw(st.lists(WRAPPERS | st.just("module."), max_size=3)))
    own = {}
    for path in paths:
        inside = ["".join(data.draw(st.lists(WRAPPERS, max_size=2))) for _ in path]
        own[outside + ".".join(a + b for a, b in zip(inside, path, strict=True))] = ".".join(path)
    assert model_names(own) == own


def test_a_child_called_module_is_no_wrapper() -> None:
    """If others stand beside it. Two names do not become one."""
    names = ["module.weight", "head.weight"]
    assert model_names(names) == dict(zip(names, names, strict=True))
    with pytest.raises(InputError, match=r"'_orig_mod.a' and 'a' are both 'a' without"):
        model_names(["_orig_mod.a", "a"])
