"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.products.rows.cache import CacheWriter, fingerprint, load, save, shard
from sparcel.products.rows.rows import Rows, check, concatenate
from sparcel.products.rows.sources import (
    Source,
    SvmLight,
    Text,
    cached,
    describe,
    described,
    make_cache,
    map_rows,
    read_svmlight,
)
from sparcel.products.rows.text import HashedNGrams, read_json_lines, read_lines, read_tsv

__all__ = [
    "CacheWriter",
    "HashedNGrams",
    "Rows",
    "Source",
    "SvmLight",
    "Text",
    "cached",
    "check",
    "concatenate",
    "describe",
    "described",
    "fingerprint",
    "load",
    "make_cache",
    "map_rows",
    "read_json_lines",
    "read_lines",
    "read_svmlight",
    "read_tsv",
    "save",
    "shard",
]
