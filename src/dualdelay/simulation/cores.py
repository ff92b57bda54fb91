"""Gradients of jobs in flight on several cores: one thread each, and a free one takes the oldest job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from ..core import Problem
from ..core.devices import use_threads
from ..engine.half import Half, Task
from .gradients import Computed, Gradients, Key

_WORTH = 3e-3  # seconds: shorter gradients are mostly Python, and two threads of that get in each other's way


class _Job(Future[Computed]):
    """A job that was asked for."""

    def __init__(self, task: Task, compute: Callable[[Problem, Task], Computed]) -> None:
        super().__init__()
        self._task, self._compute = task, compute

    def run(self, problem: Problem) -> None:
        try:
            self.set_result(self._compute(problem, self._task))
        except BaseException as error:  # raised again where the job is due: in this thread it would be lost
            self.set_exception(error)


class GradientsOnCores(Gradients):
    """Jobs are computed ahead of time by several threads; the result does not depend on which does what.

    The calling thread is one of them: while the job that is due is being computed elsewhere, it takes another one.
    """

    begins_early = True

    def __init__(self, problem: Problem, cores: int, threads: int, half: Half | None = None) -> None:
        super().__init__(problem, half)
        self._threads = threads
        self._jobs: dict[Key, _Job] = {}
        self._waiting: dict[Key, _Job] = {}  # in order of sending
        self._change = threading.Condition()
        self._closed = False
        self._helpers = [threading.Thread(target=self._help, args=(problem.twin(),), daemon=True) for _ in range(cores - 1)]
        for helper in self._helpers:
            helper.start()

    def begin(self, task: Task) -> None:
        job = _Job(task, self.compute)
        with self._change:
            self._jobs[task.key] = self._waiting[task.key] = job
            self._change.notify()

    def take(self, task: Task) -> Computed:
        if task.key not in self._jobs:
            self.begin(task)
        due = self._jobs[task.key]
        while not due.done():
            with self._change:
                job = self._waiting.pop(task.key, None) or self._oldest()
                while job is None and not due.done():
                    self._change.wait()
                    job = self._oldest()
            if job is not None:
                job.run(self._problem)
        return due.result()

    def ended(self, worker: int, draws: Iterable[int]) -> None:
        with self._change:
            for draw in draws:
                self._jobs.pop((worker, draw), None)
                self._waiting.pop((worker, draw), None)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()
        for helper in self._helpers:
            helper.join()

    def _oldest(self) -> _Job | None:
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def _help(self, problem: Problem) -> None:
        use_threads(self._threads)
        while True:
            with self._change:
                while not (self._waiting or self._closed):
                    self._change.wait()
                if self._closed:
                    return
                job = self._oldest()
            if job is not None:
                job.run(problem)
                with self._change:
                    self._change.notify_all()


def cores_here() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_worth(problem: Problem, cores: int | None) -> int:
    """How many cores to use: as many as asked for, or all if a gradient takes long enough; one if it must be alone."""
    if not problem.parallel or cores == 1:
        return 1
    if cores is not None:
        return cores
    available = cores_here()
    if available == 1:
        return 1
    x = problem.start(0)
    problem.gradient(x, 0, 0)  # the first is slower
    for _ in range(3):  # on a busy machine a short one may look long
        begin = time.perf_counter()
        problem.gradient(x, 0, 0)
        if time.perf_counter() - begin <= _WORTH:
            return 1
    return available
