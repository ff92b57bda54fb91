"""What everything else speaks of: jobs, arrivals, orders, states, algorithms, problems, draws and errors."""

from .algorithm import Algorithm, WaitsForNobody
from .jobs import Arrival, Job, Order, Orders, again, cancel, send, wake
from .joint_gradients import OneAtATime, Together
from .problem import Problem, Samples
from .state import State

__all__ = [
    "Algorithm",
    "Arrival",
    "Job",
    "OneAtATime",
    "Order",
    "Orders",
    "Problem",
    "Samples",
    "State",
    "Together",
    "WaitsForNobody",
    "again",
    "cancel",
    "send",
    "wake",
]
