"""The command line: parse, call the verb, show its facts, answer with an exit status.

Status 0 is done; 1 is failed, refused, missing or damaged; 2 is misuse. Every error is one line.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Final, TypeVar

from cachectl.cli.grammar import attach_values, build_parser

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Protocol

    from cachectl.clearing.purge import PurgeResult
    from cachectl.cluster.nodes import Nodes
    from cachectl.inspecting.neighbours import Neighbour
    from cachectl.inspecting.report import Report
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.layer import Layer
    from cachectl.layers.base.selection import Selection
    from cachectl.moving.output_files import Kind, OutputFile
    from cachectl.observing.proof import Watch
    from cachectl.stack import Stack

    class _CanFail(Protocol):
        @property
        def failed(self) -> object: ...


T = TypeVar("T")
Done = TypeVar("Done", bound="_CanFail")
Handler = Callable[[argparse.Namespace], int]

#: Verbs that run a command.
_COMMANDS: Final = (["run"], ["trace"], ["bench"], ["stage"])
#: Verbs that say themselves which plug-ins gave no layer.
_TELLING: Final = frozenset({"report", "layers", "doctor"})


def main(arguments: Sequence[str] | None = None, *, environment: Environment | None = None) -> int:
    """Run the command line and return the exit status.

    ``arguments`` are the words after ``cachectl``, by default this process's. ``environment`` says where the caches
    are, by default as this process sees them; relative file names always mean the working folder of this process.
    Raises :class:`SystemExit` for wrong usage (status 2), ``--help`` and ``--version``.
    """
    _open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours, command = _split(words)
    try:
        options = build_parser(ours[:1]).parse_args(attach_values(ours) if ours[:1] == ["run"] else ours)
    except SystemExit:
        _drop_output()
        raise
    options.command = command
    options.words = words
    options.environment = environment
    return _guarded(_HANDLERS[options.verb], options)


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
    from cachectl.cli import render

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
    from cachectl.layers.base.errors import BadRequest, CachectlError, printable
    from cachectl.switching.run import CannotStart

    if isinstance(error, CachectlError):
        status = 2 if isinstance(error, BadRequest) else error.status if isinstance(error, CannotStart) else 1
        return status, str(error)
    if isinstance(error, OSError):
        words = error.strerror or str(error)
        return 1, f"{words}: {os.fsdecode(error.filename)}" if isinstance(error.filename, (str, bytes)) else words
    if isinstance(error, UnicodeError):
        what = error.object if isinstance(error, UnicodeEncodeError) else ""
        return 1, f"not valid UTF-8, so it cannot be stored as a name: {printable(what)}"
    if isinstance(error, (RecursionError, MemoryError)):
        return 1, f"the input is nested too deeply, or too large for the memory ({type(error).__name__})"
    return None


def _drop_output() -> None:
    """Let go of what could not be written: Python must not complain again when it flushes on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _selection(options: argparse.Namespace, now: float) -> Selection:
    from cachectl.layers.base.selection import Selection, parse_age, parse_size

    return Selection(
        kernel=options.kernel,
        key=options.key,
        before=None if options.older_than is None else now - parse_age(options.older_than),
        after=None if options.newer_than is None else now - parse_age(options.newer_than),
        larger_than=None if options.larger_than is None else parse_size(options.larger_than),
        stale=options.stale,
    )


# ---------------------------------------------------------------------- verbs


def _told(
    options: argparse.Namespace, done: Done, document: Callable[[Done], object], show: Callable[[Done], None]
) -> int:
    """Show what a verb has done, as JSON where that was asked for, and return its status."""
    from cachectl.cli import render

    if options.json:
        render.show_json(document(done))
    else:
        show(done)
    return 1 if done.failed else 0


def _environment(options: argparse.Namespace) -> Environment:
    """Return the environment that :func:`main` was given, or that of this process."""
    from cachectl.layers.base.environment import Environment

    given: Environment | None = options.environment
    return Environment.here() if given is None else given


def _stack(options: argparse.Namespace) -> Stack:
    from dataclasses import replace

    from cachectl.cli import render
    from cachectl.layers.base.environment import process_variable
    from cachectl.layers.base.errors import CachectlError
    from cachectl.stack import Stack

    try:
        os.getcwd()
    except OSError as error:
        where = process_variable("PWD") or "the working folder"
        message = f"{where}: {error.strerror}; the working folder has gone or is closed to you, cd to another"
        raise CachectlError(message) from error
    changing = vars(options)
    here = _environment(options)
    patience = changing.get("wait")
    stack = Stack(
        replace(
            here,
            patience=here.patience if patience is None else patience,
            over_others=changing.get("over_others", False),
        )
    )
    # What is meant to be about everything is not, without them.
    if options.verb not in _TELLING and not changing.get("layers") and not changing.get("mpi"):
        for plugin in stack.broken:
            render.warn(f"plug-in {plugin.name}: {plugin.why}")
    return stack


def _report(options: argparse.Namespace) -> int:
    from cachectl.cli import render

    if options.mpi and options.neighbours:
        options.parser.error("--neighbours looks at one machine; leave out --mpi")
    stack = _stack(options)
    with render.working("looking at every cache"):
        report = _surveyed(stack, options)
        beside = _neighbours(stack) if options.neighbours else None
    if report is None:
        return 0
    if options.json:
        render.show_json(render.report_json(report, beside))
    else:
        home = str(stack.environment.home_folder)
        render.show_report(report, home)
        render.show_neighbours(beside, home)
    return 0 if report.complete else 1


def _surveyed(stack: Stack, options: argparse.Namespace) -> Report | None:
    if options.mpi:
        return _over_nodes(stack, lambda nodes: nodes.report(options.layers))
    return stack.report(layers=options.layers)


def _over_nodes(stack: Stack, act: Callable[[Nodes], T]) -> T:
    """Do something on all ranks of a job together; what is wrong with a request is said by the first of them."""
    from cachectl.cli import render
    from cachectl.cluster.nodes import Nodes
    from cachectl.cluster.stage import one_voice
    from cachectl.layers.base.errors import BadRequest

    with one_voice():
        nodes = Nodes(stack, render.warn)
    try:
        return act(nodes)
    except BadRequest:
        if nodes.first:
            raise
        raise SystemExit(2) from None


def _neighbours(stack: Stack) -> list[Neighbour]:
    from cachectl.inspecting.neighbours import neighbours

    return neighbours(stack.environment)


def _ls(options: argparse.Namespace) -> int:
    from cachectl.cli import render
    from cachectl.inspecting.entries import Trouble, ordered

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
    from cachectl.cli import render
    from cachectl.layers.base.errors import LayerError
    from cachectl.layers.stores.archive import artifact_to_bytes
    from cachectl.moving.output_files import ARTIFACT
    from cachectl.moving.whole_files import STREAM

    stack = _stack(options)
    layer = stack[options.layer]
    output = _output(STREAM if options.output is None else options.output, ARTIFACT, stack, options)
    output.demand()
    artifact = layer.get(options.key)
    if artifact is None:
        raise LayerError(layer.name, f"no entry has the key {options.key!r}; cachectl ls {layer.name} lists keys")
    data = artifact_to_bytes(artifact)
    if output.name == STREAM:
        render.show_bytes(data)
    else:
        output.write((data,))
    return 0


def _output(name: str, kind: Kind, stack: Stack, options: argparse.Namespace) -> OutputFile:
    from cachectl.moving.output_files import OutputFile

    return OutputFile(name, kind, frozenset(layer.name for layer in stack), options.force)


def _put(options: argparse.Namespace) -> int:
    from cachectl.layers.stores.archive import artifact_from_bytes

    data = _read_input(options.file)
    _stack(options)[options.layer].put(options.key, artifact_from_bytes(data), replace=options.replace)
    return 0


def _read_input(name: str) -> bytes:
    import io
    from contextlib import nullcontext

    from cachectl.layers.base.errors import BadRequest
    from cachectl.layers.base.limits import LARGEST_ARTIFACT

    whole = io.BytesIO()
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as file:
            while whole.tell() <= LARGEST_ARTIFACT and (piece := file.read(1 << 20)):
                whole.write(piece)
    except OSError as error:
        error.filename = "standard input" if name == "-" else name
        raise
    if whole.tell() > LARGEST_ARTIFACT:
        message = f"{name}: has more than the {LARGEST_ARTIFACT:,} bytes of the largest artifact; give what get wrote"
        raise BadRequest(message)
    return whole.getvalue()


def _purge(options: argparse.Namespace) -> int:
    from cachectl.cli import render

    if options.all == bool(options.layers):
        options.parser.error("name the layers to purge, or say --all" if not options.all else "--all needs no LAYER")
    stack = _stack(options)
    selection = _selection(options, stack.environment.clock())
    with render.working("purging"):
        result = _purged(stack, selection, options)
        _remove_leftovers(stack, options)
    if result is None:
        return 0
    missing = options.key is not None and result.found_nothing
    if options.json:
        render.show_json(render.purge_json(result))
    elif not missing:
        render.show_purge(result, stack.environment.clock())
    if missing:
        render.warn(f"no entry that is selected has the key {options.key!r}; cachectl ls -q lists keys")
    return 1 if missing or result.failed else 0


def _remove_leftovers(stack: Stack, options: argparse.Namespace) -> None:
    """Remove what killed commands left: copies in the user cache folder, and scratch folders."""
    from cachectl.cli import render
    from cachectl.switching.isolated import remove_copies, remove_leftovers

    if options.dry_run or getattr(options, "mpi", False):
        return
    for copy in remove_copies(stack.environment):
        render.warn(f"removed {copy.root / copy.key}: {copy.why}")
    if left := remove_leftovers(stack.environment, render.warn):
        render.warn(f"removed {left} scratch {'folder' if left == 1 else 'folders'} of commands that were killed")


def _purged(stack: Stack, selection: Selection, options: argparse.Namespace) -> PurgeResult | None:
    if options.mpi:
        return _over_nodes(stack, lambda nodes: nodes.purge(selection, options.layers, dry_run=options.dry_run))
    if not options.dry_run:
        stack.recover(options.layers)
    plan = stack.plan_clear(selection, layers=options.layers, listed=options.dry_run)
    return plan.foreseen() if options.dry_run else plan.apply()


def _prune(options: argparse.Namespace) -> int:
    from cachectl.clearing.prune import Limits, plan_prune
    from cachectl.cli import render
    from cachectl.layers.base.selection import parse_age, parse_size

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
        chosen = stack.named(options.layers) if options.layers else stack.expendable()
        if not options.dry_run:
            stack.recover(options.layers)
        plan = plan_prune(chosen, limits, listed=options.dry_run)
        result = plan.foreseen() if options.dry_run else plan.apply()
        _remove_leftovers(stack, options)
    now = stack.environment.clock()
    return _told(options, result, render.purge_json, lambda result: render.show_purge(result, now))


def _verify(options: argparse.Namespace) -> int:
    from cachectl.clearing.quarantine import QuarantineResult, plan
    from cachectl.cli import render
    from cachectl.inspecting.entries import verified

    stack = _stack(options)
    layers = stack.named(options.layers)
    with render.working("verifying"):
        verification = verified(layers, deep=options.deep)
        found = verification.findings
        result = QuarantineResult(found, ())
        if options.quarantine:
            result = plan(layers, found, named=bool(options.layers)).apply()
    if options.json:
        document = render.verified_json(result) if options.quarantine else render.findings_json(found)
        render.show_json({**document, "not_checked": render.unverified_json(verification.unverified)})
    else:
        render.show_findings(found, moved=result.moved)
        render.show_quarantine(result)
        render.show_unverified(verification.unverified)
    return 0 if not found or (options.quarantine and result.mended) else 1


def _doctor(options: argparse.Namespace) -> int:
    from cachectl.cli import render
    from cachectl.inspecting.doctor import diagnosis, is_grave

    stack = _stack(options)
    with render.working("looking into everything"):
        found = diagnosis(stack.named(options.layers), () if options.layers else stack.broken)
    if options.json:
        render.show_json(render.findings_json(found))
    else:
        render.show_findings(found, nothing="nothing is wrong")
    return 1 if any(map(is_grave, found)) else 0


def _restore(options: argparse.Namespace) -> int:
    from cachectl.clearing.quarantine import held, restore
    from cachectl.cli import render

    stack = _stack(options)
    if options.all and options.names:
        options.parser.error("--all needs no NAME")
    if options.dry_run and not (options.all or options.names):
        options.parser.error("--dry-run needs the NAME of what to bring back, or --all")
    with render.working("looking into quarantine"):
        there, failed = held(stack)
    wanted = [(layer, thing) for layer, thing in there if options.all or thing.name in options.names]
    unknown = sorted(set(options.names) - {thing.name for _, thing in wanted})
    done = restore(wanted, replace=options.replace, dry_run=options.dry_run)
    listed = [] if options.names or options.all else [thing for _, thing in there]
    if options.json:
        render.show_json(render.quarantine_json(listed, done, dry_run=options.dry_run))
    elif options.dry_run:
        render.show_restorable(done, stack.environment.clock())
    elif options.names or options.all:
        render.show_restored(done)
    else:
        render.show_quarantined(listed, stack.environment.clock())
    for name in unknown:
        render.warn(f"nothing in quarantine is called {name!r}; cachectl restore lists what there is")
    render.warn_of_notes(failed)
    return 1 if unknown or failed or any(one.because or one.trouble for one in done) else 0


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl.cli import render
    from cachectl.switching import run as child
    from cachectl.switching.isolated import scratch_folder, shadow_user_cache

    if not (options.no_cache or options.prove or options.isolated is not None):
        options.parser.error("say how to run it: --no-cache, --isolated or --prove; then -- and the command")
    _demand_command(options)
    stack = _stack(options)
    layers: tuple[Layer, ...] = stack.named(options.layers)
    if not options.no_cache and options.isolated is None:
        with child.signals_held() as signals:
            eyes = _watch(options, stack, layers)
            return _proved(eyes, child.run(options.command, {}, stack.environment, signals))
    _say_what_stays(options, layers)
    folder = Path(options.isolated) if options.isolated else None
    with child.signals_held() as signals, scratch_folder(stack.environment, folder, render.warn) as root:
        moved, changes = _moved(options, stack, layers, root)
        with shadow_user_cache(stack.environment, moved, root, render.warn):
            watch = _watch(options, stack, layers) if options.prove else None
            status = child.run(options.command, changes, stack.environment, signals)
        # What was brought home counts too.
        return _proved(watch, status)


def _demand_command(options: argparse.Namespace) -> None:
    """Raise :class:`BadRequest`, with the corrected line, if the command does not stand behind ``--``, all of it."""
    import shlex

    from cachectl.layers.base.errors import BadRequest

    stray: list[str] = getattr(options, "stray", [])
    if stray:
        ours, _ = _split(options.words)
        at = len(ours) - len(stray)
        before, after = options.words[:at], options.words[at:]
        if options.command and len(stray) == 1 and before[-1] == "--isolated":
            what, line = "a folder is named after =", [*before[:-1], f"--isolated={stray[0]}", *after[1:]]
        else:
            what, line = "-- goes before the command", [*before, "--", *after]
        raise BadRequest(f"{what}: {shlex.join(['cachectl', *line])}")
    if not options.command:
        options.parser.error("write -- and the command to run at the end")


def _watch(options: argparse.Namespace, stack: Stack, layers: tuple[Layer, ...]) -> Watch:
    """Put the real roots under watch, but for layers that are meant to stay in use."""
    from cachectl.observing.proof import Watch
    from cachectl.switching.run import out_of_reach

    as_it_is = not options.no_cache and options.isolated is None
    staying = (layer.name for layer in layers if not as_it_is and out_of_reach(layer, off=options.no_cache) is not None)
    return Watch(stack, layers, left_out=frozenset(staying))


def _proved(watch: Watch | None, status: int) -> int:
    """Say what the watch saw, and return the status: the child's own only if the proof holds, or none was wanted."""
    from cachectl.cli import render

    if watch is None:
        return status
    proof = watch.end()
    render.show_proof(proof)
    return status if proof.holds else 1


def _moved(
    options: argparse.Namespace, stack: Stack, layers: tuple[Layer, ...], root: Path
) -> tuple[tuple[Layer, ...], dict[str, str | None]]:
    """Return the layers that a child finds elsewhere, and the variables that see to it."""
    from cachectl.cli import render
    from cachectl.switching import run as child
    from cachectl.switching.isolated import companions

    if options.no_cache:
        return layers, child.variables_off(layers, stack, root)
    along = companions(layers, stack, root)
    for name in along:
        render.warn(f"{name} keeps its entries in the same folder, so it is isolated too")
    return (*layers, *stack.named(along)) if along else layers, child.variables_isolated(layers, root)


def _say_what_stays(options: argparse.Namespace, layers: tuple[Layer, ...]) -> None:
    """Name the layers about which nothing can be done. Raises :class:`Refused` where one was asked for by name."""
    from cachectl.cli import render
    from cachectl.layers.base.errors import Refused
    from cachectl.switching.run import left_alone

    for name, why in left_alone(layers, off=options.no_cache).items():
        if name in options.layers:
            raise Refused(name, f"stays as it is: {why}")
        render.warn(f"{name} stays as it is: {why}")


def _env(options: argparse.Namespace) -> int:
    from cachectl.cli import render
    from cachectl.switching.run import variables_for
    from cachectl.switching.shells import guess_shell, spell

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
    from cachectl.layers.base.errors import BadRequest

    root = stack.environment.expand(name)
    if not name or (root.exists() and not root.is_dir()):
        message = f"--root {name!r} is no folder"
        raise BadRequest(message)
    return root


def _trace(options: argparse.Namespace) -> int:
    import time

    from cachectl.cli import render
    from cachectl.moving.output_files import json_kind
    from cachectl.moving.whole_files import STREAM
    from cachectl.observing.trace import Tracer
    from cachectl.switching import run as child
    from cachectl.switching.isolated import scratch_folder

    _demand_command(options)
    stack = _stack(options)
    output = None if options.json is None else _output(options.json, json_kind("cachectl/trace"), stack, options)
    _check_targets(output)
    with child.signals_held() as signals, scratch_folder(stack.environment, notice=render.warn) as folder:
        tracer = Tracer(stack, folder, explain=options.explain)
        started = time.perf_counter()
        with tracer.looking():
            status = child.run(options.command, tracer.variables(stack.environment), stack.environment, signals)
        done = tracer.ended(options.command, status, time.perf_counter() - started)
    document = render.trace_json(done, kernels=options.kernels, explain=options.explain)
    if options.json == STREAM:
        render.show_json(document)
    elif output is not None:
        output.write((render.json_bytes(document),))
    render.show_trace(done, kernels=options.kernels, explain=options.explain)
    return status


def _bench(options: argparse.Namespace) -> int:
    from cachectl.cli import render
    from cachectl.moving.output_files import PICTURE, json_kind
    from cachectl.moving.whole_files import STREAM
    from cachectl.observing.bench import Ended, bench
    from cachectl.switching import run as child

    _demand_command(options)
    if options.plot is not None:
        from cachectl.observing.plot import check

        check(options.plot)
    stack = _stack(options)
    written = None if options.json is None else _output(options.json, json_kind("cachectl/bench"), stack, options)
    drawn = None if options.plot is None else _output(options.plot, PICTURE, stack, options)
    _check_targets(written, drawn)
    try:
        with child.signals_held() as signals, render.progress() as show:
            measured = bench(options.command, stack, options.rounds, signals=signals, notice=render.warn, show=show)
    except Ended as ended:
        for line in ended.said:
            render.warn(line, "command")
        render.warn(str(ended))
        return ended.status
    document = render.bench_json(measured)
    if options.json == STREAM:
        render.show_json(document)
    else:
        render.show_bench(measured)
        if written is not None:
            written.write((render.json_bytes(document),))
    if drawn is not None:
        from cachectl.observing.plot import draw

        drawn.write((draw(measured, drawn.name),))
    return 0


def _check_targets(*outputs: OutputFile | None) -> None:
    """Find out before anything is run, not after minutes of it, that what was measured could not be kept."""
    from cachectl.layers.base.errors import BadRequest

    for output in filter(None, outputs):
        folder = os.path.dirname(output.name)
        if folder and not os.path.isdir(folder):
            message = f"{output.name!r} lies in no folder; make {folder} first"
            raise BadRequest(message)
        output.demand()


def _export(options: argparse.Namespace) -> int:
    from cachectl.cli import render, render_bundles

    if options.as_kdb is not None:
        return _export_files(options)
    if options.file is None:
        options.parser.error("name the FILE to write, or say --as-kdb DIR")
    if options.file == "-" and options.json:
        options.parser.error("--json prints to standard output, where the bundle goes; name a FILE")
    stack = _stack(options)
    selection = _selection(options, stack.environment.clock())
    with render.working("exporting"):
        done = stack.export(options.file, selection, layers=options.layers, sign=options.sign, force=options.force)
    # Standard output is the bundle's own.
    with redirect_stdout(sys.stderr) if options.file == "-" else nullcontext():
        return _told(options, done, render_bundles.export_json, render_bundles.show_export)


def _export_files(options: argparse.Namespace) -> int:
    from cachectl.cli import render, render_miopen
    from cachectl.moving.miopen_files import export_files

    if options.sign is not None:
        options.parser.error("--as-kdb writes no bundle that could be signed")
    stack = _stack(options)
    environment = stack.environment
    if options.as_kdb in stack:
        options.parser.error(f"{options.as_kdb!r} is a layer, and no DIR; write ./{options.as_kdb} for a folder")
    # There is no FILE: the first word is a layer.
    layers = [options.file, *options.layers] if options.file is not None else []
    with render.working("exporting"):
        selection = _selection(options, environment.clock())
        done = export_files(environment, options.as_kdb, selection, layers=layers, force=options.force)
    return _told(options, done, render_miopen.export_json, render_miopen.show_export)


def _miopen(options: argparse.Namespace) -> int:
    from cachectl.cli import render, render_miopen
    from cachectl.moving.miopen_files import merge

    environment = _stack(options).environment
    with render.working("merging"):
        done = merge(environment, options.files, options.into, mix_versions=options.mix_versions)
    return _told(options, done, render_miopen.merge_json, render_miopen.show_merge)


def _import(options: argparse.Namespace) -> int:
    from cachectl.cli import render, render_bundles
    from cachectl.layers.base.limits import LARGEST_BUNDLE
    from cachectl.layers.base.selection import parse_size
    from cachectl.moving.importing import Trust

    most = LARGEST_BUNDLE if options.max_size is None else parse_size(options.max_size)
    if options.file == "-" and options.allowed_signers is not None:
        options.parser.error("a bundle on standard input has no FILE.sig beside it; say --sha256 or --trust")
    stack = _stack(options)
    after = _made_after(options, stack.environment.clock())
    trust = Trust(options.allowed_signers, options.sha256, options.trust, after)
    with render.working("importing"):
        done = stack.import_bundle(options.file, trust, dry_run=options.dry_run, most=most)
    now = stack.environment.clock()
    return _told(options, done, render_bundles.import_json, lambda done: render_bundles.show_import(done, now))


def _made_after(options: argparse.Namespace, now: float) -> float | None:
    from cachectl.layers.base.selection import parse_moment

    return None if options.newer_than is None else parse_moment(options.newer_than, now)


def _stage(options: argparse.Namespace) -> int:
    from cachectl.cli import render
    from cachectl.cluster.stage import Job, run_staged
    from cachectl.moving.importing import Trust

    _demand_command(options)
    if options.newer_than is not None and options.bundle is None:
        options.parser.error("--newer-than is about a bundle; name one")
    why = (options.allowed_signers, options.sha256, options.trust)
    environment = _stack(options).environment
    after = _made_after(options, environment.clock())
    trust = Trust(*why, after) if any(why) else None
    scratch = None if options.scratch is None else environment.expand(options.scratch)
    job = Job(options.bundle, trust, options.out, options.sign, scratch, options.force)
    return run_staged(options.command, environment, job, render.warn)


def _merge(options: argparse.Namespace) -> int:
    from cachectl.cli import render, render_bundles
    from cachectl.cluster.rank_roots import merge_roots

    stack = _stack(options)
    if options.into in stack:
        options.parser.error(f"{options.into!r} is a layer, and no folder; write ./{options.into} for one")
    environment = stack.environment
    roots = [environment.expand(root) for root in options.roots]
    with render.working("merging"):
        done = merge_roots(environment, roots, environment.expand(options.into))
    if options.json:
        render.show_json(render_bundles.merge_json(done))
    else:
        render_bundles.show_merge(done)
    return 1 if any(layer.failed for layer in done) else 0


def _layers(options: argparse.Namespace) -> int:
    from cachectl.cli import render

    stack = _stack(options)
    layers = stack.named(options.layers)
    if options.json:
        render.show_json(render.layers_json(layers, stack.broken))
    else:
        render.show_layers(layers, stack.broken)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cachectl.cli.demo import demo

    return demo(options.kernels, _environment(options))


_HANDLERS: Final[dict[str, Handler]] = {
    "report": _report,
    "ls": _ls,
    "get": _get,
    "put": _put,
    "purge": _purge,
    "prune": _prune,
    "verify": _verify,
    "restore": _restore,
    "doctor": _doctor,
    "run": _run,
    "env": _env,
    "trace": _trace,
    "bench": _bench,
    "export": _export,
    "import": _import,
    "miopen": _miopen,
    "stage": _stage,
    "merge": _merge,
    "layers": _layers,
    "demo": _demo,
}
