"""The kernels compile for GPUs: what Triton's interpreter runs may still not compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_of_cuda(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compiled.py")
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
    assert len(ran.stdout.split()) >= 25
