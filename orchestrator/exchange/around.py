"""A store around a command: pulled from before it, and pushed to after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from cachectl.exchange import copying
from cachectl.exchange.place import STREAM, Deadline, Missing, without_secrets
from cachectl.exchange.pull import pull
from cachectl.exchange.push import push
from cachectl.exchange.trust import Trust
from cachectl.layer_set import LayerSet
from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment
from cachectl.transfer import Transfer

#: Seconds that a store may delay a command, by default.
PATIENCE: Final = 30.0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """A shared store around a command: why it is trusted, and whether new entries are pushed, signed by a key.

    ``seconds`` is how long it may delay the command, and how long the push after it may take.
    """

    url: str
    trust: Trust
    writes: bool = True
    sign: str | None = None
    seconds: float = PATIENCE

    def __post_init__(self) -> None:
        if self.url == STREAM:
            raise errors.BadRequest("the standard streams are the command's; name a store")


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
    or pushed. ``besides`` are the keys, by layer, that are neither pulled nor pushed. ``own`` is the environment that
    keeps what this machine remembers of stores, by default that of ``stack``.
    """
    writes = use.writes

    def say(transfer: Callable[[], Transfer], verb: str, failed: str) -> bool:
        try:
            done = transfer()
        except Exception as error:  # noqa: BLE001 - whatever a server answers, the command runs
            # The push will make the store.
            if writes and verb == "pulled" and isinstance(error, Missing):
                return True
            reason = str(error) if isinstance(error, errors.CachectlError) else f"{type(error).__name__}: {error}"
            notice(f"--store {errors.printable(without_secrets(use.url))}: {failed}: {errors.printable(reason)}")
            return False
        for layer in done.layers:
            if layer.placed:
                notice(f"store: {layer.layer}: {layer.placed:,} {verb}")
            copying.say_failed(layer.layer, f"not {verb}", layer.failed, notice)
        return True

    given: dict[str, Any] = {"layers": layers, "besides": besides, "own": own}
    pulling = partial(pull, stack, use.url, use.trust, deadline=Deadline(use.seconds), **given)
    usable = say(pulling, "pulled", "nothing is pulled or pushed" if writes else "nothing was pulled")
    yield
    if usable and writes:
        given |= {"sign": use.sign, "allowed_signers": use.trust.allowed_signers}
        pushing = partial(push, stack, use.url, deadline=Deadline(use.seconds), **given)
        say(pushing, "pushed", "nothing was pushed")
