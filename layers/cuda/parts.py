"""Optional parts of the layer ``cuda``: portability, lookups, and tagged builds."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.facts import Entry, Removable, Root
from cachectl.layers.base.parts import EntryFiles, Facts, Lookups, Outlook, Portability, Tagging, named_parts
from cachectl.layers.cuda.entries import LIBRARIES, ComputeCache
from cachectl.layers.disk.plain import read_plain
from cachectl.layers.formats import compute_cache
from cachectl.layers.host.hardware import nvidia_driver, nvidia_gpus

_OPENCL: Final = ("libnvidia-opencl.so",)
_PLATFORMS: Final = ("NVIDIA CUDA",)

_DRIVER: Final = "NVIDIA driver"


class CudaPortability(Portability):
    """The driver writes its version and the architecture into its keys."""

    deciding: ClassVar[Mapping[str, str]] = {_DRIVER: "the driver's version is part of every key"}
    needed = (_DRIVER, "GPUs")

    def facts(self, environment: Environment) -> Facts:
        """Return the version of the driver that the kernel has loaded, and the models of the GPUs."""
        gpus = ", ".join(sorted(set(nvidia_gpus(environment)))) or None
        return {_DRIVER: nvidia_driver(environment), "GPUs": gpus}

    def outlook(self, versions: Mapping[str, str], there: Facts, environment: Environment) -> Outlook | None:
        """Judge an entry that another driver has compiled than the one of the place it comes from."""
        version, here = versions.get("driver"), nvidia_driver(environment)
        if version in (None, there.get(_DRIVER), here) or here is None:
            return None
        return Outlook(False, f"compiled by driver {version}, here {here}")  # noqa: FBT003


class CudaLookups(Lookups):
    """The driver opens the file of an entry to read it, and writes a new one in place."""

    files = EntryFiles()
    mapped = LIBRARIES

    def difference(self, alike: Sequence[Entry], event: Mapping[str, Any]) -> str:
        """Compare keys, which are plain text, with that of the nearest entry of the same half."""
        here = _parts(event["root"], event["key"]) if "key" in event else {}
        there = [parts for entry in alike if (parts := _parts(entry.root, entry.key)).keys() == here.keys()]
        named = [words for parts in there if (words := named_parts(parts, here)) is not None]
        if not here or not named:
            return super().difference(alike, event)
        return f"an entry of the same kernel is there, but it {min(named, key=len)}"


def _parts(root: str | Path, key: str) -> Mapping[str, str]:
    try:
        text = compute_cache.key_of(read_plain(Path(root, key)))
    except OSError:
        text = None
    return {} if text is None else compute_cache.parts(text)


class CudaTagging(Tagging):
    """A front end's key holds the source, a back end's names its constants."""

    drivers = _OPENCL
    platforms = _PLATFORMS

    def __init__(self, store: ComputeCache) -> None:
        self._store = store

    def find_tagged(
        self, root: Root, tag: re.Pattern[bytes], since: float, known: Container[str]
    ) -> Iterator[tuple[Removable, str]]:
        """Look for the tag in the keys."""
        del known
        tree = self._store.tree_of(root, "")
        yield from tree.tagged(tag, since, lambda leaf: compute_cache.key_of(tree.read_file(leaf.key) or b""))
