"""The status page of a server with sites: read only, for who has its token."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from .books import SiteBook

_POINTS = 500  # of the curve
_AWAY = 60.0  # seconds without a sign after which a site is shown as away
_SILENT = 5.0  # seconds without a sign of life that are told
_OLD = 30.0  # seconds from which on the age of the objective is told

_PAGE = files(__package__).joinpath("status.html").read_bytes()


def _hash_of(tag: str) -> str:
    """What a browser checks the page's own script or style by."""
    inside = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), _PAGE, re.DOTALL)
    assert inside is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside[1]).digest()).decode()}'"


POLICY = f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'"


class StatusBoard:
    """What the page shows. A logger of the run: it is called with its vital signs and its evaluations."""

    def __init__(self, token: str | None = None) -> None:
        self.drawn = token is None  # and to be told, for nobody knows it
        self.token = token or secrets.token_urlsafe(24)
        self._title = ""
        self._version, self._signs = 0, dict[str, float]()
        self._time = 0.0
        self._curve: list[tuple[float, float]] = []
        self._sites: Callable[[], Sequence[SiteBook]] = tuple

    def begin(self, title: str, sites: Callable[[], Sequence[SiteBook]]) -> None:
        """A run begins, with these sites."""
        self._title, self._sites = title, sites

    def __call__(self, version: int, values: Mapping[str, float]) -> None:
        """Note how the run stands, or what an evaluation has found."""
        if "updates_per_second" in values:
            self._version, self._signs, self._time = version, dict(values), float(values["time"])
            return
        objective = float(values.get("objective", math.nan))
        if math.isfinite(objective):
            self._curve.append((self._time, objective))
            if len(self._curve) > _POINTS:
                self._curve = [*self._curve[:-1:2], self._curve[-1]]

    def page(self, path: str, token: str) -> tuple[int, str, bytes] | None:
        """The page, which holds nothing, or what it shows, for who has the token; None for any other path."""
        if path == "/":
            return 200, "text/html; charset=utf-8", _PAGE
        if path != "/status.json":
            return None
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return 403, "text/plain; charset=utf-8", b"the token is not the one of this server."
        return 200, "application/json", json.dumps(self.status()).encode()

    def status(self) -> dict[str, Any]:
        """Everything that the page shows, as plain values."""
        signs, now = self._signs, time.monotonic()
        faults = {
            name.partition("/")[2]: int(count) for name, count in signs.items() if name.startswith("faults/") and count
        }
        facts = {
            "updates": f"{self._version:,}",
            "updates a second": _number(signs.get("updates_per_second")),
            "seconds": _number(signs.get("time")),
            "loss of minibatches": _number(signs.get("loss")),
            "objective": self._objective(),
            "largest staleness": _number(signs.get("tau_max")),
            "faults": ", ".join(f"{count} {name}" for name, count in faults.items()) or "none",
        }
        return {
            "run": {"title": self._title, "facts": facts},
            "curve": self._curve,
            "sites": [self._site(site, now) for site in self._sites()],
        }

    def _objective(self) -> str:
        """The last one, and how old it is, if it is: evaluations wait for all sites that are there."""
        if not self._curve:
            return "-"
        age = self._time - self._curve[-1][0]
        return _number(self._curve[-1][1]) + (f", {age:.0f} s ago" if age > _OLD else "")

    def _site(self, site: SiteBook, now: float) -> dict[str, Any]:
        seen = now - site.seen if site.seen else None
        state = "refused" if site.refused else "not come" if seen is None else "away" if seen > _AWAY else "there"
        if not site.session and seen is not None and not site.refused:
            state = "gone"
        elif state == "there" and (silent := site.silence(now)) > _SILENT:
            state = f"silent for {silent:.0f} s"
        doing = site.refused or (f"{site.doing}, for {max(0.0, now - site.since):.0f} s" if site.doing else "waits")
        return {
            "name": site.name,
            "state": state,
            "doing": doing if state == "refused" or state.startswith(("there", "silent")) else "-",
            "seen": seen,
            "delay": self._signs.get(f"worker/{site.worker}/delay"),
            "jobs": site.jobs,
            "loss": site.loss if site.loss is None or math.isfinite(site.loss) else None,
            "up": site.bytes_up,
            "down": site.bytes_down,
            "crashes": self._signs.get(f"worker/{site.worker}/crashes", 0.0),
            "address": site.address,
        }


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
