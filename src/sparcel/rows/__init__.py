"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.rows.cache import fingerprint, load, shard
from sparcel.rows.cache_writer import CacheWriter, save
from sparcel.rows.documents import read_json_lines, read_lines, read_tsv
from sparcel.rows.rows import Rows, check, concatenate
from sparcel.rows.sources import (
    Source,
    Text,
    cached,
    describe,
    described,
    make_cache,
    map_rows,
)
from sparcel.rows.svmlight import SvmLight, read_svmlight
from sparcel.rows.text import HashedNGrams

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
