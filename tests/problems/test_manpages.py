"""The manual pages: pieces of text and the byte after each, a language for each worker."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.problems import Manpages, manpages
from dualdelay.problems.manpages import LANGUAGES, SIZE
from dualdelay.problems.texts import INDEX, read_texts
from dualdelay.runs.names import describe, rebuild

TEXTS = {language: (f"{language} {language[::-1]}! " * 5000)[:20_000].encode() for language in LANGUAGES}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for language, text in TEXTS.items():
        (tmp_path / f"{language}.txt").write_bytes(text)
    index = {language: {"sha256": hashlib.sha256(text).hexdigest()} for language, text in TEXTS.items()}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_each_worker_has_a_language_and_every_piece_stands_in_its_text(root: Path) -> None:
    problem = Manpages(root=root, context=5, samples=50, hidden=8)
    assert [problem.classes(worker) for worker in range(10)] == [{language: 50} for language in LANGUAGES]
    for shard, text in zip(problem.shards(), TEXTS.values(), strict=True):
        for piece, after in zip(*shard.pair, strict=True):
            assert bytes([*piece.tolist(), int(after)]) in text
    assert problem._test_data.size == 10 * 5


def test_no_piece_for_training_overlaps_one_for_testing(root: Path) -> None:
    text = b"".join(bytes([block]) * 1000 for block in range(20))  # a byte says which block it is from
    for language in LANGUAGES:
        (root / f"{language}.txt").write_bytes(text)
    (root / INDEX).write_text(
        json.dumps({language: {"sha256": hashlib.sha256(text).hexdigest()} for language in LANGUAGES})
    )
    problem = Manpages(root=root, context=9, samples=2000, hidden=4)
    for (inputs, targets), blocks in (
        (problem.shards()[0].pair, {*range(20)} - {9, 19}),
        (problem._test_data._shard.pair, {9, 19}),
    ):
        assert bool((inputs == targets[:, None]).all()), "none reaches over the end of its block"
        assert set(targets.tolist()) == blocks


def test_what_follows_the_beginning_of_a_longer_text_is_of_no_matter(root: Path) -> None:
    prints = list[str]()
    for more in ("", "z" * 50_000):
        manpages._windows.cache_clear()
        read_texts.cache_clear()
        for language in LANGUAGES:
            beginning = (f"{language} é " * SIZE).encode()[:SIZE].decode(errors="ignore")
            (root / f"{language}.txt").write_text(beginning + more)
        sums = {name: hashlib.sha256((root / f"{name}.txt").read_bytes()).hexdigest() for name in LANGUAGES}
        (root / INDEX).write_text(json.dumps({name: {"sha256": value} for name, value in sums.items()}))
        prints.append(Manpages(root=root, samples=500, hidden=4).fingerprint())
    assert prints[0] == prints[1]


def test_it_learns_is_built_again_and_takes_other_splits(root: Path) -> None:
    problem = Manpages(root=root, context=4, samples=200, hidden=16, batch_size=16)
    run = dd.simulate(dd.DuDe(lr=0.2), problem, dd.FixedSpeeds([1.0] * 10), updates=800)
    assert run.metrics.accuracy[-1] > 0.25 > 5 * run.metrics.accuracy[0]
    assert rebuild("problem", describe(problem)).fingerprint() == problem.fingerprint()
    assert "group" in problem.unseeded
    two = Manpages(workers=5, root=root, context=4, samples=20, hidden=4, split="label_k[k=2]", batch_size=4)
    assert [len(two.classes(worker)) for worker in range(5)] == [2] * 5


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda root: (root / "de.txt").unlink(),
            r"de\.txt is missing. Get whole files with: dualdelay data manpages --folder",
        ),
        (lambda root: (root / "de.txt").write_text("x"), r"de\.txt damaged"),
        (lambda root: (root / INDEX).write_text("{}"), "cannot be read"),
        (lambda root: (root / INDEX).write_text("?"), "cannot be read"),
    ],
)
def test_texts_that_are_not_whole_are_refused(root: Path, damage, words: str) -> None:
    manpages._windows.cache_clear()
    read_texts.cache_clear()
    damage(root)
    with pytest.raises(dd.BadInput, match=words):
        Manpages(root=root, samples=10)


def test_more_pieces_than_there_are_is_refused(root: Path) -> None:
    with pytest.raises(dd.BadInput, match=r"samples is 100000 and context 8; expected \d+ pieces at most for language cs"):
        Manpages(root=root, samples=100_000)
