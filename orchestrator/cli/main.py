"""The command line: parse, call the verb, show its facts, return an exit status.

Status 0 is done; 1 is failed, refused, missing or damaged; 2 is wrong usage. Every error is one line. The file of a
verb declares its options. Only the requested verb is imported: importing all takes longer than most reports.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from cachectl import __version__
from cachectl.cli import output
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.text import did_you_mean

# Help needs neither typing nor the code that verbs share.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from cachectl import verbs
    from cachectl.layers.base.environment import Environment

#: Every verb, in the order of the help, and its summary.
VERBS: dict[str, str] = {
    "report": "show where caches are and how much they hold",
    "dir": "print the folders of caches, one per line",
    "ls": "list kernels with their entries in all layers, or single entries",
    "verify": "check every entry for damage",
    "doctor": "find problems with this setup, and the command that fixes each",
    "purge": "remove entries; --all means every user layer except tuning results",
    "prune": "remove stale or old entries, then the longest unused until the rest fits",
    "run": "run a command with caches off, isolated, or filled from a store",
    "env": "print shell commands that set variables, for eval",
    "trace": "run a command and show what cache misses cost, and why",
    "bench": "measure the time that each cache saves a command",
    "push": "add missing entries to a bundle, a folder or a URL",
    "pull": "copy missing entries here from a trusted store or root",
    "store": "list, clean up or check a store",
    "stage": "carry warm caches to every node of an MPI job, and back",
    "demo": "demonstrate cachectl on PoCL, in an isolated root",
    "get": "write one entry to a file",
    "put": "place an entry written by get, so that the library hits it",
    "layers": "list layers, and what each can and cannot do here",
    "config": "show the settings, and where each was set",
    "completion": "print a script for completion in a shell",
}
#: The heading above a verb in the help.
HEADINGS = {"report": "look", "purge": "clear", "run": "run", "push": "move", "demo": "learn", "get": "plumbing"}
#: Words that people try first, and the verbs that they mean.
MEANT = {
    **dict.fromkeys(("clean", "clear", "rm", "remove", "delete"), "purge"),
    **dict.fromkeys(("info", "stats", "status", "du"), "report"),
    **dict.fromkeys(("list", "show"), "ls"),
    "gc": "prune",
    "export": "push",
    **dict.fromkeys(("import", "merge", "miopen"), "pull"),
    "check": "verify",
    "path": "dir",
}
#: Verbs that run a command, and options without a verb.
_RUNNING = ("run", "trace", "bench", "stage")
_WITHOUT_VERB = ("-h", "--help", "--version")
#: New objects between two garbage collections, instead of Python's 700.
_OBJECTS = 50_000


def main(
    arguments: Sequence[str] | None = None,
    *,
    environment: Environment | None = None,
    show_json: Callable[[object], None] = output.show_json,
) -> int:
    """Run the command line and return the exit status.

    ``arguments`` are the words after ``cachectl``, by default this process's. ``environment`` says where the caches
    are, by default this process's; relative file names always refer to the working directory of this process.
    ``show_json`` prints a result if ``--json`` was given. Raises :class:`SystemExit` for wrong usage (status 2),
    ``--help`` and ``--version``.
    """
    try:
        # Collecting garbage while modules are imported takes a fifteenth of a report.
        gc.set_threshold(_OBJECTS)
        _open_streams()
        words = list(sys.argv[1:] if arguments is None else arguments)
        if not words:
            build_parser(()).print_help()
            return 2
        if words[0] == "help":
            words = [*words[1:2], "--help"]
        request = _parse(words, environment)
        with output.warnings_as_lines():
            return _shown(request.options.module.run(request), request, show_json)
    except KeyboardInterrupt:
        # The key may have been pressed while modules were imported.
        return 130
    except BrokenPipeError:
        # The reader closed the pipe: the status of a program ended by SIGPIPE.
        return 141
    except Exception as error:
        known = _explained(error)
        if known is None:
            raise
        output.warn(known[1])
        return known[0]
    finally:
        if arguments is None:
            # The program ends now: Python's last garbage collections take an eighth of a report.
            gc.freeze()
        # Interpreter shutdown would report an error in writing the rest once more.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # noqa: PERF203 - two streams, each by itself
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _shown(result: Any, request: verbs.Request, show_json: Callable[[object], None]) -> int:  # noqa: ANN401 - of any verb
    """Print what a verb returned, in the requested form, and return the exit status."""
    status = result if isinstance(result, int) else int(getattr(result, "failed", False))
    if isinstance(result, int):
        pass
    elif request.form == "json":
        show_json(result)
    elif request.form == "csv":
        output.show_csv(request.options.module.table(result, request))
    else:
        output.say(request.options.module.show(result, request))
    try:
        output.show_bytes(b"")
    except OSError:
        # An earlier failure, such as of a traced command, takes precedence.
        if not status:
            raise
    return status


def _open_streams() -> None:
    """Make sure that there are three standard streams that accept every character.

    A closed stream is opened so that using it fails. Otherwise the next opened file, such as a database, would get its
    number, and output would be written into it.
    """
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203 - three streams, each by itself
            os.open(os.devnull, flags)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _explained(error: Exception) -> tuple[int, str] | None:
    """Return the status and the message of an expected error; ``None`` for a bug."""
    if isinstance(error, CachectlError):
        # A command that cannot be started has its own status, as in a shell.
        return 2 if isinstance(error, BadRequest) else getattr(error, "status", 1), str(error)
    if isinstance(error, OSError):
        words = error.strerror or str(error)
        return 1, f"{words}: {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else words
    if isinstance(error, UnicodeError):
        return 1, f"not valid UTF-8, so it cannot be stored as a name: {getattr(error, 'object', '')!r}"
    if isinstance(error, (RecursionError, MemoryError)):
        return 1, f"the input is nested too deeply, or too large for the memory ({type(error).__name__})"
    return None


# ---------------------------------------------------------------------- the grammar


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program with status 2."""
        output.warn(message if message.endswith("?") else f"{message}; try {self.prog} --help", self.prog)
        raise SystemExit(2)

    def _get_formatter(self) -> argparse.HelpFormatter:
        # Without a width, argparse imports shutil to find one whenever an option is added.
        width = output.width(sys.stdout) if sys.stdout.isatty() else 80
        return argparse.HelpFormatter(self.prog, width=width - 2)


def verb_module(verb: str) -> Any:  # noqa: ANN401 - a module
    """Import the module of a verb."""
    # Completion imports the grammar, so it is in cli.
    return import_module(f"cachectl.{'cli' if verb == 'completion' else 'verbs'}.{verb}")


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the verb in ``words``, or one with every summary if there is none.

    Without ``words`` it has all verbs with all their options, for the reference documentation.
    """
    parser = Parser(
        prog="cachectl",
        allow_abbrev=False,
        description="See, clear, switch and prove every kernel cache of the OpenCL stack.",
        epilog="cachectl help COMMAND shows its options; 'cachectl layers' lists each LAYER.",
    )
    parser.add_argument("--version", action="version", version=f"cachectl {__version__}")
    typed = [name for name in VERBS if words is None or name in words]
    if not typed:
        parser.usage = "cachectl [-h] [--version] COMMAND ..."
        for name, summary in VERBS.items():
            if name in HEADINGS:
                group = parser.add_argument_group(HEADINGS[name])
            group.add_argument(name, help=summary)
        return parser
    # Without prog, argparse formats a usage, for which it imports shutil.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="verb", prog=parser.prog)
    for name in typed:
        summary, module = VERBS[name], verb_module(name)
        description = summary[0].upper() + summary[1:] + "."
        verb = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
        verb.set_defaults(parser=verb, module=module)
        _add_to(verb, module.OPTIONS)
        verb.usage = getattr(module, "USAGE", None)
        verb.epilog = f"{getattr(module, 'EPILOG', '')} Example: {module.EXAMPLE}".lstrip()
    return parser


def _add_to(container: argparse._ActionsContainer, options: Sequence[Any]) -> None:
    for option in options:
        if isinstance(option, tuple):
            names, *texts = option
            settings = texts.pop() if isinstance(texts[-1], dict) else {}
            kind: dict[str, Any] = {"metavar": texts[0]} if texts[1:] else {"action": "store_true"}
            container.add_argument(*names.split(), help=texts[-1], **kind, **settings)
        elif isinstance(option[0], str):
            _add_to(container.add_argument_group(option[0]), option[1:])
        else:
            _add_to(container.add_mutually_exclusive_group(), option)


def _parse(line: list[str], environment: Environment | None) -> verbs.Request:
    """Return the request of a command line, which is not empty. Ends the program for wrong usage."""
    verb, parser = line[0], build_parser(line[:1])
    if verb not in VERBS and not verb.startswith("-"):
        meant = f"; did you mean {MEANT[verb]}?" if verb in MEANT else did_you_mean(verb, VERBS)
        parser.error(f"unknown command {verb!r}{meant}")
    if verb.startswith("-") and verb not in _WITHOUT_VERB:
        parser.error(f"write the command first, not {verb}{did_you_mean(verb, _WITHOUT_VERB)}")
    # In other verbs, argparse gives -- its usual meaning.
    at = line.index("--") if verb in _RUNNING and "--" in line else len(line)
    words = line[:at]
    if verb == "run":
        from cachectl.verbs import NO_FOLDER

        # argparse would take the next word as the folder of a bare --isolated.
        words = [f"{word}={NO_FOLDER}" if word == "--isolated" else word for word in words]
    options, unknown = parser.parse_known_args(words)
    if isinstance(getattr(options, "layers", None), list) and not any(word.startswith("-") for word in unknown):
        # At the first option after FILE, argparse considers the layers complete: push FILE --force LAYER.
        options.layers = [name for word in (*options.layers, *unknown) for name in word.split(",")]
        unknown = []
    if unknown:
        # The verb's own parser names the verb's help.
        of_verb = getattr(options, "parser", parser)
        likely = did_you_mean(unknown[0].partition("=")[0], of_verb._option_string_actions)  # noqa: SLF001 - no other list
        of_verb.error(f"unrecognized arguments: {' '.join(unknown)}{likely}")
    if getattr(options, "user", None) or getattr(options, "all_users", False):
        from cachectl.cli import users

        # Each child reads the settings of its user.
        options.module = users
    from cachectl import verbs

    return verbs.Request(output, options, line, line[at + 1 :], environment)
