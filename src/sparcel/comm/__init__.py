"""Communicators: they carry messages between ranks."""

from sparcel.core.comm import *
from sparcel.core.comm import __all__ as __all__
