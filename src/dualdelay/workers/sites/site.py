"""A site: a process that stays, has its own data, dials out, and works until it is told that the run has ended."""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core import Problem
from ...core.environment import environment
from ...core.errors import BadInput, DualDelayError
from ...core.tracebacks import kind_of, told
from ...core.version import __version__
from ...engine.half import Half
from ..messages import EvaluationRequest, JobRequest, PollRequest, Reply, is_told
from ..structures import UNSAYABLE, BadMessage
from ..worker import Worker
from . import keys, wire
from .line import Gone, Letter, Line, Lost, Refused, Session, Unknown

log = logging.getLogger("dualdelay")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0  # seconds between two tries, doubled each time
_PART = 8 * 2**20  # bytes of a message in one request
_QUIET = 60.0  # seconds between two lines about the same trouble

Prepare = Callable[[Mapping[str, Any]], tuple[Problem, Half]]
"""From what the server says of the run to the site's own problem and its half of the method."""


class _Made(NamedTuple):
    """What a site has built for a run, and the names by which the server knows it."""

    run: dict[str, Any]
    problem: Problem
    half: Half
    fingerprint: str
    data: str


class Site:
    """One site's process: it computes in the thread that runs it, and listens and sends in two others."""

    def __init__(
        self,
        url: str,
        name: str,
        key: Path,
        prepare: Prepare,
        certificate: Path | None = None,
        tell_errors: bool = False,
    ) -> None:
        """With ``tell_errors`` the server is told the texts of exceptions, which may quote data, not their kinds alone."""
        keys.require_name(name)
        self._tell_errors, self._failures = tell_errors, 0
        self.line = Line(url, name, keys.load_key(key), certificate)
        self._prepare, self._life = prepare, secrets.token_hex(16)
        self._made: _Made | None = None
        self._worker: Worker | None = None
        self._incarnation, self._number = -1, -1
        self._rooms = wire.Rooms()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._computing = False
        self._ending = ""  # what the server says about the end
        self._outbox: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._session = Session()
        self._session_lock = threading.Lock()
        self._over = threading.Event()
        self._trouble: BaseException | None = None
        self._told = 0.0  # when the log had a line about trouble last

    def run(self) -> str:
        """Work until the run has ended; returns what the server says about that."""
        for word, loop in (("listens", self._listen), ("sends", self._send_all)):
            threading.Thread(target=self._guarded, args=(loop,), daemon=True, name=f"dualdelay site {word}").start()
        try:
            while (work := self._todo.get()) is not None:
                self._computing = True
                work()
                self._computing = False
            if self._trouble is not None:
                raise self._trouble
            return self._ending
        finally:
            self._over.set()
            if self._session.token:
                with suppress(Lost, Unknown, Gone, DualDelayError):
                    self.line.read(self.line.ask(self._session, "/v1/bye", {"ack": self._session.have}))
            self.line.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Stopped:
            pass
        except Gone as error:
            self._ending = str(error)
        except BaseException as error:  # told by the thread that computes
            self._trouble = error
        self._end_jobs()
        self._todo.put(None)

    def _end_jobs(self) -> None:
        """Jobs that wait to be polled end now: nobody will."""
        if self._worker is not None:
            self._worker.poll(PollRequest(self._number, self._incarnation, 2**62))

    # --- the line ---

    def _tried(self, attempt: Callable[[Session], Any]) -> Any:
        """What an attempt comes to, after as many as it takes; a session that the server has forgotten is begun anew."""
        pause, unknown = _FIRST_PAUSE, Session()
        while True:
            session = self._session
            try:
                if session is unknown or not session.token:
                    self._greet(session)
                    continue
                return attempt(session)
            except Unknown:
                unknown = session
            except Lost as error:
                self._say(f"the server cannot be reached{self.line.way} ({error}); it is tried again")
                self.line.traffic.lost += 1
                pause = self._rest(pause)

    def _rest(self, pause: float) -> float:
        """Wait about so many seconds; gives the next pause."""
        if self._over.wait(pause * random.uniform(0.7, 1.3)):
            raise _Stopped
        return min(2 * pause, _LONGEST_PAUSE)

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told > _QUIET:
            log.warning("%s", text)
            self._told = now

    def _greet(self, before: Session) -> None:
        """Say hello, unless another thread has done so meanwhile."""
        with self._session_lock:
            if self._session is not before:
                return
            about = {"protocol": wire.PROTOCOL, "version": __version__, "life": self._life}
            _, run = self.line.hello({**about, "fingerprint": "", "data": ""})
            made = self._made_for(run)
            session, again = self.line.hello({**about, "fingerprint": made.fingerprint, "data": made.data})
            if again != run:
                raise Lost("another run has begun there")
            self._end_jobs()
            while not self._outbox.empty():
                self._outbox.get()
            self._number, self._session = run["worker"], session
            log.info("%s is worker %d of %d at %s", self.line.name, run["worker"], run["workers"], self.line.url)

    def _made_for(self, run: dict[str, Any]) -> _Made:
        """The problem and the data for a run; the thread that computes builds them, before anybody is told."""
        if self._made is None or self._made.run != run:
            self._todo.put(lambda: self._make(run))
            while self._made is None or self._made.run != run:
                if self._over.wait(0.05):
                    raise _Stopped
        return self._made

    def _make(self, run: dict[str, Any]) -> None:
        """Build the problem and this site's data for a run; what a user's own code raises is told in one line."""
        try:
            problem, half = self._prepare(run)
            self._made = _Made(run, problem, half, problem.fingerprint(), problem.data_fingerprint(run["worker"]))
        except DualDelayError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = [*getattr(error, "__notes__", ()), f"{type(error).__name__}: {error}"][0]
            raise BadInput(f"this site cannot take part: {said} ({place.filename}, line {place.lineno}).") from error

    def _listen(self) -> None:
        """Ask for what there is, do it or have it done, and ask again."""
        while not self._over.is_set():
            message = self._tried(self._next)
            if message is None:
                continue
            try:
                kind, fields = wire.decode(message)
            except BadMessage as error:
                raise Refused(f"{self.line.url} sent what cannot be read: {error}.") from None
            if kind == "end":
                raise Gone(str(fields["text"]))
            self._hear(kind, fields)

    def _next(self, session: Session) -> memoryview | None:
        """The next message, whole: what a cut connection has brought already is not fetched again."""
        busy = int(self._computing or not self._todo.empty())
        response = self.line.ask(session, "/v1/next", {"ack": session.have, "busy": busy})
        if response.status == 204:
            self.line.read(response)
            return None
        number, size = self.line.place(response)
        message, pause = wire.Partial(size, self._rooms), _FIRST_PAUSE
        while message.have < message.size:
            before = message.have
            try:
                response = response or self.line.ask(session, "/v1/fetch", {"number": number, "offset": message.have})
                self.line.read_into(message, response)
            except Gone:
                return None
            except Lost as error:
                self._say(f"a message was cut ({error}); the rest is fetched")
                self.line.traffic.lost += 1
            response = None
            if message.have < message.size:
                pause = self._rest(_FIRST_PAUSE if message.have > before else pause)
        session.have = number
        return message.data

    # --- what the server asks for ---

    def _hear(self, kind: str, fields: dict[str, Any]) -> None:
        worker, incarnation = self._worker, self._incarnation
        match kind:
            case "start":
                self._end_jobs()
                self._todo.put(lambda: self._start(fields))
            case "stop":
                self._end_jobs()
                self._todo.put(self._stop)
            case "refused":
                raise Refused(str(fields["text"]))
            case "poll" if worker is not None and fields["incarnation"] == incarnation:
                worker.poll(PollRequest(self._number, incarnation, fields["sequence"]))
            case "ask" if worker is not None:
                self._post("kept", {"question": fields["question"], "held": worker.kept(fields["accepted"])})
            case "job":
                self._todo.put(lambda: self._job(fields))
            case "evaluate":
                samples = tuple(fields["samples"]) if isinstance(fields["samples"], list) else fields["samples"]
                head = (self._number, fields["incarnation"], fields["evaluation"])
                request = EvaluationRequest(*head, samples, fields["mean_samples"], fields["aside"])
                if request.aside and worker is not None:
                    threading.Thread(target=self._aside, args=(worker, request, fields["model"]), daemon=True).start()
                self._todo.put(lambda: self._evaluate(request, fields["model"]))

    def _start(self, fields: Mapping[str, Any]) -> None:
        assert self._made is not None, "a site joins before it is started"
        made = self._made
        self._worker = Worker(self._number, made.problem, made.half, made.run["threads"])
        self._incarnation = fields["incarnation"]
        samples = self._worker.samples() if fields["count"] else None
        samples = self._told_of(samples) if isinstance(samples, str) else samples
        ready = {"incarnation": self._incarnation, "pid": os.getpid(), "environment": environment(), "samples": samples}
        self._post("ready", ready)

    def _stop(self) -> None:
        self._worker, self._incarnation = None, -1

    def _job(self, fields: Mapping[str, Any]) -> None:
        request = JobRequest(self._number, *fields["request"][1:])
        if self._worker is None or request.incarnation != self._incarnation:
            return
        reply = self._worker.compute(request, fields["model"], fields["held"])
        if reply is None:
            return
        try:
            self._reply(reply)
        except UNSAYABLE as error:
            self._reply(Reply(reply.request, np.empty(0), False, math.nan, reply.seconds, told(error)))

    def _reply(self, reply: Reply) -> None:
        content = reply._replace(error=self._told_of(reply.error))._asdict()
        del content["pushed"]  # a site's message goes to the server, which has no shards
        self._post("reply", {**content, "request": list(reply.request)})

    def _told_of(self, error: str) -> str:
        """What the server is told of an exception: its kind, for its text may quote data; all of it is in this log."""
        if not error:
            return ""
        self._failures += 1
        if is_told(self._failures):
            log.warning("a job failed here, the %d. time:\n%s", self._failures, error.strip())
        return error if self._tell_errors else f"{kind_of(error)} (its text stays at the site, in the site's log)"

    def _evaluate(self, request: EvaluationRequest, model: Any) -> None:
        if self._worker is None or request.incarnation != self._incarnation:
            return
        self._evaluated(request, self._worker.evaluate(request, model))

    def _aside(self, worker: Worker, request: EvaluationRequest, model: Any) -> None:
        self._evaluated(request, worker.aside(request, model))

    def _evaluated(self, request: EvaluationRequest, evaluated: Any) -> None:
        if evaluated is None:
            return
        part, name = evaluated.part, {"incarnation": request.incarnation, "evaluation": request.evaluation}
        try:
            self._post("evaluated", {**name, "part": self._told_of(part) if isinstance(part, str) else part})
        except UNSAYABLE as error:  # it holds what cannot travel
            self._post("evaluated", {**name, "part": self._told_of(told(error))})

    # --- what the site sends ---

    def _post(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._outbox.put(Letter(self._session, wire.encode(kind, fields)))

    def _send_all(self) -> None:
        while not self._over.is_set():
            try:
                letter = self._outbox.get(timeout=0.5)
            except queue.Empty:
                continue
            self._tried(partial(self._send, letter))

    def _send(self, letter: Letter, session: Session) -> None:
        """Send a message in parts, each from where the server has got to."""
        if letter.session is not session:  # what it answers was asked in an earlier session
            return
        is_known, have = not letter.number, 0
        if not letter.number:
            letter.begin()
        while have < letter.size:
            most = min(_PART, letter.size - have) if is_known else 0  # after a cut it is asked how much is there
            query, is_known = {"number": letter.number, "size": letter.size, "offset": have}, True
            response = self.line.ask(session, "/v1/send", query, letter.part(have, most), most)
            before, have = have, self.line.read_number(response, "have")
            self.line.traffic.up += max(0, have - before)


class _Stopped(Exception):
    """The site's process is to end."""
