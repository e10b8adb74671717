"""The layers of one environment, and the verbs that work on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cachectl.layer_set import LayerSet
from cachectl.layers.base.facts import Entry
from cachectl.layers.base.limits import LARGEST_BUNDLE
from cachectl.layers.base.selection import ALL, Selection

if TYPE_CHECKING:
    from cachectl.clearing.purge import PurgePlan
    from cachectl.inspecting.entries import Trouble
    from cachectl.inspecting.report import Report
    from cachectl.moving.exporting import Export
    from cachectl.moving.importing import Import, Trust


class Stack(LayerSet):
    """The layers of one environment, and the verbs that work on all of them."""

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
        from cachectl.inspecting.entries import listed, warn_of_failures

        return listed(self.named(layers), selection, notice or warn_of_failures)

    def report(self, *, layers: Iterable[str] = ()) -> Report:
        """Count what every layer holds, and say whether it is on. Writes nothing."""
        from cachectl.inspecting.report import survey

        return survey(self, self.named(layers))

    def recover(self, layers: Iterable[str] = ()) -> None:
        """Finish or roll back what was interrupted in the named layers, or in every expendable one.

        Planning sees past most interrupted writes without that, but not past those of more than 1 GiB.
        """
        from cachectl.clearing.purge import recover

        named = tuple(layers)
        recover(self.named(named) if named else self.expendable())

    def plan_clear(self, selection: Selection = ALL, *, layers: Iterable[str] = (), listed: bool = False) -> PurgePlan:
        """Plan a purge of the named layers, or of every expendable one. Touches nothing.

        With ``listed``, ``plan.foreseen()`` names every entry; that takes as long as listing them.
        """
        from cachectl.clearing.purge import plan

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
        from cachectl.moving.exporting import export

        return export(self, file, selection, layers=layers, sign=sign, force=force)

    def import_bundle(self, file: str, trust: Trust, *, dry_run: bool = False, most: int = LARGEST_BUNDLE) -> Import:
        """Place what a bundle of at most ``most`` bytes holds and what can be hit here; what is here already stays.

        Raises :class:`Untrusted` or :class:`BadBundle`, and then nothing was written.
        """
        from cachectl.moving.importing import import_bundle

        return import_bundle(self, file, trust, dry_run=dry_run, most=most)
