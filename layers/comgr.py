"""The layer ``comgr``: the cache of AMD's code object manager, used by ROCm's OpenCL and by hipRTC.

Sources, in ROCm/llvm-project: ``amd/comgr/src/{comgr-env,comgr-cache,comgr-cache-command}.cpp`` and
``amd/comgr/README.md``; LLVM's ``Support/{Caching,CachePruning,Path}``, and its AMDGPU usage guide (code objects).
"""

from __future__ import annotations

import re
import shlex
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cachectl.layers.base.lazy import regex
from cachectl.layers.base.processes import TEMPORARY_FOLDERS
from cachectl.layers.core.codes import CLOSED
from cachectl.layers.core.declarations import HERE, EnvSwitch, Family, Places, Rule, at_load
from cachectl.layers.core.finding import FAILS, RECOMPILES, RISKS, Finding, Hazard
from cachectl.layers.core.layer import Fault, misread
from cachectl.layers.core.parts import About, Lookups
from cachectl.layers.core.root import DISABLED, ENABLED, UNKNOWN, State
from cachectl.layers.core.store import Codec, Damage, Store
from cachectl.layers.disk.place import why_closed
from cachectl.layers.host import drivers

if TYPE_CHECKING:
    from cachectl.layers.formats import details

LIBRARIES = ("libamd_comgr.so",)
TIMESTAMP = "llvmcache.timestamp"
#: The file systems that LLVM considers remote (``Support/Unix/Path.inc``, ``is_local``): NFS, SMB and CIFS.
_NETWORK = frozenset({"nfs", "nfs4", "smbfs", "cifs", "smb3"})
_NOT_WHOLE = "is not an output and a log of the stated lengths; comgr recompiles it in every run and never replaces it"
_LENGTH = struct.Struct("<Q")
_AMDGPU = 0xE0
_METADATA = 32
#: Suffix of the symbol of a kernel's descriptor.
_DESCRIPTOR = ".kd"
#: The key in the metadata, followed by a MessagePack string of less than 32 bytes, or less than 256.
_TARGET = regex(rb"\xadamdhsa\.target(?:[\xa0-\xbf]|\xd9.)[\w-]*?--([\w:+-]+)", re.DOTALL)
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"

#: Roughly, an integer of at most 64 bits in any base that a prefix can name.
_INTEGER = "(?:0[xX][0-9a-fA-F]{1,16}|0[bB][01]{1,64}|0[oO]?[0-7]{1,21}|0|[1-9][0-9]{0,18})"
#: The pattern of each setting's value, and how to describe a value that does not match it.
_DURATION = f"{_INTEGER}[smh]", "not an integer with s, m or h"
_VALUES = {
    "prune_interval": _DURATION,
    "prune_after": _DURATION,
    "cache_size": ("(?:[0-9]{1,2}|100)%", "not an integer with %"),
    "cache_size_bytes": (f"{_INTEGER}[kmgKMG]?", "not an integer, with or without k, m or g"),
    "cache_size_files": (_INTEGER, "not an integer"),
}


class ComgrCodec(Codec):
    """An output and a log, each preceded by its length (``comgr-cache.cpp``)."""

    form = "comgr-entry/1"

    def describe(self, data: bytes) -> details.Details:
        """Return the kind, kernels and device of the output that an entry holds."""
        from cachectl.layers.formats import details, device_binaries, elf

        output = output_of(data) or b""
        if (known := device_binaries.describe(output)) is not None:
            return known
        if output.startswith(_BUNDLE):
            return details.of_kind("offload bundle")
        file = elf.read_elf(output)
        if file is None or file.machine != _AMDGPU:
            return details.of_kind("unknown" if file is None else "ELF")
        descriptors = (name.removesuffix(_DESCRIPTOR) for name, _ in file.symbols() if name.endswith(_DESCRIPTOR))
        targets = (_TARGET.search(described) for _, kind, described in file.notes() if kind == _METADATA)
        device = next((target[1].decode() for target in targets if target is not None), None)
        return details.of_kind("code object", details.names_or_none(descriptors), device)

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is exactly an output and a log, and that bitcode and code objects are complete."""
        from cachectl.layers.formats import device_binaries

        output = output_of(data)
        if output is None:
            return Damage(RECOMPILES, _NOT_WHOLE)
        # A translation to SPIR-V may end differently from the programs that drivers return.
        wrong = None if output.startswith(device_binaries.SPIRV) else device_binaries.complaint(output)
        return None if wrong is None else Damage(FAILS, f"holds a program that {wrong}; comgr uses it unchecked")


class ComgrCache(drivers.DriverLayer):
    """Outputs of single commands of AMD's compiler: bitcode and code objects, one per file."""

    name = "comgr"
    title = "AMD comgr cache"
    makers = ("AMD",)
    switch = EnvSwitch("AMD_COMGR_CACHE", "0", "1", outcome="is not 0, so the cache stays on", read=at_load(*LIBRARIES))
    others = (
        EnvSwitch(
            "AMD_COMGR_EMIT_VERBOSE_LOGS", "(?!)", "0", RECOMPILES, "is in every key: entries without it are not hit"
        ),
    )
    family = Family("(?:AMD_)?COMGR_(?:DISABLE_|NO_)?CACHE.*", "AMD_COMGR_CACHE_POLICY")
    # As in comgr and LLVM, an empty or relative path is relative to the working directory.
    places = Places(
        "AMD_COMGR_CACHE_DIR",
        linux=(
            Rule("AMD_COMGR_CACHE_DIR"),
            Rule("XDG_CACHE_HOME", "comgr", empty=HERE),
            Rule("HOME", ".cache/comgr", empty=HERE, source="default (HOME)"),
            Rule("", ".cache/comgr", source="default (the account's home)"),
        ),
        windows=(Rule("AMD_COMGR_CACHE_DIR"), Rule("LOCALAPPDATA", "comgr")),
        macos=(),
    )
    about = About(
        on_network=Hazard(
            RISKS,
            "programs map its files, and were killed (SIGBUS) when others changed them; the newest releases keep no "
            "cache on NFS and SMB unless AMD_COMGR_CACHE_DIR names it",
        ),
        # LLVM opens or maps the file of an entry that it reads, and sets its access time. It renames new entries.
        lookups=Lookups(files=True, mapped=LIBRARIES),
    )

    def load_store(self) -> Store:
        """Return the store of the entries and of the file that records the last pruning."""
        from cachectl.layers.stores.files import Files
        from cachectl.layers.stores.tree_read import Shape, resembling

        temporary = regex(r"amdgpu-compiler-[0-9a-f]{6}\.tmp\.o")
        left = Shape((temporary,), because="left by a program that was killed", private=True)
        timestamp = Shape((regex(re.escape(TIMESTAMP)),), sums=True)
        # The names in ThinLTO's caches have capital letters.
        like = resembling(r"llvmcache[\w.]*-[0-9a-f]{8,}[\w.]*")
        return Files("llvmcache-[0-9a-f]{64}", left, timestamp, like, codec=ComgrCodec(), writers=LIBRARIES)

    def is_here(self) -> bool:
        """Return whether there is a driver, a GPU or a cache."""
        return self.environment.topology.exists() or super().is_here()

    def state(self) -> State:
        """Return the state, which on a network file system depends on the release."""
        from cachectl.layers.base import processes

        state = super().state()
        for root in self.roots() if state.condition is ENABLED else ():
            kind = processes.network_file_system(self.environment, root.path, _NETWORK)
            if kind is not None and root.source != self.places.variable:
                where = f"the default place is on a network file system ({kind})"
                return State(UNKNOWN, f"{where}: the newest releases keep no cache there", state.drivers)
        return state

    def faults(self) -> Iterator[Fault]:
        """Add a policy that LLVM cannot read, and an empty path."""
        yield from super().faults()
        variable = "AMD_COMGR_CACHE_POLICY"
        policy = self.environment.get(variable) or ""
        if (wrong := policy_complaint(policy)) is not None:
            # comgr's manual documents this key; LLVM, which reads the policy, expects another one.
            corrected = policy.replace("prune_expiration=", "prune_after=")
            works = policy_complaint(corrected) is None
            fix = f"export {variable}={shlex.quote(corrected)}" if works else None
            outcome = f"cannot be read ({wrong}): nothing is stored, and every run compiles"
            yield DISABLED, misread(self, variable, RECOMPILES, outcome, fix)
        if self.environment.get(self.places.variable) == "":
            outcome = "is empty: older releases then store nothing, newer ones use the default place"
            yield None, misread(self, self.places.variable, RECOMPILES, outcome)

    def diagnose(self) -> Iterator[Finding]:
        """Add an unusable temporary folder, in which comgr makes one for each compilation (``comgr-compiler.cpp``)."""
        yield from super().diagnose()
        temporary, home = self.environment.named_temporary, self.environment.home_folder
        reason = why_closed(temporary, home) if temporary.is_dir() else f"{temporary} does not exist"
        if reason is not None and self.is_here():
            open_folders = (folder for folder in TEMPORARY_FOLDERS if not why_closed(folder, home))
            fix = next((f"export TMPDIR={folder}" for folder in open_folders), "")
            message = f"{reason}: AMD's compiler has no temporary folder and cannot compile"
            yield CLOSED.finding(self.name, temporary, message, fix or "set TMPDIR to a folder", severity=RISKS)


def output_of(data: bytes) -> bytes | None:
    """Return the output that an entry holds; ``None`` if the entry is not exactly an output and a log."""
    from cachectl.layers.formats import details

    try:
        (length,) = details.fields(_LENGTH, data)
        output = details.part(data, _LENGTH.size, length)
        (log,) = details.fields(_LENGTH, data, _LENGTH.size + length)
    except details.Cut:
        return None
    return output if 2 * _LENGTH.size + length + log == len(data) else None


def policy_complaint(policy: str) -> str | None:
    """Return why LLVM cannot read a policy, which leaves comgr without a cache; ``None`` if it can."""
    for setting in policy.removesuffix(":").split(":") if policy else ():
        key, _, value = setting.partition("=")
        pattern, what = _VALUES.get(key, ("", ""))
        if not what:
            return f"unknown setting {key!r}"
        if not re.fullmatch(pattern, value):
            return f"{setting} is {what}"
    return None
