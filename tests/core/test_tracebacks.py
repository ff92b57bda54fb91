"""What is told of an exception in somebody's code: its own calls, and one line of what it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.core.tracebacks import cause_of, is_bad_input, kind_of, told
from dualdelay.runs.names import parse


def raised(call: Callable[[], Any]) -> BaseException:
    """What the call ends with."""
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


BAD = """Traceback (most recent call last):
  File "site.py", line 1, in gradient
dualdelay.core.errors.BadInput: patient 17 has no age"""


def noted() -> None:
    error = ValueError("the file is bad:\n    row 3\n\nand row 4")
    error.add_note("in sample 7")
    raise error


def test_the_cause_is_the_exception_with_all_that_it_says_and_its_notes_in_one_line() -> None:
    assert cause_of(told(raised(noted))) == "ValueError: the file is bad: row 3 and row 4 in sample 7"
    assert cause_of("Traceback (most recent call last):\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert cause_of("the process ended\nwith code 9\n") == "with code 9"
    assert cause_of(" \n") == "nothing"
    long = cause_of("Traceback (most recent call last):\nValueError: " + "9 " * 9999)
    assert long.startswith("ValueError: ") and "characters" in long and len(long) <= 700


def test_calls_within_torch_are_left_out_where_other_code_made_them_and_the_last_one_stays() -> None:
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    text = told(raised(lambda: net(torch.ones(1, 4))))
    assert text.count("test_tracebacks.py") == text.count('  File "') - 1
    assert "linear.py" in text and "_call_impl" not in text and "RuntimeError: mat1 and mat2" in text


def test_a_traceback_of_this_package_alone_is_told_whole() -> None:
    error = raised(lambda: parse("algorithm", "dude[lr=-1]"))
    while error.__traceback__ and "dualdelay" not in error.__traceback__.tb_frame.f_globals["__name__"]:
        error.__traceback__ = error.__traceback__.tb_next
    text = told(error)
    assert text.count("/dualdelay/") > 1 and "test_tracebacks.py" not in text


def test_causes_are_told_too() -> None:
    def twice() -> None:
        try:
            noted()
        except ValueError as error:
            raise RuntimeError("no data") from error

    text = told(raised(twice))
    assert "and row 4" in text and "direct cause" in text and cause_of(text) == "RuntimeError: no data"


def test_what_repeats_itself_is_several_or_has_no_file_is_told_by_its_cause(tmp_path: Path) -> None:
    def endless() -> None:
        endless()

    assert cause_of(told(raised(endless))).startswith("RecursionError: maximum recursion depth exceeded")

    def several() -> None:
        raise ExceptionGroup("two sites", [ValueError("one"), KeyError("two")])

    assert cause_of(told(raised(several))) == "ExceptionGroup: two sites (2 sub-exceptions)"
    code = compile("def own():\n    torch.ones(2) + torch.ones(3)", "<string>", "exec")
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)  # as of python -c
    text = told(raised(names["own"]))
    assert 'File "<string>", line 2, in own' in text and cause_of(text).startswith("RuntimeError: The size of tensor")
    assert cause_of(told(raised(lambda: dd.DuDe(lr=-1.0)))).startswith("BadInput: lr is -1.0")


def test_a_group_that_is_only_a_cause_is_not_named() -> None:
    def renamed() -> None:
        try:
            raise ExceptionGroup("two sites", [ValueError("one"), KeyError("two")])
        except* ValueError as group:
            raise dd.BadInput("targets have 3 columns") from group

    text = told(raised(lambda: named(renamed)))
    assert cause_of(text) == "BadInput: targets have 3 columns" and is_bad_input(text)


def named(work: Callable[[], None]) -> None:
    """What `except*` makes a group of again, as itself."""
    try:
        work()
    except BaseExceptionGroup as group:
        error = next(error for error in group.exceptions if isinstance(error, dd.BadInput))
        raise error from error.__cause__


def test_the_kind_is_the_name_alone_for_what_an_exception_says_may_quote_data() -> None:
    def quoting() -> None:
        error = ValueError()
        error.add_note("patient 17")
        raise error

    assert cause_of(told(raised(quoting))) == "ValueError patient 17"
    assert kind_of(told(raised(quoting))) == "ValueError"
    assert kind_of("the model is gone: it was given up") == "the model is gone"

    class BadInputShape(ValueError):
        """Another exception, whose name begins alike."""

    BadInputShape.__module__, BadInputShape.__qualname__ = "__main__", "BadInputShape"  # tracebacks leave the first out

    def other() -> None:
        raise BadInputShape("of rows")

    text = told(raised(other))
    assert kind_of(text).startswith("BadInputShape")
    assert not is_bad_input(text)


def test_what_an_exception_says_is_not_taken_for_another_s_name() -> None:
    def retold() -> None:
        raise ValueError(f"row 3\n\nDuring handling of the above exception:\n\n{BAD}")

    assert kind_of(told(raised(retold))) == "ValueError" and not is_bad_input(told(raised(retold)))
    assert kind_of("no file (patient 17)") == "no file" and kind_of("") == ""


def test_the_kind_has_its_module_but_for_python_s_own_and_ours() -> None:
    assert kind_of(told(raised(lambda: json.loads("x")))) == "json.decoder.JSONDecodeError"
    assert kind_of(told(raised(lambda: dd.DuDe(lr=-1.0)))) == "BadInput"


def test_bad_input_is_told_from_what_another_try_might_mend() -> None:
    assert is_bad_input(told(raised(lambda: dd.DuDe(lr=-1.0))))
    assert not is_bad_input(told(raised(noted))) and not is_bad_input("dualdelay is gone")
