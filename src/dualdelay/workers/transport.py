"""What the coordinator needs of a transport: processes are started and stopped, requests sent, notices received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..core.work import Sent
from ..engine.half import Kept
from .messages import Notice, Request


class Transport(Protocol):
    """Reaches the workers' processes. Messages may be lost, delayed or repeated on the way, but not changed."""

    def now(self) -> float:
        """The seconds of a clock that never goes back; time spent in ``receive`` passes on it."""

    def start(self, worker: int, incarnation: int) -> None:
        """Start a worker's process; a ``Ready`` or ``Died`` will come. What was left of an earlier one is stopped."""

    def stop(self, worker: int) -> None:
        """End a worker's process, if there is one."""

    def put(self, x: Sent) -> Any:
        """Copy a model to where every worker can read it; returns its place, which requests carry."""

    def get(self, model: Any) -> Sent:
        """A model that was put."""

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        """Ask a worker for something; unless a message is lost, a ``Reply``, ``Evaluated`` or ``Died`` will come.

        ``held`` is what a worker whose process is new is to keep. A worker does one thing after the other, but for polls
        and evaluations that are made ``aside``, which reach it in the middle of a job.
        """

    def receive(self, timeout: float) -> list[Notice]:
        """What has come in, after waiting for it so many seconds at most; with a timeout of zero, all of it."""

    def kept(self, accepted: Mapping[int, int]) -> dict[int, Kept | None]:
        """What these workers keep, given the last reply taken from each; those that do not answer soon are missing."""

    def name_of(self, worker: int) -> str:
        """What people call a worker, if it has a name."""

    def why_not_started(self, worker: int) -> str:
        """What keeps a worker's process from starting, as far as that is known, as the rest of a sentence."""

    def close(self, ended: bool) -> None:
        """Stop what was started. If the run has not ended, it will go on later, and who waits for it may go on waiting."""
