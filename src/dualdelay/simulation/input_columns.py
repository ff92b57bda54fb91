"""Numbers that a person gives: in a list, or in the columns of a CSV or Parquet file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import MOST, BadInput, shown


def floats(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Times given by the user as floats, each finite and above zero."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("a text is no list")
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise BadInput(
            f"{name} is {shown(values)}; expected one number for each worker, such as [1.0, 2.0, 4.0]."
        ) from None
    if not numbers:
        raise BadInput(f"{name} is empty; expected one number for each worker.")
    for worker, value in enumerate(numbers):
        if not math.isfinite(value) or value <= 0:
            raise BadInput(f"{name}[{worker}] is {value}; expected a finite number of seconds above zero.")
    return numbers


def recorded_times(path: Path) -> list[list[float]]:
    """Each worker's seconds, job after job, from a file with columns worker and seconds and, if it has it, draw."""
    columns = read_columns(path, ("worker", "seconds"), ("draw",))
    jobs: dict[int, dict[int, float]] = {}
    for row, (given, seconds) in enumerate(zip(columns["worker"], columns["seconds"], strict=True)):
        worker = whole(path, row, "worker", given)
        if not (math.isfinite(seconds) and seconds > 0):
            raise wrong(path, row, "seconds", seconds, "a finite number above zero")
        draw = whole(path, row, "draw", columns["draw"][row]) if "draw" in columns else row
        if draw in jobs.setdefault(worker, {}):
            raise wrong(path, row, "draw", draw, f"every job of worker {worker} once")
        jobs[worker][draw] = seconds
    if max(jobs) >= len(jobs):
        lacking = next(worker for worker in range(len(jobs)) if worker not in jobs)
        raise BadInput(
            f"{path} has no row for worker {lacking}, but one for worker {max(jobs)}; expected workers numbered from 0 "
            "without a gap, each with at least one row."
        )
    return [[seconds for _, seconds in sorted(jobs[worker].items())] for worker in range(len(jobs))]


def read_columns(path: Path, names: Sequence[str], more: Sequence[str] = ()) -> dict[str, list[float]]:
    """The columns of these names, and of those of ``more`` that are there; a cell that is empty is nan."""
    cells = _cells(path, (*names, *more))
    lacking = [name for name in names if name not in cells]
    if lacking:
        raise BadInput(f"{path} has no single column {lacking[0]!r}; expected the columns {', '.join(names)}, each once.")
    if not cells[names[0]]:
        raise BadInput(f"{path} has no rows; expected at least one below the names of the columns.")
    return {name: [_number(path, row, name, cell) for row, cell in enumerate(column)] for name, column in cells.items()}


def _cells(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise BadInput(f"{str(path)!r} is no file that can be read; expected the name of a .csv or .parquet file.")
    try:
        if kind == ".csv":  # as texts, since a guess at their type could not say which row is wrong
            texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            table = pa.csv.read_csv(path, pa.csv.ReadOptions(use_threads=False), convert_options=texts)
            known = table.column_names
        else:
            with path.open("rb") as file:
                held = pa.parquet.ParquetFile(file)
                known = held.schema_arrow.names
                table = held.read([name for name in names if known.count(name) == 1])
        return {name: table[name].to_pylist() for name in names if known.count(name) == 1}
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; expected a .csv or .parquet file.") from None
    except UnicodeError:
        raise BadInput(f"{path} holds bytes that are no UTF-8; save it as UTF-8, or as plain ASCII.") from None
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{path} is damaged or no {kind[1:]} file ({reason}).") from None


def _number(path: Path, row: int, name: str, cell: Any) -> float:
    if cell is None or cell == "":
        return math.nan
    try:
        if isinstance(cell, (bool, bytes)):
            raise TypeError
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        raise wrong(path, row, name, cell, "a number") from None


def whole(path: Path, row: int, name: str, value: float) -> int:
    """A cell that is to be a whole number, zero or more."""
    if not (0 <= value <= MOST and value == int(value)):
        raise wrong(path, row, name, value, f"a whole number, zero or more, {MOST:g} at most")
    return int(value)


def wrong(path: Path, row: int, name: str, value: object, expected: str) -> BadInput:
    """What is wrong with a cell; rows are counted from 1, the names of the columns not among them."""
    given = "empty" if value != value else shown(value)
    return BadInput(f"{path}, row {row + 1}: {name} is {given}; expected {expected}.")
