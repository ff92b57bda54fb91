"""Randomness named by coordinates instead of by the order in which it is asked for.

A draw is a function of ``(seed, purpose, coordinates)``, such as the minibatch of worker 3's 17th job. Nothing is shared
and nothing advances, so the same job meets the same minibatch under every algorithm, after a crash, and in any order.
The hash is splitmix64 (Steele, Lea and Flood, 2014) on 64-bit integers that wrap around, which numpy and torch do alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .errors import BadInput, plain_number, shown

Integers = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GAMMA, FIRST, SECOND = map(_signed, (_GAMMA, _FIRST, _SECOND))  # as signed 64-bit numbers


def mix(z: Any) -> Any:
    """Scramble int64 values, given as a numpy array or a torch tensor on any device, into int64 values."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * FIRST  # masks make the arithmetic shift a logical one
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_one(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _words(keys: list[int], count: int) -> Integers:
    """The first ``count`` words at each key, one row for each."""
    words: Integers = _at(np.array([_signed(key) for key in keys], dtype=np.int64), np.arange(1, count + 1, dtype=np.int64))
    return words


def _at(keys: Any, counters: Any) -> Any:
    return mix(keys[:, None] + counters * GAMMA)


def _below(bound: Any, words: Any) -> Any:
    return (((words >> 32) & 0xFFFFFFFF) * bound) >> 32


def integers_at(base: Any, bound: Any, count: int, *coordinates: Any) -> Any:
    """What ``Draws.integers`` gives at many places, one row for each, computed where the tensors are.

    ``base`` holds the ``Draws.base`` of each place, ``bound`` its bound, and each of the coordinates one number for each.
    """
    for coordinate in coordinates:
        base = mix(base ^ ((coordinate + 1) * GAMMA))
    return _below(bound[:, None], _at(base, torch.arange(1, count + 1, device=base.device)))


@dataclass(frozen=True)
class Draws:
    """Every random number that one seed gives for one purpose."""

    seed: int
    purpose: str
    _base: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (seed := plain_number(self.seed)) is not self.seed:
            object.__setattr__(self, "seed", seed)
        if not isinstance(self.seed, int):
            raise BadInput(f"seed is {shown(self.seed)}; expected a whole number.")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise BadInput(f"seed is {shown(self.seed)}; expected a whole number of 64 bits, -2**63..2**63 - 1.")
        object.__setattr__(self, "_base", self._extend(self.seed & _MASK, (zlib.crc32(self.purpose.encode()),)))

    @staticmethod
    def _extend(key: int, coordinates: tuple[int, ...]) -> int:
        for coordinate in coordinates:
            key = _mix_one(key ^ (((coordinate + 1) * _GAMMA) & _MASK))
        return key

    @property
    def base(self) -> int:
        """The name of the seed and purpose as a signed 64-bit number, for ``integers_at``."""
        return _signed(self._base)

    def key(self, *coordinates: int) -> int:
        """The 64-bit name of a place, from 0 to 2**64 - 1."""
        return self._extend(self._base, coordinates)

    def bits(self, count: int, *coordinates: int) -> Integers:
        """The first ``count`` 64-bit words at a place, as int64."""
        words: Integers = _words([self.key(*coordinates)], count)[0]
        return words

    def integers(self, bound: int, count: int, *coordinates: int) -> Integers:
        """``count`` integers in 0..bound-1, with replacement; no value is favoured by more than bound / 2**32."""
        drawn: Integers = _below(bound, self.bits(count, *coordinates))
        return drawn

    def tables(self, bound: int, count: int, places: Iterable[tuple[int, ...]]) -> Integers:
        """What ``integers`` gives at each of several places, one row for each, in one call."""
        drawn: Integers = _below(bound, _words([self.key(*place) for place in places], count))
        return drawn

    def integer(self, bound: int, *coordinates: int) -> int:
        """One integer in 0..bound-1."""
        return int(self.integers(bound, 1, *coordinates)[0])

    def permutation(self, n: int, *coordinates: int) -> Integers:
        """The numbers 0..n-1 in random order."""
        return np.argsort(self.bits(n, *coordinates), kind="stable").astype(np.int64)

    def uniform(self, *coordinates: int) -> float:
        """One number strictly between 0 and 1."""
        return ((_mix_one((self.key(*coordinates) + _GAMMA) & _MASK) >> 12) + 0.5) * 2.0**-52

    def uniforms(self, count: int, *coordinates: int) -> npt.NDArray[np.float64]:
        """``count`` numbers strictly between 0 and 1; the first is that of ``uniform``."""
        words = (self.bits(count, *coordinates) >> 12) & ((1 << 52) - 1)
        return (words.astype(np.float64) + 0.5) * 2.0**-52

    def normals(self, count: int, *coordinates: int) -> npt.NDArray[np.float64]:
        """``count`` standard normal numbers (Box and Muller, 1958)."""
        u = self.uniforms(2 * count, *coordinates)
        normals: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log(u[:count])) * np.cos(2.0 * np.pi * u[count:])
        return normals

    def generator(self, *coordinates: int) -> np.random.Generator:
        """A numpy generator that starts at this place, for one-off draws such as a Dirichlet split."""
        return np.random.default_rng(self.key(*coordinates))
