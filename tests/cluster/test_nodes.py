"""One report and one purge over all nodes: shared roots once, each node's own all the same.

Two ranks on each of two nodes, which are parted by a variable; PoCL's cache is each node's own, the rest is shared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachectl.cluster.nodes import Nodes
from cachectl.layers.host.mounts import Mount, mount_of, place_of
from cachectl.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from homes import Home

NODES = ("a", "b")
RANKS = 2


@dataclass(frozen=True)
class Cluster:
    """Two nodes that share a home but for PoCL's cache."""

    home: Home
    mpiexec: str

    def pocl(self, node: str) -> Path:
        return self.home.path / "nodes" / node

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run cachectl on every rank."""
        if "purge" in arguments:
            self.home.wait_to_be_alone()
        words = [self.mpiexec]
        for node in NODES:
            own = ("env", f"CACHECTL_NODE={node}", f"POCL_CACHE_DIR={self.pocl(node)}")
            words += [*([":"] if node != NODES[0] else []), "-n", str(RANKS), *own]
            words += [sys.executable, "-m", "cachectl", *arguments]
        return self.home.run(*words, check=check)

    def json(self, *arguments: str) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.run(*arguments, "--json").stdout)


@pytest.fixture
def cluster(tmp_path: Path, filled: Home, new_home: Callable[[Path], Home], mpiexec: str) -> Cluster:
    """Give both nodes what the loopy program has left."""
    shutil.copytree(filled.path, tmp_path / "home", symlinks=True)
    cluster = Cluster(new_home(tmp_path / "home"), mpiexec)
    pocl = tmp_path / "home" / ".cache" / "pocl" / "kcache"
    for node in NODES:
        shutil.copytree(pocl, cluster.pocl(node))
    shutil.rmtree(pocl.parent)
    return cluster


def by_layer(document: dict[str, Any]) -> dict[str, Any]:
    return {layer["layer"]: layer for layer in document["layers"]}


@pytest.mark.real
def test_a_shared_root_counts_once_and_each_nodes_own_counts(cluster: Cluster) -> None:
    alone = by_layer(cluster.home.json("report"))
    one = len(list(cluster.pocl("a").glob("*/*/program.bc")))
    document = cluster.json("report", "--mpi")
    reported = by_layer(document)
    assert len(document["nodes"]) == len(NODES)
    for name in ("loopy", "pyopencl-invoker", "cuda"):
        assert reported[name]["entries"] == alone[name]["entries"]
    assert reported["loopy"]["entries"] > 0
    assert [len(root["nodes"]) for root in reported["loopy"]["roots"]] == [2]
    assert reported["pocl"]["entries"] == 2 * one > 0
    own = {root["path"]: root["nodes"] for root in reported["pocl"]["roots"] if root["entries"]}
    assert set(own) == {str(cluster.pocl(node)) for node in NODES}
    assert all(len(nodes) == 1 for nodes in own.values())


@pytest.mark.cluster
@pytest.mark.real
def test_one_table_reports_all_nodes(cluster: Cluster) -> None:
    said = cluster.run("report", "--mpi", "-v").stdout
    assert said.count("\ntotal ") == 1
    assert "2 nodes, shared" in said
    assert "2 nodes: " in said
    assert "~/nodes/b  (" in said


@pytest.mark.cluster
@pytest.mark.real
def test_a_purge_clears_every_node_and_each_entry_once(cluster: Cluster) -> None:
    planned = cluster.json("purge", "--mpi", "--all", "--dry-run")
    before = by_layer(cluster.json("report", "--mpi"))
    done = cluster.json("purge", "--mpi", "--all")
    removed = {layer["layer"]: layer["removed"] for layer in done["layers"]}
    assert removed == {layer["layer"]: layer["removed"] for layer in planned["layers"]}
    assert removed["loopy"] == before["loopy"]["entries"]
    assert removed["pocl"] == before["pocl"]["entries"] > 0
    assert done["total"]["failed"] == 0
    assert cluster.json("report", "--mpi")["total"]["entries"] == 0


@pytest.mark.cluster
@pytest.mark.real
def test_a_selection_and_its_failures_are_reported_once(cluster: Cluster) -> None:
    key = cluster.home.cachectl("ls", "loopy", "-q").stdout.split()[0]
    assert cluster.json("purge", "--mpi", "loopy", "--key", key)["total"]["removed"] == 1
    done = cluster.run("purge", "--mpi", "loopy", "--key", key, check=False)
    assert done.returncode == 1
    assert done.stderr.count("no entry that is selected has the key") == 1
    done = cluster.run("report", "--mpi", "nosuch", check=False)
    assert done.returncode == 2
    assert done.stderr.count("no layer is called 'nosuch'") == 1


@pytest.mark.cluster
@pytest.mark.real
def test_a_rank_without_the_named_layer_purges_nothing(cluster: Cluster) -> None:
    """A plug-in may be installed on one node alone: to name it is not to name everything on all others."""
    home, plugin = cluster.home, Path(__file__).parents[1] / "plugin"
    path = os.pathsep.join(filter(None, (str(plugin), home.variables.get("PYTHONPATH"))))
    before = home.json("report")["total"]
    for verb in (("purge", "--mpi", "notes"), ("report", "--mpi", "notes")):
        program = [sys.executable, "-m", "cachectl", *verb, "--json"]
        words = [cluster.mpiexec, "-n", "1", *program, ":", "-n", "1", "env", f"PYTHONPATH={path}", *program]
        assert [layer["layer"] for layer in json.loads(home.run(*words).stdout)["layers"]] == ["notes"]
    assert home.json("report")["total"] == before
    assert before["entries"] > 0


@pytest.mark.cluster
@pytest.mark.real
def test_a_root_of_one_rank_alone_is_found(cluster: Cluster) -> None:
    """A rank may have been given a place of its own, even on a node of others."""
    away = cluster.home.path / "away"
    shutil.copytree(cluster.pocl("a"), away)
    program = [sys.executable, "-m", "cachectl", "report", "--mpi", "pocl", "--json"]
    words = [cluster.mpiexec, "-n", "1", "env", f"POCL_CACHE_DIR={cluster.pocl('a')}", *program]
    words += [":", "-n", "1", "env", f"POCL_CACHE_DIR={away}", *program]
    document = json.loads(cluster.home.run(*words).stdout)
    assert len(document["nodes"]) == 1
    assert {root["path"] for root in document["layers"][0]["roots"]} >= {str(away), str(cluster.pocl("a"))}
    assert document["total"]["entries"] == 2 * len(list(away.glob("*/*/program.bc")))


@pytest.mark.cluster
@pytest.mark.real
def test_without_a_job_it_is_the_only_node(filled: Home, mpiexec: str) -> None:
    del mpiexec
    assert filled.json("report", "--mpi")["total"] == filled.json("report")["total"]


def test_mounts_are_read_from_the_table(tmp_path: Path) -> None:
    """A root on a network file system is identified by its server on every machine."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:50 / {tmp_path}/home rw,relatime shared:7 - nfs4 server:/export/home rw,vers=4.2\n"
    )
    assert mount_of(tmp_path / "home" / "ann" / ".cache", mounts=table) == Mount("nfs4", "server:/export/home")
    assert mount_of(tmp_path / "home" / "ann", mounts=table) != mount_of(tmp_path, mounts=table)
    assert mount_of(Path("/etc"), mounts=table) == Mount("ext4", "/dev/sda1")
    assert mount_of(Path("/etc"), mounts=tmp_path / "none") is None
    assert place_of(tmp_path / "home" / "ann", mounts=table) == (Mount("nfs4", "server:/export/home"), "/ann")
    part = "24 22 0:50 /ann/x {}/part rw - nfs4 server:/export/home rw\n"
    table.write_text(table.read_text() + part.format(tmp_path))
    assert place_of(tmp_path / "part" / "y", mounts=table) == (Mount("nfs4", "server:/export/home"), "/ann/x/y")
    assert place_of(Path("/etc"), mounts=table) == (Mount("ext4", "/dev/sda1"), "/etc")


@dataclass(frozen=True)
class Alone:
    """A job of one rank, as far as it is asked here."""

    rank: int = 0

    @staticmethod
    def allreduce(mine: object, op: object) -> object:
        del op
        return mine


def test_a_root_stays_the_same_when_another_makes_it(tmp_path: Path, new_home: Callable[[Path], Home]) -> None:
    pytest.importorskip("mpi4py")
    home = new_home(tmp_path / "home")
    comm: Any = Alone()
    nodes = Nodes(Stack(home.environment(), plugins=False), pytest.fail, comm)
    (pocl,) = Stack(home.environment(), plugins=False).named(["pocl"])
    seen = {name: replace(one, rank=1) for name, one in nodes._divided([pocl]).items()}
    for root in pocl.roots():
        root.path.mkdir(parents=True)
    assert not any(nodes._mine(seen)(pocl, root) for root in pocl.roots())


def test_device_numbers_of_a_network_file_system_identify_no_folder(
    tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    """With sshfs each machine numbers files itself, so two folders may have one number: two names of a file have it."""
    pytest.importorskip("mpi4py")
    table = tmp_path / "mountinfo"
    table.write_text(f"23 22 0:50 / {tmp_path} rw - fuse.sshfs user@host: rw\n")
    files = [tmp_path / name for name in ("one", "other")]
    files[0].touch()
    files[1].hardlink_to(files[0])
    environment = replace(new_home(tmp_path / "home").environment(), mounts=table)
    comm: Any = Alone()
    nodes = Nodes(Stack(environment, plugins=False), pytest.fail, comm)
    one, other = (nodes._place(file) for file in files)
    assert one != other


@pytest.mark.cluster
@pytest.mark.real
def test_neighbours_are_no_business_of_a_job(cluster: Cluster) -> None:
    done = cluster.run("report", "--mpi", "--neighbours", check=False)
    assert done.returncode == 2
    assert not done.stdout
