"""Runs with an optimiser, or with functions that watch them, advance side by side as others do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.algorithms import FADAS, DelayAdaptiveASGD
from dualdelay.runs import together
from own import Killed, computed_both_ways, digits, four, mismatches
from tables import CASES, LR

pytestmark = pytest.mark.numeric

SERVERS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "Adam"},
    "amsgrad with decay": {"optimizer": "Adam[amsgrad=true,weight_decay=0.1]"},
    "AdamW": {"optimizer": "AdamW[weight_decay=0.1]"},
    "momentum": {"optimizer": "SGD[momentum=0.9]"},
    "nesterov": {"optimizer": "SGD[momentum=0.9,nesterov=true,weight_decay=0.01]"},
    "dampening": {"optimizer": "SGD[momentum=0.5,dampening=0.3,maximize=true]"},
    "plain": {"optimizer": "SGD"},
    "another": {"optimizer": "RMSprop"},
    "of a matrix": {"optimizer": "Adafactor"},
    "schedule": {"schedule": "StepLR[step_size=10]"},
    "both": {"optimizer": "Adam", "schedule": "CosineAnnealingLR[T_max=40,eta_min=0.001]"},
    "a function": {"optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.5)},
}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups that advance together."""
    sizes: list[int] = []
    make = together._group

    def counted(members: Any, *rest: Any) -> Any:
        sizes.append(len(members))
        return make(members, *rest)

    monkeypatch.setattr(together, "_group", counted)
    return sizes


@pytest.mark.parametrize("name", SERVERS)
def test_runs_with_an_optimizer_advance_together_and_are_the_same(name: str, groups: list[int]) -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.VanillaASGD(LR), DelayAdaptiveASGD(LR)], "lr": [LR, 0.05], "seed": [0, 1]}
    computed_both_ways(
        grid, *CASES["noisy"], updates=40, evaluation=dd.Evaluation(every=7), server=dd.Server(**SERVERS[name])
    )
    assert groups == [2] * 6


@pytest.mark.parametrize("name", ["Adam", "momentum", "schedule"])
def test_networks_with_an_optimizer_and_one_rate_are_the_same_side_by_side(name: str, groups: list[int]) -> None:
    grid = {"algorithm": [dd.DuDe(0.01)], "problem": [digits(0.1), digits(0.5)]}
    computed_both_ways(grid, speeds=four, updates=12, evaluation=dd.Evaluation(every=6), server=dd.Server(**SERVERS[name]))
    assert groups == [2]


def test_a_method_that_takes_no_optimizer_is_refused_by_itself(groups: list[int]) -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.AutoDuDe(), FADAS(LR)], "seed": [0]}
    table = computed_both_ways(grid, *CASES["noisy"], updates=12, server=dd.Server(optimizer="Adam"))
    assert list(table.failed) == [1, 2] and groups == [1]
    assert "takes no optimizer" in table.failed[2]


@pytest.mark.parametrize("name", ["Adam", "momentum", "both", "another"])
@pytest.mark.parametrize("alone", [False, True], ids=["together", "by itself"])
def test_runs_with_an_optimizer_go_on_from_a_checkpoint(name: str, alone: bool, tmp_path: Path) -> None:
    """All of them in the sweep they were stopped in, or one of them by itself."""
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.05, 0.1]}
    options: dict[str, Any] = {"updates": 30, "server": dd.Server(**SERVERS[name]), "compute": dd.Compute(batch=True)}

    def stops(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version == 17:
            raise Killed

    with pytest.raises(Killed):
        dd.sweep(grid, *CASES["noisy"], folder=tmp_path, checkpoint_every=5, watch=[stops], **options)
    whole = dd.sweep(grid, *CASES["noisy"], **options).runs
    if alone:
        runs = [dd.resume(path) for path in sorted(tmp_path.iterdir())]
    else:
        runs = dd.sweep(grid, *CASES["noisy"], folder=tmp_path, checkpoint_every=5, **options).runs
    for run, other in zip(runs, whole, strict=True):
        assert mismatches(run, other) == []


def test_functions_that_watch_see_each_run_as_if_it_were_alone(groups: list[int]) -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.FedBuff(LR, buffer=2)], "lr": [LR, 0.05]}

    def seen(batch: bool) -> list[list[Any]]:
        calls: dict[int, list[Any]] = {}
        states = []  # kept, so that no other has its place

        def look(s: dd.State, a: dd.Arrival) -> None:
            states.append(s)
            own = [s.version, s.n, *s.x.tolist(), a.worker, a.job.draw, a.time, a.loss, *a.value.tolist()]
            calls.setdefault(id(s), []).append(
                [*own, s.optimizer is None, *(s.total.tolist() if hasattr(s, "total") else ())]
            )

        dd.sweep(grid, *CASES["noisy"], updates=12, watch=[look], compute=dd.Compute(batch=batch))
        return list(calls.values())

    together, alone = seen(True), seen(False)
    assert groups == [2, 2]
    assert [len(calls) for calls in together] == [len(calls) for calls in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_an_error_of_a_function_that_watches_is_the_user_s_side_by_side_as_alone() -> None:
    def fails(state: dd.State, arrival: dd.Arrival) -> None:
        raise ZeroDivisionError("of the user's")

    for batch, rates in ((True, [LR, 0.05]), (True, [LR]), (False, [LR, 0.05])):
        with pytest.raises(ZeroDivisionError, match="of the user's"), warnings.catch_warnings(action="error"):
            dd.sweep(
                {"algorithm": [dd.DuDe(LR)], "lr": rates}, *CASES["noisy"],
                updates=5, watch=[fails], compute=dd.Compute(batch=batch),
            )  # fmt: skip


def test_a_run_that_diverges_is_shown_no_more_until_it_is_done_by_itself() -> None:
    finite = []
    dd.sweep(
        {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 1e200]}, *CASES["noisy"], updates=25,
        watch=[lambda s, a: finite.append(bool(torch.isfinite(a.value).all()))], compute=dd.Compute(batch=True),
    )  # fmt: skip
    assert len(finite) > 25 and all(finite)
