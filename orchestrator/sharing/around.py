"""``run --store``: pull before a command, and push after it what is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.texts import printable
from cachectl.moving.transfer import without_secrets
from cachectl.sharing.deadline import Deadline
from cachectl.sharing.place import Missing
from cachectl.sharing.pulling import pull
from cachectl.sharing.pushing import push

if TYPE_CHECKING:
    from cachectl.layer_set import LayerSet
    from cachectl.layers.base.environment import Environment
    from cachectl.layers.base.facts import Note
    from cachectl.moving.importing import Trust

#: Seconds that a store may delay a command, by default.
PATIENCE: Final = 30.0
#: Reasons of failures that are named for a layer.
_REASONS: Final = 3


@dataclass(frozen=True, slots=True)
class StoreUse:
    """A shared store around a command: why it is trusted, and whether new entries are pushed, signed by a key.

    ``seconds`` is how long it may delay the command.
    """

    url: str
    trust: Trust
    writes: bool = True
    sign: str | None = None
    seconds: float = PATIENCE


@contextmanager
def shared_around(
    stack: LayerSet,
    use: StoreUse,
    notice: Callable[[str], None],
    *,
    layers: Sequence[str] = (),
    besides: Mapping[str, Collection[str]] = MappingProxyType({}),
    own: Environment | None = None,
) -> Iterator[None]:
    """Pull into the caches of ``stack``, run the block, and push what the store lacks.

    ``notice`` gets a line for each layer of which entries were pulled or pushed, and for each thing that went wrong:
    the block runs in any case. If the store is damaged, not trusted, too slow or cannot be reached, nothing is pulled
    or pushed.
    ``besides`` are the keys, by layer, that are neither pulled nor pushed. ``own`` is the environment that keeps what
    this machine remembers of stores, by default that of ``stack``.
    """
    usable = _pulled(stack, use, notice, layers, besides=besides, own=own)
    yield
    if usable and use.writes:
        try:
            done = push(
                stack,
                use.url,
                layers=layers,
                besides=besides,
                sign=use.sign,
                allowed_signers=use.trust.allowed_signers,
                own=own,
            )
        except Exception as error:  # noqa: BLE001 - whatever a server answers, the status is the command's
            notice(_line("nothing was pushed", use, error))
            return
        for layer in done.layers:
            if layer.pushed:
                notice(f"store: {layer.layer}: {layer.pushed:,} pushed")
            _say_failed(layer.layer, "not pushed", layer.failed, notice)


def _pulled(
    stack: LayerSet,
    use: StoreUse,
    notice: Callable[[str], None],
    layers: Sequence[str],
    *,
    besides: Mapping[str, Collection[str]],
    own: Environment | None,
) -> bool:
    """Pull; return whether the store can be used."""
    try:
        deadline = Deadline(use.seconds)
        done = pull(stack, use.url, use.trust, layers=layers, besides=besides, own=own, deadline=deadline)
    except Missing as error:
        if not use.writes:
            notice(_line("nothing was pulled", use, error))
        # The push makes the store.
        return use.writes
    except Exception as error:  # noqa: BLE001 - whatever a server answers, the command runs
        notice(_line("nothing is pulled or pushed", use, error))
        return False
    for layer in done.layers:
        if layer.placed:
            notice(f"store: {layer.layer}: {layer.placed:,} pulled")
        _say_failed(layer.layer, "not pulled", layer.failed, notice)
    return True


def _say_failed(layer: str, what: str, failed: Sequence[Note], notice: Callable[[str], None]) -> None:
    """Give a line for each reason, not for each entry: a read-only home may refuse thousands."""
    first = {note.because: note.key for note in reversed(failed)}
    for because, number in Counter(note.because for note in failed).most_common(_REASONS):
        notice(f"{layer}: {number:,} {what} ({first[because]}{', …' if number > 1 else ''}): {because}")


def _line(what: str, use: StoreUse, error: Exception) -> str:
    if isinstance(error, CachectlError):
        reason = str(error)
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
    else:
        reason = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return f"--store {printable(without_secrets(use.url))}: {what}: {printable(reason)}"
