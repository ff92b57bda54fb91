"""CIFAR-10 is what its files hold, dealt to workers by the paper's rule, and files that are not right are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.paper.experiment import classes, draws
from dualdelay.problems import images
from dualdelay.problems.cifar10 import FILES
from dualdelay.problems.files import cache_folder
from dualdelay.problems.splits import deal
from dualdelay.problems.stacked import Stacked
from dualdelay.runs.names import describe, label, parameters, parse, rebuild
from helpers import operations, rounding
from own import Scenario, differences

NAMES = list(FILES)
COMMAND = "dualdelay data cifar10"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images, by channel


def rows(count: int, seed: int) -> bytes:
    """Dark images with a bright bar that says the class: its height and its colour; each class as often, if it can be."""
    rng = np.random.default_rng(seed)
    images = b""
    for digit in rng.permutation(np.arange(count) % 10).tolist():
        image = rng.integers(0, 60, (3, 32, 32))
        image[digit % 3, 3 * digit : 3 * digit + 4] += 190
        images += bytes([digit]) + image.astype(np.uint8).tobytes()
    return images


BINS = {name: rows(60, seed) for seed, name in enumerate(NAMES)}
LABELS = {name: list(data[::3073]) for name, data in BINS.items()}
TRAIN = np.array([label for name in NAMES[:-1] for label in LABELS[name]])


def sums(bins: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.md5(data).hexdigest() for name, data in bins.items()}


def put(folder: Path, bins: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in bins.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 5 x 60 images to train with and 60 to test with, whose sums stand for the official ones."""
    monkeypatch.setattr(dd.Cifar10, "files", sums(BINS))
    return put(tmp_path / "cifar10", BINS)


def tiny(root: Path | str | None, **changes: Any) -> dd.Cifar10:
    return dd.Cifar10(**{"workers": 4, "alpha": 0.5, "root": root, "batch_size": 4, **changes})


def dealt(problem: dd.Cifar10) -> list[list[int]]:
    """Every worker's samples, as numbers in the training data."""
    return [shard.rows.tolist() for shard in problem.shards()]


def train_and_test(problem: dd.Cifar10) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images and classes that all workers share, and those that the server tests with."""
    pairs = [shard.pair for shard in problem.shards()]
    assert all(part is first for pair in pairs for part, first in zip(pair, pairs[0], strict=True))
    return pairs[0], problem._test_data._shard.pair


def pixels(inputs: Tensor) -> Tensor:
    """The bytes that normalised images were made of."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    levels = (inputs.double() * std + mean) * 255
    assert (levels - levels.round()).abs().max() <= rounding(4, torch.float32) * 255
    return levels.round().long()


# --- what the files hold ---


@pytest.mark.numeric
def test_an_image_is_its_red_its_green_and_its_blue_bytes_row_by_row(tmp_path: Path) -> None:
    channel, row, column = np.ogrid[:3, :32, :32]
    levels = (100 * channel + 7 * row + 3 * column) % 256  # red, green and blue begin with 0, 100 and 200
    image = bytes(levels.flatten().tolist())
    bins = {name: bytes([at]) + image[::-1] for at, name in enumerate(NAMES)}
    bins["data_batch_2.bin"] = bytes([7]) + image
    train, test = dd.Cifar10.read(put(tmp_path / "one", bins))
    assert train.tensors[0].shape == (5, 3, 32, 32) and test.tensors[0].shape == (1, 3, 32, 32)
    assert np.array_equal(pixels(train.tensors[0])[1], levels)
    assert train.tensors[1].tolist() == [0, 7, 2, 3, 4] and test.tensors[1].tolist() == [5]
    assert train.tensors[0].dtype == torch.float32 and train.tensors[1].dtype == torch.int64


@pytest.mark.numeric
def test_images_come_in_the_order_of_the_files_and_the_last_file_is_the_test(tmp_path: Path) -> None:
    bins = {name: rows(3 + at, at) for at, name in enumerate(NAMES)}
    train, test = dd.Cifar10.read(put(tmp_path / "uneven", bins))
    assert [len(train), len(test)] == [3 + 4 + 5 + 6 + 7, 8]
    for data, names in ((train, NAMES[:-1]), (test, NAMES[-1:])):
        content = torch.cat([data.tensors[1][:, None], pixels(data.tensors[0]).reshape(len(data), -1)], dim=1)
        assert bytes(content.flatten().tolist()) == b"".join(bins[name] for name in names)


def test_the_problem_s_data_are_those_of_its_files(root: Path) -> None:
    problem_s, files = train_and_test(tiny(root)), dd.Cifar10.read(root)
    for pair, data, labels in zip(problem_s, files, (TRAIN.tolist(), LABELS["test_batch.bin"]), strict=True):
        assert all(map(torch.equal, pair, data.tensors))
        assert pair[1].tolist() == labels


# --- files that are not right ---


def refusal(root: Path | None) -> str:
    with pytest.raises(dd.BadInput) as error:
        tiny(root)
    return str(error.value)


DAMAGED = {
    "one byte": ("data_batch_1.bin", lambda good: good[:5000] + bytes([good[5000] ^ 255]) + good[5001:]),
    "one bit of a label": ("data_batch_4.bin", lambda good: good[:3073] + bytes([good[3073] ^ 1]) + good[3074:]),
    "cut off": ("test_batch.bin", lambda good: good[:-3073]),
    "one row too many": ("data_batch_5.bin", lambda good: good + good[:3073]),
    "empty": ("test_batch.bin", lambda good: b""),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_named_with_its_sum_and_the_command_that_mends_it(root: Path, how: str) -> None:
    name, damage = DAMAGED[how]
    bad = damage(BINS[name])
    (root / name).write_bytes(bad)
    message = refusal(root)
    assert f"{name} is damaged (md5 {hashlib.md5(bad).hexdigest()}, expected {sums(BINS)[name]})" in message
    assert str(root) in message and COMMAND in message
    assert [file for file in NAMES if file in message] == [name]
    (root / name).write_bytes(BINS[name])
    assert tiny(root).workers == 4  # a refusal is not remembered


def test_all_bad_files_are_named_at_once(root: Path) -> None:
    (root / "data_batch_2.bin").write_bytes(b"?")
    (root / "data_batch_3.bin").unlink()
    (root / "test_batch.bin").unlink()
    (root / "test_batch.bin").mkdir()
    message = refusal(root)
    assert f"data_batch_2.bin is damaged (md5 {hashlib.md5(b'?').hexdigest()}, expected" in message
    assert "data_batch_3.bin is missing" in message
    assert "test_batch.bin cannot be read (Is a directory)" in message
    assert [file for file in NAMES if file in message] == ["data_batch_2.bin", "data_batch_3.bin", "test_batch.bin"]
    assert message.count(COMMAND) == 1


def test_a_root_that_is_not_there_or_no_folder_is_refused(root: Path) -> None:
    for path, reason in ((root / "elsewhere", "is missing"), (root / "test_batch.bin", "cannot be read (Not a directory)")):
        message = refusal(path)
        assert all(f"{name} {reason}" in message for name in NAMES)
        assert COMMAND in message


def test_whole_files_of_another_data_set_are_refused(tmp_path: Path) -> None:
    message = refusal(put(tmp_path / "tiny", BINS))  # the sums are the official ones here
    assert f"test_batch.bin is damaged (md5 {sums(BINS)['test_batch.bin']}, expected {FILES['test_batch.bin']})" in message


# --- where they are ---


def test_data_are_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DUALDELAY_DATA", str(tmp_path / "data"))
    assert cache_folder() == tmp_path / "data"
    for variable, folder in (("DUALDELAY_DATA", tmp_path / "cache"), ("XDG_CACHE_HOME", tmp_path / "home" / ".cache")):
        monkeypatch.setenv(variable, "")  # empty is as good as not set
        assert cache_folder() == folder / "dualdelay"
        monkeypatch.delenv(variable)
        assert cache_folder() == folder / "dualdelay"


def test_without_a_root_the_data_are_those_of_the_cache_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALDELAY_DATA", str(root.parent))
    problem = tiny(None)
    assert problem.settings["root"] is None
    assert problem.fingerprint() == tiny(root).fingerprint()
    monkeypatch.setenv("DUALDELAY_DATA", str(root.parent / "empty"))
    assert str(root.parent / "empty" / "cifar10") in refusal(None)


# --- settings ---


# 3*6*25+6 + 6*16*25+16 + 400*120+120 + 120*84+84 + 84*10+10, and 3*32*25+32 + 32*64*25+64 + 1600*512+512 + 512*10+10,
# and 192*64+64 + 64*10+10, and 27*16+32 + 2*(144*16+32) + 144*32+64 + 288*32+64 + 16*32 + 288*64+128 + 576*64+128 + 32*64
# + 64*10+10
SIZES = {"lenet": 62_006, "wide": 878_538, "small": 13_002, "resnet": 77_850}


def test_every_model_is_documented_with_its_weights() -> None:
    assert list(SIZES) == list(dd.Cifar10.models)
    documented = " ".join((dd.Cifar10.__doc__ or "").split())
    assert all(f'"{model}"' in documented and f"{weights:,}" in documented for model, weights in SIZES.items())


@pytest.mark.parametrize(("model", "weights"), SIZES.items())
def test_a_model_has_as_many_weights_as_documented(root: Path, model: str, weights: int) -> None:
    problem = tiny(root, model=model)
    x = problem.start(0)
    assert x.shape == (weights,)
    assert torch.equal(x, tiny(root, model=model, seed=5, alpha=2.0).start(0))  # named by the run's seed alone
    assert not torch.equal(x, problem.start(1))
    with torch.no_grad():
        assert problem.model(x)(train_and_test(problem)[1][0][:2]).shape == (2, 10)


@pytest.mark.numeric
@pytest.mark.parametrize("model", SIZES)
def test_gradients_of_many_jobs_at_once_are_those_of_one_at_a_time(root: Path, model: str) -> None:
    """To the last few digits: those of another minibatch or model would be off by a hundredth and more."""
    problem, other = tiny(root, model=model, seed=1), tiny(root, model=model, seed=2)
    assert problem.batch_key == other.batch_key
    jobs = [(0, 0, 0), (1, 2, 3), (0, 3, 7)]  # problem, worker, draw
    starts = torch.stack([problem.start(seed) for seed in range(3)])
    together = problem.batched([problem, other])
    assert isinstance(together, Stacked)
    gradients, losses = together([starts], *map(list, zip(*jobs, strict=True)))
    close = rounding(operations(problem), torch.float32)
    for found, value, x, (number, worker, draw) in zip(gradients, losses.tolist(), starts, jobs, strict=True):
        gradient, loss = (problem, other)[number].gradient(x, worker, draw)
        assert (found - gradient).norm() <= close * gradient.norm() and value == pytest.approx(loss, rel=close)


@pytest.mark.numeric
def test_a_residual_network_starts_with_paths_beside_its_layers_and_has_no_memory_of_what_it_saw(root: Path) -> None:
    """An image's outputs do not depend on the other images, and without its convolutions a block hands on what it got."""
    problem = tiny(root, model="resnet")
    images = train_and_test(problem)[0][0][:6]
    net = problem.model(problem.start(0))
    with torch.no_grad():
        outputs = net(images)
        alone = torch.cat([net(image[None]) for image in images])
        assert (outputs - alone).abs().max() <= rounding(operations(problem), torch.float32) * outputs.abs().max()
        block = net[3]
        inside = torch.rand(2, 16, 8, 8)
        for parameter in block.path.parameters():
            parameter.zero_()
        assert torch.equal(block(inside), inside)
    assert not list(net.buffers())


@pytest.mark.parametrize("model", ["resnet18", "", None])
def test_an_unknown_model_is_refused_with_the_names_of_the_models(root: Path, model: Any) -> None:
    with pytest.raises(dd.BadInput, match=r"model is .*expected one of 'lenet', 'wide', 'small', 'resnet'"):
        tiny(root, model=model)


@pytest.mark.parametrize("samples", [None, 120])
@pytest.mark.parametrize("split", ["dirichlet", "iid", "label"])
def test_every_sample_is_one_worker_s(root: Path, split: str, samples: int | None) -> None:
    parts = dealt(tiny(root, split=split, samples=samples))
    assert len(parts) == 4
    assert sorted(row for part in parts for row in part) == list(range(samples or 300))


def test_a_split_is_named_by_its_seed(root: Path) -> None:
    problem, again = (tiny(root, seed=3) for _ in range(2))
    assert dealt(problem) == dealt(again) and problem.fingerprint() == again.fingerprint()
    others = [tiny(root, seed=4), tiny(root, seed=3, alpha=0.6), tiny(root, seed=3, samples=299)]
    assert len({str(dealt(other)) for other in (problem, *others)}) == 4
    assert len({other.fingerprint() for other in (problem, *others)}) == 4


def test_an_own_split_is_taken_as_it_is(root: Path) -> None:
    own = [[299, 0], [7], [5, 5, 5], [100]]
    assert dealt(tiny(root, split=own)) == own
    for bad, words in (([[0], [1], [2], [300]], "outside 0..299"), ([[0]], "1 lists; expected 4")):
        with pytest.raises(dd.BadInput, match=words):
            tiny(root, split=bad)


def test_every_setting_does_what_it_says(root: Path) -> None:
    own = [[0, 1, 2, 3, 4, 5], [6], [7, 8], [9]]
    problem = tiny(root, split=own, weights="samples", batch_size=7, full_gradient=True)
    assert problem.scales == pytest.approx([2.4, 0.4, 0.8, 0.4])  # 4 workers times their share of 10 samples
    assert tiny(root, split=own).scales == [1.0] * 4
    assert problem.indices(0, 0).shape == (7,)
    assert problem.evaluate(problem.start(0))["gradient_norm"] > 0
    few = {"workers": 30, "alpha": 0.05, "samples": 60}
    dropped = tiny(root, empty="drop", **few)
    assert 1 < dropped.workers < 30
    assert dealt(dropped) == [part.tolist() for part in deal(TRAIN[:60], 30, 0.05, 0) if len(part)]
    with pytest.raises(dd.BadInput, match="got no sample"):
        tiny(root, empty="error", **few)
    with pytest.raises(dd.BadInput, match=r"in 1000 splits of 60 samples .*expected 5"):
        tiny(root, minimum=5, **few)


@pytest.mark.parametrize("samples", [None, 200])
def test_all_problems_of_one_root_share_one_copy_of_the_data(
    root: Path, samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "link").symlink_to(root)
    monkeypatch.chdir(root.parent)
    same = {"samples": samples}
    problems = [tiny(root, **same), tiny(root, alpha=5.0, **same), tiny(root, seed=9, workers=2, **same)]
    problems += [tiny(root, **same).reseeded(8), tiny(root, split="iid", **same)]
    problems += [tiny(path, **same) for path in (str(root), "cifar10", Path("link"))]
    places = {tuple(part.data_ptr() for pair in train_and_test(problem) for part in pair) for problem in problems}
    assert len(places) == 1


@pytest.mark.parametrize(("samples", "few"), [(300, 60), (128, 25), (5, 1), (4, 1)])
def test_a_number_of_samples_means_the_first_and_a_fifth_as_many_to_test(root: Path, samples: int, few: int) -> None:
    everything, problem = train_and_test(tiny(root)), train_and_test(tiny(root, samples=samples, split="iid"))
    for pair, complete, count in zip(problem, everything, (samples, few), strict=True):
        assert all(torch.equal(part, all_of_it[:count]) for part, all_of_it in zip(pair, complete, strict=True))


@pytest.mark.parametrize("samples", [0, -1, 3, 50_001, 20.0, "20", True])
def test_a_number_of_samples_out_of_range_is_refused(root: Path, samples: Any) -> None:
    with pytest.raises(dd.BadInput, match=rf"samples is {samples!r}; expected a whole number, 4\.\.50000"):
        tiny(root, samples=samples)


# --- names ---


def test_with_another_seed_everything_else_stays(root: Path) -> None:
    changes = {"workers": 3, "alpha": 2.0, "model": "wide", "samples": 200, "minimum": 2, "batch_size": 5}
    problem = tiny(root, seed=1, empty="error", weights="samples", full_gradient=True, **changes)
    other = problem.reseeded(6)
    assert type(other) is dd.Cifar10
    assert other.settings == {**problem.settings, "seed": 6}
    defaults = {key: parameter.default for key, parameter in parameters(dd.Cifar10).items()}
    assert [key for key, value in other.settings.items() if value == defaults[key]] == ["split"]  # nothing came by default
    assert other.fingerprint() == dd.Cifar10(**other.settings).fingerprint() != problem.fingerprint()
    assert dealt(other) != dealt(problem)
    assert not torch.equal(other.indices(0, 0), problem.indices(0, 0))
    assert problem.reseeded(1).fingerprint() == problem.fingerprint()
    assert dealt(tiny(root, split=[[1], [2], [3], [4, 0]]).reseeded(2)) == [[1], [2], [3], [4, 0]]


def test_a_problem_has_a_name_on_the_shell(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALDELAY_DATA", str(root.parent))
    problem = parse("problem", "cifar10[workers=4,alpha=0.5]")
    assert type(problem) is dd.Cifar10
    assert problem.fingerprint() == dd.Cifar10(4, 0.5).fingerprint()
    assert label(problem) == "cifar10[workers=4,alpha=0.5]"
    assert label(parse("problem", "cifar10")) == "cifar10"
    with pytest.raises(dd.BadInput, match="did you mean 'samples'"):
        parse("problem", "cifar10[sample=20]")


@pytest.mark.parametrize("split", ["iid", [[1, 2], [3, 4], [5], [9, 9]]], ids=["by name", "own"])
def test_a_problem_is_built_again_from_its_description_or_its_label(root: Path, split: Any) -> None:
    problem = tiny(root, seed=2, samples=100, split=split, weights="samples", full_gradient=True)
    description = json.loads(json.dumps(describe(problem)))
    assert (description["name"], description["root"]) == ("cifar10", str(root))
    for again in (rebuild("problem", description), parse("problem", label(problem))):
        assert describe(again) == description
        assert again.fingerprint() == problem.fingerprint()


# --- runs ---


def test_a_run_learns_what_the_bars_say(root: Path) -> None:
    problem = tiny(root, alpha=1.0, batch_size=8)
    speeds = dd.FixedSpeeds([1.0, 1.5, 2.0, 4.0])
    run = dd.simulate(dd.DuDe(0.05), problem, speeds, updates=200, evaluation=dd.Evaluation(every=50))
    losses = run.metrics.objective
    assert np.isfinite([losses, run.metrics.pooled_loss]).all()
    assert losses[0] == pytest.approx(np.log(10), abs=0.2)  # it knows nothing yet
    assert losses[-1] < 0.5 * losses[0]
    assert run.metrics.accuracy[-1] > 0.6  # of images it has not seen; 0.1 is chance
    assert np.isnan(run.metrics.gradient_norm).all()
    assert problem.evaluate(run.x)["objective"] == losses[-1]


@pytest.mark.parametrize("samples", [None, 80])
def test_a_run_is_resumed_and_replayed_from_its_folder_alone(root: Path, samples: int | None, tmp_path: Path) -> None:
    options = {"updates": 12, "checkpoint_every": 3, "evaluation": dd.Evaluation(every=6)}
    speeds = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 3.0], seed=1)
    scenario = Scenario(dd.DuDe(0.05), tiny(root, samples=samples), speeds, **options)
    straight = scenario.run(folder=tmp_path / "straight")
    for count in (2, 8):
        scenario.killed(tmp_path / f"{count}", count)
        images.all_images.cache_clear()  # as in another process
        images.first_images.cache_clear()
        resumed = dd.resume(tmp_path / f"{count}")  # without a problem
        assert type(resumed.problem) is dd.Cifar10
        assert differences(resumed, straight) == []
    again = dd.replay(tmp_path / "straight")
    assert torch.equal(again.x, straight.x)
    assert again.trace["fingerprint"].tobytes() == straight.trace["fingerprint"].tobytes()


def test_a_run_is_not_resumed_on_other_data(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dd.simulate(dd.DuDe(0.05), tiny(root), dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), updates=2, folder=tmp_path / "run")
    test = BINS["test_batch.bin"]
    other = {**BINS, "test_batch.bin": test[:-1] + bytes([test[-1] ^ 1])}
    (root / "test_batch.bin").write_bytes(other["test_batch.bin"])
    images.all_images.cache_clear()
    with pytest.raises(dd.BadInput, match=COMMAND):
        dd.resume(tmp_path / "run", updates=4)
    monkeypatch.setattr(dd.Cifar10, "files", sums(other))  # whole files, yet not those of the run
    with pytest.raises(dd.BadInput, match="fingerprint"):
        dd.resume(tmp_path / "run", updates=4)


# --- what the paper's experiments record of a split ---


def test_a_problem_s_classes_are_counted_for_each_worker(root: Path) -> None:
    problem = tiny(root, workers=5, alpha=0.3, seed=2)
    expected = [np.bincount(TRAIN[part], minlength=10).tolist() for part in dealt(problem)]
    assert classes(problem) == expected
    assert np.sum(expected, 0).tolist() == [30] * 10
    nines, zeros = np.flatnonzero(TRAIN == 9)[:3].tolist(), np.flatnonzero(TRAIN == 0)[:2].tolist()
    own = tiny(root, workers=2, split=[zeros, [*nines, *zeros]])
    assert classes(own) == [[2, *[0] * 9], [2, *[0] * 8, 3]]
    assert classes(dd.Quadratic([[0.0], [1.0]])) == []


@pytest.mark.parametrize(("samples", "least"), [(None, 18), (137, 8)])
def test_the_draws_of_a_split_are_counted_from_its_last_one(root: Path, samples: int | None, least: int) -> None:
    counts = []
    for seed in range(12):
        problem = tiny(root, workers=6, alpha=0.2, seed=seed, minimum=least, samples=samples)
        count = 1
        while min(map(len, split := deal(TRAIN[:samples], 6, 0.2, seed, count - 1))) < least:
            count += 1
        assert dealt(problem) == [part.tolist() for part in split]
        assert draws(problem, 0.2, seed) == count
        counts.append(count)
    assert min(counts) == 1 and max(counts) > 2


def test_a_split_that_is_not_drawn_until_it_fits_counts_as_one_draw(root: Path) -> None:
    for settings in ({"split": "label", "minimum": 60}, {"split": "iid"}, {"empty": "drop", "alpha": 0.02}):
        assert draws(tiny(root, workers=6, **settings), 0.02, 0) == 1
    assert draws(dd.Quadratic([[0.0], [1.0]]), 0.1, 0) == 1
