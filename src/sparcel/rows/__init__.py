"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.rows.rows import Rows, concatenate

__all__ = ["Rows", "concatenate"]
