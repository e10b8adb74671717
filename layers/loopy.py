"""The layer ``loopy``: its schedule, code generation, invoker and memo dictionaries.

Sources: ``loopy/__init__.py`` (switches), ``loopy/tools.py`` (the list of dictionaries).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachectl.layers.base import facts
from cachectl.layers.pytools import DictionaryLookups, PytoolsDictionaries, dictionary_store, forgetting

_VARIABLES = ("LOOPY_NO_CACHE", "CG_NO_CACHE")
_FLAG = ("loopy", "CACHING_ENABLED")
#: Executors remember what they have compiled.
_EXECUTORS = (("loopy.target.pyopencl_execution", "PyOpenCLExecutor"), ("loopy.target.c.c_execution", "CExecutor"))


def _owns(identifier: str) -> bool:
    return identifier.startswith("loopy-")


class LoopyLookups(DictionaryLookups):
    """The lookups of loopy's dictionaries, and its stages."""

    watchers: Mapping[str, Path] = {
        **DictionaryLookups.watchers,
        **dict.fromkeys(
            ("loopy", "loopy.target.pyopencl_execution"), Path(__file__).parent / "inside" / "loopy_stages.py"
        ),
    }
    imports = ("loopy", "islpy", "pymbolic")


class LoopyDictionaries(PytoolsDictionaries):
    """Schedules, generated code and wrappers of loopy's kernels."""

    name = "loopy"
    title = "loopy code generation"
    store: Any = dictionary_store("loopy", _owns)
    about = PytoolsDictionaries.about._replace(reveals="source text of your kernels", lookups=LoopyLookups(_owns))
    library = "loopy"
    variables = _VARIABLES
    opened_by = ("loopy",)

    def disable(self) -> facts.Switch:
        """Return the variable for the next import, and the flag that loopy reads at each call in a running process."""
        return facts.Switch(
            self.name,
            set={"LOOPY_NO_CACHE": "1"},
            flags={_FLAG: False},
            memo_patches=tuple(
                facts.Patch(module, owner, "translation_unit_info", forgetting) for module, owner in _EXECUTORS
            ),
            clear_functions=(("loopy", "clear_in_mem_caches"),),
            takes_effect=facts.When.NOW,
        )

    def enable(self) -> facts.Switch:
        """Return the same, the other way round."""
        return replace(self.disable(), set={}, unset=frozenset(_VARIABLES), flags={_FLAG: True})
