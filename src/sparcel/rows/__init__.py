"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.rows.cache import fingerprint, load, shard, verify
from sparcel.rows.cache_writer import CacheWriter, save
from sparcel.rows.rows import Rows, concatenate
from sparcel.rows.svmlight import read_svmlight, svmlight_blocks

__all__ = [
    "CacheWriter",
    "Rows",
    "concatenate",
    "fingerprint",
    "load",
    "read_svmlight",
    "save",
    "shard",
    "svmlight_blocks",
    "verify",
]
