"""How a hub is served: uvicorn in a thread of its own, behind limits that hold before a request is understood."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...core.errors import BadInput
from ...core.version import install_command
from ..security import is_loopback
from .hub import Hub

_LONGEST_HEAD = 64 * 1024  # bytes of a request before its body
_SLOWEST_HEAD = 30.0  # seconds in which they have to come
_DEAD = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 120_000}  # who is silent is gone


class Served:
    """A hub, served by a thread of its own until it is closed."""

    def __init__(self, hub: Hub, listen: str, certificate: Path | None, key: Path | None) -> None:
        protocol = _bounded_protocol()
        import uvicorn

        host, port = split_address(listen)
        if certificate is None and not is_loopback(host):
            raise BadInput(
                f"the server would listen on {listen} without a certificate, where others could read and change what is "
                "sent; give --certificate and --key, or listen on 127.0.0.1 behind a proxy that has one."
            )
        if (certificate is None) != (key is None):
            raise BadInput("a certificate and its key belong together; give both, or for loopback neither.")
        config = uvicorn.Config(
            hub, log_config=None, log_level="critical", access_log=False, lifespan="off", http=protocol,
            ws="none", limit_concurrency=4 * len(hub.sites) + 256, timeout_keep_alive=75, server_header=False,
            date_header=False, backlog=1024, proxy_headers=False, timeout_graceful_shutdown=2,
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

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._server.server_state.connections)

    def _run(self) -> None:
        try:
            _new_runner().run(self._server.serve(sockets=[self._socket]))
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
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # every connection has this from the one it came by
            for name, value in _DEAD.items():
                if (option := getattr(socket, name, None)) is not None:
                    bound.setsockopt(socket.IPPROTO_TCP, option, value)
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
        raise BadInput(
            f"the certificate {certificate} and its key {key} cannot be used ({error}); expected two PEM files."
        ) from None
    return context


def _new_runner() -> Any:
    """A loop that runs until what it was given has ended: uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _bounded_protocol() -> Any:
    """uvicorn's protocol on httptools, for heads that are neither long nor slow: it would keep any, and wait for ever."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        what = install_command("uvicorn", "httptools")
        raise BadInput(f"sites need uvicorn and httptools, which are not installed: {what}.") from None

    class BoundedProtocol(HttpToolsProtocol):
        """A connection."""

        _timer: asyncio.TimerHandle | None = None
        _length = 0  # bytes of the head, as far as it has come; of a body's trailers, too

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            extensions: Any = (self.scope or {}).get("extensions", {})
            if "lost" in extensions:
                extensions["lost"]()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._timer is not None:
                self._count(len(data))

        def on_message_begin(self) -> None:
            self._begin_head()
            super().on_message_begin()
            extensions: Any = {"abort": self.transport.abort}
            self.scope["extensions"] = extensions

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._timer is None:
                self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            extensions: Any = self.scope["extensions"]
            take = extensions.get("take")
            if take is None:
                super().on_body(body)
            else:
                take(body)  # at once: handing it to a task takes longer than to take it

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def _begin_head(self) -> None:
            self._end_head()
            self._length, self._timer = 0, self.loop.call_later(_SLOWEST_HEAD, self._refuse)

        def _end_head(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

        def _count(self, more: int) -> None:
            self._length += more
            if self._length > _LONGEST_HEAD and not self.transport.is_closing():
                self._refuse()

        def _refuse(self) -> None:
            self._end_head()
            self.send_400_response("the request's head is too long, or too slow.")

    return BoundedProtocol
