"""Documents and labels from blocks of text files, and errors that name the line."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel.errors import InputError
from sparcel.products.rows import read_json_lines, read_lines, read_tsv
from sparcel.products.rows.text import Documents, Fail

Reader = Callable[[bytes, Fail], Documents]


def fail(line: int, what: str) -> InputError:
    return InputError(f"file:{line}: {what}")


tsv = partial(read_tsv, header="label\tkind\ttext", label="label", text="text")
json_lines = partial(read_json_lines, label="label", text="text")

# Lines end at \n alone: \v, \x1c and \u2028 are part of them.
fields = st.text(st.sampled_from("aé\"'\\ \v\x1c\x85\u2028日"), max_size=8)
labels = fields.filter(bool)
ends = st.sampled_from(["\n", "\r\n"])


def block(lines: list[str], end: str, last: bool) -> bytes:
    """Join lines; the last one may lack its end, unless it is empty."""
    return "".join(line + end for line in lines).removesuffix("" if last else end).encode()


def check(reader: Reader, lines: list[str], end: str, expected: Documents) -> None:
    """Read the lines at once, with and without the last end, and in two blocks."""
    assert reader(block(lines, end, True), fail) == expected
    if lines and lines[-1]:
        assert reader(block(lines, end, False), fail) == expected
    half = len(lines) // 2
    first = reader(block(lines[:half], end, True), fail)
    second = reader(block(lines[half:], end, True), fail)
    assert first[0] + second[0] == expected[0]


@given(st.lists(fields), ends)
def test_each_line_is_a_document(lines: list[str], end: str) -> None:
    check(read_lines, lines, end, (lines, None))


@given(st.lists(st.tuples(labels, fields, fields)), ends)
def test_tsv_takes_two_of_its_columns(rows: list[tuple[str, str, str]], end: str) -> None:
    expected = [row[2] for row in rows], [row[0] for row in rows]
    check(tsv, ["\t".join(row) for row in rows], end, expected)


@given(
    st.one_of(
        *(
            st.lists(st.tuples(kind, st.text()))
            for kind in (
                st.text(min_size=1).filter(lambda t: t[-1] != "\0"),
                st.integers(-(2**63), 2**63 - 1),
            )
        )
    ),
    st.booleans(),
    ends,
)
@settings(max_examples=10)
def test_json_lines_take_two_of_their_fields(
    rows: list[tuple[str | int, str]], escaped: bool, end: str
) -> None:
    records = [{"text": text, "other": [None], "label": label} for label, text in rows]
    lines = [json.dumps(record, ensure_ascii=escaped) for record in records]
    check(json_lines, lines, end, ([text for _, text in rows], [label for label, _ in rows]))


@pytest.mark.parametrize(
    ("reader", "wrong", "message"),
    [
        (read_lines, b"\xc3\xa9\xe9", "byte 0xe9 is not UTF-8"),
        (read_lines, b"ends \xc3", "byte 0xc3 is not UTF-8"),
        (tsv, b"a\tb", "expected 3 fields, got 2"),
        (tsv, b"a\tb\tc\td", "expected 3 fields, got 4"),
        (tsv, b"", "expected 3 fields, got 1"),
        (tsv, b"\tb\tc", "the label, column 'label', is empty"),
        (tsv, b"a\0\tb\tc", "the label, column 'label', ends with a NUL, which arrays of texts"),
        (tsv, b"a" * 1001 + b"\tb\tc", "the label, column 'label', is longer than 1000 charact"),
        (json_lines, b"", "not JSON: Expecting value"),
        (json_lines, b'{"label": "a", "text": ', "not JSON"),
        (json_lines, b"[" * 100_000, "not JSON"),
        (json_lines, b'["a"]', "expected a JSON object, got '"),
        (json_lines, b'{"label": "a"}', "expected a field 'text', got 'label'"),
        (json_lines, b'{"text": "a"}', "expected a field 'label', got 'text'"),
        (json_lines, b'{"label": "a", "text": 3}', "field 'text' must be a string, got 3"),
        (json_lines, b'{"label": true, "text": ""}', "field 'label' must be a string, got true"),
        (json_lines, b'{"label": 1, "text": ""}', "field 'label' must be a string, got 1"),
        (json_lines, b'{"label": "a\\u0000", "text": ""}', "field 'label', ends with a NUL, which"),
        (json_lines, b'{"label": "", "text": ""}', "the label, field 'label', is empty"),
    ],
)
def test_errors_name_the_line(reader: Reader, wrong: bytes, message: str) -> None:
    good = b'{"label": "a", "text": "b"}\n' if reader is json_lines else b"a\tb\tc\n"
    with pytest.raises(InputError, match=message) as raised:
        reader(good + good + wrong + b"\n" + good, fail)
    assert str(raised.value).startswith("file:2: ")


def test_the_first_label_may_be_a_string_or_an_integer() -> None:
    for wrong in ("null", "1.5", "false", "[1]"):
        line = b'{"label": %s, "text": "a"}' % wrong.encode()
        with pytest.raises(InputError, match="file:0: field 'label' must be a string or an int"):
            json_lines(line, fail)


@pytest.mark.parametrize("header", ["", "Label\ttext", "label\ttext\ttext", "text"])
def test_the_header_has_each_column_once(header: str) -> None:
    with pytest.raises(InputError, match=r"^expected one column '(label|text)', got '"):
        read_tsv(b"", fail, header=header, label="label", text="text")


def test_without_a_label_there_are_no_labels() -> None:
    assert read_tsv(b"a\tb\n", fail, header="kind\ttext", label=None, text="text") == (["b"], None)
    assert read_json_lines(b'{"text": "b"}', fail, label=None, text="text") == (["b"], None)
