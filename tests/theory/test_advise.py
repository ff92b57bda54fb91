"""dualdelay advise: the page's numbers against recomputation, which method it names and why, and what it cannot measure."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import dualdelay as dd
from dualdelay.analysis.printing import print_advice
from dualdelay.cli import main
from dualdelay.cli.advise import _Case, _ticking, _tried
from dualdelay.runs.names import parse
from dualdelay.theory.advice import IDLE, KAPPA, advise, rows_for
from dualdelay.theory.constants import constants
from dualdelay.theory.staleness import delays, measured, per_job, weighted_median, whole_jobs
from dualdelay.theory.theorem import horizon, step_size
from dualdelay.theory.tries import Tries, Try, round_to, try_steps

QUADRATIC = "quadratic[centers=[[0.0],[6.0],[12.0]],noise=0.1]"
UNEVEN = "fixed[times=[1,2,4]]"


def call(*arguments):
    try:
        main(("advise", *arguments))
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def advised(inside, capsys):
    """What the command prints with --json, which must be strict JSON on one line, and as ``page`` the rest."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    def values(*arguments, code=0):
        assert call(*arguments, "--json") == code
        done = capsys.readouterr()
        assert len(done.out.strip().splitlines()) == 1
        return {**json.loads(done.out, parse_constant=refuse), "page": done.err}

    return values


ARRIVALS = 3_000


def clusters(n, apart, curvature=1.0, noise=0.1):
    """Workers whose minima lie so far from ten, on either side of it; the start is at zero."""
    return dd.Quadratic([[10.0 + apart * (-1) ** i] for i in range(n)], curvatures=[curvature] * n, noise=noise)


# ---------------------------------------------------------------------------------------------------- what is advised


def test_every_number_is_the_one_that_was_measured():
    problem, speeds = parse("problem", QUADRATIC), dd.FixedSpeeds([1.0, 2.0, 4.0])
    advice = advise(problem, speeds, time=100.0)
    assert advice.staleness == tuple(delays(speeds, c, most=ARRIVALS) for c in (1, 2, 3))
    assert advice.constants == constants(problem, problem.start(0))
    assert advice.wait_for == max(row.wait_for for row in advice.staleness if row.idle_share <= IDLE) == 2
    chosen = advice.chosen
    assert advice.delay == chosen.tau_median, "all curvatures are one"
    assert advice.lr == advice.lr_by_rule == round_to(KAPPA / chosen.tau_median)
    assert advice.lr_async == round_to(KAPPA / advice.staleness[0].tau_median)
    assert advice.lr_vanilla == round_to(KAPPA / advice.staleness[0].arrival_avg)
    assert advice.updates == round(100.0 * chosen.updates_per_second)
    known = (1.0, 18.0, problem.noise**2, chosen.tau_max, 3)  # L, the gap 1/2 6^2, sigma^2 in one dimension
    assert advice.theory_lr == pytest.approx(step_size(*known, advice.updates))
    assert advice.horizon == pytest.approx(horizon(*known))
    assert advice.smaller == advice.lr / advice.theory_lr
    assert advice.even == advice.staleness[2].arrivals_per_second / advice.staleness[0].arrivals_per_second
    shares = advice.staleness[0].shares
    # zeta is 6, 0, 6 everywhere, and the gradient is largest at the start, where it is 6
    assert advice.pull == pytest.approx(math.hypot(shares[0] - 1 / 3, shares[2] - 1 / 3))
    assert not advice.missing and not advice.notes


@pytest.mark.parametrize("n", [1, 2, 6, 7, 10, 30, 100])
def test_the_rows_end_with_all_workers(n):
    rows = rows_for(n)
    assert rows == sorted(set(rows)) and rows[0] == 1 and rows[-1] == n and len(rows) <= 11
    assert n > 6 or rows == list(range(1, n + 1))


def test_nearly_equal_speeds_call_for_synchronous_sgd():
    advice = advise(clusters(4, 50.0), dd.FixedSpeeds([1.0, 1.1, 1.05, 1.0]))
    assert (advice.method, advice.wait_for, advice.lr) == ("sync", 4, KAPPA)
    assert advice.even > 0.9 and f"{advice.even:.0%}" in advice.reasons[0]
    assert advise(clusters(1, 5.0), dd.FixedSpeeds([3.0])).method == "sync", "one worker waits for nobody"


def test_homogeneous_data_call_for_vanilla_and_heterogeneous_data_for_dude():
    speeds = dd.FixedSpeeds([1.0, 3.0, 7.0, 9.0])
    near, far = advise(clusters(4, 0.2), speeds), advise(clusters(4, 20.0), speeds)
    assert (near.method, near.wait_for, near.lr) == ("vanilla", 1, near.lr_vanilla)
    assert near.delay == near.staleness[0].arrival_avg == pytest.approx(4, rel=0.05), "vanilla's own delay, not DuDe's"
    assert far.method == "dude" and far.pull > 0.1 > near.pull
    assert f"{far.pull:.2g}" in " ".join(far.reasons) and f"{near.pull:.2g}" in " ".join(near.reasons)
    assert near.even == far.even < 0.8


def test_heterogeneity_that_shows_only_later_counts():
    # at zero all workers' gradients are alike; their solutions are not
    problem = dd.problems.Logistic(workers=10, heterogeneity=3.0, seed=1)
    advice = advise(problem, dd.TruncatedNormalSpeeds(10, std=5.0, seed=1), seed=1)
    first, later = (sum(zeta.value for zeta in at.heterogeneity) for at in (advice.constants, advice.later))
    assert later > 10 * first
    assert advice.method == "dude" and advice.pull > 0.1


def test_a_large_smoothness_divides_the_step():
    speeds = dd.FixedSpeeds([1.0, 2.0, 4.0, 4.0])
    steep, flat = advise(clusters(4, 20.0, 8.0), speeds), advise(clusters(4, 20.0, 0.1), speeds)
    assert steep.lr == round_to(KAPPA / (8.0 * steep.chosen.tau_median))
    assert flat.lr == round_to(KAPPA / flat.chosen.tau_median), "a small one does not lengthen it"


@pytest.fixture(autouse=True)
def few_arrivals(monkeypatch):
    """Delays from short simulations: a straggler's are then too short, but the median does not depend on them."""
    monkeypatch.setattr("dualdelay.theory.advice._ARRIVALS", ARRIVALS)


@pytest.mark.parametrize("slower", [10.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("curvature", [pytest.param(1.0, marks=pytest.mark.slow), 3.0, 30.0])
def test_the_step_suits_a_straggler(slower, curvature):
    """Half of the curvature decides: one slow worker does not shorten the step unless most of the curvature is its own."""
    curvatures, centers = [1.0] * 9 + [curvature], [300.0 * (-1) ** i for i in range(10)]
    problem = dd.Quadratic([[center] for center in centers], curvatures=curvatures, start=[100.0])
    solution = np.average(centers, weights=curvatures)
    speeds = dd.FixedSpeeds([1 + 0.01 * i for i in range(9)] + [slower])
    advice = advise(problem, speeds)
    run = dd.simulate(advice.algorithm(advice.lr), problem, speeds, time=12 * slower)
    assert advice.method == "dude" and abs(run.x.item() - solution) < 20
    by_mean = KAPPA / (advice.constants.smoothness.value * advice.chosen.tau_avg)
    if curvature < 9:
        assert advice.delay < 1.1 * advice.chosen.tau_median and advice.lr > (1.5 if slower == 10 else 4) * by_mean
        tenfold = dd.simulate(advice.algorithm(10 * advice.lr), problem, speeds, time=12 * slower)
        assert abs(tenfold.x.item()) > 1_000, "it is not far from what is stable"
    else:
        assert advice.lr < 1.1 * by_mean


@pytest.mark.slow
def test_the_page_says_when_the_median_and_the_mean_are_far_apart():
    advice = advise(clusters(10, 20.0), dd.FixedSpeeds([1.0] * 9 + [100.0]))
    careful = round_to(advice.lr * advice.delay / advice.chosen.tau_avg)
    assert "an assumption" in advice.rests_on[-1] and f"begin with lr={careful:g}" in advice.rests_on[-1]
    even = advise(clusters(10, 20.0), dd.FixedSpeeds([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0]))
    assert not any("assumption" in text for text in even.rests_on)


@pytest.mark.parametrize(
    ("apart", "times", "found"),
    [
        (20.0, [1.0, 3.0, 7.0, 9.0], "the best steps had 0.3 to 0.8"),
        (0.2, [1.0, 3.0, 7.0, 9.0], "vanilla's best steps had 0.2 to 0.6"),
        (20.0, [1.0, 1.1, 1.05, 1.0], "none above 0.2 was tried"),
    ],
)
def test_each_method_s_step_rests_on_what_was_found_for_it(apart, times, found):
    rests_on = advise(clusters(4, apart), dd.FixedSpeeds(times)).rests_on
    assert [text for text in rests_on if text.startswith("lr:") and found in text and "not a result" in text]
    assert rests_on[0].startswith("Delays: measured, in a simulation of ")


def test_the_trial_counts_minibatches_once():
    problem, speeds = dd.LocalSteps(clusters(3, 20.0), 4, 0.01), dd.FixedSpeeds([1.0, 2.0, 4.0])
    once = dd.simulate(dd.DuDe(0.01), problem, speeds, updates=20)
    again = dd.simulate(dd.DuDe(0.01), problem, whole_jobs(per_job(speeds, problem), problem), updates=20)
    assert again.time == once.time and torch.equal(again.x, once.x)
    assert whole_jobs(speeds, clusters(3, 1.0)) is speeds


def test_a_step_that_does_not_go_down_is_noted():
    # a start at the minimum: noise can only lead away from it
    problem = dd.Quadratic([[0.0], [0.0]], noise=1.0)
    advice = advise(problem, dd.FixedSpeeds([1.0, 5.0]))
    assert any("F rose from 0 to" in note and "a quarter" in note for note in advice.notes)
    assert any("theorem's step is not known" in text for text in advice.missing), "there is no gap"


def test_without_noise_the_theorem_never_holds_as_printed():
    advice = advise(clusters(3, 20.0, noise=0.0), dd.FixedSpeeds([1.0, 2.0, 4.0]))
    assert advice.horizon == math.inf and advice.theory_lr == pytest.approx(1 / (64 * advice.chosen.tau_max))


def test_half_of_what_is_needed_gives_half_of_the_advice():
    speeds = dd.FixedSpeeds([1.0, 2.0, 4.0])
    blind = advise(None, speeds)
    assert blind.constants is None and blind.method == "dude" and blind.lr == round_to(KAPPA / blind.chosen.tau_median)
    assert math.isnan(blind.pull) and math.isnan(blind.theory_lr) and "not known" in " ".join(blind.reasons)
    timeless = advise(parse("problem", QUADRATIC), None)
    assert timeless.staleness == () and timeless.chosen is None and timeless.later is None
    assert timeless.lr == round_to(KAPPA / (1.5 * 3 - 0.5)), "as if all were equally fast"
    assert timeless.lr_vanilla == round_to(KAPPA / 3)
    with pytest.raises(dd.BadInput, match="neither a problem nor speeds"):
        advise(None, None)


def test_jobs_of_several_minibatches_take_as_much_longer():
    problem, speeds = dd.LocalSteps(clusters(3, 20.0), 4, 0.01), dd.FixedSpeeds([1.0, 2.0, 4.0])
    jobs = per_job(speeds, problem)
    assert [jobs.seconds(worker, 0) for worker in range(3)] == [4.0, 8.0, 16.0]
    assert delays(jobs, 2, updates=30).updates_per_second == delays(speeds, 2, updates=30).updates_per_second / 4
    assert per_job(speeds, clusters(3, 1.0)) is speeds
    with pytest.raises(dd.BadInput, match="speeds are given for 3 workers, but the problem has 4"):
        per_job(speeds, clusters(4, 1.0))


def test_a_worker_that_never_comes_back_leaves_the_rest_of_the_advice():
    speeds = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 1.5, 4.0]), [dd.speeds.Absence(1, 0.5, None)])
    advice = advise(clusters(3, 20.0), speeds)
    assert advice.staleness == () and advice.constants is not None and math.isfinite(advice.lr)
    assert len(advice.missing) == 3
    assert all(f"wait_for={c}" in text and "worker 1" in text for c, text in zip((1, 2, 3), advice.missing, strict=True))


def test_a_loss_that_is_not_finite_leaves_the_delays():
    shards = [(torch.full((8, 2), math.inf), torch.zeros(8, 1)) for _ in range(3)]
    problem = dd.Network(lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, shards, batch_size=4)
    advice = advise(problem, dd.FixedSpeeds([1.0, 2.0, 4.0]))
    assert len(advice.staleness) == 3 and math.isfinite(advice.lr) and advice.method == "dude"
    assert math.isnan(advice.pull) and math.isnan(advice.theory_lr)
    assert any("gradient of worker 0 could not be measured" in text for text in advice.missing)
    assert any("a trial run failed" in text for text in advice.missing)


# -------------------------------------------------------------------------------------------------------- the command


def test_the_page(inside, capsys):
    assert call("--problem", QUADRATIC, "--speeds", UNEVEN, "--time", "100") == 0
    out = capsys.readouterr().out
    advice = advise(parse("problem", QUADRATIC), dd.FixedSpeeds([1.0, 2.0, 4.0]), time=100.0)
    for row in advice.staleness:
        mark = r" \*" if row.wait_for == 2 else ""
        rates = rf"{row.updates_per_second:.3g}\s+{row.arrivals_per_second:.3g}"
        means = rf"{row.tau_median:.3g}\s+{row.tau_avg:.3g}\s+{row.tau_max}"
        line = rf"^ *{row.wait_for}{mark}\s+{rates}\s+{means}\s+{row.idle_share:.0%}\s*$"
        assert re.search(line, out, re.MULTILINE), (line, out)
    assert "What suits: DuDe with wait_for=2." in out
    assert f"lr={advice.lr:g}" in out and f"{advice.smaller:,.0f} times smaller" in out
    assert f"from {advice.horizon:,.0f} updates on" in out
    assert (inside / "runs" / "advise" / "advise.png").read_bytes().startswith(b"\x89PNG")
    assert "figure: runs/advise/advise.png" in out
    assert all(f"- {text}\n" in out for text in advice.rests_on)
    assert out.splitlines()[-1].endswith("add: --try 60")
    assert len(out.splitlines()) < 52, "it is one page"


def test_the_commands_it_names_work(advised, capsys):
    train, compare = advised("--problem", QUADRATIC, "--speeds", UNEVEN, "--time", "20", "--seed", "3")["commands"]
    assert "--seed 3" in train and "--seeds 3" in compare
    for command in (train, compare):
        main(shlex.split(command)[1:])
        assert "objective" in capsys.readouterr().out


def test_json_holds_the_advice(advised, inside):
    values = advised("--problem", QUADRATIC, "--speeds", UNEVEN, "--updates", "300", "--folder", "here")
    advice = advise(parse("problem", QUADRATIC), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=300)
    steps = ("lr", "lr_by_rule", "delay", "lr_async", "lr_vanilla", "theory_lr")
    for name in ("workers", "method", "wait_for", *steps, "updates", "horizon", "even", "pull"):
        assert values[name] == getattr(advice, name), name
    assert values["rests_on"] == list(advice.rests_on) and values["tries"] is None
    assert [row["tau_median"] for row in values["table"]] == [row.tau_median for row in advice.staleness]
    assert values["updates"] == 300 and values["figure"] == "here/advise.png"
    assert [row["tau_max"] for row in values["table"]] == [row.tau_max for row in advice.staleness]
    assert [zeta["value"] for zeta in values["constants"]["heterogeneity"]] == [36.0, 0.0, 36.0]
    assert values["missing"] == [] and values["reasons"] == list(advice.reasons)
    assert "What suits" in values["page"] and not (inside / "runs").exists()


def test_json_is_strict_where_a_number_is_infinite(advised):
    quiet = "quadratic[centers=[[0.0],[6.0]],noise=0.0]"
    assert advised("--problem", quiet, "--speeds", "fixed[times=[1,9]]")["horizon"] is None


def test_digits_from_the_shell(advised):
    values = advised("--problem", "digits[workers=4,alpha=0.1]", "--speeds", "truncated_normal[std=5]")
    problem = dd.Digits(workers=4, alpha=0.1, seed=0)
    found = constants(problem, problem.start(0))
    assert values["constants"]["gradient"]["value"] == found.gradient.value
    zetas = [zeta["value"] for zeta in values["constants"]["heterogeneity"]]
    assert zetas == [zeta.value for zeta in found.heterogeneity]
    row = delays(dd.TruncatedNormalSpeeds(4, std=5.0, seed=0), values["wait_for"], most=ARRIVALS)
    delay = weighted_median(row.ages, [own.value for own in found.smoothnesses])
    assert values["delay"] == delay
    assert values["lr"] == round_to(KAPPA / (max(1.0, found.smoothness.value) * delay))


def test_a_recorded_run_gives_its_problem_its_times_and_its_last_model(advised):
    problem, speeds = parse("problem", QUADRATIC), dd.speeds.LognormalSpeeds([1.0, 2.0, 4.0])
    run = dd.simulate(dd.VanillaASGD(0.05), problem, speeds, updates=80, folder="first")
    values = advised("--run", "first")
    advice = advise(problem, measured(run.trace, 3), later=run.x)
    assert (values["lr"], values["pull"], values["method"]) == (advice.lr, advice.pull, advice.method)
    assert values["table"][0]["tau_max"] == advice.staleness[0].tau_max
    end, later = constants(problem, run.x), values["later"]
    assert later["gradient"]["value"] == pytest.approx(end.gradient.value)
    assert [zeta["value"] for zeta in later["heterogeneity"]] == pytest.approx([zeta.value for zeta in end.heterogeneity])
    assert "--speeds 'lognormal[means=[1.0,2.0,4.0]]'" in values["commands"][0]


def test_a_run_whose_server_has_an_optimiser_is_told_that_the_step_is_for_plain_sgd(advised):
    server = dd.Server(optimizer="Adam")
    speeds = dd.FixedSpeeds([1.0, 2.0, 4.0])
    dd.simulate(dd.DuDe(0.05), parse("problem", QUADRATIC), speeds, updates=40, server=server, folder="adam")
    notes = advised("--run", "adam")["notes"]
    assert notes[0] == "the server of this run steps by Adam: lr is advised for plain SGD, so keep that of Adam"


def test_a_run_of_a_user_s_own_problem_or_speeds_is_read_as_far_as_possible(advised):
    class Own(dd.Quadratic):
        pass

    class Slow(dd.FixedSpeeds):
        pass

    dd.simulate(dd.DuDe(0.05), Own([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 3.0]), updates=40, folder="own")
    values = advised("--run", "own")
    assert values["table"][0]["tau_max"] == delays(dd.FixedSpeeds([1.0, 3.0])).tau_max
    assert values["constants"] is None and values["commands"] == []
    assert "Name it: dualdelay advise --run own --problem FILE.py:FUNCTION" in values["missing"][0]
    dd.simulate(dd.DuDe(0.05), dd.Quadratic([[0.0], [6.0]]), Slow([1.0, 3.0]), updates=40, folder="slow")
    # these speeds have no name, but the times are recorded
    assert advised("--run", "slow")["commands"][0].startswith("dd.train(dd.DuDe(lr=")


def test_a_worker_that_never_reported_in_a_run_is_named(inside, capsys):
    problem = parse("problem", QUADRATIC)
    dd.simulate(dd.VanillaASGD(0.05), problem, dd.FixedSpeeds([1.0, 2.0, 900.0]), updates=20, folder="first")
    assert call("--run", "first") == 2
    page = capsys.readouterr().out
    assert "not known: the run's times could not be measured: worker 2 never reported" in page
    assert "how heterogeneous the workers are" in page, "the rest of the page is there"


def test_real_workers_that_have_not_run_yet(advised):
    values = advised("--problem", QUADRATIC, "--speeds", "unknown")
    assert values["table"] == [] and values["figure"] is None and "train for a minute" in values["missing"][0]
    assert values["commands"] == [f"dualdelay train 'dude[lr=0.15]' --problem '{QUADRATIC}' --fleet ray --time 60"]


@pytest.mark.parametrize(
    ("arguments", "message", "rest"),
    [
        (("--problem", QUADRATIC, "--speeds", "fixd"), "did you mean 'fixed'?", "how heterogeneous the workers are"),
        (("--problem", QUADRATIC, "--speeds", "fixed[times=[1,2]]"), "speeds are given for 2 workers", "distance at first"),
        (("--problem", "quadratik", "--speeds", UNEVEN), "did you mean 'quadratic'?", "how stale gradients will be"),
        (("--problem", "quadratik", "--speeds", "fixd"), "did you mean 'quadratic'?", ""),
        (("--run", "nowhere"), "nowhere is not the folder of a run", ""),
        (("--run", "nowhere", "--speeds", UNEVEN), "leave out --speeds", ""),
        (("--updates", "0"), "updates is 0", ""),
        (("--time", "-1"), "time is -1", ""),
    ],
)
def test_an_error_is_one_line_after_the_rest_of_the_page(inside, capsys, arguments, message, rest):
    assert call(*arguments) == 2
    done = capsys.readouterr()
    assert message in done.err and len(done.err.strip().splitlines()) == 1
    assert rest in done.out and (not rest or message in done.out) and "Traceback" not in done.err


def test_a_long_measurement_repeats_its_report():
    repeated = threading.Event()

    def report(share, text):
        if (share, text) == (0.25, "measuring"):
            repeated.set()

    with _ticking(report) as ticks:
        ticks(0.25, "measuring")
        assert repeated.wait(60)


def test_of_many_workers_the_most_heterogeneous_are_shown(inside, capsys):
    centers = np.linspace(0.0, 9.0, 14)[:, None].tolist()
    times = ",".join(str(1 + k % 5) for k in range(14))
    assert call("--problem", f"quadratic[centers={centers},noise=0.1]", "--speeds", f"fixed[times=[{times}]]") == 0
    out = capsys.readouterr().out
    assert "14 workers, the 10 most heterogeneous" in out and len(out.splitlines()) < 60


# ------------------------------------------------------------------------------------------------------- trying steps


@pytest.mark.parametrize("apart", ["6.0,12.0", "0.1,0.2"])
def test_the_best_of_the_steps_that_were_tried_is_advised(advised, capsys, apart):
    problem = f"quadratic[centers=[[0.0],{','.join(f'[{center}]' for center in apart.split(','))}],start=[20.0],noise=0.1]"
    case = ("--problem", problem, "--speeds", UNEVEN, "--time", "40", "--seed", "2")
    plain, values = advised(*case), advised(*case, "--try", "60")
    runs = values["tries"]["runs"]
    assert values["lr_by_rule"] == plain["lr"] and len(runs) >= 5
    best = min(runs, key=lambda run: math.inf if run["objective"] is None else run["objective"])
    assert values["lr"] == best["lr"] and f"lr={best['lr']:g}" in values["commands"][0]
    assert values["tries"]["complete"] and values["tries"]["edge"] == "" and values["tries"]["share"] == 1
    assert f" {best['lr']:g} * " in values["page"] and f"Advised: lr={best['lr']:g}." in values["page"]
    assert "--try 60" in plain["page"] and "--try" not in values["page"]
    main([*shlex.split(values["commands"][0])[1:], "--json"])
    train = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert train["objective"] == best["objective"], "it is the run that the command makes"


def test_synchronous_sgd_is_tried_too(advised):
    values = advised("--problem", QUADRATIC, "--speeds", "fixed[times=[1,1,1.1]]", "--updates", "30", "--try", "60")
    problem, speeds = parse("problem", QUADRATIC), dd.FixedSpeeds([1.0, 1.0, 1.1])
    assert values["method"] == "sync" and values["tries"]["updates"] == 30
    for run in values["tries"]["runs"]:
        again = dd.simulate(dd.SyncSGD(run["lr"]), problem, speeds, updates=30)
        assert run["objective"] == again.metrics.objective[-1]


def test_a_run_s_own_times_are_tried(advised):
    dd.simulate(
        dd.VanillaASGD(0.05), parse("problem", QUADRATIC), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=80, folder="run"
    )
    values = advised("--run", "run", "--updates", "60", "--try", "30")
    assert values["lr"] == min(values["tries"]["runs"], key=lambda run: run["objective"])["lr"]


class Clock:
    """A clock that goes on by so many seconds whenever somebody looks at it."""

    def __init__(self, tick):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


def tried(lr, seconds, tick=0.0, updates=40, method=dd.DuDe, **options):
    problem = dd.Quadratic([[0.0], [6.0]], start=[20.0])
    speeds = dd.FixedSpeeds([1.0, 3.0])
    return try_steps(method, lr, problem, speeds, seconds=seconds, updates=updates, clock=Clock(tick), **options)


def test_the_search_goes_on_beyond_the_edge_while_the_best_is_there():
    right = tried(0.1, 60)
    steps = [run.lr for run in right.runs]
    best = right.best.lr
    small, large = tried(round_to(best / 64), 60), tried(round_to(best * 64), 60)
    assert len(steps) >= 5 and right.complete and small.complete and large.complete
    for tries in (right, small, large):
        assert tries.edge == "" and tries.best.objective <= 1.2 * right.best.objective
        assert [run.lr for run in tries.runs] == sorted(run.lr for run in tries.runs)
    assert len(small.runs) > 8 and len(large.runs) > 8


def test_a_run_does_not_depend_on_how_many_there_was_time_for():
    whole = {run.lr: run.objective for run in tried(0.1, 60, updates=1).runs}
    few = [tried(0.1, seconds, tick=1.0, updates=1) for seconds in range(5, 20, 3)]
    assert [len(tries.runs) for tries in few] == sorted(len(tries.runs) for tries in few)
    assert not few[0].complete and len(few[0].runs) < len(few[-1].runs) <= len(whole)
    for tries in few:
        assert tries.updates == 1 and {run.lr: run.objective for run in tries.runs}.items() <= whole.items()


def test_too_few_seconds_shorten_the_runs_and_one_is_made_all_the_same():
    short = tried(0.1, seconds=1.0, tick=1.0, time=80.0)
    assert (len(short.runs), short.complete, short.edge) == (1, False, "")
    assert short.runs[0].lr == 0.1 and short.time is None and short.updates == max(1, round(40 * short.share)) < 40
    problem, speeds = dd.Quadratic([[0.0], [6.0]], start=[20.0]), dd.FixedSpeeds([1.0, 3.0])
    assert (
        short.runs[0].objective == dd.simulate(dd.DuDe(0.1), problem, speeds, updates=short.updates).metrics.objective[-1]
    )


def test_steps_that_all_diverge_call_for_a_smaller_one(inside, capsys):
    tries = tried(1e6, seconds=60, updates=2_000)
    assert math.isinf(tries.runs[-1].objective)
    few = tried(1e6, seconds=100, tick=1.0, updates=2_000)
    assert all(math.isinf(run.objective) for run in few.runs) and few.lr == round_to(few.runs[0].lr / 4)


def test_progress_names_the_steps():
    told = []
    tries = tried(0.1, 60, report=lambda share, text: told.append((share, text)))
    assert told[0] == (0.0, "timing a few updates")
    assert {text for _, text in told[1:]} == {f"trying lr={run.lr:g}" for run in tries.runs}
    assert all(0 <= share <= 1 for share, _ in told)


def test_a_time_without_an_update_and_a_run_that_fails_are_errors():
    with pytest.raises(dd.BadInput, match="no update is made by time 2;"):
        tried(0.1, 60, time=2.0)

    class Broken(dd.DuDe):
        def step(self, s, a):
            raise dd.RunFailed("the server is broken")

    with pytest.raises(dd.RunFailed, match="the server is broken"):
        tried(0.1, 60, method=Broken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--try", "0"), "try is 0"),
        (("--try", "-3"), "try is -3"),
        (("--try", "nan"), "try is nan"),
        (("--try", "inf"), "try is inf"),
        (("--problem", QUADRATIC, "--speeds", "unknown", "--try", "9"), "--try needs a problem and the speeds"),
        (("--problem", QUADRATIC, "--speeds", "fixd", "--try", "9"), "did you mean 'fixed'?"),
        (("--problem", QUADRATIC, "--speeds", UNEVEN, "--time", "2", "--try", "9"), "no update is made by time 2"),
    ],
)
def test_what_cannot_be_tried_is_one_error(inside, capsys, arguments, message):
    assert call(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and len(error) == 1


def test_without_delays_there_is_nothing_to_try():
    speeds = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 1.5, 4.0]), [dd.speeds.Absence(1, 0.5, None)])
    case = _Case(problem=clusters(3, 20.0), speeds=speeds)
    advice = advise(case.problem, speeds)
    assert _tried(advice, case, 9.0, None, lambda share, text: None) is advice
    assert case.wrong == ["no steps could be tried: the workers' delays are not known."]


def test_runs_that_are_far_too_short_leave_the_step_of_the_rule():
    """Of one update out of six hundred the longest step looks best, and may diverge later."""
    problem, speeds = clusters(3, 20.0), dd.FixedSpeeds([1.0, 2.0, 4.0])
    advice = advise(problem, speeds, updates=600_000)
    after = advice.after_trying(problem, speeds, 0.01)
    assert after.tries.share < 1 / 8 and not after.tries.tell
    assert after.lr == advice.lr_by_rule == advice.lr


def test_the_page_says_what_the_seconds_did_not_suffice_for():
    advice = advise(clusters(3, 20.0), dd.FixedSpeeds([1.0, 2.0, 4.0]))

    def page(*runs, **options):
        tries = Tries(tuple(Try(*run) for run in runs), **{"updates": 50, "time": None, "share": 1.0, **options})
        console = Console(file=io.StringIO(), width=200, soft_wrap=True)
        print_advice(replace(advice, tries=tries, lr=tries.lr), [], [], console)
        return console.file.getvalue()

    short = page((0.1, 3.0), (0.2, 2.0), (0.4, math.inf), share=0.25, complete=True)
    assert "each until 50 updates" in short and "0.2 *" in short and "diverged" in short and "Advised: lr=0.2." in short
    assert "Each run has 0.25 of the length" in short and "were over" not in short
    hint = page((0.1, 3.0), (0.2, 2.0), share=0.1, complete=True)
    assert "Such short runs do not tell. Advised, by the rule" in hint and "give more seconds" in hint
    edge = page((0.1, 3.0), (0.2, 2.0), complete=False)
    assert "The seconds were over after 2 runs, and the best is the largest step: give more" in edge
    assert "of the length" not in edge
    lost = page((0.2, math.inf), (0.4, math.inf), complete=False)
    assert (
        "Every step that was tried diverged. Advised: lr=0.05 or less." in lost and "over after 2 runs: give more" in lost
    )
    assert "each until time 9 " in page((0.1, 3.0), complete=False, updates=None, time=9.0)


def test_a_run_of_a_problem_that_is_not_named_cannot_be_tried(inside, capsys):
    class Own(dd.Quadratic):
        pass

    dd.simulate(dd.DuDe(0.05), Own([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 3.0]), updates=40, folder="own")
    assert call("--run", "own", "--try", "9") == 2
    error = capsys.readouterr().err
    assert "--try needs a problem" in error and "Name it: dualdelay advise --run own --problem" in error
    assert call("--run", "own") == 0 and "--try" not in capsys.readouterr().out, "it is not offered either"
