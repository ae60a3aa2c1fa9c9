"""The command, called in this process."""

from typer.testing import CliRunner

from sparcel.tools.cli import app


def sparcel(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["linear", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def measures(output: str) -> dict[str, float]:
    return {name: float(value) for name, value in map(str.split, output.splitlines())}
