"""Named tensors in, updates out, all or nothing: what the drivers of all wrappers share."""

from sparcel.schemes.costs import Costs
from sparcel.training.ahead import Ahead
from sparcel.training.averager import Averager
from sparcel.training.driver import Follower
from sparcel.training.handle import Handle, Stats
from sparcel.training.policy import Policy, Scope, stays_dense
from sparcel.training.ranks import Carrier, Shard
from sparcel.training.schedule import Phase, Schedule

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
