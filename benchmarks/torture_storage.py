"""Attacks on what is written: kills and failing calls, at every call that touches a folder."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import dualdelay as dd
from torture_core import Attack, Failure, Tell, in_child, raw, where
from torture_disk import MODES, Disk, Fault
from torture_runs import Action, Promises, actions, promises, promising

ERRORS = tuple(
    getattr(errno, name) for name in ("ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE", "EDQUOT", "EINTR")
)  # what a disk, a quota or a network file system says


def disturbed(action: Action, place: Path, disk: Disk, tell: Tell) -> None:
    """Do it on this disk, and tell how it ended: by itself, by the package's own error, or by another."""
    with disk.installed(), promising(place, tell):
        try:
            action.act(place)
        except dd.DualDelayError as error:
            tell({"ended": "own", "text": str(error)})
        except BaseException as error:
            tell({"ended": "raw", "text": where(error), "cause": raw("", error).cause})
        else:
            tell({"ended": "well"})


def outcome(told: list[dict[str, Any]]) -> tuple[str, str]:
    """How it ended, and what was said; empty if it was killed. Another's exception is a failure."""
    for line in told:
        if "died" in line:
            raise AssertionError(line["died"])
        if line.get("ended") == "raw":
            raise Failure("raw traceback", line["text"], line["cause"])
        if "ended" in line:
            return line["ended"], line.get("text", "")
    return "", ""


class OnCalls(Attack):
    """An attack on the calls of all actions, each call in turn, in an order that the seed gives."""

    reads = False  # whether reading is attacked as well

    def prepare(self, place: Path, seed: int) -> None:
        """Count the calls of every action."""
        self._actions, self._targets = actions(place.parent / "actions"), []
        for name, action in self._actions.items():
            self._targets += [(name, *target) for target in self.targets(self._calls(action, place / "counted" / name))]
        random.Random(f"order {seed}").shuffle(self._targets)

    def _calls(self, action: Action, place: Path) -> list[str]:
        place.mkdir(parents=True)
        action.setup(place)
        told, _ = in_child(lambda tell: _counted(action, place, tell, reads=self.reads))
        if outcome(told)[0] != "well":
            raise AssertionError(f"undisturbed it ended with {told}")
        return next(line["calls"] for line in told if "calls" in line)

    @staticmethod
    def targets(calls: list[str]) -> list[tuple[int, str]]:
        """Which call is struck, and how; only a write can be half done."""
        return [(at, mode) for at, kind in enumerate(calls, 1) for mode in MODES if mode != "half" or kind == "write"]

    def target(self, number: int) -> tuple[Action, int, str]:
        """What a trial strikes."""
        name, at, mode = self._targets[number % len(self._targets)]
        return self._actions[name], at, mode


def _counted(action: Action, place: Path, tell: Tell, *, reads: bool) -> None:
    disk = Disk(place, Fault(0, reads=reads))
    disturbed(action, place, disk, tell)
    tell({"calls": disk.calls})


# --------------------------------------------------------------------------------------------------------------- kills


class Kills(OnCalls):
    """SIGKILL before, after or in the middle of a call; every third trial is killed again while it goes on."""

    name, weight = "kills", 3.0

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        action, at, mode = self.target(number)
        action.setup(place)
        safe = self._killed(action, place, Fault(at, mode), action.before)
        if number % 3 == 2:
            again = Fault(chance.randint(1, 2 * at), chance.choice(MODES))
            safe = self._killed(action, place, again, action.still(safe))
        action.require(place, safe)

    @staticmethod
    def _killed(action: Action, place: Path, fault: Fault, before: Promises) -> Promises:
        told, _ = in_child(lambda tell: disturbed(action, place, Disk(place, fault), tell))
        ended, text = outcome(told)
        if ended == "own":
            raise Failure("lost run", f"going on after a kill: {text}")
        return promises(told, before)


# --------------------------------------------------------------------------------------------------------------- fails


class Fails(OnCalls):
    """A call ends with an error, once or from then on for ever, or writes only a part; later the fault is gone."""

    name, weight, reads = "fails", 3.0, True

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        action, at, mode = self.target(number)
        number = chance.choice((*ERRORS, 0))
        for_ever = chance.random() < 0.4
        if number == errno.EINTR:  # by its meaning nothing was done, and the next try may do it
            mode, for_ever = "before", False
        fault = Fault(at, mode, number, for_ever, self.reads)
        action.setup(place)
        told, code = in_child(lambda tell: disturbed(action, place, Disk(place, fault), tell))
        ended, text = outcome(told)
        if not ended:
            raise Failure("raw traceback", f"its process ended with {code}")
        if fault.number == 0 and ended == "own":
            raise Failure("lost run", f"a short write ended it: {text}")
        action.require(place, promises(told, action.before))
