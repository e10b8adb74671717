"""The layer ``comgr``: the cache of AMD's code object manager, used by ROCm's OpenCL and by hipRTC.

Sources, in ROCm/llvm-project: ``amd/comgr/src/{comgr-env,comgr-cache,comgr-cache-command}.cpp`` and
``amd/comgr/README.md``; LLVM's ``Support/{Caching,CachePruning,Path}``. The format of entries:
:mod:`cachectl.layers.formats.comgr_entries`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from cachectl.layers.base import declarations, facts, lazy, parts, switches
from cachectl.layers.base.store import Codec, Damage, Store
from cachectl.layers.formats import details
from cachectl.layers.host import driver_layers, mounts

if TYPE_CHECKING:
    from cachectl.layers.formats import comgr_entries
else:
    comgr_entries = lazy.module("cachectl.layers.formats.comgr_entries")

LIBRARIES: Final = ("libamd_comgr.so",)
TIMESTAMP: Final = "llvmcache.timestamp"
_NOT_WHOLE: Final = (
    "is not exactly an output and a log of the stated lengths; comgr compiles it again at every run, and never "
    "replaces it"
)


class ComgrCodec(Codec):
    """An output and a log, each with its length before it."""

    form = "comgr-entry/1"

    def describe(self, data: bytes) -> details.Details:
        """Read the output that an entry holds."""
        return comgr_entries.describe(comgr_entries.output_of(data) or b"")

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is exactly an output and a log, and that bitcode and code objects are complete."""
        output = comgr_entries.output_of(data)
        if output is None:
            return Damage(facts.Severity.RECOMPILES, _NOT_WHOLE)
        wrong = comgr_entries.complaint(output)
        return None if wrong is None else Damage(facts.Severity.FAILS, f"{wrong}; comgr hands it on as it is")


class ComgrCache(driver_layers.DriverLayer):
    """Outputs of single commands of AMD's compiler: bitcode and code objects, one file each."""

    name = "comgr"
    title = "AMD comgr cache"
    makers = ("AMD",)
    settings = (
        switches.Setting(
            "AMD_COMGR_CACHE", "0", "1", facts.Severity.HARMLESS, "is not 0, so it does not switch the cache off"
        ),
        switches.Setting(
            "AMD_COMGR_EMIT_VERBOSE_LOGS",
            "(?!)",
            "0",
            facts.Severity.RECOMPILES,
            "is part of every key: entries stored without it are not hit",
        ),
    )
    switch = declarations.EnvSwitch("AMD_COMGR_CACHE", off="0", read=declarations.at_load(*LIBRARIES))
    # As comgr and LLVM do: an empty or relative path counts from the working folder.
    places = declarations.Rules(
        "AMD_COMGR_CACHE_DIR",
        linux=(
            declarations.Rule("AMD_COMGR_CACHE_DIR"),
            declarations.Rule("XDG_CACHE_HOME", "comgr", empty=declarations.Odd.HERE),
            declarations.Rule("HOME", ".cache/comgr", empty=declarations.Odd.HERE, source="default (HOME)"),
            declarations.Rule("", ".cache/comgr", source="default (the account's home)"),
        ),
        windows=(declarations.Rule("AMD_COMGR_CACHE_DIR"), declarations.Rule("LOCALAPPDATA", "comgr")),
        macos=(),
    )
    # LLVM sets the access time of an entry that it reads.
    store: Any = lazy.later(__name__, "outputs")
    about = parts.About(
        on_network=facts.Hazard(
            facts.Severity.RISKS,
            "programs map its files, and have been killed (SIGBUS) where others changed them; the newest releases keep "
            "no cache there unless AMD_COMGR_CACHE_DIR names it",
        ),
        # LLVM opens the file of an entry, or maps it, and renames a temporary to a new one.
        lookups=parts.Lookups(files=parts.EntryFiles(), mapped=LIBRARIES),
    )

    def is_here(self) -> bool:
        """Return whether there is a driver, a GPU or a cache."""
        return self.environment.topology.exists() or super().is_here()

    def state(self) -> facts.State:
        """Return the state; on a network file system it depends on the release."""
        state = super().state()
        for root in self.roots() if state.condition is facts.Condition.ENABLED else ():
            kind = mounts.network_file_system(root.path, mounts=self.environment.mounts)
            if kind is not None and root.source != self.places.variable:
                why = f"the default place is on a network file system ({kind}): the newest releases keep no cache there"
                return facts.State(facts.Condition.UNKNOWN, why, state.drivers)
        return state

    def faults(self) -> Iterator[switches.Fault]:
        """Add a policy that cannot be read, and an empty place."""
        yield from super().faults()
        variable = "AMD_COMGR_CACHE_POLICY"
        policy = self.environment.get(variable) or ""
        if (wrong := comgr_entries.policy_complaint(policy)) is not None:
            # comgr's manual names this key, but LLVM, which reads it, expects another.
            corrected = policy.replace("prune_expiration=", "prune_after=")
            works = comgr_entries.policy_complaint(corrected) is None
            fix = f"export {variable}={shlex.quote(corrected)}" if works else None
            outcome = f"cannot be read ({wrong}): nothing is kept, and every run compiles"
            yield facts.Condition.DISABLED, switches.misread(self, variable, facts.Severity.RECOMPILES, outcome, fix)
        if self.environment.get(self.places.variable) == "":
            outcome = "is empty: older releases keep nothing then, newer ones use the default place"
            yield None, switches.misread(self, self.places.variable, facts.Severity.RECOMPILES, outcome)


def outputs() -> Store:
    """Return the store of the entries, and of the file that records when some were last dropped."""
    from cachectl.layers.stores.files import Files, Index
    from cachectl.layers.stores.tree import OrphanRule, Shape

    temporary = lazy.regex(r"amdgpu-compiler-[0-9a-f]{6}\.tmp\.o")
    left = OrphanRule(temporary, "left by a program that was killed", private=True)
    shape = Shape((lazy.regex("llvmcache-[0-9a-f]{64}"),), folders=False, orphans=(left,))
    index = Index()
    index.shapes = (Shape((lazy.regex(re.escape(TIMESTAMP)),), folders=False),)
    return Files(shape, codec=ComgrCodec(), index=index, writers=LIBRARIES)
