"""The size of a parallel job, from the variables that the launcher sets for every rank.

If launcher and MPI library belong to different MPIs, each rank gets a world of size 1, and only the launcher's
variables reveal the other ranks.

Sources: Hydra of MPICH 5.0 and of Intel MPI 2021, and Open MPI 5.0 (tried); Open MPI's manual, "Environment variables
set for MPI applications"; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; flux-core, src/broker/runat.c: a batch script does
not get the variables of its job. PyTorch, torch/distributed/elastic/agent/server; pytest-xdist, src/xdist/remote.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cachectl.layers.base import processes
from cachectl.layers.base.environment import Environment

#: Variables with the number of ranks and the own rank: Open MPI, MPICH and its relatives, MVAPICH, PALS, LSF, Flux,
#: Slurm, PMIx, and Hydra for one node. Without the number, a rank above zero shows that there are several.
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
#: The same variables of programs that start ranks without MPI, by another variable that only they set. A worker of
#: pytest-xdist is called ``gw3`` and has the number 3.
OTHERS = {
    "TORCHELASTIC_RUN_ID": ("WORLD_SIZE", "RANK"),
    # PyTorch reads these variables if another launcher sets them (``init_method="env://"``).
    "MASTER_ADDR": ("WORLD_SIZE", "RANK"),
    "LOCAL_WORLD_SIZE": ("WORLD_SIZE", "RANK"),
    "PYTEST_XDIST_WORKER": ("PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_WORKER"),
}
#: Variables with the own rank among those of the same node.
LOCAL_RANKS = frozenset(
    {"OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"}
    | {"FLUX_TASK_LOCAL_ID", "MPI_LOCALRANKID", "LOCAL_RANK"}
)
#: The size of the allocation of a batch script, which is a single process; the row before is about a step of srun.
_ALLOCATED = "SLURM_NTASKS"
#: The variables with the lowest precedence: an ``mpiexec`` within a step of Flux or Slurm may pass on the step's.
_LATER = {"MPI_LOCALNRANKS": 1, "FLUX_JOB_SIZE": 2, "SLURM_STEP_NUM_TASKS": 3}
#: Limit on the digits of a number of ranks.
_DIGITS = 12


class Launch(NamedTuple):
    """The variables in which a launcher sets the number of ranks and the own rank, and both numbers if it does."""

    size_variable: str
    rank_variable: str
    ranks: int | None
    rank: int | None

    @property
    def is_parallel(self) -> bool:
        """Return whether there are several ranks."""
        return (self.ranks or 0) > 1 or (self.rank or 0) > 0

    @property
    def setting(self) -> str:
        """Return the variable that shows the launch, with its value."""
        return f"{self.rank_variable}={self.rank}" if self.ranks is None else f"{self.size_variable}={self.ranks}"


def _launches(environment: Environment, pairs: Iterable[tuple[str, str]] = RANKS) -> Iterator[Launch]:
    for size, rank in pairs:
        yield Launch(size, rank, number_of(environment, size), number_of(environment, rank))


def parallel_job(environment: Environment) -> Launch | None:
    """Return a launch of several ranks, which share the same roots; ``None`` if there is none.

    The allocation of a batch script, which is about to start ranks, counts; so do child processes of a rank.
    """
    inner = (pair for witness, pair in OTHERS.items() if environment.get(witness) is not None)
    return next((launch for launch in _launches(environment, (*inner, *RANKS)) if launch.is_parallel), None)


def own_folder(environment: Environment, job: Launch) -> str:
    """Return a shell expression for a private folder of each rank, an error if the variable of the rank is not set.

    If the home is on a network file system, the folder is on the node's disk.
    """
    is_remote = processes.network_file_system(environment, environment.home_folder) is not None
    folder = "$(mktemp -d)" if is_remote else "$HOME/.cachectl"
    node = "$(hostname)-" if job.rank_variable in LOCAL_RANKS else ""
    return f'"{folder}/rank{node}${{{job.rank_variable}:?}}"'


def innermost_launch(environment: Environment) -> Launch | None:
    """Return the launch that made this process one of several ranks; ``None`` without one, or for a single rank."""
    launches = [launch for launch in _launches(environment) if launch.size_variable != _ALLOCATED]
    counted = [launch for launch in launches if launch.ranks is not None]
    if not counted:
        return next((launch for launch in launches if launch.is_parallel), None)
    # An outer launcher's variables are inherited, so they do not show which of two launches is the inner one.
    innermost = min(counted, key=lambda launch: (_LATER.get(launch.size_variable, 0), launch.ranks or 0))
    return innermost if (innermost.ranks or 0) > 1 else None


def number_of(environment: Environment, variable: str) -> int | None:
    """Return the number in a variable; ``None`` if it is not set or not a number."""
    value = (environment.get(variable) or "").removeprefix("gw")
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None
