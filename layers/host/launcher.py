"""The size of a parallel job, from the variables that the launcher gives every rank.

If the launcher belongs to one MPI and the MPI library to another, they do not connect: MPI gives each rank a world of
size 1. Only the launcher's own variables show that there are other ranks.

Sources: Hydra of MPICH 5.0 and of Intel MPI 2021, and Open MPI 5.0 (tried); Open MPI's manual, "Environment variables
set for MPI applications"; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; flux-core, src/broker/runat.c: the script of a batch
job does not get the variables of the job itself.
"""

from __future__ import annotations

from cachectl.layers.base.environment import Environment

#: Variables of the number of ranks and of the own rank: Open MPI, MPICH and its kin, MVAPICH, PALS, LSF, Flux, Slurm,
#: PMIx, and Hydra for one node. If the number is missing, a rank above zero shows that there are several.
RANKS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PALS_SIZE", "PALS_RANKID"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
#: Variables of the own rank among those of the same node.
LOCAL_RANKS = frozenset(
    {"OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"}
    | {"FLUX_TASK_LOCAL_ID", "MPI_LOCALRANKID"}
)
#: This describes the allocation of a batch script, which is one process; the row before it describes a step of srun.
_ALLOCATED = "SLURM_NTASKS"
#: The variables that count less than the others, in this order: an ``mpiexec`` may run within a step of Flux or Slurm,
#: and may pass the step's variables on.
_LATER = ("MPI_LOCALNRANKS", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")
#: Limit on the digits of a number of ranks.
_DIGITS = 12


#: A launch of several ranks: the setting that shows it, the number of ranks, and the rank of this process; ``None`` for
#: what the launcher does not set.
Launch = tuple[str, int | None, int | None]


def launched(environment: Environment) -> Launch | None:
    """Return the launch of this job; ``None`` if there is no launcher, or if it started a single rank."""
    counted: list[tuple[int, int, Launch]] = []
    uncounted: list[Launch] = []
    for size, rank in RANKS:
        ranks, own = number_of(environment, size), number_of(environment, rank)
        if ranks is not None and size != _ALLOCATED:
            weight = _LATER.index(size) if size in _LATER else -1
            counted.append((weight, ranks, (f"{size}={ranks}", ranks, own)))
        elif own:
            uncounted.append((f"{rank}={own}", None, own))
    if not counted:
        return uncounted[0] if uncounted else None
    # Variables of an outer launcher are passed on, so they do not show which of two is the inner one.
    _, ranks, least = min(counted, key=lambda item: item[:2])
    return least if ranks > 1 else None


def number_of(environment: Environment, variable: str) -> int | None:
    """Return the number in a variable; ``None`` if it is not set or no number."""
    value = environment.get(variable) or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None
