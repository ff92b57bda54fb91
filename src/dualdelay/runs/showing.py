"""What shows how a run goes on while it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core import Algorithm
from ..workers.settings import WorkerFleet
from .settings import Reporting


@contextmanager
def showing(
    reporting: Reporting, subject: str | Algorithm[Any], updates: int | None, time: float | None, workers: object = None
) -> Iterator[Reporting]:
    """The functions that are shown a run, with progress on standard error; without the rich package there is none."""
    progress = reporting.progress
    try:
        from .progress import RunProgress, WorkersView
    except ImportError:
        progress = False
    if not progress:
        yield reporting
    elif isinstance(workers, WorkerFleet):
        with WorkersView(subject, updates, time) as view:
            view.say(workers.starting)
            yield replace(reporting, log=(*reporting.log, view))
    else:
        with RunProgress(subject, updates, time) as watcher:
            yield replace(reporting, watch=(*reporting.watch, watcher))
