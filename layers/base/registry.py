"""The registry of layers: a table of the built-in ones, an entry-point group for plug-ins, and the guard around these.

A class is imported when its layer is first made, so that importing the table is fast. The guard turns what a plug-in
raises into an error of its layer, so that it stops no other: every public method and property of the layer, its store
and its parts is wrapped. Answers are not checked: type checkers and the conformance suite do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import CachectlError, LayerError, PluginFailed
from cachectl.layers.base.facts import Ability
from cachectl.layers.base.layer import Declaration, Layer
from cachectl.layers.base.lazy import made, regex
from cachectl.layers.base.parts import Lookups, Portability, Tagging
from cachectl.layers.base.store import Store, attempt
from cachectl.layers.host.distributions import entry_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    "miopen": "cachectl.layers.miopen:MIOpenKernels",
    "miopen-system": "cachectl.layers.miopen:MIOpenSystemKernels",
    "miopen-tuning": "cachectl.layers.miopen:MIOpenTuning",
    "miopen-system-tuning": "cachectl.layers.miopen:MIOpenSystemTuning",
}


#: The supported versions of the interface of :class:`Layer`; docs/adding-a-layer.md describes each.
INTERFACES: Final = frozenset({1})
#: Pattern of layer names: no option, path or blank.
_NAME: Final = regex(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Broken:
    """A plug-in that could not be loaded, and the reason."""

    name: str
    why: str


def built_in_layer(name: str, environment: Environment) -> Layer:
    """Make the built-in layer of a name."""
    module, _, attribute = BUILT_IN[name].partition(":")
    layer: Layer = getattr(import_module(module), attribute)(environment)
    return layer


def plugged_in(environment: Environment) -> Iterator[Layer | Broken]:
    """Make every layer that an installed distribution offers, guarded; yield :class:`Broken` for one that fails."""
    for point in entry_points(GROUP):
        yield _plugged(point, environment)


def _plugged(point: EntryPoint, environment: Environment) -> Layer | Broken:
    try:
        layer = point.load()(environment)
        wrong = _wrong(layer)
    except KeyboardInterrupt:
        raise
    # SystemExit, Rust panics and pytest skips are not Exceptions.
    except BaseException as error:  # noqa: BLE001 - a plug-in must not stop the others
        return Broken(point.name, f"{point.value} failed: {described(error)}")
    return guarded(layer) if wrong is None else Broken(point.name, f"{point.value} {wrong}")


def _wrong(layer: object) -> str | None:
    """Return why a plug-in's object cannot be used as a layer; ``None`` if it can."""
    if not isinstance(layer, Layer):
        return "is not a cachectl layer"
    if layer.interface not in INTERFACES:
        known = ", ".join(map(str, sorted(INTERFACES)))
        return f"was written for version {layer.interface!r} of the interface; this cachectl knows {known}"
    if not isinstance(layer.name, str) or not _NAME.fullmatch(layer.name):
        return f"has the name {layer.name!r}; a name is letters, digits, dots and dashes"
    if layer.name in BUILT_IN:
        return f"takes the name of the built-in layer {layer.name}"
    if not isinstance(layer.title, str) or not isinstance(made(layer.store), Store):
        return "has no title, or no store"
    return None


def described(error: BaseException) -> str:
    """Describe an error of a plug-in; its ``__str__`` may fail too."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - see above
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


# ---------------------------------------------------------------------- the guard

#: The classes whose objects run code of a plug-in, each with the class whose public members are wrapped.
_WRAPPED: Final[Mapping[type, type]] = {
    Layer: Declaration,
    **{kind: kind for kind in (Store, Lookups, Portability, Tagging)},
}
#: The attribute of guarded classes.
_MARK: Final = "_is_guarded"


def guarded(layer: Layer) -> Layer:
    """Return a copy of a plug-in's layer with its store and parts guarded."""
    copied: Layer = _guarded(layer, layer.name)
    return copied


def _guarded(thing: Any, name: str) -> Any:  # noqa: ANN401 - any answer
    """Return an object of the interface copied into a subclass of its own class; any other as it is."""
    thing = made(thing)
    own: type = type(thing)
    kind = next((kind for kind in _WRAPPED if issubclass(own, kind)), None)
    if kind is None:
        return thing
    guard = thing
    if not hasattr(own, _MARK):
        guard = copy(thing)
        guard.__class__ = _guard_class(own, kind, name)
    if kind is Layer:
        guard.store = _guarded(guard.store, name)
    return guard


class _LayerRules(Layer):
    """Guards the store in each environment, and adds abilities that fail when tried to the refusals."""

    def __init__(self, environment: Environment) -> None:
        with _failing(self.name):
            super().__init__(environment)
            self.store = _guarded(self.store, self.name)

    def refusals(self) -> Mapping[Ability, str]:
        """Return the refused abilities: all of them if this question fails."""
        try:
            with _failing(self.name):
                refused = super().refusals()
                tries: dict[Ability, Callable[[], object]] = {
                    Ability.DISABLE: lambda: (self.switched(on=False), self.switched(on=True)),
                    Ability.RELOCATE: lambda: self.relocate(self.environment.temporary),
                }
                failed = {ability: attempt(tries[ability]) for ability in tries.keys() - refused.keys()}
        except LayerError as error:
            return dict.fromkeys(Ability, error.message)
        return {**refused, **{one: error.message for one, error in failed.items() if isinstance(error, LayerError)}}


def _guard_class(own: Any, kind: type, name: str) -> type:  # noqa: ANN401 - a class
    """Make the subclass of a plug-in's class whose public members of the interface are wrapped."""
    public = frozenset(member for member in dir(_WRAPPED[kind]) if not member.startswith("_"))

    def read(self: object, member: str) -> object:
        if member not in public:
            return own.__getattribute__(self, member)
        with _failing(name):
            value = own.__getattribute__(self, member)
        return _method(value, name) if isinstance(value, MethodType) else _guarded(value, name)

    bases = (_LayerRules, own) if kind is Layer else (own,)
    return type(own.__name__, bases, {"__module__": own.__module__, "__getattribute__": read, _MARK: True})


def _method(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(inner)
    def member(*arguments: object, **named: object) -> object:
        with _failing(name):
            answer = inner(*arguments, **named)
        return _each(answer, name) if isinstance(answer, Iterator) else _guarded(answer, name)

    return member


def _each(answers: Iterator[object], name: str) -> Iterator[object]:
    with _failing(name):
        yield from answers


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Turn what a plug-in raises into an error of its layer."""
    try:
        yield
    except (CachectlError, KeyboardInterrupt, GeneratorExit):
        raise
    # SystemExit, Rust panics and pytest skips are not Exceptions.
    except BaseException as error:
        raise PluginFailed(name, f"the plug-in failed: {described(error)}") from error
