"""A site's end of the line: requests to the server, a session, and messages that are sent in parts."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from ...core.errors import BadInput
from ...core.version import install_command
from ..security import is_loopback
from . import keys, wire

_CONNECT = 15.0  # seconds to reach the server
_STALLED = 40.0  # seconds without a byte after which a connection is given up; longer than the server lets a site wait
_STEP = 2**18  # bytes that are sent at once, and still in the cache when they are sealed


class Refused(BadInput):
    """The server does not want this site; another try would come to the same."""


class Unknown(Exception):
    """The server does not know this session: it has begun anew."""


class Lost(Exception):
    """The server could not be reached, or not to the end."""


class Gone(Exception):
    """What was asked for is not there any more; of a hello: the run has ended."""


@dataclass
class Session:
    """What the server and the site have agreed on; nothing of one session counts in another."""

    token: str = ""
    key: bytes = b""
    sent: int = 0  # messages of the site, numbered so far
    have: int = 0  # messages of the server that are here


@dataclass
class Traffic:
    """Bytes of messages that went each way, and how often the line was lost."""

    up: int = 0
    down: int = 0
    lost: int = 0


@dataclass
class Line:
    """Requests to the server, over connections that are kept."""

    url: str
    name: str
    key: Any
    certificate: Path | None = None
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
        self.timeout = urllib3.Timeout(connect=_CONNECT, read=_STALLED)
        options: dict[str, Any] = {"maxsize": 4, "retries": False, "timeout": self.timeout}
        if parts.scheme == "https":
            options["ssl_context"] = _context(self.certificate)
        proxy = None if proxy_bypass(parts.hostname) else getproxies().get(parts.scheme)
        if proxy is not None and is_loopback(parts.hostname) and not is_loopback(urlsplit(proxy).hostname or ""):
            proxy = None  # a proxy elsewhere cannot reach this machine's own address
        self.way = "" if proxy is None else f" through the proxy {proxy.rpartition('@')[2]} of the environment"
        pool: Any = urllib3.PoolManager(**options) if proxy is None else urllib3.ProxyManager(proxy, **options)
        self._pool, self._count, self._lock = pool, 0, threading.Lock()

    def ask(
        self,
        session: Session,
        path: str,
        query: Mapping[str, Any],
        body: Iterable[bytes | memoryview] = (),
        size: int = 0,
    ) -> Any:
        """A request of a session, with a body of so many bytes; the response is not read yet."""
        target, count = f"{path}?{urlencode(query)}", self._next_count()
        shown = keys.mark(session.key, keys.signed_text(target, self.name, session.token, count))
        return self.post(target, body, size, authorization=f"Dualdelay {self.name} {session.token} {count} {shown}")

    def hello(self, about: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
        """What the server says of its run and, for who names a problem and its data, a new session."""
        challenge = self.read(self.post("/v1/challenge")).decode(errors="replace")
        private, exchange = keys.new_exchange()
        hello = wire.encode("hello", {**about, "exchange": exchange})
        target, count = f"/v1/hello?digest={hashlib.sha256(b''.join(hello)).hexdigest()}", self._next_count()
        shown = keys.sign(self.key, keys.signed_text(target, self.name, challenge, count))
        words = f"Dualdelay {self.name} {challenge} {count} {shown}"
        try:
            answer = self.read(self.post(target, hello, wire.size_of(hello), authorization=words))
        except Unknown as error:  # the challenge was too slow on its way
            raise Lost(str(error)) from None
        try:
            _, run = wire.decode(answer)
            token, told = run.pop("session"), run.pop("exchange")
            key = keys.session_key(private, told, self.name, challenge) if token else b""
        except (ValueError, KeyError) as error:
            raise Refused(f"{self.url} is no dualdelay server: {error}.") from None
        return Session(token, key), run

    def _next_count(self) -> int:
        with self._lock:
            self._count += 1
            return self._count

    def post(self, target: str, body: Iterable[bytes | memoryview] = (), size: int = 0, **headers: str) -> Any:
        """A request; raises for what is not an answer that one can go on with."""
        fields = {"content-type": "application/octet-stream", "content-length": str(size), **headers}
        url = f"{self.url.rstrip('/')}{target}"
        try:
            response = self._pool.request(
                "POST", url, body=body if size else None, headers=fields, preload_content=False, redirect=False
            )
        except self._errors.SSLError as error:
            raise (
                _certificate_refused(self.url, error) if "CERTIFICATE" in str(error).upper() else Lost(str(error))
            ) from None
        except (self._errors.MaxRetryError, self._errors.ProxyError) as error:
            reason = getattr(error, "reason", None) or error
            if "CERTIFICATE_VERIFY_FAILED" in str(reason):
                raise _certificate_refused(self.url, reason) from None
            raise Lost(str(reason)) from None
        except (self._errors.HTTPError, OSError) as error:
            plain = self.url.startswith("http:") and "RemoteDisconnected" in str(error)
            raise Lost(f"{error}; a server with a certificate speaks https" if plain else str(error)) from None
        if response.status in (200, 204) or (
            response.status == 409 and response.headers.get("content-type") == "application/json"
        ):
            return response
        text = self.read(response)[:2000].decode(errors="replace").strip()
        if response.status == 401:
            raise Unknown(text)
        if response.status in (400, 403, 404, 409, 410, 413, 415) and response.headers.get("content-type", "").startswith(
            "text/plain"
        ):
            raise Gone(text) if response.status == 410 else Refused(f"the server at {self.url} refused this site: {text}")
        raise Lost(f"{self.url} answered {response.status} {' '.join(text.split())[:200]}")

    def read(self, response: Any) -> bytes:
        """The bytes of a response that is small."""
        return b"".join(self._stream(response))

    def read_into(self, message: wire.Partial, response: Any) -> None:
        """Take what a response has of a message; what came before a cut is kept."""
        for piece in self._stream(response):
            if message.have + len(piece) > message.size:
                raise Refused(f"{self.url} sent more than it said; it is no dualdelay server.")
            message.add(piece)

    def read_number(self, response: Any, name: str) -> int:
        """A number that a response tells."""
        try:
            return int(json.loads(self.read(response))[name])
        except (ValueError, KeyError, TypeError):
            raise Lost(f"{self.url} does not answer as a dualdelay server does") from None

    def place(self, response: Any) -> tuple[int, int]:
        """The number of the message that a response begins, and how long it is."""
        try:
            return int(response.headers["x-number"]), int(response.headers["x-size"])
        except (ValueError, KeyError):
            response.close()
            raise Lost(f"{self.url} does not answer as a dualdelay server does") from None

    def _stream(self, response: Any) -> Iterator[bytes]:
        try:
            for piece in response.stream(2**18):
                self.traffic.down += len(piece)
                yield piece
        except (self._errors.HTTPError, OSError) as error:
            response.close()
            raise Lost(str(error)) from None
        response.release_conn()

    def close(self) -> None:
        """Let the connections go."""
        self._pool.clear()


class Letter:
    """A message to the server, whose last bytes are its seal. That is made on the way, and takes no time of its own."""

    def __init__(self, session: Session, pieces: wire.Pieces) -> None:
        """In this session."""
        self.session, self.number, self.size = session, 0, wire.size_of(pieces) + keys.SEAL
        self._pieces, self._sealed, self._end = pieces, 0, b""
        self._seal: Any = None

    def begin(self) -> None:
        """It is the next message of its session."""
        self.session.sent += 1
        self.number, self._seal = self.session.sent, keys.new_seal(self.session.key, self.session.sent)

    def part(self, offset: int, most: int) -> Iterator[bytes | memoryview]:
        """The bytes from an offset on."""
        content = self.size - keys.SEAL
        for piece in wire.part_of(self._pieces, offset, min(most, max(0, content - offset))):
            for start in range(0, len(piece), _STEP):
                step = piece[start : start + _STEP]
                yield step
                offset, most = offset + len(step), most - len(step)
                self._seal_to(offset)
        if most:
            self._seal_to(content)
            self._end = self._end or self._seal.finalize()
            yield self._end[offset - content :][:most]

    def _seal_to(self, end: int) -> None:
        for piece in wire.part_of(self._pieces, self._sealed, max(0, end - self._sealed)):
            self._seal.update(piece)
        self._sealed = max(self._sealed, end)


def _context(certificate: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if certificate is None else str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"the certificate {certificate} cannot be used ({error}).") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _certificate_refused(url: str, error: object) -> Refused:
    name = "hostname" in str(error).lower() or "ip address mismatch" in str(error).lower()
    instead = (
        "Dial one of the names that it has." if name else "If it is the server's own, give it: --certificate server.pem"
    )
    return Refused(f"{url} has a certificate that this site does not trust ({error}). {instead}")
