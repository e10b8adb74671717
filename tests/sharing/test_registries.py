"""Stores in repositories of real registries, and their addresses."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.registries import RealRegistry

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.host.installing import command_to_install
from cachectl.moving.transfer import TransferFailed
from cachectl.sharing.oci.registry import RegistryPlace, name_of, tag_of
from cachectl.sharing.oci.repository import Reference
from cachectl.sharing.place import BadStore, Missing, Place

#: ``ann`` with the password ``secret``.
PASSWORDS = "ann:$2b$04$oYfeJDSmDJUn3oxyGEXZYOdM8FhJPmRfpzRD6mkOTASrcfgYcVnoG\n"
MOST = 1 << 20
KEY, MARKER = f"index/key-{'0' * 16}", f"index/store-{'a' * 32}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def part(made: int, data: bytes) -> str:
    return f"index/{made}-{'0' * 16}-{digest(data)}"


def fill(place: Place) -> dict[str, bytes]:
    """Write what a first push writes; return the content of each name."""
    pack, large, index = bytes(range(256)) * 400, bytes(range(256)) * 300, b"part"
    small = b"small" * 100
    content = {
        f"packs/{digest(pack)}": pack,
        f"objects/{digest(b'of the entry')}": large,
        f"packs/{digest(small)}": small,
        MARKER: b"\n",
        KEY: b"{}\n",
    }
    for name, data in content.items():
        place.write(name, data)
    name = part(1_700_000_000, index)
    place.write(name, index, [one for one in content if one.startswith(("packs/", "objects/"))])
    place.finish()
    return {**content, name: index}


def listed(place: Place) -> set[str]:
    return {stored.name for stored in place.names()}


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "shown", "plain"),
    [
        ("oci://localhost:5000/a", "oci://localhost:5000/a:latest", True),
        ("oci://127.0.0.1/a/b-c/d__e:v1.2", "oci://127.0.0.1/a/b-c/d__e:v1.2", True),
        ("oci://ghcr.io/team/store:main", "oci://ghcr.io/team/store:main", False),
        ("oci+http://registry.lan:80/a:1", "oci+http://registry.lan:80/a:1", True),
        (f"oci://[::1]:5000/a@sha256:{'0' * 64}", f"oci://[::1]:5000/a@sha256:{'0' * 64}", True),
        (
            f"oci://127.0.0.1.example.org/a:1@sha256:{'0' * 64}",
            f"oci://127.0.0.1.example.org/a@sha256:{'0' * 64}",
            False,
        ),
    ],
)
def test_addresses(url: str, shown: str, plain: bool) -> None:
    reference = Reference.parse(url)
    assert (str(reference), reference.plain) == (shown, plain)


def test_wrong_addresses_are_refused_in_one_line() -> None:
    long = "oci://host/name:" + "t" * 33
    urls = ("oci://", "oci://host", "oci://host/A", "oci://host/a:", "oci://host/a@sha256:00", "oci://h/a b", long)
    for url in (*urls, "oci://ann:secret@host/name:1"):
        with pytest.raises(BadRequest) as refused:
            RegistryPlace(url)
        assert "secret" not in str(refused.value)


def test_each_name_has_a_tag_and_tags_of_others_have_none() -> None:
    names = (KEY, MARKER, part(1_700_000_000, b""), f"index/condemned-1700000000-{'0' * 64}")
    for tag in ("main", "v1", "v1.2", "t" * 32):
        for name in names:
            assert len(tag_of(tag, name)) <= 128
            assert name_of(tag, tag_of(tag, name)) == name
    assert name_of("v1", tag_of("v1.2", KEY)) is None
    assert [name_of("v1", tag) for tag in ("v1", "v1.", "v1.x_y", "v2.key-0")] == [None] * 4


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oras.container", None)
    with pytest.raises(TransferFailed) as failed:
        RegistryPlace("oci://host/name:1")
    assert str(failed.value).endswith(f"to add it: {command_to_install('oras')}")


# ---------------------------------------------------------------------- a real registry


def test_written_objects_are_read_by_others(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    place = RegistryPlace(url)
    assert (list(place.names()), place.pin()) == ([], None)
    content = fill(place)
    other = RegistryPlace(url)
    before = len(real_registry.requests())
    assert listed(other) == {name for name in content if name.startswith("index/")}
    assert len(real_registry.requests()) == before + 1
    assert {name: other.read(name, MOST) for name in content} == content
    assert {stored.name: stored.bytes for stored in other.contents()} == {
        one: len(data) for one, data in content.items()
    }
    with pytest.raises(BadStore):
        other.read(max(content), 1)
    with pytest.raises(Missing):
        other.read(f"packs/{'0' * 64}", MOST)


def test_one_new_part_takes_few_requests(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    fill(RegistryPlace(url))
    before = len(real_registry.requests())
    place = RegistryPlace(url)
    place.names()
    pack, index = b"another", b"second"
    place.write(f"packs/{digest(pack)}", pack)
    place.write(part(1_700_000_001, index), index, [f"packs/{digest(pack)}"])
    place.finish()
    assert len(real_registry.requests()) - before < 10


def test_a_digest_pins_one_state(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    place = RegistryPlace(url)
    content = fill(place)
    pinned = place.pin()
    assert pinned is not None
    place.write(part(1_700_000_001, b"second"), b"second")
    place.finish()
    frozen = RegistryPlace(pinned)
    assert listed(frozen) == {name for name in content if name.startswith("index/")}
    assert {name: frozen.read(name, MOST) for name in content} == content
    with pytest.raises(BadRequest):
        frozen.write(KEY, b"{}")
    assert place.pin() != pinned


def test_removed_parts_go_with_what_they_alone_hold(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    # Another store of the repository has a manifest of the same content.
    other = RegistryPlace(real_registry.url("team/store:other"))
    fill(other)
    place = RegistryPlace(url)
    content = fill(place)
    kept, index = b"kept", b"second"
    place.write(f"packs/{digest(kept)}", kept)
    place.write(part(1_700_000_001, index), index, [f"packs/{digest(kept)}"])
    place.finish()
    first = next(name for name in content if "1700000000" in name)
    # Until the grace period is over, a note of what was removed holds it.
    packs = [name for name in content if name.startswith("packs/")]
    note = f"index/condemned-1700000002-{'0' * 64}"
    place.write(note, b"note", packs)
    place.remove([first, f"index/{'0' * 10}"])
    after = RegistryPlace(url)
    assert listed(after) == {KEY, MARKER, note, part(1_700_000_001, index)}
    real_registry.collect()
    assert [RegistryPlace(url).read(pack, MOST) for pack in packs] == [content[pack] for pack in packs]
    other.remove(sorted(listed(other)))
    place.remove([note])
    real_registry.collect()
    after = RegistryPlace(url)
    assert {stored.name for stored in after.contents()} == {*listed(after), f"packs/{digest(kept)}"}
    for name in {stored.name for stored in after.contents()}:
        after.read(name, MOST)
    for pack in packs:
        with pytest.raises(Missing):
            RegistryPlace(url).read(pack, MOST)


def test_tags_that_lead_elsewhere_are_refused(real_registry: RealRegistry) -> None:
    one, two = (RegistryPlace(real_registry.url(f"team/store:{tag}")) for tag in ("one", "two"))
    content = fill(one)
    name = next(name for name in content if "1700000000" in name)
    two.write(part(1_700_000_009, b"other"), b"other")
    elsewhere = two._repository.manifest(tag_of("two", part(1_700_000_009, b"other")))
    for target in (elsewhere.content, one._repository.manifest(tag_of("one", KEY)).content):
        one._repository.put_manifest(tag_of("one", name), target)
        fresh = RegistryPlace(real_registry.url("team/store:one"))
        with pytest.raises(BadStore):
            fresh.read(name, MOST)
        with pytest.raises(BadStore):
            fresh.contents()
    # A tag with something else does not become a store.
    one._repository.put_manifest("two", elsewhere.content)
    with pytest.raises(BadStore):
        RegistryPlace(real_registry.url("team/store:two")).write(KEY, b"{}")


def test_changed_blobs_are_refused(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    content = fill(RegistryPlace(url))
    for blob in (real_registry.folder / "data").rglob("blobs/sha256/*/*/data"):
        data = blob.read_bytes()
        blob.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        refused = 0
        for name in content:
            try:
                same = RegistryPlace(url).read(name, MOST) == content[name]
            except (BadStore, TransferFailed):
                refused += 1
            else:
                assert same
        # Nothing is read of the image index, of the empty configuration, and of an index that was replaced.
        blob.write_bytes(data)
        assert refused or digest(data) not in {digest(one) for one in content.values()}


def test_an_index_that_writers_replaced_at_once_is_completed(real_registry: RealRegistry) -> None:
    url = real_registry.url("team/store:main")
    place = RegistryPlace(url)
    content = fill(place)
    old = place._repository.manifest("main").content
    place.write(part(1_700_000_001, b"lost"), b"lost")
    place.finish()
    place._repository.put_manifest("main", old)
    third = RegistryPlace(url)
    third.names()
    third.write(part(1_700_000_002, b"third"), b"third")
    third.finish()
    pinned = third.pin()
    assert pinned is not None
    expected = {*(name for name in content if name.startswith("index/"))}
    expected |= {part(1_700_000_001, b"lost"), part(1_700_000_002, b"third")}
    assert listed(RegistryPlace(pinned)) == expected == listed(third)


def test_a_tag_without_a_manifest_counts_as_removed(real_registry: RealRegistry) -> None:
    place = RegistryPlace(real_registry.url("team/store:main"))
    fill(place)
    second = part(1_700_000_001, b"second")
    place.write(second, b"second")
    deleted = place._repository.manifest(tag_of("main", second)).digest.partition(":")[2]
    # As the registry leaves it if the program that deletes the manifest is killed.
    next((real_registry.folder / "data").rglob(f"revisions/sha256/{deleted}/link")).unlink()
    fresh = RegistryPlace(real_registry.url("team/store:main"))
    assert second in listed(fresh)
    with pytest.raises(Missing):
        fresh.read(second, MOST)
    assert second not in listed(fresh)
    assert fresh.contents()


def test_a_registry_with_passwords(
    real_registries: Callable[..., RealRegistry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passwords").write_text(PASSWORDS)
    real_registry = real_registries(more=f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/passwords}}}}")
    url = real_registry.url("team/store:main")
    for password in (None, "wrong", "secret"):
        login = base64.b64encode(f"ann:{password}".encode()).decode()
        auths = {} if password is None else {real_registry.address: {"auth": login}}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        if password == "secret":  # noqa: S105 - of no account
            content = fill(RegistryPlace(url))
            assert listed(RegistryPlace(url)) == {name for name in content if name.startswith("index/")}
        else:
            with pytest.raises(TransferFailed, match=rf"status 401.*podman login {real_registry.address}"):
                RegistryPlace(url).names()


def test_failures_are_one_line(real_registries: Callable[..., RealRegistry]) -> None:
    kept = real_registries("kept", delete=False)
    place = RegistryPlace(kept.url("team/store:main"))
    content = fill(place)
    with pytest.raises(TransferFailed, match="does not delete"):
        place.remove([name for name in content if name.startswith("index/")])
    with pytest.raises(TransferFailed, match=r"cannot reach .*refused") as failed:
        RegistryPlace("oci://127.0.0.1:9/team/store:1").names()
    assert "\n" not in str(failed.value)
