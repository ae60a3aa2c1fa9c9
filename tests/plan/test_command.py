"""The planner's command: saved rates, and errors that name the remedy."""

import pytest
from typer.testing import CliRunner

from sparcel.core.cost import default_rates
from sparcel.tools.cli import app


def said(command):
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


def test_saved_rates_answer_in_place_of_stated_ones(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(default_rates().to_json())
    assert "8 nodes of 1 rank, 1 Gbit/s" in said(f"plan --rates {file} --compute 1ms")
    assert "parameter-server" in said(f"plan --rates {file} --topology parameter-server")
    # Rates do not contain the device, so --device still counts.
    fast, slow = (said(f"plan --rates {file} --device {name}") for name in ("gpu", "cpu"))
    assert fast != slow


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "8 nodes of 1 rank, 1 Gbit/s (1 Gbit/s and 100 µs, assumed)"),
        ("--latency 1ms", "1 Gbit/s (1 Gbit/s and 1000 µs, stated)"),
        ("--nodes 1 --ranks-per-node 2 --latency 1ms", "80 Gbit/s (80 Gbit/s and 10 µs, assumed)"),
    ],
)
def test_a_plan_says_which_figures_were_stated(options, words):
    assert words in said(f"plan {options}")


def test_the_interval_of_outer_steps_is_an_option():
    often, seldom = (
        said(f"plan --compute 1ms --every {every}").splitlines() for every in (10, 100)
    )
    assert "Outer steps every 10 steps, in shares of a step." in often
    assert "Outer steps every 100 steps, in shares of a step." in seldom
    rows = [[line for line in lines if line.startswith("outer")] for lines in (often, seldom)]
    assert len(rows[0]) == 3
    assert not set(rows[0]) & set(rows[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--compute 12", "a time is a number and us, ms or s"),
        ("--bandwidth 1", "a rate is a number"),
        ("--device tpu", "device cannot be 'tpu'"),
        ("--parameters 5M", "the time to compute 5M parameters is not known"),
        ("--save x.json", "add --measure"),
        ("--measure --save nowhere/x.json", "there is no folder nowhere"),
        ("--measure --nodes 4", "--measure takes the place of --nodes"),
        (f"--rates {__file__} --bandwidth 1gbit", "--rates takes the place of --bandwidth"),
        (f"--rates {__file__} --device cpu --compute 1s", "takes the place of --device"),
        ("--parameters 7B --model gpt2", "--parameters takes the place of --model"),
        ("--measure", "start the command on each with torchrun"),
    ],
)
def test_errors_name_the_remedy(options, words, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["plan", *options.split()])
    assert result.exit_code != 0
    assert words in str(result.exception)
