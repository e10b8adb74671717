"""The machine of a measurement, as far as the system shows it without starting a driver."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import plural
from cachectl.layers.host.drivers import opencl_drivers
from cachectl.layers.host.hardware import nvidia_gpus, processor


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, number of processors that a program here may use, GPUs that drivers list, system, OpenCL drivers.

    ``cpu`` is ``None`` if the system does not name it.
    """

    cpu: str | None
    cpus: int | None
    gpus: tuple[str, ...]
    system: str
    drivers: tuple[str, ...]

    @property
    def title(self) -> str:
        """Return it in a few words, the GPU first if there is one."""
        kinds = {gpu: self.gpus.count(gpu) for gpu in self.gpus}
        gpus = [gpu if count == 1 else f"{count}x {gpu}" for gpu, count in kinds.items()]
        usable = None if self.cpus is None else plural(self.cpus, "CPU")
        return ", ".join(filter(None, (*gpus, self.cpu, usable))) or self.system


def machine(environment: Environment) -> Machine:
    """Describe this machine from the files in ``environment.processes`` (``/proc``)."""
    return Machine(
        cpu=processor(environment)[0] or platform.processor() or None,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        gpus=nvidia_gpus(environment),
        system=f"{platform.system()} {platform.release()}",
        drivers=opencl_drivers(environment),
    )
