"""Times and absences read from CSV and Parquet files, and what is wrong with a file, by its row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dualdelay as dd
from dualdelay.runs.names import describe
from dualdelay.simulation.availability import AwaySpeeds, announced
from own import four, refused
from tables import CASES, LR

fixed = dd.FixedSpeeds([1.0, 2.0, 4.0])


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_worker_s_times_are_read_in_the_order_of_rows_or_draws(tmp_path: Path) -> None:
    by_row = write(tmp_path / "a.csv", "worker,seconds,site\n1,4,x\n0,1.5,y\n0,2,\n")
    by_draw = write(tmp_path / "b.CSV", "draw,worker,seconds\n1,0,2\n0,0,1.5\n7,1,4\n")
    binary = parquet(tmp_path / "c.parquet", worker=[1, 0, 0], seconds=[4.0, 1.5, 2.0])
    for path in (by_row, str(by_draw), binary):
        speeds = dd.speeds.RecordedSpeeds(path)
        assert speeds.times == ((1.5, 2.0), (4.0,))
        assert describe(speeds) == {"name": "recorded", "times": [[1.5, 2.0], [4.0]]}
    assert [speeds.seconds(0, draw) for draw in range(4)] == [1.5, 2.0, 1.5, 2.0]  # from the front again


def test_absences_are_read_from_either_kind_of_file(tmp_path: Path) -> None:
    expected = [(0, 1.5, 3.0), (1, 0.0, None), (2, 4.0, None)]
    text = write(tmp_path / "a.csv", "worker,start,end,why\n2,4,,left\n0,1.5,3,lunch\n1,0,inf,\n")
    binary = parquet(tmp_path / "a.parquet", worker=[0, 1, 2], start=[1.5, 0.0, 4.0], end=[3.0, math.inf, None])
    for path in (text, str(text), binary):
        assert list(AwaySpeeds(fixed, path).absences) == expected
        assert announced(path) == announced(expected)


def test_the_trace_of_a_run_gives_its_schedule_again(tmp_path: Path) -> None:
    run = dd.simulate(dd.VanillaASGD(LR), CASES["noisy"][0], four, updates=150, folder=tmp_path / "run")
    read = dd.speeds.RecordedSpeeds(tmp_path / "run" / "trace.parquet")
    again = dd.simulate(dd.VanillaASGD(LR), CASES["noisy"][0], read, updates=150)
    own = [run.trace.time[run.trace.worker == worker] for worker in range(4)]
    for worker in range(4):
        times = again.trace.time[again.trace.worker == worker][: len(own[worker])]
        assert times.tolist() == own[worker][: len(times)].tolist()
    rows = int((run.trace.time <= min(times.max() for times in own)).sum())  # up to there nobody's times have run out
    assert rows > 50
    for column in ("time", "worker", "draw", "version", "fingerprint"):
        assert run.trace[column][:rows].tobytes() == again.trace[column][:rows].tobytes()


def test_a_folder_does_not_need_the_files_that_its_times_came_from(tmp_path: Path) -> None:
    times = write(tmp_path / "times.csv", "worker,seconds\n0,1\n1,2\n2,4\n")
    away = write(tmp_path / "away.csv", "worker,start,end\n0,3,5.5\n2,9,\n")
    speeds = AwaySpeeds(dd.speeds.RecordedSpeeds(times), away)
    dd.simulate(dd.VanillaASGD(LR), CASES["q3"][0], speeds, updates=20, folder=tmp_path / "run")
    times.unlink()
    away.unlink()
    assert dd.resume(tmp_path / "run", updates=30).version == 30
    assert dd.replay(tmp_path / "run").version == 30


TIMES: dict[str, tuple[str | bytes, str]] = {
    "no such column": ("worker,time\n0,1\n", "'seconds'; expected the columns worker, seconds"),
    "a column twice": ("worker,seconds,seconds\n0,1,2\n", "no single column 'seconds'"),
    "no rows": ("worker,seconds\n", "has no rows"),
    "nothing": ("", "damaged or no csv file"),
    "a ragged row": ("worker,seconds\n0,1\n1,2,3\n", "Row #3"),
    "a gap": ("worker,seconds\n0,1\n2,1\n", "no row for worker 1, but one for worker 2"),
    "no number": ("worker,seconds\n0,1\n1,fast\n", "row 2: seconds is 'fast'; expected a number"),
    "an empty cell": ("worker,seconds\n0,1\n1,\n", "row 2: seconds is empty"),
    "negative": ("worker,seconds\n0,-1\n", "row 1: seconds is -1.0; expected a finite number above zero"),
    "infinite": ("worker,seconds\n0,inf\n", "row 1: seconds is inf"),
    "half a worker": ("worker,seconds\n0.5,1\n", "row 1: worker is 0.5; expected a whole number"),
    "a negative worker": ("worker,seconds\n-1,1\n", "row 1: worker is -1.0"),
    "a negative draw": ("worker,seconds,draw\n0,1,-2\n", "row 1: draw is -2.0"),
    "a job twice": ("worker,seconds,draw\n0,1,5\n0,2,5\n", "row 2: draw is 5; expected every job of worker 0 once"),
    "a header that is no UTF-8": (b"w\xf6rker,seconds\n0,1\n", "no UTF-8; save it as UTF-8"),
    "another column that is no UTF-8": (b"worker,seconds,\xff\n0,1,2\n", "no UTF-8"),
    "a cell that is no UTF-8": (b"worker,seconds\n\xff,1\n", ""),
    "UTF-16": ("worker,seconds\n0,1\n".encode("utf-16"), ""),
    "a number of a worker without the others": ("worker,seconds\n1e12,1\n", "no row for worker 0"),
    "a later worker without the others": ("worker,seconds\n0,1\n2e14,1\n", "no row for worker 1"),
    "too large a worker": ("worker,seconds\n1e300,1\n", "row 1: worker is 1e+300; expected a whole number"),
    "too large a draw": ("worker,seconds,draw\n0,1,1e308\n", "row 1: draw is 1e+308"),
    "too many seconds": ("worker,seconds\n0,1e400\n", "row 1: seconds is inf"),
    "a long cell": ("worker,seconds\n0," + "x" * 100_000 + "\n", "row 1: seconds is 'xxx"),
    "a zero byte": ("worker,seconds\n0,\0\n", "seconds"),
    "one line of a million": ("worker,seconds\n" + "1" * 2_000_000, ""),
}
ABSENCES: dict[str, tuple[str, str]] = {
    "no end": ("worker,start\n0,1\n", "'end'; expected the columns worker, start, end"),
    "unknown worker": ("worker,start,end\n0,1,2\n3,1,2\n", "row 2: worker is 3; expected a whole number, 0..2"),
    "negative": ("worker,start,end\n0,-1,2\n", "row 1: start is -1; expected a finite time"),
    "no start": ("worker,start,end\n0,,2\n", "row 1: start is nan"),
    "no worker": ("worker,start,end\n,1,2\n", "row 1: worker is empty"),
    "backwards": ("worker,start,end\n0,5,2\n", "row 1: end is 2; expected a time after its start, 5"),
    "no number": ("worker,start,end\n0,1,never\n", "row 1: end is 'never'; expected a number"),
    "overlap": (
        "worker,start,end\n0,4,9\n1,1,2\n0,1,5\n",
        "row 1: worker 0 is away from 4, but its absence from 1 lasts to 5",
    ),
    "after all": ("worker,start,end\n0,4,\n0,6,7\n", "row 2: worker 0 is away from 6, but its absence from 4 is for good"),
}
CASES_OF_FILES = [
    *((dd.speeds.RecordedSpeeds, *case) for case in TIMES.values()),
    *((lambda path: AwaySpeeds(fixed, path), *case) for case in ABSENCES.values()),
    *((lambda path: announced(path, 3), *case) for case in ABSENCES.values()),
]


@pytest.mark.parametrize(
    ("read", "text", "words"), CASES_OF_FILES, ids=[*TIMES, *ABSENCES, *(f"{name}, announced" for name in ABSENCES)]
)
def test_a_bad_file_is_refused_with_its_name_and_row(read: Any, text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "file.csv", text)
    refused(lambda: read(path), words, str(path))


COLUMNS: dict[str, Any] = {  # the types that a column of workers must not have
    "empty cells": pa.array([None, None], pa.int64()),
    "no type": pa.nulls(2),
    "lists": [[0], [1]],
    "structures": [{"a": 1}, {"a": 2}],
    "texts": ["a", "b"],
    "bytes": [b"0", b"1"],
    "truth values": [False, True],
    "timestamps": pa.array([10**18, 10**18], pa.timestamp("us")),
    "a large worker": [0.0, 1e12],
    "no rows": pa.array([], pa.int64()),
}


@pytest.mark.parametrize("what", COLUMNS)
def test_a_parquet_column_of_another_type_is_refused(what: str, tmp_path: Path) -> None:
    seconds = [1.0] * len(COLUMNS[what])
    numbers = pa.array(seconds, pa.float64())
    path = parquet(tmp_path / "file.parquet", worker=COLUMNS[what], seconds=numbers, start=numbers, end=numbers)
    refused(lambda: dd.speeds.RecordedSpeeds(path), "file.parquet")
    refused(lambda: announced(path), "file.parquet")


def test_columns_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "file.parquet", worker=[0, 1], seconds=[1.0, 2.0], when=COLUMNS["timestamps"])
    assert dd.speeds.RecordedSpeeds(path).times == ((1.0,), (2.0,))


def test_what_is_no_file_of_columns_is_refused(tmp_path: Path) -> None:
    texts = parquet(tmp_path / "b.parquet", worker=[0], start=["x"], end=[1])
    for given, words in (
        (tmp_path / "none.csv", "there is no file"),
        ("away", "'away' is no file that can be read; expected the name of a .csv"),
        (write(tmp_path / "a.parquet", "worker"), "damaged or no parquet file"),
        (texts, "row 1: start is 'x'"),
    ):
        refused(lambda given=given: announced(given), words)
