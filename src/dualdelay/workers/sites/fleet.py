"""Sites as a fleet: the same coordinator and the same books as on Ray, behind a transport that waits to be called."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...core import Problem
from ...core.compression import size_of
from ...core.errors import BadInput, require_several
from ...core.settings import positive, whole
from ...core.work import Sent
from ...engine.half import Half, Kept
from ..messages import (
    Array,
    Died,
    Evaluated,
    EvaluationRequest,
    JobRequest,
    Notice,
    PollRequest,
    Ready,
    Reply,
    Request,
    Returned,
    as_arrays,
    as_tensors,
)
from ..settings import WorkerFleet
from ..structures import BadMessage
from ..transport import Transport
from . import keys, wire
from .books import Incoming
from .hub import POLL, Hub
from .serving import Served
from .status import StatusBoard

log = logging.getLogger("dualdelay")

_ANSWER = 20.0  # seconds in which a site says what it keeps: it travels over the line
_FAREWELL = 20.0  # seconds in which sites that were heard of lately hear that the run has ended
_LOOK = 1.0  # seconds between two looks at who is silent
_ROOM = 16 * 2**20  # bytes of a message beside weights, such as evaluations


@dataclass(frozen=True, kw_only=True)
class SiteFleet(WorkerFleet):
    """Workers at other places, one process each, which dial in over HTTPS and stay until the run has ended."""

    starting: ClassVar[str] = "waiting for sites to dial in"
    waits: ClassVar[bool] = True

    listen: str = "127.0.0.1:8443"
    """The address that sites dial: 0.0.0.0:8443 is reachable from everywhere, and needs a certificate."""
    certificate: str | None = None
    """The server's certificate, a PEM file; without it the server keeps to this machine."""
    certificate_key: str | None = None
    """The private key of the certificate, a PEM file."""
    roster: str = "sites.txt"
    """The file with the sites' public keys, which dualdelay enroll writes. Worker i is its i-th line."""
    names: Sequence[str] = ()
    """The sites of this run, in the order of the workers; by default all that are in the file."""
    silence: float = positive(60.0)
    """Seconds without a sign of life after which the run goes on without a site, whose last gradient would go on counting;
    it joins again when it is back. A site that computes gives signs of life, however long its job takes."""
    downloads: int | None = whole(None)
    """How many sites are sent a model at the same time; by default all. 1 or 2 where the server's own line is what is slow:
    one after the other they have their models sooner, and one receives while another sends."""
    board: StatusBoard = field(default_factory=StatusBoard, repr=False, compare=False)
    """The status page; ``StatusBoard(token)`` has a token of your own, otherwise a new one is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_several("names", self.names, "the sites' names")
        for name in self.names:
            keys.require_name(name)
        if len(set(self.names)) < len(self.names):
            raise BadInput(f"names has {list(self.names)}, with one of them twice; expected each site only once.")

    def sites_of(self, workers: int) -> list[str]:
        """The site of each worker."""
        enrolled = list(keys.Roster(Path(self.roster)).sites)
        names = list(self.names) or enrolled
        if unknown := [name for name in names if name not in enrolled]:
            raise BadInput(f"{', '.join(unknown)} is not enrolled in {self.roster}; dualdelay enroll {unknown[0]}")
        if len(names) != workers:
            raise BadInput(
                f"the problem has {workers} workers, and there are {len(names)} sites ({', '.join(names)}); expected one "
                "for each worker: enroll the others, or name the sites of this run (--names a b ..., names=[...])."
            )
        return names

    def require_fit(self, workers: int) -> None:
        super().require_fit(workers)
        self.sites_of(workers)

    @property
    def loggers(self) -> tuple[StatusBoard, ...]:
        return (self.board,)

    def connect(self, problem: Problem, half: Half, output: Path | None, about: Mapping[str, Any]) -> Transport:
        return SiteTransport(self, problem, half, about)


class SiteTransport:
    """What reaches sites: messages wait at the hub until a site asks for them."""

    def __init__(self, fleet: SiteFleet, problem: Problem, half: Half, about: Mapping[str, Any]) -> None:
        self._problem, self._rooms = problem, wire.Rooms()
        names, weights = fleet.sites_of(problem.workers), problem.start(0)
        self._names = names
        self._data: dict[int, str] = {}  # a digest of each site's data, as it was first
        self._incarnations: dict[int, int] = {}  # that are wanted or there, by worker
        self._joined: set[int] = set()  # whose sites are there, with the right problem
        self._at: set[int] = set()  # those of them that were told to begin
        self._question = 0
        self._silence, self._looked, self._awake = fleet.silence, time.monotonic(), time.monotonic()
        self._later: list[Notice] = []
        self._fingerprint = problem.fingerprint()
        welcome = {
            "workers": problem.workers,
            "room": fleet.room,
            "algorithm": about["algorithm"],
            "uplink": half.uplink,
            "seed": about["seed"],
            "threads": fleet.threads,
        }
        largest = 8 * (size_of(weights) * 8 // weights.element_size()) + _ROOM  # several tensors and memories in float64
        self.hub = Hub(keys.Roster(Path(fleet.roster)), names, largest, welcome, fleet.downloads)
        self.hub.admit = self._admit
        fleet.board.begin(f"{half.name} at {len(names)} sites", lambda: self.hub.sites)
        self.hub.page = fleet.board.page
        paths = (None if path is None else Path(path) for path in (fleet.certificate, fleet.certificate_key))
        self.served = Served(self.hub, fleet.listen, *paths)
        log.info("listening on %s for %s", self.served.url, ", ".join(names))
        token = fleet.board.token if fleet.board.drawn else "TOKEN, with the token that was given"
        log.info("status page: %s/#%s", self.served.url, token)

    def now(self) -> float:
        return time.monotonic()

    def start(self, worker: int, incarnation: int) -> None:
        self._incarnations[worker] = incarnation
        self._at.discard(worker)
        if worker in self._joined:
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        """Have a site that is there begin as a new incarnation of its worker."""
        self._at.add(worker)
        fields = {"incarnation": self._incarnations[worker], "count": self._problem.needs_sample_counts}
        self.hub.push(worker, "start", fields, alone=True)

    def stop(self, worker: int) -> None:
        if self._incarnations.pop(worker, None) is not None and worker in self._joined:
            self.hub.push(worker, "stop", {}, alone=True)
        self._at.discard(worker)

    def name_of(self, worker: int) -> str:
        return self._names[worker]

    def why_not_started(self, worker: int) -> str:
        site = self.hub.sites[worker]
        if site.refused:
            return f": {site.name} was refused ({site.refused})"
        return f": {site.name} has not dialled in" if not site.session else f": {site.name} is there, and has not begun"

    def put(self, x: Sent) -> Any:
        arrays = as_arrays(x)
        return (
            {name: self._copy(part) for name, part in arrays.items()} if isinstance(arrays, Mapping) else self._copy(arrays)
        )

    def _copy(self, array: Array) -> Array:
        """The server goes on to change its own."""
        copy: Array = self._rooms.take(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def get(self, model: Any) -> Sent:
        x: Sent = as_tensors(model)
        return x

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        worker = request.worker
        if self._incarnations.get(worker) != request.incarnation or worker not in self._at:
            return
        match request:
            case JobRequest():
                name = ("job", request.incarnation, request.sequence)
                fields = {"request": list(request), "model": model, "held": as_arrays(held)}
                self.hub.push(worker, "job", fields, name=name)
                self._note(worker, f"job {request.draw} at version {request.version}")
            case PollRequest():
                fields = {"incarnation": request.incarnation, "sequence": request.sequence}
                self.hub.push(worker, "poll", fields, name=("poll", *request))
            case EvaluationRequest():
                self._note(worker, "an evaluation")
                fields = {**request._asdict(), "model": model}
                del fields["worker"]
                self.hub.push(
                    worker, "evaluate", fields, name=("evaluate", request.incarnation, request.evaluation, request.samples)
                )

    def _note(self, worker: int, doing: str) -> None:
        """What a site does, for the status page; a request that is sent again has begun before."""
        site = self.hub.sites[worker]
        if site.doing != doing:
            site.doing, site.since = doing, time.monotonic()

    def receive(self, timeout: float) -> list[Notice]:
        notices, self._later = [*self._later, *self._fallen_silent()], []
        until = time.monotonic() + timeout
        while True:
            try:
                pause = until - time.monotonic()
                incoming = self.hub.inbox.get(block=pause > 0 and not notices, timeout=max(pause, 0.0) or None)
            except queue.Empty:
                return notices
            notices += self._read(incoming)[0]

    def _fallen_silent(self) -> list[Notice]:
        """Sites that nothing was heard of for long; not counted are seconds in which this server did not look itself."""
        now, notices = time.monotonic(), list[Notice]()
        if now - self._looked > _LOOK:
            self._awake = now if now - self._looked > 10 * _LOOK else self._awake
            self._looked = now
            for worker in list(self._at):
                site = self.hub.sites[worker]
                if min(site.silence(now), now - self._awake) > self._silence:
                    site.session = ""  # when it is back it says hello again
                    text = f"{site.name} was not heard of for {self._silence:g} s"
                    notices += self._lost_process(worker, text, final=True)
        return notices

    def _read(self, incoming: Incoming) -> tuple[list[Notice], dict[str, Any] | None]:
        """What a site says, as notices; and what it keeps, if it was asked for that."""
        worker, site = incoming.worker, self.hub.sites[incoming.worker]
        if incoming.session != site.session:
            return [], None
        if incoming.hello:
            return self._take_hello(worker), None
        if incoming.bye:
            why = site.refused or f"{self._names[worker]} was stopped where it is"
            return self._lost_process(worker, why, final=True), None
        if incoming.data is None:
            return self._returned(worker), None
        try:
            kind, fields = wire.decode(incoming.data)
            if kind not in wire.FROM_SITES:
                raise BadMessage(f"a site does not send a message {kind!r}")
        except BadMessage as error:
            return self._refuse(worker, f"its message cannot be read: {error}"), None
        if kind == "kept":
            return [], fields
        return [*self._notices(worker, kind, fields), *self._returned(worker)], None

    def _notices(self, worker: int, kind: str, fields: Mapping[str, Any]) -> list[Notice]:
        """A message as a notice; whose it is the session says, and not the message."""
        site = self.hub.sites[worker]
        if kind == "reply":
            request = JobRequest(worker, *fields["request"][1:])
            if request.incarnation != self._incarnations.get(worker):
                return []
            self._note(worker, "")
            site.jobs, site.loss = site.jobs + 1, float(fields["loss"])
            rest = {name: value for name, value in fields.items() if name != "request"}
            return [Reply(request, **rest)]
        if fields["incarnation"] != self._incarnations.get(worker):
            return []
        if kind == "evaluated":
            self._note(worker, "")
            return [Evaluated(worker, fields["incarnation"], fields["evaluation"], fields["part"])]
        place = f"{site.name} at {site.address}"
        return [Ready(worker, fields["incarnation"], place, fields["pid"], fields["environment"], fields["samples"], place)]

    def _lost_process(self, worker: int, text: str, final: bool = False) -> list[Notice]:
        """A site's process is gone, and with it what it did and kept; ``final``: the run goes on without it."""
        began = worker in self._at and worker in self._incarnations
        self._joined.discard(worker)
        self._at.discard(worker)
        return [] if not began else [Died(worker, self._incarnations[worker], text, final)]

    def _admit(self, worker: int, fingerprint: str, data: str) -> str:
        """Why a site with this problem and these data is none of this run; empty if it is. Called by the hub's thread."""
        if fingerprint != self._fingerprint:
            theirs, ours = fingerprint[:12], self._fingerprint[:12]
            return f"its problem has the fingerprint {theirs}, the server's {ours}: another model, settings or code"
        first = self._data.setdefault(worker, data)
        if first != data:
            name = self._names[worker]
            return f"its data are not those that {name} began with (fingerprint {first[:12]} then, {data[:12]} now)"
        return ""

    def _take_hello(self, worker: int) -> list[Notice]:
        """A site's process is there, with the right problem; whatever an earlier one did is gone."""
        lost = self._lost_process(worker, f"{self._names[worker]} began anew")
        self._joined.add(worker)
        log.info("%s is there, from %s", self._names[worker], self.hub.sites[worker].address)
        if not lost and worker in self._incarnations:
            self._begin(worker)
        return [*lost, Returned(worker)]

    def _returned(self, worker: int) -> list[Notice]:
        """The news that a site is there and does nothing, in case that the run went on without it."""
        return [Returned(worker)] if worker in self._joined else []

    def _refuse(self, worker: int, why: str) -> list[Notice]:
        site = self.hub.sites[worker]
        if site.refused != why:
            log.warning("%s was refused at %s: %s", site.name, site.address, why)
        site.refused = why
        lost = self._lost_process(worker, why, final=True)
        self.hub.push(worker, "refused", {"text": f"the server refused {site.name}: {why}."}, alone=True)
        return lost

    def kept(self, accepted: Mapping[int, int]) -> dict[int, Kept | None]:
        self._question += 1
        asked = {worker: sequence for worker, sequence in accepted.items() if worker in self._at}
        for worker, sequence in asked.items():
            self.hub.push(worker, "ask", {"question": self._question, "accepted": sequence}, name=("ask", worker))
        kept: dict[int, Kept | None] = {}
        until = time.monotonic() + _ANSWER
        while (left := until - time.monotonic()) > 0:
            if not any(worker not in kept and self._is_near(worker) for worker in asked):
                break
            try:
                incoming = self.hub.inbox.get(timeout=left)
            except queue.Empty:
                break
            notices, answer = self._read(incoming)
            self._later += notices
            if answer is not None and answer["question"] == self._question and incoming.worker in asked:
                held = answer["held"]
                kept[incoming.worker] = as_tensors(held) if isinstance(held, dict) or held is None else None
        for worker in asked.keys() - kept.keys():
            self.hub.forget(worker, ("ask", worker))
        return kept

    def _is_near(self, worker: int) -> bool:
        """Whether a site is in its session and was heard of lately, so that an answer can be expected."""
        return worker in self._at and time.monotonic() - self.hub.sites[worker].seen < 2 * POLL

    def close(self, ended: bool) -> None:
        if ended:
            self.hub.ended = "the run has ended."
            for worker in range(len(self._names)):
                self.hub.push(worker, "end", {"text": self.hub.ended}, alone=True)
            now = time.monotonic()
            there = [site for site in self.hub.sites if site.session and now - site.seen < 2 * POLL]
            while any(site.outbox for site in there) and time.monotonic() < now + _FAREWELL:
                time.sleep(0.02)
        self.served.close()
