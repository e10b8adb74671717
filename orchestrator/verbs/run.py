"""``cachectl run``: run a command with caches off, isolated, or filled from a store."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cachectl import layer_set, verbs
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.text import plural, printable
from cachectl.layers.core.layer import Layer
from cachectl.switching import child

if TYPE_CHECKING:
    from cachectl.exchange.push_pull import RunStore
    from cachectl.watching import proof as proving

#: How many paths the proof names for a layer.
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
cachectl run (--no-cache | --isolated[=DIR] | --base DIR | --portable |
       --prove | --store SOURCE)... [--layer LAYER]... -- COMMAND..."""


#: The variables of a child process in which layers are off or moved, and the names of the layers that do not change.
Switched = tuple[Mapping[str, "str | None"], frozenset[str]]
#: Watches a command in a block, and yields the variables for this.
Watch = AbstractContextManager[Mapping[str, str]]
#: The exit status of a command, 128+n if signal n ended it, and the proof if requested.
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
    """Run a command with its usual caches, to prove that it does not use them, or to share them.

    :param layers: names; none means all
    :param prove: watch the real roots
    :param store: what to pull from and push to
    :param notice: gets a line for each problem, and with a store the verdict of a trace, unless the run is proved
    :returns: the exit status of the command, 128+n if signal n ended it, and the proof if requested
    :raises CannotStart: if the command cannot be started
    """
    wrapped = _Command(stack, command, layers, stack.named(layers), prove, notice)
    return wrapped.run(nullcontext(({}, frozenset())), wrapped.shared(store, stack))


def run_without_cache(
    stack: layer_set.LayerSet,
    command: Sequence[str],
    *,
    layers: Sequence[str] = (),
    prove: bool = False,
    notice: Callable[[str], None] = layer_set.warn_user,
) -> Result:
    """Run a command with every layer off; otherwise as :func:`run_in_place`.

    :param notice: gets a line for each layer that cannot be switched off
    :raises Refused: if this is a named layer of the user
    """
    wrapped = _Command(stack, command, layers, stack.named(layers), prove, notice)
    return wrapped.run(wrapped.off(), nullcontext())


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

    :param root: use this root, which is kept; required with a store
    :param notice: also gets a line for each layer that cannot be moved
    :raises Refused: if this is a named layer of the user
    """
    return _Command(stack, command, layers, stack.named(layers), prove, notice).run_isolated(root, store)


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
    """Run a command that starts warm from a base, a folder that never changes; otherwise as :func:`run_isolated`.

    :param root: the root for new entries; by default one for each base, kept in the user cache folder
    :param temporary: drop new entries
    :param store: its entries that are in the base are not pulled, and entries of the base are not pushed
    """
    from cachectl.exchange import copying
    from cachectl.layers.disk.own_roots import make_own_root

    here, wrapped = stack.environment, _Command(stack, command, layers, stack.named(layers), prove, notice)
    place = copying.base_at(here, base, root)
    child.say_shared(place, "--base", notice)
    if root is None and not temporary:
        root = make_own_root(here, place)
    besides = {} if store is None else copying.base_keys(here, place, layers)
    return wrapped.run_isolated(root, store, warm=partial(copying.start_from, here, place), besides=besides)


class _Command(NamedTuple):
    """A command, the ``layers`` that were named for it, and those ``chosen`` by this."""

    stack: layer_set.LayerSet
    command: Sequence[str]
    layers: Sequence[str]
    chosen: Sequence[Layer]
    prove: bool
    notice: Callable[[str], None]

    @contextmanager
    def off(self) -> Iterator[Switched]:
        """Switch the layers off."""
        here, staying = self.stack.environment, child.say_left_alone(self.chosen, self.layers, self.notice, off=True)
        with child.isolated_root(here, None, self.notice) as folder:
            with child.needed(folder):
                changes = child.variables_off(self.chosen, self.stack, folder, proved=self.prove)
                child.link_cache_home(here, self.chosen, folder)
            yield changes, staying

    @contextmanager
    def isolated(self, root: Path | None, warm: Callable[..., None] | None) -> Iterator[Switched]:
        """Move the layers to an isolated root, which ``warm`` fills."""
        here, staying = self.stack.environment, child.say_left_alone(self.chosen, self.layers, self.notice, off=False)
        with child.isolated_root(here, root, self.notice) as folder:
            with child.needed(folder, kept=root):
                along = child.companions(self.chosen, self.stack, folder)
                for name in along:
                    self.notice(f"{name} stores its entries in the same folder, so it is isolated too")
                moved = (*self.chosen, *(self.stack[name] for name in along))
                changes = child.variables_isolated(self.chosen, folder)
                if warm is not None:
                    warm(folder, self.notice, [layer.name for layer in moved])
                child.link_cache_home(here, moved, folder)
            yield changes, staying

    @contextmanager
    def shared(
        self, store: RunStore | None, stack: layer_set.LayerSet, besides: Mapping[str, frozenset[str]] = {}
    ) -> Iterator[Watch | None]:
        """Pull into ``stack`` before the block, and push after it; yield what watches the command for a verdict."""
        with ExitStack() as block:
            verdict = None
            if store is not None:
                from cachectl.exchange import push_pull
                from cachectl.watching.trace import judged

                scratch = partial(block.enter_context, child.isolated_root(stack.environment, notice=self.notice))
                failure = "nothing is pulled or pushed, and there is no verdict"
                if (folder := child.try_extra(failure, scratch, self.notice)) is not None:
                    block.enter_context(push_pull.shared_around(stack, store, self.notice, self.layers, besides))
                    verdict = judged(stack, folder, lambda trace: self.notice(trace.verdict), self.notice)
            yield verdict

    def run(self, switched: AbstractContextManager[Switched], shared: AbstractContextManager[Watch | None]) -> Result:
        """Run it with switched caches, and with a proof, or else with a verdict if a store is shared."""
        here = self.stack.environment
        with shared as verdict, child.signals_held() as signals, switched as (changes, staying):
            if self.prove:
                from cachectl.watching.proof import proving

                given = here.with_variables(changes)
                with proving(self.stack, self.chosen, given, left_out=staying, notice=self.notice) as (
                    proof,
                    variables,
                ):
                    status = child.run(self.command, {**changes, **variables}, here, signals)
                return status, proof
            with verdict or nullcontext({}) as variables:
                return child.run(self.command, {**changes, **variables}, here, signals), None

    def run_isolated(
        self,
        root: Path | None,
        store: RunStore | None,
        *,
        warm: Callable[..., None] | None = None,
        besides: Mapping[str, frozenset[str]] = {},
    ) -> Result:
        """Run it in an isolated root. Raises :class:`BadRequest` for a store without a root that is kept."""
        used = self.stack
        if store is not None:
            if root is None:
                raise BadRequest("with a store, the isolated root must be kept; name a folder: --isolated=DIR")
            root = used.environment.absolute(root)
            child.make_kept_root(root, mode=0o700)
            used = type(used)(child.environment_below(used.environment, str(root)))
        return self.run(self.isolated(root, warm), self.shared(store, used, besides))


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
        request.misuse("--no-cache switches off the caches that --base fills; choose one of them")
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
    """Return the store of ``--store`` with its options; ``None`` without one."""
    options, trust = request.options, request.trust()
    if not options.store:
        if trust is not None or options.sign is not None:
            request.misuse("--allowed-signers, --digest, --trust and --sign need --store SOURCE")
        return None
    from cachectl.exchange.push_pull import RunStore
    from cachectl.exchange.trust import UNTRUSTED

    if options.no_cache:
        request.misuse("with --no-cache there is nothing to pull or push; drop --store")
    if trust is None:
        request.misuse(UNTRUSTED)
    if options.sign is not None and not any(map(os.path.lexists, (options.sign, f"{options.sign}.pub"))):
        raise BadRequest(f"--sign {printable(options.sign)}: this key does not exist")
    if options.allowed_signers is not None and not os.path.isfile(options.allowed_signers):
        raise BadRequest(f"--allowed-signers {printable(options.allowed_signers)}: this file does not exist")
    return RunStore(request.target(options.store), trust, options.store_mode, options.store_wait, options.sign)


def _lines(proof: proving.Proof) -> Iterator[str]:
    """Yield the proof of each layer, then the verdict."""
    from cachectl.watching import proof as proving

    unused = [item for item in proof.attestations if item.unused and item.verdict == proving.HOLDS]
    for attestation in proof.attestations:
        if attestation not in unused:
            yield f"proof: {attestation.layer}: {_attested(attestation)}"
    if unused:
        names = ", ".join(attestation.layer for attestation in unused)
        files = plural(sum(attestation.compared for attestation in unused), "file")
        yield f"proof: not used: {names} ({files} compared; no process of the command loaded their libraries)"
    for name in proof.left_out:
        yield f"proof: {name}: stays in use, so nothing is proved about it"
    if any(attestation.verdict == proving.FAILS and not attestation.others for attestation in proof.attestations):
        yield "proof: another program may have caused this; try again while none runs"
    failed = {verdict: ", ".join(proof.of(verdict)) for verdict in (proving.FAILS, proving.UNKNOWN)}
    verdicts = "; ".join(f"{verdict} for {layers}" for verdict, layers in failed.items() if layers)
    holds = "holds" if proof.holds else "cannot be given: there is no layer to prove it for"
    yield f"proof {verdicts or holds}"


def _attested(attestation: proving.Attestation) -> str:
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
