"""Texts in many languages that ``dualdelay data`` puts into a folder, and pieces of them to train and to test with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BadInput
from .files import cache_folder

SIZE = 2_300_000  # bytes of UTF-8 of each language, at most
INDEX = "packages.json"  # what each text was made from, its licence and its sha256 sum
BLOCK = 1000  # bytes that no piece reaches over the end of
_TESTED = 10  # of so many blocks of text one is for testing


@dataclass(frozen=True)
class Corpus:
    """Texts in several languages, a file for each."""

    name: str
    """The one that ``dualdelay data`` knows it by."""
    title: str
    languages: tuple[str, ...]
    """Those that a worker each has by default: all that have much text."""
    kept: tuple[str, ...]
    """Those that the folder has."""


_LARGE = ("de", "es", "fr", "it", "ja", "nl", "pl", "pt_BR", "ru", "tr", "uk", "zh_CN")
_OFFICE = ("de", "el", "es", "fr", "it", "ja", "nl", "pl", "pt_BR", "ru", "tr", "zh_CN")
MANPAGES = Corpus("manpages", "the manual pages", _LARGE, ("cs", "da", *_LARGE))
OFFICE_HELP = Corpus("office_help", "the help pages of LibreOffice", _OFFICE, _OFFICE)
CORPORA = {corpus.name: corpus for corpus in (MANPAGES, OFFICE_HELP)}


@lru_cache(maxsize=4)
def read_texts(corpus: Corpus, root: Path, languages: tuple[str, ...]) -> dict[str, bytes]:
    """The text of each language, if they are what was put there."""
    folder = "" if root == (cache_folder() / corpus.name).resolve() else f" --folder {root}"
    command = f"Get whole files with: dualdelay data {corpus.name}{folder}"
    try:
        index = json.loads((root / INDEX).read_text())
        texts = {language: (root / f"{language}.txt").read_bytes() for language in languages}
        damaged = [name for name, text in texts.items() if hashlib.sha256(text).hexdigest() != index[name]["sha256"]]
    except FileNotFoundError as error:
        raise BadInput(f"{corpus.title} in {root}: {Path(error.filename).name} is missing. {command}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{corpus.title} in {root} cannot be read ({error}). {command}") from None
    if damaged:
        raise BadInput(f"{corpus.title} in {root}: {', '.join(f'{name}.txt' for name in damaged)} damaged. {command}")
    return texts


def pieces(
    language: str, text: bytes, context: int, samples: int, tested: int, setting: str = "samples"
) -> tuple[Any, Any]:
    """Pieces of ``context`` bytes and one more, evenly spaced: so many to train with, and so many to test with.

    Every tenth block of a thousand bytes is for testing; no piece reaches over the end of its block. ``setting`` names the
    one that says how many are for testing.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    starts = np.arange(max(0, len(data) - context))
    starts = starts[starts % BLOCK < BLOCK - context]
    for_testing = starts // BLOCK % _TESTED == _TESTED - 1
    parts = []
    for rows, wanted, name in ((starts[~for_testing], samples, "samples"), (starts[for_testing], tested, setting)):
        if wanted > len(rows):
            raise BadInput(
                f"{name} is {wanted} and context {context}; expected {len(rows)} pieces at most for language {language}. "
                "Use fewer."
            )
        chosen = rows[np.arange(wanted) * len(rows) // wanted]
        parts.append(np.lib.stride_tricks.sliding_window_view(data, context + 1)[chosen])
    return parts[0], parts[1]
