"""What a method takes for each weight, against what its file says that it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.core.state import BLOCK
from dualdelay.theory import footprint as counting
from dualdelay.theory.footprint import footprint
from dualdelay.theory.machine import COPIED

FULL = 4.0  # bytes of a number as it travels
SUM = 8.0  # of one in a sum
SERVER = dd.Server()


def test_dude_keeps_the_weights_a_sum_and_a_gradient_of_each_worker() -> None:
    for workers in (3, 16, 40, 1000):  # counted as they are, and from fewer
        method = footprint(dd.DuDe(lr=0.1), workers, SERVER, timed=1000)
        assert method.server == {"weights": FULL, "total": SUM, "table": FULL * workers}
        assert method.models == FULL * workers  # each was sent another version
        assert (method.up, method.down, method.worker, method.arrivals) == (FULL, FULL, 0.0, 1.0)
        assert method.audited and not method.waits and not method.own_models


def test_a_table_of_half_precision_takes_half_and_one_at_the_workers_nothing_here() -> None:
    assert footprint(dd.DuDe(lr=0.1), 20, dd.Server(gradient_table="half"), timed=1000).server["table"] == 20 * FULL / 2
    method = footprint(dd.DuDe(lr=0.1, memory="workers", compress="int8"), 20, SERVER, timed=1000)
    assert method.server == {"weights": FULL, "total": SUM} and method.worker == SUM
    assert method.up == 1.0 and method.down == FULL and method.job > 0


@pytest.mark.parametrize(("share", "bytes_each"), [(0.01, 8.0), (0.1, 8.0)])  # an int32 place and a float32 value
def test_the_largest_numbers_alone_travel_with_their_places(share: float, bytes_each: float) -> None:
    method = footprint(dd.VanillaASGD(lr=0.1), 5, dd.Server(uplink=share, downlink=share), timed=1000)
    assert method.up == pytest.approx(share * bytes_each) and method.down == pytest.approx(share * bytes_each)
    assert method.own_models and method.send > 0 and method.job > 0 and method.worker == FULL  # what the uplink left out


def test_waiting_for_several_takes_as_many_gradients_for_an_update_and_keeps_fewer_models() -> None:
    method = footprint(dd.DuDe(lr=0.1, wait_for=20), 640, SERVER, timed=1000)
    assert method.arrivals == 20 and method.waits
    assert FULL * 640 / 20 / 2 <= method.models <= FULL * 640 / 20 * 2
    assert footprint(dd.FedBuff(lr=0.1, buffer=4), 100, SERVER, timed=1000).arrivals == 4
    assert footprint(dd.FedBuff(lr=0.1, buffer=200), 1000, SERVER, timed=1000).arrivals == 200
    sync = footprint(dd.SyncSGD(lr=0.1), 100, SERVER, timed=1000)
    assert sync.arrivals == 100 and sync.waits and sync.models == FULL


def test_an_optimiser_has_its_vectors() -> None:
    assert footprint(dd.VanillaASGD(lr=0.1), 4, dd.Server(optimizer="Adam"), timed=1000).server["optimizer"] == 2 * FULL
    assert footprint(dd.VanillaASGD(lr=0.1), 4, dd.Server(optimizer="SGD[momentum=0.9]"), timed=1000).server[
        "optimizer"
    ] == pytest.approx(FULL)


@pytest.mark.parametrize("name", sorted(dd.ALGORITHMS))
def test_every_method_can_be_counted(name: str) -> None:
    method = footprint(dd.ALGORITHMS[name](lr=0.1), 24, SERVER, timed=1000)
    assert method.server["weights"] == FULL and method.update > 0 and method.arrivals >= 1
    assert method.up > 0 and method.down >= 0


@dataclass(kw_only=True)
class TwoState(dd.State):
    velocity: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = torch.zeros_like(self.weights)


@dataclass(frozen=True)
class Two(dd.Algorithm[TwoState]):
    """A method of the user's own with one more vector."""

    def init(self, x, n, rng):
        return TwoState(x, n)

    def step(self, s, a):
        s.velocity.mul_(0.9).add_(a.value)
        s.descend(s.velocity, self.lr)
        return [dd.send(a.worker)]


def test_of_a_users_own_method_the_copy_that_undoes_a_step_counts() -> None:
    method = footprint(Two(lr=0.1), 4, SERVER, timed=1000)
    assert method.server == {"weights": FULL, "velocity": FULL, "undo": 2 * FULL}


@dataclass(frozen=True)
class Never(Two):
    """A method that makes no update."""

    def step(self, s, a):
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Idle(Two):
    """A method that gives nobody a second job."""

    def step(self, s, a):
        return []


def test_what_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_LONGEST", 50)
    with pytest.raises(dd.BadInput, match=r"wait_for \(with 4 workers\) is 5"):
        footprint(dd.DuDe(lr=0.1, wait_for=5), 4, SERVER)
    with pytest.raises(dd.BadInput, match="Never makes 0 updates in 50 arrivals"):
        footprint(Never(lr=0.1), 4, SERVER)
    with pytest.raises(dd.BadInput, match="Idle gives nobody work any more"):
        footprint(Idle(lr=0.1), 4, SERVER)


class OfLength(dd.VanillaASGD):
    """A user's own method that knows how long the model is."""

    def step(self, s: Any, a: Any) -> Any:
        assert len(a.value) in (1000, 2000, LONG)
        return super().step(s, a)


LONG = BLOCK + 1000


def test_passes_are_compared_with_the_copies_by_which_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    monkeypatch.setattr(counting, "_copied", lambda source, target: copied.append(source.nbytes + target.nbytes) or 1.0)
    found = footprint(dd.VanillaASGD(lr=0.1), 1, SERVER)
    assert set(copied) == {COPIED[-1]}, "in no cache"
    assert 0 < found.update < COPIED[-1] / 2**21, "two million weights take less than the second of the copy"


def test_shards_that_step_block_by_block_are_timed_so() -> None:
    found = footprint(dd.DuDe(lr=0.1), 4, SERVER, timed=LONG)
    assert found.by_blocks is not None and found.by_blocks > 0
    assert footprint(dd.DuDe(lr=0.1), 4, SERVER, timed=1000).by_blocks is None
    for method, server in ((dd.DuDe(lr=0.1), dd.Server(optimizer="Adam")), (OfLength(lr=0.1), SERVER)):
        assert footprint(method, 4, server, timed=LONG).by_blocks is None
    assert footprint(dd.algorithms.ADPSGD(lr=0.1), 4, SERVER, timed=LONG).by_blocks is None


@pytest.mark.parametrize(
    ("server", "optimized"),
    [(dd.Server(), False), (dd.Server(optimizer="SGD"), True), (dd.Server(schedule="StepLR[step_size=9]"), True)],
)
def test_it_is_known_who_makes_the_step(server: dd.Server, optimized: bool) -> None:
    """Also of an optimiser that keeps nothing."""
    assert footprint(dd.DuDe(lr=0.1), 4, server, timed=1000).optimized is optimized
