"""Weight deltas: what changed since the last version, to everyone who serves the model."""

from sparcel.delta.applying import Inverse as Inverse
from sparcel.delta.applying import Prepared as Prepared
from sparcel.delta.applying import apply_ as apply_
from sparcel.delta.applying import assign_ as assign_
from sparcel.delta.applying import prepare as prepare
from sparcel.delta.broadcast import Arriving as Arriving
from sparcel.delta.broadcast import broadcast as broadcast
from sparcel.delta.chunk import Version as Version
from sparcel.delta.decoding import Change as Change
from sparcel.delta.decoding import decode as decode
from sparcel.delta.encoding import encode as encode
from sparcel.delta.encoding import version_of as version_of
from sparcel.delta.index import Entry as Entry
from sparcel.delta.index import Index as Index
from sparcel.delta.index import read_index as read_index
from sparcel.delta.publisher import Publisher as Publisher
from sparcel.delta.sharded import ShardedPublisher as ShardedPublisher
from sparcel.delta.stores import Folder as Folder
from sparcel.delta.stores import Store as Store
from sparcel.delta.stores import store_at as store_at
from sparcel.delta.subscriber import Ready as Ready
from sparcel.delta.subscriber import Subscriber as Subscriber
from sparcel.delta.subscriber import Update as Update
