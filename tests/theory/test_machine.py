"""The constants of a machine: kept, edited, refused; and what is measured is a speed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.theory import machine as constants
from dualdelay.theory.machine import (
    COPIED,
    FILE,
    SHIPPED,
    Message,
    Spent,
    Stopwatch,
    copying,
    keep_machine,
    known_machine,
    measure_machine,
    peak_memory,
    read_machine,
    values_of,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUALDELAY_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_used_and_before_that_what_the_package_brings(cache: Path) -> None:
    assert known_machine() == SHIPPED
    own = replace(SHIPPED, cores=8, origin="measured elsewhere")
    assert keep_machine(own) == cache / FILE
    assert known_machine() == own


def test_a_file_may_be_edited_and_what_is_no_machine_is_refused(cache: Path) -> None:
    path = keep_machine(SHIPPED)
    path.write_text(json.dumps({**values_of(SHIPPED), "cores": 64}))
    assert read_machine(path).cores == 64
    for values in ({"cores": 2}, {**values_of(SHIPPED), "copying": [1.0]}, {**values_of(SHIPPED), "small": [1, 2]}, []):
        path.write_text(json.dumps(values))
        with pytest.raises(dd.BadInput, match=re.escape(f"{path} does not hold the constants of a machine")):
            read_machine(path)
    path.write_text("{")
    with pytest.raises(dd.BadInput, match="does not hold"):
        known_machine()


@pytest.mark.parametrize(
    ("field", "value"),
    [("cores", 0), ("store", -1.0), ("process", float("nan")), ("small", Message(-1.0, 0, 0, 0)), ("copying", (0.0,) * 5)],
)
def test_constants_that_cannot_be_are_refused(field: str, value: object) -> None:
    with pytest.raises(dd.BadInput, match=field):
        replace(SHIPPED, **{field: value})


def test_the_speed_lies_between_those_that_were_measured() -> None:
    machine = replace(SHIPPED, copying=(5e10, 4e10, 3e10, 2e10, 1e10), copying_beside=(4e10, 4e10, 4e10, 4e10, 4e10))
    assert [machine.speed(size) for size in COPIED] == pytest.approx([5e10, 4e10, 3e10, 2e10, 1e10])
    assert machine.speed(1) == pytest.approx(5e10) and machine.speed(1e15) == pytest.approx(1e10)
    assert 2e10 < machine.speed(2**25.5) < 3e10
    assert machine.speed(1, beside=1.0) == pytest.approx(4e10)
    assert machine.speed(1e15, beside=1.0) == pytest.approx(1e10)  # company makes nobody faster
    assert machine.speed(1, beside=0.25) == pytest.approx(1 / (0.75 / 5e10 + 0.25 / 4e10))


def test_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_SECONDS", 0.001)
    assert copying(2**16, 1) > 0 and copying(2**16, 2) > 0


def test_a_machine_is_as_fast_as_it_was_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3e10, 2e10, 4e10, 1e10, 1e10] * 2 + [1e10, 5e10, 1e10, 1e10, 1e10] * 2)
    monkeypatch.setattr(constants, "copying", lambda size, threads: threads * next(found))
    copies = constants._Copies(2)
    copies.look()
    copies.look()
    assert copies.alone == copies.beside == [3e10, 5e10, 4e10, 1e10, 1e10]


def test_the_memory_of_a_process_is_its_own_and_not_that_of_who_started_it() -> None:
    large = bytearray(2**30)
    large[::4096] = bytes([1]) * len(large[::4096])
    code = "from dualdelay.theory.machine import peak_memory; print(peak_memory())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 2**25 < int(printed) < 2**30 < peak_memory()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
    assert peak_memory(gone.pid) == 0


def test_a_stopwatch_divides_what_was_spent_by_the_updates_that_it_has_heard_of() -> None:
    stopwatch = Stopwatch(dd.FleetControl())
    begin = time.perf_counter()
    for version in (0, 10, 10, 15, 20, 25):  # of what nothing was heard before or what comes last nothing counts
        stopwatch(version, {})
        if version == 15:
            sum(range(1_000_000))  # something to do for this process
    spent, passed = stopwatch.spent, time.perf_counter() - begin
    assert 0 < spent.wall <= passed / 10 and 0 < spent.server <= passed / 10
    assert spent.workers == spent.shards == 0.0 <= spent.between
    with pytest.raises(dd.RunFailed, match="was heard of 0 times; expected 3 or more"):
        _ = Stopwatch(dd.FleetControl()).spent


def test_measuring_takes_rays_messages_from_real_runs_or_without_ray_from_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "copying", lambda size, threads: 1e10 * threads)
    spent = {1_000: Spent(0.004, 0.001, 0.002, 0.003), 50_000: Spent(0.008, 0.002, 0.003, 0.004)}
    seconds = 0.003 + 4 * 1_950_000 * (2 / 1e10 + 1 / 2e9)  # a copy of the model, and an answer put at 2e9 a second
    spent[2_000_000] = Spent(0.02, 0.01, seconds, 0.004)
    cut = {1: Spent(0.010, 0.002, 0.004, 0.003, 0.005), 2: Spent(0.014, 0.002, 0.007, 0.005, 0.014)}  # one and two shards
    half = {1: 0.5, 2: 0.5, None: 0.25}  # of all that, where memory is shared

    def timed(weights: int, seconds: float, workers: int, fleet: dd.RayFleet) -> Spent:
        found = cut[fleet.shards] if fleet.shards else spent[weights]
        if fleet.shared_memory:
            found = Spent(*(half[fleet.shards] * part for part in found))
        return found if workers == 1 else found._replace(wall=math.nan)  # a job's time is that of one worker

    monkeypatch.setattr(constants, "timed", timed)
    told = []
    found = measure_machine(lambda share, text: told.append(share))
    assert found.small == Message(0.001, 0.002, 0.003, 0.004) and found.large == Message(0.002, 0.003, 0.004, 0.008)
    assert found.headed == pytest.approx(Message(0.002, 0.001, 0.001, 0.006))
    assert found.sliced == pytest.approx(Message(0.006, 0.003, 0.002, 0.004))
    assert found.shared == pytest.approx(Message(0.0005, 0.00075, 0.001, 0.002))
    assert found.shared_headed == pytest.approx(Message(0.001, 0.0005, 0.0005, 0.003))
    assert found.shared_sliced == pytest.approx(Message(0.003, 0.0015, 0.001, 0.002))
    assert found.store == pytest.approx(2e9) and told == sorted(told) and "measured here" in found.origin

    def missing(*arguments: object, **options: object) -> Spent:
        raise dd.BadInput("real workers need Ray, which is not installed: pip install ray.")

    monkeypatch.setattr(constants, "timed", missing)
    without = measure_machine()
    assert without.small == SHIPPED.small and "Ray is not installed" in without.origin

    def broken(*arguments: object, **options: object) -> Spent:
        raise dd.BadInput("Ray could not be started")

    monkeypatch.setattr(constants, "timed", broken)
    with pytest.raises(dd.BadInput, match="could not be started"):
        measure_machine()
