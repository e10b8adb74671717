"""Which layers there are: the built-in ones by a table, other people's by the entry-point group.

A class is imported when its layer is first made, so that a table costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Scope
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import dataclass, regex
from cachectl.layers.base.store import Store
from cachectl.layers.host.distributions import entry_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from types import FrameType

#: The entry-point group under which a distribution offers a layer class.
GROUP: Final = "cachectl.layers"

#: Every built-in layer, in the order in which one kernel passes through them.
BUILT_IN: Final[dict[str, str]] = {
    "loopy": "cachectl.layers.loopy:LoopyDictionaries",
    "pyopencl-invoker": "cachectl.layers.pyopencl_invoker:PyOpenCLInvoker",
    "pytools": "cachectl.layers.pytools:PytoolsDictionaries",
    "pyopencl": "cachectl.layers.pyopencl:PyOpenCLBinaries",
    "pocl": "cachectl.layers.pocl:PoclKernels",
    "mesa": "cachectl.layers.mesa.cache:MesaShaderCache",
    "cuda": "cachectl.layers.cuda:CudaComputeCache",
    "neo": "cachectl.layers.neo:NeoCompilerCache",
    "comgr": "cachectl.layers.comgr:ComgrCache",
    "miopen": "cachectl.layers.miopen.kernels:MIOpenKernels",
    "miopen-system": "cachectl.layers.miopen.system_kernels:MIOpenSystemKernels",
    "miopen-tuning": "cachectl.layers.miopen.tuning:MIOpenTuning",
    "miopen-system-tuning": "cachectl.layers.miopen.system_tuning:MIOpenSystemTuning",
}


#: The versions of the interface of :class:`Layer` that layers may be written for; docs/adding-a-layer.md says what
#: each of them promises.
INTERFACES: Final = frozenset({1})
#: What sets, in seconds, how long a plug-in may take until it has given its layer; and how long that is unless it does.
PLUGIN_TIMEOUT: Final = "CACHECTL_PLUGIN_TIMEOUT"
_PLUGIN_TIMEOUT: Final = 30.0
_LONGEST: Final = 86400.0

#: What can be typed as a layer: no option, no path, no blank.
_NAME: Final = regex(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that gave no layer, and why."""

    name: str
    why: str


class TookTooLong(BaseException):
    """A block went on for longer than it may; no :class:`Exception`, so that what it interrupts does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let a block take so many seconds, then raise :class:`TookTooLong` in it.

    It interrupts Python, and waiting; not a loop of C code. Only the main thread can be interrupted, and a program
    that has set an alarm of its own keeps it: elsewhere, and there, the block may take any time.
    """
    import signal
    import threading

    can = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if running:
            raise TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Again and again: what is interrupted may go on to something else that hangs.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def built_in(environment: Environment) -> Iterator[Layer]:
    """Make every built-in layer."""
    for path in BUILT_IN.values():
        module, _, attribute = path.partition(":")
        yield getattr(import_module(module), attribute)(environment)


def plugged_in(environment: Environment) -> Iterator[Layer | Broken]:
    """Make every layer that an installed distribution offers; one that fails is named, not fatal."""
    for point in entry_points(GROUP):
        yield _plugged(point, environment)


def _plugged(point: EntryPoint, environment: Environment) -> Layer | Broken:
    limit = plugin_limit(environment)
    try:
        # Standard output is for data; what a stranger prints while it is imported is none.
        with redirect_stdout(sys.stderr), limited(limit):
            layer = point.load()(environment)
            wrong = _wrong(layer)
    except TookTooLong:
        return Broken(point.name, f"{point.value} took longer than {limit:g} s; {PLUGIN_TIMEOUT} sets how long it may")
    except KeyboardInterrupt:
        raise
    # A stranger's own may be no Exception: so are a panic of Rust's, and a skip of pytest's.
    except BaseException as error:  # noqa: BLE001 - a stranger's code must not stop the others
        return Broken(point.name, f"{point.value} failed: {described(error)}")
    if wrong is not None or not isinstance(layer, Layer):
        return Broken(point.name, f"{point.value} {wrong}")
    return layer


def plugin_limit(environment: Environment) -> float:
    """Return how many seconds a plug-in has to give its layer, and for each answer that is a matter of variables."""
    try:
        seconds = float(environment.get(PLUGIN_TIMEOUT) or "")
    except ValueError:
        return _PLUGIN_TIMEOUT
    return seconds if 0 < seconds <= _LONGEST else _PLUGIN_TIMEOUT


def _wrong(layer: object) -> str | None:
    """Say what is wrong with how a plug-in presents itself, or return ``None``."""
    if not isinstance(layer, Layer):
        return "is no cachectl layer"
    return _ill_named(layer) or _ill_formed(layer)


def _ill_named(layer: Layer) -> str | None:
    if not isinstance(layer.name, str) or not _NAME.fullmatch(layer.name):
        return f"has the name {layer.name!r}; a name is letters, digits, dots and dashes"
    if layer.name in BUILT_IN:
        return f"takes the name of the built-in layer {layer.name}"
    return None


def _ill_formed(layer: Layer) -> str | None:
    if type(layer.interface) is not int or layer.interface not in INTERFACES:
        known = ", ".join(map(str, sorted(INTERFACES)))
        return f"was written for version {layer.interface!r} of the interface; this cachectl knows {known}"
    kinds = {"title": str, "scope": Scope, "precious": bool}
    for attribute, kind in kinds.items():
        if not isinstance(getattr(layer, attribute), kind):
            return f"has a {attribute} that is no {kind.__name__}: {getattr(layer, attribute)!r}"
    return _ill_stored(layer.store)


def _ill_stored(store: object) -> str | None:
    if not isinstance(store, Store):
        return f"has a store that is no Store: {store!r}"
    if not isinstance(store.forms, tuple) or not store.forms or not all(isinstance(form, str) for form in store.forms):
        return f"has forms that are no names: {store.forms!r}"
    if not isinstance(store.clearing_needs_room, bool):
        return f"has a clearing_needs_room that is no bool: {store.clearing_needs_room!r}"
    return None


def described(error: BaseException) -> str:
    """Name an error of a stranger's, whose own words may fail too."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - see above
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
