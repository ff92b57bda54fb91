"""Whatever is given, there is one clear error: nothing raw, nothing endless, no memory filled, and no page of text."""

from __future__ import annotations

import gzip
import io
import json
import math
import signal
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.analysis import figures, reports
from dualdelay.analysis.loggers import TensorBoard
from dualdelay.cli import commands as cli
from dualdelay.cli import downloads
from dualdelay.core import Order
from dualdelay.core.errors import require_path
from dualdelay.problems.cifar10 import FILES, LARGEST, fault
from dualdelay.problems.splits import deal
from dualdelay.runs.names import alternatives, parse, slug, stem
from dualdelay.runs.progress import RunProgress, SweepProgress
from flat import simulate
from own import mlp, shards
from tables import CASES, LR

nan, inf = math.nan, math.inf
q3, q3_speeds = CASES["q3"]
Q3 = "quadratic[centers=[[0],[6],[12]]]"
HUGE, ENORMOUS = 10**20, 10**5000


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What takes for ever is a failure like any other."""

    def late(*_: object) -> None:
        raise TimeoutError("it takes for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(15)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(function: Callable[[], Any], *words: str) -> str:
    """The message of the one error that this gives, short and with these words in it."""
    with pytest.raises(dd.BadInput) as caught:
        function()
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert len(said) < 2500 and "Traceback" not in said
    return said


def usual(**options: Any) -> dd.Run:
    given = {"algorithm": dd.DuDe(LR), "problem": q3, "speeds": q3_speeds, "updates": 9, "progress": False, **options}
    return simulate(**given)


# numbers that are too large


WHOLE = ("threads", "cores", "seed", "updates", "keep", "checkpoint_every", "evaluate_every", "evaluate_samples")


@pytest.mark.parametrize("value", [HUGE, ENORMOUS], ids=["10^20", "10^5000"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_that_nothing_can_hold(name: str, value: int, tmp_path: Path) -> None:
    word = f"--{name.replace('_', '-')}" if name.startswith("evaluate") else name
    refused(lambda: usual(**{name: value}, folder=tmp_path / "run"), word, "expected a whole number")
    assert not (tmp_path / "run").exists()


FLAGS = (
    "threads",
    "cores",
    "seed",
    "updates",
    "keep",
    "checkpoint-every",
    "evaluate-every",
    "evaluate-samples",
    "patience",
)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_whole_number_that_nothing_can_hold_on_the_shell(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["train", f"dude[lr={LR}]", "--problem", Q3, "--updates", "3", "--folder", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as left:
        cli.main([*start, f"--{flag}", str(HUGE)])
    said = capsys.readouterr().err
    word = f"--{flag}" if flag.startswith("evaluate") else flag.replace("-", "_")
    assert left.value.code == 2 and word in said and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "lr": lambda v: dd.DuDe(v),
    "wait_for": lambda v: dd.DuDe(LR, wait_for=v),
    "time": lambda v: usual(updates=None, time=v),
    "evaluate_seconds": lambda v: usual(evaluate_seconds=v),
    "latency": lambda v: dd.speeds.Link(v),
    "std": lambda v: dd.TruncatedNormalSpeeds(3, v),
    "mean": lambda v: dd.TruncatedNormalSpeeds(3, 1.0, mean=v),
    "times": lambda v: dd.FixedSpeeds([1.0, v]),
    "means": lambda v: dd.speeds.ExponentialSpeeds([1.0, v]),
    "seed": lambda v: dd.speeds.ExponentialSpeeds([1.0], seed=v),
    "sigma": lambda v: dd.speeds.LognormalSpeeds([1.0], sigma=v),
    "every": lambda v: dd.speeds.DriftingSpeeds(q3_speeds, every=v),
    "factor": lambda v: dd.speeds.BurstySpeeds(q3_speeds, factor=v),
    "changes": lambda v: dd.speeds.ChangingSpeeds(q3_speeds, [v], [[1.0] * 3, [2.0] * 3]),
    "absences": lambda v: dd.speeds.announced([(0, v, None)]),
    "alpha": lambda v: dd.Digits(3, alpha=v),
    "noise": lambda v: dd.Quadratic([[0.0]], noise=v),
    "centers": lambda v: dd.Quadratic([[v]]),
    "heterogeneity": lambda v: dd.problems.Logistic(2, heterogeneity=v),
    "reg": lambda v: dd.problems.Logistic(2, reg=v),
    "norm": lambda v: dd.problems.Clipped(q3, v),
    "deadline": lambda v: dd.RayFleet(faults=dd.FaultPolicy(deadline=v)),
    "cpus": lambda v: dd.RayFleet(cpus=v),
    "draws": lambda v: dd.theory.constants(q3, draws=v),
    "delay": lambda v: dd.theory.largest_step(1.0, v),
}


@pytest.mark.parametrize("value", [10**400, ENORMOUS, "1", None, [1.0], 1j], ids=["10^400", "10^5000", *"tnlc"])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_or_too_large_a_one(name: str, value: Any) -> None:
    good = {("times", "1"), ("means", "1"), ("changes", "1"), ("absences", "1")}  # read as numbers
    good |= {("seed", None), ("time", None), ("evaluate_seconds", None)}
    if (name, value) not in good if not isinstance(value, list) else name != "centers":
        word = "--evaluate-seconds" if name == "evaluate_seconds" else name
        refused(lambda: NUMBERS[name](value), word, "expected" if name != "centers" else "numbers")


@pytest.mark.parametrize("name", ["threads", "server_threads", "restarts", "retries", "room", "minimum", "alarm"])
def test_settings_of_a_fleet_that_ray_or_torch_could_not_take(name: str) -> None:
    kind = dd.RayFleet if name in ("threads", "server_threads", "room") else dd.FaultPolicy
    refused(lambda: kind(**{name: HUGE}), name, "expected a whole number")


@pytest.mark.parametrize(
    "options",
    [{"cpus": inf}, {"address": 5}, {"absent": 1}, {"absent": ["a"]}, {"faults": 3}, {"control": 3}],
)
def test_settings_of_a_fleet_that_are_none(options: dict[str, Any]) -> None:
    refused(lambda: dd.RayFleet(**options), *options, "expected")


def test_nobody_is_waited_for_longer_than_a_lifetime() -> None:
    refused(lambda: dd.FaultPolicy(resend=1e300), "resend", "expected")


@pytest.mark.parametrize("resources", [5, ["gpu"], [{"gpu": "one"}], [{1: 2}], [{"gpu": -1}]])
def test_resources_that_are_none(resources: Any) -> None:
    refused(lambda: dd.RayFleet(resources=resources), "resources", "expected")


# workers that leave and join


@pytest.mark.parametrize(
    "changes",
    [
        nan,
        5,
        "left",
        dd.speeds.leave(0, 1.0),
        [nan],
        [None],
        ["left"],
        [("left", 0)],
        [("gone", 0, 1.0)],
        [("left", 0, "1")],
    ],
    ids=repr,
)
def test_changes_that_are_none(changes: Any) -> None:
    refused(lambda: usual(changes=changes), "changes", "expected", "dd.speeds.leave(")


def test_changes_by_numbers_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    given = [dd.speeds.leave(np.int64(0), np.float32(2.5)), dd.speeds.join(torch.tensor(0), np.float64(4.0))]
    one = usual(changes=given, folder=tmp_path / "one")
    other = usual(changes=[dd.speeds.leave(0, 2.5), dd.speeds.join(0, 4.0)], folder=tmp_path / "other")
    assert one.trace.events == other.trace.events
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "other" / "config.json").read_bytes()


@pytest.mark.parametrize("absences", [5, nan, [nan], [None], [(0,)], [("a", 1.0)], [(0, 10**400)], [(0, "x")]], ids=repr)
def test_absences_that_are_none(absences: Any) -> None:
    if absences != [(0,)]:  # away from the start, for good
        refused(lambda: dd.speeds.announced(absences), "absences", "expected")
        refused(lambda: dd.speeds.AwaySpeeds(q3_speeds, absences), "absences", "expected")


# texts


NESTED = "[" * 5000 + "]" * 5000
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "brackets": (f"dude[lr={NESTED}]", ("5,001 brackets", "50 at most")),
    "parentheses": (f"dude[lr={'(' * 200}1{')' * 200}]", ("201 brackets",)),
    "braces": (f"dude[lr={'{' * 200}{'}' * 200}]", ("201 brackets",)),
    "signs": (f"dude[lr={'-' * 200_000}1]", ("too complicated", "expected a number")),
    "a sum": (f"dude[lr={'1+' * 100_000}1]", ("too complicated",)),
    "digits": (f"dude[lr={'9' * 5000}]", ("too large", "fewer digits")),
    "fewer digits": (f"dude[lr={'9' * 4000}]", ("4,000 digits",)),
    "workers": (f"dude[lr=1,wait_for={'9' * 4000}]", ("wait_for", "4,000 digits")),
    "a power": ("dude[lr=10**10**10]", ("'10**10**10'",)),
    "a zero byte": ("dude[lr=\0]", ("zero byte",)),
    "no UTF-8": ("dude[lr=\udc80]", ("no UTF-8",)),
    "a long name": ("x" * 100_000, ("there is no algorithm", "100,002 characters")),
    "a long setting": (f"dude[{'x' * 100_000}=1]", ("has no parameter",)),
    "no setting": (f"dude[{'x' * 100_000}]", ("is no setting",)),
    "an open bracket": ("dude[" + "x" * 100_000, ("open bracket",)),
    "too long": ("dude[lr=" + " " * 1_000_001 + "1]", ("too long", "1,000,000")),
    "no number": (f"dude[lr='{'x' * 100_000}']", ("lr", "above zero")),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_names_nothing(what: str) -> None:
    text, words = TEXTS[what]
    assert len(refused(lambda: parse("algorithm", text), *words)) < 800


@pytest.mark.parametrize("speeds", [f"away[speeds=fixed[times={NESTED}]]", "fixed[times=" + "[" * 100_000])
def test_deep_speeds_on_the_shell(speeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "dude[lr=0.1]", "--problem", Q3, "--speeds", speeds, "--updates", "3"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and "brackets" in said and len(said) < 800


def test_a_text_with_more_alternatives_than_anybody_can_run() -> None:
    assert len(alternatives("dude[lr=0.1|0.2,wait_for=1|2|3]")) == 6
    text = f"dude[{','.join(f'x{k}=1|2' for k in range(60))}]"
    refused(lambda: alternatives(text), f"{2**60:,} alternatives", "10,000 at most")


@pytest.mark.parametrize(
    "text",
    [
        "logistic[shards=5]", "logistic[shards=[1]]", "logistic[shards=[[[1],[1]]]]", "quadratic[centers={1:2}]",
        "quadratic[centers=[[1]],curvatures=5]", "quadratic[centers=[[1]],start=abc]", "digits[split=5]",
        "digits[split=[[0.5]],workers=1]", "digits[split={1:2}]", "digits[batch_size=abc]", "digits[weights=5]",
        "digits[minimum=abc]", "local_steps[problem=5,k=1,lr=1]", "cifar10[root=5]", "clipped[problem=digits,norm=1]",
    ],
)  # fmt: skip
def test_settings_of_another_kind(text: str) -> None:
    refused(lambda: parse("problem", text))


def test_a_label_of_any_length_becomes_a_folder_s_name(tmp_path: Path) -> None:
    long = [f"generalized[probabilities=[{','.join(['0.01'] * 99)},0.{k}1]]" for k in (0, 1)]
    names = [stem(text, 12345) for text in long]
    assert len(set(names)) == 2 and all(len(name) < 220 for name in names)
    (tmp_path / names[0]).mkdir()
    assert slug("dude[lr=0.05,wait_for=3]") == "dude-lr=0.05-wait_for=3"


@pytest.mark.parametrize(
    "path", [5, "a\0b", "\ud800", "a" * 300, "/".join(["b" * 200] * 30)], ids=["5", "0", "s", "n", "l"]
)
def test_names_that_no_file_can_have(path: Any, tmp_path: Path) -> None:
    for call in (
        lambda: require_path("folder", path),
        lambda: usual(folder=path),
        lambda: dd.train(dd.DuDe(LR), q3, folder=path, updates=1),
        lambda: dd.compare([dd.DuDe(LR)], q3, q3_speeds, folder=path, updates=3),
        lambda: dd.sweep({"algorithm": [dd.DuDe(LR)]}, q3, q3_speeds, folder=path, updates=3),
        lambda: TensorBoard(path),
        lambda: dd.Cifar10(root=path),
    ):
        refused(call, "Choose another name")
    if not isinstance(path, int):
        refused(lambda: usual(start=path), "initial_weights", "Choose another name")
        refused(lambda: downloads.cifar10(tmp_path, path), "source", "Choose another name")


# tables


def table(tmp_path: Path, data: bytes | dict[str, Any], kind: str = "csv") -> Path:
    path = tmp_path / f"given.{kind}"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        pq.write_table(pa.table(data), path)
    return path


CELLS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a header": (b"w\xf6rker,seconds\n0,1\n", ("no UTF-8", "save it as UTF-8")),
    "another header": (b"worker,seconds,\xff\n0,1,2\n", ("no UTF-8",)),
    "a cell": (b"worker,seconds\n\xff,1\n", ("given.csv",)),
    "UTF-16": ("worker,seconds\n0,1\n".encode("utf-16"), ("given.csv",)),
    "a worker": (b"worker,seconds\n1e12,1\n", ("no row for worker 0", "without a gap")),
    "a later worker": (b"worker,seconds\n0,1\n2e14,1\n", ("no row for worker 1",)),
    "too large a worker": (b"worker,seconds\n1e300,1\n", ("row 1", "worker is 1e+300", "at most")),
    "a draw": (b"worker,seconds,draw\n0,1,1e308\n", ("draw is 1e+308", "at most")),
    "infinite seconds": (b"worker,seconds\n0,1e400\n", ("seconds is inf", "finite")),
    "a long cell": (b"worker,seconds\n0," + b"x" * 100_000 + b"\n", ("row 1", "seconds", "a number")),
    "a zero byte": (b"worker,seconds\n0,\0\n", ("seconds",)),
    "nothing": (b"", ("given.csv",)),
    "one line of a million": (b"worker,seconds\n" + b"1" * 2_000_000, ("given.csv",)),
}


@pytest.mark.parametrize("what", CELLS)
def test_a_csv_file_that_cannot_be_read(what: str, tmp_path: Path) -> None:
    data, words = CELLS[what]
    path = table(tmp_path, data)
    refused(lambda: dd.speeds.RecordedSpeeds(path), *words)
    refused(lambda: parse("speeds", f"recorded[times={path}]"), *words)


COLUMNS: dict[str, dict[str, Any]] = {
    "empty cells": {"worker": pa.array([None, None], pa.int64()), "seconds": [1.0, 1.0]},
    "no type": {"worker": pa.nulls(2), "seconds": [1.0, 1.0]},
    "lists": {"worker": [[0], [1]], "seconds": [1.0, 1.0]},
    "structures": {"worker": [{"a": 1}, {"a": 2}], "seconds": [1.0, 1.0]},
    "texts": {"worker": ["a", "b"], "seconds": [1.0, 1.0]},
    "bytes": {"worker": [b"0", b"1"], "seconds": [1.0, 1.0]},
    "truth values": {"worker": [False, True], "seconds": [1.0, 1.0]},
    "moments": {"worker": pa.array([10**18, 10**18], pa.timestamp("us")), "seconds": [1.0, 1.0]},
    "a large worker": {"worker": [0.0, 1e12], "seconds": [1.0, 1.0]},
    "no rows": {"worker": pa.array([], pa.int64()), "seconds": pa.array([], pa.float64())},
}


@pytest.mark.parametrize("what", COLUMNS)
def test_a_parquet_file_of_other_types(what: str, tmp_path: Path) -> None:
    path = table(tmp_path, COLUMNS[what], "parquet")
    refused(lambda: dd.speeds.RecordedSpeeds(path), "given.parquet")
    pq.write_table(pa.table({**COLUMNS[what], "start": COLUMNS[what]["seconds"], "end": COLUMNS[what]["seconds"]}), path)
    refused(lambda: dd.speeds.announced(path), "given.parquet")


def test_columns_that_nobody_needs_are_not_read(tmp_path: Path) -> None:
    odd = pa.array([10**18, 10**18], pa.timestamp("us"))
    path = table(tmp_path, {"worker": [0, 1], "seconds": [1.0, 2.0], "when": odd}, "parquet")
    assert dd.speeds.RecordedSpeeds(path).times == ((1.0,), (2.0,))


@pytest.mark.parametrize("data", [b"w\xf6rker,start,end\n0,1,2\n", b"worker,start,end\n1e12,1,2\n", b"\xff\xfe\n"])
def test_absences_on_the_shell_that_cannot_be_read(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path, data)
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "dude[lr=0.1]", "--problem", Q3, "--absences", str(path), "--updates", "3"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and "given.csv" in said and said.startswith("error: ")


# archives


SUMS = dict.fromkeys(FILES, "0" * 32)


def tarred(member: tarfile.TarInfo, data: bytes = b"", compressed: bool = False) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz" if compressed else "w") as archive:
        archive.addfile(member, io.BytesIO(data) if data else None)
    return sink.getvalue()


def sparse(name: str, size: int) -> bytes:
    """An archive of a few bytes with a file that is all holes."""
    member = tarfile.TarInfo(name)
    member.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name,
        "GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{size},0",
    }  # fmt: skip
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    return sink.getvalue()


def claiming(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a file that is said to be so large, and nothing after it."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def zeros(count: int) -> bytes:
    """So many zeros, in a thousandth of their space."""
    once = gzip.compress(bytes(1 << 24), 1)
    return once * (count >> 24)


ARCHIVES: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "holes": (lambda: sparse("data_batch_1.bin", 6 << 30), ("data_batch_1.bin", f"{6 << 30:,} bytes", "at most")),
    "labels of holes": (lambda: sparse("test_lables.json", 6 << 30), ("test_lables.json", "1,048,576 at most")),
    "a file of zeros": (
        lambda: gzip.compress(claiming("data_batch_1.bin", 1 << 40)) + zeros(1 << 25),
        ("data_batch_1.bin", "at most"),
    ),
    "a long name of zeros": (
        lambda: gzip.compress(claiming("././@LongLink", 1 << 34, tarfile.GNUTYPE_LONGNAME)) + zeros(1 << 28),
        ("far larger than CIFAR-10",),
    ),
    "another file of zeros": (
        lambda: gzip.compress(claiming("x", 1 << 40)) + zeros(1 << 25),
        ("far larger than CIFAR-10",),
    ),
    "another version": (lambda: sparse("data_batch_1", 6 << 30), ("for Python or MATLAB",)),
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_an_archive_that_says_it_is_enormous_is_not_believed(what: str, tmp_path: Path) -> None:
    make, words = ARCHIVES[what]
    (tmp_path / "own.tar").write_bytes(make())
    tracemalloc.start()
    try:
        refused(lambda: downloads.cifar10(tmp_path / "here", tmp_path / "own.tar", files=SUMS), *words)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak:,} bytes"
    assert list((tmp_path / "here").iterdir()) == []


def picture(rows: int, width: int = 1024) -> bytes:
    image = pytest.importorskip("PIL.Image")
    sink = io.BytesIO()
    image.new("RGB", (width, rows)).save(sink, "png")
    return sink.getvalue()


@pytest.mark.parametrize(
    "labels",
    [
        b"6000000000", b"[" * 100_000, b'{"a": ' * 1000, b"[6000000000]", b"[true]", b"[[0]]", b"null", b"", b"\xff\xfe",
        b"[" + b"0," * 60_000 + b"0]",
    ],
    ids=["a number", "lists", "dicts", "large", "truth", "nested", "null", "nothing", "bytes", "too many"],
)  # fmt: skip
def test_labels_that_are_none(labels: bytes, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "test_batch.png").write_bytes(picture(2))
    (own / "test_lables.json").write_bytes(labels)
    only = {"test_batch.bin": "0" * 32}
    tracemalloc.start()
    try:
        refused(lambda: downloads.cifar10(tmp_path / "here", own, files=only), "test_batch.bin cannot be made of")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("rows", "width"), [(20_000, 1024), (2, 5000)])
def test_a_picture_of_another_size_is_not_decoded(rows: int, width: int, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "test_batch.png").write_bytes(picture(rows, width))
    (own / "test_lables.json").write_bytes(b"[0, 0]")
    said = refused(
        lambda: downloads.cifar10(tmp_path / "here", own, files={"test_batch.bin": "0" * 32}), "pixels, expected"
    )
    assert f"{width} x {rows}" in said


def test_a_file_full_of_holes_is_not_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with (own / "data_batch_1.bin").open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: downloads.cifar10(tmp_path / "here", own, files=SUMS), "data_batch_1.bin", "at most")
    said = fault(own / "data_batch_1.bin", "0" * 32)
    assert said == f"is damaged ({1 << 40:,} bytes, expected {LARGEST:,})"


# runs without an end


@dataclass(frozen=True)
class Quick(dd.FixedSpeeds):
    """Jobs that take no time."""

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return 0.0


@dataclass(frozen=True)
class Impatient(dd.VanillaASGD):
    """A method that is woken again and again."""

    at: Any = 0.0

    def first(self, s: dd.State) -> list[Order]:
        return [dd.wake(self.at)]

    def on_wake(self, s: dd.State, time: float) -> list[Order]:
        return [dd.wake(self.at)]


ENDLESS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "evaluations until a time": (
        {"updates": None, "time": 5.0, "evaluate_seconds": 1e-300},
        ("--evaluate-seconds) is 1e-300",),
    ),
    "evaluations until an update": ({"evaluate_seconds": 1e-300}, ("--evaluate-seconds) is 1e-300", "1,000,000")),
    "a million and more": ({"updates": None, "time": 1e4, "evaluate_seconds": 0.009}, ("1,000,000 evaluations at most",)),
    "a time that is hardly any": ({"updates": None, "time": 5e-324}, ("time is 5e-324", "1e-300")),
    "jobs that are too quick": ({"speeds": dd.FixedSpeeds([1e-300] * 3), "updates": None, "time": 1.0}, ("3e+300 jobs",)),
    "too long a time": ({"updates": None, "time": 1e300}, ("time is 1e+300", "jobs")),
    "jobs that take no time": ({"speeds": Quick([1.0] * 3), "updates": None, "time": 1.0}, ("worker 0 take no time",)),
    "drift": ({"speeds": dd.speeds.DriftingSpeeds(q3_speeds, every=1e-9)}, ("more than 100,000 times", "last longer")),
    "drift without an end": ({"speeds": dd.speeds.DriftingSpeeds(q3_speeds, every=1e-320)}, ("worker 0",)),
    "bursts": ({"speeds": dd.speeds.BurstySpeeds(q3_speeds, usual=1e-9, burst=1e-9)}, ("more than 100,000 times",)),
    "drift after a long while": (
        {"speeds": dd.speeds.DriftingSpeeds(dd.speeds.AwaySpeeds(q3_speeds, [(0, 0.5, 1e12)]), every=0.01), "time": 1e14},
        ("times",),
    ),
    "wakes": ({"algorithm": Impatient(LR)}, ("woken at time 0", "longer pause")),
    "a wake at no time": ({"algorithm": Impatient(LR, nan)}, ("nan", "expected")),
    "a wake at a text": ({"algorithm": Impatient(LR, "soon")}, ("'soon'", "expected")),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_run_that_would_never_end_is_refused(what: str) -> None:
    options, words = ENDLESS[what]
    refused(lambda: usual(**options), *words)


def test_evaluations_at_real_workers_are_not_closer_than_a_clock_can_tell() -> None:
    refused(
        lambda: dd.train(dd.DuDe(LR), q3, updates=3, evaluation=dd.Evaluation(seconds=1e-300)),
        "--evaluate-seconds",
        "0.001 or more",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"updates": 5, "time": 1e300},
        {"updates": 5, "time": 1e9, "evaluate_seconds": 1.0},
        {"updates": None, "time": 1e-300},
        {"updates": None, "time": 10.0, "evaluate_seconds": 1e-2},
        {"speeds": Quick([1.0] * 3)},
        {"speeds": dd.speeds.DriftingSpeeds(q3_speeds, every=0.01)},
    ],
    ids=str,
)
def test_what_ends_is_not_refused(options: dict[str, Any]) -> None:
    usual(**options)


ENDLESS_ABSENCES: dict[str, tuple[Callable[[], Any], str]] = {
    "on_off": (lambda: dd.speeds.on_off(3, 1e-9, 1e-9, 1e9), "absences until"),
    "nothing": (lambda: dd.speeds.on_off(3, 1e-320, 1e-320, 1.0), "absences until"),
    "many": (lambda: dd.speeds.on_off(10**12, 1.0, 1.0, 1.0), "workers"),
    "dropouts": (lambda: dd.speeds.dropouts(10**12, 0.5, 1.0), "workers"),
}


@pytest.mark.parametrize("what", ENDLESS_ABSENCES)
def test_absences_without_an_end_are_refused(what: str) -> None:
    refused(*ENDLESS_ABSENCES[what])


# more than there is room for


ROOM: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "digits": (lambda: dd.Digits(workers=10**9), ("workers is 1000000000",)),
    "more workers than digits": (lambda: dd.Digits(workers=1438, empty="drop"), ("1437 samples", "1438 workers")),
    "iid": (lambda: dd.Digits(workers=10**9, split="iid"), ("workers",)),
    "hidden": (lambda: dd.Digits(hidden=10**9), ("hidden=1000000000", "GB of memory", "smaller hidden")),
    "a batch": (lambda: dd.Digits(batch_size=10**10), ("10000000000 samples", "smaller batch_size")),
    "a batch of one worker": (lambda: dd.problems.Logistic(2, batch_size=[8, 10**10]), ("10000000000 samples",)),
    "cifar10": (lambda: dd.Cifar10(workers=10**9), ("workers", "1..50000")),
    "logistic": (lambda: dd.problems.Logistic(workers=10**9), ("workers",)),
    "features": (lambda: dd.problems.Logistic(features=10**12), ("features", "GB of memory")),
    "samples": (lambda: dd.problems.Logistic(samples=10**12), ("samples", "GB of memory")),
    "local steps": (lambda: dd.LocalSteps(q3, 10**12, 0.1), ("k is", "1..100000")),
    "speeds": (lambda: dd.TruncatedNormalSpeeds(10**9), ("n is 1000000000",)),
    "speeds beyond numbers": (lambda: dd.TruncatedNormalSpeeds(500, 1e308), ("std 1e+308", "lower them")),
    "shards": (lambda: dd.Network(mlp, cross_entropy, lambda worker: None, workers=10**9), ("workers",)),
    "a large alpha": (lambda: dd.Digits(alpha=1e308), ("alpha is 1e+308", "expected about")),
    "a grid": (
        lambda: dd.sweep({"algorithm": [dd.DuDe(LR)], "lr": [0.1] * 2000, "seed": list(range(2000))}),
        ("4,000,000",),
    ),
    "draws": (lambda: dd.theory.constants(q3, draws=10**12), ("draws", "1000000")),
}


@pytest.mark.parametrize("what", ROOM)
def test_what_there_is_no_room_for_is_refused_at_once(what: str) -> None:
    make, words = ROOM[what]
    refused(make, *words)


def test_a_split_is_what_it_was() -> None:
    labels = np.arange(300) % 7
    for workers in (1, 4, 40):
        rng = dd.Draws(3, "split").generator(2)
        owner = np.empty(300, dtype=np.int64)
        for label in range(7):
            members = np.flatnonzero(labels == label)
            owner[members] = rng.choice(workers, size=len(members), p=rng.dirichlet(np.full(workers, 0.5)))
        parts = deal(labels, workers, 0.5, 3, 2)
        assert [part.tolist() for part in parts] == [np.flatnonzero(owner == worker).tolist() for worker in range(workers)]
        assert all(part.dtype == np.int64 for part in parts)


# metrics


@pytest.mark.parametrize("name", [1, None, ("a",), "", " ", " a", "a\0b", "\ud800", "a\nb", "a" * 201])
def test_names_that_no_column_can_have(name: Any, tmp_path: Path) -> None:
    given = {name: lambda model: 1.0}
    refused(lambda: usual(metrics=given, folder=tmp_path / "run"), "metrics has", "for a name; expected")
    refused(
        lambda: dd.train(dd.DuDe(LR), q3, evaluation=dd.Evaluation(metrics=given), updates=3),
        "metrics has",
        "for a name; expected",
    )
    for batch in (False, True):
        refused(
            lambda b=batch: dd.compare(
                [dd.DuDe(LR)],
                q3,
                q3_speeds,
                evaluation=dd.Evaluation(metrics=given),
                updates=3,
                compute=dd.Compute(batch=b),
            ),
            "for a name",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["time", "objective", "share", "ended", "updates", "tau_max", "best_value"])
def test_names_that_are_taken(name: str) -> None:
    refused(lambda: usual(metrics={name: lambda model: 1.0}), f"metrics has ['{name}']", "choose other names")
    if name not in ("time", "objective", "share"):
        problem = dd.Network(mlp, cross_entropy, shards(), 4, metrics={name: lambda model, batch: 1.0})
        refused(lambda: usual(problem=problem), f"metrics has ['{name}']")


@pytest.mark.parametrize("name", ["algorithm", "seed"])
def test_names_that_a_comparison_has_taken(name: str) -> None:
    given = {name: lambda model: 1.0}
    usual(metrics=given)
    refused(
        lambda: dd.compare([dd.DuDe(LR)], q3, q3_speeds, evaluation=dd.Evaluation(metrics=given), updates=3),
        f"metrics has ['{name}']",
    )


@pytest.mark.parametrize("value", ["1.5", None, 1j, b"1", torch.ones(2), np.ones(2), [1.0], 10**400, object()], ids=type)
def test_a_metric_that_gives_no_number(value: Any) -> None:
    refused(lambda: usual(metrics={"mine": lambda model: value}), "metric 'mine' gave", "expected one number")
    given = {"mine": lambda model, batch: value}
    refused(lambda: dd.Network(mlp, cross_entropy, shards(), 4, metrics=given), "metric 'mine' gave", "expected one number")


@pytest.mark.parametrize("metrics", [5, [len], "size", {"size": 5}, {"size": None}], ids=repr)
def test_metrics_that_are_no_functions_by_name(metrics: Any) -> None:
    refused(lambda: usual(metrics=metrics), "metrics", "expected")
    refused(lambda: dd.train(dd.DuDe(LR), q3, evaluation=dd.Evaluation(metrics=metrics), updates=3), "metrics", "expected")
    refused(lambda: dd.Network(mlp, cross_entropy, shards(), 4, metrics=metrics), "metrics", "expected")


@pytest.mark.parametrize(
    "found", [{1: 2.0}, {"objective": "1"}, {"objective": None}, 5, None, {"objective": torch.ones(2)}]
)
def test_a_problem_that_finds_no_numbers(found: Any, tmp_path: Path) -> None:
    class Mine(dd.Quadratic):
        def assess(self, x: Tensor, samples: Any = None) -> Any:
            return found, {}

    refused(lambda: usual(problem=Mine([[0.0], [6.0], [12.0]]), folder=tmp_path / "run"), "expected")


@pytest.mark.parametrize("target", [nan, "1", [1.0]])
def test_a_target_that_no_metric_can_reach(target: Any) -> None:
    refused(lambda: usual(stop=dd.EarlyStop(target=target)), "target", "expected a number")


# numbers of numpy and torch


@pytest.mark.parametrize(
    "kind",
    [lambda v: np.int64(v) if isinstance(v, int) else np.float32(v), np.asarray, torch.tensor],
    ids=["np", "0-d", "torch"],
)
def test_numbers_of_numpy_and_torch_are_those_of_python(kind: Any, tmp_path: Path) -> None:
    def run(of: Callable[[Any], Any], name: str) -> tuple[bytes, bytes, Any]:
        model = dd.speeds.DriftingSpeeds(
            dd.speeds.LognormalSpeeds([of(1.0), of(2.0), of(4.0)], of(3), sigma=of(0.5)), every=of(2.0), keep=of(0.5)
        )
        done = dd.simulate(
            dd.DuDe(LR),
            dd.problems.Logistic(of(3), of(2), of(20), of(0.5), of(0.25), of(4), of(7)),
            dd.SimulatedFleet(model, link=dd.speeds.Link(of(0.25), of(1000.0))),
            updates=of(20),
            time=of(50.0),
            seed=of(5),
            folder=dd.Saving(tmp_path / name, every=of(4), keep=of(2)),
            evaluation=dd.Evaluation(every=of(3), seconds=of(1.5), early_stop=dd.EarlyStop(target=of(-1.0))),
            compute=dd.Compute(threads=of(1), cores=of(1)),
            watch=dd.Reporting(progress=False),
        )
        files = [(tmp_path / name / file).read_bytes() for file in ("config.json", "result.json")]
        return files[0], files[1], done.x.tolist()

    assert run(kind, "given") == run(lambda value: value, "plain")


def test_numbers_of_numpy_in_a_grid_and_a_comparison_are_those_of_python(tmp_path: Path) -> None:
    drawn = dd.problems.Logistic(3, 2, 10)
    grid = {"algorithm": [dd.DuDe(LR)], "lr": np.array([0.25, 0.5]), "seed": np.arange(2)}
    one = dd.sweep(grid, drawn, q3_speeds, updates=3, folder=tmp_path / "one", watch=dd.Reporting(progress=False))
    plain = {"algorithm": [dd.DuDe(LR)], "lr": [0.25, 0.5], "seed": [0, 1]}
    other = dd.sweep(plain, drawn, q3_speeds, updates=3, folder=tmp_path / "other", watch=dd.Reporting(progress=False))
    assert one.points == other.points and one.objective.tolist() == other.objective.tolist()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        p.name for p in (tmp_path / "other").iterdir()
    )
    dd.compare(
        [dd.DuDe(LR)],
        dd.Digits(3, 1.0, hidden=2),
        q3_speeds,
        seeds=np.arange(2),
        updates=2,
        watch=dd.Reporting(progress=False),
    )


def test_a_method_s_numbers_are_python_s_own_or_refused_with_a_hint() -> None:
    refused(lambda: dd.DuDe(np.ones(2)), "lr", "expected a finite number")
    try:
        assert type(dd.DuDe(np.float32(0.5)).lr) is float
    except dd.BadInput as error:
        assert "write float(...)" in str(error)


@pytest.mark.parametrize("seeds", [1.5, "01", [0.5], ["a"], [None], [HUGE], []], ids=repr)
def test_seeds_that_are_none(seeds: Any) -> None:
    refused(lambda: dd.compare([dd.DuDe(LR)], q3, q3_speeds, seeds=seeds, updates=3), "seed", "expected")


# a user's own speeds, links and problems


def own_speeds(give: Callable[[int, int], Any], job: bool) -> dd.SpeedModel:
    class Mine(dd.SpeedModel):
        n = 3

        def seconds(self, worker: int, draw: int, start: float = 0.0) -> Any:
            return 1.0 if job else give(worker, draw)

        def job(self, worker: int, draw: int, start: float, batches: int) -> Any:
            return give(worker, draw) if job else super().job(worker, draw, start, batches)

    return Mine()


def raises(error: BaseException) -> Any:
    raise error


GIVES: dict[str, Callable[[int, int], Any]] = {
    "negative": lambda worker, draw: -1.0,
    "negative later": lambda worker, draw: 1.0 if draw < 2 else -1e-9,
    "nan": lambda worker, draw: nan,
    "None": lambda worker, draw: None,
    "text": lambda worker, draw: "1.5",
    "several": lambda worker, draw: np.ones(2),
    "complex": lambda worker, draw: 1j,
    "too large": lambda worker, draw: 10**400,
    "raises": lambda worker, draw: raises(KeyError("strange")),
    "raises TypeError": lambda worker, draw: raises(TypeError("strange")),
    "raises later": lambda worker, draw: 1.0 if draw < 2 else raises(ZeroDivisionError("strange")),
}


@pytest.mark.parametrize("end", [{}, {"updates": None, "time": 9.0}], ids=["updates", "time"])
@pytest.mark.parametrize("job", [False, True], ids=["seconds", "job"])
@pytest.mark.parametrize("what", GIVES)
def test_own_speeds_that_give_no_seconds(what: str, job: bool, end: dict[str, Any]) -> None:
    words = ("Mine raised", "strange", "mend its") if "raises" in what else ("Mine gave",)
    said = refused(lambda: usual(speeds=own_speeds(GIVES[what], job), **end), *words)
    assert "seconds, zero or more" in said and "of worker" in said


@pytest.mark.parametrize("what", GIVES)
def test_an_own_link_that_gives_no_seconds(what: str) -> None:
    class Mine(dd.speeds.Link):
        def seconds(self, size: int) -> Any:
            return GIVES[what](0, 5)

    words = ("Mine raised", "strange") if "raises" in what else ("Mine gave",)
    refused(lambda: usual(link=Mine()), *words, "seconds, zero or more")


@pytest.mark.parametrize("batches", [-1, nan, inf, None, "2", [1]], ids=repr)
def test_an_own_problem_whose_jobs_are_of_no_size(batches: Any) -> None:
    class Mine(dd.Quadratic):
        def batches(self, worker: int) -> Any:
            return batches

    refused(lambda: usual(problem=Mine([[0.0], [6.0], [12.0]])), "batches", "worker 0", "expected a number of minibatches")


@pytest.mark.parametrize(
    "settings", [("x",), (nan,), (-1.0,), (0.0, "x"), (0.0, nan), (0.0, 0), (0.0, -1.0), (True,)], ids=str
)
def test_links_that_are_none(settings: Any) -> None:
    refused(lambda: dd.speeds.Link(*settings), "expected")


# brackets on a screen


def terminal() -> Console:
    return Console(width=100, force_terminal=True, force_interactive=True, file=io.StringIO(), _environ={"TERM": "xterm"})


@pytest.mark.parametrize("label", ["dude[lr=0.01]", "[bold]x[/bold]", "x[/]", "[link=http://x]y"])
def test_a_label_is_shown_as_it_is(label: str, tmp_path: Path) -> None:
    console = terminal()
    with RunProgress(label, after=0.0, console=console) as watcher:
        watcher.show(f"text [b]{label}[/b]", 0.5)
    shown = console.file.getvalue()
    assert label in shown and f"[b]{label}[/b]" in shown
    console = terminal()
    reports.print_rows(f"title {label}", [["head", f"h{label}"], [label, f"c{label}"]], console)
    shown = console.file.getvalue()
    assert all(part in shown for part in (f"title {label}", f"h{label}", f"c{label}"))


def test_a_comparison_of_settings_shows_them_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["compare", "dude[lr=0.1]", "--problem", Q3, "--speeds", "truncated_normal[std=1|5]", "--updates", "3"]
    cli.main([*given, "--folder", str(tmp_path / "all")])
    shown = capsys.readouterr().out
    assert "truncated_normal[std=1]: at time" in shown and "\\" not in shown


def test_a_bar_of_what_goes_on_shows_brackets() -> None:
    with SweepProgress("sweep", after=0.0, lines=0.0) as report:
        report(0.5, "[x]")


@pytest.mark.parametrize("label", ["$x$", "$\\frac{", "_hidden", "x" * 1000, "a%b", "a_b^c"])
def test_a_figure_shows_labels_as_they_are(label: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = dd.compare({label: dd.DuDe(LR)}, q3, q3_speeds, updates=3, watch=dd.Reporting(progress=False))
    figure = figures.drawn(table, "time")
    (text,) = figure.axes[0].get_legend().get_texts()
    assert text.get_text().strip()[:20] == label[:20] and not text.get_parse_math()
    figures.draw(table, tmp_path / "figure.svg")


@pytest.mark.parametrize("algorithms", [{1: dd.DuDe(LR)}, {"": dd.DuDe(LR)}, {"\ud800": dd.DuDe(LR)}, 5, [5], {}], ids=repr)
def test_names_of_methods_that_are_none(algorithms: Any) -> None:
    refused(lambda: dd.compare(algorithms, q3, q3_speeds, updates=3), "algorithms", "expected")


# the rest of the shell


@pytest.mark.parametrize(
    "words",
    [
        ["train", "dude[lr=100000000000000000000000000]"],
        ["train", "fedasync[lr=100000000000000000000]", "--problem", Q3],
        ["train", "fedfix[lr=0.1,period=1e-320]", "--problem", Q3],
        ["train", "dude[lr=0.1]", "--problem", "digits[workers=1000000000]"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--evaluate-seconds", "1e-300"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--time", "5e-324"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--speeds", "drifting[speeds=fixed[times=[1,2,4]],every=1e-9]"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--speeds", "lognormal[means=[1,2,4],sigma=1e200]"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--target", "nan"],
        ["train", "dude[lr=0.1]", "--problem", Q3, "--fleet", "ray[threads=100000000000000000000]"],
        ["advise", "--problem", Q3, "--speeds", "fixed[times=[1,2,4]]", "--time", "1e308"],
        ["advise", "--run", "a" * 300],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_one_line_says_what_is_wrong(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--updates", "3"] if words[0] == "train" else []
    with pytest.raises(SystemExit) as left:
        cli.main([*words, *more, "--folder", str(tmp_path / "run"), "--json"])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 800, err
    assert json.loads(out.splitlines()[-1])["exit"] == 2
