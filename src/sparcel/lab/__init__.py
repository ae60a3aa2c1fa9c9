"""A cluster on one machine: nodes joined by emulated Ethernet, and workers launched on them.

Everything runs in anonymous namespaces that vanish with the process that made them, so nothing is
left behind, however it ends. No traffic leaves the machine.
"""

from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.launch import Ended, Job, Line, WorkerFailedError
from sparcel.lab.link import Link, parse_rate
from sparcel.lab.loopback import Loopback
from sparcel.lab.network import Network, open_network
from sparcel.lab.program import Faults, run

__all__ = [
    "EmulatedNetwork",
    "Ended",
    "Faults",
    "Job",
    "LabUnavailableError",
    "Line",
    "Link",
    "Loopback",
    "Network",
    "WorkerFailedError",
    "open_network",
    "parse_rate",
    "run",
]
