"""What shards and workers write beside a checkpoint: named by a digest, put together, and refused if it is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.storage import parts
from dualdelay.storage.files import Damaged


def content(folder: Path) -> dict[str, Any]:
    """A head's checkpoint of four weights in two shards, whose three workers keep a gradient each: in a file, with the
    shards, and in the head's own."""
    written = parts.PartFiles()
    (folder / "checkpoints").mkdir()
    x, memory = torch.arange(4.0), torch.arange(4.0, 8.0).double()
    slices = [(0, 2), (2, 4)]
    shards = [
        {"state": {"weights": x[a:b]}, "optimizer": None, "models": {0: x[a:b] + 0.5, 3: {"gradient": memory[a:b]}}}
        for a, b in slices
    ]
    names = [written.write(folder, 7, f"{k}.shard", shard) for k, shard in enumerate(shards)]
    kept = written.write(folder, 7, "0.kept", {"method": {"gradient": memory + 1}, "uplink": {"": x}})
    few = {"gradient": torch.zeros(1, dtype=torch.float64)}
    held = [
        (0, {"file": kept, "few": {"method": few, "uplink": {}}, "size": 48}),
        (1, {"lent": 3, "few": {"method": {**few, "count": 5}}, "size": 32}),
        (2, {"method": {"gradient": memory + 2}}),
    ]
    return {
        "shards": [[a, b, name] for (a, b), name in zip(slices, names, strict=True)],
        "state": {"weights": x[:1]},
        "optimizer": None,
        "fleet": {"weights": [(1, 0, 16, 0)], "evaluations": [], "held": held},
    }


def test_a_checkpoint_in_parts_is_the_whole_one(tmp_path: Path) -> None:
    whole = parts.whole(content(tmp_path), tmp_path)
    assert "shards" not in whole and whole["state"]["weights"].tolist() == [0, 1, 2, 3]
    assert whole["fleet"]["weights"][0][3].tolist() == [0.5, 1.5, 2.5, 3.5]
    held = dict(whole["fleet"]["held"])
    assert [held[worker]["method"]["gradient"].tolist()[0] for worker in range(3)] == [5, 4, 6]
    assert held[0]["uplink"][""].tolist() == [0, 1, 2, 3] and held[1]["method"]["count"] == 5


@pytest.mark.parametrize("ending", ["shard", "kept"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")])
def test_a_part_that_is_damaged_or_missing_is_refused(ending: str, damage: Any, tmp_path: Path) -> None:
    given = content(tmp_path)
    (path, *_) = sorted((tmp_path / "checkpoints").glob(f"*.{ending}"))
    damage(path)
    for look in (parts.whole, parts.located):
        with pytest.raises(Damaged, match=f"the part {path.name} of a checkpoint is damaged or missing"):
            look(given, tmp_path)


def test_what_was_written_for_one_moment_is_there_for_another(tmp_path: Path) -> None:
    content(tmp_path)
    (path,) = (tmp_path / "checkpoints").glob("*.kept")
    again = parts.PartFiles().again(path, 12)
    assert again.name == f"000000000012-{path.name.partition('-')[2]}" and again.read_bytes() == path.read_bytes()
    assert parts.is_whole(again)
    path.unlink()
    assert parts.PartFiles().read(again)["method"]["gradient"].tolist() == [5, 6, 7, 8]


def test_two_shards_with_the_same_content_have_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    names = {parts.PartFiles().write(tmp_path, 1, f"{k}.shard", {"x": torch.zeros(3)}) for k in range(2)}
    assert len(names) == 2


def test_a_part_with_a_wrong_digest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / parts.PartFiles().write(tmp_path, 1, "0.kept", {"x": torch.zeros(3)})
    path.write_bytes(b"nonsense")
    with pytest.raises(dd.BadInput, match="is damaged"):
        parts.PartFiles().read(path)
