"""A real worker's own half: it computes what it is asked for, once, and keeps what the server has accepted."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Job, Problem, RunningJob
from ..core.devices import keep_freed_memory, use_threads
from ..core.errors import BadWork
from ..core.tracebacks import told
from ..core.work import Sent, TakeGradient
from ..engine.half import Half, Kept, Task
from .messages import Array, Evaluated, EvaluationRequest, JobRequest, PollRequest, Reply, as_arrays, as_tensors

_ALIGNED = 64  # bytes of which a model begins at a multiple, as torch's own: a product's bits may depend on where it lies

GONE = "the model of this evaluation is not there any more"
"""What is answered then: it was given up, but this worker is to be asked for another one."""


class PolledJob(RunningJob):
    """A job that may be polled while it is done: it then takes no further step.

    How many steps it takes is known when it has ended. A method that wants to know before takes all that were ordered, if
    the job ends by itself; of one that is held there is no such number.
    """

    def __init__(self, over: Callable[[int], bool], hold: bool, job: Job, steps: int, gradient: TakeGradient) -> None:
        super().__init__(job, steps, gradient)
        self._over, self._hold, self._is_fixed = over, hold, False

    @property
    def steps(self) -> int:
        if self._hold and self.taken < self._most:
            raise BadWork(
                f"job {self.draw} of worker {self.worker} asks for job.steps in the middle of a job that ends when it is "
                "polled; expected that after the loop, for _ in job."
            )
        self._is_fixed = True
        return self._most

    def __iter__(self) -> Iterator[int]:
        for step in range(self.taken, self._most):
            if not self._is_fixed and self._over(step):
                self._most = step
                return
            yield step


class Worker:
    """One worker's process.

    What it keeps changes only when a request says that the server took the last reply, so a reply that was lost or turned
    down leaves no trace. A repeated request gets the same reply, one that was overtaken gets none.

    Jobs and evaluations are done by one thread, one after the other. Another one hears polls, and is asked what is kept.
    While a job that is held waits, the first one makes the evaluations that came by a third.
    """

    def __init__(self, worker: int, problem: Problem, half: Half, threads: int) -> None:
        keep_freed_memory()
        self._worker, self._problem, self._half, self._threads = worker, problem, half, threads
        self._turn = threading.Condition()
        self._sequence = -1  # of the last request
        self._reply: Reply | None = None  # the answer to it
        self._keep: Kept | None = None  # what is kept once that is accepted
        self._held: Kept | None = None
        self._x = torch.empty(0)  # a model of its own: what Ray hands out is read-only
        self._models: dict[int, Sent] = {}  # where models travel as differences: the last one, and what it was added to
        self._polled = -1  # jobs up to this sequence number are to end
        self._aside: tuple[EvaluationRequest, Any] | None = None  # what is to be evaluated in the middle of a job
        self._evaluated: EvaluationRequest | None = None  # what was evaluated last
        self._part: Evaluated | None = None  # what that came to, for the thread that waits for it

    def compute(self, request: JobRequest, x: Any, held: Any) -> Reply | None:
        """Do a job; ``held`` is what this worker is to keep if it is new."""
        with self._turn:
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
            if request.polled:
                self._polled = max(self._polled, request.sequence)
        start, keep = time.perf_counter(), None
        try:
            model = self._difference(request, x) if request.serial else self._model(x)
            task = Task(Job(self._worker, request.draw, request.version), model, request.steps, self._held)
            if request.hold or request.polled or request.steps > 1:
                running = partial(PolledJob, partial(self._is_over, request), request.hold)
                done = self._half.run(self._problem, task, running=running)
            else:
                done = self._half.run(self._problem, task)
            value, seconds = as_arrays(done.message), time.perf_counter() - start
            reply = Reply(request, value, done.keep is not None, float(done.loss), seconds, steps=done.steps)
            keep = done.keep
            if request.hold:
                self._wait(request)
        except KeyboardInterrupt:  # of somebody who ends the process, and not of the job
            raise
        except BaseException as error:  # also sys.exit: a process that ends itself in silence would be missed for long
            refused = str(error) if isinstance(error, BadWork) else ""
            seconds, text = time.perf_counter() - start, told(error)
            reply, keep = Reply(request, np.empty(0), False, float("nan"), seconds, text, refused=refused), None
        with self._turn:
            self._reply, self._keep = reply, keep
        return reply

    def _forget_reply(self) -> None:
        """Nothing is answered to the last request, also if it is repeated: its model was not there all the time."""
        with self._turn:
            self._reply, self._keep = None, None

    def poll(self, request: PollRequest) -> None:
        """The job with that number is to end, now or as soon as it has come, and any before it."""
        with self._turn:
            self._polled = max(self._polled, request.sequence)
            self._turn.notify_all()

    def _is_over(self, request: JobRequest, step: int) -> bool:
        """Whether a job ends before this step; what is to be evaluated meanwhile is evaluated here."""
        self._evaluate_aside()
        return self._polled >= request.sequence

    def _wait(self, request: JobRequest) -> None:
        """Wait until a job is polled that has taken all its steps."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._polled >= request.sequence or self._aside is not None)
                if self._polled >= request.sequence:
                    return
            self._evaluate_aside()

    def evaluate(self, request: EvaluationRequest, x: Array) -> Evaluated | None:
        """This worker's part of an evaluation, with the seconds it took, or a traceback; None if it was made aside."""
        with self._turn:
            if request.aside and self._evaluated == request:
                return None
            self._aside = None
        answer = self._measured(request, lambda: self._model(x))
        with self._turn:
            self._evaluated, self._part = request, None
            self._turn.notify_all()
        return answer

    def aside(self, request: EvaluationRequest, x: Array) -> Evaluated | None:
        """The same while a job is held, made by the thread that does the job; None if it is not made in a job."""
        with self._turn:
            if self._evaluated != request:
                self._aside = (request, x)
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._evaluated == request)
            answer, self._part = self._part, None
            return answer

    def _without_model(self, request: EvaluationRequest) -> Evaluated | None:
        """What is answered to an evaluation whose model is not there any more; None if it was made aside."""
        with self._turn:
            known, self._evaluated, self._part = self._evaluated == request, request, None
            self._turn.notify_all()
        return None if known else Evaluated(*request[:3], GONE)

    def _evaluate_aside(self) -> None:
        if self._aside is None:
            return
        with self._turn:
            waiting, self._aside = self._aside, None
        if waiting is not None:
            request, x = waiting
            part = self._measured(request, lambda: copy.deepcopy(as_tensors(x)))  # the job has its own model
            with self._turn:
                self._evaluated, self._part = request, part
                self._turn.notify_all()

    def _measured(self, request: EvaluationRequest, model: Callable[[], Any]) -> Evaluated:
        part: dict[str, Any] | str
        try:
            if request.mean_samples:
                self._problem.set_mean_samples(request.mean_samples)
            self._problem.samples(self._worker)  # its data may have to be built, which is no part of it
            start, x = time.perf_counter(), model()
            some = () if request.samples is None else (request.samples,)
            measured = self._problem.measure(x, self._worker, *some)
            part = {name: v.detach().cpu().numpy() if isinstance(v, Tensor) else v for name, v in measured.items()}
            part |= {"loss": float(part["loss"]), "seconds": time.perf_counter() - start}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            part = told(error)
        return Evaluated(request.worker, request.incarnation, request.evaluation, part)

    def samples(self) -> int | str | None:
        """How many samples this worker has, or why it cannot say."""
        try:
            return self._problem.samples(self._worker)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return told(error)

    def kept(self, accepted: int) -> Any:
        """What this worker keeps, given the last reply that the server took."""
        with self._turn:
            held = self._keep if accepted == self._sequence and accepted >= 0 else self._held
            return as_arrays(held)

    def _model(self, x: Any) -> Any:
        """What was sent, as tensors of its own: of what a message or a memory may hold, nothing is written over."""
        use_threads(self._threads)
        if isinstance(x, dict) or not self._half.is_default:
            return copy.deepcopy(as_tensors(x))
        if x.flags.writeable and x.__array_interface__["data"][0] % _ALIGNED == 0:  # nobody else reads its message
            return torch.from_numpy(x)
        if self._x.shape != x.shape:
            self._x = torch.empty(x.shape, dtype=torch.from_numpy(x[:0].copy()).dtype)
        np.copyto(self._x.numpy(), x)
        return self._x

    def _difference(self, request: JobRequest, x: Any) -> Any:
        """The model that was sent: whole, as differences to one that is here, or as the name of that alone."""
        use_threads(self._threads)
        before = self._models[request.base] if request.base else None
        model: Any = copy.deepcopy(as_tensors(x)) if before is None else before
        for step in x if before is not None and x is not None else ():
            if isinstance(model, Tensor):
                model = model + step[""].unpack()
            else:
                model = {name: model[name] + part.unpack() for name, part in step.items()}
        self._models = {request.serial: model} if before is None else {request.base: before, request.serial: model}
        return copy.deepcopy(model)
