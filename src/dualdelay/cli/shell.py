"""``main``: the table of the commands, help, what is wrong with the words of a command, and the exit codes.

Nothing here imports torch: a command is imported when it runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..core.errors import BadInput, DualDelayError, nearest

FAILED, BAD_INPUT, INTERRUPTED, CLOSED = 1, 2, 130, 141  # exit codes, beside 0; 141 is what a shell shows for SIGPIPE


class Command(NamedTuple):
    """A command: its sentence, the function that does it, and the class of its flags."""

    sentence: str
    function: str  # module:name, in this room
    flags: str  # in flags.py


COMMANDS = {
    "train": Command("Train with one method, on simulated workers or on real ones.", "commands:train", "Train"),
    "compare": Command("Train with several methods, settings and seeds.", "commands:compare", "Compare"),
    "serve": Command("Train with sites that dial in over HTTPS.", "sites:serve", "Serve"),
    "site": Command("Be a site: work on your own data for a server, until its run ends.", "sites:site", "Site"),
    "enroll": Command("Make the key of a site.", "sites:enroll", "Enroll"),
    "revoke": Command("Take a site's key back.", "sites:revoke", "Revoke"),
    "resume": Command("Continue a run that was stopped, killed or finished.", "commands:resume", "Resume"),
    "replay": Command("Recompute a finished run and check every bit.", "commands:replay", "Replay"),
    "show": Command("Show what a folder holds: a run, or a table of runs.", "show:show", "Show"),
    "report": Command("Write one HTML page about runs, with pictures to hover over.", "report:report", "Report"),
    "list": Command("List methods, problems, speeds and fleets with their settings.", "commands:list_names", "List"),
    "advise": Command("Recommend a method, a step size and a wait_for.", "advise:advise", "Advise"),
    "size": Command("Predict memory, traffic and speed of a run on real workers.", "size:size", "Size"),
    "paper": Command("Run the paper's experiments.", "paper:paper", "Paper"),
    "data": Command("Fetch a data set.", "commands:data", "Data"),
    "new": Command("Write a file with a method that runs, to be changed into your own.", "new:new", "New"),
}

ABOUT = """Asynchronous training over workers of uneven speed and heterogeneous data.

usage: dualdelay COMMAND ...

{commands}

dualdelay COMMAND --help says more about one, and dualdelay --version which version this is.

A first run:   dualdelay train 'dude[lr=0.05]' --updates 300
A comparison:  dualdelay compare 'dude[lr=0.05|0.1]' 'vanilla[lr=0.05|0.1]' --time 60 --seeds 0 1 2

Quote brackets: 'dude[lr=0.05]'. Every command takes --json for one machine-readable line at the end.
Exit codes: 0 done, 1 failed (saved as far as it came), 2 bad input, 130 interrupted (and saved)."""


_MEANT = {"sweep": "compare", "simulate": "train", "run": "train"}  # words of the Python interface and of others


def help_text() -> str:
    """What dualdelay alone prints."""
    width = max(map(len, COMMANDS))
    return ABOUT.format(commands="\n".join(f"  {name:{width}}  {each.sentence}" for name, each in COMMANDS.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one line on standard error, and with --json a last line of JSON."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            _run(words)
        finally:
            if "dualdelay.runs.own" in sys.modules:  # what was imported was for this command
                sys.modules["dualdelay.runs.own"].forget()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough, as in: dualdelay list | head
        _close_output()
        sys.exit(CLOSED)
    except OSError as error:
        if error.filename is not None or not _cannot_write():
            raise
        _close_output()
        print(f"error: the output could not be written ({error.strerror}); send it elsewhere.", file=sys.stderr)
        sys.exit(FAILED)
    except DualDelayError as error:
        print(f"error: {' '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        code = BAD_INPUT if isinstance(error, BadInput) else FAILED
        _exit(words, code, "" if getattr(error, "told", False) else str(error))
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        _exit(words, INTERRUPTED, str(interrupt) or "interrupted")


def _run(words: Sequence[str]) -> None:
    if not words or words[0] in ("--help", "-h", "help"):
        print(help_text())
    elif words[0] == "--version":
        from ..core.version import __version__

        print(f"dualdelay {__version__}")
    elif words[0] not in COMMANDS:
        what = "flag" if words[0].startswith("-") else "command"
        hint = f"did you mean {_MEANT[words[0]]!r}?" if words[0] in _MEANT else nearest(words[0], COMMANDS)
        raise BadInput(f"there is no {what} {words[0]!r}; {hint} See: dualdelay --help")
    else:
        _run_command(words[0], words[1:])


def _run_command(name: str, words: Sequence[str]) -> None:
    command = COMMANDS[name]
    kind = getattr(import_module(".flags", __package__), command.flags)
    path = _config(words) if name in ("train", "compare") else None
    if path is None:
        flags = _parsed(name, kind, words)
    else:
        from . import config

        default, again = config.read(path, name, kind)
        flags = _parsed(name, kind, words, default)
        config.require_said_again(flags, again, name, list(words))
    _function(command)(flags)


def _function(command: Command) -> Callable[..., Any]:
    module, _, name = command.function.partition(":")
    function: Callable[..., Any] = getattr(import_module(f".{module}", __package__), name)
    return function


def _config(words: Sequence[str]) -> Path | None:
    """The file that --config names, if there is one; it has to be read before the other words are."""
    for k, word in enumerate(words):
        if word == "--config" and k + 1 < len(words):
            return Path(words[k + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _parsed(name: str, kind: Any, words: Sequence[str], default: Any = None) -> Any:
    """What the words of a command mean; what they get wrong is told in one line."""
    import tyro

    from .flags import NUMBERS

    given = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), NUMBERS:
            return tyro.cli(kind, prog=f"dualdelay {name}", args=list(words), **given)
    except SystemExit as ended:
        if ended.code in (0, None):
            sys.stdout.flush()  # while what goes wrong with it can still be told
            raise
    raise BadInput(_one_line(errors.getvalue(), name))


_KINDS = {"INT": "a whole number, such as 1000 or 1e3", "FLOAT": "a number, such as 0.5 or 3e8"}  # what help calls them


def _one_line(text: str, name: str) -> str:
    """What tyro shows in a box, as one line."""
    lines = [line.strip("│| ") for line in text.splitlines()[1:]]  # the first is the title
    said = " ".join(line for line in lines if line.strip("─-+╰╯ ")).partition("For full helptext")[0].strip()
    see = f"See: dualdelay {name} --help"
    if unknown := re.match(r"Unrecognized (?:options|arguments): (\S+?),?(?: |$)", said):
        meant = re.search(r"meant: (--\S+)", said)
        hint = f"; did you mean {meant[1]}?" if meant else "."
        return f"there is no {unknown[1]} here{hint} {see}"
    if wrong := re.match(r"Error parsing (\S+): .*?(?:instantiated from|parse for arguments:) \[(.*?)\]", said):
        expected = re.search(rf"helptext: (?:{re.escape(wrong[1])} )?\[?(\S+)", said)
        kind = expected[1] if expected else "something else"
        return f"{wrong[1]} is {wrong[2]}; expected {_KINDS.get(kind, kind)}. {see}"
    if wrong := re.match(r"Error parsing (\S+): ('.*?') is not a whole number", said):
        return f"{wrong[1]} is {wrong[2]}; expected {_KINDS['INT']}. {see}"
    if wrong := re.match(r"Error parsing (\S+): could not convert string to float: ('.*?')", said):
        return f"{wrong[1]} is {wrong[2]}; expected {_KINDS['FLOAT']}. {see}"
    if lacking := re.match(r"Missing value for argument '(\S+)'", said):
        return f"{lacking[1]} is given without a value. {see}"
    if lacking := re.match(r"Missing from [^:]*: (\S+)", said):
        return f"{lacking[1]} is missing. {see}"
    return f"{said.partition('Argument helptext')[0].strip().rstrip('.')}. {see}"


def _cannot_write() -> bool:
    """Whether nothing can be printed; an end of a line is tried, for one that is too few on a full disk is no loss."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _close_output() -> None:
    """Let nothing more be written to where nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(words: Sequence[str], code: int, error: str) -> NoReturn:
    """Exit with a code, after a line of JSON about the error if one was asked for and the command printed none."""
    if error and "--json" in words:
        print(json.dumps({"command": words[0], "error": error, "exit": code}))
    sys.exit(code)
