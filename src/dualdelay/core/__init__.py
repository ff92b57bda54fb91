"""What everything else speaks of: jobs, arrivals, orders, states, algorithms, problems, draws and errors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# where each name is defined; imported when it is asked for, because errors and texts need no torch
_HOMES = {
    "algorithm": ("Algorithm", "IndependentWorkers"),
    "batched_gradients": ("BatchedGradients", "OneAtATime"),
    "jobs": (
        "Again",
        "Arrival",
        "Cancel",
        "Job",
        "Order",
        "Orders",
        "Poll",
        "Send",
        "Wake",
        "again",
        "cancel",
        "poll",
        "send",
        "wake",
    ),
    "problem": ("Problem", "Samples"),
    "state": ("State",),
    "work": ("Memory", "Message", "RunningJob"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A name of this room, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
