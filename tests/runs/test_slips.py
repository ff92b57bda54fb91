"""What people who write their own methods, speeds, links and scripts get wrong, and what they are told."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualdelay as dd
from dualdelay.analysis.figures import _looks
from dualdelay.analysis.reports import sentence
from dualdelay.cli import main
from dualdelay.core import Order
from own import mlp, shards

QUAD = dd.Quadratic([[0.0, 1.0], [6.0, 2.0], [12.0, 3.0]])
THREE = dd.FixedSpeeds([1.0, 2.0, 4.0])
DUDE = dd.DuDe(lr=0.05)


class Pace(dd.SpeedModel):
    n = 3

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> Any:
        return self.scale if not isinstance(self.scale, float) else self.scale * (1 + worker)


class Slower(dd.speeds.Link):
    def seconds(self, size: int) -> Any:
        return self.extra

    def with_extra(self, extra: Any) -> Slower:
        object.__setattr__(self, "extra", extra)
        return self


def test_other_speeds_or_another_link_of_one_s_own_are_not_taken_for_those_of_the_folder(tmp_path: Path) -> None:
    first = dd.compare([DUDE], QUAD, Pace(1.0), updates=20, folder=tmp_path / "f")
    assert dd.compare([DUDE], QUAD, Pace(1.0), updates=20, folder=tmp_path / "f").runs[0].time == first.runs[0].time
    with pytest.raises(dd.BadInput, match="another"):
        dd.compare([DUDE], QUAD, Pace(100.0), updates=20, folder=tmp_path / "f")
    folder = tmp_path / "f" / "dude-lr=0.05-seed0"
    with pytest.raises(dd.BadInput, match=r"recorded speeds is .*'1.0'.*'100.0'.*pass the same"):
        dd.resume(folder, speeds=Pace(100.0), updates=30)
    assert dd.resume(folder, speeds=Pace(1.0), updates=30).version == 30
    dd.simulate(DUDE, QUAD, dd.SimulatedFleet(THREE, link=Slower().with_extra(1.0)), updates=20, folder=tmp_path / "g")
    with pytest.raises(dd.BadInput, match="recorded link"):
        dd.resume(tmp_path / "g", updates=30, speeds=dd.SimulatedFleet(None, link=Slower().with_extra(9.0)))


@pytest.mark.parametrize("value", [-1, math.nan, None, "long"])
def test_times_that_are_none_are_refused_with_the_name_of_who_gave_them(value: Any) -> None:
    with pytest.raises(dd.BadInput, match=r"Pace gave .* for job 0 of worker 0; expected seconds, zero or more"):
        dd.simulate(DUDE, QUAD, Pace(value), updates=3)
    with pytest.raises(dd.BadInput, match=r"Slower gave .* bytes; expected seconds, zero or more"):
        dd.simulate(DUDE, QUAD, dd.SimulatedFleet(THREE, link=Slower().with_extra(value)), updates=3)


def test_a_time_may_be_a_tensor_or_a_number_of_numpy(tmp_path: Path) -> None:
    run = dd.simulate(DUDE, QUAD, Pace(torch.tensor(2.0)), updates=3, folder=tmp_path / "run")
    assert type(run.time) is float and run.time == 4.0


def test_speeds_without_a_number_of_workers_and_a_link_that_is_none_are_refused() -> None:
    class Countless(dd.SpeedModel):
        def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
            return 1.0

    with pytest.raises(dd.BadInput, match="Countless does not say for how many workers it is"):
        dd.simulate(DUDE, QUAD, Countless(), updates=3)
    fast: Any = "fast"
    with pytest.raises(dd.BadInput, match=r"link is 'fast'; expected a dd\.Link"):
        dd.simulate(DUDE, QUAD, dd.SimulatedFleet(THREE, link=fast), updates=3)


@dataclass(frozen=True)
class Own(dd.Algorithm[dd.State]):
    """Moves the weights itself, in one way or another."""

    how: str = ""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        state = dd.State(x, n)
        if self.how == "beside":
            vars(state)["mean"] = torch.zeros_like(x)
        return state

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        if self.how == "in place":
            s.weights -= self.lr * a.value
            s.version += 1
        elif self.how == "replaced":
            s.weights = s.weights - self.lr * a.value
            s.version += 1
        else:
            s.descend(a.value, self.lr)
            s.version -= self.how == "back"
        return [dd.send(a.worker)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("in place", r"Own\.step wrote into state\.x; move it with state\.descend"),
        ("replaced", r"Own\.step replaced state\.weights without"),
        ("back", r"Own\.step set state\.version from 0 to 0; leave it alone"),
        ("beside", r"Own keeps mean in a State, which has no such field, so that it could not be saved"),
    ],
)
def test_a_method_that_goes_around_descend_is_refused(how: str, words: str) -> None:
    """It would change models in flight, an optimizer would be passed over, or a resumed run would forget."""
    with pytest.raises(dd.BadInput, match=words):
        dd.simulate(
            Own(lr=0.1, how=how), QUAD, THREE, updates=5, server=dd.Server(optimizer="Adam" if how == "replaced" else None)
        )
    assert dd.simulate(Own(lr=0.1), QUAD, THREE, updates=5).version == 5


def test_own_names_have_looks_that_differ() -> None:
    looks = _looks(["mine", "other", "mine[lr=2]", "dude[lr=1]"])
    assert len({(look["color"], str(look["linestyle"])) for look in looks.values()}) == 4
    assert looks["mine"]["color"] == looks["mine[lr=2]"]["color"] != looks["other"]["color"]


def test_a_sentence_says_who_ends_above_the_start() -> None:
    table = dd.compare([dd.VanillaASGD(lr=2.5), DUDE], QUAD, THREE, updates=12)
    assert "vanilla[lr=2.5] ends above where it began" in sentence(table) and "dude[lr=0.05] ends above" not in sentence(
        table
    )


def test_one_bad_seed_does_not_discard_the_others() -> None:
    def problem(seed: int) -> dd.Problem:
        data = [(inputs * (math.nan if seed == 1 else 1.0), targets) for inputs, targets in shards()]
        return dd.Network(mlp(), nn.functional.cross_entropy, data, 4)

    table = dd.compare([DUDE], problem, THREE, seeds=[0, 1, 2], updates=3)
    assert [seed for _, seed, _ in table.ended] == [0, 2] and "the objective at the start is nan" in table.failed[1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["compare", "dude[lr=1e25]", "--problem", "quadratic[centers=[[0],[1]],noise=0.1]", "--updates", "400"], 1),
        (["train", "dud[lr=0.1]"], 2),
    ],
)
def test_there_is_a_last_line_for_machines_also_when_it_fails(
    words: list[str], code: int, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--speeds", "fixed[times=[1,2]]", "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert ended.value.code == code == said["exit"] and said["error"] and said["command"] == words[0]


def test_models_that_give_a_dict_or_nothing_like_a_loss() -> None:
    class Gives(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.linear, self.kind = nn.Linear(6, 3), kind

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            loss = nn.functional.cross_entropy(self.linear(inputs), labels)
            return {"loss": loss} if self.kind is dict else (loss,)

    data = [{"inputs": inputs, "labels": targets} for inputs, targets in shards()]
    assert dd.simulate(DUDE, dd.Network(Gives(dict), shards=data, batch_size=4), THREE, updates=3).version == 3
    with pytest.raises(dd.BadInput, match=r"model\(\*\*batch\) gave a tuple without a loss.*Give the step"):
        dd.Network(Gives(tuple), shards=data, batch_size=4)
    more = [{**one, "ids": one["labels"]} for one in data]
    with pytest.raises(dd.BadInput, match=r"first gradient could not be computed: TypeError: .*'ids'"):
        dd.Network(Gives(dict), shards=more, batch_size=4)
    with pytest.raises(dd.BadInput, match=r"test gives a batch that is a dict; expected pairs"):
        dd.Network(Gives(dict), shards=data, batch_size=4, test=data[0])


def test_another_optimizer_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    dd.simulate(
        DUDE,
        QUAD,
        THREE,
        updates=5,
        folder=tmp_path / "run",
        server=dd.Server(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr)),
    )
    with pytest.raises(dd.BadInput, match="cannot go on from what was saved"):
        dd.resume(tmp_path / "run", updates=9, optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr))


def test_a_run_that_was_stopped_early_says_why_it_does_not_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = dd.EarlyStop(target=1e9)
    first = dd.simulate(
        DUDE, QUAD, THREE, updates=50, evaluation=dd.Evaluation(early_stop=stop, every=1), folder=tmp_path / "run"
    )
    again = dd.resume(tmp_path / "run", updates=100)
    assert again.version == first.version < 50 and "begin another run from it" in caplog.text
    assert dd.simulate(DUDE, QUAD, THREE, updates=10, server=dd.Server(initial_weights=tmp_path / "run")).version == 10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda method: dd.compare(method, QUAD, THREE, updates=3), r"expected a list of them: \[dd\.DuDe"),
        (lambda method: dd.compare([method, "dude"], QUAD, THREE, updates=3), r"expected a list of them"),
        (lambda method: dd.compare([method], QUAD, THREE, updates=3, seeds=1.5), r"seeds is 1.5.* seeds=\[0, 1, 2\]"),
        (
            lambda method: dd.simulate(method, QUAD, THREE, updates=3, evaluation=dd.Evaluation(metrics=[len])),
            "expected functions by name",
        ),
        (lambda method: dd.simulate(method, QUAD, THREE, updates=3, watch=print), r"expected a list of functions"),
        (
            lambda method: dd.simulate(method, QUAD, THREE, updates=3, watch=dd.Reporting(log=print)),
            r"expected a list of functions",
        ),
        (
            lambda method: dd.simulate(method, QUAD, THREE, updates=3, evaluation=dd.Evaluation(early_stop=print)),
            r"expected a dd\.EarlyStop",
        ),
    ],
)
def test_natural_slips_get_one_clear_error(call: Any, words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        call(DUDE)
