"""What happens next in a run: an arrival, a wake, or a change among the workers."""

from __future__ import annotations

from typing import NamedTuple


class Due(NamedTuple):
    """What happens next; ``kind`` is arrival, wake, left or joined, or what else a real run has put into its trace."""

    time: float
    kind: str
    worker: int = -1
    draw: int = -1
    seconds: float = 0.0
    start: float = 0.0  # when the worker begins to compute
    batches: int = 1
    text: str = ""  # what a person should know about it
