"""Workers of several ranks: the arithmetic of parts in this process, and processes that are killed and raise."""

import itertools
import json
import os
import signal
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.environment import environment
from dualdelay.engine.half import Half
from dualdelay.problems import Clipped, FullGradients, Logistic
from dualdelay.problems.minibatches import portion
from dualdelay.problems.wrapped import InParts, in_parts, source_of
from dualdelay.storage.files import json_digest
from dualdelay.workers import group
from dualdelay.workers.group import Group, Place, interface_of, joint_environment
from dualdelay.workers.ray_fleet import RayTransport
from helpers import ROUNDED, check_replay, kinds
from real import Collective, Ranked, Site, small_net
from transports import VirtualFleet

PAIR = [[0.0, 1.0], [6.0, -2.0]]


@dataclass(frozen=True, kw_only=True)
class RankedFleet(VirtualFleet):
    """Workers of this process that compute each gradient in so many parts."""

    ranks: int = 2


def data(worker, samples=20):
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(worker))
    return inputs, (inputs.sum(1) > 0).long()


def network(batch_size=16, loss=cross_entropy, model=small_net, **options):
    return dd.Network(model, loss, [data(worker) for worker in range(2)], batch_size, seed=0, **options)


# ------------------------------------------------------------------------------------------------- gradients in parts


@pytest.mark.parametrize(("count", "parts"), [(0, 2), (1, 3), (7, 2), (8, 3), (64, 4)])
def test_parts_cover_everything_once_and_differ_by_one_at_most(count, parts):
    pieces = [range(count)[portion(count, part, parts)] for part in range(parts)]
    assert [*itertools.chain(*pieces)] == [*range(count)]
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.numeric
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "problem",
    [
        network(16),
        network(7),
        network([1, 2], weights=[1.0, 3.0]),
        network(dd.Batches(5, replacement=False), weights="samples"),
        FullGradients(network(7)),
        Logistic(workers=2, batch_size=7),
        Logistic(workers=2, batch_size=1),
    ],
    ids=["even", "uneven", "empty parts", "by samples", "exact", "logistic", "logistic, empty parts"],
)
def test_the_parts_add_up_to_the_gradient_and_its_loss(problem, parts):
    split = in_parts(problem, parts)
    assert isinstance(split, InParts) and split.problem is problem
    x = problem.start(3)
    for worker, draw in itertools.product(range(2), range(3)):
        gradient, loss = split.gradient(x, worker, draw)
        whole, expected = problem.gradient(x, worker, draw)
        torch.testing.assert_close(gradient, whole, rtol=0, atol=ROUNDED * float(whole.norm()))
        assert loss == pytest.approx(expected, rel=ROUNDED) and gradient.dtype == whole.dtype
        again = split.gradient(x, worker, draw)
        assert torch.equal(gradient, again[0]) and loss == again[1]


def test_one_part_is_the_problem_itself():
    problem = network()
    assert in_parts(problem, 1) is problem


@pytest.mark.numeric
def test_local_steps_and_clipping_make_something_of_the_sum_and_not_of_the_parts():
    problem = Clipped(dd.LocalSteps(network(7), k=3, lr=0.1), norm=0.5)
    split = in_parts(problem, 2)
    assert isinstance(source_of(split), InParts) and isinstance(split, Clipped)
    gradient, _ = split.gradient(problem.start(0), 1, 4)
    torch.testing.assert_close(gradient, problem.gradient(problem.start(0), 1, 4)[0], rtol=0, atol=10 * ROUNDED)


def test_dropout_is_drawn_anew_in_each_part_and_named_by_it():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    same = (torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
    problem = dd.Network(model, cross_entropy, [same], dd.Batches(8, stochastic=True), seed=0)
    x = problem.start(0)
    parts = [problem.gradient_part(x, 0, 0, part, 2)[0] for part in (0, 1, 0)]
    assert torch.equal(parts[0], parts[2]) and not torch.equal(parts[0], parts[1])


def weighted(outputs, targets):
    return cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0]))


def test_a_loss_that_is_no_mean_over_samples_by_themselves_is_refused():
    with pytest.raises(
        dd.BadInput, match=r"worker 0's first gradient in 2 parts is .* from the whole.*no weights of classes"
    ):
        in_parts(network(7, weighted), 2)
    elsewhere = in_parts(dd.Network(small_net, weighted, data, 7, workers=2, seed=0), 2)
    for _ in range(2):  # where its data are, and each time
        with pytest.raises(dd.BadInput, match="worker 1's first gradient in 2 parts is"):
            elsewhere.gradient(elsewhere.start(0), 1, 0)


def test_problems_that_cannot_be_split_say_so():
    with pytest.raises(dd.BadInput, match=r"Quadratic does not say how its gradients are split; expected ranks=1"):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic(PAIR), RankedFleet(), updates=1)
    with pytest.raises(dd.BadInput, match="FullGradients does not say how its gradients are split"):
        in_parts(FullGradients(Logistic(workers=2)), 2)

    class Stateful(dd.Network):
        stateful = True

    with pytest.raises(dd.BadInput, match="Stateful keeps something from gradient to gradient"):
        in_parts(Stateful(small_net, cross_entropy, [data(0)]), 2)


def test_a_problem_that_uses_the_group_itself_is_not_split():
    problem = Collective(small_net, cross_entropy, [data(0)])
    assert in_parts(problem, 2) is problem and source_of(dd.LocalSteps(problem, k=2, lr=0.1)) is problem


# ------------------------------------------------------------------------------------------------- the record of a run


@pytest.mark.numeric
def test_the_number_of_ranks_is_recorded_and_a_replay_computes_as_many_parts(tmp_path):
    problem, folder = network(7), tmp_path / "run"
    run = dd.train(dd.DuDe(lr=0.1), problem, RankedFleet(), updates=20, folder=folder)
    assert json.loads((folder / "config.json").read_text())["ranks"] == 2
    check_replay(run, folder, problem)
    with pytest.raises(dd.BadInput, match="with threads=1 and ranks=2, and this fleet has threads=1 and ranks=3; pass a"):
        dd.resume(folder, updates=30, problem=problem, fleet=RankedFleet(ranks=3))
    run = dd.resume(folder, updates=30, problem=problem, fleet=RankedFleet())
    assert run.version == 30
    check_replay(run, folder, problem)
    crafted = json.loads((folder / "config.json").read_text()) | {"ranks": 1}  # as if single processes had computed it
    del crafted["digest"]
    (folder / "config.json").write_text(json.dumps({**crafted, "digest": json_digest(crafted)}))
    with pytest.raises(dd.DualDelayError):
        dd.replay(folder, problem)


def test_a_run_of_single_processes_says_nothing_of_ranks(tmp_path):
    dd.train(dd.DuDe(lr=0.1), dd.Quadratic(PAIR), VirtualFleet(), updates=2, folder=tmp_path / "run")
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "ranks" not in values
    values = {key: value for key, value in values.items() if key != "digest"} | {"ranks": 0}
    (tmp_path / "run" / "config.json").write_text(json.dumps({**values, "digest": json_digest(values)}))
    with pytest.raises(dd.BadInput, match="ranks"):
        dd.load(tmp_path / "run")


# ------------------------------------------------------------------------------------------------- one rank by itself


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") in ("lo", "lo0") and interface_of("192.0.2.1") == ""


def test_an_interface_other_than_the_loopback_is_found(monkeypatch):
    answers = {b"lo": "127.0.0.1", b"eth0": "10.0.0.7"}
    monkeypatch.setattr(group.socket, "if_nameindex", lambda: [(1, "lo"), (2, "down"), (3, "eth0")])

    def ioctl(asked, request, name):
        if name.rstrip(b"\0") not in answers:
            raise OSError("it has no address")
        return bytes(20) + group.socket.inet_aton(answers[name.rstrip(b"\0")]) + bytes(8)

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    assert interface_of("10.0.0.7") == "eth0" and interface_of("10.0.0.8") == ""


def test_where_ranks_are_on_other_kinds_of_machines_the_record_says_so():
    here, there = environment(), {**environment(), "processor": "another"}
    assert joint_environment([Place("a", "", here)] * 2) == here
    joint = joint_environment([Place("a", "", here), Place("b", "", there)])
    assert joint == {**here, "processor": f"{here['processor']} and another"}


def test_ranks_meet_on_this_machine_alone_if_all_are_here():
    places = [Place("a", "192.0.2.1", {}), Place("a", "192.0.2.1", {})]
    assert Group(0, 2).open(places).host == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):  # an address that this machine does not have, and is not asked to invent
        Group(0, 2).open([*places, Place("b", "192.0.2.2", {})])


@pytest.mark.parametrize(
    ("own_gpu", "cuda", "backend", "device"),
    [(True, True, "cpu:gloo,cuda:nccl", "cuda"), (False, True, "gloo", "cpu"), (True, False, "gloo", "cpu")],
    ids=["a GPU each", "parts of a GPU", "no GPU"],
)
def test_what_is_exchanged_stays_on_the_gpus_if_each_rank_has_its_own(monkeypatch, own_gpu, cuda, backend, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    made = Group(0, 2, own_gpu)
    assert (made.backend, made.device) == (backend, torch.device(device))


@pytest.mark.parametrize("whole", [True, False], ids=["the whole can be computed", "nothing can"])
def test_only_parts_that_are_refused_where_the_whole_is_not_are_no_matter_of_another_try(whole):
    class Refusing(dd.Network):
        def gradient(self, x, worker, draw):
            if not whole:
                raise dd.BadInput("the data are gone")
            return super().gradient(x, worker, draw)

        def gradient_part(self, x, worker, draw, part, parts):
            raise dd.BadInput("the data are gone")

    problem, group = in_parts(Refusing(small_net, cross_entropy, data, workers=1), 2), Group(0, 2)
    said = group._own_part(problem, problem.start(0), 0, 0)
    assert said.rstrip().endswith("BadInput: the data are gone")
    assert group._refusal == ("the data are gone" if whole else "")


def test_a_rank_that_has_raised_while_the_others_go_on_says_why_it_is_of_no_more_use(monkeypatch):
    monkeypatch.setattr(group, "_GRACE", 0.0)
    rank = Group(0, 2)
    problem = Collective(small_net, cross_entropy, lambda worker: None, workers=2)
    with pytest.raises(dd.BadInput, match="gave None"):
        rank.prepare(rank.led(problem), 1)
    with pytest.raises(RuntimeError, match=r"its gradient raised, so that it is out of step with .*BadInput: shards\(1\)"):
        rank.stay()


# ------------------------------------------------------------------------------------------------- processes


@pytest.mark.usefixtures("ray_here")
class TestProcesses:
    """Two workers of two ranks each."""

    def test_a_group_of_which_any_rank_is_killed_is_started_anew_and_the_run_replays(self, tmp_path):
        """Rank 1 of worker 0, then rank 0 of worker 1; meanwhile rank 1 of worker 1 raises, which ends no process."""
        step = Ranked(tmp_path, raises=((1, 1),))
        problem = dd.Network(small_net, shards=Site(tmp_path), step=step, workers=2, batch_size=7, weights="samples")
        struck = []

        def processes(worker, rank):
            return {int(path.name.split("-")[3]) for path in tmp_path.glob(f"rank-{worker}-{rank}-*")}

        def strike(state, arrival):
            for version, worker, rank in ((10, 0, 1), (25, 1, 0)):
                if state.version >= version and (worker, rank) not in struck:
                    struck.append((worker, rank))
                    [pid] = processes(worker, rank)
                    os.kill(pid, signal.SIGKILL)
            return len(struck) == 2

        # enough updates that both groups have come back
        fleet, folder = dd.RayFleet(ranks=2, cpus=0.5), tmp_path / "run"
        method = dd.DuDe(lr=0.05, memory="workers", wait_for=2)
        run = dd.train(method, problem, fleet, updates=40, watch=[strike], folder=folder)
        assert run.version == 40 and run.ended == "updates" and run.state.n == 2
        crashes = {event["worker"]: event["text"] for event in run.trace.events if event["kind"] == "crashed"}
        assert kinds(run).count("crashed") == 2 and kinds(run).count("failed") == 1
        for worker, rank in struck:
            assert crashes[worker].startswith(f"rank {rank} of 2: its process died ") and "(pid " in crashes[worker]
            assert len(processes(worker, 0)) == len(processes(worker, 1)) == 2  # both are new
        failed = next(event["text"] for event in run.trace.events if event["kind"] == "failed")
        assert "rank 1 of worker 1 has failed:" in failed and "ValueError: rank 1 has a bad sample" in failed
        for worker in range(2):
            draws = run.trace.draw[run.trace.worker == worker].tolist()
            assert sorted(draws) == draws and len(draws) == 40
        check_replay(run, folder, problem)

    @pytest.mark.slow
    def test_ranks_that_use_the_group_themselves_are_in_step_or_started_anew(self, tmp_path):
        """Rank 0 of worker 0 and rank 1 of worker 1 raise once, while the other waits in a collective operation."""
        step, site = Ranked(tmp_path, raises=((0, 0), (1, 1))), Site(tmp_path)
        problem = Collective(small_net, shards=[site(worker) for worker in range(2)], step=step, batch_size=7)
        method, fleet = dd.SyncSGD(lr=0.05), dd.RayFleet(ranks=2, cpus=0.5)
        run = dd.train(method, problem, fleet, updates=5, folder=tmp_path / "run")
        assert run.version == 5 and kinds(run, 0)[-2:] == ["failed", "crashed"] and kinds(run, 1) == ["crashed"]
        texts = {event["worker"]: event["text"] for event in run.trace.events if event["kind"] == "crashed"}
        assert (
            texts[0].startswith("rank 0 of 2: RuntimeError: its gradient raised") and "rank 0 has a bad sample" in texts[0]
        )
        assert texts[1].startswith("rank 1 of 2: ValueError: rank 1 has a bad sample")
        check_replay(run, tmp_path / "run", problem)

    def test_a_loss_that_cannot_be_split_is_refused_in_one_sentence(self, tmp_path, caplog, capfd):
        """Its data are at the workers alone, so that nobody can tell before they are there."""
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
        problem = dd.Network(small_net, loss, Site(tmp_path), 7, workers=1, seed=0)
        with pytest.raises(dd.BadInput, match=r"^worker 0's first gradient in 2 parts is .* or use ranks=1\.$") as caught:
            dd.train(dd.DuDe(lr=0.1), problem, dd.RayFleet(ranks=2, cpus=0.5), updates=5, folder=tmp_path / "run")
        assert not getattr(caught.value, "__notes__", [])
        assert "Traceback" not in caplog.text + "".join(capfd.readouterr())

    def test_what_a_group_claims_is_claimed_by_each_rank(self):
        fleet = dd.RayFleet(ranks=3, cpus=30, gpus=0.25)
        transport = RayTransport(fleet, network(), Half(dd.DuDe(lr=0.1)))
        try:
            assert (
                transport.why_not_started(0)
                == ": it claims 0.25 GPU, and no machine of the cluster has that (the most is 0)"
            )
            object.__setattr__(fleet, "gpus", 0.0)
            assert transport.why_not_started(0) == ": its 3 ranks claim 90 CPU, and the cluster has 64"
            transport.start(0, 0)
            [bundles] = [transport._ray.util.placement_group_table(room)["bundles"] for room in transport._rooms.values()]
            assert bundles == {0: {"CPU": 30.0}, 1: {"CPU": 30.0}, 2: {"CPU": 30.0}}
            transport.stop(0)
            assert transport._rooms == transport._further == transport._lives == {}
        finally:
            transport.close(ended=True)
