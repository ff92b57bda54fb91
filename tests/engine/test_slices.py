"""Vectors in slices: what is cut and put together again is the same, also as it travels and as it is saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core.compression import pack
from dualdelay.core.state import checksum, pattern_of
from dualdelay.engine.shard import cut_message, divided, put_together, shard_like, total_checksums, united
from dualdelay.engine.slices import GRAIN, Slices, cut, cut_part, joined, stand_ins


@given(st.integers(1, 9), st.integers(0, 1000))
def test_slices_cover_every_weight_once_and_begin_at_multiples(count: int, more: int) -> None:
    slices = Slices(GRAIN * count + more, count)
    covered = [weight for start, stop in slices.places for weight in range(start, stop)]
    assert covered == list(range(slices.length)) and len(slices.places) == count
    assert all(start % GRAIN == 0 for start, _ in slices.places)
    sizes = [stop - start for start, stop in slices.places]
    assert max(sizes) - min(sizes) < 2 * GRAIN and min(sizes) >= GRAIN


def test_more_shards_than_weights_allow_are_refused() -> None:
    with pytest.raises(dd.BadInput, match="shards is 11 for a model of 650 weights; expected at most 10"):
        Slices(650, 11)


VALUES = {
    "x": torch.arange(200.0),
    "table": [torch.arange(200.0) * k for k in range(3)],
    "rows": torch.arange(400.0).view(2, 200),
    "norms": torch.arange(5.0),
    "count": torch.tensor(3.0),
    "waiting": {1, 2},
    "pair": (torch.ones(200), 7),
}


def test_what_is_cut_and_joined_is_the_same_and_small_tensors_are_whole() -> None:
    like, slices = stand_ins(VALUES, 200), Slices(200, 3)
    parts = [cut(VALUES, like, *place) for place in slices.places]
    assert [len(part["x"]) for part in parts] == [64, 64, 72] and parts[1]["norms"] is VALUES["norms"]
    again = joined(parts, like)
    assert again["waiting"] == {1, 2} and again["pair"][1] == 7 and again["count"] == 3
    assert torch.equal(again["rows"], VALUES["rows"]) and torch.equal(again["table"][2], VALUES["table"][2])
    other = [
        put_together(zip(*zip(*slices.places, strict=True), parts, strict=True), like, *p) for p in Slices(200, 2).places
    ]
    assert torch.equal(joined(other, like)["rows"], VALUES["rows"])


@pytest.mark.parametrize("way", ["int8", 0.1, 1.0])
def test_a_slice_of_what_was_made_small_unpacks_to_the_slice(way: str | float) -> None:
    vector = torch.randn(300, generator=torch.Generator().manual_seed(0))
    packed = pack(vector, way)
    for start, stop in Slices(300, 4).places:
        assert torch.equal(cut_part(packed, start, stop).unpack(), packed.unpack()[start:stop])


def test_of_a_message_vectors_are_cut_and_small_parts_go_to_every_shard() -> None:
    message = {"moved": torch.arange(128.0), "norm": torch.tensor([2.0])}
    parts = cut_message(message, {"moved": True, "norm": False}, 64, 128)
    assert parts["moved"].tolist() == list(range(64, 128)) and parts["norm"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("length", "dtype"), [(200, torch.float32), (201, torch.float32), (203, torch.float64), (201, torch.half)]
)
def test_checksums_of_slices_add_up_to_that_of_the_whole(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
    pattern = pattern_of(length, dtype)
    told = [[int(checksum(x[start:stop], pattern))] for start, stop in Slices(length, 3).places]
    assert total_checksums(told) == [checksum(x)]


def test_a_checkpoint_is_divided_and_united_to_the_same() -> None:
    kept = {"method": {"gradient": torch.full((200,), 3.0)}}
    models = [(3, 0, 800, VALUES["x"]), (4, 0, 800, VALUES["x"] * 2)]
    fleet = {"weights": models, "draws": [1, 2], "held": [(0, kept)]}
    content = {"state": VALUES, "optimizer": {"m": torch.ones(200)}, "fleet": {**fleet, "evaluations": []}, "now": 1.0}
    head, shard = divided(content, 200)
    assert head["state"]["x"].shape == (1,) and [entry[3] for entry in head["fleet"]["weights"]] == [0, 1]
    like = shard_like(head, shard["models"], 200)
    parts = [(start, stop, put_together([(0, 200, shard)], like, start, stop)) for start, stop in Slices(200, 3).places]
    again = united(head, put_together(parts, like, 0, 200))
    assert torch.equal(again["fleet"]["weights"][1][3], VALUES["x"] * 2) and again["fleet"]["draws"] == [1, 2]
    assert again["fleet"]["held"] == [(0, kept)]
    assert torch.equal(again["state"]["table"][2], VALUES["table"][2]) and torch.equal(
        again["optimizer"]["m"], torch.ones(200)
    )
