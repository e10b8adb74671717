"""``export --image``: an OCI image whose files are a ready root, by real registries and real tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.registries import ContainerTools, RealRegistry

from cachectl.layers.base.errors import BadRequest
from cachectl.moving.importing import Trust
from cachectl.sharing.oci.repository import Reference, Repository
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


@pytest.fixture
def here(source: Home, tmp_path: Path, new_home: Callable[[Path], Home]) -> Home:
    """Return a copy of a warm home, which a test may fill further."""
    shutil.copytree(source.path, tmp_path / "here", symlinks=True)
    return new_home(tmp_path / "here")


def manifest_of(url: str) -> dict[str, Any]:
    reference = Reference.parse(url)
    return dict(Repository(reference).manifest(reference.digest or reference.tag).content)


def exported(home: Home, url: str, *arguments: str) -> dict[str, Any]:
    done: dict[str, Any] = home.json("export", "--image", url, *arguments)
    return done


def test_the_digest_depends_on_the_entries_alone(
    here: Home, packed: Path, real_registry: RealRegistry, tmp_path: Path, new_home: Callable[[Path], Home]
) -> None:
    there = new_home(tmp_path / "there")
    Stack(there.environment()).import_bundle(str(packed), Trust(blindly=True))
    pinned = [exported(home, real_registry.url(f"{name}:1"))["pinned"] for name, home in (("a", here), ("b", there))]
    assert pinned[0].partition("@")[2] == pinned[1].partition("@")[2]


def test_a_grown_cache_adds_a_layer(here: Home, real_registry: RealRegistry) -> None:
    url = real_registry.url("team/warm:1")
    first = exported(here, url)
    assert first["image_layers"] == 1
    assert first["total"]["failed"] == 0
    # Nothing is new, so nothing is sent, and the digest stays.
    again = exported(here, url)
    assert (again["pinned"], again["uploaded"]) == (first["pinned"], 0)
    here.python("thirteen.py", "4", "3")
    grown = exported(here, url)
    assert grown["image_layers"] == 2
    assert grown["uploaded"] < first["uploaded"]
    assert manifest_of(grown["pinned"])["layers"][0] == manifest_of(first["pinned"])["layers"][0]
    # A new tag has all of it in one layer.
    assert exported(here, real_registry.url("team/warm:2"))["image_layers"] == 1


def test_tools_take_the_image_and_programs_start_warm_in_it(
    here: Home, real_registry: RealRegistry, container_tools: ContainerTools
) -> None:
    url = real_registry.url("team/warm:1")
    exported(here, url, "loopy", "pyopencl-invoker", "pyopencl")
    here.python("thirteen.py", "4", "3")
    done = exported(here, url)
    name = url.removeprefix("oci://")
    seen = json.loads(container_tools.run("skopeo", "inspect", "--tls-verify=false", f"docker://{name}"))
    assert seen["Digest"] == done["pinned"].partition("@")[2]
    assert seen["Labels"]["cachectl.format"] == "isolated-root/1"
    assert json.loads(seen["Labels"]["cachectl.pocl"])["platform"] == "linux"
    container_tools.run("podman", "pull", "--tls-verify=false", name)
    mounted = Path(container_tools.run("podman", "image", "mount", name))
    container = container_tools.run("buildah", "from", "--tls-verify=false", name)
    built = Path(container_tools.run("buildah", "mount", container))
    files = {path.relative_to(mounted) for path in mounted.rglob("*") if path.is_file()}
    assert files == {path.relative_to(built) for path in built.rglob("*") if path.is_file()}
    root = here.path / "root"
    shutil.copytree(mounted, root)
    below = Stack.below(str(root), here.environment())
    wanted = {(one.layer, one.key) for one in Stack(here.environment()).entries()}
    assert {(one.layer, one.key) for one in below.entries()} == wanted
    assert not below.verify().findings


@pytest.mark.usefixtures("real_registry")
def test_a_tag_with_anything_else_is_moved_only_by_force(here: Home, real_registry: RealRegistry) -> None:
    url = real_registry.url("team/warm:1")
    repository = Repository(Reference.parse(url))
    repository.put_blob("sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", b"{}")
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "size": 2}
    empty["digest"] = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    media_type = "application/vnd.oci.image.manifest.v1+json"
    foreign = {"schemaVersion": 2, "mediaType": media_type, "config": empty, "layers": [empty]}
    before = repository.put_manifest("1", foreign)
    done = here.cachectl("export", "--image", url, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("is no image of cachectl; name another tag, or replace it with --force\n")
    assert repository.manifest("1") == before
    assert exported(here, url, "--force")["image_layers"] == 1


def test_a_cache_without_entries_writes_nothing(home: Home, real_registry: RealRegistry) -> None:
    done = home.cachectl("export", "--image", real_registry.url("team/warm:1"), check=False)
    assert done.returncode == 1
    assert "was not written" in done.stderr
    assert not Repository(Reference.parse(real_registry.url("team/warm:1"))).tags()


def test_an_address_must_be_one_and_have_a_tag(home: Home) -> None:
    for url in ("x:1", "oci://host", "oci://host/UPPER", f"oci://host/name@sha256:{'0' * 64}"):
        with pytest.raises(BadRequest):
            Stack(home.environment()).export_image(url)
    for arguments in (("--sign", "key"), ("--as-kdb", "folder")):
        done = home.cachectl("export", "--image", "oci://host/name:1", *arguments, check=False)
        assert done.returncode == 2
