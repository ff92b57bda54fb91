"""Tables: the best settings, differences seed by seed, times to a target, and what other programs make of a table."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dualdelay as dd
from dualdelay.engine.statistics import holm, interval, rank_test, t_test

LRS = (0.1, 0.2, 0.4)
ENDS = {  # by method and step, the objective at the end for each seed
    ("dude", 0.1): (1.0, 1.1, 1.2),
    ("dude", 0.2): (0.5, 0.7, 0.9),
    ("dude", 0.4): (0.6, 0.8, 1.0),
    ("vanilla", 0.1): (0.9, 1.0, 0.8),
    ("vanilla", 0.2): (2.0, 2.0, 2.0),
    ("vanilla", 0.4): (0.1, 0.1, math.nan),
}
finite = st.floats(-1e3, 1e3).map(lambda value: round(value, 3))


def table_of(ends: Any = ENDS, order: Any = None, **more: Any) -> dd.Table:
    """Two evaluations of every run, in any order: at 3 in the beginning, then at its end."""
    rows = []
    for (method, lr), values in ends.items():
        for seed, end in enumerate(values):
            place = {"method": method, "lr": lr, "seed": seed}
            rows += [{**place, "time": 0.0, "version": 0, "objective": 3.0, "accuracy": 0.1}]
            rows += [{**place, "time": 5.0, "version": 9, "objective": end, "accuracy": 1 - end / 4}]
    rows = rows if order is None else [rows[k] for k in order]
    return dd.Table({name: [row[name] for row in rows] for name in rows[0]} | more)


def rows(table: dd.Table) -> list[str]:
    """The rows as texts, in an order of their own."""
    return sorted(map(str, table.rows()))


# --- the best ---


def test_the_best_step_of_each_method_is_that_with_the_lowest_mean_and_says_if_it_is_on_an_edge() -> None:
    dude, vanilla = table_of().best().rows()
    assert dude["method"] == "dude" and (dude["lr"], dude["edge"], dude["seeds"], dude["failed"]) == (0.2, "", 3, 0)
    assert dude["mean"] == pytest.approx(0.7) and dude["std"] == pytest.approx(0.2)  # 0.5, 0.7, 0.9
    # two seeds at 0.1 do not help a step at which the third diverges
    assert (vanilla["lr"], vanilla["edge"], vanilla["failed"]) == (0.1, "lowest", 0)


def test_the_best_is_the_largest_where_larger_is_better() -> None:
    assert table_of().best(metric="accuracy").lr.tolist() == [0.2, 0.1]
    table = table_of()
    table["f1"] = -table.objective
    assert table.best(metric="max f1").lr.tolist() == [0.2, 0.1]
    assert table.best(metric="min f1").lr.tolist() == [0.1, 0.2]
    with pytest.raises(dd.BadInput, match="say which way is good: 'max f1' or 'min f1'"):
        table.best(metric="f1")


@pytest.mark.parametrize(("lr", "edge"), [(0.1, "lowest"), (0.2, ""), (0.4, "highest")])
def test_an_edge_is_the_first_or_last_value_tried(lr: float, edge: str) -> None:
    ends = {("dude", step): (1.0 + (step != lr),) for step in (0.4, 0.1, 0.2)}
    assert table_of(ends).best().edge.tolist() == [edge]
    assert table_of({("dude", lr): (1.0, 2.0)}).best().edge.tolist() == ["only"]


def test_where_all_runs_diverge_the_smallest_value_is_chosen_and_the_row_says_so() -> None:
    (row,) = (
        table_of({("dude", lr): (math.nan, math.inf) for lr in (0.4, 0.2)} | {("sync", 0.1): (1.0, 1.0)})
        .where(method="dude")
        .best()
        .rows()
    )
    assert (row["lr"], row["edge"], row["seeds"], row["failed"]) == (0.2, "lowest", 2, 2)
    assert row["mean"] == math.inf and math.isnan(row["std"])


def test_the_end_of_a_run_is_its_latest_row_and_of_those_at_one_time_the_newest_on_most_data() -> None:
    table = dd.Table(
        {"time": [0, 5, 5, 5], "version": [0, 8, 9, 9], "share": [1, 1, 0.1, 0.5], "objective": [4, 3, 2, 1.0]}
    )
    assert table.ends().objective.tolist() == [1.0]


def test_several_settings_can_be_chosen_at_once() -> None:
    names = ["method", "lr", "wait_for", "seed"]
    grid = [("dude", lr, c, seed, (lr - 0.2) ** 2 + c) for lr in LRS for c in (1, 2) for seed in (0, 1)]
    table = dd.Table(dict(zip([*names, "objective"], zip(*grid, strict=True), strict=True)), names)
    assert table.best(over=["lr", "wait_for"]).edge.tolist() == ["wait_for lowest"]
    assert table.best().wait_for.tolist() == [1, 2], "what else varies makes a group"
    with pytest.raises(dd.BadInput, match=r"rows of several runs, which differ in wait_for; name the runs by more columns"):
        table.best(by="method")
    means = table.best(by=["method", "lr", "wait_for"], over=())
    assert list(means) == ["method", "lr", "wait_for", "mean", "std", "seeds", "failed"] and len(means) == 6


# --- seed by seed ---


def test_differences_are_taken_seed_by_seed_at_each_method_s_best_step() -> None:
    (row,) = table_of().paired(against="dude").rows()  # 0.9, 1.0, 0.8 less 0.5, 0.7, 0.9
    differences = np.array([0.4, 0.3, -0.1])
    assert (row["method"], row["lr"], row["n"], row["wins"], row["ties"], row["unpaired"]) == ("vanilla", 0.1, 3, 1, 0, 0)
    assert row["difference"] == pytest.approx(0.2) and row["std"] == pytest.approx(differences.std(ddof=1))
    test = stats.ttest_rel([0.9, 1.0, 0.8], [0.5, 0.7, 0.9])
    assert (row["low"], row["high"]) == pytest.approx(tuple(test.confidence_interval()))
    assert row["p"] == row["p_holm"] == pytest.approx(test.pvalue)
    assert row["p_rank"] == stats.wilcoxon(differences).pvalue == 0.5
    assert table_of().paired("dude", metric="accuracy").wins.tolist() == [1], "the same seed wins whichever way is good"


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=6), st.sampled_from(["objective", "accuracy"]))
@settings(max_examples=40, deadline=None)
def test_a_difference_seen_from_the_other_side_has_the_other_sign(pairs: Any, metric: str) -> None:
    mine, theirs = zip(*pairs, strict=True)
    table = table_of({("a", 0.1): mine, ("b", 0.1): theirs})
    (one,), (other,) = table.paired("a", metric=metric).rows(), table.paired("b", metric=metric).rows()
    same = {"std", "p", "p_holm", "p_rank", "n", "ties", "unpaired"}
    assert one["difference"] == -other["difference"] and one["wins"] + other["wins"] + one["ties"] == len(pairs)
    assert (one["low"], one["high"]) == pytest.approx((-other["high"], -other["low"]), nan_ok=True)
    assert {name: one[name] for name in same} == pytest.approx({name: other[name] for name in same}, nan_ok=True)


@given(st.randoms())
@settings(max_examples=15, deadline=None)
def test_the_order_of_the_rows_does_not_matter(random: Any) -> None:
    order = random.sample(range(36), 36)
    one, other = table_of(), table_of(order=order)
    for call in (lambda t: t.best(), lambda t: t.paired("dude"), lambda t: t.time_to(1.0), lambda t: t.ends("accuracy")):
        assert rows(call(one)) == rows(call(other))


def test_a_run_that_failed_is_infinitely_bad_but_is_counted() -> None:
    table = table_of()
    names = {"method": "dude", "lr": 0.2, "seed": 3}
    others = [{**names, "lr": lr} for lr in (0.1, 0.4)]
    (best,) = dd.Table(table, absent=[names, *others]).where(method="dude").best().rows()
    assert (best["lr"], best["mean"], best["seeds"], best["failed"]) == (0.1, math.inf, 4, 1)
    everyone = [{"method": method, "lr": lr, "seed": 3} for method in ("dude", "vanilla") for lr in LRS]
    (row,) = dd.Table(table, absent=everyone[:3]).paired("dude").rows()
    assert (row["n"], row["unpaired"], row["wins"]) == (3, 1, 3), "of dude all steps failed once: the smallest is chosen"
    (row,) = dd.Table(table, absent=everyone).paired("dude").rows()
    assert (row["n"], row["ties"]) == (4, 1), "where both failed neither is ahead"
    assert math.isnan(row["difference"]) and math.isnan(row["p"]) and not math.isnan(row["p_rank"])


def test_a_sweep_knows_its_methods_settings_and_failures() -> None:
    grid = {"algorithm": [dd.DuDe(0.1), dd.DuDe(0.1, wait_for=2), dd.VanillaASGD(0.1)], "lr": [0.05, 1e200], "seed": [0, 1]}
    problem, speeds = dd.Quadratic([[0.0], [6.0], [12.0]], noise=0.5), dd.TruncatedNormalSpeeds(3, std=1.0)
    sweep = dd.sweep(grid, problem, speeds, updates=60)
    assert list(sweep)[:5] == ["algorithm", "seed", "method", "lr", "wait_for"] and len(sweep.failed) == 6
    assert set(zip(sweep.method, sweep.wait_for.astype(str), strict=True)) == {
        *(("dude", "1.0"), ("dude", "2.0"), ("vanilla", "nan"))  # vanilla has no such setting
    }
    best = sweep.best()
    assert list(best)[:3] == ["method", "wait_for", "lr"] and best.lr.tolist() == [0.05] * 3
    assert best.edge.tolist() == ["lowest"] * 3, "the other value was tried, too, although all of its runs failed"
    (row,) = sweep.paired(against="dude").rows()
    assert (row["method"], row["lr"], row["n"]) == ("vanilla", 0.05, 2)
    apart = sweep.paired(against="dude[lr=0.05]")
    assert set(apart.algorithm) == {str(point["algorithm"]) for point in sweep.points} - {"dude[lr=0.05]"}
    assert np.isinf(apart.difference).sum() == 3 and next(iter(apart)) == "algorithm"
    assert (~sweep.time_to(1e9).reached).sum() == 6, "those that failed reach nothing"


def test_methods_with_names_of_the_user_s_own_are_methods_of_those_names() -> None:
    mine = {"mine": dd.DuDe(0.1), "eager": dd.DuDe(0.2, wait_for=2)}
    with pytest.warns(UserWarning, match="the same for all seeds"):
        sweep = dd.compare(mine, dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 2.0]), seeds=[0, 1], updates=9)
    assert set(sweep.method) == {"mine", "eager"} and "wait_for" not in sweep
    (row,) = sweep.paired("mine").rows()
    assert row["method"] == "eager" and math.isnan(row["p"]), "where nothing varies with the seed there is no test"


@pytest.mark.parametrize("count", range(1, 8))
def test_the_rank_test_is_exact_and_cannot_be_small_with_few_seeds(count: int) -> None:
    agreed = np.arange(1.0, count + 1)
    assert rank_test(agreed) == pytest.approx(min(1.0, 2 / 2**count))
    assert rank_test(np.full(count, math.inf)) == pytest.approx(min(1.0, 2 / 2**count)), "tied ranks are exact, too"
    mixed = agreed * np.where(np.arange(count) % 3, 1, -1)
    assert rank_test(mixed) == pytest.approx(stats.wilcoxon(mixed).pvalue)
    totals = [abs(np.sum(signs)) for signs in itertools.product(*[(-1, 1)] * count)]
    ties = np.where(np.arange(count) % 3, 1.0, -1.0)
    assert rank_test(ties) == pytest.approx(np.mean([total >= abs(ties.sum()) for total in totals]))


def test_intervals_and_tests_are_scipy_s() -> None:
    values = np.array([0.3, -0.1, 0.7, 0.2])
    expected = stats.ttest_1samp(values, 0.0)
    assert t_test(values) == pytest.approx(expected.pvalue)
    for level in (0.5, 0.95):
        assert interval(values, level) == pytest.approx(tuple(expected.confidence_interval(level)))
    assert all(math.isnan(t_test(np.array(few))) for few in ([], [1.0], [1.0, 1.0], [1.0, math.inf]))
    p = [0.01, math.nan, 0.04, 0.03, 0.9]
    assert holm(p) == pytest.approx([0.04, math.nan, 0.09, 0.09, 0.9], nan_ok=True)  # 4, 3, 2 and 1 times; never falling


# --- the time to a target ---


@given(st.lists(finite, min_size=1, max_size=8), finite, finite)
@settings(max_examples=40, deadline=None)
def test_a_harder_target_is_never_reached_earlier(values: Any, one: float, other: float) -> None:
    low, high = sorted((one, other))
    steps = np.arange(len(values))
    table = dd.Table({"time": steps * 0.5, "version": steps, "objective": values, "accuracy": values})
    assert table.time_to(low).time >= table.time_to(high).time
    assert table.time_to(low, "accuracy").time <= table.time_to(high, "accuracy").time
    (row,) = table.time_to(low).rows()
    assert row["reached"] == (min(values) <= low) == math.isfinite(row["time"]) == (row["version"] >= 0)
    if row["reached"]:
        assert values[row["version"]] <= low < min([math.inf, *values[: row["version"]]])


def test_every_run_has_a_row_that_says_when_it_reached_the_target() -> None:
    table = table_of().time_to(1.0)
    assert list(table) == ["method", "lr", "seed", "time", "version", "reached"] and len(table) == 18
    assert table.where(method="dude", lr=0.1).time.tolist() == [5.0, math.inf, math.inf]
    assert table.where(method="dude", lr=0.1).version.tolist() == [9, -1, -1]


def test_a_table_shows_its_first_rows_and_how_many_there_are() -> None:
    table = dd.Table({"name": ["a", "longer"], "value": [1.25, math.nan]})
    assert repr(table).splitlines() == ["name    value", "a        1.25", "longer    nan", "[Table: 2 rows]"]
    long = repr(dd.Table({"k": range(40)})).splitlines()
    assert long[-2:] == ["11", "[Table: the first 12 of 40 rows]"] and len(long) == 14
    assert repr(dd.Table({})) == "[Table: 0 rows]"
    assert repr(table.where(value=7)).splitlines() == ["name  value", "[Table: 0 rows]"]
    assert repr(table.where(name="a")).splitlines()[-1] == "[Table: 1 row]"


# --- what cannot be ---


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.best(by="metod"), "there is no column 'metod'; did you mean 'method'"),
        (lambda t: t.best(over="lrs"), "there is no column 'lrs'; did you mean 'lr'"),
        (lambda t: t.best(metric="pooled_loss"), "there is no column 'pooled_loss'"),
        (lambda t: t.best(metric="objectiv"), "there is no column 'objectiv'; did you mean 'objective'"),
        (lambda t: t.best(metric=3), "metric is 3; expected the name of a column"),
        (lambda t: t.time_to("objective", 0.1), "target is 'objective'; expected a number, and then the metric"),
        (lambda t: t.time_to(math.nan), "target is nan; expected a number, and then the metric"),
        (lambda t: t.time_to(None), "target is None; expected a number, and then the metric"),
        (lambda t: t.to_latex(bold="nope"), "there is no column 'nope'"),
        (lambda t: t.to_markdown(bold=["objective", "min nope"]), "there is no column 'nope'"),
        (lambda t: t.to_latex(bold="lr"), "bold is 'lr'; say which way is good"),
        (lambda t: t.to_markdown(bold="max method"), "the column 'method' has no numbers"),
        (lambda t: t.paired("dud"), "against is 'dud'; expected a value of method; did you mean 'dude'"),
        (lambda t: t.paired({"metod": "dude"}), "there is no column 'metod'"),
        (lambda t: t.paired({"lr": 0.1}, by="method"), r"against has \['lr'\], which are not in by"),
        (lambda t: t.paired("dude", seed="sed"), "there is no column 'sed' to pair runs by"),
        (lambda t: t.where(metod="dude"), "there is no column 'metod'"),
        (lambda t: t.where(method="none").best(), "the table has no rows"),
        (lambda t: t.where(seed=[0]).best(by="method", over=()), "rows of several runs, which differ in lr"),
        (
            lambda t: dd.Table({k: v[:-2] for k, v in t.items()}).best(),
            r"has other seeds with {'lr': 0.4} \(\[0, 1\]\) than",
        ),
        (lambda t: dd.Table({"objective": [1.0, 2.0]}).best(by=[], over=[]), "the table has rows of several runs"),
        (lambda t: dd.Table({"who": ["a"], "objective": [1.0]}).paired("a"), "say which columns name a group"),
        (
            lambda t: dd.Table({"mean": ["a"], "objective": [1.0]}).best("mean", ()),
            "'mean' has the name of a column of the",
        ),
        (lambda t: dd.Table({"objective": [1.0]}).time_to(1.0), "neither a column 'time' nor 'version'"),
        (lambda t: dd.Table({"a": [1.0], "accuracy": [math.nan]}).best("a", (), "accuracy"), "has no finite number"),
        (
            lambda t: dd.Table({"a": [1], "b": [1, 2]}),
            r"the column 'b' has the shape \(2,\); expected one value for each row, 1",
        ),
        (lambda t: dd.Table([1, 2]), r"the columns are \[1, 2\]; expected lists by name"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(call: Any, words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        call(table_of())


def test_a_table_of_a_user_s_own_needs_only_to_say_its_columns() -> None:
    mine = pd.DataFrame(
        {"who": ["a", "a", "b", "b"], "width": [1, 1, 1, 1], "try": [0, 1, 0, 1], "f1": [0.5, 0.6, 0.7, 0.9]}
    )
    table = dd.Table(mine)
    assert table.best(by="who", over="width", metric="max f1", seed="try")["mean"] == pytest.approx([0.55, 0.8])
    (row,) = table.paired("a", by="who", metric="max f1", seed="try").rows()
    assert (row["who"], row["wins"]) == ("b", 2) and row["difference"] == pytest.approx(0.25)
    assert dd.Table(pl.DataFrame(mine.to_dict("list"))).columns.keys() == table.columns.keys()


# --- other programs ---


def mixed() -> dd.Table:
    columns = {"name": ["a,b", 'say "x"', "é|_%"], "count": [1, -2, 3], "on": [True, False, True]}
    return dd.Table(columns | {"value": [0.1 + 0.2, -math.inf, math.nan], "small": np.array([1e-300, 2.2e-308, 1e22])})


@pytest.mark.parametrize(
    "there", [pd.DataFrame, pl.DataFrame, pa.table, dd.Table.to_pandas, dd.Table.to_polars, dd.Table.to_arrow]
)
def test_frames_have_the_columns_with_their_values_and_kinds(there: Any) -> None:
    table = mixed()
    for given_table in (table, table.where(count=7)):  # without rows the columns are still there
        again = dd.Table(there(given_table))
        assert {name: column.dtype.kind for name, column in again.items() if len(again)} == {
            name: column.dtype.kind for name, column in given_table.items() if len(again)
        }
        assert list(again) == list(given_table)
        assert str(list(again.rows())) == str(list(given_table.rows()))


def test_anything_that_speaks_arrow_reads_a_table() -> None:
    table = mixed()
    assert str(pa.RecordBatchReader.from_stream(table).read_all()) == str(table.to_arrow())
    assert str(pl.from_arrow(pa.table(table)).rows()) == str([tuple(row.values()) for row in table.rows()])


def test_comma_separated_values_come_back_as_they_were(tmp_path: Path) -> None:
    table = mixed()
    path = tmp_path / "new" / "table.csv"
    text = table.to_csv(path)
    assert path.read_text() == text
    for read in (pd.read_csv(io.StringIO(text)), pl.read_csv(text.encode())):
        assert str(list(dd.Table(read).rows())) == str(list(table.rows()))


def test_a_table_that_cannot_be_written_says_so_and_to_choose_another_place() -> None:
    table = table_of({("dude", 0.1): ENDS["dude", 0.1]})
    for call in (lambda: table.to_csv("/proc/x.csv"), lambda: table.plot("/proc/x.png")):
        with pytest.raises(dd.RunFailed, match=r"could not write /proc/x\.\w+ \(.*\)\. Choose another place") as error:
            call()
        assert "resume" not in str(error.value)


def test_a_table_can_be_copied_and_sent() -> None:
    table = dd.Table(table_of(), absent=[{"method": "dude", "lr": 0.1, "seed": 9}])
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert other.absent == table.absent and other.names == table.names
        assert str(list(other.rows())) == str(list(table.rows())) and other.lr is not table.lr
    assert table == table and table != copy.copy(table)
    table["gap"] = table.objective - 0.1
    assert table.gap[0] == pytest.approx(2.9)
    with pytest.raises(AttributeError, match="no column 'gape'; there are method, lr"):
        print(table.gape)
    with pytest.raises(KeyError, match="there is no column 'gape'; did you mean 'gap'"):
        table["gape"]


def test_markdown_shows_the_best_value_in_bold() -> None:
    text = mixed().to_markdown(digits=2, bold="min value")
    assert text.splitlines()[:2] == ["| name | count | on | value | small |", "| --- | ---: | --- | ---: | ---: |"]
    assert r"| é\|_% | 3 | True | - | 1e+22 |" in text and "| **0.3** |" in text and "| -∞ |" in text


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=12), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_latex_is_balanced_and_escaped_whatever_the_texts(texts: list[str]) -> None:
    numbers = np.linspace(-1e-9, 1e9, len(texts))
    table = dd.Table({"a_b": texts, "x": numbers}).to_latex(bold="max x", caption=texts[0] or "c", label="tab:x")
    lines = table.splitlines()
    bare = re.sub(r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\\[&%$#_{}]", "", table)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0 and not set("%#~") & set(bare)
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert len(body) == len(texts)
    for line in body:
        assert line.endswith(r" \\") and len(re.findall(r"(?<!\\)&", re.sub(r"\\textbackslash\{\}", "", line))) == 1
    begun, ended = re.findall(r"\\begin\{(\w+)\}", bare), re.findall(r"\\end\{(\w+)\}", bare)
    assert begun == ended[::-1] == ["table", "tabular"]
    assert sum(r"\textbf{" in line for line in body) == (2 if len(set(numbers)) < len(numbers) else 1)
