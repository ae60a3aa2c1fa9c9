"""Weight deltas: what changed since the last version, to everyone who serves the model.

- By a store, in a line on either side: `Publisher` or `ShardedPublisher`, and `Subscriber`, which
  makes an `Update`, at once or by way of `Ready`.
- Stores: `Folder`, what `store_at` returns, and any other `Store`. `read_index` returns what is
  there, an `Index` of entries (`Entry`).
- One copy a host: a `Follower` keeps it, and each process reads a `Mirror`, which tells what it has
  `Seen`.
- From rank to rank: `broadcast`, and `Arriving`.
- Without stores: `encode` makes chunks; `apply_` applies them, at once or by way of `prepare` and
  `Prepared`, and returns an `Inverse`. `decode` yields each `Change`; `assign_` writes changes.
- What weights are: a `Version`, which `version_of` returns.
- Errors: `InputError`, `FormatError` and `VersionError`, which are ValueErrors.
"""

from sparcel.errors import FormatError, InputError, VersionError
from sparcel.products.delta.applying import apply_, assign_, prepare
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.decoding import Change, decode
from sparcel.products.delta.encoding import encode
from sparcel.products.delta.follower import Follower, HostSubscriber
from sparcel.products.delta.index import Entry, Index, read_index
from sparcel.products.delta.mirror import Mirror, Seen
from sparcel.products.delta.parts import version_of
from sparcel.products.delta.prepared import Inverse, Prepared
from sparcel.products.delta.publisher import Publisher
from sparcel.products.delta.sharded import Arriving, ShardedPublisher, broadcast
from sparcel.products.delta.subscriber import Ready, Subscriber, Update
from sparcel.products.stores import Folder, Store, store_at

__all__ = [
    "Arriving",
    "Change",
    "Entry",
    "Folder",
    "Follower",
    "FormatError",
    "HostSubscriber",
    "Index",
    "InputError",
    "Inverse",
    "Mirror",
    "Prepared",
    "Publisher",
    "Ready",
    "Seen",
    "ShardedPublisher",
    "Store",
    "Subscriber",
    "Update",
    "Version",
    "VersionError",
    "apply_",
    "assign_",
    "broadcast",
    "decode",
    "encode",
    "prepare",
    "read_index",
    "store_at",
    "version_of",
]
