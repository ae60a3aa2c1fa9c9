"""A cluster on one machine: nodes joined by emulated Ethernet, and workers launched on them.

Everything runs in anonymous namespaces that vanish with the process that made them, so nothing is
left behind, however it ends. No traffic leaves the machine.
"""

from sparcel.lab.emulated import EmulatedNetwork, LabUnavailableError
from sparcel.lab.launch import Job, WorkerFailedError
from sparcel.lab.link import Link, parse_rate
from sparcel.lab.loopback import Loopback
from sparcel.lab.network import Network, open_network

__all__ = [
    "EmulatedNetwork",
    "Job",
    "LabUnavailableError",
    "Link",
    "Loopback",
    "Network",
    "WorkerFailedError",
    "open_network",
    "parse_rate",
]
