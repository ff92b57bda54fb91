"""Who a site is: each has a key of its own, and the server a roster with the public half of every key.

A site signs its hello with its Ed25519 key, and with it its half of an agreement on a key for this session, which then
marks every request and seals every message: that takes a tenth of the time of signatures and digests. The server holds
nothing that a thief could say hello with, the keys work behind any proxy, which certificates of clients do not, and no
clock takes part: what was signed is new because it names a number that the server has drawn.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import BadInput, shown
from ...core.version import install_command

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REVOKED = "revoked"
SEAL = 16  # bytes of a message's seal
_KIND = "ed25519"
_HEAD = "# A site a line: its name, the public half of its key, until when it is valid. The i-th line is worker i - 1.\n"


def require_name(name: str) -> None:
    """Refuse what cannot be a site's name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(
            f"a site is called {shown(name)}; expected letters, digits, '.', '_' and '-', 64 at most, such as hospital-a."
        )


@dataclass(frozen=True)
class Enrolled:
    """One line of the roster."""

    name: str
    public: bytes
    until: datetime.date | None = None
    revoked: bool = False

    @property
    def line(self) -> str:
        """The line as it is written."""
        text = base64.b64encode(self.public).decode()
        until = "" if self.until is None else f" until={self.until.isoformat()}"
        return f"{self.name} {_KIND} {text}{until}{f' {REVOKED}' if self.revoked else ''}"

    def why_not(self, today: datetime.date) -> str:
        """Why this key opens nothing today; empty if it does."""
        if self.revoked:
            return f"the key of {self.name} was revoked"
        if self.until is not None and today > self.until:
            return f"the key of {self.name} was valid until {self.until.isoformat()}"
        return ""


class Roster:
    """The server's file of sites, read anew when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, int] | None = None
        self._sites: dict[str, Enrolled] = {}

    @property
    def sites(self) -> dict[str, Enrolled]:
        """Everyone who was ever enrolled, by name, in the order of the lines."""
        try:
            status = self.path.stat()
            if self._read != (status.st_mtime_ns, status.st_size):
                self._sites = parse_roster(self.path.read_text(), str(self.path))
                self._read = (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            raise BadInput(f"there is no file {self.path}; enroll a site first: dualdelay enroll hospital-a") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"the file of sites {self.path} cannot be read ({error}).") from None
        return self._sites


def parse_roster(text: str, where: str) -> dict[str, Enrolled]:
    """The sites of a roster; refuses a line that is none."""
    sites: dict[str, Enrolled] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            site = _enrolled(line, f"line {number} of {where}")
            if site.name in sites:
                raise BadInput(f"line {number} of {where} names {site.name} a second time; remove one of the two lines.")
            sites[site.name] = site
    return sites


def _enrolled(line: str, where: str) -> Enrolled:
    words = line.split()
    wrong = f"{where} is {shown(line)}; expected 'NAME {_KIND} KEY', as dualdelay enroll writes it."
    if len(words) < 3 or words[1] != _KIND or not NAME.fullmatch(words[0]):
        raise BadInput(wrong)
    until, revoked = None, False
    try:
        public = base64.b64decode(words[2], validate=True)
        for word in words[3:]:
            if word == REVOKED:
                revoked = True
            elif word.startswith("until="):
                until = datetime.date.fromisoformat(word.removeprefix("until="))
            else:
                raise BadInput(wrong)
    except (binascii.Error, ValueError):
        raise BadInput(wrong) from None
    if len(public) != 32:
        raise BadInput(wrong)
    return Enrolled(words[0], public, until, revoked)


def enroll(name: str, roster: Path, key: Path, days: int | None = None) -> Enrolled:
    """Make a site's key: its private half into a new file of its own, its public half as a line of the roster."""
    require_name(name)
    private_key = _library().Ed25519PrivateKey.generate()
    until = None if days is None else datetime.date.today() + datetime.timedelta(days=days)
    site = Enrolled(name, private_key.public_key().public_bytes_raw(), until)
    sites = parse_roster(roster.read_text(), str(roster)) if roster.exists() else {}
    if name in sites and not sites[name].revoked:
        raise BadInput(f"{name} is enrolled in {roster} already; revoke its key first (dualdelay revoke {name}).")
    try:
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput(
            f"there is a file {key} already; a key is never written over: move it away, or give --key."
        ) from None
    except OSError as error:
        raise BadInput(f"the key cannot be written to {key} ({error.strerror}).") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{_KIND} {base64.b64encode(private_key.private_bytes_raw()).decode()}\n")
    sites[name] = site  # a revoked line keeps its place, which is the worker's number
    _write(roster, sites)
    return site


def revoke(name: str, roster: Path) -> None:
    """A site's key opens nothing any more; its line stays, so that the others keep their numbers."""
    if not roster.exists():
        raise BadInput(f"there is no file {roster}, so no key to revoke.")
    sites = parse_roster(roster.read_text(), str(roster))
    if name not in sites:
        raise BadInput(f"{name} is not enrolled in {roster}; there are: {', '.join(sites) or 'none'}.")
    sites[name] = Enrolled(name, sites[name].public, sites[name].until, revoked=True)
    _write(roster, sites)


def _write(roster: Path, sites: dict[str, Enrolled]) -> None:
    """Put the roster in place at once."""
    temporary = roster.with_name(f".{roster.name}.part")
    try:
        temporary.write_text(_HEAD + "".join(f"{site.line}\n" for site in sites.values()))
        temporary.replace(roster)
    except OSError as error:
        raise BadInput(f"the file of sites {roster} cannot be written ({error.strerror}).") from None


def load_key(path: Path) -> Ed25519PrivateKey:
    """A site's private key from its file; one that others may read is refused."""
    try:
        mode, words = path.stat().st_mode, path.read_text().split()
    except FileNotFoundError:
        raise BadInput(f"there is no key {path}; the server's operator makes it: dualdelay enroll NAME") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the key {path} cannot be read ({error}).") from None
    if mode & 0o077:
        raise BadInput(f"the key {path} can be read by others on this machine; chmod 600 {path}")
    try:
        if len(words) != 2 or words[0] != _KIND:
            raise ValueError
        key: Ed25519PrivateKey = _library().Ed25519PrivateKey.from_private_bytes(base64.b64decode(words[1], validate=True))
    except ValueError:  # binascii's is one
        raise BadInput(f"{path} is no site's key; expected '{_KIND} ...', as dualdelay enroll writes it.") from None
    return key


def signed_text(target: str, name: str, session: str, count: int) -> bytes:
    """What a request is known by: its target, and that it is new."""
    return f"dualdelay 1\n{target}\n{name}\n{session}\n{count}".encode()


def sign(key: Ed25519PrivateKey, text: bytes) -> str:
    """A signature as a header carries it."""
    return base64.b64encode(key.sign(text)).decode()


def is_signed(public: bytes, signature: str, text: bytes) -> bool:
    """Whether the owner of a key has signed this; the comparison takes the same time whatever is wrong."""
    from cryptography.exceptions import InvalidSignature

    key: Ed25519PublicKey = _library().Ed25519PublicKey.from_public_bytes(public)
    try:
        key.verify(base64.b64decode(signature, validate=True), text)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_exchange() -> tuple[Any, str]:
    """One half of an agreement on a session's key, and what the other side is told."""
    _library()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw().hex()


def session_key(private: Any, told: str, name: str, challenge: str) -> bytes:
    """The key that both sides have then, and nobody else; raises ValueError for what is no half of an agreement."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(told)))
    return HKDF(SHA256(), 32, None, f"dualdelay 1 session\n{name}\n{challenge}".encode()).derive(shared)


def mark(key: bytes, text: bytes) -> str:
    """What shows that a request comes from who has the session's key."""
    return hmac.new(key, text, "sha256").hexdigest()


def new_seal(key: bytes, number: int) -> Any:
    """What a message of that number is sealed with: Poly1305, under a key that is used for it alone."""
    from cryptography.hazmat.primitives.poly1305 import Poly1305

    return Poly1305(hmac.digest(key, f"dualdelay 1 message\n{number}".encode(), "sha256"))


def _library() -> Any:
    """The module with Ed25519 keys, or what to install."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BadInput(f"keys need cryptography, which is not installed: {install_command('cryptography')}.") from None
    return ed25519
