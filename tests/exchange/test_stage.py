"""Staging in MPI jobs."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Home, make_home
from support.bundles import listed
from tiers import real

pytestmark = pytest.mark.cluster
RANKS = 2


@dataclass(frozen=True)
class Jobs:
    """Jobs on two nodes, ``a`` and ``b``, in one home on a file system that both share."""

    home: Home
    mpiexec: str

    def run(self, options: str, *command: str, check: bool = True) -> str:
        """Run ``stage`` on both nodes; return its status and standard error."""
        words = [self.mpiexec]
        for node in "ab":
            scratch = self.home.path / "scratch" / node
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            words += ["-n", str(RANKS), "env", f"CACHECTL_NODE={node}", f"TMPDIR={scratch}"]
            words += [*CACHECTL, "stage", *options.split(), "--", *command, ":"]
        done = self.home.run(*words[:-1], check=check)
        return f"{done.returncode}\n{done.stderr}"

    def ranks(self, name: str, options: str) -> tuple[str, list[dict[str, Any]]]:
        """Run the kernels on every rank; return standard error, and what each rank has found and left."""
        folder = self.home.path / name
        folder.mkdir()
        said = self.run(options, sys.executable, f"{self.home.programs}/rank.py", str(folder))
        return said, [json.loads(file.read_text()) for file in folder.glob("*.json")]

    def left(self) -> list[str]:
        return [path.name for path in (self.home.path / "scratch").glob("*/*")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, mpiexec: str) -> Jobs:
    """Return a home in which a cold job has run, and written ``warm.zip``."""
    jobs = Jobs(make_home(tmp_path_factory.mktemp("mpi") / "home"), mpiexec)
    said, ranks = jobs.ranks("cold", "--out warm.zip")
    assert len(ranks) == 2 * RANKS
    assert all(rank["before"]["rows"] == {} for rank in ranks if rank["began"] == min(r["began"] for r in ranks))
    assert "warm.zip: " in said
    # Other tests of this home may leave a cache there.
    assert (jobs.left(), (jobs.home.path / ".cache").exists()) == ([], False)
    return jobs


@real
def test_a_cold_job_writes_each_entry_once_and_no_rank_of_a_staged_job_compiles(jobs: Jobs) -> None:
    file = jobs.home.path / "warm.zip"
    items = listed(file)
    assert {layer for layer, _ in items} == {"loopy", "pyopencl-invoker", "pocl"}
    assert (sum(layer == "pocl" for layer, _ in items), len(set(items))) == (3, len(items))
    before = file.read_bytes()
    said, ranks = jobs.ranks("warm", f"warm.zip --digest {hashlib.sha256(before).hexdigest()} --out warm.zip")
    assert sorted(rank["node"] for rank in ranks) == ["a"] * RANKS + ["b"] * RANKS
    assert all(rank["after"] == rank["before"] and rank["before"]["pocl"] for rank in ranks)
    assert "entries on 2 of 2 nodes" in said
    # One rank of each node was watched; a line that two nodes have is said once.
    assert re.search(r"CACHECTL_NODE=[ab]\)( and 1 more)?: [1-9]\d* hits, 0 misses, [\d.]+ s", said), said
    # Nothing was new, so the file stays.
    assert file.read_bytes() == before
    assert jobs.left() == []


@real
def test_what_is_new_on_each_node_is_sent_and_brought_back(tmp_path: Path, mpiexec: str) -> None:
    jobs = Jobs(make_home(tmp_path / "home"), mpiexec)
    program = (sys.executable, f"{jobs.home.programs}/large.py")
    assert "large.zip: 2 entries added" in jobs.run("--out large.zip", *program)
    file = jobs.home.path / "large.zip"
    assert file.stat().st_size > 18 << 20

    script = f'{" ".join(program)} > "$(mktemp {tmp_path}/received-XXXXXX)"'
    said = jobs.run("large.zip --trust --out again.zip", "sh", "-c", script)
    assert "staged 4 entries on 2 of 2 nodes" in said
    received = [json.loads(path.read_text())["there"] for path in tmp_path.glob("received-*")]
    assert received == [["a", "b"]] * 2 * RANKS
    assert listed(jobs.home.path / "again.zip") == listed(file)


def test_new_entries_that_cannot_be_read_end_no_job(tmp_path: Path, mpiexec: str) -> None:
    jobs = Jobs(make_home(tmp_path / "home"), mpiexec)
    folder = f"$POCL_CACHE_DIR/AB/{'C' * 37}"
    cut = f'test "$CACHECTL_NODE" = a || {{ mkdir -p {folder} && echo cut >{folder}/program.bc; }}'
    assert "new.zip: 0 entries added" in jobs.run("--out new.zip", "sh", "-c", cut)
    assert jobs.left() == []


def test_a_disk_that_fills_up_while_others_send_keeps_nobody(tmp_path: Path, mpiexec: str) -> None:
    """Rank 0 can write only a part of what the other node sends."""
    home = make_home(tmp_path / "home")
    large = f'test "$CACHECTL_NODE" = a || exec {sys.executable} {home.programs / "large.py"}'
    stage = (*CACHECTL, "stage", "--out", "lost.zip", "--", "sh", "-c", large)
    a = ("-n", "1", "env", "CACHECTL_NODE=a", "sh", "-c", 'ulimit -f 12000 && exec "$@"', "sh", *stage)
    done = home.run(mpiexec, *a, ":", "-n", "1", "env", "CACHECTL_NODE=b", *stage, check=False)
    assert done.returncode == 0, done.stderr
    assert "the new entries of a node are lost: File too large" in done.stderr
    assert not (home.path / "lost.zip").exists()


@real
def test_a_job_starts_with_what_is_vouched_for(jobs: Jobs, keygen: Callable[[str], str]) -> None:
    key, home = keygen("ann"), jobs.home
    signers, out = f"--allowed-signers {Path(key).with_name('allowed')}", f"--out signed.zip --sign {key}"
    (home.path / "no-root").mkdir()
    home.cachectl("run --isolated=root --", sys.executable, f"{home.programs}/thirteen.py", "2", "1")
    for options, said in (
        (f"warm.zip --trust {out}", "entries on 2 of 2 nodes"),
        (f"signed.zip {signers} {out}", "accepted: signed by ann@example.org"),
        (f"warm.zip {signers}", "not signed"),
        ("no-root --trust", "starts cold"),
        ("none.zip --trust", "none.zip does not exist; --out none.zip makes it"),
        ("root", "entries on 2 of 2 nodes"),
    ):
        assert said in jobs.run(options, "true")
    before = (home.path / "warm.zip").read_bytes()
    said, ranks = jobs.ranks("untrusted", f"warm.zip --digest {'0' * 64} --out warm.zip")
    assert ("starts cold" in said, "nothing will be written to" in said) == (True, True)
    assert (home.path / "warm.zip").read_bytes() == before
    assert all(rank["after"]["pocl"] for rank in ranks)


@real
def test_a_command_that_is_killed_takes_nobody_with_it(jobs: Jobs) -> None:
    (jobs.home.path / "killed").mkdir()
    # The first rank to take the token dies; the others run.
    command = f"mkdir token 2>&- && kill -9 $$; exec {sys.executable} {jobs.home.programs}/rank.py killed"
    said = jobs.run("--out killed.zip", "sh", "-c", command, check=False)
    assert said.startswith("137\n")
    assert "the command was ended by signal 9" in said
    assert len(list((jobs.home.path / "killed").glob("*.json"))) == 2 * RANKS - 1
    assert listed(jobs.home.path / "killed.zip") == listed(jobs.home.path / "warm.zip")
    assert jobs.left() == []


def test_a_job_that_gets_a_signal_ends_in_order(tmp_path: Path, mpiexec: str) -> None:
    home = make_home(tmp_path / "home")
    (home.path / "scratch").mkdir()
    stage = ("env", f"TMPDIR={home.path / 'scratch'}", *CACHECTL, "stage", "--out", "new.zip")
    command = (mpiexec, "-n", "2", *stage, "--", "sh", "-c", "mktemp began-XXXXXX && exec sleep 1200")
    with subprocess.Popen(command, cwd=home.path, env=home.variables, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 600
        while len(list(home.path.glob("began-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list((home.path / "scratch").glob("cachectl-*/cachectl-stage-*"))
        job.terminate()
        _, said = job.communicate(timeout=600)
    assert said.count("the command was ended by signal 15") == 2
    assert "0 entries added" in said
    # Others may look into the scratch folder, so a folder of one's own was made in it, which stays.
    assert list((home.path / "scratch").glob("cachectl-*/*")) == []


@real
def test_a_node_whose_disk_cannot_be_used_runs_cold_and_says_so(jobs: Jobs, open_folder: Path) -> None:
    disk = jobs.home.path / "scratch/b"
    disk.rmdir()
    disk.symlink_to(open_folder)
    # Everybody could replace what is in it.
    open_folder.chmod(0o777)
    said, ranks = jobs.ranks("no-disk", "warm.zip --trust")
    disk.unlink()
    assert "entries on 1 of 2 nodes" in said
    assert [line for line in said.splitlines() if "CACHECTL_NODE=b" in line and "not staged" in line]
    assert all((rank["before"] == rank["after"]) == (rank["node"] == "a") for rank in ranks)
    # Beside staging, they found an empty home.
    assert (jobs.home.path / ".cache").exists()
    shutil.rmtree(jobs.home.path / ".cache")


def test_the_highest_status_is_everybodys(tmp_path: Path, mpiexec: str) -> None:
    jobs = Jobs(make_home(tmp_path / "home"), mpiexec)
    said = jobs.run("--out warm.zip", "sh", "-c", "mkdir token 2>&- && exit 3; exit 0", check=False)
    assert (said[:2], "Traceback" in said) == ("3\n", False)
    said = jobs.run("--out warm.zip", "no-such-command", check=False)
    assert (said[:4], "cannot start 'no-such-command'" in said) == ("127\n", True)


@real
@pytest.mark.parametrize(
    ("how", "said", "ranks"),
    [
        ("own", "0 compiled", 2),
        ("late", "too late to stage", 2),
        ("fails", "rank 1: ValueError: this rank fails", 1),
    ],
)
def test_a_program_that_is_a_rank_stages_for_itself(jobs: Jobs, how: str, said: str, ranks: int) -> None:
    command = (sys.executable, f"{jobs.home.programs}/mpi_job.py", "warm.zip", f"{how}.zip")
    done = jobs.home.run(jobs.mpiexec, "-n", "2", *command, *([] if how == "own" else [how]), check=False)
    # Launchers put what ranks write at once into any order, also of lines and their ends.
    assert (done.returncode, done.stdout.count(said)) == (0, ranks), done.stderr
    assert ("rank 0: 0 compiled" in done.stdout) == (how != "late")
    assert ("a rank failed, so nothing was written" in done.stderr) == (how == "fails")
    assert (jobs.home.path / f"{how}.zip").exists() == (how == "own")
    if how == "own":
        assert "1 of 1 node;" in done.stderr
        assert listed(jobs.home.path / "own.zip") == listed(jobs.home.path / "warm.zip")
    assert list((jobs.home.path).glob("**/cachectl-stage-*")) == []
