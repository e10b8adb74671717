"""The layers of one environment, by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar

from cachectl.layers import registry
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import FAILURES, BadRequest
from cachectl.layers.base.text import did_you_mean
from cachectl.layers.core.layer import Layer, every_root
from cachectl.layers.core.root import Root, Scope
from cachectl.layers.host.here import this_environment

T = TypeVar("T")


def warn_user(line: str) -> None:
    """Issue a line as a :class:`RuntimeWarning`."""
    warnings.warn(line, RuntimeWarning, stacklevel=3)


class LayerSet:
    """Every cache layer of one environment (by default this process's); each is made when it is first used."""

    def __init__(self, environment: Environment | None = None, *, shared: bool = False) -> None:
        """Resolve the layers; with ``shared``, other users who can write to a cache are trusted."""
        self.environment = this_environment() if environment is None else environment
        if shared:
            self.environment = self.environment._replace(shared=True)
        self._made: dict[str, Layer] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.environment.home_folder)!r})"

    @cached_property
    def _plugged(self) -> tuple[Mapping[str, Layer], tuple[registry.Broken, ...]]:
        """The layers of plug-ins, and the plug-ins that could not be loaded."""
        layers: dict[str, Layer] = {}
        broken: list[registry.Broken] = []
        for layer in registry.plugged_in(self.environment):
            if not isinstance(layer, Layer):
                broken.append(layer)
            elif layer.name in layers:
                broken.append({"name": layer.name, "why": f"two plug-ins offer the layer {layer.name}"})
            else:
                layers[layer.name] = layer
        return layers, tuple(broken)

    @property
    def broken(self) -> tuple[registry.Broken, ...]:
        """The plug-ins that could not be loaded."""
        return self._plugged[1]

    def __iter__(self) -> Iterator[Layer]:
        yield from (self[name] for name in registry.BUILT_IN)
        yield from self._plugged[0].values()

    def __len__(self) -> int:
        return len(registry.BUILT_IN) + len(self._plugged[0])

    def __contains__(self, name: object) -> bool:
        return name in registry.BUILT_IN or name in self._plugged[0]

    def __getitem__(self, name: str) -> Layer:
        if name in registry.BUILT_IN:
            if name not in self._made:
                self._made[name] = registry.built_in_layer(name, self.environment)
            return self._made[name]
        if name in self._plugged[0]:
            return self._plugged[0][name]
        if reason := "; ".join(plugin["why"] for plugin in self.broken if plugin["name"] == name):
            raise BadRequest(f"the plug-in {name} was not loaded: {reason}")
        names = [*registry.BUILT_IN, *self._plugged[0]]
        advice = did_you_mean(name, names) or f"; the layers are {', '.join(names)}"
        raise BadRequest(f"unknown layer {name!r}{advice}")

    def named(self, names: Iterable[str]) -> tuple[Layer, ...]:
        """Return the layers with these names, each once, or all. Raises :class:`BadRequest` for unknown names."""
        return tuple(self[name] for name in dict.fromkeys(names)) or tuple(self)

    def clearable(self) -> tuple[Layer, ...]:
        """Return the layers of ``purge --all``: every user layer that a rerun refills."""
        return tuple(layer for layer in self if layer.about.scope is Scope.USER and not layer.about.precious)

    def chosen(self, names: Iterable[str]) -> tuple[Layer, ...]:
        """Return the layers with these names, as :meth:`named` does; every clearable layer if none is named."""
        names = tuple(names)
        return self.named(names) if names else self.clearable()


def in_each_root(
    layers: Iterable[Layer],
    look: Callable[[Layer, Root], Iterable[T]],
    roots: Callable[[Layer], Iterable[Root]] = every_root,
) -> Iterator[tuple[Layer, Root | None, T | Exception]]:
    """Yield each layer and root with each result of a function there, or with its error; then the next root follows.

    The root is ``None`` if the layer could not list its roots.
    """
    for layer in layers:
        try:
            known = tuple(roots(layer))
        except FAILURES as error:
            yield layer, None, error
            continue
        for root in known:
            try:
                for item in look(layer, root):
                    yield layer, root, item
            except FAILURES as error:  # noqa: PERF203 - the other roots go on
                yield layer, root, error
