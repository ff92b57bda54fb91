"""Texts in many languages put into a folder: from Debian's packages, by apt-get, or from what the user has.

Unlike images, these are different texts with every version of the packages, so there is no one sum for them: an index
beside them says what they were made from and under which licence, with their sums, and texts that differ are other data,
told by a problem's fingerprint. Apt verifies what it fetches by the archive's signature.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, RunFailed, require_path
from ..problems.texts import INDEX, MANPAGES, OFFICE_HELP, SIZE, Corpus
from ..storage.files import write
from .datasets import first_line
from .downloads import Report, require_writable

_LEAST = 100_000  # bytes of text that a language must have
_MOST_PAGE = 1 << 20  # bytes of a page, packed or not: those that have more are not read
_MOST_PACKAGE = 1 << 26  # bytes of a package: the largest has 5 MB


@dataclass(frozen=True)
class TextSource:
    """Where a corpus comes from, and how its pages become text."""

    corpus: Corpus
    packages: Callable[[str], tuple[str, ...]]
    """Debian's packages with a language's pages; the text begins with the first one's."""
    page: re.Pattern[str]
    """The path of a page: a group with its language, and one with its name."""
    unpacked: str
    """Where pages lie in a folder, in a few words."""
    order: Callable[[str], str]
    """What pages are sorted by, from their names."""
    plain: Callable[[bytes], str]
    """What a page says, without markup."""
    licence: str
    """That of the texts, as Debian's copyright files have it."""
    licences: Mapping[str, str] = field(default_factory=dict)
    """By language, where it is another one."""
    original: str = ""
    """The language that was translated: lines that stand in it are no translation, and are left out, as is a line that
    stands in the text already. Empty: nothing is left out."""
    debian_12: str = ""
    """The sha256 sum over all texts of Debian 12."""


def fetch(
    wanted: TextSource, folder: Path, source: str | Path | None = None, *, report: Report = lambda share, text: None
) -> str:
    """Put a text of each language into a folder, and return a sentence about where they came from.

    source: "apt", or the path of a folder with the packages or with unpacked pages, such as /usr/share; None: apt.
    """
    require_path("folder", folder)
    if _is_whole(wanted.corpus, folder):
        return f"{_title(wanted)} in {folder} are whole; nothing was fetched."
    require_writable(folder)
    if source is None or source == "apt":
        with tempfile.TemporaryDirectory() as place:
            _download(wanted, Path(place), report)
            return _build(wanted, Path(place), "Debian's packages", folder, report)
    require_path("source", source)
    path = Path(source).expanduser()
    if not path.is_dir():
        packages = f"packages ({wanted.packages('de')[0]}_..._all.deb)"
        expected = f"expected 'apt', or the path of a folder with {packages} or pages ({wanted.unpacked})"
        raise BadInput(f"source is {str(source)!r}, and no folder is there; {expected}.")
    return _build(wanted, path, str(path), folder, report)


def _title(wanted: TextSource) -> str:
    return wanted.corpus.title[0].upper() + wanted.corpus.title[1:]


def _is_whole(corpus: Corpus, folder: Path) -> bool:
    try:
        index = json.loads((folder / INDEX).read_text())
        return all(_sum((folder / f"{name}.txt").read_bytes()) == index[name]["sha256"] for name in corpus.kept)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _languages(wanted: TextSource) -> tuple[str, ...]:
    """All that are read."""
    return (wanted.original, *wanted.corpus.kept) if wanted.original else wanted.corpus.kept


def _download(wanted: TextSource, place: Path, report: Report) -> None:
    names = [package for language in _languages(wanted) for package in wanted.packages(language)]
    command = f"dualdelay data {wanted.corpus.name} --source FOLDER"
    if (apt := shutil.which("apt-get")) is None:
        raise RunFailed(f"there is no apt-get on PATH; get Debian's packages {', '.join(names)} elsewhere, then: {command}")
    for done, package in enumerate(names):
        report(done / len(names), f"apt-get is fetching {package}")
        try:
            subprocess.run(
                [apt, "download", "-q", package],
                cwd=place,
                timeout=300,
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(
                f"apt-get could not fetch {package} ({said[0] if said else first_line(error)}). If you have the packages: "
                f"{command}"
            ) from None


def _build(wanted: TextSource, source: Path, origin: str, folder: Path, report: Report) -> str:
    """Write each language's text and the index, all of them or none."""
    packages, texts, index = _packages(source), dict[str, bytes](), dict[str, dict[str, Any]]()
    languages, original, lying = _languages(wanted), set[str](), list[Path]()
    if any(packages.keys().isdisjoint(wanted.packages(language)) for language in languages):
        lying = [path for path in sorted(source.glob("**/*")) if wanted.page.search(path.as_posix())]
    for done, language in enumerate(languages):
        names = wanted.packages(language)
        report(done / len(languages), f"reading {names[0]}")
        given = [packages[name] for name in names if name in packages]
        groups = map(_files_in, given) if given else [_files_at(lying)]
        pages = (page for group in groups for page in _pages(wanted, group, language))
        if language == wanted.original:
            original = {line for page in pages for line in wanted.plain(page).splitlines()}
            size = sum(len(line.encode()) for line in original)
        else:
            texts[language] = _text(map(wanted.plain, pages), set(original) if wanted.original else None)
            size = len(texts[language])
            made_of = {"packages": {path.name: _sum(path.read_bytes()) for path in given}} if given else {}
            licence = wanted.licences.get(language, wanted.licence)
            index[language] = {**made_of, "bytes": size, "licence": licence, "sha256": _sum(texts[language])}
        if size < _LEAST:
            found = f"{size:,} bytes of text in language {language}"
            raise BadInput(f"{origin} has {found}; expected {_LEAST:,} at least. Add {' and '.join(names)}.")
    for language, text in texts.items():
        write(folder / f"{language}.txt", text)
    write(folder / INDEX, json.dumps(index, indent=1).encode())
    same = _sum(b"".join(texts.values())) == wanted.debian_12
    which = "those of Debian 12" if same else "not those of Debian 12: runs on them are not comparable with runs on those"
    licences = "; ".join((wanted.licence, *(f"{language}: {text}" for language, text in wanted.licences.items())))
    return f"{_title(wanted)} are in {folder}, from {origin}; the texts are {which}. Their licences: {licences}."


def _packages(source: Path) -> dict[str, Path]:
    """The packages in a folder, by name; of several versions the last."""
    found = {}
    for path in sorted(source.glob("*.deb")):
        if path.is_file() and path.stat().st_size <= _MOST_PACKAGE:
            found[path.name.partition("_")[0]] = path
    return found


def _files_in(package: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files in a package: paths, and what reads them. Nothing is unpacked onto the disk."""
    if (dpkg := shutil.which("dpkg-deb")) is None:
        raise RunFailed("there is no dpkg-deb on PATH, which unpacks Debian's packages; give a folder of unpacked pages.")
    done = subprocess.run([dpkg, "--fsys-tarfile", str(package)], capture_output=True, check=False, timeout=300)
    try:
        if done.returncode:
            raise ValueError(done.stderr.decode(errors="replace").strip())
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                if member.isfile() and member.size <= _MOST_PAGE and (file := archive.extractfile(member)):
                    yield member.name, file.read
    except (tarfile.TarError, ValueError) as error:
        raise BadInput(
            f"{package} is no package of Debian's that is whole ({first_line(error)}); get another copy."
        ) from None


def _files_at(paths: Iterable[Path]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files at some paths, and what reads them."""
    for path in paths:
        if path.is_file() and path.stat().st_size <= _MOST_PAGE:
            yield path.as_posix(), path.read_bytes


def _pages(wanted: TextSource, files: Iterable[tuple[str, Callable[[], bytes]]], language: str) -> Iterator[bytes]:
    """A language's pages among some files, in their order."""
    named = dict[str, bytes]()
    for path, read in files:
        match = wanted.page.search(path)
        if match and match[1].replace("-", "_") == language:
            named[match[2]] = read()
    return (named[name] for name in sorted(named, key=wanted.order))


def _text(pages: Iterable[str], seen: set[str] | None) -> bytes:
    """The text of some pages up to ``SIZE`` bytes, without lines that were ``seen``."""
    text, size = list[str](), 0
    for page in pages:
        if seen is not None:
            lines = [line for line in dict.fromkeys(page.splitlines()) if line not in seen]
            seen.update(lines)
            page = "".join(f"{line}\n" for line in lines)
        text.append(page)
        size += len(page.encode())
        if size >= SIZE:
            break
    return "".join(text).encode()[:SIZE].decode(errors="ignore").encode()  # no half of a character


# --- the manual pages ---

_WITH_DEVELOPMENT = ("cs", "da", "es", "it", "nl", "pt_BR")  # languages with little text in their first package


def _manpages_packages(language: str) -> tuple[str, ...]:
    name = "manpages-zh" if language == "zh_CN" else f"manpages-{language.lower().replace('_', '-')}"
    return (name, f"{name}-dev") if language in _WITH_DEVELOPMENT else (name,)


def _without_roff(page: bytes) -> str:
    """What a page says: its lines that are no requests of roff, without changes of font and the like."""
    try:
        page = gzip.GzipFile(fileobj=io.BytesIO(page)).read(_MOST_PAGE) if page[:2] == b"\x1f\x8b" else page
        source = page.decode()
    except (OSError, EOFError, ValueError):  # damaged, or in another encoding: some old pages are
        return ""
    lines = (line for line in source.splitlines() if line and line[0] not in ".'")
    text = "\n".join(lines)
    for pattern, replacement in _ESCAPES:
        text = pattern.sub(replacement, text)
    return f"{text}\n" if text.strip() else ""


_ESCAPES: tuple[tuple[re.Pattern[str], Any], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'\\".*', ""),  # a comment
        (r"\\f(?:\[[^\]]*\]|\(..|.)", ""),  # a font
        (r"\\s[-+]?\d+", ""),  # a size
        (r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]", "'"),
        (r"\\\((?:lq|rq|dq)|\\\[(?:lq|rq|dq)\]", '"'),
        (r"\\\((?:em|en)|\\\[(?:em|en)\]|\\-", "-"),
        (r"\\[ ~0]", " "),
        (r"\\e", r"\\"),
        (r"\\\[[^\]]*\]|\\\(..|\\\*(?:\[[^\]]*\]|\(..|.)|\\[&%|^/,:c)]", ""),
    )
)

_MANPAGES = TextSource(
    corpus=MANPAGES,
    packages=_manpages_packages,
    page=re.compile(r"(?:^|/)man/([A-Za-z_]+)(?:\.UTF-8)?/(man\d/[^/]+\.\d[a-z]*(?:\.gz)?)$"),
    unpacked="man/de/man1",
    order=str,
    plain=_without_roff,
    licence="GPL-3+",
    licences={
        "ja": "those of the English pages, of many kinds, all free by Debian's guidelines",
        "tr": "those of the English pages, or GPL where a page names none",
        "zh_CN": "GFDL-1.2+, some pages GPL-2 or GPL-2+",
    },
    debian_12="537ef49154d5cb28f65e461d4d07ff5c5f3d51e0f31530e4924efe1205dd5109",
)


# --- the help pages of LibreOffice ---

_CONTENT = re.compile(r'(?s)id="DisplayArea"[^>]*>(.*?)(?:<div id="DonationFrame"|<footer|$)')
_HIDDEN = re.compile(r"(?s)<(script|style)\b.*?</\1>|<!--.*?-->")
_LINE_END = re.compile(r"</(?:p|h\d|li|td|th|tr|div|pre)>|<br ?/?>")
_TAG = re.compile(r"<[^>]*>")


def _without_html(page: bytes) -> str:
    """What a page says: a line for each of its paragraphs, headings and cells."""
    try:
        found = _CONTENT.search(page.decode())
    except ValueError:
        return ""
    source = _HIDDEN.sub("", found[1]) if found else ""
    source = _LINE_END.sub("\0", source.replace("\0", ""))
    lines = (" ".join(line.split()) for line in html.unescape(_TAG.sub("", source)).split("\0"))
    return "".join(f"{line}\n" for line in lines if line)


_OFFICE_HELP = TextSource(
    corpus=OFFICE_HELP,
    packages=lambda language: (f"libreoffice-help-{language.lower().replace('_', '-')}",),
    page=re.compile(r"(?:^|/)help/([A-Za-z-]+)/(text/.+\.html)$"),
    unpacked="help/de/text",
    order=lambda name: _sum(name.encode()),  # as good as shuffled, so that all parts of the help are in a text
    plain=_without_html,
    licence="MPL-2.0, parts of it Apache-2.0",
    original="en_US",
    debian_12="90f25202491971834173f5153970eefdad499c7b140fb362698aee583926dad6",
)

TEXTS = {source.corpus.name: source for source in (_MANPAGES, _OFFICE_HELP)}
