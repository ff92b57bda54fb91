"""Attacks on what lies in a folder: files that are damaged, exchanged, lost or changed with care."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import dualdelay as dd
from dualdelay.storage.files import write_json
from torture_core import Attack, Failure, alone, attempt
from torture_messages import local
from torture_runs import CASES, Case, Cut, Straight, bits, differences, resumed

# -------------------------------------------------------------------------------------------------------- kinds of damage

Spoil = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, chance: random.Random) -> bytes:
    at, bad = chance.randrange(len(data)), bytearray(data)
    bad[at] ^= 1 << chance.randrange(8)
    return bytes(bad)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def extend(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice([chance.randbytes(chance.randint(1, 99)), data[: chance.randint(1, len(data))]])


def zero(data: bytes, chance: random.Random) -> bytes:
    first, size = chance.randrange(len(data)), chance.choice([16, 512, 4096])
    return data[:first] + bytes(min(size, len(data) - first)) + data[first + size :]


def shuffled(data: bytes, chance: random.Random) -> bytes:
    first, second = sorted(chance.randrange(len(data)) for _ in range(2))
    return data[second:] + data[first:second] + data[:first]


BYTES: dict[str, Spoil] = {"flip": flip, "cut": cut, "extend": extend, "zero": zero, "shuffle": shuffled}


def reworded(path: Path, chance: random.Random) -> None:
    """Change a table, a set of tensors or plain values with care: the file is a good one that says something else."""
    if path.suffix == ".parquet":
        path.write_bytes(_other_table(path, chance))
    elif path.suffix == ".safetensors":
        path.write_bytes(_other_tensors(path.read_bytes(), chance))
    elif path.suffix == ".json":
        path.write_text(json.dumps(other_values(json.loads(path.read_text()), chance), indent=1))
    else:
        path.write_text("all is well")


def _other_table(path: Path, chance: random.Random) -> bytes:
    table = pq.read_table(path)
    name = chance.choice(table.column_names) if table.column_names else ""
    ways: list[Callable[[], pa.Table]] = [
        lambda: table.rename_columns([f"{one}x" if one == name else one for one in table.column_names]),
        lambda: table.drop_columns([name]),
        lambda: table.slice(0, chance.randrange(max(1, len(table)))),
        lambda: pa.concat_tables([table, table.slice(0, 1)]),
        lambda: table.take(list(reversed(range(len(table))))),
        lambda: _other_number(table, name, chance),
        lambda: table.set_column(table.column_names.index(name), name, pa.array(["x"] * len(table))),
        lambda: table.replace_schema_metadata({"dualdelay": json.dumps({"events": [{"kind": "left"}]})}),
        lambda: table.replace_schema_metadata({"dualdelay": "{"}),
        lambda: table.replace_schema_metadata(None),
    ]
    sink = io.BytesIO()
    pq.write_table(chance.choice(ways)() if name else table, sink, write_page_checksum=True)
    return sink.getvalue()


def _other_number(table: pa.Table, name: str, chance: random.Random) -> pa.Table:
    values = table[name].to_numpy().copy()
    if len(values) and values.dtype.kind in "if":
        values[chance.randrange(len(values))] += 1
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def _other_tensors(data: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + length]).get("__metadata__")
    tensors = load_tensors(data)
    name = chance.choice(sorted(tensors))
    x = tensors[name]
    other = {
        "moved": {**tensors, name: x + 1},
        "smaller": {**tensors, name: x.reshape(-1)[:-1].clone()},
        "double": {**tensors, name: x.to(torch.float64) if x.dtype != torch.float64 else x.float()},
        "renamed": {(f"{one}x" if one == name else one): value for one, value in tensors.items()},
        "without": {one: value for one, value in tensors.items() if one != name},
        "not finite": {**tensors, name: torch.full_like(x, 200) if not x.is_floating_point() else x * torch.nan},
    }
    return save_tensors(chance.choice(list(other.values())), about)


def other_values(values: Any, chance: random.Random) -> Any:
    """Plain values with one of them changed, wherever it stands."""
    if isinstance(values, dict) and values:
        key = chance.choice(sorted(values))
        if chance.random() < 0.1:
            return {name: value for name, value in values.items() if name != key}
        return {**values, key: other_values(values[key], chance)}
    if isinstance(values, list) and values:
        k = chance.randrange(len(values))
        return [*values[:k], other_values(values[k], chance), *values[k + 1 :]]
    if isinstance(values, bool) or values is None:
        return chance.choice([True, False, 7])
    if isinstance(values, (int, float)):
        return chance.choice([values + 1, -values - 1, values * 2 + 1])
    return chance.choice(["", "other", 3, None])


# ----------------------------------------------------------------------------------------------------------------- damage

CALLS: dict[str, Callable[[Path], dd.Run]] = {
    "load": lambda folder: dd.load(folder),
    "replay": lambda folder: dd.replay(folder, watch=dd.Reporting(progress=False)),
    "resume": resumed,
}


@dataclass
class Whole:
    """A folder before it is damaged: what every call makes of it, and the run that nobody disturbed."""

    folder: Path
    straight: Straight
    expected: dict[str, dict[str, Any] | None]  # None: it is refused
    notes: dict[str, tuple[str, ...]]
    but: tuple[str, ...] = ()  # what may differ where a note says that the run went on from an earlier state

    @classmethod
    def of(cls, folder: Path, straight: Straight, aside: Path, *but: str) -> Whole:
        """Try all calls."""
        whole = cls(folder, straight, {}, {}, but)
        for name, call in CALLS.items():
            shutil.copytree(folder, aside / "run")
            made = attempt(name, lambda call=call: call(aside / "run"))
            whole.expected[name] = bits(made, files=False) if isinstance(made, dd.Run) else None
            whole.notes[name] = made.notes if isinstance(made, dd.Run) else ()
            shutil.rmtree(aside / "run")
        assert whole.expected["load"] is not None and whole.expected["resume"] is not None
        return whole


def wholes(place: Path) -> dict[str, Whole]:
    """Folders of all kinds: finished and not, failed, of a run that went on elsewhere, of one computed beside others."""
    made: dict[str, Whole] = {}
    (place / "aside").mkdir()

    def add(name: str, folder: Path, straight: Straight, *but: str) -> None:
        made[name] = Whole.of(folder, straight, place / "aside", *but)

    straights = {name: Straight.of(case, place / name) for name, case in CASES.items()}
    for name, straight in straights.items():
        add(f"finished {name}", place / name, straight)
    for name, version in (("plain", 7), ("memory", 8), ("stop", 5)):
        CASES[name].until(place / f"{name} cut", version)
        add(f"cut {name}", place / f"{name} cut", straights[name])
    _fail(CASES["plain"], place / "failed", 9)
    add("failed", place / "failed", straights["plain"])
    CASES["plain"].until(place / "moved", 7)
    with mock.patch("dualdelay.runs.resume.environment", lambda: {**_environment(), "processor": "another"}):
        elsewhere = resumed(place / "moved")
    moved = Straight(bits(elsewhere), elsewhere, straights["plain"].models, straights["plain"].rows)
    add("moved", place / "moved", moved, "events", "summary")  # gone on from before it moved, it moves again
    return made


def _environment() -> dict[str, str]:
    from dualdelay.core.environment import environment

    return environment()


def _fail(case: Case, folder: Path, version: int) -> None:
    """A run that ends at this version with an exception of its user."""

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version >= version:
            raise ValueError("the user's own")

    try:
        case.start(folder, watch=[watch])
    except ValueError:
        return
    raise AssertionError("it did not fail")


class Damage(Attack):
    """One file of a folder is damaged, exchanged or lost; then it is loaded, replayed and resumed."""

    name, weight = "damage", 3.0

    def prepare(self, place: Path, seed: int) -> None:
        self._wholes = wholes(place)
        self._other = place / "another"
        CASES["plain"].start(self._other, seed=3)

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        name = chance.choice(sorted(self._wholes))
        whole, folder = self._wholes[name], place / "run"
        shutil.copytree(whole.folder, folder)
        harms = [self._harm(folder, chance) for _ in range(chance.choice([1, 1, 1, 2]))]
        did, lost = " and ".join(did for did, _ in harms), any(lost for _, lost in harms)
        try:
            for call in CALLS:
                require(whole, call, folder, f"{name}: {did}, then {call}", lost=lost)
        except Failure as failure:
            if failure.kind == "silent damage":  # alike if the same file was damaged and the same call did not notice
                failure.cause = f"{re.sub(r'[0-9].*?safetensors|[0-9].*?parquet', 'N', did.partition(' ')[2])} {call}"
            raise

    def _harm(self, folder: Path, chance: random.Random) -> tuple[str, bool]:
        """Do one kind of harm; returns what it was, and whether a file is simply not there any more."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        path = chance.choice(files)
        name, kind = (
            path.relative_to(folder),
            chance.choice([*BYTES, *BYTES, "reword", "reword", "lose", "swap", "another"]),
        )
        if kind == "reword":
            with contextlib.suppress(
                OSError, ValueError, pa.ArrowException, SafetensorError, LookupError
            ):  # damaged before
                reworded(path, chance)
        elif kind == "lose":
            path.unlink()
        elif kind == "swap":
            other = chance.choice(files)
            one, two = path.read_bytes(), other.read_bytes()
            path.write_bytes(two)
            other.write_bytes(one)
            return f"swap {name} and {other.relative_to(folder)}", False
        elif kind == "another":
            return self._anothers(path, folder, chance), False
        else:
            path.write_bytes(BYTES[kind](path.read_bytes(), chance))
        return f"{kind} {name}", kind == "lose"

    def _anothers(self, path: Path, folder: Path, chance: random.Random) -> str:
        """Put another run's file in a file's place, a checkpoint under its own name."""
        name = path.relative_to(folder)
        others = sorted((self._other / name.parent).glob(f"*{path.suffix}"))
        same = [other for other in others if other.name == path.name]
        other = (same or [chance.choice(others or [self._other / "config.json"])])[0]
        if path.parent.name == "checkpoints" and chance.random() < 0.5:
            path.unlink()
            path = path.with_name(other.name)
        path.write_bytes(other.read_bytes())
        return f"another run's {name}"


def require(whole: Whole, call: str, folder: Path, said: str, *, lost: bool = False) -> None:
    """The right values, perhaps with a note on what was passed over, or the package's own error."""
    made = attempt(said, lambda: CALLS[call](folder))
    if isinstance(made, dd.DualDelayError):
        return
    content = attempt(said, lambda: bits(made, files=False))
    expected, noted = whole.expected[call], set(made.notes) - set(whole.notes[call])
    lacking = set(whole.notes[call]) - set(made.notes)
    if expected is not None and not differences(content, expected, "notes"):
        if lacking and not (lost or noted):
            raise Failure("silent damage", f"{said}: without the note {min(lacking)!r}")
    elif call == "resume":  # from an earlier state it comes to the same end
        other = differences(content, expected or {}, "notes", *(whole.but if noted else ()))
        if other:
            raise Failure("silent damage", f"{said}: another {', '.join(other[:3])}")
    elif call == "load" and (lost or noted):  # an earlier state, of which a note says so unless a file is not there
        whole.straight.require_on_the_way(made, -1, "silent damage", f"{said}: ")
    elif expected is None:
        raise Failure("silent damage", f"{said}: it is accepted")
    else:
        raise Failure("silent damage", f"{said}: wrong {', '.join(differences(content, expected, 'notes')[:3])}")


# ----------------------------------------------------------------------------------------------------------------- config

_ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**9,
    10**30,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    "\0",
    [],
    {},
    [[]],
    ["x"],
    {"a": 1},
]
_ODD += [
    {"name": "dude"},
    {"name": "ray"},
    {"class": "Mine"},
    [0, 1, 2],
    "cuda",
    "float64",
    [["x", 0, [2]]],
    [["x", -9, [10**9]]],
]
_NETWORK: list[dict[str, Any]] = [
    {"address": "10.1.2.3:6379", "insecure": True},
    {"address": "auto"},
    {"address": "ray://localhost:10001"},
    {"address": "127.0.0.1:6379"},
    {"host": "0.0.0.0"},
    {"host": "::", "insecure": True},
    {"address": "local", "host": "192.168.0.1"},
]


class Config(Attack):
    """A configuration that somebody made, with a digest that is right: refused or used, and nobody is called for it."""

    name, weight, limit, memory = "config", 2.0, 20.0, 4 << 30

    def prepare(self, place: Path, seed: int) -> None:
        CASES["plain"].start(place / "finished")
        CASES["plain"].until(place / "cut", 7)
        with local() as fleet:
            self._real(fleet, place / "real")
            with contextlib.suppress(Cut):
                self._real(fleet, place / "real cut", [stop_after(9)])
        self._places = [place / name for name in ("finished", "cut", "real", "real cut")]

    @staticmethod
    def _real(fleet: dd.RayFleet, folder: Path, more: Sequence[Any] = ()) -> None:
        problem, options = CASES["plain"].problem, {"updates": 10, "checkpoint_every": 2}
        dd.train(
            dd.DuDe(lr=0.05, memory="workers"),
            problem,
            fleet,
            folder=folder,
            watch=dd.Reporting(more, progress=False),
            **options,
        )

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        base, folder = chance.choice(self._places), place / "run"
        shutil.copytree(base, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["digest"]
        network = config["fleet"] is not None and chance.random() < 0.3
        if network:
            did, settings = "fleet with", chance.choice(_NETWORK)
            config["fleet"] |= settings
            did += f" {settings}"
        else:
            did, config = crafted(config, chance)
        write_json(folder / "config.json", config)
        for name, call in BOUNDED.items():
            with alone() as ray:
                attempt(f"{base.name}: {did}, then {name}", lambda call=call: call(folder))
            if ray.asked and (network or name != "resume"):
                raise Failure("joined", f"{base.name}: {did}, then {name}", f"{'network' if network else 'any'} {name}")


def stop_after(arrivals: int) -> Callable[[dd.State, dd.Arrival], None]:
    """A watch function that cuts a run off."""
    left = iter(range(arrivals))

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if next(left, None) is None:
            raise Cut

    return watch


def _for_a_while(call: Callable[..., dd.Run], folder: Path) -> None:
    with contextlib.suppress(Cut):  # the configuration may ask for any number of updates
        call(folder, watch=dd.Reporting([stop_after(60)], progress=False))


BOUNDED: dict[str, Callable[[Path], Any]] = {
    "load": lambda folder: bits(dd.load(folder), files=False),
    "replay": lambda folder: _for_a_while(dd.replay, folder),
    "resume": lambda folder: _for_a_while(partial(dd.resume, cores=1), folder),
}


def crafted(config: dict[str, Any], chance: random.Random) -> tuple[str, dict[str, Any]]:
    """The configuration with something else in it, and what that is."""
    other, at = json.loads(json.dumps(config)), []
    parent: Any = other
    while True:
        keys = sorted(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = chance.choice(keys)
        at.append(str(key))
        if isinstance(parent[key], (dict, list)) and parent[key] and chance.random() < 0.7:
            parent = parent[key]
            continue
        break
    way, odd = chance.randrange(4), chance.choice(_ODD)
    if way == 0:
        del parent[key]
        return f"without {'.'.join(at)}", other
    if way == 1:
        name = chance.choice(
            ["dualdelay", "format", "fleet", "together", "device", "batch", "precision", "room", "nothing"]
        )
        other[name] = odd
        return f"{name} = {odd!r}", other
    parent[key] = odd
    return f"{'.'.join(at)} = {odd!r}", other
