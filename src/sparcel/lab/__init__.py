"""A cluster on one machine: nodes joined by emulated Ethernet, and workers that run on them.

Everything runs in anonymous namespaces. They vanish with the process that made them, so nothing is
left behind however that process ends. No traffic leaves the machine.
"""

from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.failures import Ended, Line, WorkerFailedError, told_by_survivor
from sparcel.lab.launch import Workers
from sparcel.lab.link import Link, LinkBytes, link_bytes, parse_link, parse_rate
from sparcel.lab.network import Loopback, Network, open_network
from sparcel.lab.program import Faults, run

__all__ = [
    "EmulatedNetwork",
    "Ended",
    "Faults",
    "LabUnavailableError",
    "Line",
    "Link",
    "LinkBytes",
    "Loopback",
    "Network",
    "WorkerFailedError",
    "Workers",
    "link_bytes",
    "open_network",
    "parse_link",
    "parse_rate",
    "run",
    "told_by_survivor",
]
