"""The server's end of the line: an ASGI application to which sites dial in.

Sites make every connection. A site asks for what there is for it and is answered as soon as there is something
(``next``), and sends what it has (``send``). Messages are numbered both ways and kept until the other side has them, so a
cut connection costs what was under way on it, and nothing counts twice.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import itertools
import json
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from ...core.errors import BadInput
from ...core.version import __version__
from ..structures import BadMessage
from . import keys, wire
from .books import Bucket, Incoming, Outgoing, SiteBook, Turns, Upload
from .status import POLICY

log = logging.getLogger("dualdelay")

POLL = 20.0  # seconds after which a site that waits for something hears that there is nothing
_CHALLENGE = 60.0  # seconds in which a challenge has to be answered
_WINDOW = 256  # requests of one session that may overtake one another
_STRANGERS = (100.0, 500.0)  # requests of one address a second, and at once, before it has shown a key
_SMALL = 64 * 1024  # bytes of a message that anybody may send
_MOST_UPLOADS = 8  # messages of one site that may be on their way
_FORMER = 1000  # processes of a site that are remembered
_TIDY = 10_000  # addresses that are remembered
_PIECE = 2**20  # bytes that are handed to a connection at once
_LOOK = 1.0  # seconds between two looks at the clock
_STALLED = 120.0  # seconds in which a connection has to take or bring the next bytes

T = TypeVar("T")
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Refusal(Exception):
    """A request that is turned down, with the line that the other side is told."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


class Hub:
    """The application, and the books of all sites. The coordinator's thread calls ``push`` and reads ``inbox``."""

    def __init__(
        self,
        roster: keys.Roster,
        names: Sequence[str],
        largest: int,
        welcome: Mapping[str, Any],
        downloads: int | None = None,
    ) -> None:
        """For these sites, whose messages have so many bytes at most; so many of them are sent a large one at once."""
        self.sites = [SiteBook(name, worker) for worker, name in enumerate(names)]
        self.inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self.admit: Callable[[int, str, str], str] = lambda worker, fingerprint, data: ""  # why a problem is not this run's
        self.page: Callable[[str, str], tuple[int, str, bytes] | None] = lambda path, token: None
        self._by_name = {site.name: site for site in self.sites}
        self._roster, self._largest, self._welcome = roster, largest, welcome
        self._rooms = wire.Rooms()
        self._turns = None if downloads is None else Turns(downloads)
        self._secret = secrets.token_bytes(32)
        self._serials = itertools.count(1)
        self._answered: dict[str, float] = {}  # challenges, until they are out of date
        self._strangers: dict[str, Bucket] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._trouble = ""  # with the file of sites, that was told last
        self.ended = ""  # what sites are told once the run has ended
        self.closing = False

    # --- the coordinator's side ---

    def push(
        self, worker: int, kind: str, fields: Mapping[str, Any], *, name: tuple[Any, ...] = (), alone: bool = False
    ) -> None:
        """Put a message there for a site, unless one of that name waits already; ``alone``: nothing else is needed."""
        pieces = wire.encode(kind, fields)
        size, site = wire.size_of(pieces), self.sites[worker]
        with self._lock:
            if alone:
                site.outbox.clear()
            if name and any(one.name == name for one in site.outbox):
                return
            site.sent += 1
            site.outbox.append(Outgoing(site.sent, name, pieces, size))
        self._wake(site)

    def forget(self, worker: int, name: tuple[Any, ...]) -> None:
        """A message that waits for a site is not needed any more."""
        site = self.sites[worker]
        with self._lock:
            site.outbox = deque(one for one in site.outbox if one.name != name)

    def _wake(self, site: SiteBook) -> None:
        loop = self._loop
        if loop is not None and site.waiting is not None:
            loop.call_soon_threadsafe(_set, site)

    def close(self) -> None:
        """Have everybody who waits be answered: the server stops."""
        self.closing = True
        for site in self.sites:
            self._wake(site)

    # --- requests ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        try:
            await self._answer(scope, receive, send)
        except Refusal as refusal:
            headers = {"content-type": "text/plain; charset=utf-8", **refusal.headers}
            await _respond(send, refusal.status, refusal.text.encode(), headers)
        except _Cut:
            scope["extensions"]["abort"]()  # what it has not taken is not waited for
        except BadInput as error:  # of the file of sites, which somebody is writing, perhaps
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("sites are not let in: %s", error)
            await _respond(send, 503, b"the server cannot read its file of sites; its log says why.")
        except Exception:
            log.exception("the server could not answer a request from %s", (scope.get("client") or ("?",))[0])
            await _respond(send, 500, b"the server could not answer; its log says why.")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        address = (scope.get("client") or ("unknown", 0))[0]
        if method == "GET":
            self._require_few(address)
            page = self.page(path, headers.get("authorization", "").removeprefix("Bearer "))
            if page is None:
                raise Refusal(
                    404, "there is nothing here; a site dials in by: dualdelay site URL --name NAME --key FILE ..."
                )
            await _respond(send, page[0], page[2], {"content-type": page[1], "cache-control": "no-store", **_PAGE_HEADERS})
            return
        if method != "POST" or path not in _PATHS:
            raise Refusal(404, "there is nothing here.")
        if "content-encoding" in headers:
            raise Refusal(415, "a body that is compressed is not read; send it as it is.")
        if path == "/v1/challenge":
            self._require_few(address)
            await _respond(send, 200, self._challenge().encode())
            return
        query = _query(scope["query_string"])
        target = f"{path}?{scope['query_string'].decode('latin-1')}"
        name, session, count, signature = _authorization(headers)
        if path == "/v1/hello":
            self._require_few(address)
            body = await _in_time(_body(receive, _SMALL, headers))
            await self._hello(send, address, (name, session, count, signature), target, query, body)
            return
        site = self._known(name, session, count, signature, target, address)
        if path == "/v1/next":
            await self._next(site, session, query, scope, send)
        elif path == "/v1/bye":
            self._acknowledge(site, _whole(query, "ack"))
            self._end_turn(site)
            site.session = ""
            self.inbox.put(Incoming(site.worker, site.session, bye=True))
            await _respond(send, 200, b"")
        elif path == "/v1/fetch":
            await self._fetch(site, query, send)
        else:
            await self._take(site, session, query, headers, scope, receive, send)

    def _require_few(self, address: str) -> None:
        if len(self._strangers) > _TIDY:
            self._strangers.clear()
        if not self._strangers.setdefault(address, Bucket(*_STRANGERS)).take():
            raise Refusal(429, "too many requests from this address; wait a second.", **{"retry-after": "1"})

    # --- who is it? ---

    def _challenge(self) -> str:
        """A number that was never used before, with what shows that it is ours and not old."""
        head = f"{next(self._serials)}.{secrets.token_hex(16)}.{int(time.monotonic() + _CHALLENGE)}"
        return f"{head}.{self._mark(head)}"

    def _mark(self, head: str) -> str:
        return hmac.new(self._secret, head.encode(), "sha256").hexdigest()

    def _require_new(self, challenge: str, site: SiteBook) -> None:
        """Refuse an answer that is old, was heard before, or is to an earlier challenge than the last answer."""
        head, _, mark = challenge.rpartition(".")
        now, end = time.monotonic(), head.rpartition(".")[2]
        self._answered = {one: until for one, until in self._answered.items() if until > now}
        if not hmac.compare_digest(mark, self._mark(head)) or not end.isdigit() or int(end) < now:
            raise Refusal(401, "the challenge is not one of this server's, or too old; ask for another.")
        if challenge in self._answered:
            raise Refusal(401, "the challenge was answered before; ask for another.")
        serial = int(head.partition(".")[0])
        if serial < site.greeted:  # of a process that is gone; it was long on its way
            raise Refusal(401, "a later challenge was answered since; ask for another.")
        site.greeted = serial

    def _require_signed(self, name: str, signature: str, text: bytes, address: str) -> SiteBook:
        """The site that has signed this, if its key is valid here and now."""
        enrolled, site = self._roster.sites.get(name), self._by_name.get(name)
        if enrolled is None or not keys.is_signed(enrolled.public, signature, text):
            what = "is not enrolled" if enrolled is None else "has another key here"
            log.warning("a site that calls itself %s was refused at %s: it %s", name[:64], address, what)
            raise Refusal(403, f"{name[:64]} {what}; ask the server's operator: dualdelay enroll {name[:64]}")
        self._require_valid(enrolled, address)
        if site is None:
            log.warning("%s was refused at %s: it is enrolled, and no site of this run", name, address)
            raise Refusal(403, f"{name} is enrolled, but no site of this run.")
        return site

    def _require_valid(self, enrolled: keys.Enrolled, address: str) -> None:
        """Refuse a key that was revoked or has expired."""
        name = enrolled.name
        if why := enrolled.why_not(datetime.datetime.now(datetime.UTC).date()):
            log.warning("%s was refused at %s: %s", name, address, why)
            raise Refusal(403, f"{why}; ask the server's operator for another.")

    async def _hello(
        self, send: Send, address: str, who: tuple[str, str, int, str], target: str, query: Mapping[str, str], body: bytes
    ) -> None:
        name, challenge, count, signature = who
        if query.get("digest") != hashlib.sha256(body).hexdigest():
            raise Refusal(400, "the message is not the one that was signed.")
        site = self._require_signed(name, signature, keys.signed_text(target, name, challenge, count), address)
        self._require_new(challenge, site)
        self._answered[challenge] = time.monotonic() + _CHALLENGE
        try:
            kind, fields = wire.decode(body)
        except BadMessage as error:
            raise Refusal(400, f"the message cannot be read: {error}.") from None
        if kind != "hello" or fields["protocol"] != wire.PROTOCOL:
            raise Refusal(
                409, f"the site speaks another protocol than this server ({wire.PROTOCOL}); install the same version."
            )
        if fields["version"] != __version__:
            log.warning("%s was refused at %s: it has dualdelay %s", name, address, fields["version"][:40])
            versions = f"the site has dualdelay {fields['version'][:40]}, the server {__version__}"
            raise Refusal(409, f"{versions}; install the same version at both.")
        if self.ended:
            raise Refusal(410, self.ended)
        if fields["life"] in site.former:
            raise Refusal(409, f"another process has dialled in as {name} since; this one is not needed any more.")
        if not fields["fingerprint"]:  # it wants to know what there is to do, before it has its data
            answer = wire.encode("welcome", {**self._welcome, "session": "", "exchange": "", "worker": site.worker})
            await _respond_pieces(send, 200, answer, {})
            return
        if why := self.admit(site.worker, fields["fingerprint"], fields["data"]):
            self._note_refusal(site, why, address)
            raise Refusal(409, f"{why}.")
        try:
            private, told = keys.new_exchange()
            key = keys.session_key(private, fields["exchange"], name, challenge)
        except ValueError:
            raise Refusal(400, "the site's half of the session's key is none.") from None
        with self._lock:
            if site.life not in ("", fields["life"]):
                site.former = [*site.former, site.life][-_FORMER:]
                if site.session and time.monotonic() - site.seen < 2 * POLL:
                    log.warning(
                        "%s dialled in at %s; its earlier process, at %s, is heard no more", name, address, site.address
                    )
            site.session, site.key, site.life, site.address = secrets.token_hex(16), key, fields["life"], address
            site.seen, site.counts, site.highest, site.refused = time.monotonic(), set(), 0, ""
            site.outbox.clear()
            site.uploads.clear()
            site.taken = site.sent = 0
            if site.waiting is not None:
                site.waiting.set()
        self._end_turn(site)
        self.inbox.put(Incoming(site.worker, site.session, hello=True))
        answer = wire.encode("welcome", {**self._welcome, "session": site.session, "exchange": told, "worker": site.worker})
        await _respond_pieces(send, 200, answer, {})

    def _note_refusal(self, site: SiteBook, why: str, address: str) -> None:
        """Say once that a site was refused; a process of its own that is at work is not concerned."""
        if site.told != why:
            log.warning("%s was refused at %s: %s", site.name, address, why)
        site.told = why
        if not site.session:
            site.refused = why

    def _known(self, name: str, session: str, count: int, signature: str, target: str, address: str) -> SiteBook:
        """The site of a session, if this request is a new one of its own."""
        site = self._by_name.get(name)
        if site is None or not site.session or not hmac.compare_digest(site.session, session):
            self._require_few(address)
            raise Refusal(401, "there is no such session; say hello again.")
        if not site.bucket.take():
            raise Refusal(429, "too many requests of this site; wait a second.", **{"retry-after": "1"})
        text = keys.signed_text(target, name, session, count)
        if not hmac.compare_digest(keys.mark(site.key, text).encode(), signature.encode()):
            raise Refusal(401, "the request does not belong to that session; say hello again.")
        try:
            enrolled = self._roster.sites.get(name)
            if enrolled is None:
                raise Refusal(403, f"{name} is not enrolled any more; ask the server's operator: dualdelay enroll {name}")
            self._require_valid(enrolled, address)
        except Refusal as refusal:
            site.session, site.refused = "", refusal.text
            self.inbox.put(Incoming(site.worker, "", bye=True))
            raise
        if count <= site.highest - _WINDOW or count in site.counts:
            raise Refusal(401, "a request came a second time; say hello again.")
        site.counts.add(count)
        site.highest = max(site.highest, count)
        if len(site.counts) > 2 * _WINDOW:
            site.counts = {one for one in site.counts if one > site.highest - _WINDOW}
        site.seen, site.address = time.monotonic(), address
        return site

    # --- to a site ---

    async def _next(self, site: SiteBook, session: str, query: Mapping[str, str], scope: Scope, send: Send) -> None:
        """Send the first message that the site does not have, as soon as there is one."""
        acknowledged, site.busy, site.travelling = _whole(query, "ack"), query.get("busy") == "1", 0
        scope["extensions"]["lost"] = lost = Disconnection(site)
        until = time.monotonic() + POLL
        if site.waiting is not None:
            site.waiting.set()  # the site has given an earlier request up
        site.waiting = mine = asyncio.Event()
        if not site.busy:
            self.inbox.put(Incoming(site.worker, site.session))
        try:
            while True:
                if lost.now:
                    raise _Cut
                if self.closing:
                    raise Refusal(503, "the server stops; it may be started again.")
                if site.session != session:  # before anything is taken as received: numbers begin anew in each
                    raise Refusal(401, "there is no such session any more; say hello again.")
                self._acknowledge(site, acknowledged)
                with self._lock:
                    first = site.outbox[0] if site.outbox else None
                left = until - time.monotonic()
                if site.waiting is not mine:
                    first, left = None, 0.0
                elif first is not None and self._turns is not None and first.size > _SMALL:
                    first = first if self._turns.take(site.worker) else None
                if first is not None or left <= 0:
                    break
                mine.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(mine.wait(), left)
        finally:
            if site.waiting is mine:
                site.waiting = None
        if first is None:
            await _respond(send, 204, b"")
        else:
            site.bytes_down += first.size
            site.travelling = first.size
            await _hand_over(send, site, first, 0)

    def _acknowledge(self, site: SiteBook, number: int) -> None:
        """The site has all messages up to this number."""
        with self._lock:
            while site.outbox and site.outbox[0].number <= number:
                site.outbox.popleft()
            still = bool(site.outbox)
        if not still:
            self._end_turn(site)

    def _end_turn(self, site: SiteBook) -> None:
        """A site has what it was sent, or is gone: it is the next one's turn."""
        for other in self._turns.end(site.worker) if self._turns is not None else ():
            _set(self.sites[other])

    async def _fetch(self, site: SiteBook, query: Mapping[str, str], send: Send) -> None:
        """Send the rest of a message whose beginning the site has."""
        number, offset = _whole(query, "number"), _whole(query, "offset")
        with self._lock:
            message = next((one for one in site.outbox if one.number == number), None)
        if message is None or not 0 <= offset <= message.size:
            raise Refusal(410, "that message is not needed any more.")
        await _hand_over(send, site, message, offset)

    # --- from a site ---

    async def _take(
        self,
        site: SiteBook,
        session: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Take a message, or the next part of one; what was received before a cut is kept."""
        number, size, offset = (_whole(query, name) for name in ("number", "size", "offset"))
        if not keys.SEAL < size <= self._largest:
            raise Refusal(413, f"a message of {size} bytes is larger than one of this run can be, {self._largest} bytes.")
        if number <= site.taken:
            await _in_time(_drained(receive, size))
            await _have(send, size, size)
            return
        if number not in site.uploads and len(site.uploads) >= _MOST_UPLOADS:
            raise Refusal(429, "too many messages at once; wait for the earlier ones.", **{"retry-after": "1"})
        upload = site.uploads.get(number)
        if upload is None or upload.size != size:
            upload = site.uploads[number] = Upload(size, keys.new_seal(site.key, number), self._rooms)
        if offset != upload.have:
            await _have(send, upload.have, size, 409)
            return
        length = headers.get("content-length", "")
        if not length.isdigit() or int(length) > size - offset:
            raise Refusal(400, "the body has another length than the message.")
        taken = Taken(site, session, upload, offset)
        try:
            async with asyncio.timeout(_STALLED) as taken.limit:
                scope["extensions"]["take"] = taken.add  # what is here already comes first, and then each piece at once
                async for piece in _pieces(receive):
                    taken.add(piece)
        except TimeoutError:
            raise _too_slow() from None
        if taken.overtaken:
            await _have(send, upload.have, size, 409)
            return
        if site.session != session:  # what comes late from an earlier one takes no number of this one
            raise Refusal(401, "there is no such session any more; say hello again.")
        if upload.have == size and site.uploads.pop(number, None) is upload:
            content = upload.opened()
            if content is None:
                log.warning("a message of %s was refused at %s: it is not what the site has sent", site.name, site.address)
                raise Refusal(400, "the message is not what the site has sent: something on its way has changed it.")
            site.taken = max(site.taken, number)
            self.inbox.put(Incoming(site.worker, session, content))
        await _have(send, upload.have, size)


_PATHS = ("/v1/challenge", "/v1/hello", "/v1/next", "/v1/fetch", "/v1/send", "/v1/bye")
_PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


def _set(site: SiteBook) -> None:
    if site.waiting is not None:
        site.waiting.set()


class Disconnection:
    """Hears when the connection is lost by which a site asks for its next message."""

    def __init__(self, site: SiteBook) -> None:
        self._site, self.now = site, False

    def __call__(self) -> None:
        """It is."""
        self.now, self._site.travelling = True, 0
        _set(self._site)


class Taken:
    """The body of a request, on its way into a message. It is called for every piece, without a detour over a task."""

    limit: asyncio.Timeout

    def __init__(self, site: SiteBook, session: str, upload: Upload, offset: int) -> None:
        self._site, self._session, self._upload, self._offset = site, session, upload, offset
        self._looked = time.monotonic()
        self.overtaken = False  # whether the site has given this request up, and another one goes on

    def add(self, piece: bytes) -> None:
        """Take the next bytes; those of a session that is over, or of a request that was given up, are left."""
        site, upload = self._site, self._upload
        self.overtaken = self.overtaken or self._offset != upload.have
        if self.overtaken or site.session != self._session:
            return
        upload.add(piece)
        self._offset += len(piece)
        site.bytes_up += len(piece)
        site.seen = time.monotonic()
        if site.seen > self._looked + _LOOK:
            self.limit.reschedule(asyncio.get_running_loop().time() + _STALLED)
            self._looked = site.seen


class _Cut(Exception):
    """The other side has gone in the middle of a request, or takes nothing more."""


def _query(raw: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(raw.decode("ascii"), strict_parsing=bool(raw), max_num_fields=10))
    except ValueError:
        raise Refusal(400, "the request's target cannot be read.") from None


def _whole(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal(400, f"the request's {name} is no number.")
    return int(text)


def _authorization(headers: Mapping[str, str]) -> tuple[str, str, int, str]:
    words = headers.get("authorization", "").split(" ")
    good = len(words) == 5 and words[0] == "Dualdelay" and words[3].isascii() and words[3].isdigit() and len(words[3]) < 16
    if not good or not keys.NAME.fullmatch(words[1]):
        raise Refusal(401, "the request is not signed; a site dials in by: dualdelay site URL --name NAME --key FILE ...")
    return words[1], words[2], int(words[3]), words[4]


async def _pieces(receive: Receive) -> Any:
    """The body of a request as it comes."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Cut
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


def _too_slow() -> Refusal:
    return Refusal(408, f"nothing came for {_STALLED:g} s.", connection="close")


async def _in_time(work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_STALLED):
            return await work
    except TimeoutError:
        raise _too_slow() from None


async def _body(receive: Receive, most: int, headers: Mapping[str, str]) -> bytes:
    """A small body."""
    if not headers.get("content-length", "0").isdigit() or int(headers.get("content-length", "0")) > most:
        raise Refusal(413, f"the body is larger than {most} bytes.")
    body = bytearray()
    async for piece in _pieces(receive):
        body += piece
        if len(body) > most:
            raise Refusal(413, f"the body is larger than {most} bytes.")
    return bytes(body)


async def _drained(receive: Receive, most: int) -> None:
    read = 0
    async for piece in _pieces(receive):
        read += len(piece)
        if read > most:
            raise Refusal(413, "the body is longer than was said.")


async def _hand_over(send: Send, site: SiteBook, message: Outgoing, offset: int) -> None:
    """Send a message from an offset on; that it goes on is a sign of life."""
    pieces = wire.part_of(message.pieces, offset)
    await _respond_pieces(send, 200, pieces, {"x-number": str(message.number), "x-size": str(message.size)}, site)


async def _have(send: Send, have: int, size: int, status: int = 200) -> None:
    await _respond(send, status, json.dumps({"have": have, "size": size}).encode(), {"content-type": "application/json"})


async def _respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    await _respond_pieces(send, status, [body], headers or {})


async def _respond_pieces(
    send: Send,
    status: int,
    pieces: Sequence[bytes | memoryview],
    headers: Mapping[str, str],
    site: SiteBook | None = None,
) -> None:
    length = wire.size_of(pieces)
    fields = {"content-length": str(length), **headers} if status != 204 else headers
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE):
            try:
                async with asyncio.timeout(_STALLED):
                    await send({"type": "http.response.body", "body": view[start : start + _PIECE], "more_body": True})
            except TimeoutError:
                raise _Cut from None  # the message is kept
            if site is not None:
                site.seen = time.monotonic()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
