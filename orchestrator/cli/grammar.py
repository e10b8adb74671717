"""The grammar of the command line: every verb, its summary and its options.

The options of a verb are described only when it is typed: describing all of them takes longer than most reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Sequence
from typing import Final, NoReturn

from cachectl import __version__

#: A day: who waits longer for a lock has forgotten.
_LONGEST: Final = 86400.0
#: Stands for the folder of a bare ``--isolated``; no argument of a process can hold it.
_NO_FOLDER: Final = "\0"


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end the program."""
        from cachectl.cli import render

        render.warn(f"{message}; try {self.prog} --help", self.prog)
        raise SystemExit(2)


def build_parser(words: Container[str] | None = None) -> argparse.ArgumentParser:
    """Describe the verbs among some words; where there is none, the summary of each. ``None`` is the whole grammar.

    The reference in the documentation is made from the whole.
    """
    parser = _Parser(
        prog="cachectl",
        allow_abbrev=False,
        description="See, clear, switch and prove every kernel cache of the OpenCL stack.",
        epilog="LAYER is one of those that 'cachectl layers' lists; none means all.",
    )
    parser.add_argument("--version", action="version", version=f"cachectl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="verb")
    typed = VERBS.keys() if words is None else {name for name in VERBS if name in words}
    for name, (summary, describe) in VERBS.items():
        if typed and name not in typed:
            continue
        description = summary[0].upper() + summary[1:] + "."
        verb = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False, add_help=bool(typed))
        if typed:
            verb.set_defaults(parser=verb)
            describe(verb)
    return parser


def _report(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    verb.add_argument(
        "--neighbours", action="store_true", help="also other caches of compiled code (Triton, CuPy …), only looked at"
    )
    _nodes_option(verb)
    _json_option(verb)


def _listing(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    _selection_options(verb)
    verb.add_argument("--sort", choices=("size", "age", "used"), help="largest, oldest, or longest unused first")
    verb.add_argument("--limit", type=int, metavar="N", help="show no more than N entries")
    form = verb.add_mutually_exclusive_group()
    form.add_argument("-q", "--quiet", action="store_true", help="print nothing but keys")
    _json_option(form)
    verb.epilog = "The table shortens keys to fit; -q and --json give them in full."


def _get(verb: argparse.ArgumentParser) -> None:
    _entry_arguments(verb)
    verb.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")
    _force_option(verb, "an artifact")


def _put(verb: argparse.ArgumentParser) -> None:
    _entry_arguments(verb)
    verb.add_argument("file", metavar="FILE", help="a file that get wrote, or - for standard input")
    verb.add_argument("--replace", action="store_true", help="replace a different entry of that key")
    _changing_options(verb)


def _purge(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    verb.add_argument("--all", action="store_true", help="every user layer that is not precious")
    _selection_options(verb)
    _dry_run_option(verb, "go")
    _nodes_option(verb)
    _changing_options(verb)
    _json_option(verb)


def _prune(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    verb.add_argument(
        "--stale", action="store_true", help="what no program can hit any more as far as this Python tells, and orphans"
    )
    verb.add_argument("--older-than", metavar="AGE", help="what was not changed or used for 30d, 12h, 2w")
    verb.add_argument("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB")
    verb.add_argument("--max-files", type=_positive, metavar="N", help="until they hold no more than N files")
    _dry_run_option(verb, "go")
    _changing_options(verb)
    _json_option(verb)


def _verify(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    verb.add_argument(
        "--quarantine", action="store_true", help="move what is damaged aside; cachectl restore brings it back"
    )
    verb.add_argument(
        "--deep", action="store_true", help="also have installed tools read what cachectl cannot: bitcode, by llvm-dis"
    )
    _changing_options(verb)
    _json_option(verb)


def _restore(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("names", nargs="*", metavar="NAME", help="what to bring back (default: list all there is)")
    verb.add_argument("--all", action="store_true", help="bring everything back")
    verb.add_argument("--replace", action="store_true", help="also where another entry has taken its place")
    _dry_run_option(verb, "come back")
    _changing_options(verb)
    _json_option(verb)


def _doctor(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    _json_option(verb)


def _run(verb: argparse.ArgumentParser) -> None:
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--no-cache", action="store_true", help="every layer off")
    how.add_argument(
        "--isolated",
        nargs="?",
        type=_folder,
        metavar="=DIR",
        help="every layer on, in an empty root or in DIR, which is kept",
    )
    _layer_option(verb)
    _stray_words(verb)
    verb.add_argument(
        "--prove",
        action="store_true",
        help="attest that no real root was read or written; alone, of the command as it is",
    )
    verb.usage = "cachectl run (--no-cache | --isolated[=DIR] | --prove) [--layer LAYER]... [--prove] -- COMMAND..."


def _env(verb: argparse.ArgumentParser) -> None:
    from cachectl.switching.shells import SHELLS

    what = verb.add_mutually_exclusive_group(required=True)
    what.add_argument("--disable", action="store_true", help="switch layers off")
    what.add_argument("--enable", action="store_true", help="switch layers on")
    what.add_argument(
        "--root", metavar="DIR", help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)"
    )
    _layer_option(verb)
    verb.add_argument("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)")


def _trace(verb: argparse.ArgumentParser) -> None:
    _stray_words(verb)
    verb.add_argument("--kernels", action="store_true", help="also list each build: layer that served it, time")
    verb.add_argument("--explain", action="store_true", help="also say of every miss why")
    verb.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output")
    _force_option(verb, "JSON of trace")
    verb.usage = "cachectl trace [--kernels] [--explain] [--json FILE [--force]] -- COMMAND..."


def _bench(verb: argparse.ArgumentParser) -> None:
    _stray_words(verb)
    verb.add_argument(
        "-n", "--rounds", type=_positive, default=3, metavar="N", help="how often each setting is run (default: 3)"
    )
    verb.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output instead of tables")
    verb.add_argument("--plot", metavar="FILE", help="draw it, as PNG or SVG by the ending (needs matplotlib)")
    _force_option(verb, "JSON or a picture of bench")
    verb.usage = "cachectl bench [-n N] [--json FILE] [--plot FILE] [--force] -- COMMAND..."


def _export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", nargs="?", metavar="FILE", help="the bundle to write, - or a URL: s3://, gs://, ssh://")
    verb.add_argument(
        "layers", nargs="*", metavar="LAYER", help="a layer of cachectl layers (default: all but tuning results)"
    )
    _selection_options(verb)
    verb.add_argument("--sign", metavar="KEY", help="sign it with a key of OpenSSH; the signature is FILE.sig")
    verb.add_argument(
        "--as-kdb", metavar="DIR", help="no bundle: write the databases of miopen or miopen-tuning as files to install"
    )
    _force_option(verb, "a bundle")
    _json_option(verb)


def _import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", metavar="FILE", help="a bundle that export wrote, - or its URL")
    why = verb.add_mutually_exclusive_group(required=True)
    why.add_argument("--allowed-signers", metavar="LIST", help="FILE.sig is by a signer of this list (ssh-keygen -Y)")
    why.add_argument("--sha256", metavar="HEX", help="this is the SHA-256 of FILE")
    why.add_argument("--trust", action="store_true", help="believe it: it is code that your programs will run")
    _newer_option(verb)
    verb.add_argument("--max-size", metavar="SIZE", help="the largest bundle to read, 500M or 2GiB (default: 32GiB)")
    _dry_run_option(verb, "be placed")
    _changing_options(verb)
    _json_option(verb)


def _miopen(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("action", choices=("merge",), help="add what INTO has not; what differs stays as it is there")
    verb.add_argument(
        "files", nargs="+", metavar="FILE", help="a database of MIOpen: .ukdb, .kdb, .ufdb.txt, .udb.txt, .udb"
    )
    verb.add_argument("into", metavar="INTO", help="one for the same device, which is made if it is not there")
    verb.add_argument("--mix-versions", action="store_true", help="also from another MIOpen")
    _changing_options(verb)
    _json_option(verb)


def _stage(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("direction", choices=("in",), help="to every node; --out brings back what is new")
    verb.add_argument(
        "bundle", nargs="?", metavar="BUNDLE", help="what to begin with, a bundle or a root (default: empty caches)"
    )
    why = verb.add_mutually_exclusive_group()
    why.add_argument("--allowed-signers", metavar="LIST", help="BUNDLE.sig is by a signer of this list (ssh-keygen -Y)")
    why.add_argument("--sha256", metavar="HEX", help="this is the SHA-256 of BUNDLE")
    why.add_argument("--trust", action="store_true", help="believe it: it is code that your programs will run")
    _newer_option(verb)
    verb.add_argument("--out", metavar="FILE", help="write BUNDLE and every new entry of all nodes to this bundle")
    verb.add_argument("--sign", metavar="KEY", help="sign it with a key of OpenSSH; the signature is FILE.sig")
    _force_option(verb, "a bundle")
    verb.add_argument(
        "--scratch",
        metavar="DIR",
        help="on each node's own disk: a folder of yours of mode 700, or one to make it in (default: TMPDIR)",
    )
    verb.usage = (
        "mpiexec -n N cachectl stage in [BUNDLE (--allowed-signers LIST | --sha256 HEX | --trust) [--newer-than AGE]] "
        "[--out FILE [--sign KEY] [--force]] [--scratch DIR] -- COMMAND..."
    )


def _merge(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "roots", nargs="+", metavar="ROOT", help="a folder that run --isolated kept, or an XDG_CACHE_HOME, or a home"
    )
    verb.add_argument("into", metavar="INTO", help="the folder that gets every entry once, for run --isolated=INTO")
    _json_option(verb)


def _layers(verb: argparse.ArgumentParser) -> None:
    _layers_argument(verb)
    _json_option(verb)


def _demo(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--kernels", type=_positive, default=8, metavar="N", help="how many kernels to compile (default: 8)"
    )


def attach_values(words: Sequence[str]) -> list[str]:
    """Mark a bare ``--isolated`` as such: argparse would take the next word for its folder."""
    return [f"{word}={_NO_FOLDER}" if word == "--isolated" else word for word in words]


def _folder(text: str) -> str:
    """Return the folder of ``--isolated=DIR``, or nothing for a bare ``--isolated``."""
    if not text:
        raise argparse.ArgumentTypeError("no folder after =; write --isolated=DIR, or --isolated alone")
    return text.removeprefix(_NO_FOLDER)


def _stray_words(verb: argparse.ArgumentParser) -> None:
    """Collect what stands before ``--`` and is no option: a command that is not marked off, with its own options."""
    verb.add_argument("stray", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"{text} is less than one"
        raise argparse.ArgumentTypeError(message)
    return number


_positive.__name__ = "number"


def _layers_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="a layer that cachectl layers lists (default: all)")


def _entry_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layer", metavar="LAYER", help="the layer that keeps the entry")
    parser.add_argument("key", metavar="KEY", help="the entry's key, as cachectl ls -q prints it")


def _layer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer", action="append", default=[], dest="layers", metavar="LAYER", help="only this one; may be repeated"
    )


def _nodes_option(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--mpi", action="store_true", help="started by mpiexec: all nodes at once, what they share counted once"
    )


def _dry_run_option(verb: argparse.ArgumentParser, what: str) -> None:
    verb.add_argument("-n", "--dry-run", action="store_true", help=f"list what would {what}, and touch nothing")


def _force_option(verb: argparse.ArgumentParser, kind: str) -> None:
    verb.add_argument("--force", action="store_true", help=f"replace a FILE that is there and is not {kind}")


def _newer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--newer-than", metavar="AGE", help="refuse a bundle that was not signed within 30d, 12h, or since 2026-12-31"
    )


def _json_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and epoch seconds as numbers")


def _changing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="how long to wait for a lock somebody else holds (default: 5)"
    )
    parser.add_argument(
        "--over-others", action="store_true", help="as the superuser, change what belongs to another user too"
    )


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= _LONGEST:
        message = f"{text} is not between 0 and {_LONGEST:.0f}"
        raise argparse.ArgumentTypeError(message)
    return number


_seconds.__name__ = "seconds"


def _selection_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("selection")
    group.add_argument("--kernel", metavar="GLOB", help="entries of kernels whose name matches")
    group.add_argument("--older-than", metavar="AGE", help="not changed or used for 30d, 12h, 2w")
    group.add_argument("--newer-than", metavar="AGE", help="changed or used within AGE")
    group.add_argument("--larger-than", metavar="SIZE", help="larger than 500M, 2GiB")
    group.add_argument(
        "--stale", action="store_true", help="entries that no program can hit any more, as far as this Python tells"
    )
    group.add_argument("--key", metavar="KEY", help="the entry of this key")


#: Every verb in the order of the help: what it is for, and what describes its options.
VERBS: Final[dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]] = {
    "report": ("locations, state, entries, bytes, stale, problems", _report),
    "ls": ("entries, one a line", _listing),
    "get": ("write one entry to a file", _get),
    "put": ("place an entry that get wrote, so that the library hits it", _put),
    "purge": ("remove entries; --all is every user layer but tuning results", _purge),
    "prune": ("remove what is dead or old, then the longest unused until the rest fits", _prune),
    "verify": ("look for damage, entry by entry", _verify),
    "restore": ("list what verify --quarantine moved aside, or bring it back", _restore),
    "doctor": ("what is wrong with this set-up, and the command that fixes it", _doctor),
    "run": ("run a command with caches off, or on in empty roots", _run),
    "env": ("variables as shell commands, for eval", _env),
    "trace": ("hits, misses and stores of every layer in a run of a command", _trace),
    "bench": ("what each cache is worth to a command: all cold, all warm, each off in turn", _bench),
    "export": ("pack entries into one file, for another machine", _export),
    "import": ("place what export packed, once it is trusted and checked", _import),
    "miopen": ("merge databases of MIOpen, of several users or ranks", _miopen),
    "stage": ("warm caches to every node of an MPI job, and back", _stage),
    "merge": ("entries of several folders, of ranks for instance, into one", _merge),
    "layers": ("adapters, what each can do here, and why not", _layers),
    "demo": ("the whole story on PoCL, in a scratch root", _demo),
}
