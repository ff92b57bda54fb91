"""MNIST and Fashion-MNIST are what their files hold, and files that are not right are refused."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.problems import FashionMnist, Mnist, images
from dualdelay.runs.names import describe, label, parse, rebuild


def files(count: int, tested: int) -> dict[str, bytes]:
    """Four files of small images whose brightest row says their class."""
    made = {}
    for part, size in (("train", count), ("t10k", tested)):
        rng = np.random.default_rng(size)
        labels = rng.permutation(np.arange(size) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (size, 28, 28)).astype(np.uint8)
        images[np.arange(size), 2 * labels + 4] += 190
        made[f"{part}-images-idx3-ubyte"] = struct.pack(">4I", 0x803, size, 28, 28) + images.tobytes()
        made[f"{part}-labels-idx1-ubyte"] = struct.pack(">2I", 0x801, size) + labels.tobytes()
    return made


FILES = files(300, 60)


@pytest.fixture(params=[Mnist, FashionMnist])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(request.param, "files", {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()})
    for cached in (images.all_images, images.first_images):
        cached.cache_clear()
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_images_and_classes_are_those_of_the_files(kind: Any, root: Path) -> None:
    problem = kind(workers=3, root=root, split="label", batch_size=4)
    classes = FILES["train-labels-idx1-ubyte"][8:]
    counts = [{} if counts is None else counts for counts in map(problem.classes, range(3))]
    assert sum(counts[0].values()) == 100 and {name for part in counts for name in part} == {str(n) for n in range(10)}
    inputs, targets = problem.shards()[0].pair
    assert targets.tolist() == list(classes)
    pixels = (inputs * kind.std + kind.mean) * 255
    assert torch.equal(
        pixels.round().to(torch.uint8), torch.tensor(list(FILES["train-images-idx3-ubyte"][16:])).view(-1, 1, 28, 28)
    )
    assert problem._test_data.size == 60


@pytest.mark.parametrize(("model", "size"), [("lenet", 44_426), ("small", 3_850), ("linear", 7_850)])
def test_the_models_have_the_sizes_that_are_said(model: str, size: int, root: Path, kind: Any) -> None:
    problem = kind(workers=2, root=root, model=model, alpha=1.0, batch_size=4)
    assert len(problem.start(0)) == size
    assert f"{size:,}" in str(dd.problems.Mnist.__doc__)  # Fashion-MNIST's own says that it has the same


def test_it_learns_and_its_text_builds_it_again(kind: Any, root: Path) -> None:
    problem = parse(
        "problem", f"{kind.name}[workers=3,split=label_k[k=5],root={root},model=linear,samples=200,batch_size=16]"
    )
    assert type(problem) is kind and problem._test_data.size == 33
    run = dd.simulate(dd.DuDe(lr=0.05), problem, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=150)
    assert run.metrics.accuracy[-1] > 0.8 > run.metrics.accuracy[0]
    assert rebuild("problem", describe(problem)).fingerprint() == problem.fingerprint()
    assert parse("problem", label(problem)).fingerprint() == problem.fingerprint()
    assert problem.reseeded(1).fingerprint() != problem.fingerprint()


def test_files_that_are_missing_or_damaged_are_named_with_the_command(kind: Any, root: Path) -> None:
    (root / "t10k-labels-idx1-ubyte").write_bytes(b"x")
    (root / "train-images-idx3-ubyte").unlink()
    words = r"train-images-idx3-ubyte is missing; t10k-labels-idx1-ubyte is damaged \(sha256 .*"
    words += f"dualdelay data {kind.name} --folder"
    with pytest.raises(dd.BadInput, match=words):
        kind(workers=2, root=root)


def test_a_model_that_there_is_not(root: Path, kind: Any) -> None:
    with pytest.raises(dd.BadInput, match="model is 'wide'; expected one of 'lenet', 'small', 'linear'"):
        kind(root=root, model="wide")
