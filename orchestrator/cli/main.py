"""The command line: parse, call the verb, show its facts, return an exit status.

Status 0 is done; 1 is failed, refused, missing or damaged; 2 is wrong usage. Every error is one line.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from cachectl.cli.parser import MEANT, VERBS, build_parser, mark_bare, verb_module
from cachectl.layers.base.errors import did_you_mean
from cachectl.options import Request
from cachectl.table import Raw

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from cachectl.layers.base.environment import Environment

#: Verbs that run a command.
_RUNNING: Final = ("run", "trace", "bench", "stage")
#: Options without a command.
_WITHOUT_COMMAND: Final = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None, *, environment: Environment | None = None) -> int:
    """Run the command line and return the exit status.

    ``arguments`` are the words after ``cachectl``, by default this process's. ``environment`` says where the caches
    are, by default as this process sees them; relative file names always mean the working folder of this process.
    Raises :class:`SystemExit` for wrong usage (status 2), ``--help`` and ``--version``.
    """
    status = 0
    try:
        _open_streams()
        status = _carry_out(_request(list(sys.argv[1:] if arguments is None else arguments), environment))
    except KeyboardInterrupt:
        # Also while modules are loaded, and the line is parsed.
        status = 130
    except BrokenPipeError:
        # The reader has closed the pipe: the status of a program that SIGPIPE ends.
        status = 141
    except Exception as error:
        from cachectl.cli import output

        known = _explained(error)
        if known is None:
            raise
        status, line = known
        output.warn(line)
    finally:
        _discard_output()
    return status


def _request(words: list[str], environment: Environment | None) -> Request:
    if not words:
        build_parser(()).print_help()
        raise SystemExit(2)
    # For other verbs argparse gives -- its usual meaning.
    at = words.index("--") if words[0] in _RUNNING and "--" in words else len(words)
    options = _parse(build_parser(words[:1]), mark_bare(words[:at]))
    from cachectl.cli import output

    return Request(output, options, words, words[at + 1 :], environment)


def _carry_out(request: Request) -> int:
    """Carry out a request, print what it returned in the form that was asked for, and return its exit status."""
    from cachectl.cli import output

    if request.changes_user:
        from cachectl.cli import users

        # Each child reads the settings of its user.
        done: Any = users.run(request)
    else:
        verb = verb_module(request.options.verb)
        done = verb.run(request)
    if isinstance(done, bytes):
        output.show_bytes(done)
    elif isinstance(done, Raw):
        output.show_raw(done)
    elif isinstance(done, int):
        pass
    elif request.form == "json":
        output.show_json(done)
    elif request.form == "csv":
        output.show_csv(verb.table(done, request))
    else:
        output.say(verb.show(done, request))
    output.finish()
    if isinstance(done, int):
        return done
    return 1 if getattr(done, "failed", False) else 0


def _parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    if words and words[0] not in VERBS and not words[0].startswith("-"):
        meant = f"; did you mean {MEANT[words[0]]}?" if words[0] in MEANT else did_you_mean(words[0], VERBS)
        parser.error(f"unknown command {words[0]!r}{meant}")
    if words and words[0].startswith("-") and words[0] not in _WITHOUT_COMMAND:
        if VERBS.keys().isdisjoint(words):
            parser.error(f"unrecognized arguments: {words[0]}{did_you_mean(words[0], _WITHOUT_COMMAND)}")
        import shlex

        at = next(place for place, word in enumerate(words) if word in VERBS)
        line = [words[at], *words[:at], *words[at + 1 :]]
        parser.error(f"write the command first: {shlex.join(['cachectl', *line])}")
    options, unknown = parser.parse_known_args(words)
    if isinstance(getattr(options, "layers", None), list) and not any(word.startswith("-") for word in unknown):
        # argparse takes the layers to be complete at the first option after FILE: push FILE --force LAYER.
        options.layers = [*options.layers, *unknown]
        unknown = []
    if unknown:
        # The verb's own parser names the verb's help.
        of_verb = getattr(options, "parser", parser)
        likely = did_you_mean(unknown[0].partition("=")[0], of_verb._option_string_actions)  # noqa: SLF001 - no other list
        of_verb.error(f"unrecognized arguments: {' '.join(unknown)}{likely}")
    return options


def _open_streams() -> None:
    """Make sure that there are three standard streams, and that every character can be written to them.

    A closed one is opened so that using it fails: otherwise the next file that is opened, a database for instance,
    would get its number and be printed into.
    """
    closed = {0: os.O_WRONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}
    for number, flags in closed.items():
        if not _is_open(number):
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _explained(error: Exception) -> tuple[int, str] | None:
    """Return status and line of an error that is no fault of this program, else ``None``."""
    from cachectl.layers.base.errors import BadRequest, CachectlError, printable

    if isinstance(error, CachectlError):
        # A command that cannot be started has the status of a shell.
        return 2 if isinstance(error, BadRequest) else getattr(error, "status", 1), str(error)
    if isinstance(error, OSError):
        words = error.strerror or str(error)
        return 1, f"{words}: {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else words
    if isinstance(error, UnicodeError):
        what = error.object if isinstance(error, UnicodeEncodeError) else ""
        return 1, f"not valid UTF-8, so it cannot be stored as a name: {printable(what)}"
    if isinstance(error, (RecursionError, MemoryError)):
        return 1, f"the input is nested too deeply, or too large for the memory ({type(error).__name__})"
    return None


def _discard_output() -> None:
    """Discard unwritten output so that interpreter shutdown does not report the same error twice."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203 - two streams, each by itself
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
