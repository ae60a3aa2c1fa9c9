"""Files of labelled rows."""

import numpy as np
import pytest


@pytest.fixture
def svmlight(tmp_path):
    """A file of 300 rows, whose label is the sign of its first features."""
    random, file = np.random.default_rng(0), tmp_path / "train.svm"
    with file.open("w") as lines:
        for _ in range(300):
            columns = np.sort(random.choice(40, 8, replace=False)) + 1
            label = 1 if (columns <= 12).sum() > 2 else -1
            lines.write(f"{label} {' '.join(f'{column}:1' for column in columns)}\n")
    return file


@pytest.fixture
def tsv(tmp_path):
    file = tmp_path / "train.tsv"
    words = {"ham": ["lunch", "noon", "meeting"], "spam": ["cheap", "pills", "now"], "tea": ["cup"]}
    rows = [(label, word) for label, own in words.items() for word in own] * 20
    file.write_text("text\tlabel\n" + "".join(f"{word} word\t{label}\n" for label, word in rows))
    return file
