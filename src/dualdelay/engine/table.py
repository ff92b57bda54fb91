"""Tables of numbers, and what several runs in one show: the best settings, differences seed by seed, times to a target."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.errors import BadInput, nearest, plain_number, shown
from .metrics import metric_and_way
from .statistics import holm, interval, mean_and_std, rank_test, t_test

Column = npt.NDArray[Any]
Key = tuple[Any, ...]
Names = str | Sequence[str]

_SETTINGS = ("problem", "speeds")  # columns within which runs are comparable
_NAMING = (*_SETTINGS, "algorithm", "method", "lr", "seed")  # columns that name a run, unless others are said to
_SHOWN = 12  # rows that a table shows of itself
_ORDER = ("time", "version", "share")  # columns by which a run's rows follow one another
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}


class Table(dict[str, Column]):
    """Named columns of one length. ``table.time`` and ``table["time"]`` are numpy arrays; ``len`` counts rows.

    It is a dict of its columns, so pandas, polars and pyarrow take it as it is. A column that has the name of a method,
    such as "best", is only to be had as ``table["best"]``. ``names`` are the columns that name a row's run, and ``absent``
    names the runs that failed and have no row: where runs are compared they count as infinitely bad.
    """

    def __init__(self, columns: Any, names: Sequence[str] | None = None, absent: Sequence[Mapping[str, Any]] = ()) -> None:
        """``columns``: arrays or lists by name, a pandas or polars frame, or whatever else speaks Arrow."""
        super().__init__()
        if not isinstance(columns, Mapping) and hasattr(columns, "__arrow_c_stream__"):
            columns = _from_arrow(columns)
        if not isinstance(columns, Mapping):
            raise BadInput(f"the columns are {shown(columns)}; expected lists by name: {{'time': [0.0, 1.0]}}.")
        for name, column in columns.items():
            self[name] = column
        self.absent = [dict(run) for run in absent]
        self.names = tuple(name for name in _NAMING if name in self) if names is None else tuple(names)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Table:
        """A table from rows, with these columns even if there is no row."""
        rows = list(rows)
        return Table({name: np.array([row[name] for row in rows]) for name in names})

    def __getattr__(self, name: str) -> Column:
        if name not in self:
            raise AttributeError(f"no column {name!r}; there are {', '.join(self)}")
        return self[name]

    def __missing__(self, name: object) -> Column:
        raise KeyError(f"there is no column {name!r}; {nearest(str(name), self)}")

    def __setitem__(self, name: str, column: Any) -> None:
        array = np.asarray(column)
        if array.dtype == object and all(isinstance(value, str) for value in array):
            array = array.astype(str)
        if array.ndim != 1 or (self.keys() - {name} and len(array) != len(self)):
            wanted = f", {len(self)} of them" if self.keys() - {name} else ""
            raise BadInput(f"the column {name!r} has the shape {array.shape}; expected one value for each row{wanted}.")
        super().__setitem__(name, array)

    def __len__(self) -> int:
        return len(next(iter(self.values()), ()))

    def __eq__(self, other: object) -> bool:
        return self is other  # arrays have no one answer

    def __ne__(self, other: object) -> bool:
        return self is not other

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name."""
        return dict(self)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict of plain Python values per row."""
        lists = [column.tolist() for column in self.values()]
        return (dict(zip(self, row, strict=True)) for row in zip(*lists, strict=True))

    def _repr_html_(self) -> str:
        from ..analysis.html import table_html

        return table_html(self)

    def __repr__(self) -> str:
        """The first rows below the columns' names, and how many there are."""
        some = Table({name: column[:_SHOWN] for name, column in self.items()})
        lines = [list(self), *some._texts(4, str, str)] if self.keys() else []  # a table without rows is false
        right = [column.dtype.kind in "fiu" for column in self.values()]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.keys()))]
        texts = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
            )
            for line in lines
        ]
        rows = f"{len(self):,} row{'' if len(self) == 1 else 's'}"
        count = rows if len(self) <= _SHOWN else f"the first {_SHOWN} of {rows}"
        return "\n".join([*(text.rstrip() for text in texts), f"[{type(self).__name__}: {count}]"])

    def where(self, **values: Any) -> Table:
        """The rows in which these columns have these values, or one of several: ``where(method="dude", seed=[0, 1])``."""
        kept, absent = np.ones(len(self), dtype=bool), self.absent
        for name, value in values.items():
            wanted = list(value) if isinstance(value, (list, tuple, set, range, np.ndarray)) else [value]
            kept &= np.isin(self._column(name), wanted)
            absent = [run for run in absent if run.get(name) in wanted]
        return Table({name: column[kept] for name, column in self.items()}, self.names, absent)

    # --- what several runs show ---

    def ends(self, metric: str = "objective", by: Names | None = None, *, seed: str = "seed") -> Table:
        """The value of a metric at the end of each run, as ``best`` and ``paired`` count it, and whether it ``failed``."""
        names = self._run_names(by, seed)
        name = self._metric(metric)[0]
        _require_free(names, (name, "failed"))
        found = self._end_of_runs(names, metric)
        rows = [(*key, end.value, not end.sound) for key, end in found.items()]
        return Table.of((dict(zip((*names, name, "failed"), row, strict=True)) for row in rows), (*names, name, "failed"))

    def best(self, by: Names | None = None, over: Names = "lr", metric: str = "objective", *, seed: str = "seed") -> Table:
        """For each group of runs the value of ``over`` with the best mean at the end over the seeds.

        Arguments:
            by: the columns that name a group; by default problem, speeds, method and what else varies but for ``over``.
            over: the column, or columns, to choose the value of; () gives the mean of all runs in a group.
            metric: what to choose by; larger is better for accuracy and smaller for losses, of others say "max f1".
            seed: the column whose values are repetitions.

        A row has ``mean`` and ``std`` (over the runs), ``seeds`` (how many), ``failed`` (how many of them failed or did not
        end with a finite number; such a run counts as infinitely bad, or as accuracy 0) and ``edge``: "lowest" or "highest"
        if the chosen value is the first or last that was tried, so that the best may lie beyond it; "only" if no other was
        tried; "" if it lies between others. Of values that are equally good, as where all diverge, the smallest is chosen.
        """
        over = _listed(over)
        by = [name for name in self._naming(seed) if name not in over] if by is None else _listed(by)
        _require_free([*by, *over], _BEST)
        larger, rows = self._metric(metric)[1] == "max", []
        for group, tried in self._ends(by, over, metric, seed).items():
            at, ends = _chosen(tried, larger)
            mean, std = mean_and_std(_values(ends, sorted(ends)))
            failed = sum(not end.sound for end in ends.values())
            edge = _edge(over, at, list(tried))
            numbers = dict(zip(_BEST, (mean, std, len(ends), failed, edge), strict=True))
            rows.append(dict(zip((*by, *over), (*group, *at), strict=True)) | numbers)
        return Table.of(rows, (*by, *over, *(_BEST if over else _BEST[:-1])))

    def paired(
        self,
        against: Any,
        by: Names | None = None,
        metric: str = "objective",
        *,
        over: Names | None = None,
        level: float = 0.95,
        seed: str = "seed",
    ) -> Table:
        """How far every other group of runs is from one of them at the end, seed by seed: its value less the other's.

        Arguments:
            against: the group to compare with: a value of the last column in ``by``, or several as {"method": "dude"}.
            by: the columns that name a group, those first that only runs of the same setting are compared within; by
                default problem, speeds, and method (or algorithm, if ``against`` is one of its labels).
            metric: what is compared, as in ``best``.
            over: columns whose best value, by the same metric, is taken for each group; by default all others that vary.
            level: that of the interval.
            seed: the column that says which runs belong together.

        A row has ``difference`` (the mean), ``std``, ``low`` and ``high`` (Student's interval), ``n`` (seeds that both
        have), ``unpaired`` (seeds that only one has), ``wins`` and ``ties`` (seeds in which this group is better, or no
        one is), and p-values: ``p`` of the t test, ``p_holm`` the same corrected by Holm's rule for all rows of the table,
        ``p_rank`` of Wilcoxon's signed ranks. A run that failed or diverged is infinitely far away; then there is no
        interval and no t test, but wins and ranks count.

        With three to five seeds be careful. Interval and t test take differences to be normal, which so few cannot show.
        Ranks assume no such thing, but of n seeds that all agree they give 2 / 2**n: 0.25 for three and 0.0625 for five,
        never below 0.05 with fewer than six. And where ``over`` chooses by the same runs, the chosen ones look a little
        better than they are. With so few seeds the differences themselves, and wins, say the most.
        """
        by, over, who = self._compared(against, by, over, seed)
        _require_free([*by, *over], _PAIRED)
        if seed not in self:
            raise BadInput(f"there is no column {seed!r} to pair runs by; say which it is: seed='...'.")
        larger = self._metric(metric)[1] == "max"
        groups = {group: _chosen(tried, larger) for group, tried in self._ends(by, over, metric, seed).items()}
        ours = [k for k, name in enumerate(by) if name in who]
        places = {group: tuple(value for k, value in enumerate(group) if k not in ours) for group in groups}
        references = {places[group]: group for group in groups if [group[k] for k in ours] == [who[by[k]] for k in ours]}
        if not references:
            raise BadInput(f"against is {shown(against)}; {self._hint(who)}")
        rows = []
        for group, (at, ends) in groups.items():
            reference = references.get(places[group])
            if reference is None or reference == group:
                continue
            theirs = groups[reference][1]
            common = sorted(key for key in ends if key in theirs)
            with np.errstate(invalid="ignore"):
                differences = _values(ends, common) - _values(theirs, common)
            gains = differences if larger else -differences
            wins, ties = int((gains > 0).sum()), int((~(gains > 0) & ~(gains < 0)).sum())
            counts = len(common), len(ends.keys() ^ theirs.keys()), wins, ties
            tests = t_test(differences), math.nan, rank_test(differences)
            numbers = *mean_and_std(differences), *interval(differences, level), *counts, *tests
            rows.append(dict(zip((*by, *over, *_PAIRED), (*group, *at, *numbers), strict=True)))
        for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
            row["p_holm"] = corrected
        return Table.of(rows, (*by, *over, *_PAIRED))

    def time_to(self, target: float, metric: str = "objective", by: Names | None = None, *, seed: str = "seed") -> Table:
        """When each run first reaches a target: a row for each, with ``time``, ``version`` and whether it is ``reached``.

        ``by`` are the columns that name a run beside its seed; by default all that do. Where the target is not reached the
        time is infinite and the version -1. Between two evaluations nothing is known: the later one's time is taken.
        """
        target = plain_number(target)
        if not isinstance(target, (int, float)) or math.isnan(target):
            raise BadInput(f"target is {shown(target)}; expected a number, and then the metric: time_to(0.1, 'objective').")
        name, way = self._metric(metric)
        by = self._run_names(by, seed)
        at = [column for column in ("time", "version") if column in self]
        if not at:
            raise BadInput("the table has neither a column 'time' nor 'version', so nothing has a time.")
        _require_free(by, (*at, "reached"))
        values, rows = self._column(name), []
        with np.errstate(invalid="ignore"):
            good = values >= target if way == "max" else values <= target
        never = {"time": math.inf, "version": -1}
        for key, places in self.rows_of_runs(by).items():
            first = next((place for place in places if good[place]), None)
            found = {column: never[column] if first is None else self[column][first].item() for column in at}
            rows.append(dict(zip(by, key, strict=True)) | found | {"reached": first is not None})
        return Table.of(rows, (*by, *at, "reached"))

    def _column(self, name: str) -> Column:
        """A column, which there must be."""
        if name not in self:
            raise BadInput(f"there is no column {shown(name)}; {nearest(str(name), self)}")
        return self[name]

    def _naming(self, seed: str, *, labels: bool = False) -> list[str]:
        """The columns that name a group of runs: not their seed, nor a label that says the same as others."""
        doubled = {"algorithm"} if "method" in self.names and not labels else set()
        return [name for name in self.names if name != seed and name not in doubled]

    def _run_names(self, by: Names | None, seed: str) -> list[str]:
        """The columns that name a run, its seed last."""
        return [*(self._naming(seed, labels=True) if by is None else _listed(by)), *([seed] if seed in self else [])]

    def _compared(
        self, against: Any, by: Names | None, over: Names | None, seed: str
    ) -> tuple[list[str], list[str], dict[str, Any]]:
        """What groups are named by, what is chosen for each, and by column what the group to compare with has."""
        naming = self._naming(seed)
        if isinstance(against, Mapping):
            who = {str(name): value for name, value in against.items()}
        elif by is not None:
            who = {_listed(by)[-1]: against}
        else:
            labels = [name for name in ("method", "algorithm") if name in self]
            if not labels:
                raise BadInput(
                    "by is not given, and there is no column 'method'; say which columns name a group: by=[...]."
                )
            who = {next((name for name in labels if against in self._values_of(name)), labels[0]): against}
        for name in who:
            self._column(name)
        by = [*(name for name in naming if name in _SETTINGS and name not in who), *who] if by is None else _listed(by)
        missing = [name for name in who if name not in by]
        if missing or not by:
            raise BadInput(f"against has {missing}, which are not in by ({by}); give them there, too.")
        if over is None:
            over = [] if "algorithm" in by else [name for name in naming if name not in by and name != "algorithm"]
        return by, _listed(over), who

    def _values_of(self, name: str) -> list[Any]:
        """The values of a column, those of runs without rows among them."""
        found = [*self[name].tolist(), *(run[name] for run in self.absent if name in run)]
        return list(dict.fromkeys(found))

    def _hint(self, who: Mapping[str, Any]) -> str:
        """What the group to compare with can be."""
        for name, value in who.items():
            known = self._values_of(name)
            if value not in known:
                return f"expected a value of {name}; {nearest(str(value), map(str, known))}"
        return "there is no run of such a group."

    def rows_of_runs(self, by: Sequence[str]) -> dict[Key, list[int]]:
        """The rows of each run in their order, by the values that name it; none of one that failed.

        The order of the table's rows does not matter, but that runs come as they first appear in it.
        """
        columns = [self._column(name) for name in by]
        if not len(self) and not self.absent:
            raise BadInput("the table has no rows; there is nothing to compare.")
        runs: dict[Key, list[int]] = {}
        order = [self[name] for name in _ORDER if name in self]
        later = np.empty(len(self), dtype=np.int64)  # the place of each row in the order of time
        later[np.lexsort(order[::-1]) if order else np.arange(len(self))] = np.arange(len(self))
        for row, key in enumerate(zip(*map(_plain, columns), strict=True) if columns else [()] * len(self)):
            runs.setdefault(key, []).append(row)
        for key, rows in runs.items():
            rows.sort(key=later.__getitem__)
            self._require_one_run(dict(zip(by, key, strict=True)), rows, order)
        for run in self.absent:
            runs.setdefault(tuple(_value(run.get(name)) for name in by), [])
        return runs

    def _require_one_run(self, key: Mapping[str, Any], rows: Sequence[int], order: Sequence[Column]) -> None:
        """Refuse rows of several runs that would be taken for one."""
        left_out = [name for name in self.names if name not in key and len(set(_plain(self[name][list(rows)]))) > 1]
        for a, b in itertools.pairwise(rows):
            if left_out or all(_same(column[a], column[b]) for column in order):
                differ = left_out or [name for name, column in self.items() if not _same(column[a], column[b])]
                if differ:
                    among = ", ".join(f"{name}={value!r}" for name, value in key.items()) or "the table"
                    raise BadInput(
                        f"{among} has rows of several runs, which differ in {', '.join(differ[:4])}; name the runs by more "
                        "columns (by=, over=), or choose among them with where(...)."
                    )

    def _end_of_runs(self, names: Sequence[str], metric: str) -> dict[Key, _End]:
        """How each run ends, by what names it."""
        name, way = self._metric(metric)
        values, worst = self._column(name), 0.0 if name == "accuracy" else -math.inf if way == "max" else math.inf
        if values.dtype.kind not in "fiu" or (len(self) and not np.isfinite(values).any()):
            raise BadInput(f"the column {name!r} has no finite number; choose another metric.")
        measured, alive = np.isfinite(values), np.isfinite(self.get("objective", values))
        ends = {}
        for key, rows in self.rows_of_runs(names).items():
            sound = bool(rows) and bool(measured[rows[-1]] and alive[rows[-1]])
            if rows and alive[rows[-1]] and not measured[rows].any():  # of such a run it is never known
                ends[key] = _End(math.nan, True)
            else:
                ends[key] = _End(float(values[rows[-1]]) if sound else worst, sound)
        return ends

    def _ends(
        self, by: Sequence[str], over: Sequence[str], metric: str, seed: str
    ) -> dict[Key, dict[Key, dict[Any, _End]]]:
        """How each run ends: by group, by the values of ``over``, by seed."""
        ends: dict[Key, dict[Key, dict[Any, _End]]] = {}
        first, last = len(by), len(by) + len(over)
        for key, end in self._end_of_runs([*by, *over, *([seed] if seed in self else [])], metric).items():
            ends.setdefault(key[:first], {}).setdefault(key[first:last], {})[key[last:]] = end
        for group, tried in ends.items():
            seeds = {at: sorted(one[0] if one else "-" for one in some) for at, some in tried.items()}
            if len({tuple(some) for some in seeds.values()}) > 1:
                few, many = sorted(seeds, key=lambda at: (len(seeds[at]), seeds[at]))[:: len(seeds) - 1]
                raise BadInput(
                    f"{dict(zip(by, group, strict=True))} has other seeds with {dict(zip(over, few, strict=True))} "
                    f"({seeds[few]}) than with {dict(zip(over, many, strict=True))} ({seeds[many]}), so their means cannot "
                    f"be compared; choose those that all have: where({seed}=[...])."
                )
        return ends

    # --- for other programs and for papers ---

    def to_arrow(self) -> Any:
        """The columns as a ``pyarrow.Table``."""
        import pyarrow as pa

        try:
            return pa.table({name: pa.array(column) for name, column in self.items()})
        except pa.ArrowException as error:
            raise BadInput(f"a column has values of several kinds, which Arrow does not ({error}).") from None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_pandas(self) -> Any:
        """The columns as a ``pandas.DataFrame``; ``pd.DataFrame(table)`` is the same."""
        try:
            import pandas as pd
        except ImportError:
            raise BadInput("pandas is not installed: pip install pandas; or use to_arrow() or to_csv().") from None
        return pd.DataFrame(dict(self))

    def to_polars(self) -> Any:
        """The columns as a ``polars.DataFrame``; ``pl.DataFrame(table)`` is the same."""
        try:
            import polars as pl
        except ImportError:
            raise BadInput("polars is not installed: pip install polars; or use to_arrow() or to_csv().") from None
        return pl.DataFrame(dict(self))

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as comma-separated values, every number with all its digits; written into a file if one is named."""
        sink = io.StringIO()
        lines = csv.writer(sink, lineterminator="\n")
        lines.writerow(self)
        lines.writerows(map(_csv_value, row.values()) for row in self.rows())
        if path is not None:
            from ..storage.files import make_folder, write

            make_folder(Path(path).parent)
            write(Path(path), sink.getvalue().encode())
        return sink.getvalue()

    def _metric(self, metric: str, setting: str = "metric") -> tuple[str, str]:
        """The column of a metric and which way is good; refuses what is no column."""
        if not isinstance(metric, str):
            raise BadInput(f"{setting} is {shown(metric)}; expected the name of a column, such as 'objective' or 'max f1'.")
        self._column(metric.removeprefix("max ").removeprefix("min "))
        return metric_and_way(setting, metric)

    def to_markdown(self, *, digits: int = 4, bold: Names = ()) -> str:
        """The table in Markdown; ``bold``: columns whose best value is, such as "objective" or "min mean"."""
        rows, best = self._texts(digits, _markdown, _markdown_number), self._best_rows(bold)
        marks = ["---:" if column.dtype.kind in "fiu" else "---" for column in self.values()]
        lines = [[_markdown(name) for name in self], marks]
        lines += [[f"**{t}**" if (k, c) in best else t for c, t in enumerate(row)] for k, row in enumerate(rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_latex(self, *, digits: int = 4, bold: Names = (), caption: str = "", label: str = "") -> str:
        """The table in LaTeX, for the package booktabs; ``bold`` as in ``to_markdown``, a caption makes it a float."""
        rows, best = self._texts(digits, _latex, _latex_number), self._best_rows(bold)
        lines = [[_latex(name) for name in self]]
        lines += [[rf"\textbf{{{t}}}" if (k, c) in best else t for c, t in enumerate(row)] for k, row in enumerate(rows)]
        head, *body = [f"{' & '.join(line)} \\\\" for line in lines]
        kinds = "".join("r" if column.dtype.kind in "fiu" else "l" for column in self.values())
        text = "\n".join([rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
        text += "\n\\end{tabular}\n"
        if not caption and not label:
            return text
        about = (rf"\caption{{{_latex(caption)}}}" + "\n" if caption else "") + (
            rf"\label{{{label}}}" + "\n" if label else ""
        )
        return f"\\begin{{table}}\n\\centering\n{about}{text}\\end{{table}}\n"

    def _texts(self, digits: int, text: Callable[[str], str], number: Callable[[str], str]) -> list[list[str]]:
        """Every row as texts, its numbers with so many digits."""
        return [
            [number(f"{value:.{digits}g}") if isinstance(value, float) else text(str(value)) for value in row.values()]
            for row in self.rows()
        ]

    def _best_rows(self, bold: Names) -> set[tuple[int, int]]:
        """The rows and columns with the best value of these columns."""
        found = set()
        for text in _listed(bold):
            name, way = self._metric(text, "bold")
            if self[name].dtype.kind not in "bfiu":
                raise BadInput(f"bold is {text!r}, and the column {name!r} has no numbers; choose one that has.")
            values = self[name].astype(float)
            finite = values[np.isfinite(values)]
            if len(finite):
                best = finite.max() if way == "max" else finite.min()
                found |= {(int(row), list(self).index(name)) for row in np.flatnonzero(values == best)}
        return found

    def plot(self, path: str | Path | None = None, **options: Any) -> Any:
        """The figure of the table's curves, written into a file if one is named; the options are ``figures.drawn``'s."""
        from ..analysis.figures import plotted

        return plotted(self, path, **options)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the table as one HTML page that needs no network: curves with bands, best settings, paired differences."""
        from ..analysis.report import write_report

        return write_report([self], path)


class _End(NamedTuple):
    """How a run ends."""

    value: float
    sound: bool  # whether it is a finite number that the run came to


_BEST = ("mean", "std", "seeds", "failed", "edge")
_PAIRED = ("difference", "std", "low", "high", "n", "unpaired", "wins", "ties", "p", "p_holm", "p_rank")


def _from_arrow(frame: Any) -> dict[str, Column]:
    import pyarrow as pa

    table = pa.table(frame)
    return {name: table[name].to_numpy() for name in table.column_names}


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _value(value: Any) -> Any:
    """A plain value; all that are no number are the same one, so that groups can be named by them."""
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _plain(column: Column) -> list[Any]:
    return [_value(value) for value in column.tolist()]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, or both no number."""
    return bool(one == other) or (one != one and other != other)


def _require_free(names: Sequence[str], taken: Sequence[str]) -> None:
    """Refuse columns that have the name of a column of the result."""
    for name in names:
        if name in taken:
            raise BadInput(
                f"the column {name!r} has the name of a column of the result; give the table another name for it."
            )


def _values(ends: Mapping[Any, _End], keys: Iterable[Any]) -> npt.NDArray[np.float64]:
    return np.array([ends[key].value for key in keys], dtype=np.float64)


def _chosen(tried: Mapping[Key, dict[Any, _End]], larger: bool) -> tuple[Key, dict[Any, _End]]:
    """What was tried with the best mean; of those equally good the smallest."""
    mean = {at: mean_and_std(_values(ends, sorted(ends)))[0] for at, ends in tried.items()}
    worth = {at: math.inf if math.isnan(value) else -value if larger else value for at, value in mean.items()}
    first = min(tried, key=lambda at: (worth[at], *map(_rank, at)))
    return first, tried[first]


def _rank(value: Any) -> tuple[int, Any]:
    """Something that values of any kind can be sorted by: numbers, texts, and what is missing."""
    if isinstance(value, (int, float)):
        return (2, 0.0) if math.isnan(value) else (0, value)
    return 1, str(value)


def _edge(over: Sequence[str], at: Key, tried: Sequence[Key]) -> str:
    """Whether what was chosen lies on an edge of what was tried; of several columns each that does is named."""
    parts = {}
    for k, name in enumerate(over):
        known = sorted({key[k] for key in tried}, key=_rank)
        if len(known) == 1:
            parts[name] = "only"
        elif isinstance(at[k], (int, float)) and at[k] in (known[0], known[-1]):
            parts[name] = "lowest" if at[k] == known[0] else "highest"
    if len(over) == 1:
        return parts.get(over[0], "")
    return ", ".join(f"{name} {part}" for name, part in parts.items())


def _csv_value(value: Any) -> Any:
    """A value as pandas and polars both read it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _latex(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in " ".join(text.split()))


def _latex_number(text: str) -> str:
    text, _, power = text.partition("e")
    known = {"nan": "--", "inf": r"$\infty$", "-inf": r"$-\infty$"}
    return rf"${text} \times 10^{{{int(power)}}}$" if power else known.get(text, f"${text}$" if text[0] == "-" else text)


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown_number(text: str) -> str:
    return {"nan": "-", "inf": "∞", "-inf": "-∞"}.get(text, text)
