"""One meaning of a seed: it names every random choice of a run, from Python as from the shell, alone as in a comparison."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.runs.names import label
from helpers import drift
from own import differences, mlp, shards

METHODS = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)]
THREE = dd.FixedSpeeds([1.0, 2.0, 4.0])


def by_label(table: dd.Sweep, seed: int) -> dict[str, dd.Run]:
    return {name: run for name, number, run in table.ended if number == seed}


@pytest.mark.numeric
@pytest.mark.parametrize("batch", [False, True])
def test_one_seed_or_several_or_alone_a_run_is_the_same(batch: bool) -> None:
    problem, speeds = dd.Digits(workers=4, alpha=0.3, hidden=4), dd.TruncatedNormalSpeeds(4, std=2.0)
    options: dict[str, Any] = {"updates": 8, "compute": dd.Compute(batch=batch)}
    of_one = by_label(dd.compare(METHODS, problem, speeds, seeds=[1], **options), 1)
    of_two = by_label(dd.compare(METHODS, problem, speeds, seeds=[0, 1], **options), 1)
    swept = by_label(dd.sweep({"algorithm": METHODS, "seed": [0, 1]}, problem, speeds, **options), 1)
    alone = {label(method): dd.simulate(method, problem, speeds, seed=1, **options) for method in METHODS}
    for name, run in alone.items():
        for other in (of_one, of_two, swept):
            if batch:  # several runs in one call round otherwise
                assert np.allclose(other[name].x, run.x, rtol=0, atol=drift(8, 0.05, 256, torch.float32)), name
            else:
                assert differences(other[name], run) == [], name
    assert not torch.equal(of_two["dude[lr=0.05]"].x, dd.simulate(METHODS[0], problem, speeds, updates=8, seed=2).x)


def test_the_shell_and_python_mean_the_same(tmp_path: Path) -> None:
    place = tmp_path / "shell"
    common = ["--problem", "digits[workers=3,alpha=0.3,hidden=4]", "--speeds", "truncated_normal[std=2]", "--updates", "8"]
    main(["compare", "dude[lr=0.05]", *common, "--seeds", "1", "2", "--folder", str(place)])
    assert (place / "comparison.parquet").exists()
    problem, speeds = dd.Digits(workers=3, alpha=0.3, hidden=4), dd.TruncatedNormalSpeeds(3, std=2.0)
    table = dd.compare([dd.DuDe(lr=0.05)], problem, speeds, seeds=[1, 2], updates=8)
    for seed in (1, 2):
        run = by_label(table, seed)["dude[lr=0.05]"]
        kept = dd.load(place / f"dude-lr=0.05-seed{seed}")
        assert torch.equal(kept.x, run.x) and kept.metrics.objective.tolist() == run.metrics.objective.tolist()
    main(["train", "dude[lr=0.05]", *common, "--seed", "2", "--folder", str(tmp_path / "alone")])
    assert torch.equal(dd.load(tmp_path / "alone").x, by_label(table, 2)["dude[lr=0.05]"].x)


def test_a_seed_varies_the_minibatches_of_a_network_that_has_none_of_its_own() -> None:
    network = dd.Network(mlp(), cross_entropy, shards(), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = dd.compare([dd.DuDe(lr=0.05)], network, THREE, seeds=[0, 1], updates=5)
        seeded = dd.Network(mlp(), cross_entropy, shards(), 4, seed=7)
        kept = dd.compare([dd.DuDe(lr=0.05)], seeded, THREE, seeds=[0, 1], updates=5)
    first, second = (run for _, _, run in table.ended)
    assert not torch.equal(first.x, second.x)
    first, second = (run for _, _, run in kept.ended)
    assert torch.equal(first.x, second.x)


def test_what_does_not_vary_is_named_in_a_warning_and_in_the_notes() -> None:
    network, recorded = dd.Network(mlp(), cross_entropy, shards(), 4), dd.speeds.RecordedSpeeds([[1.0, 2.0], [2.0], [4.0]])
    with pytest.warns(UserWarning, match=r"the problem .*the speeds \(RecordedSpeeds has no seed\)") as warned:
        table = dd.compare([dd.DuDe(lr=0.05)], network, recorded, seeds=[0, 1], updates=3)
    assert len(warned) == 1 and any("RecordedSpeeds has no seed" in note for note in table.notes)
    with pytest.warns(UserWarning, match="seed=3 of its own"):
        dd.compare([dd.DuDe(lr=0.05)], dd.Digits(workers=3, hidden=4, seed=3), THREE, seeds=[0, 1], updates=3)
    with pytest.warns(UserWarning, match="DriftingSpeeds was given seed=3 of its own"):
        speeds = dd.speeds.DriftingSpeeds(dd.TruncatedNormalSpeeds(3, std=2.0), seed=3)
        dd.sweep({"algorithm": METHODS, "seed": [0, 1]}, dd.Digits(workers=3, hidden=4), speeds, updates=3)


def test_one_seed_or_what_varies_gives_no_warning() -> None:
    network = dd.Network(mlp(), cross_entropy, shards(), 4)
    assert dd.compare([dd.DuDe(lr=0.05)], network, dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0]]), updates=3).notes == ()
    digits, speeds = dd.Digits(workers=3, hidden=4), dd.TruncatedNormalSpeeds(3, std=2.0)
    assert dd.compare([dd.DuDe(lr=0.05)], digits, speeds, seeds=[0, 1], updates=3).notes == ()
    assert dd.compare([dd.DuDe(lr=0.05)], digits, THREE, seeds=[0, 1], updates=3).notes == ()  # fixed, as they say


def test_problem_and_speeds_may_be_functions_of_the_seed() -> None:
    asked: list[int] = []

    def problem(seed: int) -> dd.Network:
        asked.append(seed)
        rng = torch.Generator().manual_seed(seed)
        data = [(torch.randn(20, 6, generator=rng), torch.randint(3, (20,), generator=rng)) for _ in range(3)]
        return dd.Network(mlp(), cross_entropy, data, 4, seed=seed)

    def speeds(seed: int) -> dd.SpeedModel:
        return dd.FixedSpeeds([1.0, 2.0, 4.0 + seed])

    table = dd.compare(METHODS, problem, speeds, seeds=[0, 5], updates=6)
    assert asked == [0, 5] and table.notes == ()
    first, second = by_label(table, 0)["dude[lr=0.05]"], by_label(table, 5)["dude[lr=0.05]"]
    assert first.metrics.objective[0] != second.metrics.objective[0]  # another split
    assert first.trace.time.tolist() != second.trace.time.tolist()
    alone = dd.simulate(METHODS[0], problem(5), speeds(5), updates=6, seed=5)
    assert torch.equal(second.x, alone.x)
    swept = dd.sweep({"algorithm": METHODS, "seed": [0, 5]}, problem, speeds, updates=6)
    assert torch.equal(by_label(swept, 5)["dude[lr=0.05]"].x, second.x)


def test_one_bad_seed_does_not_discard_the_others() -> None:
    def problem(seed: int) -> dd.Problem:
        data = [(inputs * (math.nan if seed == 1 else 1.0), targets) for inputs, targets in shards()]
        return dd.Network(mlp(), cross_entropy, data, 4)

    table = dd.compare(METHODS[:1], problem, THREE, seeds=[0, 1, 2], updates=3)
    assert [seed for _, seed, _ in table.ended] == [0, 2] and "the objective at the start is nan" in table.failed[1]


def test_a_seed_reaches_problems_and_speeds_inside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = dd.LocalSteps(dd.Quadratic([[0.0], [6.0], [12.0]], noise=1.0), 2, 0.1)
    changing = dd.speeds.ChangingSpeeds(dd.TruncatedNormalSpeeds(3), [1.0], [[1, 1, 1], [2, 2, 2]])
    table = dd.compare([dd.VanillaASGD(0.05)], problem, changing, seeds=(0, 1), time=6.0)
    first, second = (run for _, _, run in table.ended)
    assert first.metrics.objective[-1] != second.metrics.objective[-1]
    assert first.trace.time.tolist() != second.trace.time.tolist()
    text = "local_steps[k=2,lr=0.1,problem=quadratic[centers=[[0.0],[6.0],[12.0]],noise=1.0]]"
    main(["compare", "dude[lr=0.05]", "--problem", text, "--speeds", "fixed[times=[1,2,4]]", "--updates", "9",
          "--seeds", "0", "1", "--folder", str(tmp_path / "shell"), "--json"])  # fmt: skip
    one, other = json.loads(capsys.readouterr().out)["runs"]
    assert one["objective"] != other["objective"]


def test_seeds_and_a_grid_may_be_arrays_of_numpy(tmp_path: Path) -> None:
    problem = dd.problems.Logistic(3, 2, 10)
    arrays = {"algorithm": METHODS[:1], "lr": np.array([0.25, 0.5]), "seed": np.arange(2)}
    lists = {"algorithm": METHODS[:1], "lr": [0.25, 0.5], "seed": [0, 1]}
    one = dd.sweep(arrays, problem, THREE, updates=3, folder=tmp_path / "arrays")
    other = dd.sweep(lists, problem, THREE, updates=3, folder=tmp_path / "lists")
    assert one.points == other.points and one.objective.tolist() == other.objective.tolist()
    assert [run.folder.name for run in one.runs] == [run.folder.name for run in other.runs]
    assert dd.compare(METHODS[:1], problem, THREE, seeds=np.arange(2), updates=2).seed.tolist()[-1] == 1
