"""The CPU and GPUs of this machine as the kernel lists them, without loading a driver library.

Sources: proc(5); ``/proc/driver/nvidia``, written by NVIDIA's kernel module; the properties of KFD's topology
(``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``); ROCr's ``core/runtime/amd_filter_device.cpp`` and clr's
``rocclr/device/rocm/rocdevice.cpp`` (visible devices); MIOpen's ``src/include/miopen/handle.hpp`` (``GetDbBasename``)
and ``src/target_properties.cpp`` (variables).
"""

from __future__ import annotations

from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.lazy import regex

#: From this generation on, the runtime counts either single compute units or pairs.
_PAIRED = 10
#: Up to this number, compute units are written in decimal.
_DECIMAL = 64
_COUNT = regex(r"[1-9][0-9]{0,11}")
#: A property with a number of limited length.
_PROPERTY = regex(r"(?m)^(\w+) ([0-9]{1,20})$")
#: Where NVIDIA's kernel module states its version, below ``/proc``.
NVIDIA_VERSION = "driver/nvidia/version"
_NVIDIA = regex(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
_VERSION = regex(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})")


def amd_gpus(environment: Environment) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the distinct GPUs of this machine that the variables let MIOpen see.

    Each is its architecture, and the names of its databases, which contain the possible numbers of compute units.
    """
    # The kernel numbers the nodes.
    files = sorted(environment.topology.glob("*/properties"), key=lambda file: (len(file.parent.name), file))
    nodes = [{name: int(number) for name, number in _PROPERTY.findall(_text(file))} for file in files]
    # A CPU has none of these.
    gpus = [node for node in nodes if all(map(node.get, ("gfx_target_version", "simd_count", "simd_per_cu")))]
    # HIP numbers the remaining ones, and ignores an empty list.
    of_hip = environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES") or None
    for listed in (environment.get("ROCR_VISIBLE_DEVICES"), of_hip):
        gpus = gpus if listed is None else _listed(listed, gpus)
    devices_seen: dict[tuple[str, tuple[str, ...]], None] = {}
    for gpu in gpus:
        arch, counts = _seen_by_miopen(environment, gpu["gfx_target_version"], gpu["simd_count"] // gpu["simd_per_cu"])
        names = (f"{arch}_{count}" if count <= _DECIMAL else f"{arch}{count:x}" for count in counts)
        devices_seen[arch, tuple(names)] = None
    return tuple(devices_seen)


def _listed(text: str, gpus: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the GPUs in a list of numbers and identities, which ends at the first unknown item."""
    names = [(str(number), f"GPU-{gpu.get('unique_id', 0):016X}") for number, gpu in enumerate(gpus)]
    chosen: dict[int, None] = {}
    for item in map(str.strip, text.upper().split(",")):
        if (number := next((number for number, names_at in enumerate(names) if item in names_at), None)) is None:
            break
        chosen[number] = None
    return [gpus[number] for number in chosen]


def _seen_by_miopen(environment: Environment, version: int, units: int) -> tuple[str, tuple[int, ...]]:
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    if (enforced := _VERSION.fullmatch(environment.get("HSA_OVERRIDE_GFX_VERSION") or "")) is not None:
        major, minor, step = map(int, enforced.groups())
    named = environment.get("MIOPEN_DEBUG_ENFORCE_DEVICE") or environment.get("MIOPEN_DEVICE_ARCH")
    counts = (units // 2, units) if major >= _PAIRED else (units,)
    counted = environment.get("MIOPEN_DEVICE_CU") or ""
    return named or f"gfx{major}{minor:x}{step:x}", (int(counted),) if _COUNT.fullmatch(counted) else counts


def nvidia_driver(environment: Environment) -> str | None:
    """Return the version of NVIDIA's kernel driver, if it is loaded."""
    match = _NVIDIA.search(_text(environment.processes / NVIDIA_VERSION))
    return None if match is None else match[1]


def nvidia_gpus(environment: Environment) -> tuple[str, ...]:
    """Return the model of each NVIDIA GPU."""
    files = sorted((environment.processes / "driver" / "nvidia" / "gpus").glob("*/information"))
    return tuple(fields["Model"] for file in files if "Model" in (fields := _fields(_text(file))))


def processor(environment: Environment) -> tuple[str | None, str | None]:
    """Return the model of the first processor, and a digest of its features, independent of their order."""
    import hashlib

    text = _text(environment.processes / "cpuinfo") or _text(Path("/proc/cpuinfo"))
    fields = _fields(text.partition("\n\n")[0])
    features = sorted((fields.get("flags") or fields.get("Features") or "").split())
    digest = hashlib.sha256(" ".join(features).encode()).hexdigest()[:16] if features else None
    return fields.get("model name"), digest


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): " ".join(value.split()) for name, colon, value in pairs if colon}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
