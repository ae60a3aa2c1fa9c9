"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.rows.documents import read_json_lines, read_lines, read_tsv
from sparcel.rows.rows import Rows, concatenate
from sparcel.rows.text import HashedNGrams

__all__ = [
    "HashedNGrams",
    "Rows",
    "concatenate",
    "read_json_lines",
    "read_lines",
    "read_tsv",
]
