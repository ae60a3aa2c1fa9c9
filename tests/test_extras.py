"""What sparcel's extras install, and what it says where a package of theirs is missing."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparcel
from sparcel.errors import MissingDependencyError
from sparcel.tools.cli import app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparcel"
FOLDERS = ("core", "products", "tools")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

MODULES = {"scikit-learn": "sklearn"}
"""The modules that are named otherwise than their packages."""

EXTRAS_OF = {
    "cli": {"cli", "delta"},
    "lab": {"lab"},
    "plan": {"cli", "plots"},
    "bench": {"cli", "plots", "mpi"},
    "analysis": {"cli", "plots"},
    "comm": {"mpi"},
    "rows": {"linear"},
    "linear": {"linear", "cli", "plots"},
    "kernels": {"gpu"},
    "delta": {"delta"},
    "stores": {"delta"},
}
"""The extras that each room's modules may import from; other rooms need torch and numpy alone."""

REQUIRED = {"torch", "numpy", "typing_extensions"}
"""What is always there, because sparcel or torch requires it."""

BROUGHT_ALONG = {
    "integrations": {
        "lightning",
        "nemo_rl",
        "sglang",
        "skyrl",
        "torchft",
        "transformers",
        "verl",
        "vllm",
    }
}
"""What the users of a room have already, so that no extra installs it."""


def modules_of(extra: str) -> set[str]:
    packages = [re.split(r"[<>=\[;]", package)[0] for package in EXTRAS[extra]]
    return {MODULES.get(package, package) for package in packages} - {"sparcel"}


def imported(room: Path) -> set[str]:
    """Return the packages that a room's modules import."""
    names = set()
    for source in room.glob("**/*.py") if room.is_dir() else [room]:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names


def test_rooms_import_packages_of_their_own_extras_only() -> None:
    beside = [path for path in PACKAGE.glob("*") if path.name not in FOLDERS]
    inside = [path for folder in FOLDERS for path in PACKAGE.joinpath(folder).glob("*")]
    for room in [*beside, *inside]:
        if room.is_dir() or room.suffix == ".py":
            packages = imported(room) - {*sys.stdlib_module_names, "sparcel", *REQUIRED}
            installed = set().union(*(modules_of(extra) for extra in EXTRAS_OF.get(room.stem, ())))
            assert packages <= installed | BROUGHT_ALONG.get(room.stem, set()), room


def test_all_is_all() -> None:
    others = ",".join(extra for extra in EXTRAS if extra != "all")
    assert EXTRAS["all"] == [f"sparcel[{others}]"]


@pytest.mark.slow
def test_without_any_extra_the_package_works_and_the_command_says_what_it_needs() -> None:
    missing = set().union(*(modules_of(extra) for extra in EXTRAS))
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from sparcel.tools import analysis, bench, lab, plan\n"
        "import sparcel.__main__; sparcel.__main__.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "the sparcel command needs typer: pip install 'sparcel[cli]'\n"


@pytest.mark.parametrize(
    ("module", "command", "needs"),
    [
        (
            "pyroute2",
            "lab run -- true",
            "an emulated network needs pyroute2: pip install 'sparcel[lab]'",
        ),
        (
            "matplotlib",
            f"bench plot {ROOT / 'benchmarks/results/bench_8_nodes_1gbit.json'}",
            "sparcel bench plot needs matplotlib: pip install 'sparcel[plots]'",
        ),
    ],
)
def test_a_command_says_which_extra_to_install(
    module: str, command: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    error = CliRunner().invoke(app, command.split()).exception
    assert isinstance(error, MissingDependencyError)
    assert str(error) == needs


def test_the_version_is_that_of_the_installed_package() -> None:
    assert sparcel.__version__ == version("sparcel")
    assert CliRunner().invoke(app, ["--version"]).output == f"sparcel {sparcel.__version__}\n"
