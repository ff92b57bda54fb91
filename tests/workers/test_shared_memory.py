"""Vectors in memory that processes share: they are there until the last reader is done, and never half of them."""

from __future__ import annotations

import gc
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dualdelay.workers.shared_memory import Name, Reader, Segments

ROWS = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)


def is_free(segments: Segments) -> list[bool]:
    return [segment.is_free for segment in segments._segments]


@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 3), (3, 4)])
def test_a_vector_is_read_in_place_and_whole_or_in_part(start, stop):
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)._replace(start=start, stop=stop)
    view = reader.view(name)
    assert (view == ROWS[..., start:stop]).all() and not view.flags.writeable
    assert (reader.copy(name) == ROWS[..., start:stop]).all()
    assert reader.view(name) is view  # as often as it is asked for


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # it is not written to
def test_it_stays_until_nobody_refers_to_it_not_even_to_a_slice_of_it():
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)
    tensor, row = torch.from_numpy(reader.view(name))[1, 2, 1:], reader.view(name)[1]
    gc.collect()
    assert is_free(segments) == [False]
    segments.put(-ROWS)  # so this goes to another place
    assert tensor.tolist() == [21, 22, 23] and row[0, 0] == 12
    del tensor
    assert is_free(segments) == [False, False]
    del row
    assert is_free(segments) == [True, False]
    assert segments.put(2 * ROWS).key == name.key
    assert reader.view(name) is None and reader.copy(name) is None


def test_it_stays_until_the_last_of_several_readers_is_done():
    segments, readers = Segments(readers=2), (Reader(), Reader())
    name = segments.put(ROWS)
    views = [reader.view(name._replace(reader=k, start=2 * k, stop=2 * k + 2)) for k, reader in enumerate(readers)]
    for _ in range(2):
        assert is_free(segments) == [False]
        views.pop()
    assert is_free(segments) == [True]


def test_one_that_was_let_go_of_may_be_asked_for_again_before_its_process_goes_on():
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)
    reader.view(name)
    assert is_free(segments) == [True]
    again = reader.view(name)
    assert is_free(segments) == [False] and (again == ROWS).all()


def test_a_late_reader_does_not_take_away_what_was_written_since():
    segments, first, late = Segments(readers=1), Reader(), Reader()
    old = segments.put(ROWS)
    first.view(old)
    new = segments.put(-ROWS)
    assert new.key == old.key and late.view(old) is None
    view = first.view(new)
    assert is_free(segments) == [False] and (view == -ROWS).all()


def test_what_is_lent_stays_while_it_is_referred_to_here():
    segments, reader = Segments(), Reader()
    lent = segments.lend(ROWS)
    name, array = lent.name, lent.array
    assert (array == ROWS).all() and not array.flags.writeable
    del lent
    assert is_free(segments) == [False]
    del array
    assert is_free(segments) == [True] and (reader.copy(name) == ROWS).all()
    segments.lend(-ROWS)
    assert reader.copy(name) is None


def test_one_that_is_written_part_by_part_cannot_be_read_before_it_is_whole():
    segments, reader = Segments(), Reader()
    lent = segments.blank(ROWS.dtype, ROWS.shape)
    lent.blank()[0] = ROWS[0]
    assert reader.copy(lent.name) is None and reader.view(lent.name) is None
    lent.blank()[1] = ROWS[1]
    lent.finish()
    assert (reader.copy(lent.name) == ROWS).all() and (lent.array == ROWS).all()


def test_a_copy_goes_to_memory_that_fits_or_to_new_memory():
    segments, reader = Segments(), Reader()
    lent = segments.lend(ROWS)
    out = np.empty_like(ROWS)
    assert reader.copy(lent.name, out) is out and (out == ROWS).all()
    for other in (np.empty(3, np.float32), np.empty(ROWS.shape)):
        assert (reader.copy(lent.name, other) == ROWS).all()


def test_nobody_is_reached_that_is_not_there():
    segments = Segments()
    name = segments.probe()
    assert Reader().reaches(name)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for wrong in ({"pid": int(gone.stdout)}, {"fd": 10**6}, {"key": name.key + 1}, {"size": 10**12}):
        other = name._replace(**wrong)
        assert not Reader().reaches(other) and Reader().view(other) is None and Reader().copy(other) is None


def test_who_holds_very_many_vectors_gets_no_more_of_them():
    segments = Segments()
    lent = [segments.lend(ROWS) for _ in range(300)]
    assert None not in lent[:256] and set(lent[256:]) == {None}
    lent.clear()
    assert segments.lend(ROWS) is not None


def test_without_descriptors_nothing_is_shared():
    segments, before = Segments(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as next_one:
        lowest = next_one.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        put, lent = segments.put(ROWS), segments.lend(ROWS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert put is None and lent is None and segments.put(ROWS) is not None


OTHER = """
import sys, numpy as np
from dualdelay.workers.shared_memory import Segments
segments = Segments(readers=1)
print(repr(tuple(segments.put(np.arange(50_000.0)))), flush=True)
sys.stdin.read()
"""


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:dualdelay")


def test_what_a_killed_process_has_written_stays_with_its_readers_and_nothing_is_left_behind():
    before = mapped()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = Name(*eval(other.stdout.readline()))
    reader = Reader()
    view = reader.view(name)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert view.sum() == 49_999 * 25_000 and not Reader().reaches(name)
    assert mapped() == before + 1
    del view, reader
    assert mapped() == before
