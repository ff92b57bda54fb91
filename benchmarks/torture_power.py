"""An attack on what is written: the power goes at any call, and only what was synced is sure to be there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torture_core import Attack
from torture_disk import Call, Disk
from torture_runs import Action, actions, promises, promising

WAYS = ("all", "synced", "some", "some")  # how much of what was not synced is there


@dataclass
class Node:
    """A file or a folder: what it is, and how much of that is sure to be on the disk."""

    folder: bool
    data: bytes = b""
    synced: bytes = b""
    changes: list[dict[str, Node | None]] = field(default_factory=list)  # of a folder's names; None: removed
    sure: int = 0  # how many of these were synced

    def names(self, count: int | None = None) -> dict[str, Node]:
        """What a folder has after so many changes, or all."""
        there: dict[str, Node | None] = {}
        for change in self.changes[:count]:
            there |= change
        return {name: node for name, node in there.items() if node is not None}


def read(path: Path) -> Node:
    """What is there, all of it synced."""
    if not path.is_dir():
        return Node(False, path.read_bytes(), path.read_bytes())
    node = Node(True, changes=[{child.name: read(child)} for child in path.iterdir()])
    node.sure = len(node.changes)
    return node


class Platter:
    """What a disk holds after some calls, and what may be left of it when the power goes.

    Of a file, what was written since its last sync may be there, in part, as zeros or not at all; of a folder, the first
    few of the changes to its names since its last sync, whatever is there of other folders.
    """

    def __init__(self, before: Path, root: str) -> None:
        """The disk holds ``before``, and the calls name paths under ``root``."""
        self._top, self._root, self._files = read(before), root, dict[str, Node]()

    def _at(self, path: str) -> tuple[Node, str]:
        """The folder that a path is in, and its name there; the top has none."""
        *above, name = Path(path).relative_to(self._root).parts or ("",)
        node = self._top
        for part in above:
            node = node.names()[part]
        return node, name

    def do(self, call: Call) -> None:
        """One more call."""
        kinds: dict[str, Callable[[Call], None]] = {
            "open": self._opened,
            "write": self._written,
            "truncate": self._truncated,
            "fsync": self._synced,
            "mkdir": lambda call: self._named(call.path, Node(True)),
            "unlink": lambda call: self._named(call.path, None),
            "rmdir": lambda call: self._named(call.path, None),
            "rename": self._renamed,
        }
        kinds.get(call.kind, lambda call: None)(call)

    def _named(self, path: str, node: Node | None) -> None:
        folder, name = self._at(path)
        folder.changes.append({name: node})

    def _opened(self, call: Call) -> None:
        folder, name = self._at(call.path)
        if name and name not in folder.names():
            self._named(call.path, Node(False))
        node = folder.names()[name] if name else folder
        node.data = b"" if call.more & os.O_TRUNC else node.data
        self._files[call.path] = node

    def _written(self, call: Call) -> None:
        node, (at, data) = self._files[call.path], call.more
        node.data = node.data[:at].ljust(at, b"\0") + data + node.data[at + len(data) :]

    def _truncated(self, call: Call) -> None:
        node = self._files[call.path]
        node.data = node.data[: call.more].ljust(call.more, b"\0")

    def _synced(self, call: Call) -> None:
        node = self._files[call.path]
        node.synced, node.sure = node.data, len(node.changes)

    def _renamed(self, call: Call) -> None:
        (source, old), (target, new) = self._at(call.path), self._at(call.more)
        assert source is target, "a rename from one folder to another is not in the model"
        node = source.names()[old]
        source.changes.append({old: None, new: node})

    def leave(self, place: Path, way: str, chance: random.Random) -> None:
        """Write down what may be there after the power has gone."""
        _leave(self._top, place, way, chance)


def _leave(node: Node, place: Path, way: str, chance: random.Random) -> None:
    if node.folder:
        place.mkdir(exist_ok=True)
        count = node.sure if way == "synced" else len(node.changes)
        count = chance.randint(node.sure, count) if way == "some" else count
        for name, child in node.names(count).items():
            _leave(child, place / name, way, chance)
    else:
        place.write_bytes(_torn(node, chance) if way == "some" else node.synced if way == "synced" else node.data)


def _torn(node: Node, chance: random.Random) -> bytes:
    """What may be there of a file; one that was synced whole is whole."""
    if node.data == node.synced:
        return node.data
    part = node.data[: chance.randint(0, len(node.data))]
    zeros = part.ljust(len(node.data), b"\0")
    return chance.choice([node.synced, node.data, part, zeros])


class Power(Attack):
    """Every moment of every action, with as much of what was not synced as chance leaves."""

    name, weight = "power", 2.0

    def prepare(self, place: Path, seed: int) -> None:
        """Record all calls of every action, and when it had promised what."""
        self._before, self._recorded, self._calls = place / "before", place / "recorded", dict[str, list[Call]]()
        self._actions = actions(place.parent / "actions")
        for name, action in self._actions.items():
            for folder in (self._before / name, self._recorded / name):
                folder.mkdir(parents=True)
                action.setup(folder)
            self._calls[name] = self._record(action, self._recorded / name)
        self._targets = [
            (name, count, way) for name, calls in self._calls.items() for count in range(len(calls) + 1) for way in WAYS
        ]
        random.Random(f"order {seed}").shuffle(self._targets)

    @staticmethod
    def _record(action: Action, place: Path) -> list[Call]:
        calls: list[Call] = []
        with Disk(place, record=calls).installed(), promising(place, lambda told: calls.append(Call("promise", "", told))):
            action.act(place)
        return [*calls, Call("promise", "", {"ended": "well"})]

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        name, count, way = self._targets[number % len(self._targets)]
        calls, action = self._calls[name][:count], self._actions[name]
        platter = Platter(self._before / name, str(self._recorded / name))
        for call in calls:
            platter.do(call)
        platter.leave(place, way, chance)
        safe = promises([call.more for call in calls if call.kind == "promise"], action.before)
        action.require(place, safe, "notes", "result.json")  # which may say that something torn was passed over
