"""The layer ``comgr``: the cache of AMD's code object manager, used by ROCm's OpenCL and by hipRTC.

Sources, in ROCm/llvm-project: ``amd/comgr/src/{comgr-env,comgr-cache,comgr-cache-command}.cpp`` and
``amd/comgr/README.md``; LLVM's ``Support/{Caching,CachePruning,Path}``. The format of entries:
:mod:`cachectl.layers.formats.comgr_entries`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import declarations, facts, switches
from cachectl.layers.base.facts import Condition, Severity, State
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.parts import About, EntryFiles, Lookups
from cachectl.layers.base.store import Codec, Damage
from cachectl.layers.formats.details import Details
from cachectl.layers.host.drivers import driver_files
from cachectl.layers.host.mounts import network_file_system
from cachectl.layers.stores.files import Files, Index
from cachectl.layers.stores.tree import OrphanRule, Shape

if TYPE_CHECKING:
    from cachectl.layers.formats import comgr_entries
else:
    comgr_entries = module("cachectl.layers.formats.comgr_entries")

LIBRARIES: Final = ("libamd_comgr.so",)
#: The makers of the drivers that use comgr.
_MAKERS: Final = ("AMD",)
TIMESTAMP: Final = "llvmcache.timestamp"
_TEMPORARY: Final = OrphanRule(
    regex(r"amdgpu-compiler-[0-9a-f]{6}\.tmp\.o"), "left by a program that was killed", private=True
)
_SHAPE: Final = Shape((regex("llvmcache-[0-9a-f]{64}"),), folders=False, orphans=(_TEMPORARY,))

_NOT_WHOLE: Final = (
    "is not exactly an output and a log of the stated lengths; comgr compiles it again at every run, and never "
    "replaces it"
)


_SETTINGS: Final = (
    switches.Setting("AMD_COMGR_CACHE", "0", "1", Severity.HARMLESS, "is not 0, so it does not switch the cache off"),
    switches.Setting(
        "AMD_COMGR_EMIT_VERBOSE_LOGS",
        "(?!)",
        "0",
        Severity.RECOMPILES,
        "is part of every key: entries stored without it are not hit",
    ),
)


class ComgrCodec(Codec):
    """An output and a log, each with its length before it."""

    form = "comgr-entry/1"

    def describe(self, data: bytes) -> Details:
        """Read the output that an entry holds."""
        return comgr_entries.describe(comgr_entries.output_of(data) or b"")

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is exactly an output and a log, and that bitcode and code objects are complete."""
        output = comgr_entries.output_of(data)
        if output is None:
            return Damage(Severity.RECOMPILES, _NOT_WHOLE)
        wrong = comgr_entries.complaint(output)
        return None if wrong is None else Damage(Severity.FAILS, f"{wrong}; comgr hands it on as it is")


class ComgrIndex(Index):
    """The file that records when entries were last dropped."""

    shapes = (Shape((regex(re.escape(TIMESTAMP)),), folders=False),)


class ComgrLookups(Lookups):
    """LLVM opens the file of an entry, or maps it, and renames a temporary to a new one."""

    files = EntryFiles()
    mapped = LIBRARIES


class ComgrCache(Layer):
    """Outputs of single commands of AMD's compiler: bitcode and code objects, one file each."""

    name = "comgr"
    title = "AMD comgr cache"
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
    store = Files(_SHAPE, codec=ComgrCodec(), index=ComgrIndex(), writers=LIBRARIES)
    about = About(
        on_network=facts.Hazard(
            Severity.RISKS,
            "programs map its files, and have been killed (SIGBUS) where others changed them; the newest releases keep "
            "no cache there unless AMD_COMGR_CACHE_DIR names it",
        ),
        lookups=ComgrLookups(),
    )

    def state(self) -> State:
        """Read the switch, which has one value, the policy, and the place."""
        if self.environment.get("AMD_COMGR_CACHE") == "0":
            return State(Condition.DISABLED, "AMD_COMGR_CACHE=0")
        if not self._is_here():
            return State(Condition.ABSENT, "no driver or GPU of AMD's is here, and none has left a cache")
        if (wrong := self._policy_complaint()) is not None:
            return State(Condition.DISABLED, f"AMD_COMGR_CACHE_POLICY cannot be read, so nothing is kept: {wrong}")
        if not (roots := self.roots()):
            return State(Condition.DISABLED, "LOCALAPPDATA is not set: there is no place to keep a cache")
        kind = network_file_system(roots[0].path, mounts=self.environment.mounts)
        if kind is not None and roots[0].source != "AMD_COMGR_CACHE_DIR":
            why = f"the default place is on a network file system ({kind}): the newest releases keep no cache there"
            return State(Condition.UNKNOWN, why, driver_files(self.environment, _MAKERS))
        value = self.environment.get("AMD_COMGR_CACHE")
        ignored = f"; AMD_COMGR_CACHE={value!r} is not 0" if value is not None else ""
        return State(Condition.ENABLED, f"on by default since ROCm 7{ignored}", driver_files(self.environment, _MAKERS))

    def _is_here(self) -> bool:
        registered = driver_files(self.environment, _MAKERS)
        return bool(registered) or self.environment.topology.exists() or any(root.exists for root in self.roots())

    def _policy_complaint(self) -> str | None:
        return comgr_entries.policy_complaint(self.environment.get("AMD_COMGR_CACHE_POLICY") or "")

    def diagnose(self) -> Iterator[facts.Finding]:
        """Yield problems with the variables."""
        if not self._is_here():
            if self.environment.get("AMD_COMGR_CACHE") == "0":
                yield switches.off(self, "AMD_COMGR_CACHE")
            return
        yield from switches.diagnosed_settings(self, _SETTINGS[:1])
        yield from self._unfit_policy()
        yield from self._unfit_place()
        yield from switches.diagnosed_settings(self, _SETTINGS[1:])

    def _unfit_policy(self) -> Iterator[facts.Finding]:
        policy, wrong = self.environment.get("AMD_COMGR_CACHE_POLICY"), self._policy_complaint()
        if policy is None or wrong is None:
            return
        # comgr's manual names this key, but LLVM, which reads it, expects another.
        corrected = policy.replace("prune_expiration=", "prune_after=")
        fix = None
        if comgr_entries.policy_complaint(corrected) is None:
            fix = f"export AMD_COMGR_CACHE_POLICY={shlex.quote(corrected)}"
        outcome = f"cannot be read ({wrong}): nothing is kept, and every run compiles"
        yield switches.misread(self, "AMD_COMGR_CACHE_POLICY", Severity.RECOMPILES, outcome, fix)

    def _unfit_place(self) -> Iterator[facts.Finding]:
        if self.environment.get("AMD_COMGR_CACHE_DIR") == "":
            outcome = "is empty: older releases keep nothing then, newer ones use the default place"
            yield switches.misread(self, "AMD_COMGR_CACHE_DIR", Severity.RECOMPILES, outcome)
        for root in self.roots():
            variable = root.source if root.source in ("AMD_COMGR_CACHE_DIR", "XDG_CACHE_HOME") else "HOME"
            value = self.environment.get(variable)
            if self.environment.platform != "win32" and value is not None and not Path(value).is_absolute():
                outcome = "is not absolute: each working folder gets a cache of its own"
                fix = f"export {variable}={shlex.quote(str(self.environment.absolute(value)))}" if value else None
                if variable == "HOME":
                    fix = f"export HOME={shlex.quote(str(self.environment.home))}"
                yield switches.misread(self, variable, Severity.RECOMPILES, outcome, fix)
