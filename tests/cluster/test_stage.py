"""Staging: one rank reads, every node is warm, and whatever fails costs the job nothing but compiling.

Two ranks on each of two nodes, which are parted by a variable: they share neither folder nor cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest

from cachectl.cluster.stage import Job
from cachectl.cluster.staging import NodeRoot, Sink
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.pocl.parts import PoclPortability
from cachectl.moving import merging
from cachectl.moving.bundle import BadBundle, Item, Manifest, Reader, write_bundle
from cachectl.moving.importing import Trust
from cachectl.moving.merging import merge_bundles
from cachectl.moving.portability import fingerprint
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

RANKS = 2
#: Counts every opening of a bundle in every Python of a job.
AUDIT = """
import os, sys
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("warm.cachectl") and "r" in str(arguments[1] or "r"):
        descriptor = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b"%d\\n" % os.getpid())
        os.close(descriptor)
sys.addaudithook(hook)
"""


@dataclass(frozen=True)
class Jobs:
    """Jobs on two nodes, ``a`` and ``b``, in one home on a file system that both share."""

    home: Home
    mpiexec: str

    def run(self, *command: str, options: dict[str, tuple[str, ...]], check: bool = True) -> str:
        """Run ``stage in`` with each node's options; return standard error."""
        words = [self.mpiexec]
        for node, own in options.items():
            ours = (sys.executable, "-m", "cachectl", "stage", "in", *own)
            words += [*([":"] if len(words) > 1 else []), "-n", str(RANKS), "env", f"CACHECTL_NODE={node}"]
            words += [f"TMPDIR={self.home.path / 'scratch' / node}", *ours, "--", *command]
        for node in options:
            (self.home.path / "scratch" / node).mkdir(mode=0o700, parents=True, exist_ok=True)
        done = self.home.run(*words, check=False)
        if check and done.returncode:
            pytest.fail(f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return f"{done.returncode}\n{done.stderr}"

    def both(self, *command: str, options: tuple[str, ...], check: bool = True) -> str:
        return self.run(*command, options={"a": options, "b": options}, check=check)

    def ranks(self, name: str, *options: str, **by_node: tuple[str, ...]) -> tuple[str, list[dict[str, Any]]]:
        """Run the kernels on every rank; return standard error, and what each rank has found and left."""
        folder = self.home.path / name
        folder.mkdir()
        told = {node: by_node.get(node, options) for node in ("a", "b")}
        said = self.run(sys.executable, str(self.home.programs / "rank.py"), str(folder), options=told)
        return said, [json.loads(file.read_text()) for file in folder.glob("*.json")]

    def left(self) -> list[str]:
        return [path.name for path in (self.home.path / "scratch").glob("*/*")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, new_home: Callable[[Path], Home], mpiexec: str) -> Jobs:
    """Return a home in which a cold job has run, and written ``warm.cachectl``."""
    jobs = Jobs(new_home(tmp_path_factory.mktemp("mpi") / "home"), mpiexec)
    said, ranks = jobs.ranks("cold", "--out", "warm.cachectl")
    assert len(ranks) == 2 * RANKS
    assert all(rank["before"]["rows"] == {} for rank in ranks if rank["began"] == min(r["began"] for r in ranks))
    assert "warm.cachectl: " in said
    return jobs


def manifest(file: Path) -> Manifest:
    with file.open("rb") as opened:
        return Reader(opened, file.stat().st_size).manifest


def no_home(home: Home) -> bool:
    """Tell that nothing was kept in the home itself."""
    return not (home.path / ".cache").exists()


# ---------------------------------------------------------------------- a job


@pytest.mark.cluster
@pytest.mark.real
def test_a_cold_job_writes_each_entry_of_all_nodes_once(jobs: Jobs) -> None:
    items = manifest(jobs.home.path / "warm.cachectl").items
    assert {item.layer for item in items} == {"loopy", "pyopencl-invoker", "pocl"}
    assert sum(item.layer == "pocl" for item in items) == 3
    assert jobs.left() == []
    assert no_home(jobs.home)


@pytest.mark.real
def test_in_a_staged_job_no_rank_compiles_and_the_file_is_read_once(jobs: Jobs, tmp_path: Path) -> None:
    file = jobs.home.path / "warm.cachectl"
    log = tmp_path / "opened"
    (tmp_path / "sitecustomize.py").write_text(AUDIT.format(log=str(log)))
    before = jobs.home.variables.get("PYTHONPATH")
    path = str(tmp_path) if before is None else f"{tmp_path}:{before}"
    watched = replace(jobs, home=replace(jobs.home, variables={**jobs.home.variables, "PYTHONPATH": path}))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()

    said, ranks = watched.ranks("warm", "warm.cachectl", "--sha256", digest, "--out", "again.cachectl")
    assert len(ranks) == 2 * RANKS
    assert {rank["node"] for rank in ranks} == {"a", "b"}
    for rank in ranks:
        assert rank["before"]["pocl"]
        assert rank["after"] == rank["before"]
    assert "entries on 2 of 2 nodes" in said
    assert "read once" in said
    # Once in the whole job, by whichever rank.
    assert len(log.read_text().splitlines()) == 1
    # Nothing was new, so the same bytes come out.
    assert (jobs.home.path / "again.cachectl").read_bytes() == file.read_bytes()
    assert jobs.left() == []


@pytest.mark.cluster
@pytest.mark.real
def test_what_nodes_have_each_for_themselves_travels_in_many_chunks_and_comes_together(
    tmp_path: Path, new_home: Callable[[Path], Home], mpiexec: str
) -> None:
    jobs = Jobs(new_home(tmp_path / "home"), mpiexec)
    program = (sys.executable, str(jobs.home.programs / "large.py"))
    said = jobs.both(*program, options=("--out", "large.cachectl"))
    assert "2 entries, 2 of them new, from 2 nodes" in said
    file = jobs.home.path / "large.cachectl"
    assert file.stat().st_size > 18 << 20

    said = jobs.both(
        *("sh", "-c", f'{" ".join(program)} > "$(mktemp {tmp_path}/told-XXXXXX)"'),
        options=("large.cachectl", "--trust", "--out", "again.cachectl"),
    )
    assert "staged 4 entries on 2 of 2 nodes" in said
    assert "broadcast in 5 chunks" in said
    told = [json.loads(path.read_text()) for path in tmp_path.glob("told-*")]
    assert len(told) == 2 * RANKS
    assert all(one["there"] == ["a", "b"] for one in told)
    assert (jobs.home.path / "again.cachectl").read_bytes() == file.read_bytes()


@pytest.mark.cluster
def test_a_disk_that_fills_up_while_others_send_keeps_nobody(
    tmp_path: Path, new_home: Callable[[Path], Home], mpiexec: str
) -> None:
    """What is sent takes three chunks, and rank 0 can write no more than the first."""
    home = new_home(tmp_path / "home")
    large = f'test "$CACHECTL_NODE" = a || exec {sys.executable} {home.programs / "large.py"}'
    stage = (sys.executable, "-m", "cachectl", "stage", "in", "--out", "lost.cachectl", "--", "sh", "-c", large)
    a = ("-n", "1", "env", "CACHECTL_NODE=a", "sh", "-c", 'ulimit -f 12000 && exec "$@"', "sh", *stage)
    done = home.run(mpiexec, *a, ":", "-n", "1", "env", "CACHECTL_NODE=b", *stage, check=False)
    assert done.returncode == 0, done.stderr
    assert "new entries are lost: lost.cachectl: File too large" in done.stderr
    assert not (home.path / "lost.cachectl").exists()


@pytest.mark.cluster
@pytest.mark.real
def test_what_one_job_signs_the_next_believes(jobs: Jobs, tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    key, signers = tmp_path / "key", tmp_path / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ann", "-f", str(key)], check=True)
    signers.write_text(f"ann@example.org {key.with_suffix('.pub').read_text()}")
    out = ("--out", "signed.cachectl", "--sign", str(key))
    jobs.both("true", options=("warm.cachectl", "--trust", *out))
    believed = ("signed.cachectl", "--allowed-signers", str(signers))
    said = jobs.both("true", options=(*believed, "--newer-than", "1h", *out))
    assert "trusted: signed by ann@example.org, made 20" in said
    said = jobs.both("true", options=(*believed, "--newer-than", "2999-01-01", *out))
    assert "all nodes start cold" in said
    assert "only one made after 2999-01-01" in said
    assert "nothing will be written to signed.cachectl" in said
    said = jobs.both("true", options=("warm.cachectl", "--allowed-signers", str(signers)))
    assert "all nodes start cold" in said
    assert "not signed" in said


@pytest.mark.cluster
@pytest.mark.real
def test_a_root_is_staged_as_its_bundle_is(jobs: Jobs) -> None:
    root = jobs.home.path / "root"
    program = (sys.executable, str(jobs.home.programs / "thirteen.py"), "2", "1")
    jobs.home.cachectl("run", f"--isolated={root}", "--", *program)
    said, ranks = jobs.ranks("of-root", "root", "--trust")
    assert "entries on 2 of 2 nodes" in said
    assert len(ranks) == 2 * RANKS
    assert all(rank["after"] == rank["before"] and rank["before"]["pocl"] for rank in ranks)
    (jobs.home.path / "no-root").mkdir()
    said = jobs.both("true", options=("no-root", "--trust"))
    assert "all nodes start cold" in said
    assert "no-root is no root" in said


@pytest.mark.cluster
@pytest.mark.real
def test_a_command_that_is_killed_takes_nobody_with_it(jobs: Jobs) -> None:
    kernels = f"{sys.executable} {jobs.home.programs / 'rank.py'} {jobs.home.path / 'killed'}"
    (jobs.home.path / "killed").mkdir()
    # The first rank to take the token dies; the others run.
    command = f"mkdir {jobs.home.path / 'token'} 2>&- && kill -9 $$; exec {kernels}"
    said = jobs.both("sh", "-c", command, options=("--out", "killed.cachectl"), check=False)
    assert said.startswith("137\n")
    assert "the command was ended by signal 9" in said
    assert len(list((jobs.home.path / "killed").glob("*.json"))) == 2 * RANKS - 1
    killed, warm = (manifest(jobs.home.path / name).items for name in ("killed.cachectl", "warm.cachectl"))
    assert [(item.layer, item.key) for item in killed] == [(item.layer, item.key) for item in warm]
    assert jobs.left() == []


@pytest.mark.cluster
def test_a_job_that_is_told_to_end_ends_in_order(
    tmp_path: Path, new_home: Callable[[Path], Home], mpiexec: str
) -> None:
    home = new_home(tmp_path / "home")
    (home.path / "scratch").mkdir()
    stage = (sys.executable, "-m", "cachectl", "stage", "in", "--scratch", "scratch", "--out", "new.cachectl")
    command = (mpiexec, "-n", "2", *stage, "--", "sh", "-c", "mktemp began-XXXXXX && exec sleep 1200")
    with subprocess.Popen(command, cwd=home.path, env=home.variables, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 600
        while len(list(home.path.glob("began-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list((home.path / "scratch").glob("cachectl-*/cachectl-stage-*"))
        job.terminate()
        _, said = job.communicate(timeout=600)
    assert said.count("the command was ended by signal 15") == 2
    assert (home.path / "new.cachectl").exists()
    # Others may look into the scratch folder, so a folder of one's own was made in it, which stays.
    assert list((home.path / "scratch").glob("cachectl-*/*")) == []


@pytest.mark.cluster
@pytest.mark.real
def test_a_node_whose_disk_cannot_be_used_runs_cold_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no folder")
    options = ("warm.cachectl", "--trust", "--scratch")
    a, b = (*options, str(tmp_path)), (*options, str(plain / "below"))
    said, ranks = jobs.ranks("no-disk", a=a, b=b)
    assert "entries on 1 of 2 nodes" in said
    assert [line for line in said.splitlines() if "CACHECTL_NODE=b" in line and "not staged" in line]
    assert all((rank["before"] == rank["after"]) == (rank["node"] == "a") for rank in ranks)
    # Beside staging, they found an empty home.
    assert not no_home(jobs.home)
    shutil.rmtree(jobs.home.path / ".cache")


@pytest.mark.cluster
@pytest.mark.real
def test_a_bundle_that_nobody_vouches_for_leaves_the_job_cold_and_the_file_as_it_is(jobs: Jobs) -> None:
    file = jobs.home.path / "warm.cachectl"
    before = file.read_bytes()
    said, ranks = jobs.ranks("untrusted", "warm.cachectl", "--sha256", "0" * 64, "--out", "warm.cachectl")
    assert "all nodes start cold" in said
    assert "stays as it is" in said
    assert file.read_bytes() == before
    assert all(rank["after"]["pocl"] for rank in ranks)


@pytest.mark.cluster
def test_the_highest_status_is_everybodys(tmp_path: Path, new_home: Callable[[Path], Home], mpiexec: str) -> None:
    jobs = Jobs(new_home(tmp_path / "home"), mpiexec)
    token = jobs.home.path / "token"
    said = jobs.both("sh", "-c", f"mkdir {token} 2>&- && exit 3; exit 0", options=(), check=False)
    assert said.startswith("3\n")
    said = jobs.both("no-such-command", options=(), check=False)
    assert said.startswith("127\n")
    assert said.count("cannot start 'no-such-command'") == 2 * RANKS
    said = jobs.both("true", options=("--out", "/nowhere/at/all"), check=False)
    assert said.startswith("2\n")
    assert said.count("--out '/nowhere/at/all'") == 1


@pytest.mark.cluster
@pytest.mark.parametrize(("out", "why"), [("thesis.tex", "is not a bundle"), ("pocl", "is a layer"), ("-", "output")])
def test_a_job_replaces_nothing_but_bundles(jobs: Jobs, out: str, why: str) -> None:
    thesis = jobs.home.path / "thesis.tex"
    thesis.write_text("chapter")
    said = jobs.both("touch", "ran", options=("--out", out), check=False)
    assert said.startswith("2\n")
    assert why in said
    assert not (jobs.home.path / "ran").exists()
    assert thesis.read_text() == "chapter"


def test_what_cannot_be_meant_is_said_before_anything_starts() -> None:
    with pytest.raises(BadRequest, match="a bundle is code"):
        Job("warm.cachectl")
    with pytest.raises(BadRequest, match="no bundle was given"):
        Job(trust=Trust(blindly=True))
    with pytest.raises(BadRequest, match="--sign needs --out FILE"):
        Job(sign="key")


# ---------------------------------------------------------------------- a program that is a rank itself


def program(jobs: Jobs, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(jobs.home.programs / "mpi_job.py"), *arguments)
    return jobs.home.run(jobs.mpiexec, "-n", "2", *command, check=False)


@pytest.mark.cluster
@pytest.mark.real
def test_a_program_stages_for_itself(jobs: Jobs) -> None:
    done = program(jobs, "warm.cachectl", "own.cachectl")
    assert done.returncode == 0, done.stderr
    # Launchers put what ranks write at once into any order, also of lines and their ends.
    assert all(done.stdout.count(f"rank {rank}: 0 compiled") == 1 for rank in range(2))
    assert "1 of 1 node:" in done.stderr
    assert (jobs.home.path / "own.cachectl").read_bytes() == (jobs.home.path / "warm.cachectl").read_bytes()
    assert list((jobs.home.path).glob("**/cachectl-stage-*")) == []


@pytest.mark.cluster
@pytest.mark.real
def test_where_it_is_too_late_on_one_rank_all_are_told(jobs: Jobs) -> None:
    done = program(jobs, "warm.cachectl", "late.cachectl", "late")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("too late to stage") == 2
    assert not (jobs.home.path / "late.cachectl").exists()


@pytest.mark.cluster
@pytest.mark.real
def test_a_rank_that_fails_is_not_waited_for(jobs: Jobs) -> None:
    done = program(jobs, "warm.cachectl", "failed.cachectl", "fails")
    assert done.returncode == 0, done.stderr
    assert "rank 1: ValueError: this rank fails" in done.stdout
    assert "rank 0: 0 compiled" in done.stdout
    assert "a rank has failed: nothing was written" in done.stderr
    assert not (jobs.home.path / "failed.cachectl").exists()


# ---------------------------------------------------------------------- one node, without MPI


@pytest.fixture(scope="module")
def packed(filled: Home, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the bundle of a home in which real programs have run, and its sum."""
    file = tmp_path_factory.mktemp("packed") / "warm.cachectl"
    done = Stack(filled.environment()).export(str(file))
    assert done.sha256 is not None
    return file, done.sha256


@pytest.fixture
def here(home: Home) -> Environment:
    return home.environment()


def fill(node: NodeRoot, packed: tuple[Path, str]) -> None:
    file, digest = packed
    with file.open("rb") as opened:
        node.fill(opened, str(file), digest)


@pytest.mark.real
def test_a_node_is_filled_looked_through_and_emptied(
    here: Environment, home: Home, packed: tuple[Path, str], tmp_path: Path
) -> None:
    node = NodeRoot.make(here, tmp_path / "scratch" / "below")
    fill(node, packed)
    assert node.root is not None
    assert node.notes == []
    assert node.placed == len(manifest(packed[0]).items)
    assert node.new() == frozenset()

    changes = {name: value for name, value in node.variables.items() if value is not None}
    # A loopy kernel that is in the bundle, and a program that is not.
    home.python("thirteen.py", "1", "1", **changes)
    new = node.new()
    assert [layer for layer, _ in new] == ["pocl"]
    out = node.pack(new)
    assert out is not None
    with out:
        assert {(item.layer, item.key) for item in Reader(out, packed[0].stat().st_size).manifest.items} == new
    root = node.root
    node.remove()
    assert not root.exists()
    assert no_home(home)


@pytest.mark.real
def test_a_node_with_another_processor_starts_cold_and_says_why(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("model name : another\nflags : none\n\n")
    node = NodeRoot.make(replace(here, processes=tmp_path / "proc"), tmp_path / "scratch")
    fill(node, packed)
    assert node.root is not None
    # What loopy generates does not depend on the processor.
    assert node.placed == sum(item.layer != "pocl" for item in manifest(packed[0]).items)
    assert any("pocl starts cold" in note and "another processor" in note for note in node.notes)
    node.remove()


@pytest.mark.real
def test_a_bundle_that_was_changed_on_the_way_leaves_a_node_cold(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    data = bytearray(packed[0].read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "changed").write_bytes(data)
    node = NodeRoot.make(here, tmp_path / "scratch")
    fill(node, (tmp_path / "changed", packed[1]))
    assert node.placed == 0
    assert len(node.notes) == 1
    assert node.notes[0].startswith("starts cold: ")
    assert node.root is not None
    assert node.variables
    node.remove()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a way to mount a disk of a size, where this user may."""
    with ExitStack() as stack:

        def mount(size: str) -> Path:
            on = tmp_path / "disk"
            on.mkdir()
            if shutil.which("mount") is None:
                pytest.skip("this system has no mount command")
            words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(on)]
            if subprocess.run(words, capture_output=True, check=False).returncode:
                pytest.skip("this user may not mount")
            stack.callback(subprocess.run, ["umount", "-l", str(on)], check=True)
            return on

        yield mount


def test_a_full_disk_is_left_alone(here: Environment, disk: Callable[[str], Path]) -> None:
    on = disk("512k")
    node = NodeRoot.make(here, on)
    assert node.root is None
    assert node.variables == {}
    assert "No space left" in node.notes[0]
    assert list(on.iterdir()) == []
    assert node.receive() is None
    assert node.new() == frozenset()


@pytest.mark.real
def test_a_disk_that_fills_up_on_the_way_is_left_alone(
    here: Environment, disk: Callable[[str], Path], packed: tuple[Path, str]
) -> None:
    on = disk("1200k")
    node = NodeRoot.make(here, on)
    assert node.root is not None
    (on / "other").write_bytes(bytes(1000 << 10))
    fill(node, packed)
    assert node.root is None
    assert node.variables == {}
    assert "No space left" in node.notes[-1]
    assert [path.name for path in on.iterdir()] == ["other"]


def test_what_a_disk_does_not_take_is_dropped_and_the_rest_of_the_broadcast_too(
    here: Environment, disk: Callable[[str], Path]
) -> None:
    on = disk("2m")
    node = NodeRoot.make(here, on)
    sink = Sink(node)
    for _ in range(4):
        sink.write(bytes(1 << 20))
    assert sink.file is None
    assert node.root is None
    assert "No space left" in node.notes[0]
    assert list(on.iterdir()) == []


# ---------------------------------------------------------------------- bundles made one


@pytest.mark.real
def test_bundles_of_other_processors_are_not_mixed(here: Environment, packed: tuple[Path, str], tmp_path: Path) -> None:
    with packed[0].open("rb") as opened:
        reader = Reader(opened, packed[0].stat().st_size)
        contents = list(reader.contents())
    renamed = [(replace(item, key=f"{item.key}x"), data) for item, data in contents if item.layer == "pocl"]
    theirs = {**fingerprint(PoclPortability(), here, [item for item, _ in renamed]), "processor": "another"}
    with (tmp_path / "theirs").open("w+b") as other, packed[0].open("rb") as first:
        items = tuple(item for item, _ in renamed)
        write_bundle(other, Manifest(items, {"pocl": theirs}), [data for _, data in renamed])
        done = merge_bundles(here, [first, other], str(tmp_path / "both"), base=True)
    assert done.foreign == {"pocl": len(renamed)}
    assert (done.entries, done.added) == (len(contents), 0)
    assert (tmp_path / "both").read_bytes() == packed[0].read_bytes()


@pytest.mark.real
def test_the_first_of_two_entries_of_one_key_is_kept(
    here: Environment, packed: tuple[Path, str], tmp_path: Path
) -> None:
    with packed[0].open("rb") as opened:
        reader = Reader(opened, packed[0].stat().st_size)
        contents = list(reader.contents())
    item, _ = contents[0]
    changed = replace(item, bytes=3, sha256=hashlib.sha256(b"new").hexdigest())
    with (tmp_path / "other").open("w+b") as other, packed[0].open("rb") as first:
        write_bundle(other, Manifest((changed,), {item.layer: reader.manifest.fingerprints[item.layer]}), [b"new"])
        done = merge_bundles(here, [first, other], str(tmp_path / "both"))
    assert done.differing == 1
    assert (tmp_path / "both").read_bytes() == packed[0].read_bytes()


def made(file: Path, entries: dict[str, tuple[bytes, str]], platform: str | None = "linux") -> BinaryIO:
    """Write a bundle of the ComputeCache: of each key the bytes, and the device."""
    items = tuple(
        Item("cuda", key, "cuda-entry/65", len(data), hashlib.sha256(data).hexdigest(), device=device)
        for key, (data, device) in sorted(entries.items())
    )
    told = {"platform": platform, "devices": ", ".join(sorted({device for _, device in entries.values()}))}
    opened = file.open("w+b")
    write_bundle(
        opened, Manifest(items, {"cuda": told} if items else {}), [data for _, (data, _) in sorted(entries.items())]
    )
    return opened


def test_however_entries_are_parted_merged_they_are_the_same_bytes(here: Environment, tmp_path: Path) -> None:
    draw = random.Random(6)  # noqa: S311 - sizes, no secrets
    entries = {f"{n:03}": (draw.randbytes(draw.choice((0, 1, 512, 70_000))), f"sm_{n % 5}") for n in range(200)}
    with made(tmp_path / "whole", entries) as whole:
        whole.flush()
        expected = (tmp_path / "whole").read_bytes()
    for number in (1, 2, 7, 64, 65, 150):
        owners = {key: draw.sample(range(number), draw.randint(1, min(number, 7))) for key in entries}
        asked = 0

        def parts(number: int = number, owners: dict[str, list[int]] = owners) -> Iterator[BinaryIO]:
            nonlocal asked
            before = len(os.listdir("/proc/self/fd"))
            for n in range(number):
                assert len(os.listdir("/proc/self/fd")) < before + 70
                asked += 1
                yield made(tmp_path / f"{n}", {key: entries[key] for key in entries if n in owners[key]})

        done = merge_bundles(here, parts(), str(tmp_path / "merged"), base=True)
        assert asked == number
        assert (done.entries, done.differing) == (200, 0)
        assert done.added == sum(0 not in owner for owner in owners.values())
        assert (tmp_path / "merged").read_bytes() == expected


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_what_is_left_out_is_the_same_however_many_are_merged_at_once(
    here: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Each part at each place among those that are read side by side: foreign, unknown, or other bytes."""

    def parts() -> Iterator[BinaryIO]:
        for number, platform in enumerate(("linux", "win32", "linux", "win32", "linux", None, "win32", "linux")):
            entries = {"same": (b"%d" % (number // 2), "sm_90"), f"{number}": (b"own", f"sm_{number}")}
            yield made(tmp_path / f"{number}", entries, platform)

    whole = merge_bundles(here, parts(), str(tmp_path / "whole"), base=True)
    assert (whole.entries, whole.added) == (7, 5)
    assert (whole.differing, whole.foreign) == (5, {"cuda": 4})
    monkeypatch.setattr(merging, "_SIDE_BY_SIDE", at_once)
    done = merge_bundles(here, parts(), str(tmp_path / "parted"), base=True)
    assert done == replace(whole, file=done.file)
    assert (tmp_path / "parted").read_bytes() == (tmp_path / "whole").read_bytes()


def test_what_was_not_taken_is_not_told_of(here: Environment, tmp_path: Path) -> None:
    with made(tmp_path / "one", {"a": (b"1", "sm_90")}) as one, made(tmp_path / "two", {"a": (b"2", "sm_80")}) as two:
        done = merge_bundles(here, [one, two], str(tmp_path / "both"))
    assert done.differing == 1
    assert (tmp_path / "both").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_merge_takes_no_room_but_for_its_bundle(here: Environment, tmp_path: Path) -> None:
    """Of what is compressed nothing is kept beside: a rank's disk may be small."""
    import resource

    entries = {f"{n:03}": (bytes([n]) * 100_000, "sm_90") for n in range(100)}
    with made(tmp_path / "one", entries) as one, made(tmp_path / "two", {"x": (b"x", "sm_90")}) as two:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            done = merge_bundles(here, [one, two], str(tmp_path / "both"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.entries == 101
    assert done.bytes < 1 << 20


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_part_that_is_damaged_leaves_what_was_there(here: Environment, tmp_path: Path, damaged: int) -> None:
    """Even if all that is taken from it would be sound."""
    (tmp_path / "both").write_bytes(b"what was there")
    parts = {"one": {"a": (b"1", "sm_90")}, "two": {"a": (b"1", "sm_90")}}
    with ExitStack() as stack:
        opened = [stack.enter_context(made(tmp_path / name, entries)) for name, entries in parts.items()]
        opened[damaged].write(b"more")
        with pytest.raises(BadBundle):
            merge_bundles(here, opened, str(tmp_path / "both"))
    assert (tmp_path / "both").read_bytes() == b"what was there"


@pytest.mark.parametrize("damaged", [0, 1, 70])
@pytest.mark.parametrize("base", [True, False])
def test_a_merge_that_fails_leaves_no_part_open(here: Environment, tmp_path: Path, damaged: int, *, base: bool) -> None:
    taken: list[BinaryIO] = []

    def parts() -> Iterator[BinaryIO]:
        for number in range(100):
            taken.append(made(tmp_path / f"{number}", {f"{number:03}": (b"1", "sm_90")}))
            if number == damaged:
                taken[-1].seek(0)
                taken[-1].write(b"none")
            yield taken[-1]

    with pytest.raises(BadBundle):
        merge_bundles(here, parts(), str(tmp_path / "both"), base=base)
    assert all(part.closed for part in taken)
    assert not (tmp_path / "both").exists()


def test_a_part_that_does_not_come_leaves_no_other_open(here: Environment, tmp_path: Path) -> None:
    taken: list[BinaryIO] = []

    def parts() -> Iterator[BinaryIO]:
        for number in range(70):
            taken.append(made(tmp_path / f"{number}", {f"{number:03}": (b"1", "sm_90")}))
            yield taken[-1]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        merge_bundles(here, parts(), str(tmp_path / "both"))
    assert all(part.closed for part in taken)


def test_a_bundle_cannot_be_merged_into_a_folder_that_is_not_there(here: Environment, tmp_path: Path) -> None:
    with pytest.raises((OSError, CachectlError)):
        merge_bundles(here, [], str(tmp_path / "no" / "folder"))
