"""What users get, the wheel and the source distribution, is complete; the wheel is typed."""

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USERS_CODE = Path(__file__).with_name("public_api.py")


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Uses the objects of the development install; all of them again would take minutes.
    options = ["--no-deps", "--no-build-isolation", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("sparcel-*.whl")
    return path


@pytest.fixture(scope="module")
def users_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel, and with the other packages of this environment."""
    environment = tmp_path_factory.mktemp("user") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # The .pth files of this environment are followed only from its own site directory, so the new
    # environment does not find the development install.
    Path(here, "others.pth").write_text(sysconfig.get_path("purelib"))
    install = ["install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, *install, "--force-reinstall", wheel)
    return python


@pytest.mark.slow
def test_wheel_holds_the_extension_the_type_marker_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "sparcel/py.typed" in names
    assert [name for name in names if name.startswith("sparcel/_cpu.") and name.endswith(".so")]
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if name.endswith((".cpp", ".h")) or "/test" in name]


@pytest.mark.slow
def test_source_distribution_holds_what_the_build_and_its_users_need_and_no_more(
    tmp_path: Path,
) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "src")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    for_users = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md"}
    assert held == sources | for_users | {"CMakeLists.txt", "pyproject.toml"}


@pytest.mark.slow
def test_installed_package_computes(users_python: Path) -> None:
    script = (
        "import sparcel, torch\n"
        "assert 'site-packages' in sparcel.__file__, sparcel.__file__\n"
        "print(sparcel.topk(torch.tensor([1.0, -3.0, 2.0]), 2).indices.tolist())"
    )
    assert run(users_python, "-c", script) == "[1, 2]\n"


@pytest.mark.slow
def test_users_code_passes_a_strict_type_check(users_python: Path, tmp_path: Path) -> None:
    # This folder has no project configuration, so mypy checks the installed package alone.
    copy = tmp_path / USERS_CODE.name
    copy.write_text(USERS_CODE.read_text())
    # What mypy finds of the other packages, which takes most of the time, is kept between runs.
    options = ["--strict", "--config-file=", f"--cache-dir={ROOT / 'build' / 'mypy-of-users'}"]
    run(sys.executable, "-m", "mypy", *options, f"--python-executable={users_python}", copy)
