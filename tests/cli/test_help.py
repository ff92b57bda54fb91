"""Help at once, hints for typos, tables that are whole in a pipe, and readers that go away."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.cli import flags, main, shell


def test_help_version_and_typos_need_no_torch() -> None:
    script = """
import contextlib, io, sys
from dualdelay.cli import main
for words in ([], ["--help"], ["--version"], ["trian"], ["train", "--help"], ["compare", "--updats", "3"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(words)
    assert "torch" not in sys.modules, words
    assert out.getvalue() or words[-1] in ("trian", "3"), words
assert "tyro" in sys.modules
import dualdelay
assert "DuDe" in dir(dualdelay) and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_help_has_every_command_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    alone = capsys.readouterr().out
    main(["--help"])
    assert capsys.readouterr().out == alone and max(map(len, alone.splitlines())) <= 120
    for name, command in shell.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.sentence)}$", alone, re.M)
        assert not command.flags or getattr(flags, command.flags).__doc__


_WHOLE = "expected a whole number, such as 1000 or 1e3"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'? See: dualdelay --help"),
        (["--verison"], "there is no flag '--verison'"),
        (
            ["train", "dude", "--updats", "3"],
            "there is no --updats here; did you mean --updates? See: dualdelay train --help",
        ),
        (["resume", "a", "b"], "there is no b here. See: dualdelay resume --help"),
        (["train", "--updates", "3"], "ALGORITHM is missing. See: dualdelay train --help"),
        (["train", "dude", "--updates", "x"], f"--updates is 'x'; {_WHOLE}. See: dualdelay train --help"),
        (["train", "dude", "--updates", "1.5e0"], f"--updates is '1.5e0'; {_WHOLE}"),
        (["train", "dude", "--updates", "1e999999999"], f"--updates is '1e999999999'; {_WHOLE}"),
        (["train", "dude", "--updates"], "--updates is given without a value. See: dualdelay train --help"),
        (["train", "dude", "--keep", "nan"], f"--keep is 'nan'; {_WHOLE}"),
        (["train", "dude", "--latency", "x"], "--latency is 'x'; expected a number, such as 0.5 or 3e8. See: "),
        (["compare", "dude", "--seeds", "1e0", "a"], f"--seeds is '1e0', 'a'; {_WHOLE}"),
        (["train", "dude", "--precision", "double"], "'double'"),
        (["data", "cifar11"], "'cifar11'"),
    ],
)
def test_a_word_that_is_wrong_is_told_in_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and error in err, err


def test_whole_numbers_may_be_written_as_1e3_is_in_every_flag() -> None:
    """An optional flag, one with a default, several in a row, and a number that no float holds to the last digit."""
    words = ["dude", "--updates", "2.5e3", "--keep", "1e1", "--seeds", "0", "-1e0", "9007199254740993.0"]
    read = shell._parsed("compare", flags.Compare, words)
    assert (read.common.updates, read.common.keep, read.seeds) == (2500, 10, (0, -1, 2**53 + 1))
    assert shell._parsed("size", flags.Size, ["--workers", "1e3", "--shards", "4e0"]) == flags.Size(workers=1000, shards=4)


def test_tables_are_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    for name, kind in dd.ALGORITHMS.items():
        (line,) = [line for line in lines if line.startswith(f" {name} ")]
        assert "…" not in line and " ".join((kind.__doc__ or "").split("\n\n")[0].replace("``", "").split()) in line
    (dude,) = [line for line in lines if line.startswith(" dude ")]
    assert "lr, wait_for=1, memory=server" in dude, "settings with their defaults"


@pytest.mark.parametrize("words", [["--help"], ["list"], ["list", "--json"]])
def test_a_reader_that_has_read_enough_is_no_error(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as ended:
            main(words)
    assert ended.value.code == shell.CLOSED


def test_the_process_ends_quietly_when_its_reader_does() -> None:
    child = subprocess.Popen([sys.executable, "-m", "dualdelay"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    with child.stderr as stream:
        said = stream.read()
    assert (child.wait(), said) == (shell.CLOSED, b"")


@pytest.mark.parametrize("words", [["--help"], ["list", "dude"], ["report", "--help"]])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_output_that_finds_no_room_is_told_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(words)
    assert ended.value.code == shell.FAILED
    assert capsys.readouterr().err == (
        "error: the output could not be written (No space left on device); send it elsewhere.\n"
    )


def test_another_error_of_the_system_is_not_taken_for_output_that_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shell, "_run", broken)
    with pytest.raises(OSError, match="No space left"):
        main(["list"])


def test_no_flag_has_an_empty_default(capsys: pytest.CaptureFixture[str]) -> None:
    for name in shell.COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "(default: )" not in capsys.readouterr().out, name


@pytest.mark.parametrize("name", ["dualdelay", "dualdelay.core"])
def test_public_names_are_those_that_type_checkers_see(name: str) -> None:
    module = import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: (node.module or alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = getattr(module, "_MODULES", {})
    assert seen == {**module._HOME, **modules}
    assert {*seen} - {"__version__"} == {*module.__all__}
    names: dict[str, object] = {}
    exec(f"from {name} import *", names)
    assert {*module.__all__} <= {*names} and {*module.__all__} <= {*dir(module)}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.__getattr__("nothing")


def test_a_method_that_is_in_another_place_is_found_by_the_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'QuAFL'; it is dualdelay\.algorithms\.QuAFL$"):
        dd.QuAFL()


def test_values_survive_pickling() -> None:
    method = dd.DuDe(0.1, wait_for=2)
    assert pickle.loads(pickle.dumps(method)) == method
