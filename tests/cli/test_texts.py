"""Texts in many languages come whole or not at all, the same from every source, with what they were made from."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from test_downloads import held, put

import dualdelay as dd
from dualdelay.cli import texts
from dualdelay.cli.commands import data
from dualdelay.cli.flags import Data
from dualdelay.cli.texts import TEXTS, TextSource
from dualdelay.problems import manpages
from dualdelay.problems.texts import CORPORA, SIZE

Install = Callable[[str, str], None]

MANUAL = (
    r""".\" a comment
.TH LS 1
.SH NAME
ls \- \fBlist\fP {0} contents \(em {0}\(aqs \[lq]words\[rq]\&
'\" t
"""
    + "{0} word  \n" * 12_000
)
HELP = """<html><head><title>no</title></head><body><aside>no</aside><div id="DisplayArea" class="x">
<h1>{0}</h1><script>no()</script><p>{0} &amp; <b>others</b>
<!-- no --> say</p><p>Untranslated.</p><ul><li>{0} &amp; others say</li></ul>%s</div>
<div id="DonationFrame"></div><p>no</p></html>
"""
HELP %= "".join(f"<p>{{0}} paragraph {number}</p>" for number in range(6000))


def files(source: TextSource, language: str) -> dict[str, bytes]:
    """The pages of a package, one of them not to be read, and another file."""
    if source.corpus.name == "manpages":
        return {
            f"usr/share/man/{language}/man1/ls.1.gz": gzip.compress(MANUAL.format(language).encode()),
            f"usr/share/man/{language}/man1/old.1.gz": gzip.compress("bücher".encode("latin-1")),
            "usr/share/doc/x": b"no",
        }
    folder = f"usr/share/libreoffice/help/{language.replace('_', '-')}"
    old = '<div id="DisplayArea">bücher</div>'.encode("latin-1")
    return {
        f"{folder}/text/a.html": HELP.format(language).encode(),
        f"{folder}/text/old.html": old,
        f"{folder}/text/menu.html": b"<p>no</p>",
        f"{folder}/contents.js": b"no",
    }


def deb(members: dict[str, bytes]) -> bytes:
    """What dpkg-deb gives for a package."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for path, content in members.items():
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


@pytest.fixture(params=TEXTS.values(), ids=lambda source: source.corpus.name)
def wanted(request: pytest.FixtureRequest) -> TextSource:
    source: TextSource = request.param
    return source


def languages(wanted: TextSource) -> list[str]:
    return [*wanted.corpus.kept, *([wanted.original] if wanted.original else [])]


@pytest.fixture
def packages(wanted: TextSource, tmp_path: Path, program: Install) -> Path:
    """A folder of packages, and a dpkg-deb that opens them."""
    program("dpkg-deb", 'test "$1" = --fsys-tarfile && cat "$2"')
    names = {name: language for language in languages(wanted) for name in wanted.packages(language)[::-1]}
    return put(
        tmp_path / "packages",
        {
            f"{name}_1.0_all.deb": deb({} if name.endswith("-dev") else files(wanted, language))
            for name, language in names.items()
        },
    )


def test_apt_gives_the_text_of_each_language_without_markup(
    wanted: TextSource, packages: Path, tmp_path: Path, program: Install
) -> None:
    program("apt-get", f'test "$1 $2" = "download -q" && cp {packages}/$3_1.0_all.deb .')
    outcome = texts.fetch(wanted, tmp_path / "here")
    assert "not those of Debian 12" in outcome and wanted.licence in outcome
    lines = (tmp_path / "here" / "pt_BR.txt").read_text().splitlines()
    if wanted.corpus.name == "manpages":
        assert lines[:2] == ['ls - list pt_BR contents - pt_BR\'s "words"', "pt_BR word  "] and len(lines) == 12_001
    else:
        assert lines[:3] == ["pt_BR", "pt_BR & others say", "pt_BR paragraph 0"] and len(lines) == 6002
    index = json.loads((tmp_path / "here" / "packages.json").read_text())
    assert set(index) == set(wanted.corpus.kept) and index["de"]["licence"] == wanted.licence
    packed = {f"{name}_1.0_all.deb" for name in wanted.packages("pt_BR")}
    assert index["pt_BR"]["packages"] == {
        name: hashlib.sha256((packages / name).read_bytes()).hexdigest() for name in packed
    }
    text = (tmp_path / "here" / "de.txt").read_bytes()
    assert (index["de"]["sha256"], index["de"]["bytes"]) == (hashlib.sha256(text).hexdigest(), len(text))
    assert "nothing was fetched" in texts.fetch(wanted, tmp_path / "here")
    problem = dd.Languages(corpus=wanted.corpus.name, root=tmp_path / "here", samples=20, width=4, layers=1, held_out=2)
    assert problem.workers == 12
    if wanted.corpus.name == "manpages":
        assert dd.problems.Manpages(root=tmp_path / "here", samples=20, hidden=4, batch_size=4).workers == 10


def test_packages_and_unpacked_pages_give_the_same(wanted: TextSource, packages: Path, tmp_path: Path) -> None:
    texts.fetch(wanted, tmp_path / "a", packages)
    for language in languages(wanted):
        for path, content in files(wanted, language).items():
            (tmp_path / "own" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "own" / path).write_bytes(content)
    texts.fetch(wanted, tmp_path / "b", str(tmp_path / "own" / "usr"))
    made = [{name: text for name, text in held(tmp_path / to).items() if name.endswith(".txt")} for to in ("a", "b")]
    assert made[0] == made[1] and len(made[0]) == len(wanted.corpus.kept)


def test_a_damaged_text_is_made_again(wanted: TextSource, packages: Path, tmp_path: Path) -> None:
    texts.fetch(wanted, tmp_path / "here", packages)
    whole = held(tmp_path / "here")
    (tmp_path / "here" / "de.txt").write_text("x")
    texts.fetch(wanted, tmp_path / "here", packages)
    assert held(tmp_path / "here") == whole


@pytest.mark.parametrize("wanted", [TEXTS["manpages"]], ids=["manpages"], indirect=True)
def test_the_first_package_is_the_beginning_and_the_end_is_that_of_a_character(
    wanted: TextSource, packages: Path, tmp_path: Path
) -> None:
    pages = {f"usr/share/man/cs/man2/{number}.2": ("é" * 250_000).encode() for number in range(6)}
    (packages / "manpages-cs-dev_1.0_all.deb").write_bytes(deb({"usr/share/man/cs/man0/x.0": b"second\n", **pages}))
    texts.fetch(wanted, tmp_path / "here", packages)
    text = (tmp_path / "here" / "cs.txt").read_bytes()
    assert text.startswith(b"ls - ") and text.index(b"cs word") < text.index(b"second") and SIZE - 1 <= len(text) <= SIZE
    assert set(text.decode()[-100_000:]) <= {"é", "\n"}


def test_sources_of_texts_that_are_none(wanted: TextSource, packages: Path, tmp_path: Path, program: Install) -> None:
    here = tmp_path / "here"
    with pytest.raises(dd.BadInput, match="source is 'nowhere', and no folder is there; expected 'apt'"):
        texts.fetch(wanted, here, "nowhere")
    program("apt-get", "echo E: Unable to locate package >&2; exit 100")
    with pytest.raises(dd.RunFailed, match=r"could not fetch \S+ \(E: Unable to locate package\).*--source FOLDER"):
        texts.fetch(wanted, here)
    for language in ("de", wanted.original):
        if language:
            [name] = wanted.packages(language)
            (packages / f"{name}_1.0_all.deb").rename(tmp_path / name)
            with pytest.raises(
                dd.BadInput, match=rf"has 0 bytes of text in language {language}; expected 100,000 at least. Add {name}"
            ):
                texts.fetch(wanted, here, packages)
            (tmp_path / name).rename(packages / f"{name}_1.0_all.deb")
    [name] = wanted.packages("de")
    (packages / f"{name}_1.0_all.deb").write_bytes(b"?")
    with pytest.raises(dd.BadInput, match=rf"{name}_1.0_all\.deb is no package of Debian's that is whole"):
        texts.fetch(wanted, here, packages)
    program("dpkg-deb", "echo it is torn >&2; exit 2")
    with pytest.raises(dd.BadInput, match=r"is no package of Debian's that is whole \(it is torn\)"):
        texts.fetch(wanted, here, packages)
    assert held(here) == {}


def test_without_the_commands_it_is_said_what_to_do(
    wanted: TextSource, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dd.RunFailed, match=rf"no apt-get on PATH.*data {wanted.corpus.name} --source FOLDER"):
        texts.fetch(wanted, tmp_path / "here")
    with pytest.raises(dd.RunFailed, match="no dpkg-deb on PATH"):
        texts.fetch(wanted, tmp_path / "here", packages)


def test_the_command_puts_texts_where_it_is_told(
    wanted: TextSource, packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(Data(wanted.corpus.name, source=str(packages), folder=tmp_path / "here"))
    assert "are in" in capsys.readouterr().out and len(held(tmp_path / "here")) == 1 + len(wanted.corpus.kept)


def test_every_corpus_has_a_source_and_all_languages_of_the_problems() -> None:
    assert list(TEXTS) == list(CORPORA)
    for corpus in CORPORA.values():
        assert len(corpus.languages) == 12 and set(corpus.languages) <= set(corpus.kept)
    assert set(manpages.LANGUAGES) <= set(CORPORA["manpages"].kept)
