"""What everything else speaks of: jobs, arrivals, orders, states, algorithms, problems, draws and errors."""

from .algorithm import Algorithm, IndependentWorkers
from .batched_gradients import BatchedGradients, OneAtATime
from .jobs import Again, Arrival, Cancel, Job, Order, Orders, Send, Wake, again, cancel, send, wake
from .problem import Problem, Samples
from .state import State

__all__ = [
    "Again",
    "Algorithm",
    "Arrival",
    "BatchedGradients",
    "Cancel",
    "IndependentWorkers",
    "Job",
    "OneAtATime",
    "Order",
    "Orders",
    "Problem",
    "Samples",
    "Send",
    "State",
    "Wake",
    "again",
    "cancel",
    "send",
    "wake",
]
