"""What shows how a run goes on while it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def showing(
    name: str, updates: int | None, time: float | None, *, progress: bool, real: bool = False
) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Progress on standard error, as ``watch`` and ``log`` functions for a run; none without the rich package."""
    nothing: dict[str, tuple[Any, ...]] = {"watch": (), "log": ()}
    try:
        from .progress import RunProgress, WorkersView
    except ImportError:
        progress = False
    if not progress:
        yield nothing
    elif real:
        print("real workers: Ray and their processes take some seconds to start", file=sys.stderr)
        with WorkersView(name, updates, time) as view:
            yield {**nothing, "log": (view,)}
    else:
        with RunProgress(name, updates, time) as watcher:
            yield {**nothing, "watch": (watcher,)}
