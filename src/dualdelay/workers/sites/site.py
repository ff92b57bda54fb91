"""A site: a process that stays, has its own data, dials out, and works until it is told that the run has ended."""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from ...core import Problem
from ...core.environment import environment
from ...core.errors import BadInput, DualDelayError
from ...core.version import __version__, install_command
from ...engine.half import Half
from ..messages import EvaluationRequest, JobRequest, PollRequest
from ..security import is_loopback
from ..worker import Worker
from . import keys, wire

log = logging.getLogger("dualdelay")

_CONNECT = 15.0  # seconds to reach the server
_STALLED = 40.0  # seconds without a byte after which a connection is given up; longer than the server lets a site wait
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0  # seconds between two tries, doubled each time
_PART = 8 * 2**20  # bytes of a message in one request
_QUIET = 60.0  # seconds between two lines about the same trouble

Prepare = Callable[[Mapping[str, Any]], tuple[Problem, Half]]
"""From what the server says of the run to the site's own problem and its half of the method."""


class _Refused(BadInput):
    """The server does not want this site; another try would come to the same."""


class _Unknown(Exception):
    """The server does not know this session: it has begun anew."""


class _Lost(Exception):
    """The server could not be reached, or not to the end."""


@dataclass
class Traffic:
    """Bytes of messages that went each way, and how often the line was lost."""

    up: int = 0
    down: int = 0
    lost: int = 0


@dataclass
class Line:
    """Requests to the server, signed, over connections that are kept."""

    url: str
    name: str
    key: Any
    certificate: Path | None = None
    session: str = ""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        try:
            import urllib3
        except ImportError:
            raise BadInput(f"sites need urllib3, which is not installed: {install_command('urllib3')}.") from None
        self._errors = urllib3.exceptions
        parts = urlsplit(self.url)
        if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment:
            raise BadInput(f"the server is {self.url!r}; expected an address such as https://server.example:8443")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise BadInput(
                f"{self.url} is no https: others could read and change what is sent; http is for loopback alone."
            )
        options: dict[str, Any] = {"maxsize": 4, "retries": False, "timeout": urllib3.Timeout(_CONNECT, _STALLED)}
        if parts.scheme == "https":
            options["ssl_context"] = _context(self.certificate)
        proxy = None if proxy_bypass(parts.hostname) else getproxies().get(parts.scheme)
        if proxy is not None and is_loopback(parts.hostname) and not is_loopback(urlsplit(proxy).hostname or ""):
            proxy = None  # a proxy elsewhere cannot reach this machine's own address
        self._base = f"{parts.path.rstrip('/')}"
        pool: Any = urllib3.PoolManager(**options) if proxy is None else urllib3.ProxyManager(proxy, **options)
        self._pool, self._count, self._lock = pool, 0, threading.Lock()

    def ask(self, path: str, query: Mapping[str, Any], body: wire.Pieces = (), *, session: str = "") -> Any:
        """A signed request; the response is not read yet."""
        with self._lock:
            self._count += 1
            count = self._count
        target = f"{path}?{urlencode(query)}"
        session = session or self.session
        signature = keys.sign(self.key, keys.signed_text(target, self.name, session, count))
        return self.post(target, body, {"authorization": f"Dualdelay {self.name} {session} {count} {signature}"})

    def post(self, target: str, body: wire.Pieces = (), headers: Mapping[str, str] | None = None) -> Any:
        """A request; raises for what is not an answer that one can go on with."""
        fields = {"content-type": "application/octet-stream", "content-length": str(wire.size_of(body)), **(headers or {})}
        url = f"{self.url.rstrip('/')}{target}"
        try:
            response = self._pool.request(
                "POST", url, body=body or None, headers=fields, preload_content=False, redirect=False
            )
        except self._errors.SSLError as error:
            raise (
                _certificate_refused(self.url, error) if "CERTIFICATE" in str(error).upper() else _Lost(str(error))
            ) from None
        except (self._errors.MaxRetryError, self._errors.ProxyError) as error:
            reason = getattr(error, "reason", None) or error
            if "CERTIFICATE_VERIFY_FAILED" in str(reason):
                raise _certificate_refused(self.url, reason) from None
            raise _Lost(str(reason)) from None
        except (self._errors.HTTPError, OSError) as error:
            raise _Lost(str(error)) from None
        if response.status in (200, 204) or (
            response.status == 409 and response.headers.get("content-type") == "application/json"
        ):
            return response
        text = self.read(response)[:2000].decode(errors="replace").strip()
        if response.status == 401:
            raise _Unknown(text)
        if response.status in (400, 403, 404, 409, 410, 413, 415) and response.headers.get("content-type", "").startswith(
            "text/plain"
        ):
            raise _Gone(text) if response.status == 410 else _Refused(f"{self.url}: {text}")
        raise _Lost(f"{self.url} answered {response.status} {text[:200]}")

    def read(self, response: Any, into: bytearray | None = None) -> bytearray:
        """The bytes of a response; what came before a cut stays in ``into``."""
        data = bytearray() if into is None else into
        try:
            for piece in response.stream(2**18):
                data += piece
                self.traffic.down += len(piece)
        except (self._errors.HTTPError, OSError) as error:
            response.close()
            raise _Lost(str(error)) from None
        response.release_conn()
        return data

    def close(self) -> None:
        """Let the connections go."""
        self._pool.clear()


class _Gone(Exception):
    """What was asked for is not there any more; of a hello: the run has ended."""


def _context(certificate: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if certificate is None else str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"the certificate {certificate} cannot be used ({error}).") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _certificate_refused(url: str, error: object) -> _Refused:
    return _Refused(
        f"{url} has a certificate that this site does not trust ({error}). If it is the server's own, give it: "
        "--certificate server.pem"
    )


class Site:
    """One site's process: it computes in the thread that runs it, and listens and sends in two others."""

    def __init__(self, url: str, name: str, key: Path, prepare: Prepare, certificate: Path | None = None) -> None:
        keys.require_name(name)
        self.line = Line(url, name, keys.load_key(key), certificate)
        self._prepare, self._life = prepare, secrets.token_hex(16)
        self._made: tuple[dict[str, Any], Problem, Half] | None = None  # for which run, and what
        self._worker: Worker | None = None
        self._incarnation, self._number = -1, -1
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._computing = False
        self._ending = ""  # what the server says about the end
        self._outbox: queue.SimpleQueue[tuple[str, wire.Pieces]] = queue.SimpleQueue()
        self._sent = 0  # messages numbered so far
        self._have = 0  # messages of the server that are here
        self._session_lock = threading.Lock()
        self._over = threading.Event()
        self._trouble: BaseException | None = None
        self._told = (0.0, "")

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
            if self.line.session:
                with suppress(_Lost, _Unknown, _Gone, DualDelayError):
                    self.line.read(self.line.ask("/v1/bye", {"ack": self._have}))
            self.line.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Stopped:
            pass
        except _Gone as error:
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

    def _tried(self, attempt: Callable[[], Any]) -> Any:
        """What an attempt comes to, after as many as it takes; a session that the server has forgotten is begun anew."""
        pause = _FIRST_PAUSE
        while True:
            session = self.line.session
            try:
                if not session:
                    self._greet(session)
                return attempt()
            except _Unknown:
                self._greet(session)
            except _Lost as error:
                self._say(f"the server cannot be reached ({error}); it is tried again")
                self.line.traffic.lost += 1
                if self._over.wait(pause * random.uniform(0.7, 1.3)):
                    raise _Stopped from None
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                pause = _FIRST_PAUSE

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told[0] > _QUIET:
            log.warning("%s", text)
            self._told = (now, text)

    def _greet(self, before: str) -> None:
        """Say hello, unless another thread has done so meanwhile."""
        with self._session_lock:
            if self.line.session != before:
                return
            challenge = self.line.read(self.line.post("/v1/challenge")).decode(errors="replace")
            hello = wire.encode("hello", {"protocol": wire.PROTOCOL, "version": __version__, "life": self._life})
            query = {"digest": wire.digest_of(hello)}
            try:
                kind, run = wire.decode(self.line.read(self.line.ask("/v1/hello", query, hello, session=challenge)))
            except _Unknown as error:  # the challenge was too slow on its way
                raise _Lost(str(error)) from None
            except wire.BadMessage as error:
                raise _Refused(f"{self.line.url} is no dualdelay server: {error}.") from None
            if kind != "welcome":
                raise _Refused(f"{self.line.url} is no dualdelay server.")
            self._end_jobs()
            while not self._outbox.empty():
                self._outbox.get()
            self._number, self._have, self._sent = run["worker"], 0, 0
            self.line.session = run.pop("session")  # not before: what is sent in it is numbered anew
            log.info("%s is worker %d of %d at %s", self.line.name, run["worker"], run["workers"], self.line.url)
            self._todo.put(lambda: self._join(run))

    def _join(self, run: dict[str, Any]) -> None:
        """Have the data and the half for a run, and say so."""
        if self._made is None or self._made[0] != run:
            self._made = (run, *self._prepare(run))
        _, problem, _ = self._made
        self._post("joined", {"fingerprint": problem.fingerprint(), "data": problem.data_fingerprint(self._number)})

    def _listen(self) -> None:
        """Ask for what there is, do it or have it done, and ask again."""
        while not self._over.is_set():
            message = self._tried(self._next)
            if message is None:
                continue
            try:
                kind, fields = wire.decode(message)
            except wire.BadMessage as error:
                raise _Refused(f"{self.line.url} sent what cannot be read: {error}.") from None
            if kind == "end":
                raise _Gone(str(fields["text"]))
            self._hear(kind, fields)

    def _next(self) -> bytearray | None:
        """The next message, whole: what a cut connection has brought already is not fetched again."""
        response = self.line.ask("/v1/next", {"ack": self._have, "busy": int(self._computing or not self._todo.empty())})
        if response.status == 204:
            self.line.read(response)
            return None
        number, size, data = int(response.headers["x-number"]), int(response.headers["x-size"]), bytearray()
        pause = _FIRST_PAUSE
        while True:
            before = len(data)
            try:
                self.line.read(response, data)
                if len(data) >= size:
                    break
            except _Lost as error:
                if len(data) == before:
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    self._say(f"a message was cut ({error}); the rest is fetched")
                    if self._over.wait(pause):
                        raise _Stopped from None
            self.line.traffic.lost += 1
            try:
                response = self.line.ask("/v1/fetch", {"number": number, "offset": len(data)})
            except _Gone:
                return None
            except _Lost:
                continue
        self._have = number
        return data

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
                raise _Refused(str(fields["text"]))
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
        run, problem, half = self._made
        self._worker, self._incarnation = Worker(self._number, problem, half, run["threads"]), fields["incarnation"]
        samples = self._worker.samples() if fields["count"] else None
        ready = {"incarnation": self._incarnation, "pid": os.getpid(), "environment": environment(), "samples": samples}
        self._post("ready", ready)

    def _stop(self) -> None:
        self._worker, self._incarnation = None, -1

    def _job(self, fields: Mapping[str, Any]) -> None:
        request = JobRequest(self._number, *fields["request"][1:])
        if self._worker is None or request.incarnation != self._incarnation:
            return
        reply = self._worker.compute(request, fields["model"], fields["held"])
        if reply is not None:
            content = reply._asdict()
            self._post("reply", {**content, "request": list(reply.request)})

    def _evaluate(self, request: EvaluationRequest, model: Any) -> None:
        if self._worker is None or request.incarnation != self._incarnation:
            return
        self._evaluated(request, self._worker.evaluate(request, model))

    def _aside(self, worker: Worker, request: EvaluationRequest, model: Any) -> None:
        self._evaluated(request, worker.aside(request, model))

    def _evaluated(self, request: EvaluationRequest, evaluated: Any) -> None:
        if evaluated is not None:
            self._post(
                "evaluated", {**dict(zip(("incarnation", "evaluation"), request[1:3], strict=True)), "part": evaluated.part}
            )

    # --- what the site sends ---

    def _post(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._outbox.put((self.line.session, wire.encode(kind, fields)))

    def _send_all(self) -> None:
        while not self._over.is_set():
            try:
                session, data = self._outbox.get(timeout=0.5)
            except queue.Empty:
                continue
            self._tried(partial(self._send, session, data))

    def _send(self, session: str, message: wire.Pieces) -> None:
        """Send a message in parts, each from where the server has got to."""
        if session != self.line.session:  # what it answers was asked in an earlier session
            return
        if self._sending != (session, id(message)):
            self._sent += 1
            self._sending = (session, id(message))
        size = wire.size_of(message)
        whole, have = {"number": self._sent, "size": size, "digest": wire.digest_of(message)}, 0
        while have < size:
            response = self.line.ask("/v1/send", {**whole, "offset": have}, wire.part_of(message, have, _PART))
            answer = json.loads(self.line.read(response))
            self.line.traffic.up += max(0, answer["have"] - have)
            have = answer["have"]

    _sending: tuple[str, int] = ("", 0)


class _Stopped(Exception):
    """The site's process is to end."""
