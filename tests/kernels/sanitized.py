"""A pytest plugin for `sanitize.sh`: loads `sparcel._cpu` from that script's build directory."""

import importlib.util
import os
import sys
from pathlib import Path

(_library,) = Path(os.environ["SPARCEL_CPU_DIRECTORY"]).glob("_cpu.*.so")
_spec = importlib.util.spec_from_file_location("sparcel._cpu", _library)
assert _spec is not None and _spec.loader is not None
sys.modules["sparcel._cpu"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["sparcel._cpu"])

from sparcel.core.kernels import cpu  # noqa: E402

assert cpu._cpu.__file__ == str(_library), "the kernels found another extension than the one built"
