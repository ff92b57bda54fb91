"""What everything else speaks of: jobs, arrivals, orders, states, algorithms, problems, draws and errors."""

from .algorithm import Algorithm, WaitsForNobody
from .batched_gradients import BatchedGradients, OneAtATime
from .jobs import Arrival, Job, Order, Orders, again, cancel, send, wake
from .problem import Problem, Samples
from .state import State

__all__ = [
    "Algorithm",
    "Arrival",
    "BatchedGradients",
    "Job",
    "OneAtATime",
    "Order",
    "Orders",
    "Problem",
    "Samples",
    "State",
    "WaitsForNobody",
    "again",
    "cancel",
    "send",
    "wake",
]
