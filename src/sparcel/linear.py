"""Linear models on high-dimensional sparse rows, fitted by one process or many."""

from typing import TYPE_CHECKING

from sparcel.products import linear as _room
from sparcel.products.linear import __all__ as __all__

if TYPE_CHECKING:
    from sparcel.products.linear import *
else:

    def __getattr__(name: str) -> object:
        """Import what is used when it is first used, as the room does."""
        return getattr(_room, name)
