"""A real worker's own half: it computes what it is asked for, once, and keeps what the server has accepted."""

from __future__ import annotations

import copy
import threading
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Job, Problem
from ..core.devices import use_threads
from ..engine.half import Half, Kept
from .messages import Array, Evaluated, EvaluationRequest, JobRequest, Reply, as_arrays, as_tensors


class Worker:
    """One worker's process.

    What it keeps changes only when a request says that the server took the last reply, so a reply that was lost or turned
    down leaves no trace. A repeated request gets the same reply, one that was overtaken gets none.
    """

    def __init__(self, worker: int, problem: Problem, half: Half, threads: int) -> None:
        self._worker, self._problem, self._half, self._threads = worker, problem, half, threads
        self._lock = threading.Lock()
        self._sequence = -1  # of the last request
        self._reply: Reply | None = None  # the answer to it
        self._keep: Kept | None = None  # what is kept once that is accepted
        self._held: Kept | None = None
        self._x = torch.empty(0)  # a model of its own: what Ray hands out is read-only

    def compute(self, request: JobRequest, x: Any, held: Any) -> Reply | None:
        """Do a job; ``held`` is what this worker is to keep if it is new."""
        with self._lock:
            if request.sequence < self._sequence:
                return None
            if request.sequence == self._sequence:
                return self._reply
            if request.mean_samples:
                self._problem.set_mean_samples(request.mean_samples)
            if request.accepted == self._sequence and self._sequence >= 0:
                self._held = self._keep
            elif request.accepted < 0:
                self._held = None if held is None else copy.deepcopy(as_tensors(held))
            self._sequence, self._keep, self._reply = request.sequence, None, None
        start, keep = time.perf_counter(), None
        try:
            job = Job(self._worker, request.draw, request.version)
            done = self._half.run(self._problem, job, request.steps, self._model(x), self._held)
            value, seconds = as_arrays(done.message), time.perf_counter() - start
            reply = Reply(request, value, done.keep is not None, float(done.loss), seconds, steps=done.steps)
            keep = done.keep
        except BaseException:  # also sys.exit: a process that ends itself in silence would be missed for long
            reply = Reply(request, np.empty(0), False, float("nan"), time.perf_counter() - start, traceback.format_exc())
        with self._lock:
            self._reply, self._keep = reply, keep
        return reply

    def evaluate(self, request: EvaluationRequest, x: Array) -> Evaluated:
        """This worker's part of an evaluation, with the seconds it took, or a traceback."""
        part: dict[str, Any] | str
        try:
            if request.mean_samples:
                self._problem.set_mean_samples(request.mean_samples)
            self._problem.samples(self._worker)  # its data may have to be built, which is no part of it
            start, model = time.perf_counter(), self._model(x)
            some = () if request.samples is None else (request.samples,)
            measured = self._problem.measure(model, self._worker, *some)
            part = {name: v.detach().cpu().numpy() if isinstance(v, Tensor) else v for name, v in measured.items()}
            part |= {"loss": float(part["loss"]), "seconds": time.perf_counter() - start}
        except BaseException:
            part = traceback.format_exc()
        return Evaluated(request.worker, request.incarnation, request.evaluation, part)

    def samples(self) -> int | str | None:
        """How many samples this worker has, or why it cannot say."""
        try:
            return self._problem.samples(self._worker)
        except BaseException:
            return traceback.format_exc()

    def kept(self, accepted: int) -> Any:
        """What this worker keeps, given the last reply that the server took."""
        with self._lock:
            held = self._keep if accepted == self._sequence and accepted >= 0 else self._held
            return as_arrays(held)

    def _model(self, x: Any) -> Any:
        """What was sent, as tensors of its own: of what a message or a memory may hold, nothing is written over."""
        use_threads(self._threads)
        if isinstance(x, dict) or not self._half.is_default:
            return copy.deepcopy(as_tensors(x))
        if self._x.shape != x.shape:
            self._x = torch.from_numpy(np.empty_like(x))
        np.copyto(self._x.numpy(), x)
        return self._x
