"""Switching caches off, or moving them, for a ``with`` block of a running process and the children it starts."""

from __future__ import annotations

import atexit
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cachectl.layer_set import LayerSet
from cachectl.layers.base import processes
from cachectl.layers.base.errors import FAILURES, CachectlError
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import DISABLED, Scope
from cachectl.layers.core.switch import Ability, Patch, Switch
from cachectl.layers.inside import tagged_builds
from cachectl.switching import child, overlay
from cachectl.switching.salt import SALTING

_INSTEAD_OF_DISABLED = (
    "enter disabled() before these libraries start, or run: cachectl run --no-cache -- COMMAND; "
    "with strict=False it switches off the other layers and warns"
)
_INSTEAD_OF_ISOLATED = "enter isolated() before these libraries start, or run: cachectl run --isolated -- COMMAND"
_SALTED = (
    f"its driver has started, so every program that {tagged_builds.LIBRARY} builds for it from source gets a unique "
    "constant and misses, and its entry is removed; programs from binaries or IL, and other libraries, still use the "
    "cache"
)


class StillOn(CachectlError, RuntimeError):
    """Some layers can no longer be switched off, or moved, in this process.

    ``layers`` maps each to the reason, and ``what`` is the message without the advice.
    """

    def __init__(self, layers: Mapping[str, str], act: str, instead: str) -> None:
        self.layers = dict(layers)
        listed = ", ".join(f"{name} ({reason})" for name, reason in layers.items())
        self.what = f"cannot {act} in this process: {listed}"
        super().__init__(f"{self.what}; {instead}")


#: Layers whose driver started in a block of :func:`disabled`, and which therefore stay off, with the reason.
STAY_OFF: dict[str, str] = {}
#: What salts, in each open block of :func:`disabled`, layers whose driver an isolated block in it started.
_SALT_LATE: list[Callable[[Iterable[str]], None]] = []


class Held(NamedTuple):
    """The status of one layer in a block, and the reason.

    ``status`` is ``off``, ``salted`` (every program that PyOpenCL builds from source for the layer's driver misses, and
    its entry is removed), or ``on``.
    """

    status: str
    why: str


@contextmanager
def disabled(*layers: str, strict: bool = True) -> Iterator[Mapping[str, Held]]:
    """Switch layers off in this process and its children.

    On exit, the environment and the switches are restored exactly, and modules that were imported in the block become
    as they would be without it. Kernels that the program already holds are not compiled again.

    :param layers: names; none means all
    :param strict: ``False`` warns of layers that stay on; without names, a layer that nothing can switch off is always
        only a warning
    :returns: a context that yields the status of each layer; a layer whose driver has started is salted
    :raises StillOn: before anything is changed, if a layer can be neither switched off nor salted
    """
    stack = LayerSet()
    lacking = child.unable(stack.named(layers), Ability.DISABLE)
    chosen = [layer for layer in stack.named(layers) if layer.name not in lacking]
    maps = _maps()
    off = {layer.name: layer.disable() for layer in chosen}
    statuses = {layer.name: _judge(layer, off[layer.name], maps) for layer in chosen}
    late = {name: hold.why for name, hold in statuses.items() if hold.status == "on"}
    still_on = late | lacking
    demanded = still_on if layers else late
    _report(demanded, still_on, "switch off", _INSTEAD_OF_DISABLED, strict=strict)
    statuses.update({name: Held("on", reason) for name, reason in lacking.items()})
    # The variables of a salted layer still switch it off in children.
    switches = [switch for name, switch in off.items() if name not in still_on]
    statuses.update(_switched_along(stack, switches))
    salted = [layer for layer in chosen if statuses[layer.name].status == "salted"]
    for switch in switches:
        _drop_copies(switch)
    settings = _settings(switches, tagged_builds.patches(SALTING) if salted else ())
    with ExitStack() as block:
        if salted:
            platforms = frozenset(name for layer in salted for name in layer.about.platforms)
            keeping = _keeping(stack, salted, statuses)
            block.enter_context(SALTING.salted(platforms, keeping, stack.environment.clock()))
        for switch in reversed(switches):
            # As callbacks, each step runs even if another one fails.
            block.callback(_drop_copies, switch)
            block.callback(_reload_modules, switch)
        block.callback(_note_started, switches, statuses)

        def salt_late(names: Iterable[str]) -> None:
            started = [name for name in names if name in off and statuses[name].status == "off"]
            statuses.update(block.enter_context(disabled(*started, strict=False)) if started else {})

        _SALT_LATE.append(salt_late)
        block.callback(_SALT_LATE.remove, salt_late)
        with overlay.applied(settings, _flags_left_behind(chosen)):
            # Results memoised in the block, such as programs, must end with the settings.
            del settings
            yield statuses


@contextmanager
def isolated(folder: Path | str | None = None, *, strict: bool = True) -> Iterator[Path]:
    """Switch every layer on, in an empty isolated root: a cold run that can be repeated.

    A temporary root is removed when the block ends, or at process exit if a library still uses its cache there.

    :param folder: a root, which is kept
    :param strict: ``False`` warns of libraries that have already opened their caches elsewhere
    :returns: a context that yields the root
    :raises StillOn: before anything is changed, if a library has already opened its cache elsewhere; a layer that
        cannot be moved at all is only a warning
    """
    stack = LayerSet()
    with ExitStack() as block:
        if folder is None:
            root = block.enter_context(child.isolated_root(stack.environment))
        else:
            root = Path(folder).absolute()
        late, users = too_late(stack, root), [layer for layer in stack if layer.about.scope is Scope.USER]
        staying = late | child.unable(users, Ability.RELOCATE)
        _report(late, staying, "move", _INSTEAD_OF_ISOLATED, strict=strict)
        with child.needed(root, kept=None if folder is None else root):
            root.mkdir(parents=True, exist_ok=True)
            switches = child.switches_on(stack, root)
            child.make_folders(switches)
            child.link_cache_home(stack.environment, stack, root)
        waiting = [switch for switch in switches if switch.read_at_load and not _latched(switch, _maps())]
        try:
            with overlay.applied(_settings(switches), _flags_left_behind(stack)):
                yield root
        finally:
            started = [switch.layer for switch in waiting if _latched(switch, _maps())]
            for salt_late in tuple(_SALT_LATE) if started else ():
                salt_late(started)
            # A library may still use a database that it has open.
            if any((root / "xdg").glob("*/*.sqlite")) or too_late(stack, root):
                atexit.register(block.pop_all().close)


def too_late(layers: Iterable[Layer], folder: Path) -> dict[str, str]:
    """Return the layers that can no longer be moved in this process, each with the reason."""
    maps = _maps()
    moved = child.relocations(layers, folder)
    return {name: reason for name, switch in moved.items() if (reason := _latched(switch, maps)) is not None}


def _maps() -> bytes | None:
    return processes.read("self", "maps")


def _judge(layer: Layer, off: Switch, maps: bytes | None) -> Held:
    """Return the status of a layer; one whose driver has started is off only if it was off from the beginning."""
    if (reason := _latched(off, maps)) is None:
        if _is_off(layer, off):
            return Held("off", f"already off: {layer.state().why}")
        if (lack := _misfit(off)) is not None:
            return Held("on", f"{lack}, which is needed to switch it off")
        if off.patches:
            return Held("off", "switched off in this process; no variable switches it off in child processes")
        return Held("off", f"switched off {off.takes_effect}")
    return _judge_started(layer, maps, reason)


def _judge_started(layer: Layer, maps: bytes | None, reason: str) -> Held:
    if layer.name in STAY_OFF:
        return Held("off", STAY_OFF[layer.name])
    # The program may have unset the variable before its driver started, so both states must be off.
    if (began := _began(layer)) is not None:
        first_state = began.state()
        if layer.state().condition is first_state.condition is DISABLED:
            return Held("off", f"off since the process began: {first_state.why}")
    libraries = layer.about.libraries
    if not libraries or not layer.about.platforms:
        return Held("on", reason)
    if not tagged_builds.can_tag() or processes.has_loaded(libraries, maps) is False:
        return Held(
            "on", f"{reason}; only builds of {tagged_builds.LIBRARY} can be salted, and it did not start the driver"
        )
    if (lack := tagged_builds.misfit()) is not None:
        return Held("on", f"{reason}; builds cannot be salted, because {lack}")
    return Held("salted", _SALTED)


def _misfit(switch: Switch) -> str | None:
    """Return what a library lacks of what a switch changes in it, or ``None``; imports libraries to be patched."""
    for module, owner, method, _ in switch.patches:
        if module not in sys.modules and importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            return str(error)
        if not callable(getattr(overlay.owner_of(module, owner), method, None)):
            return f"{module} has no {'.'.join(filter(None, (owner, method)))}"
    for module_name, attribute in switch.flags:
        if module_name in sys.modules and not hasattr(sys.modules[module_name], attribute):
            return f"{module_name} has no {attribute}"
    return None


def _is_off(layer: Layer, off: Switch) -> bool:
    """Return whether variables have switched a layer off; reads its state, from the disk, only if one is set."""
    variables = layer.environment.variables
    touched = any(name in variables for name in off.set.keys() | layer.enable().unset)
    with suppress(*FAILURES):
        return touched and layer.state().condition is DISABLED
    return False


def _began(layer: Layer) -> Layer | None:
    """Return the layer in the environment in which the process began; ``None`` if that is unknown."""
    if (first := processes.first_variables()) is None:
        return None
    try:
        return type(layer)(layer.environment._replace(variables=first))
    except FAILURES:
        return None


def _keeping(stack: LayerSet, salted: Iterable[Layer], statuses: Mapping[str, Held]) -> Iterator[Layer]:
    """Yield the layers in which salted builds may be stored: a driver uses the variables from its start."""
    for layer in salted:
        yield layer
        if (began := _began(layer)) is not None:
            yield began
    for layer in stack:
        about, hold = layer.about, statuses.get(layer.name)
        if about.finds_tags and not about.libraries and (hold is None or hold.status != "off"):
            yield layer


def _switched_along(stack: LayerSet, switches: Iterable[Switch]) -> dict[str, Held]:
    """Return the other layers that the switches turn off too: PyOpenCL has one switch for both of its caches."""
    ours, named = {name for switch in switches for name in switch.set}, {switch.layer for switch in switches}
    status = Held("off", f"shares the switch of {', '.join(sorted(named))}")
    others = (layer for layer in stack if layer.name not in named and child.can_switch(layer))
    return {layer.name: status for layer in others if ours & layer.disable().set.keys()}


def _latched(switch: Switch, maps: bytes | None) -> str | None:
    """Return why it is too late for the variables of a switch; ``None`` if it is not too late."""
    modules = [module for module in switch.read_at_import if module in sys.modules]
    if modules:
        return f"{modules[0]} is imported and has opened its dictionaries"
    if not switch.read_at_load:
        return None
    started = processes.has_loaded(switch.read_at_load, maps)
    if started is None and tagged_builds.can_tag():
        return "its driver may have started, which cannot be seen on this platform"
    return "its driver has started, and read its variables then" if started else None


def _report(demanded: Mapping[str, str], still_on: Mapping[str, str], act: str, instead: str, *, strict: bool) -> None:
    """Warn of the layers that stay on; if ``strict``, raise :class:`StillOn` for the demanded ones."""
    if demanded and strict:
        raise StillOn(demanded, act, instead)
    for name, reason in still_on.items():
        warnings.warn(f"{name} stays as it is: {reason}", RuntimeWarning, stacklevel=4)


def _settings(switches: list[Switch], salts: Iterable[Patch] = ()) -> dict[overlay.Slot, object]:
    settings = overlay.variables(child.merged(switches))
    for switch in switches:
        settings.update(_flags(switch))
    patches = [patch for switch in switches for patch in dict.fromkeys((*switch.patches, *switch.memo_patches))]
    for module, owner, name, replacement in (*patches, *salts):
        # Wrap the method, or an earlier wrapper of it, unless the library is not loaded.
        slot = module, owner, name
        method = settings.get(slot, getattr(overlay.owner_of(module, owner), name, None))
        if callable(method):
            settings[slot] = replacement(method)
    return settings


def _flags(switch: Switch) -> dict[overlay.Slot, object]:
    return {(module, None, attribute): value for (module, attribute), value in switch.flags.items()}


def _flags_left_behind(layers: Iterable[Layer]) -> dict[overlay.Slot, object]:
    """Return the flags that modules that are imported in the block would have without it."""
    left: dict[overlay.Slot, object] = {}
    for layer in filter(child.can_switch, layers):
        if (off := layer.disable()).flags:
            left.update(_flags(off if _is_off(layer, off) else layer.enable()))
    return left


def _note_started(switches: Iterable[Switch], statuses: Mapping[str, Held]) -> None:
    maps = _maps()
    drivers = (switch for switch in switches if switch.read_at_load and statuses[switch.layer].status == "off")
    late = (switch.layer for switch in drivers if _latched(switch, maps))
    STAY_OFF.update(dict.fromkeys(late, "its driver started in a block of disabled(), and stays off"))


def _drop_copies(switch: Switch) -> None:
    for module, function in switch.clear_functions:
        drop = getattr(sys.modules.get(module), function, None)
        if drop is not None:
            drop()


def _reload_modules(switch: Switch) -> None:
    """Reload modules that made no dictionary because they were first imported while their layer was off."""
    if any(overlay.read(slot) == value for slot, value in _flags(switch).items()):
        return
    for module, attribute in switch.reloads:
        loaded = sys.modules.get(module)
        if loaded is not None and overlay.read((module, None, attribute)) is overlay.MISSING:
            importlib.reload(loaded)
