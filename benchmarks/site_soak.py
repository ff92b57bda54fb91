"""Sites over bad lines: connections cut, also in the middle of a body, stalled and delayed; sites, lines and the server
killed, sites frozen.

    python benchmarks/site_soak.py --minutes 30 --seed 0 --out benchmarks/site_soak.txt

Five sites train DuDe on the digits with a network of 200,000 weights over HTTPS, two through a forwarder and three through
a proxy. Half of the time the last gradients are kept at the server, and messages have 0.8 MB; in the other half each site
keeps its own, and a byte is sent for each weight, both ways. Faults of a kind come at random, with the means below between
them, in a short soak closer together. Who was killed is started again at once, and a server goes on from its folder.

When the time is up nothing happens any more. All sites have to be heard of again; the server is stopped with SIGINT and
started for some last updates, and all have to end by themselves. Then the run is audited and replayed in one process.
Linux only: memory is read in /proc. The seed names the faults, not what real processes do when they meet them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import ipaddress
import json
import logging
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from site_soak_lines import Line, watch_driver

# dualdelay is imported where it is needed: a line that was killed is there again at once, as torch would not be

SITES, HIDDEN, LR, QUORUM = 5, 2700, 0.02, 3
MEANS = {"connection": 5.0, "site killed": 20.0, "site frozen": 20.0, "server killed": 60.0, "line killed": 45.0}  # seconds
LINES = ("forwarder", "proxy")
LINE_OF = (0, 0, 1, 1, 1)  # by site
LAST = 300  # updates after the last stop of the server
START, BACK, END = 120.0, 150.0, 120.0  # seconds: to begin, to be heard of again when all is calm, to come to the end
HARMS = {  # to connections: from how much to how much
    "cut": (0.0, 0.0), "half": (1.0, 4e5), "late": (0.0, 0.2), "all stalled": (1.0, 15.0), "stalled": (1.0, 15.0),
    "stalled long": (41.0, 60.0),  # a site gives up after 40 s without a byte
}  # fmt: skip
AUDIT, GROWTH = 1e-12, 200.0  # relative, and in MB
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at the server": ({"memory": "server"}, {}),
    "at the sites": ({"memory": "workers", "compress": "int8"}, {"downlink": "int8"}),
}


# --- a server and its sites ---


def shared_marks(place: Path) -> Any:
    """What the server tells the driver in shared memory: when each site was heard of last, and the version."""
    path = place / "marks"
    return np.memmap(path, float, "r+" if path.exists() else "w+", shape=(SITES + 1,))


def serve(place: Path, plan: Mapping[str, Any]) -> None:
    import dualdelay as dd

    marks, (method, server) = shared_marks(place), SETTINGS[plan["setting"]]

    def note(state: dd.State, arrival: dd.Arrival) -> None:
        marks[arrival.worker], marks[SITES] = time.monotonic(), state.version

    fleet = dd.SiteFleet(
        listen=f"127.0.0.1:{plan['port']}", certificate=str(place / "server.pem"), roster=str(place / "sites.txt"),
        certificate_key=str(place / "server-key.pem"), quorum=None if plan["until"] else QUORUM,
        faults=dd.FaultPolicy(restarts=10**6, deadline=45.0, patience=45.0, resend=5.0),
    )  # fmt: skip
    watch, folder = dd.Reporting([note], progress=False), place / "run"
    try:
        if folder.exists():
            dd.resume(folder, plan["until"], fleet=fleet, watch=watch)
        else:
            dd.train(
                dd.DuDe(lr=LR, **method), dd.Digits(SITES, hidden=HIDDEN), fleet, time=1e6, server=dd.Server(**server),
                evaluation=dd.Evaluation(seconds=20.0), folder=dd.Saving(folder, every=100), watch=watch,
            )  # fmt: skip
    except KeyboardInterrupt:
        sys.exit(130)


def be_a_site(place: Path, plan: Mapping[str, Any], number: int) -> None:
    import dualdelay as dd
    from dualdelay.engine.half import Half
    from dualdelay.runs.names import rebuild
    from dualdelay.workers.sites.site import Site

    def prepare(run: Mapping[str, Any]) -> tuple[dd.Problem, Half]:
        return dd.Digits(SITES, hidden=HIDDEN), Half(rebuild("algorithm", run["algorithm"]), run["uplink"])

    line, ports = LINE_OF[number], plan["lines"]
    if LINES[line] == "proxy":
        os.environ["HTTPS_PROXY"] = f"http://127.0.0.1:{ports[line]}"
    url = f"https://127.0.0.1:{plan['port'] if LINES[line] == 'proxy' else ports[line]}"
    print(Site(url, f"site-{number}", place / f"site-{number}.key", prepare, place / "server.pem").run(), flush=True)


def check(place: Path) -> dict[str, Any]:
    """What a run has come to, from its folder, and all that is wrong with it."""
    import torch

    import dualdelay as dd

    folder, wrong, begin = place / "run", list[str](), time.perf_counter()
    run = dd.load(folder)
    assert isinstance(run, dd.Run)
    try:
        again = dd.replay(folder, watch=dd.Reporting(progress=False))
        if not torch.equal(again.x, run.x):
            wrong.append("the replay ends with other weights")
        audits = {"audit": run.audit, "audit of the replay": again.audit}
    except dd.ReplayMismatch as error:
        audits = {"audit": run.audit}
        wrong.append(f"the replay differs: {error}")
    wrong += [f"the {name} is {value}" for name, value in audits.items() if value is None or not value < AUDIT]
    for worker in range(SITES):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        left = sum(event["kind"] == "left" and event["worker"] == worker for event in run.trace.events)
        if any(later <= earlier for earlier, later in pairwise(draws)):
            wrong.append(f"jobs of site-{worker} counted twice")
        if not draws or draws[-1] + 1 - len(draws) > left:
            wrong.append(f"jobs of site-{worker} were lost: {len(draws)} up to {draws[-1:]}, and it left {left} times")
    wrong += [f"{path.name} was left over" for path in place.rglob(".*")]
    kinds = Counter(event["kind"] for event in run.trace.events)
    wrong += [f"{kinds[kind]} jobs {kind}" for kind in ("failed", "rejected") if kinds[kind]]
    if run.ended != "updates":
        wrong.append(f"the run has ended as {run.ended}: {run.notes}")
    seconds = time.perf_counter() - begin
    table: dict[str, object] = {
        "updates": run.version, "updates per second": f"{run.version / run.time:.1f}",
        "crashes seen": kinds["crashed"], "memories restored": kinds["restored"], "left": kinds["left"],
        "joined": kinds["joined"], "tau max": run.delays.tau_max, "final objective": f"{run.metrics.objective[-1]:.4f}",
        **{name: "none" if value is None else f"{value:.1e}" for name, value in audits.items()},
        "replay to the same bits, s": f"{seconds:.1f}",
    }  # fmt: skip
    return {"table": table, "wrong": wrong}


# --- the driver ---


class Child:
    """A process that is started again when it was killed, and what is known of its lives."""

    def __init__(self, role: str, number: int, place: Path) -> None:
        self.name, self.log = f"{role}-{number}", place / f"{role}-{number}.txt"
        self._command = [sys.executable, __file__, "--be", role, str(number), str(place)]
        self.frozen, self.stopping = 0.0, False  # until when it is frozen; whether it is to end
        self.lives = list[tuple[float, float, float]]()  # seconds, and megabytes after a while and at the end
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.started, self.harmed, self.frozen = time.monotonic(), False, 0.0
        self._early = self._late = 0.0

    def tell(self, **words: Any) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        self.harmed = True
        self.process.kill()
        self.process.wait()

    def freeze(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = time.monotonic() + seconds

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.frozen = 0.0

    def weigh(self) -> None:
        """Look at its memory, from its fifteenth second on."""
        with suppress(OSError, AttributeError):
            resident = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
            self._late = int(resident[1]) / 1e3 if resident else self._late
            if not self._early and time.monotonic() > self.started + 15:
                self._early = self._late

    def ended(self) -> bool:
        """Whether it has ended; its life is noted then."""
        if self.process.poll() is None:
            return False
        if self._early:
            self.lives.append((time.monotonic() - self.started, self._early, self._late))
            self._early = 0.0
        return True


class Soak:
    """A server, its sites and their lines, for one of the settings."""

    def __init__(self, place: Path, setting: str, seconds: float, chance: random.Random) -> None:
        self._place, self._chance, self.wrong, self.counts = place, chance, list[str](), Counter[str]()
        self._back, self._calm, self._resumed = list[float](), list[float](), list[float]()
        self._means = {kind: min(mean, seconds / (12 if kind == "connection" else 2)) for kind, mean in MEANS.items()}
        self._deck = list[str]()
        self._seconds, ports = seconds, [free_port() for _ in LINES]
        self._plan: dict[str, Any] = {"setting": setting, "until": None, "port": free_port(), "lines": ports}
        self._write_plan()
        make_keys(place)
        self._marks = shared_marks(place)
        self._lines = [Child("line", number, place) for number in range(len(LINES))]
        self._server = Child("server", 0, place)
        self._sites = [Child("site", number, place) for number in range(SITES)]
        self._all = [*self._lines, self._server, *self._sites]
        self._waiting: dict[int, float] = {}  # sites that were started again, and when
        self._server_killed = self._weighed = 0.0

    def _write_plan(self) -> None:
        (self._place / "plan.json").write_text(json.dumps(self._plan))

    def run(self) -> dict[str, Any]:
        """Everything, to the end; returns what the check finds."""
        try:
            self._until("all sites have worked", START, lambda: self._marks[:SITES].all())
            self._rage()
            self._rest()
            self._end()
        finally:
            for child in self._all:
                child.stopping = True
                child.kill()
                child.ended()
        self._read_logs()
        checking = [sys.executable, __file__, "--be", "check", "0", str(self._place)]
        found = subprocess.run(checking, capture_output=True, text=True)
        if found.returncode:
            self.wrong.append(f"the run cannot be checked: {found.stderr[-1000:]}")
        result = {"table": {}, "wrong": []} if found.returncode else json.loads(found.stdout)
        self.wrong += result["wrong"]
        return self._table(result["table"])

    def _until(self, what: str, seconds: float, happened: Callable[[], bool]) -> bool:
        """Wait for something; that it does not happen in time is wrong."""
        until = time.monotonic() + seconds
        while not happened():
            self._look_after()
            if time.monotonic() > until:
                self.wrong.append(f"not in {seconds:g} s: {what}")
                return False
            time.sleep(0.05)
        return True

    def _look_after(self) -> None:
        """Start again what has ended, let go on what was frozen for long enough, and see who is back."""
        now = time.monotonic()
        for child in self._all:
            if child.frozen and child.frozen < now:
                child.thaw()
            if not child.stopping and child.ended():
                if not child.harmed:
                    said = child.log.read_text(errors="replace").strip().splitlines()[-1:]
                    self.wrong.append(f"{child.name} has ended by itself ({child.process.returncode}): {said}")
                child.start()
                if child in self._sites:
                    self._waiting[self._sites.index(child)] = now
        for site, began in list(self._waiting.items()):
            if self._marks[site] > began:
                self._back.append(self._marks[site] - self._waiting.pop(site))
        newest = float(self._marks[:SITES].max())
        if self._server_killed and newest > self._server_killed:
            self._resumed.append(newest - self._server_killed)
            self._server_killed = 0.0
        if now > self._weighed + 1:
            self._weighed = now
            for child in self._all:
                child.weigh()

    def _rage(self) -> None:
        """Harm everybody for as long as was said."""
        chance, begin = self._chance, time.monotonic()
        due = {kind: begin + chance.expovariate(1 / mean) for kind, mean in self._means.items()}
        while (now := time.monotonic()) < begin + self._seconds:
            for kind in [kind for kind, moment in due.items() if moment <= now]:
                due[kind] = now + chance.expovariate(1 / self._means[kind])
                self._harm(kind)
            self._look_after()
            time.sleep(0.02)

    def _harm(self, kind: str) -> None:
        chance = self._chance
        line, site = chance.choice(self._lines), chance.choice(self._sites)
        if kind == "connection":
            self._deck = self._deck or chance.sample(sorted(HARMS), len(HARMS))  # so that a short soak has all of them, too
            harm = self._deck.pop()
            line.tell(kind=harm, which=chance.random(), amount=chance.uniform(*HARMS[harm]))
            return
        if kind == "site frozen":
            if not site.frozen and site.process.poll() is None:
                site.freeze(chance.uniform(1, 10))
                self.counts[kind] += 1
            return
        child = {"site killed": site, "server killed": self._server, "line killed": line}[kind]
        if child.process.poll() is None:
            child.kill()
            self.counts[kind] += 1
            if child is self._server:
                self._server_killed = time.monotonic()

    def _rest(self) -> None:
        """Nothing happens any more: everybody has to be heard of again."""
        for child in [child for child in self._sites if child.frozen]:
            child.thaw()
        for line in self._lines:
            line.tell(kind="calm", which=0.0, amount=0.0)
        begin, late = time.monotonic(), set(range(SITES))

        def heard() -> bool:
            for site in [site for site in late if self._marks[site] > begin]:
                late.discard(site)
                self._calm.append(time.monotonic() - begin)
            return not late

        if not self._until("all sites are heard of again", BACK, heard):
            self.wrong.append(f"not heard of: {[f'site-{site}' for site in late]}")

    def _end(self) -> None:
        """Stop the server as a person would, have it make the last updates, and wait until all have ended."""
        self._server.stopping = True
        self._server.process.send_signal(signal.SIGINT)
        if self._until("the server stops", END, self._server.ended) and self._server.process.returncode != 130:
            self.wrong.append(f"the server has stopped with {self._server.process.returncode}")
        self._plan["until"] = int(self._marks[SITES]) + LAST
        self._write_plan()
        for child in (self._server, *self._sites):
            child.stopping = True
        self._server.start()
        for child in (self._server, *self._sites):
            if self._until(f"{child.name} ends", END, child.ended) and child.process.returncode:
                self.wrong.append(f"{child.name} has ended with {child.process.returncode}")

    def _read_logs(self) -> None:
        for child in self._all:
            said = child.log.read_text(errors="replace")
            self.wrong += [f"{child.name} has shown a traceback: {text[-500:]}" for text in said.split("Traceback")[1:2]]
            if child in self._lines:
                self.counts.update(said.splitlines())
            elif child in self._sites and said.strip().splitlines()[-1:] != ["the run has ended."]:
                self.wrong.append(f"{child.name} did not hear that the run has ended")

    def _table(self, found: Mapping[str, Any]) -> dict[str, Any]:
        names = {
            "cut": "connections cut", "half": "cut in a body", "stalled": "stalled", "stalled long": "stalled > 40 s",
            "all stalled": "lines stalled", "late": "delayed", "line killed": "lines killed", "site killed": "sites killed",
            "site frozen": "sites frozen", "server killed": "servers killed",
        }  # fmt: skip
        table: dict[str, Any] = {"minutes": f"{self._seconds / 60:.1f}"}
        table |= {text: self.counts[kind] for kind, text in names.items()}
        spans = {
            "killed site at work again": self._back,
            "server at work again": self._resumed,
            "all calm: heard of": self._calm,
        }
        for name, seconds in spans.items():
            if seconds:
                table[f"{name}, s"] = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
        for name, children in (("server", [self._server]), ("site", self._sites)):
            lives = [life for child in children for life in child.lives]
            span, early, late = max(lives, default=(0.0, 0.0, 0.0))
            table |= {
                f"longest life of a {name}, s": f"{span:.0f}",
                f"{name}: MB at 15 s, at its end": f"{early:.0f}, {late:.0f}",
            }
            self.wrong += [f"a {name} grew from {a:.0f} to {b:.0f} MB in {t:.0f} s" for t, a, b in lives if b > a + GROWTH]
        return table | dict(found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


def make_keys(place: Path) -> None:
    """The sites' keys, and a certificate that the server signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from dualdelay.workers.sites import keys

    for number in range(SITES):
        keys.enroll(f"site-{number}", place / "sites.txt", place / f"site-{number}.key")
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "soak")])
    now, days = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=2)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - days, now + days)
    authority = x509.BasicConstraints(ca=True, path_length=None)
    signed = built.add_extension(address, critical=False).add_extension(authority, critical=True).sign(key, hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (place / "server.pem").write_bytes(signed.public_bytes(pem))
    (place / "server-key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))


def be(role: str, number: int, place: Path) -> None:
    """One of the processes."""
    plan = json.loads((place / "plan.json").read_text())
    if role == "line":
        asyncio.run(Line(plan["port"], LINES[number] == "proxy").run(plan["lines"][number]))
    elif role == "check":
        print(json.dumps(check(place)))
    else:
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
        watch_driver(str)
        serve(place, plan) if role == "server" else be_a_site(place, plan, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of bad weather")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--folder", type=Path, help="a new folder where runs and logs are kept")
    parser.add_argument("--only", choices=list(SETTINGS), help="all of the time with the memory there")
    parser.add_argument("--be", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be[0], int(options.be[1]), Path(options.be[2]))
        return 0
    settings = [options.only] if options.only else list(SETTINGS)
    tables, wrong = dict[str, dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for setting in settings:
            place = (options.folder or Path(temporary)).resolve() / setting.replace(" ", "-")
            place.mkdir(parents=True)
            soak = Soak(place, setting, options.minutes * 60 / len(settings), random.Random(f"{options.seed} {setting}"))
            tables[setting] = soak.run()
            wrong += [f"memory {setting}: {text}" for text in soak.wrong]
    rows = list(dict.fromkeys(name for table in tables.values() for name in table))
    lines = [f"{'last gradients':32}" + "".join(f"{setting:>16}" for setting in settings)]
    lines += [f"{row:32}" + "".join(f"{tables[setting].get(row, '')!s:>16}" for setting in settings) for row in rows]
    lines += ["", *(f"WRONG: {text}" for text in wrong)] if wrong else ["", "nothing was wrong"]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
