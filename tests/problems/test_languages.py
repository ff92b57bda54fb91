"""Texts in twelve languages: windows of bytes, a transformer, and held-out bits per byte of each worker."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.problems import languages
from dualdelay.problems.texts import CORPORA, INDEX, read_texts
from dualdelay.problems.transformer import Transformer, loss
from dualdelay.runs.names import describe, rebuild

NAMES = CORPORA["manpages"].languages
SMALL: dict[str, Any] = {
    "context": 12, "samples": 60, "width": 8, "layers": 1, "heads": 2, "batch_size": 4, "held_out": 6, "evaluated": 10,
}  # fmt: skip


def put(root: Path, texts: dict[str, bytes]) -> Path:
    languages._windows.cache_clear()
    read_texts.cache_clear()
    for name, text in texts.items():
        (root / f"{name}.txt").write_bytes(text)
    index = {name: {"sha256": hashlib.sha256(text).hexdigest()} for name, text in texts.items()}
    (root / INDEX).write_text(json.dumps(index))
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return put(tmp_path, {name: (f"{name} {name[::-1]}! " * 5000)[:20_000].encode() for name in NAMES})


def test_each_worker_has_a_language_and_windows_are_bytes_of_its_text(root: Path) -> None:
    problem = dd.Languages(root=root, **SMALL)
    assert [problem.classes(worker) for worker in range(problem.workers)] == [{name: 60} for name in NAMES]
    for name, shard in zip(NAMES, problem.shards(), strict=True):
        text = (root / f"{name}.txt").read_bytes()
        inputs, targets = shard.pair
        assert inputs.dtype == targets.dtype == torch.uint8 and inputs.shape == targets.shape == (60, 12)
        for window, after in zip(inputs, targets, strict=True):
            assert bytes([*window.tolist(), int(after[-1])]) in text
            assert torch.equal(window[1:], after[:-1])


def test_no_window_for_training_overlaps_a_held_out_one(tmp_path: Path) -> None:
    text = b"".join(bytes([block]) * 1000 for block in range(20))  # a byte says which block it is from
    put(tmp_path, dict.fromkeys(NAMES, text))
    problem = dd.Languages(root=tmp_path, **{**SMALL, "samples": 2000, "held_out": 100})
    for shard, blocks in ((problem.shards()[0], {*range(20)} - {9, 19}), (problem._held_out.get(0), {9, 19})):
        inputs, targets = shard.pair
        assert torch.equal(inputs, targets), "none reaches over the end of its block"
        assert set(targets.flatten().tolist()) == blocks


@torch.no_grad()
def test_the_network_looks_at_no_later_byte_and_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    module = Transformer(context=128, width=128, layers=4, heads=4)
    assert sum(p.numel() for p in module.parameters()) == 875_264
    assert float(module.blocks[0].layer.hidden.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(module.blocks[0].layer.added.weight.std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert float(module.blocks[3].attention[1].added.weight.std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.03)
    texts = torch.randint(0, 256, (3, 20), dtype=torch.uint8)
    logits = module(texts)
    changed = texts.clone()
    changed[:, 11] += 1
    other = module(changed)
    assert logits.shape == (3, 20, 256)
    assert torch.allclose(logits[:, :11], other[:, :11], atol=1e-6) and not torch.allclose(logits[:, 11], other[:, 11])
    assert torch.allclose(module(texts[:, :5]), logits[:, :5], atol=1e-6), "a shorter text is one that has not gone on"
    uniform = loss(torch.zeros(2, 5, 256), torch.zeros(2, 5, dtype=torch.uint8))
    assert float(uniform) == pytest.approx(math.log(256)), "the mean over all places"


def test_gradients_of_many_jobs_at_once_are_those_of_one_at_a_time(root: Path) -> None:
    problem, other = dd.Languages(root=root, seed=1, **SMALL), dd.Languages(root=root, seed=2, **SMALL)
    assert problem.batch_key == other.batch_key
    assert problem.batch_key != dd.Languages(root=root, **{**SMALL, "heads": 4}).batch_key
    jobs = [(0, 0, 0), (1, 5, 3), (0, 11, 7)]
    starts = torch.stack([problem.start(seed) for seed in range(3)])
    which, workers, draws = map(list, zip(*jobs, strict=True))
    gradients, losses = problem.batched([problem, other])([starts], which, workers, draws)
    for k, (number, worker, draw) in enumerate(jobs):
        gradient, value = (problem, other)[number].gradient(starts[k], worker, draw)
        assert torch.allclose(gradients[k], gradient, atol=1e-6) and float(losses[k]) == pytest.approx(value, abs=1e-5)


def test_it_learns_and_every_worker_has_its_held_out_bits(root: Path) -> None:
    problem = dd.Languages(root=root, **{**SMALL, "width": 16})
    speeds = dd.FixedSpeeds([1.0] * 12)
    evaluation = dd.Evaluation(every=100, best_by="min worst_bits_per_byte")
    run = dd.simulate(
        dd.VanillaASGD(lr=0.01), problem, speeds, updates=300, evaluation=evaluation, server=dd.Server(optimizer="AdamW")
    )
    bits = run.metrics.bits_per_byte
    assert bits[0] == pytest.approx(8.0, abs=0.3) and bits[-1] < 0.6 * bits[0]
    assert set(run.metrics.share) == {1.0} and set(run.workers.samples) == {10}
    assert run.metrics.version.tolist() == [0, 100, 200, 300], "the end is not evaluated twice"
    last = run.workers.bits_per_byte[-12:]
    assert len(set(last)) > 1 and run.workers.held_out_loss[-12:] == pytest.approx(last * math.log(2))
    assert bits[-1] == pytest.approx(last.mean()) and run.metrics.worst_bits_per_byte[-1] == last.max()
    assert "worst_bits_per_byte" not in run.workers.columns
    x = problem.start(0)
    model = problem.model(x)
    inputs, targets = problem._held_out.get(4).pair
    expected = loss(model(inputs), targets).item() / math.log(2)
    assert problem.measure(x, 4)["metrics"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert problem.measure(x, 4, (0, 3))["samples"] == 10 and problem.few_samples() is None


def test_workers_that_are_not_there_or_have_no_number_count_in_the_worst(root: Path) -> None:
    problem = dd.Languages(root=root, **SMALL)
    x = problem.start(0)
    parts = {worker: problem.measure(x, worker) for worker in (3, 5)}
    bits = [part["metrics"]["bits_per_byte"] for part in parts.values()]
    assert problem.combine(x, parts)["worst_bits_per_byte"] == max(bits)
    parts[3]["metrics"]["bits_per_byte"] = math.nan
    assert math.isnan(problem.combine(x, parts)["worst_bits_per_byte"])
    assert math.isnan(problem.combine(x, {})["worst_bits_per_byte"])


def test_it_is_built_again_from_its_text_and_takes_other_splits(root: Path) -> None:
    problem = dd.Languages(root=root, **SMALL)
    assert rebuild("problem", describe(problem)).fingerprint() == problem.fingerprint()
    assert problem.reseeded(3).settings == {**problem.settings, "seed": 3} and "group" in problem.unseeded
    assert problem.fingerprint() != dd.Languages(root=root, **{**SMALL, "heads": 4}).fingerprint()
    two = dd.Languages(workers=6, root=root, split="label_k[k=2]", **SMALL)
    assert [len(two.classes(worker)) for worker in range(6)] == [2] * 6
    assert [two._held_out.get(worker).size for worker in range(6)] == [6] * 6, "half of each language's"
    mixed = dd.Languages(workers=3, root=root, split="iid", **SMALL)
    assert all(len(mixed.classes(worker)) == 12 <= mixed._held_out.get(worker).size for worker in range(3))
    seconds, whole = problem.costs()
    assert whole == pytest.approx(seconds * 12 * 16 / (3 * 4)), "a pass forward over the windows that are looked at"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"corpus": "novels"}, "corpus is 'novels'"),
        ({"context": 0}, "context is 0"),
        ({"context": 1000}, "context is 1000"),
        ({"samples": 100_000}, r"samples is 100000 and context 12; expected \d+ pieces at most for language de. Use fewer"),
        ({"held_out": 10_000}, r"held_out is 10000 and context 12; expected \d+ pieces at most for language de. Use fewer"),
        ({"held_out": 0}, "held_out is 0"),
        ({"evaluated": 0}, "evaluated is 0"),
        ({"layers": 1.5}, "layers is 1.5"),
        ({"heads": 3}, "width is 8 and heads 3; expected a width that is a multiple of heads"),
        ({"width": 10**7}, "width=10000000"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 13}, "12 groups for 13 workers"),
        ({"split": "label_q"}, "label_q"),
    ],
)
def test_settings_that_are_refused(root: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        dd.Languages(root=root, **{**SMALL, **settings})


def test_texts_that_are_not_whole_are_refused(root: Path) -> None:
    (root / "uk.txt").unlink()
    with pytest.raises(dd.BadInput, match=r"uk\.txt is missing. Get whole files with: dualdelay data manpages --folder"):
        dd.Languages(root=root, **SMALL)
    with pytest.raises(dd.BadInput, match=r"help pages of LibreOffice .*el\.txt is missing.*dualdelay data office_help"):
        dd.Languages(root=root, corpus="office_help", **SMALL)
    (root / "uk.txt").write_bytes(b"x")
    with pytest.raises(dd.BadInput, match=r"uk\.txt damaged"):
        dd.Languages(root=root, **SMALL)
