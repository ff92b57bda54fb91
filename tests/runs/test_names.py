"""Methods, problems and speeds named by a text such as ``dude[lr=0.05]``, and folders named after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualdelay.runs.names import alternatives, distinct, parse, slug, stem
from own import refused

pytestmark = pytest.mark.usefixtures("in_time")

NESTED = "[" * 5000 + "]" * 5000
LONG = "x" * 100_000
REFUSED: dict[str, tuple[str, str, tuple[str, ...]]] = {  # of what kind, the text, and words of the message
    "unknown algorithm": ("algorithm", "dud[lr=0.05]", ("algorithm", "'dud'", "'dude'")),
    "unknown problem": ("problem", "digit", ("problem", "'digit'", "'digits'")),
    "unknown speeds": ("speeds", "exponentail", ("no speed model 'exponentail'", "'exponential'")),
    "unknown parameter": ("algorithm", "dude[lr=0.1,wait_fro=2]", ("dude", "'wait_fro'", "'wait_for'")),
    "parameter left out": ("algorithm", "dude", ("dude", "lr", "dude[lr=...]")),
    "parameter twice": ("algorithm", "dude[lr=0.1,lr=0.2]", ("lr", "twice")),
    "open bracket": ("algorithm", "dude[lr=0.05", ("'dude[lr=0.05'", "bracket", "dude[parameter=value")),
    "long open bracket": ("algorithm", f"dude[{LONG}", ("open bracket",)),
    "no value": ("algorithm", "dude[lr]", ("'lr'", "'dude[lr]'", "parameter=value")),
    "long parameter without a value": ("algorithm", f"dude[{LONG}]", ("is no setting",)),
    "long name": ("algorithm", LONG, ("there is no algorithm", "100,002 characters")),
    "long parameter": ("algorithm", f"dude[{LONG}=1]", ("has no parameter",)),
    "text for a number": ("algorithm", f"dude[lr='{LONG}']", ("lr", "above zero")),
    "too long": ("algorithm", f"dude[lr={' ' * 1_000_001}1]", ("too long", "1,000,000")),
    "brackets": ("algorithm", f"dude[lr={NESTED}]", ("5,001 brackets", "50 at most")),
    "brackets in speeds": ("speeds", f"away[speeds=fixed[times={NESTED}]]", ("brackets",)),
    "open brackets in speeds": ("speeds", "fixed[times=" + "[" * 100_000, ("brackets",)),
    "parentheses": ("algorithm", f"dude[lr={'(' * 200}1{')' * 200}]", ("201 brackets",)),
    "braces": ("algorithm", f"dude[lr={'{' * 200}{'}' * 200}]", ("201 brackets",)),
    "signs": ("algorithm", f"dude[lr={'-' * 200_000}1]", ("too complicated", "expected a number")),
    "a sum": ("algorithm", f"dude[lr={'1+' * 100_000}1]", ("too complicated",)),
    "a power": ("algorithm", "dude[lr=10**10**10]", ("'10**10**10'",)),
    "too many digits to be read": ("algorithm", f"dude[lr={'9' * 5000}]", ("too large", "fewer digits")),
    "too many digits for a number": ("algorithm", f"dude[lr={'9' * 4000}]", ("4,000 digits",)),
    "too many digits for a count": ("algorithm", f"dude[lr=1,wait_for={'9' * 4000}]", ("wait_for", "4,000 digits")),
    "a zero byte": ("algorithm", "dude[lr=\0]", ("zero byte",)),
    "no UTF-8": ("algorithm", "dude[lr=\udc80]", ("no UTF-8",)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_text_that_names_nothing_is_refused_at_once_by_a_short_message(what: str) -> None:
    kind, text, words = REFUSED[what]
    assert len(refused(lambda: parse(kind, text), *words)) < 800


def test_a_text_with_more_alternatives_than_can_be_run_is_refused() -> None:
    assert len(alternatives("dude[lr=0.1|0.2,wait_for=1|2|3]")) == 6
    text = f"dude[{','.join(f'x{k}=1|2' for k in range(60))}]"
    refused(lambda: alternatives(text), f"{2**60:,} alternatives", "10,000 at most")


def test_a_label_of_any_length_becomes_a_folder_s_name(tmp_path: Path) -> None:
    long = [f"generalized[probabilities=[{','.join(['0.01'] * 99)},0.{k}1]]" for k in (0, 1)]
    names = [stem(text, 12345) for text in long]
    assert len(set(names)) == 2 and all(len(name) < 220 for name in names)
    (tmp_path / names[0]).mkdir()
    assert slug("dude[lr=1e+30]") != slug("dude[lr=1e-30]")
    assert slug("dude[lr=0.05,wait_for=3]") == "dude-lr=0.05-wait_for=3"


def test_labels_that_look_alike_have_folders_of_their_own() -> None:
    texts = ["q[c=[[0],[6]]]", "q[c=[[0,6]]]", "q[c=[[0],[-6]]]", "q[c=0]", "q[c=-0]", "q-c=0", "x" * 99, "x" * 98 + "y"]
    texts += ["q[c=1e+9]", "q[c=1e-9]"]
    assert len({distinct(text) for text in texts}) == len(texts)
    assert distinct("digits[workers=3,alpha=0.1]") == "digits-workers=3-alpha=0.1"
