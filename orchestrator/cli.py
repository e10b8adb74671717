"""The command line: parse, call the verb, show its facts, answer with an exit status.

Status 0 is done; 1 is failed, refused, missing or damaged; 2 is misuse. Every error is one line.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from cachectl import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from cachectl.layers.layer import Layer
    from cachectl.layers.selection import Selection
    from cachectl.proof import Watch
    from cachectl.stack import Stack

Handler = Callable[[argparse.Namespace], int]

#: A day: who waits longer for a lock has forgotten.
_LONGEST: Final = 86400.0
#: Verbs that run a command.
_COMMANDS: Final = (["run"], ["trace"], ["bench"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    _open_streams()
    ours, command = _split(list(sys.argv[1:] if arguments is None else arguments))
    try:
        options = build_parser().parse_args(ours)
    except SystemExit:
        _drop_output()
        raise
    options.command = command
    handler: Handler = options.handler
    return _guarded(handler, options)


def _open_streams() -> None:
    """See to it that there are three standard streams, and that writing to them knows every character.

    A closed one is opened so that using it fails as it should: else the next file opened would take its place, a
    database for instance, and be printed into.
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


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part the command that a verb is to run from what is ours; elsewhere ``--`` means what it means to argparse."""
    if arguments[:1] not in _COMMANDS or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _guarded(handler: Handler, options: argparse.Namespace) -> int:
    from cachectl import render

    try:
        status = handler(options)
        render.finish()
    except BrokenPipeError:
        # The reader has seen enough.
        status = 1
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        known = _explained(error)
        if known is None:
            raise
        status, line = known
        render.warn(line)
    _drop_output()
    return status


def _explained(error: Exception) -> tuple[int, str] | None:
    """Return status and line for an error that is no fault of this program, else ``None``."""
    from cachectl.child import CannotStart
    from cachectl.layers.errors import BadRequest, CachectlError, printable

    if isinstance(error, CachectlError):
        status = 2 if isinstance(error, BadRequest) else error.status if isinstance(error, CannotStart) else 1
        return status, str(error)
    if isinstance(error, OSError):
        words = error.strerror or str(error)
        return 1, f"{words}: {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else words
    if isinstance(error, UnicodeError):
        what = error.object if isinstance(error, UnicodeEncodeError) else ""
        return 1, f"no text, and so no name that could be kept: {printable(what)}"
    if isinstance(error, (RecursionError, MemoryError)):
        return 1, f"what was to be read is nested too deeply, or too large for the memory ({type(error).__name__})"
    return None


def _drop_output() -> None:
    """Let go of what could not be written: Python must not complain again when it flushes on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------- grammar


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end the program."""
        from cachectl import render

        render.warn(f"{message}; try {self.prog} --help", self.prog)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """Describe the whole grammar; the reference in the documentation is made from this."""
    parser = _Parser(
        prog="cachectl",
        allow_abbrev=False,
        description="See, clear, switch and prove every kernel cache of the OpenCL stack.",
        epilog="LAYER is one of those that 'cachectl layers' lists; none means all.",
    )
    parser.add_argument("--version", action="version", version=f"cachectl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    report = _verb(verbs, "report", _report, "locations, state, entries, bytes, stale, problems")
    _layers_argument(report)
    _json_option(report)

    listing = _verb(verbs, "ls", _ls, "entries, one a line")
    _layers_argument(listing)
    _selection_options(listing)
    listing.add_argument("--sort", choices=("size", "age", "used"), help="largest, oldest, or longest unused first")
    listing.add_argument("--limit", type=int, metavar="N", help="show no more than N entries")
    form = listing.add_mutually_exclusive_group()
    form.add_argument("-q", "--quiet", action="store_true", help="print nothing but keys")
    _json_option(form)
    listing.epilog = "The table shortens keys to fit; -q and --json give them in full."

    get = _verb(verbs, "get", _get, "write one entry to a file")
    _entry_arguments(get)
    get.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")

    put = _verb(verbs, "put", _put, "place an entry that get wrote, so that the library hits it")
    _entry_arguments(put)
    put.add_argument("file", metavar="FILE", help="a file that get wrote, or - for standard input")
    put.add_argument("--replace", action="store_true", help="replace a different entry of that key")
    _changing_options(put)

    purge = _verb(verbs, "purge", _purge, "remove entries; --all is every user layer but tuning results")
    _layers_argument(purge)
    purge.add_argument("--all", action="store_true", help="every user layer that is not precious")
    _selection_options(purge)
    purge.add_argument("-n", "--dry-run", action="store_true", help="show what would go, and touch nothing")
    _changing_options(purge)
    _json_option(purge)

    _prune_verb(verbs)

    verify = _verb(verbs, "verify", _verify, "look for damage, entry by entry")
    _layers_argument(verify)
    verify.add_argument(
        "--quarantine", action="store_true", help="move what is damaged aside; cachectl restore brings it back"
    )
    _changing_options(verify)
    _json_option(verify)

    _restore_verb(verbs)

    doctor = _verb(verbs, "doctor", _doctor, "what is wrong with this set-up, and the command that mends it")
    _layers_argument(doctor)
    _json_option(doctor)

    _run_verb(verbs)
    _env_verb(verbs)
    _trace_verb(verbs)
    _bench_verb(verbs)

    layers = _verb(verbs, "layers", _layers, "adapters, what each can do here, and why not")
    _layers_argument(layers)
    _json_option(layers)

    demo = _verb(verbs, "demo", _demo, "the whole story on PoCL, in a scratch root")
    demo.add_argument(
        "--kernels", type=_positive, default=8, metavar="N", help="how many kernels to compile (default: 8)"
    )
    return parser


def _prune_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    prune = _verb(verbs, "prune", _prune, "remove what is dead or old, then the longest unused until the rest fits")
    _layers_argument(prune)
    prune.add_argument(
        "--stale", action="store_true", help="what no program of this Python and its packages can hit, and orphans"
    )
    prune.add_argument("--older-than", metavar="AGE", help="what was not changed or used for 30d, 12h, 2w")
    prune.add_argument("--max-size", metavar="SIZE", help="until the layers together hold no more than 500M, 2GiB")
    prune.add_argument("--max-files", type=_positive, metavar="N", help="until they hold no more than N files")
    prune.add_argument("-n", "--dry-run", action="store_true", help="show what would go, and touch nothing")
    _changing_options(prune)
    _json_option(prune)


def _restore_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    restore = _verb(verbs, "restore", _restore, "list what verify --quarantine moved aside, or bring it back")
    restore.add_argument("names", nargs="*", metavar="NAME", help="what to bring back (default: list all there is)")
    restore.add_argument("--all", action="store_true", help="bring everything back")
    restore.add_argument("--replace", action="store_true", help="also where another entry has taken its place")
    _changing_options(restore)
    _json_option(restore)


def _run_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    run = _verb(verbs, "run", _run, "run a command with caches off, or on in empty roots")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--no-cache", action="store_true", help="every layer off")
    how.add_argument(
        "--isolated",
        nargs="?",
        const="",
        metavar="DIR",
        help="every layer on, in an empty root or in DIR, which is kept",
    )
    _layer_option(run)
    run.add_argument(
        "--prove",
        action="store_true",
        help="attest that no real root was read or written; alone, of the command as it is",
    )
    run.usage = "cachectl run (--no-cache | --isolated[=DIR] | --prove) [--layer LAYER]... [--prove] -- COMMAND..."


def _env_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    from cachectl.shells import SHELLS

    env = _verb(verbs, "env", _env, "variables as shell commands, for eval")
    what = env.add_mutually_exclusive_group(required=True)
    what.add_argument("--disable", action="store_true", help="switch layers off")
    what.add_argument("--enable", action="store_true", help="switch layers on")
    what.add_argument(
        "--root", metavar="DIR", help="keep every layer under one folder (moves XDG_CACHE_HOME, for every program)"
    )
    _layer_option(env)
    env.add_argument("--shell", choices=SHELLS, help="whose commands to print (default: the login shell's)")


def _trace_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    trace = _verb(verbs, "trace", _trace, "hits, misses and stores of every layer in a run of a command")
    trace.add_argument("--kernels", action="store_true", help="also list each build: layer that served it, time")
    trace.add_argument("--explain", action="store_true", help="also say of every miss why")
    trace.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output")
    trace.usage = "cachectl trace [--kernels] [--explain] [--json FILE] -- COMMAND..."


def _bench_verb(verbs: argparse._SubParsersAction[_Parser]) -> None:
    bench = _verb(verbs, "bench", _bench, "what each cache is worth to a command: all cold, all warm, each off in turn")
    bench.add_argument(
        "-n", "--rounds", type=_positive, default=3, metavar="N", help="how often each setting is run (default: 3)"
    )
    bench.add_argument("--json", metavar="FILE", help="write JSON to a file, - for standard output instead of tables")
    bench.add_argument("--plot", metavar="FILE", help="draw it, as PNG or SVG by the ending (needs matplotlib)")
    bench.usage = "cachectl bench [-n N] [--json FILE] [--plot FILE] -- COMMAND..."


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"{text} is less than one"
        raise argparse.ArgumentTypeError(message)
    return number


_positive.__name__ = "number"


def _verb(
    verbs: argparse._SubParsersAction[_Parser], name: str, handler: Handler, summary: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(handler=handler, parser=parser)
    return parser


def _layers_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="a layer that cachectl layers lists (default: all)")


def _entry_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layer", metavar="LAYER", help="the layer that keeps the entry")
    parser.add_argument("key", metavar="KEY", help="the entry's key, as cachectl ls -q prints it")


def _layer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer", action="append", default=[], dest="layers", metavar="LAYER", help="only this one; may be repeated"
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
        "--stale", action="store_true", help="entries that no program of this Python and its packages can hit"
    )
    group.add_argument("--key", metavar="KEY", help="the entry of this key")


def _selection(options: argparse.Namespace, now: float) -> Selection:
    from cachectl.layers.selection import Selection, parse_age, parse_size

    return Selection(
        kernel=options.kernel,
        key=options.key,
        before=None if options.older_than is None else now - parse_age(options.older_than),
        after=None if options.newer_than is None else now - parse_age(options.newer_than),
        larger_than=None if options.larger_than is None else parse_size(options.larger_than),
        stale=options.stale,
    )


# ---------------------------------------------------------------------- verbs


def _stack(options: argparse.Namespace) -> Stack:
    from dataclasses import replace

    from cachectl.layers.environment import Environment, process_variable
    from cachectl.layers.errors import CachectlError
    from cachectl.stack import Stack

    try:
        os.getcwd()
    except OSError as error:
        where = process_variable("PWD") or "the working folder"
        message = f"{where}: {error.strerror}; the working folder has gone or is closed to you, cd to another"
        raise CachectlError(message) from error
    changing = vars(options)
    here = Environment.here()
    patience = changing.get("wait")
    return Stack(
        replace(
            here,
            patience=here.patience if patience is None else patience,
            over_others=changing.get("over_others", False),
        )
    )


def _report(options: argparse.Namespace) -> int:
    from cachectl import render

    stack = _stack(options)
    with render.working("looking at every cache"):
        report = stack.report(layers=options.layers)
    if options.json:
        render.show_json(render.report_json(report))
    else:
        render.show_report(report, str(stack.environment.home_folder))
    return 0


def _ls(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.listing import Trouble, ordered

    stack = _stack(options)
    now = stack.environment.clock()
    selection = _selection(options, now)
    troubles: list[Trouble] = []
    with render.working("listing"):
        entries = ordered(
            stack.entries(selection, layers=options.layers, notice=troubles.append),
            sort=options.sort,
            limit=options.limit,
        )
    if options.json:
        render.show_json(render.entries_json(entries, troubles))
    elif options.quiet:
        render.show_raw(entry.key for entry in entries)
    else:
        render.show_entries(entries, now)
    render.warn_of(troubles)
    return 1 if any(trouble.failed for trouble in troubles) else 0


def _get(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.layers.errors import BadRequest, LayerError
    from cachectl.layers.stores.archive import artifact_to_bytes
    from cachectl.listing import write_file

    if options.output is None and sys.stdout.isatty():
        raise BadRequest("an artifact is binary; name a file with -o FILE")
    layer = _stack(options)[options.layer]
    artifact = layer.get(options.key)
    if artifact is None:
        raise LayerError(layer.name, f"no entry has the key {options.key!r}; cachectl ls {layer.name} lists keys")
    data = artifact_to_bytes(artifact)
    if options.output is None:
        render.show_bytes(data)
    else:
        write_file(options.output, data)
    return 0


def _put(options: argparse.Namespace) -> int:
    from cachectl.layers.stores.archive import artifact_from_bytes

    data = _read_input(options.file)
    _stack(options)[options.layer].put(options.key, artifact_from_bytes(data), replace=options.replace)
    return 0


def _read_input(name: str) -> bytes:
    from pathlib import Path

    if name != "-":
        return Path(name).read_bytes()
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        error.filename = "standard input"
        raise


def _purge(options: argparse.Namespace) -> int:
    from cachectl import render

    if options.all == bool(options.layers):
        options.parser.error("name the layers to purge, or say --all" if not options.all else "--all needs no LAYER")
    stack = _stack(options)
    selection = _selection(options, stack.environment.clock())
    with render.working("purging"):
        plan = stack.plan_clear(selection, layers=options.layers)
        result = plan.foreseen() if options.dry_run else plan.apply()
    missing = options.key is not None and plan.finds_nothing
    if options.json:
        render.show_json(render.purge_json(result))
    elif not missing:
        render.show_purge(result)
    if missing:
        render.warn(f"no entry that is selected has the key {options.key!r}; cachectl ls -q lists keys")
    return 1 if missing or result.failed else 0


def _prune(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.layers.selection import parse_age, parse_size
    from cachectl.pruning import Limits, plan_prune

    stack = _stack(options)
    limits = Limits(
        stale=options.stale,
        before=None if options.older_than is None else stack.environment.clock() - parse_age(options.older_than),
        bytes=None if options.max_size is None else parse_size(options.max_size),
        files=options.max_files,
    )
    if limits.none:
        options.parser.error("say what to prune: --stale, --older-than, --max-size or --max-files")
    with render.working("pruning"):
        plan = plan_prune(stack.named(options.layers) if options.layers else stack.expendable(), limits)
        result = plan.foreseen() if options.dry_run else plan.apply()
    if options.json:
        render.show_json(render.purge_json(result))
    else:
        render.show_purge(result)
    return 1 if result.failed else 0


def _verify(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.listing import findings
    from cachectl.quarantine import QuarantineResult, plan

    stack = _stack(options)
    layers = stack.named(options.layers)
    with render.working("verifying"):
        found = findings(layers)
        result = QuarantineResult(tuple(found), ())
        if options.quarantine:
            result = plan(layers, found, named=bool(options.layers)).apply()
    if options.json:
        render.show_json(render.verified_json(result) if options.quarantine else render.findings_json(found))
    else:
        render.show_findings(found, moved=result.moved)
        render.show_quarantine(result)
    return 0 if not found or (options.quarantine and result.mended) else 1


def _doctor(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.doctor import diagnosis, is_grave

    stack = _stack(options)
    with render.working("looking into everything"):
        found = diagnosis(stack.named(options.layers), () if options.layers else stack.broken)
    if options.json:
        render.show_json(render.findings_json(found))
    else:
        render.show_findings(found, nothing="nothing is wrong")
    return 1 if any(map(is_grave, found)) else 0


def _restore(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.quarantine import held, restore

    stack = _stack(options)
    if options.all and options.names:
        options.parser.error("--all needs no NAME")
    with render.working("looking into quarantine"):
        there, failed = held(stack)
    wanted = [(layer, thing) for layer, thing in there if options.all or thing.name in options.names]
    unknown = sorted(set(options.names) - {thing.name for _, thing in wanted})
    done = restore(wanted, replace=options.replace)
    listed = [] if options.names or options.all else [thing for _, thing in there]
    if options.json:
        render.show_json(render.quarantine_json(listed, done))
    elif options.names or options.all:
        render.show_restored(done)
    else:
        render.show_quarantined(listed, stack.environment.clock())
    for name in unknown:
        render.warn(f"nothing in quarantine is called {name!r}; cachectl restore lists what there is")
    render.warn_of_notes(failed)
    return 1 if unknown or failed or any(one.because is not None for one in done) else 0


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl import child, render
    from cachectl.scratch import scratch_folder, shadow_user_cache

    if not options.command:
        options.parser.error("write -- and the command to run at the end")
    if not (options.no_cache or options.prove or options.isolated is not None):
        options.parser.error("say how to run it: --no-cache, --isolated or --prove")
    stack = _stack(options)
    layers: tuple[Layer, ...] = stack.named(options.layers)
    if not options.no_cache and options.isolated is None:
        with child.signals_held() as signals:
            eyes = _watch(options, stack, layers)
            return _proved(eyes, child.run(options.command, {}, stack.environment, signals))
    _say_what_stays(options, layers)
    folder = Path(options.isolated) if options.isolated else None
    with child.signals_held() as signals, scratch_folder(folder) as root:
        moved, changes = _moved(options, stack, layers, root)
        with shadow_user_cache(stack.environment, moved, root, render.warn):
            watch = _watch(options, stack, layers) if options.prove else None
            status = child.run(options.command, changes, stack.environment, signals)
        # What was brought home counts too.
        return _proved(watch, status)


def _watch(options: argparse.Namespace, stack: Stack, layers: tuple[Layer, ...]) -> Watch:
    """Put the real roots under watch, but for layers that are meant to stay in use."""
    from cachectl.child import out_of_reach
    from cachectl.proof import Watch

    as_it_is = not options.no_cache and options.isolated is None
    staying = (layer.name for layer in layers if not as_it_is and out_of_reach(layer, off=options.no_cache) is not None)
    return Watch(stack, layers, left_out=frozenset(staying))


def _proved(watch: Watch | None, status: int) -> int:
    """Say what the watch saw, and return the status: the child's own only if the proof holds, or none was wanted."""
    from cachectl import render

    if watch is None:
        return status
    proof = watch.end()
    render.show_proof(proof)
    return status if proof.holds else 1


def _moved(
    options: argparse.Namespace, stack: Stack, layers: tuple[Layer, ...], root: Path
) -> tuple[tuple[Layer, ...], dict[str, str | None]]:
    """Return the layers that a child finds elsewhere, and the variables that see to it."""
    from cachectl import child, render
    from cachectl.scratch import companions

    if options.no_cache:
        return layers, child.variables_off(layers, stack, root)
    along = companions(layers, stack, root)
    for name in along:
        render.warn(f"{name} keeps its entries in the same folder, so it is isolated too")
    return (*layers, *stack.named(along)) if along else layers, child.variables_isolated(layers, root)


def _say_what_stays(options: argparse.Namespace, layers: tuple[Layer, ...]) -> None:
    """Name the layers about which nothing can be done. Raises :class:`Refused` where one was asked for by name."""
    from cachectl import render
    from cachectl.child import left_alone
    from cachectl.layers.errors import Refused

    for name, why in left_alone(layers, off=options.no_cache).items():
        if name in options.layers:
            raise Refused(name, f"stays as it is: {why}")
        render.warn(f"{name} stays as it is: {why}")


def _env(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.child import variables_for
    from cachectl.shells import guess_shell, spell

    stack = _stack(options)
    layers = stack.named(options.layers)
    shell = options.shell or guess_shell(stack.environment.get("SHELL"))
    root = None if options.root is None else _root(options.root, stack)
    changes, notes = variables_for(layers, on=options.enable, root=root)
    render.show_raw(spell(changes, shell))
    for note in notes:
        render.warn(note)
    return 0


def _root(name: str, stack: Stack) -> Path:
    from cachectl.layers.errors import BadRequest

    root = stack.environment.expand(name)
    if not name or (root.exists() and not root.is_dir()):
        message = f"--root {name!r} is no folder"
        raise BadRequest(message)
    return root


def _trace(options: argparse.Namespace) -> int:
    import time
    from pathlib import Path

    from cachectl import child, render
    from cachectl.listing import write_file
    from cachectl.scratch import scratch_folder
    from cachectl.trace import Tracer

    if not options.command:
        options.parser.error("write -- and the command to run at the end")
    _check_targets(options.json)
    stack = _stack(options)
    with child.signals_held() as signals, scratch_folder() as folder:
        tracer = Tracer(stack, Path(folder), explain=options.explain)
        started = time.perf_counter()
        with tracer.looking():
            status = child.run(options.command, tracer.variables(stack.environment), stack.environment, signals)
        done = tracer.ended(options.command, status, time.perf_counter() - started)
    document = render.trace_json(done, kernels=options.kernels, explain=options.explain)
    if options.json == "-":
        render.show_json(document)
    elif options.json is not None:
        write_file(options.json, render.json_bytes(document))
    render.show_trace(done, kernels=options.kernels, explain=options.explain)
    return status


def _bench(options: argparse.Namespace) -> int:
    from cachectl import child, render
    from cachectl.bench import Ended, bench
    from cachectl.listing import write_file

    if not options.command:
        options.parser.error("write -- and the command to run at the end")
    if options.plot is not None:
        from cachectl.plot import check

        check(options.plot)
    _check_targets(options.json, options.plot)
    stack = _stack(options)
    try:
        with child.signals_held() as signals, render.progress() as show:
            measured = bench(options.command, stack, options.rounds, signals=signals, notice=render.warn, show=show)
    except Ended as ended:
        for line in ended.said:
            render.warn(line, "command")
        render.warn(str(ended))
        return ended.status
    document = render.bench_json(measured)
    if options.json == "-":
        render.show_json(document)
    else:
        render.show_bench(measured)
    if options.json not in (None, "-"):
        write_file(options.json, render.json_bytes(document))
    if options.plot is not None:
        from cachectl.plot import draw

        write_file(options.plot, draw(measured, options.plot))
    return 0


def _check_targets(*names: str | None) -> None:
    """Find out before anything is run, not after minutes of it, that what was measured could not be kept."""
    from cachectl.layers.errors import BadRequest

    for name in names:
        folder = os.path.dirname(name or "")
        if folder and not os.path.isdir(folder):
            message = f"{name!r} lies in no folder; make {folder} first"
            raise BadRequest(message)


def _layers(options: argparse.Namespace) -> int:
    from cachectl import render

    stack = _stack(options)
    layers = stack.named(options.layers)
    if options.json:
        render.show_json(render.layers_json(layers, stack.broken))
    else:
        render.show_layers(layers, stack.broken)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cachectl.demo import demo

    return demo(options.kernels)
