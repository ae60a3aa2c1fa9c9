"""Formats: how a stream is laid out in bytes for the wire."""

from sparcel.core.formats import *
from sparcel.core.formats import __all__ as __all__
