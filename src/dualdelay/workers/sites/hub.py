"""The server's end of the line: an ASGI application to which sites dial in, and the thread that serves it.

Sites make every connection. A site asks for what there is for it and is answered as soon as there is something
(``next``), and sends what it has (``send``). Messages are numbered both ways and kept until the other side has them, so a
cut connection costs what was under way on it, and nothing counts twice.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import logging
import queue
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ...core.errors import BadInput
from ...core.version import __version__, install_command
from ..security import is_loopback
from . import keys, wire
from .books import Bucket, Incoming, Outgoing, SiteBook, Upload
from .status import POLICY

log = logging.getLogger("dualdelay")

POLL = 20.0  # seconds after which a site that waits for something hears that there is nothing
_CHALLENGE = 60.0  # seconds in which a challenge has to be answered
_WINDOW = 256  # requests of one session that may overtake one another
_STRANGERS = (10.0, 60.0)  # requests of one address a second, and at once, before it has shown a key
_SMALL = 64 * 1024  # bytes of a message that anybody may send
_MOST_UPLOADS = 8  # messages of one site that may be on their way
_FORMER = 1000  # processes of a site that are remembered
_TIDY = 10_000  # addresses that are remembered
_PIECE = 256 * 1024  # bytes that are handed to a connection at once

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

    def __init__(self, roster: keys.Roster, names: Sequence[str], largest: int, welcome: Mapping[str, Any]) -> None:
        self.sites = [SiteBook(name, worker) for worker, name in enumerate(names)]
        self.inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self.page: Callable[[str, str], tuple[int, str, bytes] | None] = lambda path, token: None
        self._by_name = {site.name: site for site in self.sites}
        self._roster, self._largest, self._welcome = roster, largest, welcome
        self._secret = secrets.token_bytes(32)
        self._answered: dict[str, float] = {}  # challenges, until they are out of date
        self._strangers: dict[str, Bucket] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
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
            pass
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
            body = await _body(receive, _SMALL, headers)
            await self._hello(send, address, (name, session, count, signature), target, query, body)
            return
        site = self._known(name, session, count, signature, target, address)
        if path == "/v1/next":
            await self._next(site, session, query, send)
        elif path == "/v1/bye":
            self._acknowledge(site, _whole(query, "ack"))
            site.session = ""
            self.inbox.put(Incoming(site.worker, site.session, bye=True))
            await _respond(send, 200, b"")
        elif path == "/v1/fetch":
            await self._fetch(site, query, send)
        else:
            await self._take(site, query, headers, receive, send)

    def _require_few(self, address: str) -> None:
        if len(self._strangers) > _TIDY:
            self._strangers.clear()
        if not self._strangers.setdefault(address, Bucket(*_STRANGERS)).take():
            raise Refusal(429, "too many requests from this address; wait a second.", **{"retry-after": "1"})

    # --- who is it? ---

    def _challenge(self) -> str:
        """A number that was never used before, with what shows that it is ours and not old."""
        head = f"{secrets.token_hex(16)}.{int(time.monotonic() + _CHALLENGE)}"
        return f"{head}.{self._mark(head)}"

    def _mark(self, head: str) -> str:
        return hmac.new(self._secret, head.encode(), "sha256").hexdigest()

    def _require_new(self, challenge: str) -> None:
        head, _, mark = challenge.rpartition(".")
        now, end = time.monotonic(), head.rpartition(".")[2]
        self._answered = {one: until for one, until in self._answered.items() if until > now}
        if not hmac.compare_digest(mark, self._mark(head)) or not end.isdigit() or int(end) < now:
            raise Refusal(401, "the challenge is not one of this server's, or too old; ask for another.")
        if challenge in self._answered:
            raise Refusal(401, "the challenge was answered before; ask for another.")

    def _require_enrolled(self, name: str, signature: str, text: bytes, address: str) -> SiteBook:
        """The site that has signed this, if its key is valid here and now."""
        enrolled, site = self._roster.sites.get(name), self._by_name.get(name)
        if enrolled is None or not keys.is_signed(enrolled.public, signature, text):
            what = "is not enrolled" if enrolled is None else "has another key here"
            log.warning("a site that calls itself %s was refused at %s: it %s", name[:64], address, what)
            raise Refusal(403, f"{name[:64]} {what}; ask the server's operator: dualdelay enroll {name[:64]}")
        if why := enrolled.why_not(datetime.datetime.now(datetime.UTC).date()):
            log.warning("%s was refused at %s: %s", name, address, why)
            raise Refusal(403, f"{why}; ask the server's operator for another.")
        if site is None:
            log.warning("%s was refused at %s: it is enrolled, and no site of this run", name, address)
            raise Refusal(403, f"{name} is enrolled, but no site of this run.")
        return site

    async def _hello(
        self, send: Send, address: str, who: tuple[str, str, int, str], target: str, query: Mapping[str, str], body: bytes
    ) -> None:
        name, challenge, count, signature = who
        if query.get("digest") != hashlib.sha256(body).hexdigest():
            raise Refusal(400, "the message is not the one that was signed.")
        site = self._require_enrolled(name, signature, keys.signed_text(target, name, challenge, count), address)
        self._require_new(challenge)
        self._answered[challenge] = time.monotonic() + _CHALLENGE
        try:
            kind, fields = wire.decode(body)
        except wire.BadMessage as error:
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
        with self._lock:
            if site.life not in ("", fields["life"]):
                site.former = [*site.former, site.life][-_FORMER:]
                if site.session and time.monotonic() - site.seen < 2 * POLL:
                    log.warning(
                        "%s dialled in at %s; its earlier process, at %s, is heard no more", name, address, site.address
                    )
            site.session, site.life, site.address = secrets.token_hex(16), fields["life"], address
            site.seen, site.counts, site.highest, site.refused = time.monotonic(), set(), 0, ""
            site.outbox.clear()
            site.uploads.clear()
            site.taken = site.sent = 0
            if site.waiting is not None:
                site.waiting.set()
        self.inbox.put(Incoming(site.worker, site.session, hello=True))
        answer = wire.encode("welcome", {**self._welcome, "session": site.session, "worker": site.worker})
        await _respond_pieces(send, 200, answer, {})

    def _known(self, name: str, session: str, count: int, signature: str, target: str, address: str) -> SiteBook:
        """The site of a session, if this request is a new one of its own."""
        site = self._by_name.get(name)
        if site is None or not site.session or not hmac.compare_digest(site.session, session):
            self._require_few(address)
            if site is not None and site.session:
                self._require_enrolled(name, signature, keys.signed_text(target, name, session, count), address)
            raise Refusal(401, "there is no such session; say hello again.")
        if not site.bucket.take():
            raise Refusal(429, "too many requests of this site; wait a second.", **{"retry-after": "1"})
        self._require_enrolled(name, signature, keys.signed_text(target, name, session, count), address)
        if count <= site.highest - _WINDOW or count in site.counts:
            raise Refusal(401, "a request came a second time; say hello again.")
        site.counts.add(count)
        site.highest = max(site.highest, count)
        if len(site.counts) > 2 * _WINDOW:
            site.counts = {one for one in site.counts if one > site.highest - _WINDOW}
        site.seen, site.address = time.monotonic(), address
        return site

    # --- to a site ---

    async def _next(self, site: SiteBook, session: str, query: Mapping[str, str], send: Send) -> None:
        """Send the first message that the site does not have, as soon as there is one."""
        acknowledged, site.busy = _whole(query, "ack"), query.get("busy") == "1"
        until = time.monotonic() + POLL
        if site.waiting is not None:
            site.waiting.set()  # the site has given an earlier request up
        site.waiting = mine = asyncio.Event()
        if not site.busy:
            self.inbox.put(Incoming(site.worker, site.session))
        try:
            while True:
                self._acknowledge(site, acknowledged)
                with self._lock:
                    first = site.outbox[0] if site.outbox else None
                left = until - time.monotonic()
                if self.closing:
                    raise Refusal(503, "the server stops; it may be started again.")
                if site.session != session:
                    raise Refusal(401, "there is no such session any more; say hello again.")
                if site.waiting is not mine:
                    first, left = None, 0.0
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
            await _respond_pieces(send, 200, first.pieces, {"x-number": str(first.number), "x-size": str(first.size)})

    def _acknowledge(self, site: SiteBook, number: int) -> None:
        """The site has all messages up to this number."""
        with self._lock:
            while site.outbox and site.outbox[0].number <= number:
                site.outbox.popleft()

    async def _fetch(self, site: SiteBook, query: Mapping[str, str], send: Send) -> None:
        """Send the rest of a message whose beginning the site has."""
        number, offset = _whole(query, "number"), _whole(query, "offset")
        with self._lock:
            message = next((one for one in site.outbox if one.number == number), None)
        if message is None or not 0 <= offset <= message.size:
            raise Refusal(410, "that message is not needed any more.")
        await _respond_pieces(
            send, 200, wire.part_of(message.pieces, offset), {"x-number": str(number), "x-size": str(message.size)}
        )

    # --- from a site ---

    async def _take(
        self, site: SiteBook, query: Mapping[str, str], headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        """Take a message, or the next part of one; what was received before a cut is kept."""
        number, size, offset = (_whole(query, name) for name in ("number", "size", "offset"))
        digest = query.get("digest", "")
        if not 0 < size <= self._largest:
            raise Refusal(413, f"a message of {size} bytes is larger than one of this run can be, {self._largest} bytes.")
        if number <= site.taken:
            await _drained(receive, size)
            await _have(send, size, size)
            return
        if number not in site.uploads and len(site.uploads) >= _MOST_UPLOADS:
            raise Refusal(429, "too many messages at once; wait for the earlier ones.", **{"retry-after": "1"})
        upload = site.uploads.get(number)
        if upload is None or (upload.size, upload.digest) != (size, digest):
            upload = site.uploads[number] = Upload(size, digest)
        if offset != upload.have:
            await _have(send, upload.have, size, 409)
            return
        length = headers.get("content-length", "")
        if not length.isdigit() or int(length) > size - offset:
            raise Refusal(400, "the body has another length than the message.")
        async for piece in _pieces(receive):
            if upload.have + len(piece) > size:
                raise Refusal(413, "the body is longer than was said.")
            upload.add(piece)
            site.bytes_up += len(piece)
            site.seen = time.monotonic()
        if upload.have == size:
            site.uploads.pop(number, None)
            if not hmac.compare_digest(upload.hashed.hexdigest(), digest):
                raise Refusal(400, "the message is not the one that was signed; send it again.")
            site.taken = max(site.taken, number)
            self.inbox.put(Incoming(site.worker, site.session, upload.data))
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


class _Cut(Exception):
    """The other side has gone in the middle of a request."""


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


async def _have(send: Send, have: int, size: int, status: int = 200) -> None:
    await _respond(send, status, json.dumps({"have": have, "size": size}).encode(), {"content-type": "application/json"})


async def _respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    await _respond_pieces(send, status, [body], headers or {})


async def _respond_pieces(
    send: Send, status: int, pieces: Sequence[bytes | memoryview], headers: Mapping[str, str]
) -> None:
    length = wire.size_of(pieces)
    fields = {"content-length": str(length), **headers} if status != 204 else headers
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    for piece in pieces:
        for start in range(0, len(piece), _PIECE):
            await send({"type": "http.response.body", "body": bytes(piece[start : start + _PIECE]), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Served:
    """A hub, served by a thread of its own until it is closed."""

    def __init__(self, hub: Hub, listen: str, certificate: Path | None, key: Path | None) -> None:
        try:
            import uvicorn
        except ImportError:
            raise BadInput(f"sites need uvicorn, which is not installed: {install_command('uvicorn')}.") from None
        host, port = split_address(listen)
        if certificate is None and not is_loopback(host):
            raise BadInput(
                f"the server would listen on {listen} without a certificate, where others could read and change what is "
                "sent; give --certificate and --key, or listen on 127.0.0.1 behind a proxy that has one."
            )
        if (certificate is None) != (key is None):
            raise BadInput("a certificate and its key belong together; give both, or for loopback neither.")
        config = uvicorn.Config(
            hub, log_config=None, access_log=False, lifespan="off", http="h11", ws="none", loop="asyncio",
            limit_concurrency=4 * len(hub.sites) + 256, timeout_keep_alive=75, server_header=False, date_header=False,
            backlog=1024, proxy_headers=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._hub, self.scheme = hub, "http" if certificate is None else "https"
        self._server = uvicorn.Server(config)
        config.load()
        if certificate is not None and key is not None:
            config.ssl = _context(certificate, key)
        self._socket = _bound(host, port)
        self.address = f"{host if ':' not in host else f'[{host}]'}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="dualdelay hub", daemon=True)
        self._failed: BaseException | None = None
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if self._failed is not None:
            raise BadInput(f"the server could not listen on {listen}: {self._failed}.")

    @property
    def url(self) -> str:
        """Where sites dial in."""
        return f"{self.scheme}://{self.address}"

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:
            self._failed = error

    def close(self) -> None:
        self._hub.close()
        self._server.should_exit = True
        self._thread.join(10.0)
        self._socket.close()


def split_address(text: str) -> tuple[str, int]:
    """The host and the port of an address such as 0.0.0.0:8443."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"the address to listen on is {text!r}; expected host:port, such as 0.0.0.0:8443.")
    return host.strip("[]"), int(port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once where it reads TCP
        with ExitStack() as stack:
            stack.callback(bound.close)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            stack.pop_all()
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"the server cannot listen on {host}:{port} ({why}); choose another address.") from None
    return bound


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"the certificate {certificate} and its key {key} cannot be used ({error}).") from None
    return context
