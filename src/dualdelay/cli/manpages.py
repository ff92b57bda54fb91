"""Texts of manual pages in ten languages put into a folder: from Debian's packages, by apt-get, or what the user has.

Unlike images, these are different texts with every version of the packages, so there is no one sum for them: an index
beside them says what they were made from, with their sums, and texts that differ are other data, told by a problem's
fingerprint. Apt verifies what it fetches by the archive's signature.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, RunFailed, require_path
from ..problems.manpages import INDEX, LANGUAGES, SIZE
from ..storage.files import write
from .datasets import first_line
from .downloads import Report, require_writable

_MOST_PAGE = 1 << 20  # bytes of a page, packed or not: those that have more are not read
_MOST_PACKAGE = 1 << 26  # bytes of a package: the largest has 4 MB
_PAGE = re.compile(r"(?:^|/)man/([A-Za-z_]+)(?:\.UTF-8)?/man\d/[^/]+\.\d[a-z]*(?:\.gz)?$")
_PACKAGE = re.compile(r"manpages-([a-z-]+)_([^_]+)_all\.deb")

# The sha256 sum over all texts of Debian 12, whose packages are of version 4.18.1-1.
DEBIAN_12 = "6dbfadaf5293edb6139cbfec7b53152f68862a196e0a7179131d551db7852c4d"


def fetch(folder: Path, source: str | Path | None = None, *, report: Report = lambda share, text: None) -> str:
    """Put a text of each language into a folder, and return a sentence about where they came from.

    source: "apt", or the path of a folder with the packages (manpages-de_..._all.deb) or with pages in man/de/man1 and so
        on, such as /usr/share; None: apt.
    """
    require_path("folder", folder)
    if _is_whole(folder):
        return f"The manual pages in {folder} are whole; nothing was fetched."
    require_writable(folder)
    if source is None or source == "apt":
        with tempfile.TemporaryDirectory() as place:
            _download(Path(place), report)
            return _build(Path(place), "Debian's packages", folder, report)
    require_path("source", source)
    path = Path(source).expanduser()
    if not path.is_dir():
        expected = "expected 'apt', or the path of a folder with packages (manpages-de_..._all.deb) or pages (man/de/man1)"
        raise BadInput(f"source is {str(source)!r}, and no folder is there; {expected}.")
    return _build(path, str(path), folder, report)


def _is_whole(folder: Path) -> bool:
    try:
        index = json.loads((folder / INDEX).read_text())
        return all(_sum((folder / f"{name}.txt").read_bytes()) == index[name]["sha256"] for name in LANGUAGES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _package(language: str) -> str:
    return f"manpages-{language.lower().replace('_', '-')}"


def _download(place: Path, report: Report) -> None:
    if (apt := shutil.which("apt-get")) is None:
        raise RunFailed(
            "there is no apt-get on PATH; get Debian's packages manpages-de and so on "
            f"({', '.join(LANGUAGES)}) elsewhere, then: dualdelay data manpages --source FOLDER"
        )
    for done, language in enumerate(LANGUAGES):
        report(done / len(LANGUAGES), f"apt-get is fetching {_package(language)}")
        command = [apt, "download", "-q", _package(language)]
        try:
            subprocess.run(command, cwd=place, timeout=300, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(
                f"apt-get could not fetch {_package(language)} ({said[0] if said else first_line(error)}). If you have the "
                "packages: dualdelay data manpages --source FOLDER"
            ) from None


def _build(source: Path, origin: str, folder: Path, report: Report) -> str:
    """Write each language's text and the index, all of them or none."""
    packages, texts, index = _packages(source), dict[str, bytes](), dict[str, dict[str, str]]()
    for done, language in enumerate(LANGUAGES):
        report(done / len(LANGUAGES), f"reading {_package(language)}")
        package = packages.get(_package(language))
        pages = _pages_in(package) if package else _pages_under(source, language)
        texts[language] = _text(pages, language)
        if len(texts[language]) < SIZE // 3:
            found = f"{len(texts[language]):,} bytes of text in language {language}"
            raise BadInput(f"{origin} has {found}; expected {SIZE // 3:,} at least. Add {_package(language)}.")
        made_of = {"package": package.name, "package_sha256": _sum(package.read_bytes())} if package else {}
        index[language] = {**made_of, "sha256": _sum(texts[language])}
    for language, text in texts.items():
        write(folder / f"{language}.txt", text)
    write(folder / INDEX, json.dumps(index, indent=1).encode())
    same = _sum(b"".join(texts.values())) == DEBIAN_12
    which = "those of Debian 12" if same else "not those of Debian 12: runs on them are not comparable with runs on those"
    return f"The manual pages are in {folder}, from {origin}; the texts are {which}."


def _packages(source: Path) -> dict[str, Path]:
    """The packages in a folder, by name; of several versions the last."""
    found = {}
    for path in sorted(source.glob("manpages-*.deb")):
        if path.is_file() and path.stat().st_size <= _MOST_PACKAGE:
            found[path.name.partition("_")[0]] = path
    return found


def _pages_in(package: Path) -> Iterator[tuple[str, bytes]]:
    """The pages in a package: paths and contents. Nothing is unpacked onto the disk."""
    if (dpkg := shutil.which("dpkg-deb")) is None:
        raise RunFailed("there is no dpkg-deb on PATH, which unpacks Debian's packages; give a folder of unpacked pages.")
    done = subprocess.run([dpkg, "--fsys-tarfile", str(package)], capture_output=True, check=False, timeout=300)
    try:
        if done.returncode:
            raise ValueError(done.stderr.decode(errors="replace").strip())
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                if member.isfile() and member.size <= _MOST_PAGE and (file := archive.extractfile(member)):
                    yield member.name, file.read()
    except (tarfile.TarError, ValueError) as error:
        raise BadInput(
            f"{package} is no package of Debian's that is whole ({first_line(error)}); get another copy."
        ) from None


def _pages_under(source: Path, language: str) -> Iterator[tuple[str, bytes]]:
    """The pages of a language in a folder."""
    for path in sorted(source.glob(f"**/man/{language}*/man[0-9]/*")):
        if path.is_file() and path.stat().st_size <= _MOST_PAGE:
            yield str(path), path.read_bytes()


def _text(pages: Iterator[tuple[str, bytes]], language: str) -> bytes:
    """The text of a language's pages in the order of their names, without markup, up to ``SIZE`` bytes."""
    named: dict[str, bytes] = {}
    for path, data in pages:
        match = _PAGE.search(path)
        if match and match[1] == language:
            named[path.partition("/man/")[2] if "/man/" in path else path] = data
    text, size = list[str](), 0
    for name in sorted(named):
        plain = _without_markup(named[name])
        text.append(plain)
        size += len(plain.encode())
        if size >= SIZE:
            break
    return "".join(text).encode()[:SIZE].decode(errors="ignore").encode()  # no half of a character


def _without_markup(page: bytes) -> str:
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
