"""The communicator of a simulated cluster, and the time that a run takes on a simulated network."""

from sparcel.comm.simulated.communicator import SimulatedCommunicator
from sparcel.comm.simulated.network import Network
from sparcel.comm.simulated.run import Report, simulate

__all__ = ["Network", "Report", "SimulatedCommunicator", "simulate"]
