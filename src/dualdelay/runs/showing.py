"""What shows how a run goes on while it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..core import Algorithm
from .settings import Reporting


@contextmanager
def showing(
    reporting: Reporting, subject: str | Algorithm[Any], updates: int | None, time: float | None, *, real: bool = False
) -> Iterator[Reporting]:
    """The functions that are shown a run, with progress on standard error; without the rich package there is none."""
    progress = reporting.progress
    try:
        from .progress import RunProgress, WorkersView
    except ImportError:
        progress = False
    if not progress:
        yield reporting
    elif real:
        print("real workers: Ray and their processes take some seconds to start", file=sys.stderr)
        with WorkersView(subject, updates, time) as view:
            yield replace(reporting, log=(*reporting.log, view))
    else:
        with RunProgress(subject, updates, time) as watcher:
            yield replace(reporting, watch=(*reporting.watch, watcher))
