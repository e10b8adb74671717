"""``cachectl run``: run a command with caches off, or on in empty roots."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.text import plural, printable
from cachectl.layers.core.layer import Layer
from cachectl.switching import child

if TYPE_CHECKING:
    from cachectl.exchange.push_pull import RunStore
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
        ("--no-cache", "switch every layer off"),
        ("--isolated", "=DIR", "use an empty root, or DIR, which is kept", {"nargs": "?", "type": _folder}),
    ],
    ("--base", "DIR", "start warm from DIR, which can be read-only; new entries go to a root of your own"),
    verbs.LAYER,
    verbs.UNEXPECTED,
    ("--prove", "prove that no real cache was read or written"),
    verbs.PORTABLE,
    ("--store", "SOURCE", "pull from this store before the command, and push new entries after it"),
    ("--store-mode", None, "rw: pull and push (default); ro: only pull", {"choices": ("rw", "ro"), "default": "rw"}),
    ("--store-wait", "SECONDS", "how long the pull and the push can each take (default: 30)", {"type": verbs.seconds}),
    [
        ("--allowed-signers", "LIST", "pull what a signer in this list has signed"),
        ("--digest", "HEX", "pull only if the store has this digest"),
        ("--trust", "pull unchecked: it is code that the command will run"),
    ],
    ("--sign", "KEY", "sign what is pushed with this OpenSSH key"),
)
USAGE = """\
cachectl run (--no-cache | --isolated[=DIR] | --base DIR | --store SOURCE |
       --portable | --prove)... [--layer LAYER]... -- COMMAND..."""


#: The variables of a child in which layers are off or moved, and the names of the layers that stay as they are.
Switched = tuple[Mapping[str, "str | None"], frozenset[str]]
#: Watches a command in its block, and yields the variables for that.
Watch = AbstractContextManager[Mapping[str, str]]
#: The exit status of a command, 128+n if signal n ended it, and the proof if one was asked for.
Result = tuple[int, "proving.Proof | None"]


def run_in_place(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    layers: Sequence[str] = (),
    prove: bool = False,
    store: RunStore | None = None,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Result:
    """Run a command with the caches that it has anyway, to prove that it leaves them alone, or to share them.

    :param layers: only these
    :param prove: watch the real roots
    :param store: what to pull from and push to
    :param notice: gets a line for each problem, and with a store the verdict of a trace, unless the run is proved
    :returns: the exit status of the command, 128+n if signal n ended it, and the proof if one was asked for
    :raises CannotStart: if the command cannot be started
    """
    chosen, unchanged = stack.named(layers), nullcontext[Switched](({}, frozenset()))
    return _run(stack, command, chosen, unchanged, _shared(store, stack, layers, notice), prove=prove, notice=notice)


def run_without_cache(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    layers: Sequence[str] = (),
    prove: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Result:
    """Run a command with every layer off; otherwise as :func:`run_in_place`.

    :param notice: gets a line for each layer that stays as it is
    :raises Refused: if a named layer of the user stays as it is
    """
    chosen = stack.named(layers)
    return _run(
        stack,
        command,
        chosen,
        _off(stack, chosen, layers, notice, prove=prove),
        nullcontext(),
        prove=prove,
        notice=notice,
    )


def run_isolated(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    root: Path | None = None,
    layers: Sequence[str] = (),
    prove: bool = False,
    store: RunStore | None = None,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Result:
    """Run a command with every layer on in an empty root; otherwise as :func:`run_in_place`.

    :param root: use this one, which is kept; a store needs it
    :param notice: gets a line for each layer that stays as it is, too
    :raises Refused: if a named layer of the user stays as it is
    """
    chosen, used = stack.named(layers), stack
    if store is not None:
        root, used = _kept_root(stack, root)
    moved = _isolated(stack, chosen, layers, root, notice)
    return _run(stack, command, chosen, moved, _shared(store, used, layers, notice), prove=prove, notice=notice)


def run_from(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    base: str | Path,
    *,
    root: Path | None = None,
    temporary: bool = False,
    layers: Sequence[str] = (),
    prove: bool = False,
    store: RunStore | None = None,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Result:
    """Run a command that starts warm from a base, a folder which never changes; otherwise as :func:`run_isolated`.

    :param root: for new entries; by default one in the user cache folder, which is kept for each base
    :param temporary: drop new entries
    :param store: neither gives nor gets the entries of the base
    """
    from cachectl.exchange import copying
    from cachectl.layers.disk.own_roots import make_own_root

    here, chosen, used = stack.environment, stack.named(layers), stack
    place = copying.base_at(here, base, root)
    child.say_shared(place, "--base", notice)
    if root is None and not temporary:
        root = make_own_root(here, place)
    besides: Mapping[str, frozenset[str]] = {}
    if store is not None:
        besides = copying.base_keys(here, place, layers)
        root, used = _kept_root(stack, root)
    warm = partial(copying.start_from, here, place)
    moved = _isolated(stack, chosen, layers, root, notice, warm=warm)
    return _run(
        stack, command, chosen, moved, _shared(store, used, layers, notice, besides), prove=prove, notice=notice
    )


def _kept_root(stack: layer_set.LayerSet, root: Path | None) -> tuple[Path, layer_set.LayerSet]:
    """Return an isolated root that is kept, made if it is missing, and the layers in it.

    Raises :class:`BadRequest` if there is none.
    """
    if root is None:
        raise BadRequest("an isolated root that is not kept has no use for a store; name a folder: --isolated=DIR")
    root = stack.environment.absolute(root)
    child.make_kept_root(root, mode=0o700)
    return root, type(stack)(child.environment_below(stack.environment, str(root)))


@contextmanager
def _off(
    stack: layer_set.LayerSet,
    chosen: Sequence[Layer],
    named: Sequence[str],
    notice: Callable[[str], None],
    *,
    prove: bool,
) -> Iterator[Switched]:
    """Switch layers off."""
    staying = child.say_left_alone(chosen, named, notice, off=True)
    with child.isolated_root(stack.environment, None, notice) as folder:
        with child.needed(folder):
            changes = child.variables_off(chosen, stack, folder, proved=prove)
            child.link_cache_home(stack.environment, chosen, folder)
        yield changes, staying


@contextmanager
def _isolated(
    stack: layer_set.LayerSet,
    chosen: Sequence[Layer],
    named: Sequence[str],
    root: Path | None,
    notice: Callable[[str], None],
    *,
    warm: Callable[[Path, Callable[[str], None], Iterable[str]], None] | None = None,
) -> Iterator[Switched]:
    """Move layers to an isolated root, which ``warm`` fills."""
    here, staying = stack.environment, child.say_left_alone(chosen, named, notice, off=False)
    with child.isolated_root(here, root, notice) as folder:
        with child.needed(folder, kept=root):
            along = child.companions(chosen, stack, folder)
            for name in along:
                notice(f"{name} keeps its entries in the same folder, so it is isolated too")
            moved = (*chosen, *(stack[name] for name in along))
            changes = child.variables_isolated(chosen, folder)
            if warm is not None:
                warm(folder, notice, [layer.name for layer in moved])
            child.link_cache_home(here, moved, folder)
        yield changes, staying


@contextmanager
def _shared(
    store: RunStore | None,
    stack: layer_set.LayerSet,
    layers: Sequence[str],
    notice: Callable[[str], None],
    besides: Mapping[str, frozenset[str]] = {},
) -> Iterator[Watch | None]:
    """Pull into ``stack`` before the block, and push after it; yield what gives a verdict on the command in it."""
    with ExitStack() as block:
        verdict = None
        if store is not None:
            from cachectl.exchange import push_pull
            from cachectl.watching.trace import judged

            scratch = partial(block.enter_context, child.isolated_root(stack.environment, notice=notice))
            folder = child.try_extra("nothing is pulled or pushed, and no verdict", scratch, notice)
            if folder is not None:
                block.enter_context(push_pull.shared_around(stack, store, notice, layers, besides))
                verdict = judged(stack, folder, lambda trace: notice(trace.verdict), notice)
        yield verdict


def _run(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    chosen: Sequence[Layer],
    switched: AbstractContextManager[Switched],
    shared: AbstractContextManager[Watch | None],
    *,
    prove: bool,
    notice: Callable[[str], None],
) -> Result:
    """Run a command with caches switched, and with a proof, or else a verdict if a store is shared."""
    here = stack.environment
    with shared as verdict, child.signals_held() as signals, switched as (changes, staying):
        if prove:
            from cachectl.watching import proof as proving

            given = here.with_variables(changes)
            with proving.proving(stack, chosen, given, left_out=staying, notice=notice) as (proof, variables):
                status = child.run(command, {**changes, **variables}, here, signals)
            return status, proof
        with verdict or nullcontext({}) as variables:
            return child.run(command, {**changes, **variables}, here, signals), None


def run(request: verbs.Request) -> int:
    """Carry out ``cachectl run``."""
    from cachectl.watching.portable import building

    options = request.options
    isolated, base = options.isolated, options.base
    own = (options.no_cache, options.prove, options.store, request.portable, isolated is not None, base is not None)
    if not any(own):
        words = request.command or options.unexpected
        line = f", such as: {shlex.join(['cachectl', 'run', '--isolated', '--', *words])}" if words else ""
        request.misuse(
            "choose --no-cache, --base, --isolated, --portable, --prove or --store, "
            f"then write -- and the command{line}"
        )
    if options.no_cache and base is not None:
        request.misuse("--no-cache switches off what --base would start warm; choose one of them")
    store = _typed_store(request)
    request.demand_command()
    root = Path(isolated) if isolated else None
    how: Callable[..., Result] = partial(run_in_place, store=store)
    if options.no_cache:
        how = run_without_cache
    elif base is not None:
        how = partial(run_from, base=base, root=root, temporary=isolated == "", store=store)
    elif isolated is not None:
        how = partial(run_isolated, root=root, store=store)
    shared = {"layers": options.layers, "prove": options.prove, "notice": request.notice}
    with building(request.stack, request.notice, portable=request.portable) as stack:
        status, proof = how(stack, request.command, **shared)
    if proof is None:
        return status
    for line in _lines(proof):
        request.notice(line)
    return status if proof.holds else 1


def _typed_store(request: verbs.Request) -> RunStore | None:
    """Return the shared store that was typed, with its options; ``None`` without one."""
    options, trust = request.options, request.trust()
    if not options.store:
        if trust is not None or options.sign is not None:
            request.misuse("--allowed-signers, --digest, --trust and --sign are for --store SOURCE")
        return None
    from cachectl.exchange.push_pull import RunStore
    from cachectl.exchange.trust import UNTRUSTED

    if options.no_cache:
        request.misuse("--no-cache leaves nothing to pull or push; drop --store")
    if trust is None:
        request.misuse(UNTRUSTED)
    if options.sign is not None and not any(map(os.path.lexists, (options.sign, f"{options.sign}.pub"))):
        raise BadRequest(f"--sign {printable(options.sign)}: this key does not exist")
    if options.allowed_signers is not None and not os.path.isfile(options.allowed_signers):
        raise BadRequest(f"--allowed-signers {printable(options.allowed_signers)}: there is no such file")
    return RunStore(request.target(options.store), trust, options.store_mode, options.store_wait, options.sign)


def _lines(proof: proving.Proof) -> Iterator[str]:
    """Yield the proof of each layer, then the verdict."""
    from cachectl.watching import proof as proving

    quiet = [
        attestation for attestation in proof.attestations if attestation.unused and attestation.verdict == proving.HOLDS
    ]
    yield from (
        f"proof: {attestation.layer}: {_attested(attestation)}"
        for attestation in proof.attestations
        if attestation not in quiet
    )
    if quiet:
        unused, files = (
            ", ".join(attestation.layer for attestation in quiet),
            plural(sum(attestation.compared for attestation in quiet), "file"),
        )
        yield f"proof: not used: {unused} ({files} compared; no process of the command loaded their libraries)"
    for name in proof.left_out:
        yield f"proof: {name}: stays in use, so nothing is proved of it"
    if any(attestation.verdict == proving.FAILS and not attestation.others for attestation in proof.attestations):
        yield "proof: other programs that use these caches count too; if one may have run, try again without it"
    bad = [
        f"{verdict} for {', '.join(names)}"
        for verdict in (proving.FAILS, proving.UNKNOWN)
        if (names := proof.of(verdict))
    ]
    holds = "holds" if proof.holds else "cannot be given: no layer is left to prove it of"
    yield f"proof {'; '.join(bad) or holds}"


def _attested(attestation: proving.Attestation) -> str:
    """Say what was observed of a layer."""
    files = f"{plural(attestation.compared, 'file')} compared"
    if attestation.is_others:
        return f"not used: {attestation.unused}; {attestation.others} did"
    if attestation.touches:
        shown = [f"{path} {', '.join(what)}" for path, what in attestation.touches[:_FEW]]
        more = len(attestation.touches) - len(shown)
        others = [f"{attestation.others} used it too"] if attestation.others else []
        return "; ".join([*shown, *([f"and {more:,} more"] if more else []), *others])
    if attestation.unknown:
        return f"no write seen ({files}), but reads are unknown: {'; '.join(attestation.unknown)}"
    means = ", ".join([f"file events on {plural(attestation.folders, 'folder')}", *attestation.notes])
    return f"not written ({files}), not read ({means})"
