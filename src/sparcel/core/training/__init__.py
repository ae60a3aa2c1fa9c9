"""Named tensors in, updates out, all or nothing: what the drivers of all wrappers share."""

from sparcel.core.schemes.step import Costs
from sparcel.core.training.ahead import Ahead
from sparcel.core.training.averager import Averager
from sparcel.core.training.driver import Follower
from sparcel.core.training.handle import Handle, Stats
from sparcel.core.training.policy import Policy, Scope, stays_dense
from sparcel.core.training.ranks import Carrier, Shard
from sparcel.core.training.schedule import Phase, Schedule

__all__ = [
    "Ahead",
    "Averager",
    "Carrier",
    "Costs",
    "Follower",
    "Handle",
    "Phase",
    "Policy",
    "Schedule",
    "Scope",
    "Shard",
    "Stats",
    "stays_dense",
]
