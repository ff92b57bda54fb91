"""What goes wrong with workers under ``dd.train``, on virtual time (tests/virtual.py): which of them the server asks again,
waits for and goes on without, and that every message counts once.

What only processes can show is in test_ray_faults.py.
"""

import logging
import os
import signal
from dataclasses import dataclass

import pytest
import torch

import dualdelay as dd
from helpers import check_replay, kinds
from virtual import DUDE, TRIO, RandomWeather, Rough, fleet_of

PAIR = TRIO[:2]
FAST = 0.02  # seconds of a job


def dies_at(worker, *draws):
    """The processes of a worker die at these jobs, or with no draws at all from job 3 on; a repeated job kills once."""

    def dies(request):
        first = request.incarnation == 0 and request.draw in draws
        return request.worker == worker and (first if draws else request.draw >= 3)

    return dies


def assert_at(x, point):
    """An update leaves 1 - lr of the distance, 10 at most, to where a noiseless quadratic ends: 10 * 0.95^600 < 1e-12."""
    assert float((x - torch.tensor(point, dtype=torch.float64)).norm()) < 1e-9, x


def test_a_worker_that_dies_while_computing_is_restarted_and_repeats_its_job_and_the_others_do_not_wait(tmp_path):
    problem, restart = dd.Quadratic(PAIR, noise=0.3), 1.0
    fleet = fleet_of(dies=dies_at(1, 4), start_seconds=lambda worker, incarnation: restart if incarnation else 0.05)
    run = dd.train(DUDE(), problem, fleet, updates=120, folder=tmp_path / "run")
    assert kinds(run) == ["crashed", "lost", "restored"]
    row = run.trace.events[0]["row"]
    back = next(i for i in range(row, len(run.trace)) if run.trace.worker[i] == 1)
    assert run.trace.draw[back] == 4
    assert set(run.trace.worker[row:back].tolist()) == {0} and back - row >= restart / FAST - 2
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.numeric
@pytest.mark.parametrize("memory", ["server", "workers"])
@pytest.mark.parametrize("gone", ["leave", "freeze"])
def test_a_worker_gone_for_good_leaves_or_its_last_gradient_goes_on_counting(gone, memory, tmp_path):
    problem, accepted = dd.Quadratic(TRIO), []

    def watch(state, arrival):
        if arrival.worker == 2:
            accepted.append(arrival.value.clone())

    fleet = fleet_of(dies=dies_at(2), restarts=1, gone=gone)
    updates = 900  # where one of three is frozen, an update leaves 1 - 2 lr / 3
    run = dd.train(DUDE(memory=memory), problem, fleet, updates=updates, watch=[watch], folder=tmp_path / "run")
    end = "left" if gone == "leave" else "frozen"
    mended = ["lost", "restored"] if memory == "workers" else []
    assert kinds(run) == ["crashed", *mended, "crashed", end] and "2 crashes in a row" in run.trace.events[-1]["text"]
    if gone == "leave":
        assert run.state.n == 2
        assert_at(run.x, [3.0, -0.5])  # the mean of the two that are left
    else:  # (x - c_0) + (x - c_1) + G_2 = 0, where a worker that keeps its gradient sends differences
        frozen = sum(accepted) if memory == "workers" else accepted[-1]
        assert run.state.n == 3 and len(accepted) == 3
        assert_at(run.x, ((torch.tensor(TRIO[0]) + torch.tensor(TRIO[1]) - frozen) / 2).tolist())
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.numeric
def test_a_worker_that_hangs_past_the_deadline_leaves(tmp_path):
    problem = dd.Quadratic(TRIO)
    fleet = fleet_of(deadline=2.0, job_seconds=lambda job: 1e9 if job.worker == 2 and job.draw == 5 else FAST)
    run = dd.train(DUDE(), problem, fleet, updates=800, folder=tmp_path / "run")
    assert kinds(run) == ["crashed", "lost", "restored", "left"]
    assert "no answer in 2 s to job number 5" in run.trace.events[-1]["text"]
    hung = run.trace.time[run.trace.worker == 2].max()
    assert 2.0 <= run.trace.events[-1]["time"] - hung < 2.2  # who is late is looked at every tenth of a second
    assert_at(run.x, [3.0, -0.5])
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.numeric
def test_workers_join_and_leave_a_running_job(tmp_path, caplog):
    problem, fleet, limits = dd.Quadratic(TRIO), fleet_of(absent=[2]), []  # each of 600 updates or more

    def direct(state, arrival):
        if (arrival.worker, arrival.job.draw) == (1, 300):
            limits.append(state.x.clone())
            fleet.control.join(2)
        if (arrival.worker, arrival.job.draw) == (2, 250):
            limits.append(state.x.clone())
            fleet.control.leave(0)
            fleet.control.join(7)

    run = dd.train(DUDE(), problem, fleet, updates=2000, watch=[direct], folder=tmp_path / "run")
    assert kinds(run) == ["left", "joined", "left"]
    assert [event["worker"] for event in run.trace.events] == [2, 2, 0]
    assert "worker 7 cannot join: it is unknown" in caplog.text
    for x, mean in zip([*limits, run.x], ([3.0, -0.5], [6.0, 1.0], [9.0, 1.0]), strict=True):
        assert_at(x, mean)
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.numeric
def test_an_exception_is_reported_with_its_traceback_retried_and_then_the_worker_leaves(tmp_path, caplog):
    problem = Rough(TRIO)
    problem.measures, problem.spoils = False, lambda worker, draw: False
    problem.raises = lambda worker, draw: (worker == 0 and draw == 2) or (worker == 1 and draw >= 4)
    with caplog.at_level(logging.WARNING, "dualdelay"):
        run = dd.train(DUDE(), problem, fleet_of(retries=2), updates=600, folder=tmp_path / "run")
    assert kinds(run, 0) == ["failed"] and kinds(run, 1) == ["failed"] * 3 + ["left"]
    text = next(event["text"] for event in run.trace.events if event["worker"] == 1)
    assert "Traceback" in text and "virtual.py" in text and text.strip().endswith("ValueError: no gradient")
    assert "worker 1 left: 3 exceptions in a row, the last: ValueError: no gradient" in caplog.text
    assert_at(run.x, [6.0, 2.5])
    problem.raises = lambda worker, draw: False  # a replay needs none of those gradients
    check_replay(run, tmp_path / "run", problem)


def test_the_same_traceback_is_told_once_and_the_next_times_in_one_line(tmp_path, caplog):
    problem = Rough(TRIO)
    problem.measures, problem.spoils = False, lambda worker, draw: False
    problem.raises = lambda worker, draw: worker == 1 and draw >= 4
    run = dd.train(DUDE(), problem, fleet_of(retries=2), updates=100, folder=tmp_path / "run")
    told = [record.getMessage() for record in caplog.records if "worker 1 failed" in record.getMessage()]
    assert [text.count("Traceback") for text in told] == [1, 0, 0]
    assert all(text.strip().endswith("ValueError: no gradient") for text in told)
    assert all("Traceback" in event["text"] for event in run.trace.events if event["kind"] == "failed")


class Unfit(dd.Quadratic):
    """Of worker 1's data some draws are not what a gradient takes."""

    unfit = range(1000)

    def gradient(self, x, worker, draw):
        if worker == 1 and draw in self.unfit:
            raise dd.BadInput("targets have 3 columns; expected 2")
        return super().gradient(x, worker, draw)


def test_bad_input_is_tried_once_more_and_a_worker_that_gave_nothing_is_named_at_the_end(tmp_path):
    run = dd.train(DUDE(), Unfit(TRIO), fleet_of(retries=5), updates=60, folder=tmp_path / "run")
    assert kinds(run, 1) == ["failed", "failed", "left"]
    assert run.trace.events[-1]["text"] == (
        "no gradient can be computed from its data: BadInput: targets have 3 columns; expected 2"
    )
    assert "worker 1: the model has learnt nothing from its data" in run.notes
    assert dd.load(tmp_path / "run").notes == run.notes
    assert not any("learnt nothing" in note for note in dd.train(DUDE(), dd.Quadratic(TRIO), fleet_of(), updates=9).notes)


class Unlucky(Unfit):
    """A line of worker 1 is lost in its first job, too."""

    def gradient(self, x, worker, draw):
        if worker == 1 and draw == 0:
            raise OSError("no such host")
        return super().gradient(x, worker, draw)


def test_other_exceptions_before_bad_input_do_not_count_as_that():
    problem = Unlucky(TRIO)
    problem.unfit = {1}
    run = dd.train(DUDE(), problem, fleet_of(retries=3), updates=60)
    assert kinds(run, 1) == ["failed", "failed"] and run.state.n == 3


def test_a_worker_that_comes_back_with_other_data_begins_anew():
    fleet, problem = fleet_of(retries=3), Unfit(TRIO)
    problem.unfit = (0, 1, 3)  # number 2 was not begun when it left

    def direct(state, arrival):
        if state.version == 20:
            fleet.control.join(1)

    run = dd.train(DUDE(), problem, fleet, updates=300, watch=[direct])
    assert kinds(run, 1) == ["failed", "failed", "left", "joined", "failed"] and run.state.n == 3


def test_after_a_resume_a_few_bad_samples_in_a_row_are_no_reason_to_leave(tmp_path):
    problem = Unfit(TRIO)
    problem.unfit = set()
    before = dd.train(DUDE(), problem, fleet_of(retries=3), updates=60, folder=tmp_path / "run", checkpoint_every=20)
    next_draw = 1 + max(draw for worker, draw in zip(before.trace.worker, before.trace.draw, strict=True) if worker == 1)
    problem.unfit = {next_draw + 2, next_draw + 3}
    run = dd.resume(tmp_path / "run", 120, problem=problem, fleet=fleet_of(retries=3))
    assert kinds(run, 1) == ["failed", "failed"] and run.state.n == 3


@pytest.mark.parametrize("unfit", [{0}, {5, 6, 12, 13, 14}], ids=["the first", "some"])
def test_a_worker_with_a_few_bad_samples_stays(unfit, tmp_path):
    problem = Unfit(TRIO)
    problem.unfit = unfit
    run = dd.train(DUDE(), problem, fleet_of(retries=3), updates=120, folder=tmp_path / "run")
    assert kinds(run, 1) == ["failed"] * len(unfit) and run.state.n == 3
    problem.unfit = set()
    check_replay(run, tmp_path / "run", problem)


class Malformed(dd.Quadratic):
    """Worker 0 sends two gradients that are not finite, worker 1 one of the wrong shape."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        if worker == 0 and draw in (2, 3):
            gradient = gradient * float("nan")
        return (torch.cat([gradient, gradient]) if worker == 1 and draw == 5 else gradient), loss


def test_gradients_that_are_not_finite_or_have_the_wrong_shape_are_rejected_and_counted(tmp_path):
    problem = Malformed(PAIR, noise=0.3)
    run = dd.train(DUDE(), problem, fleet_of(), updates=100, folder=tmp_path / "run")
    assert run.rejected == 3 and kinds(run, 0) == ["rejected"] * 2 and kinds(run, 1) == ["rejected"]
    check_replay(run, tmp_path / "run", problem)


def test_with_too_few_workers_left_the_run_is_saved_and_stops_and_resumes_with_all(tmp_path):
    problem, folder = dd.Quadratic(PAIR, noise=0.3), tmp_path / "run"
    with pytest.raises(dd.RunFailed, match=r"1 workers are at work, fewer than the minimum of 2; .* worker 0"):
        dd.train(DUDE(), problem, fleet_of(dies=dies_at(0, 20), restarts=0, minimum=2), updates=100, folder=folder)
    run = dd.resume(folder, problem=problem, fleet=fleet_of(restarts=0, minimum=2))
    assert run.version == 100 and kinds(run)[-2:] == ["left", "joined"] and run.state.n == 2
    check_replay(run, folder, problem)


@dataclass(frozen=True)
class Stubborn(dd.SyncSGD):
    """Synchronous SGD without a rule for workers that leave."""

    away = ""
    leave, join = dd.Algorithm.leave, dd.Algorithm.join


def test_a_method_that_would_wait_for_a_worker_that_is_gone_is_saved_and_says_so(tmp_path):
    problem, folder, method = dd.Quadratic(PAIR, noise=0.3), tmp_path / "run", Stubborn(lr=0.1)
    with pytest.raises(dd.RunFailed, match=r"worker 1 is gone \(1 crashes in a row.*and Stubborn would wait for it"):
        dd.train(method, problem, fleet_of(dies=dies_at(1, 5), restarts=0), updates=20, folder=folder)
    run = dd.resume(folder, problem=problem, algorithm=method, fleet=fleet_of())
    assert run.version == 20
    check_replay(run, folder, problem, algorithm=method)


def test_a_method_that_waits_for_frozen_workers_ends_with_a_message():
    with pytest.raises(dd.RunFailed, match=r"nobody is at work: the others wait for workers \[1\], which are frozen"):
        fleet = fleet_of(dies=dies_at(1), restarts=0, gone="freeze")
        dd.train(dd.SyncSGD(lr=0.1), dd.Quadratic(PAIR), fleet, updates=20)


def test_a_job_more_versions_behind_than_the_limit_gives_one_alarm_that_names_its_worker(tmp_path, caplog):
    problem = dd.Quadratic(PAIR, noise=0.3)
    fleet = fleet_of(alarm=10, job_seconds=lambda job: 1.5 if job.worker == 1 else FAST)
    with caplog.at_level(logging.WARNING, "dualdelay"):
        run = dd.train(DUDE(start="zeros"), problem, fleet, time=5.0, folder=tmp_path / "run")
    assert [(event["kind"], event["worker"]) for event in run.trace.events] == [
        ("late", 1)
    ] * 4  # the jobs begun by second 4.5
    assert "worker 1 late: its job is" in caplog.text and "versions behind, more than 10" in caplog.text
    check_replay(run, tmp_path / "run", problem)


def test_where_a_worker_dies_at_the_very_end_there_is_no_audit_and_the_record_is_right(tmp_path):
    problem, fleet, folder = dd.Quadratic(PAIR, noise=0.3), fleet_of(), tmp_path / "run"

    def strike(state, arrival):
        if state.version == 40:
            fleet.transports[0].kill(1, known=1.0)

    run = dd.train(DUDE(), problem, fleet, updates=40, watch=[strike], folder=folder)
    assert run.audit is None and run.notes == ("there is no audit: workers [1] did not say at the end what they keep",)
    check_replay(run, folder, problem)
    longer = dd.resume(folder, updates=80, problem=problem, fleet=fleet)
    assert kinds(longer) == ["lost", "restored"] and longer.audit is not None
    check_replay(longer, folder, problem)


def test_an_interrupted_run_is_saved_and_goes_on(tmp_path):
    problem, folder = dd.Quadratic(PAIR, noise=0.3), tmp_path / "run"

    def interrupt(state, arrival):
        if state.version == 30:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(dd.Interrupted, match="saved after"):
        dd.train(DUDE(), problem, fleet_of(), updates=60, watch=[interrupt], folder=folder)
    kept = dd.load(folder)
    assert kept.ended == "interrupted" and 30 <= kept.version < 60
    run = dd.resume(folder, problem=problem, fleet=fleet_of())
    assert run.version == 60
    check_replay(run, folder, problem)


# --- messages that are lost, repeated and late ---


@pytest.mark.parametrize("memory", ["server", "workers"])
@pytest.mark.parametrize("what", ["lost", "repeated", "late"])
def test_lost_repeated_and_late_messages_leave_each_job_once_and_in_its_order(what, memory, tmp_path):
    weather, problem = RandomWeather(1, **{what: 0.15}), dd.Quadratic(PAIR, noise=0.3)
    fleet = fleet_of(weather=weather, resend=0.2)
    run = dd.train(DUDE(memory=memory), problem, fleet, updates=90, folder=tmp_path / "run")
    assert weather.counts[what] > 12 and kinds(run) == []  # of 90 requests and as many replies 0.15, which is 27 +- 5
    assert fleet.control.counts["sent again"] >= (5 if what == "lost" else 0)
    assert fleet.control.counts["dropped"] >= (5 if what == "repeated" else 0)
    for worker in range(2):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        assert draws == list(range(len(draws)))
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.parametrize("seed", range(5))
def test_under_any_weather_a_single_worker_computes_what_it_does_in_a_simulation(seed):
    """With one worker there is one order, and so one result."""
    problem, weather = dd.Quadratic([[3.0, -1.0]], noise=0.3), RandomWeather(seed, lost=0.1, repeated=0.1, late=0.2)
    run = dd.train(DUDE(), problem, fleet_of(weather=weather, resend=0.1), updates=120)
    calm = dd.simulate(DUDE(), problem, dd.FixedSpeeds([1.0]), updates=120)
    assert min(weather.counts.values()) > 5 and torch.equal(run.x, calm.x)
