"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cachectl.contained import Contained
from cachectl.layers.environment import Environment
from cachectl.layers.errors import BadRequest
from cachectl.layers.facts import Entry, Scope
from cachectl.layers.limits import LARGEST_BUNDLE
from cachectl.layers.registry import Broken, built_in, plugged_in
from cachectl.layers.selection import ALL, Selection

if TYPE_CHECKING:
    from cachectl.exporting import Export
    from cachectl.importing import Import, Trust
    from cachectl.layers.layer import Layer
    from cachectl.listing import Trouble
    from cachectl.purging import PurgePlan
    from cachectl.survey import Report


class Stack:
    """Every cache layer as one environment (by default this process's) resolves it."""

    def __init__(self, environment: Environment | None = None, *, plugins: bool = True) -> None:
        self.environment = Environment.here() if environment is None else environment
        self.broken: tuple[Broken, ...] = ()
        self._layers: dict[str, Layer] = {layer.name: layer for layer in built_in(self.environment)}
        if plugins:
            self._plug_in()

    def _plug_in(self) -> None:
        for layer in plugged_in(self.environment):
            if isinstance(layer, Broken):
                self.broken += (layer,)
            elif layer.name in self._layers:
                self.broken += (Broken(layer.name, f"two plug-ins offer the layer {layer.name}"),)
            else:
                self._layers[layer.name] = Contained(layer, self.environment)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: object) -> bool:
        return name in self._layers

    def __getitem__(self, name: str) -> Layer:
        try:
            return self._layers[name]
        except KeyError as error:
            message = f"no layer is called {name!r}; there are {', '.join(self._layers)}"
            raise BadRequest(message) from error

    def named(self, names: Iterable[str]) -> tuple[Layer, ...]:
        """Return the layers of these names, each once; all of them where none is named.

        Raises :class:`BadRequest` for a name that no layer has.
        """
        chosen = tuple(self[name] for name in dict.fromkeys(names))
        return chosen or tuple(self)

    def expendable(self) -> tuple[Layer, ...]:
        """Return what ``purge --all`` means: every user layer that a rerun refills."""
        return tuple(layer for layer in self if layer.scope is Scope.USER and not layer.precious)

    def entries(
        self,
        selection: Selection = ALL,
        *,
        layers: Iterable[str] = (),
        notice: Callable[[Trouble], None] | None = None,
    ) -> Iterator[Entry]:
        """Yield the selected entries, layer by layer.

        What could not be listed, and what looks damaged, is given to ``notice``; without one, the first is warned of.
        """
        from cachectl.listing import listed, warn_of_failures

        return listed(self.named(layers), selection, notice or warn_of_failures)

    def report(self, *, layers: Iterable[str] = ()) -> Report:
        """Count what every layer holds, and say whether it is on. Writes nothing."""
        from cachectl.survey import survey

        return survey(self, self.named(layers))

    def recover(self, layers: Iterable[str] = ()) -> None:
        """Finish or roll back what was interrupted in the named layers, or in every expendable one.

        Planning sees past most interrupted writes without that, but not past those of more than 1 GiB.
        """
        from cachectl.purging import recover

        named = tuple(layers)
        recover(self.named(named) if named else self.expendable())

    def plan_clear(self, selection: Selection = ALL, *, layers: Iterable[str] = (), listed: bool = False) -> PurgePlan:
        """Plan a purge of the named layers, or of every expendable one. Touches nothing.

        With ``listed``, ``plan.foreseen()`` names every entry; that takes as long as listing them.
        """
        from cachectl.purging import plan

        named = tuple(layers)
        return plan(self.named(named) if named else self.expendable(), selection, listed=listed)

    def export(
        self,
        file: str,
        selection: Selection = ALL,
        *,
        layers: Iterable[str] = (),
        sign: str | None = None,
        force: bool = False,
    ) -> Export:
        """Write the selected entries of the named layers, or of every expendable one, as a bundle.

        ``sign`` is a key of OpenSSH's; the signature lies beside the file. A file that is there is replaced only if it
        is a bundle, or with ``force``. Entries that cannot be read are named in what is returned.
        """
        from cachectl.exporting import export

        return export(self, file, selection, layers=layers, sign=sign, force=force)

    def import_bundle(self, file: str, trust: Trust, *, dry_run: bool = False, most: int = LARGEST_BUNDLE) -> Import:
        """Place what a bundle of at most ``most`` bytes holds and what can be hit here; what is here already stays.

        Raises :class:`Untrusted` or :class:`BadBundle`, and then nothing was written.
        """
        from cachectl.importing import import_bundle

        return import_bundle(self, file, trust, dry_run=dry_run, most=most)
