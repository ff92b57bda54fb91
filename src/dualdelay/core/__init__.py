"""What everything else speaks of: jobs, arrivals, orders, states, algorithms, problems, draws and errors."""

from .algorithm import Algorithm, IndependentWorkers
from .batched_gradients import BatchedGradients, OneAtATime
from .jobs import Again, Arrival, Cancel, Job, Order, Orders, Poll, Send, Wake, again, cancel, poll, send, wake
from .problem import Problem, Samples
from .state import State
from .work import Memory, Message, RunningJob

__all__ = [
    "Again",
    "Algorithm",
    "Arrival",
    "BatchedGradients",
    "Cancel",
    "IndependentWorkers",
    "Job",
    "Memory",
    "Message",
    "OneAtATime",
    "Order",
    "Orders",
    "Poll",
    "Problem",
    "RunningJob",
    "Samples",
    "Send",
    "State",
    "Wake",
    "again",
    "cancel",
    "poll",
    "send",
    "wake",
]
