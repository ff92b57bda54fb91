"""Attacks on what a person writes: names with settings, command lines, and files of numbers."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from dataclasses import fields
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

import dualdelay as dd
from dualdelay.cli import flags, shell
from dualdelay.runs.names import REGISTRIES, alternatives, label, parameters, parse
from torture_core import Attack, Failure, alone, attempt, raw
from torture_damage import BYTES
from torture_runs import CASES

# --------------------------------------------------------------------------------------------------------------- grammar

_NUMBERS = ["0", "1", "-1", "3", "0.05", "1e-3", "1e308", "1e999", "-0.0", "nan", "inf", "-inf", "infinity", "10**9"]
_NUMBERS += [
    "2147483648",
    "9" * 30,
    "9" * 5000,
    "1_0",
    "0x10",
    "1j",
    "00",
    "1.",
    ".5",
    "1e",
    "True",
    "true",
    "none",
    "None",
]
_TEXTS = ["workers", "server", "busy", "int8", "leave", "label", "x.csv", "..", "/", "...", "''", '"x"', "'", '"', "f'{1}'"]
_NOISE = [*"[](){},=|:;'\"\\#\n\t\0 *+-/<>", "é", "٣", "\u202e", "\ud800", "\U0001d7d9", "½", "İ", "\x7f", "[[", "]]", "=="]


class Grammar(Attack):
    """Texts for ``parse`` from a grammar, some of them spoilt: an object or BadInput, quickly and in little memory."""

    name, weight, batch, limit, memory = "grammar", 1.5, 500, 10.0, 2 << 30

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        kind = chance.choice(sorted(REGISTRIES))
        text = thing(kind, chance, 0)
        text = spoilt(text, chance) if chance.random() < 0.5 else text
        shown = f"parse({kind!r}, {text[:120]!r})"
        with alone():
            made = attempt(shown, lambda: parse(kind, text))
        if isinstance(made, dd.DualDelayError) and not isinstance(made, dd.BadInput):
            raise raw(shown, made)
        if not isinstance(made, dd.DualDelayError):
            attempt(f"label of {shown}", lambda: label(made))
        attempt(f"alternatives({text[:120]!r})", lambda: alternatives(text[:200]) if text.count("|") < 6 else None)


def thing(kind: str, chance: random.Random, depth: int) -> str:
    """A name with settings."""
    registry = REGISTRIES[kind]
    name = chance.choice(sorted(registry))
    known = sorted(parameters(registry[name]))
    keys = chance.sample(known, chance.randint(0, len(known))) if chance.random() < 0.9 else ["nothing"]
    return f"{name}[{','.join(f'{key}={value(chance, depth + 1)}' for key in keys)}]"


def value(chance: random.Random, depth: int) -> str:
    """What may stand behind an equals sign."""
    way = chance.randrange(10)
    if way < 5:
        return chance.choice(_NUMBERS)
    if way < 7:
        return chance.choice(_TEXTS)
    if way == 7 and depth < 4:
        return thing(chance.choice(sorted(REGISTRIES)), chance, depth)
    if way == 8:
        return "|".join(value(chance, depth + 1) for _ in range(chance.randint(1, 3))) if depth < 4 else "1|2"
    inner = [value(chance, depth + 1) for _ in range(chance.randint(0, 4))] if depth < 4 else ["1"]
    return chance.choice(["[{}]", "({})", "{{{}}}"]).format(",".join(inner))


def spoilt(text: str, chance: random.Random) -> str:
    """The text with a few changes of no sense."""
    for _ in range(chance.randint(1, 4)):
        at, noise = chance.randint(0, len(text)), chance.choice(_NOISE)
        text = chance.choice(
            [
                text[:at] + noise + text[at:],
                text[:at] + text[at + 1 :],
                text[:at] + noise * chance.choice([2, 300, 5000]) + text[at:],
                text[:at] + text[max(0, at - 9) : at] + text[at:],
                text[:at],
            ]
        )
    return text


# ----------------------------------------------------------------------------------------------------------------- flags

_COUNTS = ["0", "1", "3", "3", "3", "-1", "x", "1e9", "2.5", "", "nan", "99999999999999999999"]
_TIMES = ["0", "2", "2", "2.5", "-1", "nan", "inf", "1e400", "x", ""]
_QUADRATIC = "quadratic[centers=[[0.0],[6.0],[12.0]],noise=0.1]"
_PLACES = ["finished", "cut", "nowhere", "letter.txt", "new/deep", "", ".", "/dev/null/x", "a" * 300, "é", "-x", "~", "new"]
_METHODS = [
    "dude[lr=0.05]",
    "vanilla[lr=0.05]",
    "sync[lr=0.1]",
    "dude",
    "dude[lr=0.01|0.05]",
    "fedbuff[lr=1,buffer=2]",
    "x",
]
_SMALL = ["--problem", _QUADRATIC, "--speeds", "fixed[times=[1,2,4]]"]
_VALUES: dict[str, list[str]] = {
    "problem": [_QUADRATIC, _QUADRATIC, "quadratic[centers=[[0.0]]]", "digits[workers=2,hidden=2]", "cifar10", "nope"],
    "speeds": [
        "fixed[times=[1,2,4]]",
        "truncated_normal[std=1|5]",
        "fixed",
        "recorded[times=x.csv]",
        "recorded[times=cut]",
    ],
    "optimizer": ["Adam", "SGD[momentum=0.9]", "Adam[betas=(0.9,0.99)]", "Adam[lr=1]", "Nope", "__class__", "LBFGS"],
    "schedule": ["StepLR[step_size=2]", "StepLR", "Nope", "LRScheduler", "LambdaLR", "CosineAnnealingLR[T_max=0]"],
    "fleet": ["simulated", "ray", "ray[threads=0]", "ray[address=1.2.3.4:5]", "simulated[x=1]", "nope", "ray[faults=1]"],
    "updates": _COUNTS[:-1],  # with the last it would not end in our time
    "keep_best": ["objective", "max accuracy", "min", "nope", ""],
    "metric": ["objective", "accuracy", "nope"],
    "on_nonfinite": ["retry", "leave", "stop", "nope"],
    "precision": ["float32", "tf32", "bfloat16", "nope"],
    "device": ["cpu", "cuda", "nope", ""],
    "table": ["full", "half", "host", "nope"],
    "cores": ["1", "0", "x"],
    "threads": ["1", "2", "0", "x"],
}
_OTHERS: dict[str, list[list[str]]] = {
    "advise": [_SMALL, ["--run", "PLACE"], ["--problem", "nope"], [*_SMALL, "--time", "nan"]],
    "paper": [["figure1"], ["figure1", "--updates", "x"], [], ["figure9"], ["figure1", "--methods", "nope"]],
    "data": [[], ["cifar10", "--source", "PLACE"], ["mnist"], ["cifar10", "--folder", "letter.txt"]],
    "list": [["algorithms"], ["dude"], ["nope"], [""], ["all"], ["fleets"], ["\0"]],
    "x": [[], ["y"]],
}
_COUNTED = ("checkpoint_every", "keep", "evaluate_every", "evaluate_samples", "patience", "seed", "seeds")


class Flags(Attack):
    """Random command lines, in a folder with a finished run and one that was cut off: a code of ours, no traceback."""

    name, weight, limit, memory = "flags", 2.0, 60.0, 4 << 30

    def prepare(self, place: Path, seed: int) -> None:
        self._base = place / "base"
        self._base.mkdir()
        CASES["plain"].start(self._base / "finished")
        CASES["plain"].until(self._base / "cut", 7)
        (self._base / "letter.txt").write_text("dear")
        (self._base / "x.csv").write_text("worker,seconds\n0,1\n1,2\n2,3\n")

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        shutil.copytree(self._base, place, dirs_exist_ok=True)
        words = command(chance)
        shown, said = f"dualdelay {' '.join(map(repr, words))}"[:400], io.StringIO()
        code = attempt(shown, lambda: self._called(words, place, said, draws=chance.random() < 0.05))
        if code not in (0, 1, 2, 130, None):
            raise Failure("raw traceback", f"{shown} ends with {code!r}")
        if "Traceback" in said.getvalue():
            raise Failure("raw traceback", f"{shown} says {said.getvalue().strip().splitlines()[-1]}")

    @staticmethod
    def _called(words: list[str], place: Path, said: io.StringIO, *, draws: bool) -> Any:
        """The code that a command ends with; mostly as if nothing could be drawn, since that takes long."""
        before = Path.cwd()
        os.chdir(place)
        undrawn = contextlib.nullcontext() if draws else mock.patch("dualdelay.cli.commands.draw", _no_figure)
        quiet = contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO())
        data = mock.patch.dict(os.environ, {"DUALDELAY_DATA": str(place / "data")})
        try:
            with alone(), undrawn, data, quiet[0], quiet[1]:
                shell.main(words)
        except SystemExit as end:
            return end.code
        finally:
            os.chdir(before)
        return 0


def _no_figure(*_: Any) -> None:
    raise dd.BadInput("nothing is drawn here")


def command(chance: random.Random) -> list[str]:
    """A command line; most are near one that works."""
    verb = chance.choice(["train", "train", "train", "compare", "compare", "resume", "replay", *_OTHERS])
    words = [verb]
    if verb in ("train", "compare"):
        methods = chance.sample(_METHODS, 1 if verb == "train" else chance.randint(1, 3))
        words += [*methods, *_SMALL, chance.choice(["--updates", "--time"]), "3", *_flags(verb, chance)]
    elif verb in ("resume", "replay"):
        ways = [[], ["--updates", chance.choice(_COUNTS[:-1])], ["--time", chance.choice(_TIMES)], ["--rtol", "x"]]
        words += [chance.choice(_PLACES[:2] if chance.random() < 0.6 else _PLACES), *chance.choice(ways)]
    else:
        words += [chance.choice(_PLACES) if word == "PLACE" else word for word in chance.choice(_OTHERS[verb])]
    if chance.random() < 0.2:
        more = chance.choice(["--json", "--help", "--nope", "-", "--", "", "\0", "é", "--updates"])
        words.insert(chance.randint(0, len(words)), more)
    if chance.random() < 0.05:
        words.pop(chance.randrange(len(words)))
    return words


def _flags(verb: str, chance: random.Random) -> list[str]:
    more = ["seed", "fleet"] if verb == "train" else ["seeds"]
    known = [*(field.name for field in fields(flags.Common)), *more]
    words: list[str] = []
    for name in chance.sample(known, chance.randint(0, 4)):
        if name == "json":
            words.append("--json")
            continue
        if name in ("folder", "start", "absences", "tensorboard"):
            given = chance.choice(_PLACES)
        else:
            usual = _COUNTS if name in _COUNTED else _TIMES
            given = chance.choice(_VALUES.get(name, usual)) if chance.random() < 0.95 else value(chance, 2)
        words += [f"--{name.replace('_', '-')}", given]
    return words


# ------------------------------------------------------------------------------------------------------------------- csv

_CELLS = ["0", "1", "2", "0", "1", "1.5", "3", "", "-1", "nan", "inf", "1e400", "x", "0x1", "1 ", " 1", "1e18", "null", "٣"]
_CELLS += ["9999999999"]
_ODD = ['"', '"a\nb"', "\0", "'1'", "1;2", "é", "\ufeff0", "True", "1e-320", "1,2", "4294967296", "2147483647"]


class Tables(Attack):
    """Files of recorded times and absences with anything in them: speeds that are sound, or BadInput."""

    name, weight, batch, limit, memory = "csv", 1.0, 200, 10.0, 2 << 30

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        names = chance.choice([["worker", "seconds"], ["worker", "seconds", "draw"], ["worker", "start", "end"]])
        if chance.random() < 0.2:
            names = chance.choice([names[:1], [*names, names[0]], [name.upper() for name in names], [], [*names, "more"]])
        data, kind = (_csv(names, chance), "csv") if chance.random() < 0.6 else (_parquet(names, chance), "parquet")
        if chance.random() < 0.3 and data:
            data = BYTES[chance.choice(sorted(BYTES))](data, chance)
        path = place / f"given.{kind}"
        path.write_bytes(data)
        for model in (
            lambda: dd.speeds.RecordedSpeeds(path),
            lambda: dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 2.0, 3.0]), path),
        ):
            made = attempt(f"{kind} {data[:80]!r}", model)
            if not isinstance(made, dd.DualDelayError):
                attempt(f"seconds from {kind} {data[:80]!r}", lambda made=made: _require_sound(made, data))
        attempt(f"told of {kind} {data[:80]!r}", lambda: dd.speeds.announced(path, 3))


def _require_sound(speeds: dd.SpeedModel, data: bytes) -> None:
    for worker in range(min(speeds.n, 4)):
        if not speeds.seconds(worker, 0) > 0:
            raise Failure("silent damage", f"a time that is not above zero from {data[:80]!r}")


def _csv(names: list[str], chance: random.Random) -> bytes:
    rows = [[chance.choice(_CELLS if chance.random() < 0.97 else _ODD) for _ in names] for _ in range(chance.randint(0, 6))]
    if chance.random() < 0.5:  # numbers that suit
        rows = [[str(k % 3), *(str(k + 1 + j) for j in range(len(names) - 1))] for k in range(chance.randint(1, 7))]
    for _ in range(chance.choice([0, 0, 1])):
        if rows and names:
            chance.choice(rows)[chance.randrange(len(names))] = chance.choice([*_CELLS, *_ODD])
    end, mark = chance.choice(["\n", "\n", "\r\n", "\r"]), chance.choice(["", "", "\ufeff"])
    text = mark + end.join(",".join(cells) for cells in [names, *rows]) + end
    return text.encode(chance.choice(["utf-8", "utf-8", "utf-16", "utf-32"]), errors="replace")


def _parquet(names: list[str], chance: random.Random) -> bytes:
    count = chance.randint(0, 5)
    columns: list[Any] = [
        list(range(count)),
        [float(k) for k in range(1, count + 1)],
        [chance.choice([0.5, 1e300, float("nan"), float("inf"), -1.0, None]) for _ in range(count)],
        [chance.choice([0, 1, 2**62, -1, 2**40, 4_000_000_000, None]) for _ in range(count)],
        ["1"] * count,
        [[1.0]] * count,
        [{"a": 1}] * count,
        [True] * count,
        [b"\xff"] * count,
        [date(2024, 1, 1)] * count,
        [Decimal("1.5")] * count,
        [None] * count,
    ]
    arrays = [
        pa.array(columns[k] if chance.random() < 0.3 else columns[chance.randrange(len(columns))])
        for k, _ in enumerate(names)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=names), sink)
    return sink.getvalue()
