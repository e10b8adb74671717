"""``cachectl run``: run a command with caches off, or on in empty roots."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from cachectl import layer_set
from cachectl.layers.base import errors, facts
from cachectl.options import LAYER, UNEXPECTED, OneOf, Option, Request, seconds

if TYPE_CHECKING:
    from cachectl.exchange.around import StoreUse
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer
    from cachectl.watching.proof import Attestation, Proof, Watch

#: How many paths the proof of a layer names.
_FEW: Final = 3
#: Stands for the folder of a bare ``--isolated``; no argument of a process can contain it.
_NO_FOLDER: Final = "\0"


def _folder(text: str) -> str:
    """Parse the folder of ``--isolated=DIR``; it is empty for a bare ``--isolated``."""
    if not text:
        raise argparse.ArgumentTypeError("no folder after =; write --isolated=DIR, or --isolated alone")
    return text.removeprefix(_NO_FOLDER)


OPTIONS: Final = (
    OneOf(
        (
            Option("--no-cache", action="store_true", help="every layer off"),
            Option(
                "--isolated",
                nargs="?",
                type=_folder,
                metavar="=DIR",
                help="every layer on, in an empty root or in DIR, which is kept",
            ),
        )
    ),
    Option(
        "--base",
        metavar="DIR",
        help="every layer on and warm from DIR, which may be read-only; new entries go to a root of your own",
    ),
    LAYER,
    UNEXPECTED,
    Option(
        "--prove", action="store_true", help="attest that no real root was read or written; also without another option"
    ),
    Option("--store", metavar="SOURCE", help="pull from this store before the command, and push what is new after it"),
    Option("--store-mode", choices=("rw", "ro"), default="rw", help="ro: only pull; rw: pull and push (default)"),
    Option(
        "--store-wait",
        type=seconds,
        metavar="SECONDS",
        help="how long the store may delay the command; then it runs without (default: 30)",
    ),
    OneOf(
        (
            Option("--allowed-signers", metavar="LIST", help="pull what a signer of this list has signed"),
            Option("--digest", metavar="HEX", help="pull if the store is exactly the one with this digest"),
            Option("--trust", action="store_true", help="pull unchecked: it is code that the command will run"),
        )
    ),
    Option("--sign", metavar="KEY", help="sign what is pushed with a key of OpenSSH"),
)
USAGE: Final = """\
cachectl run (--no-cache | --base DIR | --isolated[=DIR] | --prove | --store SOURCE)
       [--layer LAYER]... [--prove] -- COMMAND..."""


class Ran(NamedTuple):
    """The exit status of a command, 128+n if signal n ended it, and the proof if one was asked for."""

    status: int
    proof: Proof | None


def run_with(
    stack: LayerSet,
    command: Sequence[str],
    *,
    no_cache: bool = False,
    isolated: Path | bool = False,
    base: str | Path | None = None,
    layers: Sequence[str] = (),
    prove: bool = False,
    store: StoreUse | None = None,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Ran:
    """Run a command with layers off, or on in an empty root (``True``), or in the root ``isolated``.

    With ``base`` they start warm from that folder, which never changes, and new entries go to the root
    ``isolated``; by default to one in the user cache folder, which is kept for each base.
    ``prove`` watches the real roots; the proof says whether any was read or written. ``store`` is a shared store to
    pull from before and to push to after the command, for its own caches or for the root that is kept; entries of
    the base are not pulled and not pushed. ``notice`` gets a line for each layer that stays as it is. Raises
    :class:`Refused` if such a layer was named, and :class:`~cachectl.switching.run.CannotStart`.
    """
    from cachectl.switching import run as child
    from cachectl.switching.isolated import companions, isolated_root, link_cache_home

    here, chosen = stack.environment, stack.named(layers)
    with ExitStack() as block:
        place = None
        besides: Mapping[str, frozenset[str]] = {}
        if base is not None or store is not None:
            from cachectl.exchange import around, copying
        if base is not None:
            place = copying.base_at(here, base)
            isolated = isolated or copying.make_own_root(here, place)
            besides = copying.base_keys(here, place, layers) if store else {}
        if store is not None:
            isolated = isolated if isinstance(isolated, bool) else here.absolute(isolated)
            kept = _kept_below(stack, isolated)
            block.enter_context(around.shared_around(kept, store, notice, layers=layers, besides=besides, own=here))
        staying = child.left_alone(chosen, off=no_cache) if no_cache or isolated else {}
        for name in (name for name, why in staying.items() if stack[name].about.scope is facts.Scope.USER):
            if name in layers:
                raise errors.Refused(name, f"stays as it is: {staying[name]}")
            notice(f"{name} stays as it is: {staying[name]}")
        signals = block.enter_context(child.signals_held())
        changes: dict[str, str | None] = {}
        if no_cache or isolated:
            folder = isolated if isinstance(isolated, Path) else None
            root = block.enter_context(isolated_root(here, folder, notice))
            moved = chosen
            if no_cache:
                changes = child.variables_off(chosen, stack, root)
            else:
                along = companions(chosen, stack, root)
                for name in along:
                    notice(f"{name} keeps its entries in the same folder, so it is isolated too")
                moved = (*chosen, *(stack[name] for name in along))
                changes = child.variables_isolated(chosen, root)
            if place is not None:
                names = tuple(layer.name for layer in moved)
                copying.start_from(here, place, root, layers=names, notice=notice)
            link_cache_home(here, moved, root)
        watch = _watch(stack, chosen, frozenset(staying)) if prove else None
        status = child.run(command, changes, here, signals)
        return Ran(status, None if watch is None else watch.end())


def _watch(stack: LayerSet, layers: Iterable[Layer], left_out: frozenset[str]) -> Watch:
    from cachectl.watching.proof import Watch

    return Watch(stack, layers, left_out=left_out)


def _kept_below(stack: LayerSet, root: Path | bool) -> LayerSet:
    """Return the layers in an isolated root that is kept, which is made if it is missing; with ``False`` these.

    Raises :class:`BadRequest` for a root that is not kept.
    """
    if root is False:
        return stack
    if root is True:
        raise errors.BadRequest(
            "an isolated root that is not kept has no use for a store; name a folder: --isolated=DIR"
        )
    from cachectl.switching.isolated import make_kept_root
    from cachectl.switching.run import environment_below

    make_kept_root(root, mode=0o700)
    return type(stack)(environment_below(stack.environment, str(root)))


def run(request: Request) -> int:
    """Carry out ``cachectl run``."""
    given = request.options
    if not (given.no_cache or given.prove or given.store or given.isolated is not None or given.base is not None):
        words = request.command or given.unexpected
        line = f", such as: {shlex.join(['cachectl', 'run', '--isolated', '--', *words])}" if words else ""
        request.misuse(
            f"choose --no-cache, --base, --isolated, --prove or --store, then write -- and the command{line}"
        )
    if given.no_cache and given.base is not None:
        request.misuse("--no-cache switches off what --base would start warm; choose one of them")
    store = _store_use(request)
    request.demand_command()
    ran = run_with(
        request.stack,
        request.command,
        no_cache=given.no_cache,
        base=given.base,
        isolated=Path(given.isolated) if given.isolated else given.isolated is not None,
        layers=given.layers,
        prove=given.prove,
        store=store,
        notice=request.notice,
    )
    if ran.proof is None:
        return ran.status
    for line in _lines(ran.proof):
        request.notice(line)
    return ran.status if ran.proof.holds else 1


def _store_use(request: Request) -> StoreUse | None:
    """Return the store around the command; ``None`` without one."""
    options, trust = request.options, request.trust()
    if not options.store:
        if trust is not None or options.sign is not None:
            request.misuse("--allowed-signers, --digest, --trust and --sign are for --store SOURCE")
        return None
    if options.no_cache:
        request.misuse("--no-cache leaves nothing to pull or push; drop --store")
    from cachectl.exchange.around import PATIENCE, StoreUse
    from cachectl.exchange.trust import UNTRUSTED

    if trust is None:
        request.misuse(UNTRUSTED)
    wait = PATIENCE if options.store_wait is None else options.store_wait
    return StoreUse(request.target(options.store), trust, options.store_mode == "rw", options.sign, wait)


def _lines(proof: Proof) -> Iterator[str]:
    """Yield the proof of each layer, then the verdict."""
    from cachectl.watching.proof import Verdict

    for one in proof.attestations:
        yield f"proof: {one.layer}: {_attested(one)}"
    for name in proof.left_out:
        yield f"proof: {name}: stays in use, so nothing is proved of it"
    if proof.of(Verdict.FAILS):
        yield "proof: other programs that use these caches count too; if one may have run, try again without it"
    bad = [
        f"{verdict.value} for {', '.join(names)}"
        for verdict in (Verdict.FAILS, Verdict.UNKNOWN)
        if (names := proof.of(verdict))
    ]
    holds = "holds" if proof.holds else "cannot be given: no layer is left to prove it of"
    yield f"proof {'; '.join(bad) or holds}"


def _attested(one: Attestation) -> str:
    from cachectl.watching.proof import Verdict

    if one.verdict is Verdict.FAILS:
        shown = [f"{touch.path} {', '.join(touch.what)}" for touch in one.touches[:_FEW]]
        more = len(one.touches) - len(shown)
        return "; ".join([*shown, *([f"and {more:,} more"] if more else [])])
    files = f"{errors.plural(one.compared, 'file')} compared"
    means = ", ".join([f"file events on {errors.plural(one.folders, 'folder')}", *one.notes])
    if one.verdict is Verdict.UNKNOWN:
        return f"no write seen ({files}), but reads are unknown: {'; '.join(one.unknown)}"
    return f"not written ({files}), not read ({means})"
