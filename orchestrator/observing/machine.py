"""What a measurement was made on, as far as the system shows it without starting a driver."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.drivers import opencl_drivers


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, how many of them a program here may use, GPUs that drivers list, system, OpenCL drivers.

    ``cpu`` is ``None`` where the system does not name it.
    """

    cpu: str | None
    cpus: int | None
    gpus: tuple[str, ...]
    system: str
    drivers: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name it in a few words, the GPU first where there is one."""
        kinds = {gpu: self.gpus.count(gpu) for gpu in self.gpus}
        gpus = [gpu if count == 1 else f"{count}x {gpu}" for gpu, count in kinds.items()]
        usable = None if self.cpus is None else "1 CPU" if self.cpus == 1 else f"{self.cpus} CPUs"
        return ", ".join(filter(None, (*gpus, self.cpu, usable))) or self.system


def machine(environment: Environment) -> Machine:
    """Describe this machine; what it has is read from ``environment.processes`` (``/proc``)."""
    proc = environment.processes
    return Machine(
        cpu=next(_fields(proc / "cpuinfo", "model name"), None) or platform.processor() or None,
        cpus=_usable(),
        gpus=tuple(
            model
            for file in sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information"))
            for model in _fields(file, "Model")
        ),
        system=f"{platform.system()} {platform.release()}",
        drivers=opencl_drivers(environment),
    )


def _usable() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _fields(file: Path, name: str) -> Iterator[str]:
    """Yield the values of ``name: value`` lines."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            yield " ".join(value.split())
