"""``cachectl run``: run a command with caches off, or on in empty roots."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layer_set import warn_user
from cachectl.layers.base.errors import plural
from cachectl.options import LAYER, UNEXPECTED, OneOf, Option, Request, seconds

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cachectl.exchange.around import StoreUse
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.layer import Layer
    from cachectl.switching.run import Ran
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
    notice: Callable[[str], None] = warn_user,
) -> Ran[Proof]:
    """Run a command with layers off, or on in an empty root (``True``), or in the root ``isolated``.

    With ``base`` they start warm from that folder, which never changes, and new entries go to the root
    ``isolated``; by default to one in the user cache folder, which is kept for each base.
    ``prove`` watches the real roots; the proof says whether any was read or written. ``store`` is a shared store to
    pull from before and to push to after the command, for its own caches or for the root that is kept; entries of
    the base are not pulled and not pushed. Raises :class:`Refused` if a named layer can be neither switched nor
    moved, and :class:`~cachectl.switching.run.CannotStart`.
    """
    from cachectl.switching.run import run_command

    here = stack.environment

    def watch(watched: Iterable[Layer], left_out: frozenset[str]) -> Watch:
        from cachectl.watching.proof import Watch

        return Watch(stack, watched, left_out=left_out)

    prepare = None
    besides: Mapping[str, frozenset[str]] = {}
    if base is not None:
        from cachectl.exchange.around import base_at, base_keys, make_own_root, start_from

        place = base_at(here, base)
        isolated = isolated or make_own_root(here, place)
        besides = base_keys(here, place, layers) if store else {}

        def prepare(root: Path, names: tuple[str, ...]) -> None:
            start_from(here, place, root, layers=names, notice=notice)

    around: AbstractContextManager[object] = nullcontext()
    if store is not None:
        from cachectl.exchange.around import shared_around

        isolated = isolated if isinstance(isolated, bool) else here.absolute(isolated)
        around = shared_around(_kept_below(stack, isolated), store, notice, layers=layers, besides=besides, own=here)
    with around:
        return run_command(
            stack,
            command,
            no_cache=no_cache,
            isolated=isolated,
            layers=layers,
            prepare=prepare,
            watch=watch if prove else None,
            notice=notice,
        )


def _kept_below(stack: LayerSet, root: Path | bool) -> LayerSet:
    """Return the layers in an isolated root that is kept, which is made if it is missing; with ``False`` these.

    Raises :class:`BadRequest` for a root that is not kept.
    """
    if root is False:
        return stack
    if root is True:
        from cachectl.layers.base.errors import BadRequest

        raise BadRequest("an isolated root that is not kept has no use for a store; name a folder: --isolated=DIR")
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
    files = f"{plural(one.compared, 'file')} compared"
    means = ", ".join([f"file events on {plural(one.folders, 'folder')}", *one.notes])
    if one.verdict is Verdict.UNKNOWN:
        return f"no write seen ({files}), but reads are unknown: {'; '.join(one.unknown)}"
    if not one.roots:
        return "keeps nothing in this environment"
    if not one.present:
        verb = "is" if len(one.roots) == 1 else "are"
        return f"not written, not read ({' and '.join(map(str, one.roots))} {verb} not there)"
    return f"not written ({files}), not read ({means})"
