"""The command line: parse, call the verb, show its facts, answer with an exit status.

Status 0 is done; 1 is failed, refused, missing or damaged; 2 is misuse. Every error is one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cachectl import __version__

if TYPE_CHECKING:
    from cachectl.layers.layer import Layer
    from cachectl.layers.selection import Selection
    from cachectl.stack import Stack

Handler = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    # What follows -- is somebody else's command: argparse must not read it.
    ours, command = _split(list(sys.argv[1:] if arguments is None else arguments))
    parser = build_parser()
    options = parser.parse_args(ours)
    options.command = command
    handler: Handler = options.handler
    return _guarded(handler, options)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _guarded(handler: Handler, options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.child import CannotStart
    from cachectl.layers.errors import BadRequest, CachectlError

    try:
        status = handler(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; Python must not complain again when it flushes on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except CachectlError as error:
        render.warn(str(error))
        return 2 if isinstance(error, BadRequest) else error.status if isinstance(error, CannotStart) else 1
    except OSError as error:
        render.warn(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
        return 1
    return status


# ---------------------------------------------------------------------- grammar


def build_parser() -> argparse.ArgumentParser:
    """Describe the whole grammar; the reference in the documentation is made from this."""
    parser = argparse.ArgumentParser(
        prog="cachectl",
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
    listing.add_argument("-q", "--quiet", action="store_true", help="print nothing but keys")
    _json_option(listing)

    get = _verb(verbs, "get", _get, "write one entry to a file")
    _entry_arguments(get)
    get.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")

    put = _verb(verbs, "put", _put, "place an entry that get wrote, so that the library hits it")
    _entry_arguments(put)
    put.add_argument("file", metavar="FILE", help="a file that get wrote, or - for standard input")
    put.add_argument("--replace", action="store_true", help="replace a different entry of that key")

    purge = _verb(verbs, "purge", _purge, "remove entries; --all is every user layer but tuning results")
    _layers_argument(purge)
    purge.add_argument("--all", action="store_true", help="every user layer that is not precious")
    _selection_options(purge)
    purge.add_argument("-n", "--dry-run", action="store_true", help="show what would go, and touch nothing")
    _json_option(purge)

    verify = _verb(verbs, "verify", _verify, "look for damage, entry by entry")
    _layers_argument(verify)
    _json_option(verify)

    _run_verb(verbs)
    _env_verb(verbs)

    layers = _verb(verbs, "layers", _layers, "adapters, what each can do here, and why not")
    _layers_argument(layers)
    _json_option(layers)

    demo = _verb(verbs, "demo", _demo, "the whole story on PoCL, in a scratch root")
    demo.add_argument("--kernels", type=int, default=8, metavar="N", help="how many kernels to compile (default: 8)")
    return parser


def _run_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = _verb(verbs, "run", _run, "run a command with caches off, or on in empty roots")
    how = run.add_mutually_exclusive_group(required=True)
    how.add_argument("--no-cache", action="store_true", help="every layer off")
    how.add_argument(
        "--isolated",
        nargs="?",
        const="",
        metavar="DIR",
        help="every layer on, in an empty root or in DIR, which is kept",
    )
    _layer_option(run)
    run.usage = "cachectl run (--no-cache | --isolated[=DIR]) [--layer LAYER]... -- COMMAND..."


def _env_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, handler: Handler, summary: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
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


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and epoch seconds as numbers")


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


def _stack() -> Stack:
    from cachectl.stack import Stack

    return Stack()


def _report(options: argparse.Namespace) -> int:
    from cachectl import render

    stack = _stack()
    with render.working("looking at every cache"):
        report = stack.report(layers=options.layers)
    if options.json:
        render.show_json(render.report_json(report))
    else:
        render.show_report(report, str(stack.environment.home_folder))
    return 0


def _ls(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.listing import ordered

    stack = _stack()
    now = stack.environment.clock()
    with render.working("listing"):
        entries = ordered(
            stack.entries(_selection(options, now), layers=options.layers), sort=options.sort, limit=options.limit
        )
    if options.json:
        render.show_json(render.entries_json(entries))
    elif options.quiet:
        render.show_raw(entry.key for entry in entries)
    else:
        render.show_entries(entries, now)
    return 0


def _get(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl import render
    from cachectl.layers.errors import BadRequest, LayerError
    from cachectl.layers.stores.archive import artifact_to_bytes
    from cachectl.listing import write_file

    if options.output is None and sys.stdout.isatty():
        raise BadRequest("an artifact is binary; name a file with -o FILE")
    layer = _stack()[options.layer]
    artifact = layer.get(options.key)
    if artifact is None:
        raise LayerError(layer.name, f"no entry has the key {options.key!r}; cachectl ls {layer.name} lists keys")
    data = artifact_to_bytes(artifact)
    if options.output is None:
        render.show_bytes(data)
    else:
        write_file(Path(options.output), data)
    return 0


def _put(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl.layers.stores.archive import artifact_from_bytes

    data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    _stack()[options.layer].put(options.key, artifact_from_bytes(data), replace=options.replace)
    return 0


def _purge(options: argparse.Namespace) -> int:
    from cachectl import render

    if options.all == bool(options.layers):
        options.parser.error("name the layers to purge, or say --all" if not options.all else "--all needs no LAYER")
    stack = _stack()
    selection = _selection(options, stack.environment.clock())
    with render.working("purging"):
        plan = stack.plan_clear(selection, layers=options.layers)
        result = plan.foreseen() if options.dry_run else plan.apply()
    if options.json:
        render.show_json(render.purge_json(result))
    else:
        render.show_purge(result)
    return 1 if result.failed else 0


def _verify(options: argparse.Namespace) -> int:
    from cachectl import render
    from cachectl.listing import findings

    stack = _stack()
    with render.working("verifying"):
        found = findings(stack.named(options.layers))
    if options.json:
        render.show_json(render.findings_json(found))
    else:
        render.show_findings(found)
    return 1 if found else 0


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl import child, render
    from cachectl.scratch import companions, scratch_folder, shadow_user_cache

    if not options.command:
        options.parser.error("write -- and the command to run at the end")
    stack = _stack()
    layers: tuple[Layer, ...] = stack.named(options.layers)
    folder = Path(options.isolated) if options.isolated else None
    with scratch_folder(folder) as root:
        if options.no_cache:
            moved, changes = layers, child.variables_off(layers, stack, root)
        else:
            along = companions(layers, stack, root)
            for name in along:
                render.warn(f"{name} keeps its entries in the same folder, so it is isolated too")
            moved, changes = (*layers, *stack.named(along)), child.variables_isolated(layers, root)
        with shadow_user_cache(stack.environment, moved, root):
            return child.run(options.command, changes, stack.environment)


def _env(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cachectl import render
    from cachectl.child import variables_for
    from cachectl.shells import guess_shell, spell

    stack = _stack()
    layers = stack.named(options.layers)
    shell = options.shell or guess_shell(stack.environment.get("SHELL"))
    root = None if options.root is None else stack.environment.expand(options.root)
    changes, notes = variables_for(layers, on=options.enable, root=None if root is None else Path(root))
    render.show_raw(spell(changes, shell))
    for note in notes:
        render.warn(note)
    return 0


def _layers(options: argparse.Namespace) -> int:
    from cachectl import render

    stack = _stack()
    layers = stack.named(options.layers)
    if options.json:
        render.show_json(render.layers_json(layers, stack.broken))
    else:
        render.show_layers(layers, stack.broken)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cachectl.demo import demo

    return demo(options.kernels)
