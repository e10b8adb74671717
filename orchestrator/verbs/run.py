"""``cachectl run``: run a command with caches off, or on in empty roots."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.text import plural, printable
from cachectl.switching import child

if TYPE_CHECKING:
    from cachectl.exchange.trust import Trust
    from cachectl.watching import proof as proving

#: How many paths the proof of a layer names.
_FEW = 3


def _folder(text: str) -> str:
    """Parse the folder of ``--isolated=DIR``; it is empty for a bare ``--isolated``."""
    if not text:
        raise argparse.ArgumentTypeError("no folder after =; write --isolated=DIR, or --isolated without =")
    return text.removeprefix(verbs.NO_FOLDER)


EXAMPLE = "cachectl run --no-cache --prove -- python simulation.py"
OPTIONS = (
    [
        ("--no-cache", "every layer off"),
        (
            "--isolated",
            "=DIR",
            "every layer on, in an empty root or in DIR, which is kept",
            {"nargs": "?", "type": _folder},
        ),
    ],
    ("--base", "DIR", "every layer on and warm from DIR, which may be read-only; new entries go to a root of your own"),
    verbs.LAYER,
    verbs.UNEXPECTED,
    ("--prove", "attest that no real root was read or written; also without another option"),
    ("--store", "SOURCE", "pull from this store before the command, and push what is new after it"),
    ("--store-mode", None, "ro: only pull; rw: pull and push (default)", {"choices": ("rw", "ro"), "default": "rw"}),
    ("--store-wait", "SECONDS", "how long the pull, and the push, may take (default: 30)", {"type": verbs.seconds}),
    [
        ("--allowed-signers", "LIST", "pull what a signer of this list has signed"),
        ("--digest", "HEX", "pull if the store is exactly the one with this digest"),
        ("--trust", "pull unchecked: it is code that the command will run"),
    ],
    ("--sign", "KEY", "sign what is pushed with a key of OpenSSH"),
)
USAGE = """\
cachectl run (--no-cache | --base DIR | --isolated[=DIR] | --prove | --store SOURCE)
       [--layer LAYER]... [--prove] -- COMMAND..."""


def run_with(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    no_cache: bool = False,
    isolated: Path | bool = False,
    base: str | Path | None = None,
    layers: Sequence[str] = (),
    prove: bool = False,
    store: str | None = None,
    trust: Trust | None = None,
    store_mode: str = "rw",
    store_wait: float | None = None,
    sign: str | None = None,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> tuple[int, proving.Proof | None]:
    """Run a command with layers off, or on in another root.

    :param no_cache: every layer off
    :param isolated: on in an empty root (``True``), or in this one, which is kept
    :param base: a folder to start warm from, which never changes; new entries go to the root ``isolated``, by
        default to one in the user cache folder, which is kept for each base
    :param layers: only these
    :param prove: watch the real roots
    :param store: a shared store to pull from before the command and to push to after it; entries of the base are
        left out
    :param trust: why the store is trusted
    :param store_mode: ``"ro"`` only pulls
    :param store_wait: how many seconds the pull, and the push, may take
    :param sign: an OpenSSH key for what is pushed
    :param notice: gets a line for each layer that stays as it is, and with a store the verdict of a trace, unless
        the run is proved
    :returns: the exit status of the command, 128+n if signal n ended it, and the proof if one was asked for
    :raises Refused: if a named layer of the user stays as it is
    :raises CannotStart: if the command cannot be started
    """
    here, chosen = stack.environment, stack.named(layers)
    with ExitStack() as block:
        place = kept = folder = None
        besides: Mapping[str, frozenset[str]] = {}
        if base is not None:
            from cachectl.exchange import copying

            place = copying.base_at(here, base, isolated)
            child.say_shared(place, "--base", notice)
            isolated = isolated or copying.make_own_root(here, place)
            besides = copying.base_keys(here, place, layers) if store else {}
        if store is not None:
            from cachectl.exchange import push_pull

            isolated = isolated if isinstance(isolated, bool) else here.absolute(isolated)
            kept, writes = _kept_below(stack, isolated), store_mode == "rw"
            around = push_pull.shared_around(
                kept, store, trust, notice, layers, besides=besides, writes=writes, sign=sign, wait=store_wait
            )
            scratch = partial(block.enter_context, child.isolated_root(here, notice=notice))
            folder = child.try_extra("nothing is pulled or pushed, and no verdict", scratch, notice)
            block.enter_context(nullcontext() if folder is None else around)
        staying = frozenset[str]()
        if no_cache or isolated:
            staying = child.say_left_alone(chosen, layers, notice, off=no_cache)
        signals = block.enter_context(child.signals_held())
        changes: dict[str, str | None] = {}
        if no_cache or isolated:
            kept_root = isolated if isinstance(isolated, Path) else None
            root = block.enter_context(child.isolated_root(here, kept_root, notice))
            moved = chosen
            with child.needed(root, kept=kept_root):
                if no_cache:
                    changes = child.variables_off(chosen, stack, root)
                else:
                    along = child.companions(chosen, stack, root)
                    for name in along:
                        notice(f"{name} keeps its entries in the same folder, so it is isolated too")
                    moved = (*chosen, *(stack[name] for name in along))
                    changes = child.variables_isolated(chosen, root)
                if place is not None:
                    names = tuple(layer.name for layer in moved)
                    copying.start_from(here, place, root, notice, names)
                child.link_cache_home(here, moved, root)
        if not prove:
            if kept is not None and folder is not None:
                changes.update(block.enter_context(_judged(kept, folder, notice)))
            return child.run(command, changes, here, signals), None
        from cachectl.watching import proof as proving

        proof = proving.Proof(stack, chosen, left_out=staying)
        return child.run(command, changes, here, signals), proof.end()


@contextmanager
def _judged(stack: layer_set.LayerSet, folder: Path, notice: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Watch a run as ``trace`` does; yield the variables for that, and give the verdict to ``notice`` at its end."""
    from cachectl.watching.trace import tracing

    watched, watching = ExitStack(), tracing(stack, folder, notice)
    entered = child.try_extra("no verdict", partial(watched.enter_context, watching), notice)
    traced, variables = entered or (None, {})
    with watched:
        yield variables
    # A command without Python cannot be watched.
    if traced is not None and traced.processes and traced.verdict:
        notice(traced.verdict)


def _kept_below(stack: layer_set.LayerSet, root: Path | bool) -> layer_set.LayerSet:
    """Return the layers in an isolated root that is kept, which is made if it is missing; with ``False`` these.

    Raises :class:`BadRequest` for a root that is not kept.
    """
    if root is False:
        return stack
    if root is True:
        raise BadRequest("an isolated root that is not kept has no use for a store; name a folder: --isolated=DIR")
    child.make_kept_root(root, mode=0o700)
    return type(stack)(child.environment_below(stack.environment, str(root)))


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl run``."""
    options = request.options
    isolated, base = options.isolated, options.base
    if not (options.no_cache or options.prove or options.store or isolated is not None or base is not None):
        words = request.command or options.unexpected
        line = f", such as: {shlex.join(['cachectl', 'run', '--isolated', '--', *words])}" if words else ""
        request.misuse(
            f"choose --no-cache, --base, --isolated, --prove or --store, then write -- and the command{line}"
        )
    if options.no_cache and base is not None:
        request.misuse("--no-cache switches off what --base would start warm; choose one of them")
    trust = request.trust()
    if not options.store and (trust is not None or options.sign is not None):
        request.misuse("--allowed-signers, --digest, --trust and --sign are for --store SOURCE")
    if options.store and options.no_cache:
        request.misuse("--no-cache leaves nothing to pull or push; drop --store")
    if options.store and trust is None:
        from cachectl.exchange.trust import UNTRUSTED

        request.misuse(UNTRUSTED)
    if options.sign is not None and not any(map(os.path.lexists, (options.sign, f"{options.sign}.pub"))):
        raise BadRequest(f"--sign {printable(options.sign)}: this key does not exist")
    if options.allowed_signers is not None and not os.path.isfile(options.allowed_signers):
        raise BadRequest(f"--allowed-signers {printable(options.allowed_signers)}: there is no such file")
    request.demand_command()
    status, proof = run_with(
        request.stack,
        request.command,
        no_cache=options.no_cache,
        base=base,
        isolated=Path(isolated) if isolated else isolated is not None,
        layers=options.layers,
        prove=options.prove,
        store=request.target(options.store) if options.store else None,
        trust=trust,
        store_mode=options.store_mode,
        store_wait=options.store_wait,
        sign=options.sign,
        notice=request.notice,
    )
    if proof is None:
        return status
    for line in _lines(proof):
        request.notice(line)
    return status if proof.holds else 1


def _lines(proof: proving.Proof) -> Iterator[str]:
    """Yield the proof of each layer, then the verdict."""
    from cachectl.watching import proof as proving

    for attestation in proof.attestations:
        files = f"{plural(attestation.compared, 'file')} compared"
        if attestation.touches:
            shown = [f"{path} {', '.join(what)}" for path, what in attestation.touches[:_FEW]]
            more = len(attestation.touches) - len(shown)
            attested = "; ".join([*shown, *([f"and {more:,} more"] if more else [])])
        elif attestation.unknown:
            attested = f"no write seen ({files}), but reads are unknown: {'; '.join(attestation.unknown)}"
        else:
            means = ", ".join([f"file events on {plural(attestation.folders, 'folder')}", *attestation.notes])
            attested = f"not written ({files}), not read ({means})"
        yield f"proof: {attestation.layer}: {attested}"
    for name in proof.left_out:
        yield f"proof: {name}: stays in use, so nothing is proved of it"
    if proof.of(proving.FAILS):
        yield "proof: other programs that use these caches count too; if one may have run, try again without it"
    bad = [
        f"{verdict} for {', '.join(names)}"
        for verdict in (proving.FAILS, proving.UNKNOWN)
        if (names := proof.of(verdict))
    ]
    holds = "holds" if proof.holds else "cannot be given: no layer is left to prove it of"
    yield f"proof {'; '.join(bad) or holds}"
