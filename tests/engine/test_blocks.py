"""States in blocks: parts of one piece of memory for as long as a method writes in place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

import dualdelay as dd
from dualdelay.core import Arrival, Job
from dualdelay.core.state import State
from dualdelay.engine.blocks import Blocks, can_be_cut

LENGTH = 200


def stepped(blocks: Blocks, method: dd.DuDe, worker: int, gradient: torch.Tensor) -> None:
    for place, state in blocks:
        part = blocks.cut({"": gradient}, *place)[""]
        method.step(state, Arrival(Job(worker, 0, 0), part, 0.0, 0.0, 0.0))


def test_blocks_are_parts_of_the_whole_and_are_put_together_without_a_copy() -> None:
    method = dd.DuDe(lr=0.5)
    state = method.init(torch.arange(float(LENGTH)), 2, dd.Draws(0, "server"))
    state.lent = False  # nobody else reads these weights: they may move in place
    places = state.weights.data_ptr(), state.total.data_ptr()
    blocks, gradients = Blocks(state, 64), torch.randn(2, LENGTH)
    for worker, gradient in enumerate(gradients):
        stepped(blocks, method, worker, gradient)
    assert blocks.version == 1 and blocks.weights.data_ptr() == places[0]
    whole = blocks.renewed()
    assert (whole.weights.data_ptr(), whole.total.data_ptr()) == places
    assert [row.data_ptr() for row in whole.table] == [gradient.data_ptr() for gradient in gradients]
    assert torch.equal(whole.weights, torch.arange(float(LENGTH)) - 0.5 * gradients.sum(0) / 2)
    assert whole.version == 1 and whole.waiting == [] and whole.missing == set()


def test_weights_that_a_step_has_made_anew_are_copied_once() -> None:
    method = dd.DuDe(lr=0.5)
    state = method.init(torch.zeros(LENGTH), 1, dd.Draws(0, "server"))  # read by somebody: the first step makes new ones
    blocks = Blocks(state, 64)
    stepped(blocks, method, 0, torch.ones(LENGTH))
    first = blocks.weights
    stepped(blocks, method, 0, torch.ones(LENGTH))
    assert blocks.weights.data_ptr() == first.data_ptr() and blocks.weights.tolist() == [-1.0] * LENGTH


def test_what_is_no_vector_is_each_blocks_own() -> None:
    method = dd.DuDe(lr=0.5, start="busy")
    state = method.init(torch.zeros(LENGTH), 1, dd.Draws(0, "server"))
    states: list[State] = [block for _, block in Blocks(state, 64)]
    assert len({id(block.missing) for block in states}) == len(states) == 4


class Pair(NamedTuple):
    number: int
    vector: torch.Tensor


@dataclass
class Mixed(State):
    pairs: list[Pair] = field(default_factory=list)
    both: tuple[torch.Tensor, float] = (torch.zeros(LENGTH), 0.5)
    rows: torch.Tensor = field(default_factory=lambda: torch.arange(2.0 * LENGTH).reshape(2, LENGTH))
    small: torch.Tensor = field(default_factory=lambda: torch.ones(3))


def test_tuples_tables_and_small_tensors_are_cut_and_put_together() -> None:
    state = Mixed(torch.zeros(LENGTH), 2, pairs=[Pair(1, torch.arange(float(LENGTH)))])
    assert all(can_be_cut(getattr(state, f.name)) for f in fields(state))
    blocks = Blocks(state, 64)
    for (start, stop), block in blocks:
        assert block.pairs[0].number == 1 and torch.equal(block.pairs[0].vector, torch.arange(float(start), stop))
        assert block.rows.shape == (2, stop - start) and len(block.both[0]) == stop - start and len(block.small) == 3
        block.pairs = [*block.pairs, Pair(2, block.rows[1] + 1)]
        block.small += 1
    whole = blocks.renewed()
    assert isinstance(whole.pairs[1], Pair) and torch.equal(whole.pairs[1].vector, whole.rows[1] + 1)
    assert torch.equal(whole.rows, torch.arange(2.0 * LENGTH).reshape(2, LENGTH)) and whole.small.tolist() == [2, 2, 2]
    assert whole.both[1] == 0.5


def test_what_nobody_knows_how_to_cut_is_not_cut() -> None:
    assert not can_be_cut(deque([torch.zeros(LENGTH)])) and not can_be_cut({"a": [object()]})
