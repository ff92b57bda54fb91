"""Whom a cluster is open to."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from pathlib import Path

from ..core.errors import BadInput


def split(address: str) -> tuple[str, int | None]:
    """The host of an address and its port, if it has one."""
    host = address.removeprefix("ray://")
    port = None
    if host.count(":") == 1 or "]:" in host:
        host, _, text = host.rpartition(":")
        port = int(text) if text.isdigit() else None
    return host.strip("[]"), port


def is_loopback(address: str) -> bool:
    """Whether an address, with or without a port, can be reached from this machine alone."""
    host, _ = split(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_answer(address: str) -> None:
    """Refuse an address that does not answer; Ray would try for minutes."""
    host, port = split(address)
    if port is not None:
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            raise BadInput(
                f"no cluster answers at {address} ({error}); start the cluster there first (ray start --head), or leave "
                "the address out to start Ray on this machine."
            ) from None


_OWN = secrets.token_hex(32)  # for what is started here, so that nothing is written to the home folder


def own_token() -> None:
    """Give a Ray that is about to be started here a token, unless the user has one or wants none."""
    if "RAY_AUTH_MODE" not in os.environ and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = _OWN
    # what it says on standard error is said in docs/reference/security.md
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def _has_token() -> bool:
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return given or (Path.home() / ".ray" / "auth_token").exists()


def authenticates() -> bool:
    """Whether the user has told Ray in this process to ask for a token or a certificate."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    mode = os.environ.get("RAY_AUTH_MODE", "token" if _has_token() else "disabled")
    return mode.lower() == "token" and os.environ.get("RAY_AUTH_TOKEN") != _OWN


def require_secure(address: str, insecure: bool) -> None:
    """Refuse a cluster that strangers could reach and command, unless that was asked for."""
    if is_loopback(address) or authenticates() or insecure:
        return
    raise BadInput(
        f"will not use Ray at {address}: it is not this machine alone, and Ray here asks for neither a token nor a "
        "certificate, so anyone who reaches the port can run code. Set RAY_AUTH_MODE=token on every machine "
        "(docs/reference/security.md shows how), or say insecure=True if the network is closed."
    )


def require_here(wanted: str, actual: str) -> None:
    """Refuse a Ray that was to stay on this machine and has not."""
    if is_loopback(wanted) and not is_loopback(actual):
        raise BadInput(
            f"Ray was to stay on {wanted} and is at {actual}, where others can reach it. Start it by hand (ray start "
            "--head --node-ip-address=127.0.0.1) and give its address."
        )


def require_same_ray(wanted: str | None, actual: str, insecure: bool) -> None:
    """Refuse a Ray that the user's program has connected to, if it is another or open to strangers."""
    if wanted not in (None, "auto", actual):
        raise BadInput(
            f"this program is connected to Ray at {actual} already, and the fleet's address is {wanted}; call "
            "ray.shutdown() first, or leave the address out."
        )
    require_secure(actual, insecure)
