"""The registry of layers: a table of the built-in ones, and an entry-point group for plug-ins.

A class is imported when its layer is first made, so that importing the table is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Scope
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import regex
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


#: The supported versions of the interface of :class:`Layer`; docs/adding-a-layer.md describes each.
INTERFACES: Final = frozenset({1})
#: The variable with the seconds that a plug-in may take to make its layer, and the default.
PLUGIN_TIMEOUT: Final = "CACHECTL_PLUGIN_TIMEOUT"
_PLUGIN_TIMEOUT: Final = 30.0
_LONGEST: Final = 86400.0

#: Pattern of layer names: no option, path or blank.
_NAME: Final = regex(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that could not be loaded, and the reason."""

    name: str
    why: str


class TookTooLong(BaseException):
    """A block exceeded its time limit. No :class:`Exception`, so that the interrupted code does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit a block to a number of seconds, then raise :class:`TookTooLong` in it.

    That interrupts Python code and waiting, but no loop of C code. Only the main thread can be interrupted, and a
    program's own alarm is kept: in other threads, or with such an alarm, the block has no limit.
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
        # Repeatedly, because the interrupted code may go on to something else that hangs.
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def built_in(environment: Environment) -> Iterator[Layer]:
    """Make every built-in layer."""
    return (built_in_layer(name, environment) for name in BUILT_IN)


def built_in_layer(name: str, environment: Environment) -> Layer:
    """Make the built-in layer of a name."""
    module, _, attribute = BUILT_IN[name].partition(":")
    layer: Layer = getattr(import_module(module), attribute)(environment)
    return layer


def plugged_in(environment: Environment) -> Iterator[Layer | Broken]:
    """Make every layer that an installed distribution offers; yield :class:`Broken` for one that fails."""
    for point in entry_points(GROUP):
        yield _plugged(point, environment)


def _plugged(point: EntryPoint, environment: Environment) -> Layer | Broken:
    limit = plugin_limit(environment)
    try:
        # Standard output is for data; a plug-in may print anything while it is imported.
        with redirect_stdout(sys.stderr), limited(limit):
            layer = point.load()(environment)
            wrong = _wrong(layer)
    except TookTooLong:
        return Broken(point.name, f"{point.value} took longer than {limit:g} s; {PLUGIN_TIMEOUT} sets how long it may")
    except KeyboardInterrupt:
        raise
    # SystemExit, Rust panics and pytest skips are not Exceptions.
    except BaseException as error:  # noqa: BLE001 - a plug-in must not stop the others
        return Broken(point.name, f"{point.value} failed: {described(error)}")
    if wrong is not None or not isinstance(layer, Layer):
        return Broken(point.name, f"{point.value} {wrong}")
    return layer


def plugin_limit(environment: Environment) -> float:
    """Return the seconds that a plug-in has to make its layer, and for each answer that depends on variables alone."""
    try:
        seconds = float(environment.get(PLUGIN_TIMEOUT) or "")
    except ValueError:
        return _PLUGIN_TIMEOUT
    return seconds if 0 < seconds <= _LONGEST else _PLUGIN_TIMEOUT


def _wrong(layer: object) -> str | None:
    """Return why a plug-in's object is no valid layer; ``None`` if it is."""
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
    """Describe an error of a plug-in; its ``__str__`` may fail too."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - see above
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
