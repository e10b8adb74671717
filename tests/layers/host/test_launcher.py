"""Only jobs whose ranks MPI does not connect are refused, whatever else a launcher's variables say."""

import subprocess
import sys
from pathlib import Path

import pytest
from homes import Home, OtherMpi
from support.layers import assigned

from cachectl.layers.base.environment import Environment
from cachectl.layers.host.launcher import innermost_launch, parallel_job

STAGE = (sys.executable, "-m", "cachectl", "stage", "--out", "warm.zip", "--")
#: The variables of srun for a step of four tasks.
STEP = "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0"


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that cachectl printed; launchers and MPI libraries print others."""
    return [line for line in done.stderr.splitlines() if "cachectl: " in line or "Traceback" in line]


@pytest.mark.cluster
def test_ranks_that_mpi_does_not_connect_do_nothing(home: Home, mpiexec: str, open_mpi: OtherMpi) -> None:
    """With MPICH's launcher and an mpi4py that loads Open MPI, each rank is rank 0 of 1."""
    (home.path / "warm.zip").write_bytes(b"what was there")
    done = home.run(mpiexec, "-n", "4", *STAGE, "sh", "-c", "mktemp ran-XXXXXX", check=False, **open_mpi.variables)
    assert (done.returncode, done.stdout, "suspicious" in done.stderr) == (1, "", False)
    (line,) = lines_of(done)
    assert "the launcher started 4 ranks (PMI_SIZE=4), but MPI does not connect them" in line
    assert "mpi4py uses Open MPI" in line
    # A program that stages by itself does nothing either.
    program = (sys.executable, str(home.programs / "mpi_job.py"), "warm.zip", "own.zip")
    done = home.run(mpiexec, "-n", "2", *program, check=True, **open_mpi.variables)
    assert done.stdout.count("NotConnected: the launcher started 2 ranks") == 2
    # As srun --mpi=none -n4 starts them: the MPI library finds nobody to connect to.
    done = home.run(*STAGE, "mktemp", "ran-XXX", check=False, **assigned(STEP))
    assert (done.returncode, "does not connect" in done.stderr, "srun --mpi=list" in done.stderr) == (1, True, True)
    assert (home.path / "warm.zip").read_bytes() == b"what was there"
    assert not [*home.path.glob("ran-*"), *home.path.glob("own.zip")]


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_connected_go_on(home: Home, mpiexec: str, open_mpi: OtherMpi, ranks: int) -> None:
    """So does a single rank within another launcher, whose variables it inherits."""
    pytest.importorskip("mpi4py")
    job: tuple[str, ...] = (open_mpi.mpiexec, "-n", str(ranks), *STAGE, "true")
    if ranks == 1:
        job = (mpiexec, "-n", "2", "sh", "-c", 'test "$PMI_RANK" != 0 || exec "$@"', "sh", *job)
    done = home.run(*job, check=True, **open_mpi.variables)
    assert ["0 entries added" in line for line in lines_of(done)] == [True]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("PMI_SIZE=1 PMI_RANK=0", None),
        ("PMI_SIZE=24 PMI_RANK=3 MPI_LOCALNRANKS=12", ("PMI_SIZE=24", 24, 3)),
        ("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1", ("MPI_LOCALNRANKS=2", 2, 1)),
        # One rank on each of two nodes: the node's number is not the job's.
        ("PMI_SIZE=2 PMI_RANK=0 MPI_LOCALNRANKS=1", ("PMI_SIZE=2", 2, 0)),
        ("OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=0", ("OMPI_COMM_WORLD_SIZE=8", 8, 0)),
        ("FLUX_JOB_SIZE=4 FLUX_TASK_RANK=1", ("FLUX_JOB_SIZE=4", 4, 1)),
        # PALS and PMIx may set only the rank: rank 0 cannot know.
        ("PALS_RANKID=5", ("PALS_RANKID=5", None, 5)),
        ("PMIX_RANK=0", None),
        # An mpiexec of one rank within a step, and one of several within a step of one task.
        (f"{STEP} PMI_SIZE=1 PMI_RANK=0", None),
        (f"{STEP} SLURM_STEP_NUM_TASKS=1 PMI_SIZE=6 PMI_RANK=0", ("PMI_SIZE=6", 6, 0)),
        (STEP, ("SLURM_STEP_NUM_TASKS=4", 4, 0)),
        # srun -n1 within a larger allocation; the batch script of an older and of a newer Slurm; the shell of salloc.
        (f"{STEP} SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1", None),
        (f"{STEP} SLURM_STEP_ID= SLURM_STEP_NUM_TASKS=", None),
        (f"{STEP} SLURM_STEP_ID=4294967291 SLURM_STEP_NUM_TASKS=", None),
        (f"{STEP} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1", None),
        # A batch script, with the rank that Slurm gives it.
        ("SLURM_NTASKS=64 SLURM_PROCID=0 SLURM_JOB_ID=1", None),
        pytest.param(f"PMI_SIZE=many PMI_RANK=\u00b2 FLUX_JOB_SIZE={'9' * 5000}", None, id="no numbers"),
    ],
)
def test_variables_of_launchers(
    tmp_path: Path, variables: str, expected: tuple[str, int | None, int | None] | None
) -> None:
    launch = innermost_launch(Environment(assigned(variables), home=tmp_path, cwd=tmp_path))
    assert (launch and (launch.setting, launch.ranks, launch.rank)) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("TORCHELASTIC_RUN_ID=none WORLD_SIZE=16 RANK=3 SLURM_NTASKS=2", ("WORLD_SIZE=16", 3)),
        ("WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 RANK=0 LOCAL_RANK=0", ("WORLD_SIZE=8", 0)),
        ("WORLD_SIZE=16 RANK=3", None),
        ("PYTEST_XDIST_WORKER=gw1 PYTEST_XDIST_WORKER_COUNT=4", ("PYTEST_XDIST_WORKER_COUNT=4", 1)),
        ("PYTEST_XDIST_WORKER=gw0 PYTEST_XDIST_WORKER_COUNT=1", None),
    ],
)
def test_ranks_without_mpi_are_a_parallel_job_that_mpi_need_not_connect(
    tmp_path: Path, variables: str, expected: tuple[str, int] | None
) -> None:
    environment = Environment(assigned(variables), home=tmp_path, cwd=tmp_path)
    job = parallel_job(environment)
    assert (job and (job.setting, job.rank), innermost_launch(environment)) == (expected, None)
