"""Labelled sparse rows, from text and SVMlight files, from matrices and from a cache on disk."""

from sparcel.products.rows import *
from sparcel.products.rows import __all__ as __all__
