"""The size of a parallel job, from the variables that the launcher gives every rank.

If the launcher belongs to one MPI and the MPI library to another, they do not connect: MPI gives each rank a world of
size 1. Only the launcher's own variables show that there are other ranks.

Sources: Hydra of MPICH 5.0 and of Intel MPI 2021, and Open MPI 5.0 (tried); Open MPI's manual, "Environment variables
set for MPI applications"; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; flux-core, src/broker/runat.c: the script of a batch
job does not get the variables of the job itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from cachectl.layers.base.environment import Environment

#: Variables of the number of ranks and of the own rank: Open MPI, MPICH and its kin, MVAPICH, PALS, LSF, Flux, Slurm,
#: PMIx, and Hydra for one node. If the number is missing, a rank above zero shows that there are several.
RANKS: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PALS_SIZE", "PALS_RANKID"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
#: SLURM_NTASKS also describes the allocation of a batch script, which is one process; these describe a step of srun.
_SLURM: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
#: The same variables in the order in which they count: an ``mpiexec`` may run within a step of Flux or Slurm, and may
#: pass the step's variables on.
_BY_WEIGHT: Final = (
    tuple(pair for pair in RANKS if pair[0] not in {"FLUX_JOB_SIZE", "SLURM_NTASKS", "MPI_LOCALNRANKS"}),
    (("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),),
    (("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),),
    (_SLURM,),
)
#: Slurm numbers the batch script, the interactive shell and other steps of its own from here upward.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
#: Limit on the digits of a number of ranks.
_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of several ranks: the setting that shows it, the number of ranks, and the rank of this process.

    ``ranks`` and ``rank`` are ``None`` if the launcher does not set them.
    """

    setting: str
    ranks: int | None
    rank: int | None


def launched(environment: Environment) -> Launch | None:
    """Return the launch of this job; ``None`` if there is no launcher, or if it started a single rank."""
    for pairs in _BY_WEIGHT:
        if pairs == (_SLURM,) and not _in_slurm_step(environment):
            continue
        found = list(_launches(environment, pairs))
        if found:
            # Variables of an outer launcher are passed on, so they do not show which of two is the inner one.
            least = min(found, key=lambda launch: launch.ranks or 0)
            return least if (least.ranks or 0) > 1 else None
    return next(_later_ranks(environment), None)


def number_of(environment: Environment, variable: str) -> int | None:
    """Return the number in a variable; ``None`` if it is not set or no number."""
    value = environment.get(variable) or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None


def _launches(environment: Environment, pairs: Iterable[tuple[str, str]]) -> Iterator[Launch]:
    for size, rank in pairs:
        ranks = number_of(environment, size)
        if ranks is not None:
            yield Launch(f"{size}={ranks}", ranks, number_of(environment, rank))


def _later_ranks(environment: Environment) -> Iterator[Launch]:
    """Yield a launch for each rank above zero; Slurm's rank counts only within a step."""
    for _, variable in RANKS:
        rank = number_of(environment, variable)
        if rank and (variable != _SLURM[1] or _in_slurm_step(environment)):
            yield Launch(f"{variable}={rank}", None, rank)


def _in_slurm_step(environment: Environment) -> bool:
    step = number_of(environment, "SLURM_STEP_ID")
    return step is not None and step < _FIRST_SPECIAL_STEP
