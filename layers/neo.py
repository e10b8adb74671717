"""The layer ``neo``: programs compiled by Intel's compute-runtime (NEO) and its ``ocloc``.

Sources, in intel/compute-runtime: ``programmers-guide/COMPILER_CACHE.md`` and
``shared/source/compiler_interface/{default_cache_config,compiler_cache,compiler_interface}.cpp`` with
``linux/{compiler_cache_linux,os_compiler_cache_helper}.cpp``; the contents are in
:mod:`cachectl.layers.formats.neo_binaries`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachectl.layers.base import declarations, facts, parts, switches
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import Unreachable
from cachectl.layers.base.lazy import module, regex
from cachectl.layers.base.store import Codec, Damage, counting, unreadable
from cachectl.layers.disk.atomic import overwrite
from cachectl.layers.disk.locks import file_lock
from cachectl.layers.disk.plain import open_plain, read_plain
from cachectl.layers.disk.presence import means_no_file
from cachectl.layers.formats.details import Details
from cachectl.layers.host import drivers
from cachectl.layers.host.driver_layers import DriverLayer, Limit
from cachectl.layers.stores.files import Files, Index
from cachectl.layers.stores.tree import Leaf, OrphanRule, Shape

if TYPE_CHECKING:
    from cachectl.layers.formats import neo_binaries
else:
    neo_binaries = module("cachectl.layers.formats.neo_binaries")

#: The drivers of OpenCL and Level Zero, and the stand-alone compiler.
LIBRARIES: Final = ("libigdrcl.so", "libze_intel_gpu.so", "libocloc.so")
ACCOUNT: Final = "config.file"
STATISTICS: Final = "stats"
_MAKER: Final = "Intel NEO"
_LEAF: Final = "neo_compiler_cache"
_DIGIT: Final = regex("[0-9a-f]")
_ENTRY: Final = regex(r"[0-9a-f]{16}\.(?:cl|l0|ocloc)_cache")
_BOOKS: Final = regex(r"stats|config\.file|[0-9a-f]{16}\.(?:trace|input)")
_TEMPORARY: Final = OrphanRule(regex(r"cl_cache\.[A-Za-z0-9]{6}"), "left by a killed driver", private=True)
_FLAT: Final = Shape((_ENTRY,), folders=False, orphans=(_TEMPORARY,))
_DEEP: Final = Shape((_DIGIT, _DIGIT, _ENTRY), folders=False)
#: The first and the last release in which any variable of the compiler switches the cache off.
_KILLED: Final = ((25, 31), (26, 31))
_NEVER: Final = "the driver compiles it again at every run, and never replaces it"
#: The driver's release, as it stands in the library.
_RELEASE: Final = regex(rb"\x00(\d\d)\.(\d\d?)\.\d{4,6}(?:\.\d+)?\x00")


class NeoCodec(Codec):
    """A program: zebin, SPIR-V, or the driver's wrapper around a device binary."""

    form = "neo-entry/1"

    def describe(self, data: bytes) -> Details:
        """Read a program of any kind."""
        return neo_binaries.describe(data)

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is a whole program."""
        wrong = neo_binaries.complaint(data)
        if wrong is None:
            return None
        if not data or neo_binaries.is_wrapper(data):
            return Damage(facts.Severity.RECOMPILES, f"{wrong}; {_NEVER}")
        return Damage(facts.Severity.FAILS, f"{wrong}; the driver takes it for a program, and the build fails")


class Account(Index):
    """The sum of the entries' bytes, which the driver keeps under a lock, and its debugging aids."""

    # The account and debugging aids are at the top, statistics at each level.
    shapes = (
        Shape((_BOOKS,), folders=False),
        Shape((_DIGIT, regex(STATISTICS)), folders=False),
        Shape((_DIGIT, _DIGIT, regex(STATISTICS)), folders=False),
    )

    def is_book(self, leaf: Leaf) -> bool:
        """Compare the length with that of the driver's files."""
        name = leaf.key.rpartition("/")[2]
        if name == STATISTICS:
            return leaf.bytes == neo_binaries.STATISTICS.size
        return name != ACCOUNT or leaf.bytes in (0, neo_binaries.ACCOUNT.size)

    @contextmanager
    def changing(self, store: Files, root: facts.Root) -> Iterator[bool]:
        """Hold the driver's lock around a change, then write the sum of all entries into the account.

        The sum is also written if the change fails. Raises :class:`Unsettled` where only that writing fails. Without an
        account, the driver counts the entries when it makes one. Yields whether the lock is held.
        """
        path = root.path / ACCOUNT
        with (
            file_lock(store.name, path, lock_timeout=store.environment.lock_timeout) as handle,
            counting(store.name, path, partial(self._count, store, root, handle)),
        ):
            yield handle is not None

    def _count(self, store: Files, root: facts.Root, handle: int | None) -> None:
        if handle is None:
            return
        # A longer file is not the driver's.
        old = os.pread(handle, neo_binaries.ACCOUNT.size + 1, 0)
        new = neo_binaries.ACCOUNT.pack(sum(leaf.bytes for leaf in store.leaves(root)))
        if len(old) in (0, len(new)) and old != new:
            overwrite(handle, old, new)

    def verify(self, store: Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Compare the account with the entries."""
        sizes: dict[str, int] = {}
        try:
            for leaf in store.leaves(root):
                kind = leaf.key.rpartition(".")[2]
                sizes[kind] = sizes.get(kind, 0) + leaf.bytes
        except Unreachable as error:
            yield store.to_finding(root, unreadable(root.path / ACCOUNT, error))
            return
        try:
            account = read_plain(root.path / ACCOUNT, limit=neo_binaries.ACCOUNT.size + 1)
        except OSError as error:
            if not means_no_file(error):
                yield store.to_finding(root, unreadable(root.path / ACCOUNT, error))
        else:
            if (complaint := _account_complaint(account, sizes)) is not None:
                fix = "nothing: the next put or purge in this layer counts again"
                if len(account) != neo_binaries.ACCOUNT.size:
                    fix = f"rm {shlex.quote(str(root.path / ACCOUNT))}"
                yield facts.Finding(store.name, root.path, ACCOUNT, facts.Severity.WASTES, "index", complaint, fix)


# An empty variable counts as not set.
_PLACES: Final = declarations.Rules(
    "NEO_CACHE_DIR",
    linux=(
        declarations.Rule("NEO_CACHE_DIR"),
        declarations.Rule("XDG_CACHE_HOME", _LEAF),
        declarations.Rule("HOME", f".cache/{_LEAF}", source="default (HOME)"),
    ),
    windows=(declarations.Rule("NEO_CACHE_DIR"), declarations.Rule("LOCALAPPDATA", f"NEO/{_LEAF}")),
    macos=(),
)


class NeoLookups(parts.Lookups):
    """The driver opens the file of an entry to read it, and renames a temporary to a new one.

    From release 26.14 on, it also counts hits and misses in a file of the cache, if a variable says so.
    """

    files = parts.EntryFiles()
    mapped = LIBRARIES
    by = "the driver's own counters"
    variables: Mapping[str, str] = {"NEO_CACHE_STATS": "1"}

    def counters(self, environment: Environment) -> tuple[int, int] | None:
        """Return the hits and misses of the cache, if it has the file."""
        for root in _PLACES.roots(environment):
            with suppress(OSError):
                return neo_binaries.read_statistics(read_plain(root.path / STATISTICS, limit=64))
        return None


class NeoCompilerCache(DriverLayer):
    """Programs compiled by Intel's driver for OpenCL or Level Zero, one file each."""

    name = "neo"
    title = "Intel NEO compiler cache"
    makers = (_MAKER,)
    settings = (
        switches.Setting(
            "NEO_CACHE_PERSISTENT",
            r"\s*0\s*",
            r"\s*[+-]?0*[1-9].*",
            facts.Severity.RECOMPILES,
            "is no number: the driver takes it for 0, and keeps nothing",
            "export NEO_CACHE_PERSISTENT=1",
            disables=True,
        ),
    )
    limit = Limit("NEO_CACHE_MAX_SIZE")
    # The driver reads it once for each device.
    switch = declarations.EnvSwitch("NEO_CACHE_PERSISTENT", off="0", read=declarations.at_load(*LIBRARIES))
    places = _PLACES
    store = Files(_FLAT, _DEEP, codec=NeoCodec(), index=Account(), writers=LIBRARIES, unread=_NEVER)
    about = parts.About(lookups=NeoLookups())

    def diagnose(self) -> Iterator[facts.Finding]:
        """Add several drivers."""
        yield from drivers.several_drivers(self, _MAKER)
        yield from super().diagnose()

    def faults(self) -> Iterator[switches.Fault]:
        """Add a missing folder, and variables of the compiler."""
        yield from super().faults()
        yield from self._folder_faults()
        yield from self._compiler_faults()

    def _folder_faults(self) -> Iterator[switches.Fault]:
        """Yield a missing folder: the driver makes its own, and on Linux .cache above it, but none that is named."""
        for root in self.roots():
            above = {"NEO_CACHE_DIR": 0, "XDG_CACHE_HOME": 1}.get(root.source, 2)
            folder = (root.path, *root.path.parents)[above]
            if not folder.is_dir():
                message = f"{folder} is not there ({root.source}): the driver keeps nothing, and every run compiles"
                severity, fix = facts.Severity.RECOMPILES, f"mkdir -p {shlex.quote(str(folder))}"
                found = facts.Finding(self.name, folder, None, severity, "folder", message, fix)
                yield facts.Condition.DISABLED, found

    def _compiler_faults(self) -> Iterator[switches.Fault]:
        variable = next((name for name in sorted(self.environment.variables) if name.startswith("IGC_")), None)
        release = None if variable is None else self._release()
        if variable is None or (release is not None and release > _KILLED[1]):
            return
        condition = facts.Condition.UNKNOWN if release is None else facts.Condition.DISABLED
        outcome = "switches the cache off in compute-runtime 25.31 to 26.31, as every IGC_ variable does"
        if release is None or release >= _KILLED[0]:
            yield condition, switches.misread(self, variable, facts.Severity.RECOMPILES, outcome)
        else:
            outcome = "is not in the keys of this release: entries compiled with another value are served"
            yield None, switches.misread(self, variable, facts.Severity.RISKS, outcome)

    def _release(self) -> tuple[int, int] | None:
        """Return the driver's release, read from its library, which is not loaded; ``None`` if it is not known."""
        import mmap

        if (library := drivers.only_library(self.environment, _MAKER)) is not None:
            # A library without a folder is found by the system's linker alone.
            with (
                suppress(OSError, ValueError),
                open(open_plain(library, follow=True), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                if (match := _RELEASE.search(content)) is not None:
                    return int(match[1]), int(match[2])
        return None

    def relocate(self, folder: Path) -> facts.Switch:
        """Return the path, and the folder to make first: the driver keeps nothing in a missing folder."""
        place = folder / "neo"
        return facts.Switch(self.name, {"NEO_CACHE_DIR": str(place)}, read_at_load=LIBRARIES, makes=(place,))


def _account_complaint(account: bytes, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with the account, given the bytes of the entries of each kind.

    A driver that counts again counts only its own kind, so the account may be smaller than the sum.
    """
    if not account:
        return None
    if len(account) != neo_binaries.ACCOUNT.size:
        return "the account has another length than the driver gives it: it counts from a wrong number"
    (counted,) = neo_binaries.ACCOUNT.unpack(account)
    total = sum(sizes.values())
    if counted > total:
        return f"the account says {counted} bytes where there are {total}: the driver drops entries too early"
    if counted < min(sizes.values(), default=0):
        return f"the account says {counted} bytes where there are {total}: the cache grows beyond its limit"
    return None
