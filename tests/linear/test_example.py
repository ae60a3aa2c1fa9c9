"""The example script classifies text."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_script_classifies_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.tsv"
    rows = ["spam\tbuy cheap pills now", "ham\tlunch at noon", "spam\tcheap pills", "ham\tsee you"]
    file.write_text("label\ttext\n" + "".join(f"{row}\n" for row in rows * 10))
    monkeypatch.setattr("sys.argv", ["text_classifier.py", str(file)])
    runpy.run_path(str(ROOT / "examples/text_classifier.py"), run_name="__main__")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("after 10 epochs, mean loss 0.0")
    ham, spam = (float(number) for number in re.findall(r"\d\.\d*", told[1]))
    assert ham < 0.2 < 0.8 < spam
