"""The frame of the torture bench: named trials, each in a process that may die, counted by what went wrong.

A trial has a name (attack, seed, number), from which all of its random choices are drawn, so that it can be repeated alone.
Trials run in batches. A batch is a forked process that tells through a pipe how each of its trials has ended; if it dies or
hangs, the trial that it was in is the one that failed, and a new process goes on behind it.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import dualdelay as dd

KINDS = ("lost run", "wrong bit", "silent damage", "raw traceback", "hang", "leftovers", "joined")
_PATIENCE = 10.0  # seconds after a trial's own limit until its process is killed


class Failure(Exception):
    """A promise was not kept."""

    def __init__(self, kind: str, text: str, cause: str = "") -> None:
        """``kind`` is one of KINDS; failures with one ``cause`` are alike, by default where texts differ in numbers."""
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.cause = kind, text, cause


class Hang(BaseException):
    """A trial took longer than its limit."""


class Attack(ABC):
    """A way to do harm, with trials that are named by numbers."""

    name: str
    weight = 1.0  # its share of the time
    batch = 10  # trials in one process
    limit = 30.0  # seconds that a trial may take
    memory: int | None = None  # bytes that a batch may take beyond what the process has

    def prepare(self, place: Path, seed: int) -> None:
        """Make what all trials need, once, in a folder that stays."""
        return

    @abstractmethod
    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        """Do harm in an empty folder; raises Failure unless every promise was kept."""


# ------------------------------------------------------------------------------------------------------------- outcomes


def where(error: BaseException) -> str:
    """An exception in one line, with the last place in the package that it came through."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]} at {_place(error)}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "dualdelay" in Path(frame.filename).parts] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} ({ours[-1].name})" if ours else "no place"


def raw(what: str, error: BaseException) -> Failure:
    """The failure that an exception is which is not the package's own."""
    kind = "OSError" if isinstance(error, OSError) else type(error).__name__
    return Failure("raw traceback", f"{what}: {where(error)}", f"{kind} at {_place(error)}")


def attempt(what: str, call: Callable[[], Any]) -> Any:
    """What a call gives, or the package's own error that it ends with; any other exception is a failure."""
    try:
        return call()
    except dd.DualDelayError as error:
        return error
    except (Failure, Hang):
        raise
    except BaseException as error:
        raise raw(what, error) from error


def must(kind: str, what: str, call: Callable[[], Any]) -> Any:
    """What a call gives that has to work."""
    made = attempt(what, call)
    if isinstance(made, dd.DualDelayError):
        raise Failure(kind, f"{what} was refused: {(str(made).splitlines() or [''])[0]}") from made
    return made


# ------------------------------------------------------------------------------------------------------------ processes


def fork() -> int:
    """Fork; newer Pythons warn of threads, of which those here are idle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fork()


Tell = Callable[[dict[str, Any]], None]


def in_child(work: Callable[[Tell], None]) -> tuple[list[dict[str, Any]], int]:
    """Run something in a forked process; returns what it told, even if it was killed, and how the process ended."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(reader)
        _end_with(0 if _told(work, writer) else 70)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            lines = pipe.read().splitlines()
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    return [json.loads(line) for line in lines], os.waitstatus_to_exitcode(status)


def _told(work: Callable[[Tell], None], writer: int) -> bool:
    write = os.write  # the real one, whatever is put in its place later

    def tell(what: dict[str, Any]) -> None:
        write(writer, json.dumps(what).encode() + b"\n")

    try:
        work(tell)
    except BaseException as error:
        tell({"died": where(error)})
        return False
    return True


def _end_with(code: int) -> NoReturn:
    os._exit(code)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang if this lasts longer."""

    def ring(*_: object) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class NoRay:
    """Stands where Python looks for modules: Ray is not found, and it is known whether somebody asked for it."""

    def __init__(self) -> None:
        """Nobody has asked."""
        self.asked = False

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse Ray."""
        if name.partition(".")[0] == "ray":
            self.asked = True
            raise ImportError("there is no Ray here")


def _no_network(*_: object, **__: object) -> NoReturn:
    raise OSError("there is no network here")


@contextmanager
def alone() -> Iterator[NoRay]:
    """While this lasts there is neither Ray nor a network, and no program can be started."""
    finder = NoRay()
    there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "ray"}
    with (
        mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]),
        mock.patch.object(socket.socket, "connect", _no_network),
        mock.patch.object(socket.socket, "bind", _no_network),
        mock.patch.object(subprocess, "Popen", _no_network),
    ):
        try:
            yield finder
        finally:
            sys.modules.update(there)


# --------------------------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Found:
    """A failed trial."""

    attack: str
    number: int
    kind: str
    text: str
    cause: str = ""


def run_trial(attack: Attack, seed: int, number: int, place: Path, *, loud: bool = False) -> Found | None:
    """One trial, in this process."""
    chance = random.Random(f"{attack.name} {seed} {number}")
    here = Path(tempfile.mkdtemp(dir=place, prefix=f"{attack.name}-{number}-"))
    try:
        with alarm(attack.limit):
            attack.trial(number, chance, here)
    except BaseException as error:
        if loud:
            traceback.print_exc()
        failure = _failed(error)
        text = failure.text.replace(str(here), "PLACE")
        return Found(attack.name, number, failure.kind, text, failure.cause or re.sub(r"[0-9a-f]{8,}|\d+", "N", text)[:80])
    finally:
        shutil.rmtree(here, ignore_errors=True)
    return None


def _failed(error: BaseException) -> Failure:
    """The failure that an exception stands for."""
    if isinstance(error, Failure):
        return error
    return Failure("hang", where(error), "hang") if isinstance(error, Hang) else raw("the trial itself", error)


class Batch:
    """A forked process with some trials of an attack."""

    def __init__(self, attack: Attack, seed: int, numbers: Sequence[int], place: Path, *, loud: bool) -> None:
        self.attack, self.numbers, self.begun = attack, list(numbers), time.monotonic()
        self._since, self._text, self.ended = self.begun, b"", False
        self.reader, writer = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.close(self.reader)
            if not loud:
                _hush()
            if attack.memory is not None:
                _limit_memory(attack.memory)
            _end_with(0 if _told(lambda tell: _trials(attack, seed, numbers, place, tell, loud=loud), writer) else 70)
        os.close(writer)

    def read(self) -> list[Found | None]:
        """The outcomes that have come in since the last time."""
        data = os.read(self.reader, 1 << 16)
        self._since = time.monotonic()
        if not data:
            return self._over()
        *lines, self._text = (self._text + data).split(b"\n")
        outcomes: list[Found | None] = []
        for line in map(json.loads, lines):
            if "died" in line:
                continue  # the pipe is about to end
            number = self.numbers.pop(0)
            outcomes.append(Found(self.attack.name, number, *line["failed"]) if line["failed"] else None)
        return outcomes

    def _over(self) -> list[Found | None]:
        """The process has ended; if it had trials left, the next of them ended it."""
        self.ended = True
        os.close(self.reader)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not self.numbers:
            return []
        number = self.numbers.pop(0)
        return [Found(self.attack.name, number, "raw traceback", f"its process ended with {code}")]

    @property
    def hangs(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._since > self.attack.limit + _PATIENCE

    def kill(self) -> list[Found | None]:
        """End the process and all that it has started; the trial it was in hangs."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.reader)
        self.ended = True
        if not self.numbers:
            return []
        return [Found(self.attack.name, self.numbers.pop(0), "hang", f"no word in {self.attack.limit + _PATIENCE:g} s")]


def _trials(attack: Attack, seed: int, numbers: Sequence[int], place: Path, tell: Tell, *, loud: bool) -> None:
    for number in numbers:
        found = run_trial(attack, seed, number, place, loud=loud)
        tell({"failed": None if found is None else [found.kind, found.text, found.cause]})


def _hush() -> None:
    """What the package logs and warns of while it is tortured is not for the terminal."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    warnings.simplefilter("ignore")


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


# ------------------------------------------------------------------------------------------------------------- the pool


@dataclass
class Tally:
    """How many trials there were, and which failed."""

    trials: Counter[str] = field(default_factory=Counter)
    failures: list[Found] = field(default_factory=list)

    def count(self, attack: str, kind: str) -> int:
        """The failures of one kind."""
        return sum(found.attack == attack and found.kind == kind for found in self.failures)


@dataclass
class Plan:
    """What an attack still has to do."""

    attack: Attack
    numbers: Iterator[int]
    spent: float = 0.0
    again: list[int] = field(default_factory=list)  # behind a trial that took its process with it

    def next(self) -> list[int]:
        """The next trials, for one process."""
        some, self.again = self.again[: self.attack.batch], self.again[self.attack.batch :]
        while len(some) < self.attack.batch and (number := next(self.numbers, None)) is not None:
            some.append(number)
        return some


class Pool:
    """Several processes at a time; the attack that has had least of its share of the time goes next."""

    def __init__(self, plans: Sequence[Plan], seed: int, place: Path, jobs: int = 1, *, loud: bool = False) -> None:
        self._plans, self._seed, self._place, self._jobs, self._loud = list(plans), seed, place, jobs, loud
        self._running: dict[int, tuple[Plan, Batch]] = {}
        self.tally = Tally()

    def run(self, seconds: float | None = None, report: Callable[[Tally], None] = lambda tally: None) -> Tally:
        """Go on until all trials are done, or no new ones begin after so many seconds."""
        until, told = time.monotonic() + (float("inf") if seconds is None else seconds), time.monotonic()
        try:
            while True:
                while len(self._running) < self._jobs and time.monotonic() < until and self._start():
                    pass
                if not self._running:
                    return self.tally
                self._wait()
                if time.monotonic() - told > 5.0:
                    told = time.monotonic()
                    report(self.tally)
        finally:
            for _, batch in self._running.values():
                batch.kill()

    def _start(self) -> bool:
        for plan in sorted(self._plans, key=lambda plan: plan.spent / plan.attack.weight):
            numbers = plan.next()
            if numbers:
                batch = Batch(plan.attack, self._seed, numbers, self._place, loud=self._loud)
                self._running[batch.reader] = plan, batch
                return True
        return False

    def _wait(self) -> None:
        readable, _, _ = select.select(list(self._running), [], [], 1.0)
        for reader, (plan, batch) in list(self._running.items()):
            if reader in readable:
                self._count(plan, batch.read())
            elif batch.hangs:
                self._count(plan, batch.kill())
            if batch.ended:
                del self._running[reader]
                plan.spent += time.monotonic() - batch.begun
                plan.again += batch.numbers

    def _count(self, plan: Plan, outcomes: Sequence[Found | None]) -> None:
        self.tally.trials[plan.attack.name] += len(outcomes)
        self.tally.failures += [found for found in outcomes if found is not None]


# ------------------------------------------------------------------------------------------------------------ the table


def table(tally: Tally, names: Sequence[str], seed: int, *, every: bool = False) -> str:
    """How often each attack did what harm, and how each kind of failure is repeated."""
    rows = [["attack", "trials", *KINDS]]
    rows += [[name, str(tally.trials[name]), *(str(tally.count(name, kind)) for kind in KINDS)] for name in names]
    every_kind = [str(sum(tally.count(name, kind) for name in names)) for kind in KINDS]
    rows += [["all", str(sum(tally.trials.values())), *every_kind]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    groups: dict[tuple[str, ...], list[Found]] = {}
    for found in sorted(tally.failures, key=lambda found: (found.attack, found.kind, found.number)):
        groups.setdefault((found.attack, str(found.number) if every else f"{found.kind} {found.cause}"), []).append(found)
    for some in groups.values():
        first, more = some[0], f" ({len(some)} like it)" if len(some) > 1 else ""
        lines.append(f"{first.kind}{more}: {first.text} | --only {first.attack} --trial {first.number} --seed {seed}")
    return "\n".join(lines)
