"""A long run in bad weather: workers killed, frozen, leaving and joining, messages lost, repeated and late, a disk that is
slow, the server paused and stopped.

    python benchmarks/soak.py --minutes 30 --seed 0 --out soak.txt --folder soak-run

Six workers train DuDe on the digits, each keeping its own last gradient. A thread kills one of their processes every 3 to
10 seconds with SIGKILL, freezes one every 15 to 40 seconds with SIGSTOP for up to 12, while the deadline of a job is 8, and
now and then asks one to leave and later to join; 2 % of the messages are lost, 2 % come twice and 5 % up to a second late.
Every 60 to 120 seconds the server is stopped by SIGSTOP for 3 to 15 seconds; one sync of a file in ten takes up to two.
Every five minutes the run ends, is audited and resumed from its folder under a new Ray; with ``--folder`` a soak that was
stopped or killed goes on. At the end the whole run is replayed in one process to the same bits, and a
calm simulation makes as many updates. Linux only: whom to kill is read in /proc. The seed names the faults, not the order
in which real processes meet them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import dualdelay as dd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from transports import LossyRayFleet

WORKERS, LR = 6, 0.05
LOST, REPEATED, LATE, LATEST = 0.02, 0.02, 0.05, 1.0
DEADLINE = 8.0  # seconds
SEGMENT, QUIET = 300.0, 15.0  # seconds; nobody is killed at the end of a segment, so that all can be audited


class Weather:
    """What goes wrong, drawn from a seed, and how often it did."""

    def __init__(self, seed: int) -> None:
        """Nothing has gone wrong yet."""
        self.counts: Counter[str] = Counter()
        self._messages, self._moments = random.Random(f"messages {seed}"), random.Random(f"moments {seed}")

    def delays(self, message: Any) -> list[float]:
        """The delays with which a message arrives; none: it is lost."""
        self.counts["messages"] += 1
        chance = self._messages.random()
        if chance < LOST:
            self.counts["lost"] += 1
            return []
        if chance < LOST + REPEATED:
            self.counts["repeated"] += 1
            return [0.0, self._messages.uniform(0.0, LATEST)]
        if chance < LOST + REPEATED + LATE:
            self.counts["late"] += 1
            return [self._messages.uniform(0.0, LATEST)]
        return [0.0]

    def rage(self, fleet: dd.RayFleet, over: threading.Event, seconds: float) -> None:
        """Harm workers and the server, for so long once they are there, or until told that it is over."""
        moments, away, frozen = self._moments, dict[int, float](), dict[int, tuple[int, float]]()
        while len(fleet.control.places) < WORKERS and not over.wait(0.05):
            pass
        now = time.monotonic()
        until = now + seconds
        kill, leave = now + moments.uniform(3, 10), now + moments.uniform(10, 30)
        freeze, pause = now + moments.uniform(15, 40), now + moments.uniform(60, 120)
        while not over.wait(0.05):
            now = time.monotonic()
            if now >= until:
                kill = leave = freeze = pause = math.inf
            if now >= kill:
                kill = now + moments.uniform(3, 10)
                worker = moments.randrange(WORKERS)
                if worker not in away and self._signal(fleet, worker, signal.SIGKILL):
                    self.counts["kills"] += 1
            if now >= freeze:
                freeze = now + moments.uniform(15, 40)
                worker = moments.randrange(WORKERS)
                pid = self._signal(fleet, worker, signal.SIGSTOP) if worker not in frozen else 0
                if pid:
                    self.counts["freezes"] += 1
                    frozen[worker] = pid, now + moments.uniform(1, 12)
            if now >= leave:
                leave = now + moments.uniform(10, 30)
                worker = moments.randrange(WORKERS)
                if len(away) < WORKERS // 2 and worker not in away:
                    away[worker] = now + moments.uniform(4, 15)
                    fleet.control.leave(worker)
            if now >= pause:
                pause = now + moments.uniform(60, 120)
                self.counts["pauses"] += 1
                stop = f"kill -STOP {os.getpid()}; sleep {moments.uniform(3, 15):.1f}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", stop]).wait()
            for worker, (pid, end) in list(frozen.items()):
                if end <= time.monotonic() or until <= now:
                    del frozen[worker]
                    if _is_ours(pid):
                        os.kill(pid, signal.SIGCONT)
                    if worker not in away:
                        fleet.control.join(worker)  # if it was frozen for too long
            for worker in [worker for worker, back in away.items() if back <= now]:
                del away[worker]
                fleet.control.join(worker)

    def _signal(self, fleet: dd.RayFleet, worker: int, number: signal.Signals) -> int:
        """Send a worker's process a signal; returns its number, or zero if it is not there."""
        _, pid = fleet.control.places.get(worker, ("", -1))
        if not _is_ours(pid):
            return 0
        os.kill(pid, number)
        return pid

    def slow_disk(self) -> None:
        """From now on a sync of a file takes longer now and then."""
        sync, moments = os.fsync, random.Random("disk")

        def slowly(descriptor: int) -> None:
            if moments.random() < 0.1:
                self.counts["slow syncs"] += 1
                time.sleep(moments.uniform(0.0, 2.0))
            sync(descriptor)

        os.fsync = slowly


def _is_ours(pid: int) -> bool:
    """Whether a process is a Ray worker below this one: a number may have been given to another process since."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def storm(folder: Path, minutes: float, seed: int) -> tuple[dd.Run, Weather, list[float | None]]:
    """Train in bad weather, a segment at a time; returns the last run and the audit after each segment."""
    weather, audits, done = Weather(seed), [], 0.0
    weather.slow_disk()
    if folder.exists():
        done = dd.resume(folder).time  # what an earlier soak has come to, finished or killed
    while done < minutes * 60:
        faults = dd.FaultPolicy(restarts=10**6, resend=0.5, deadline=DEADLINE)
        fleet = LossyRayFleet(faults=faults, weather=weather.delays)
        over = threading.Event()
        limit = min(done + SEGMENT, minutes * 60)
        thread = threading.Thread(target=weather.rage, args=(fleet, over, limit - done - QUIET), daemon=True)
        faulthandler.dump_traceback_later(SEGMENT + 240, exit=True)  # it hangs
        thread.start()
        try:
            if not folder.exists():
                method = dd.DuDe(lr=LR, memory="workers")
                problem, saving = dd.Digits(workers=WORKERS), dd.Saving(folder, every=2000)
                run = dd.train(method, problem, fleet, time=limit, folder=saving, evaluation=dd.Evaluation(seconds=5.0))
            else:
                run = dd.resume(folder, time=limit, fleet=fleet)
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
        weather.counts += fleet.control.counts
        audit = "none, a worker died at the end" if run.audit is None else f"{run.audit:.1e}"
        audits.append(run.audit)
        done, last = limit, dict(list(run.metrics.rows())[-1])
        print(
            f"{limit / 60:.1f} of {minutes:g} minutes: {run.version} updates, {weather.counts['kills']} kills, "
            f"audit {audit}, loss {last['objective']:.4f}, accuracy {last['accuracy']:.4f}",
            flush=True,
        )
    return run, weather, audits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run is kept, so that it can go on later")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    logging.getLogger("dualdelay").setLevel(logging.ERROR)  # it would tell of every crash
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "storm"
        run, weather, audits = storm(folder, options.minutes, options.seed)
        begin = time.perf_counter()
        again = dd.replay(folder)
        replayed = time.perf_counter() - begin
        problem = dd.Digits(workers=WORKERS)
        method = dd.DuDe(lr=LR, memory="workers")
        speeds = dd.TruncatedNormalSpeeds(WORKERS, std=0.5)
        calm = dd.simulate(
            method, problem, speeds, updates=run.version, evaluation=dd.Evaluation(every=max(1, run.version // 10))
        )
    counts = weather.counts
    happened = Counter(event["kind"] for event in run.trace.events)
    lines = [f"{'':28}{'storm':>12}{'calm':>12}"]

    def line(name: str, storm: object, calm: object = "") -> None:
        lines.append(f"{name:28}{storm:>12}{calm:>12}")

    line("minutes", f"{run.time / 60:.1f}")
    line("updates", run.version, calm.version)
    line("arrivals", len(run.trace), len(calm.trace))
    for name, kind in (
        ("processes killed", "kills"),
        ("processes frozen", "freezes"),
        ("server paused", "pauses"),
        ("slow syncs of a file", "slow syncs"),
    ):
        line(name, counts[kind])
    for name, kind in (
        ("crashes seen", "crashed"),
        ("memories restored", "restored"),
        ("left", "left"),
        ("joined", "joined"),
    ):
        line(name, happened[kind])
    for name in ("messages", "lost", "repeated", "late"):
        line("messages" if name == "messages" else f"messages {name}", counts[name])
    line("replies dropped", counts["dropped"])
    line("requests sent again", counts["sent again"])
    line("runs resumed", len(audits) - 1)
    made = [audit for audit in audits if audit is not None]
    line("audits", len(made))
    line("no audit: died at the end", len(audits) - len(made))
    line("worst audit", f"{max(made):.1e}", f"{calm.audit:.1e}")
    line("audit of the replay", f"{again.audit:.1e}")
    line("replay to the same bits, s", f"{replayed:.1f}")
    for name in ("objective", "accuracy"):
        line(f"final {name}", f"{run.metrics[name][-1]:.5f}", f"{calm.metrics[name][-1]:.5f}")
    line("tau max", run.delays.tau_max, calm.delays.tau_max)
    print("\n" + "\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
