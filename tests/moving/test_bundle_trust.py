"""Bundles: which are believed, and which are refused whole."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.bundles import TRUSTED, keys, write
from tiers import amount

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.selection import Selection
from cachectl.layers.formats import zstd
from cachectl.layers.stores.archive import tar_header
from cachectl.moving.bundle import MAGIC, BadBundle, Item, Manifest, Reader, write_bundle
from cachectl.moving.importing import Trust, import_bundle
from cachectl.moving.signing import Untrusted
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home


def framed(data: bytes) -> bytes:
    """Return a frame of zstd with this content."""
    frame = io.BytesIO()
    with zstd.ZstdFile(frame, "wb") as file:
        file.write(data)
    return frame.getvalue()


def tarred(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], *, after: bytes = b"") -> str:
    """Write a bundle by Python's own tarfile, with whatever members one likes."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(framed(plain.getvalue()) + after)
    return str(path)


def member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.type = len(data), 0o600, kind
    return info, data


@pytest.fixture
def keygen(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        key = tmp_path / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True)
        return key

    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    return make


def allow(path: Path, **signers: Path) -> str:
    lines = [f"{name}@example.org {key.with_suffix('.pub').read_text()}" for name, key in signers.items()]
    path.write_text("".join(lines))
    return str(path)


# ---------------------------------------------------------------------- trust


@pytest.mark.real
def test_a_signature_by_an_allowed_signer_is_demanded(
    source: Home, home: Home, tmp_path: Path, keygen: Callable[[str], Path]
) -> None:
    friend, stranger = keygen("friend"), keygen("stranger")
    file = str(tmp_path / "bundle")
    allowed = allow(tmp_path / "allowed", friend=friend)
    home.cachectl("import", file, "--allowed-signers", allowed, check=False)
    for arguments in ((), ("--sign", str(stranger))):
        assert source.cachectl("export", file, *arguments).returncode == 0
        done = home.cachectl("import", file, "--allowed-signers", allowed, check=False)
        assert done.returncode == 1
        assert "not signed" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (home.path / ".cache").exists()
    assert source.json("export", file, "--sign", str(friend))["signature"] == f"{file}.sig"
    document = home.json("import", file, "--allowed-signers", allowed)
    assert document["trusted"] == "signed by friend@example.org"
    assert keys(home) == keys(source)


@pytest.mark.real
def test_a_signature_of_a_small_bundle_is_of_its_bytes(
    source: Home, home: Home, tmp_path: Path, keygen: Callable[[str], Path]
) -> None:
    friend, file = keygen("friend"), tmp_path / "bundle"
    trust = Trust(allowed_signers=allow(tmp_path / "allowed", friend=friend))
    stack = Stack(home.environment())
    small = next(Stack(source.environment()).entries(layers=["pyopencl-invoker"]))
    Stack(source.environment()).export(str(file), Selection(key=small.key), sign=str(friend))
    # Less than a file holds back before it is flushed.
    assert file.stat().st_size < 4096
    subprocess.run(
        [
            *("ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "allowed"), "-I", "friend@example.org"),
            *("-n", "cachectl-bundle", "-s", f"{file}.sig"),
        ],
        input=file.read_bytes(),
        check=True,
    )
    assert import_bundle(stack, str(file), trust).trusted == "signed by friend@example.org"
    with zstd.ZstdFile(file, "rb") as whole:
        plain = whole.read()
    with zstd.ZstdFile(file, "wb", level=19) as whole:
        whole.write(plain)
    with pytest.raises(Untrusted):
        import_bundle(stack, str(file), trust)


@pytest.mark.real
def test_a_key_that_cannot_sign_leaves_no_bundle(source: Home, tmp_path: Path) -> None:
    done = source.cachectl("export", str(tmp_path / "bundle"), "--sign", str(tmp_path / "no key"), check=False)
    assert done.returncode == 2
    assert "this key does not exist" in done.stderr
    assert not (tmp_path / "bundle").exists()


def test_a_python_without_zstd_is_named(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachectl.layers.formats.zstd", None)
    monkeypatch.delattr("cachectl.layers.formats.zstd")
    with pytest.raises(CachectlError, match="this Python was built without it"):
        Stack(home.environment()).export(str(tmp_path / "bundle"))


def test_a_signature_for_something_else_does_not_count(
    home: Home, tmp_path: Path, keygen: Callable[[str], Path]
) -> None:
    friend = keygen("friend")
    file = write(tmp_path / "bundle", Manifest((), {}), [])
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(friend), "-n", "git", file], check=True)
    with pytest.raises(Untrusted):
        import_bundle(
            Stack(home.environment()), file, Trust(allowed_signers=allow(tmp_path / "allowed", friend=friend))
        )


def test_exactly_one_reason_to_trust_is_demanded(home: Home, tmp_path: Path) -> None:
    file = write(tmp_path / "bundle", Manifest((), {}), [])
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert home.cachectl("import", file, check=False).returncode == 2
    assert home.cachectl("import", file, "--trust", "--sha256", digest, check=False).returncode == 2
    assert home.cachectl("import", file, "--sha256", "abc", check=False).returncode == 2
    assert home.cachectl("import", file, "--sha256", "0" * 64, check=False).returncode == 1
    assert home.cachectl("import", file, "--sha256", digest.upper()).returncode == 0
    with pytest.raises(BadRequest):
        Trust()


def read_whole(file: Path) -> tuple[Manifest, list[tuple[Item, bytes]]]:
    """Read a bundle without trust to its end."""
    with file.open("rb") as bundle:
        reader = Reader(bundle, file.stat().st_size)
        return reader.manifest, list(reader.contents())


@pytest.mark.real
def test_one_byte_changed_anywhere_is_refused(packed: Path, home: Home, tmp_path: Path) -> None:
    original = packed.read_bytes()
    trust = Trust(sha256=hashlib.sha256(original).hexdigest())
    stack = Stack(home.environment())
    draw = random.Random(6)  # noqa: S311 - positions, no secrets
    file = tmp_path / "changed"
    whole = read_whole(packed)
    noticed = 0
    tries = amount(40, 200)
    for position in draw.sample(range(len(original)), tries):
        changed = bytearray(original)
        changed[position] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(CachectlError) as caught:
            import_bundle(stack, str(file), trust)
        assert isinstance(caught.value, (Untrusted, BadBundle))
        assert not (home.path / ".cache").exists()
        try:
            # Even unsigned, none passes for another bundle: bits that mean nothing may differ, no content.
            assert read_whole(file) == whole, position
        except BadBundle:
            noticed += 1
    assert noticed >= 0.95 * tries - 2
    assert import_bundle(stack, str(packed), trust).failed is False


@pytest.mark.real
def test_one_byte_changed_of_a_signed_bundle_is_refused(
    packed: Path, home: Home, tmp_path: Path, keygen: Callable[[str], Path]
) -> None:
    friend = keygen("friend")
    file = tmp_path / "bundle"
    shutil.copy(packed, file)
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-f", str(friend), "-n", "cachectl-bundle", str(file)], check=True
    )
    trust = Trust(allowed_signers=allow(tmp_path / "allowed", friend=friend))
    original = file.read_bytes()
    for position in (0, 3, len(original) // 2, len(original) - 1):
        changed = bytearray(original)
        changed[position] ^= 1
        file.write_bytes(changed)
        with pytest.raises((Untrusted, BadBundle)):
            import_bundle(Stack(home.environment()), str(file), trust)
        assert not (home.path / ".cache").exists()
    file.write_bytes(original)
    assert import_bundle(Stack(home.environment()), str(file), trust).trusted.endswith("friend@example.org")


# ---------------------------------------------------------------------- what no bundle may hold


def hostile(folder: Path, manifest: Manifest, contents: list[bytes]) -> Iterator[tuple[str, str]]:
    """Yield what each file does, and its name."""
    file = folder / "hostile"
    head = manifest.to_bytes()
    whole = [member("manifest.json", head), *(member(f"{n:07}", data) for n, data in enumerate(contents, 1))]
    first = manifest.items[0]

    yield "no zstd", (file.write_bytes(b"PK\3\4" + bytes(100)), str(file))[1]
    yield "empty", (file.write_bytes(b""), str(file))[1]
    yield "no tar", (file.write_bytes(framed(b"hello" * 1000)), str(file))[1]
    yield "no manifest first", tarred(file, [*whole[1:], whole[0]])
    yield "member too many", tarred(file, [*whole, member("0009999", b"x")])
    yield "member missing", tarred(file, whole[:-1])
    yield "member of an escaping name", tarred(file, [whole[0], member("../../.bashrc", contents[0]), *whole[2:]])
    yield "absolute name", tarred(file, [whole[0], member("/etc/passwd", contents[0]), *whole[2:]])
    link = member("0000001", b"", tarfile.SYMTYPE)
    link[0].linkname = "/etc/passwd"
    yield "link", tarred(file, [whole[0], link, *whole[2:]])
    hard = member("0000001", b"", tarfile.LNKTYPE)
    hard[0].linkname = "manifest.json"
    yield "hard link", tarred(file, [whole[0], hard, *whole[2:]])
    yield "folder", tarred(file, [whole[0], member("0000001", b"", tarfile.DIRTYPE), *whole[2:]])
    yield "device", tarred(file, [whole[0], member("0000001", b"", tarfile.CHRTYPE), *whole[2:]])
    yield "size that differs", tarred(file, [whole[0], member("0000001", contents[0] + b"x"), *whole[2:]])
    other = bytes([contents[0][0] ^ 1]) + contents[0][1:]
    yield "sum that differs", tarred(file, [whole[0], member("0000001", other), *whole[2:]])
    yield "something after it", tarred(file, whole, after=b"x")
    yield "an empty frame after it", tarred(file, whole, after=framed(b""))
    yield "cut", (file.write_bytes(Path(tarred(file, whole)).read_bytes()[:-3]), str(file))[1]
    for what, changed in (
        ("escaping key", replace(first, key="../../../x")),
        ("absolute key", replace(first, key="/etc/passwd")),
        ("sum that is none", replace(first, sha256="x")),
        ("negative size", replace(first, bytes=-1)),
        ("vast entry", replace(first, bytes=1 << 50)),
        ("layer that is a path", replace(first, layer="../x")),
    ):
        lying = replace(manifest, items=(changed, *manifest.items[1:]))
        yield what, tarred(file, [member("manifest.json", lying.to_bytes()), *whole[1:]])
    doubled = replace(manifest, items=(first, *manifest.items))
    yield "entry twice", tarred(file, [member("manifest.json", doubled.to_bytes()), whole[1], *whole[1:]])
    for what, text in (
        ("manifest that is no JSON", head[:-5]),
        ("manifest of another schema", head.replace(b"bundle/1", b"bundle/9")),
        ("manifest nested too deeply", b"[" * 100_000),
        ("manifest that is a list", b"[]"),
        ("manifest written otherwise", json.dumps(json.loads(head)).encode()),
    ):
        yield what, tarred(file, [member("manifest.json", text), *whole[1:]])
    big = tarfile.TarInfo("manifest.json")
    big.size, big.mode = 7 << 30, 0o600
    plain = big.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 20)
    yield "vast manifest", (file.write_bytes(framed(plain)), str(file))[1]
    yield "bomb", bomb(file, whole[0], contents[0])
    honest = tuple(replace(first, key=f"{first.key}{n:03}", bytes=1 << 30) for n in range(100))
    announced = Manifest(honest, {first.layer: {}})
    yield "bomb that announces itself", tarred(file, [member("manifest.json", announced.to_bytes())])


def bomb(file: Path, head: tuple[tarfile.TarInfo, bytes], data: bytes) -> str:
    """Write a bundle that goes on with 1 GiB of zeros, or 4 with ``--all``, where its second entry should be."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, content_ in (head, member("0000001", data)):
            tar.addfile(info, io.BytesIO(content_))
        start = plain.getvalue()[: tar.offset]
    with file.open("wb") as out, zstd.ZstdFile(out, "wb") as writer:
        writer.write(start)
        for _ in range(amount(1024, 4096)):
            writer.write(bytes(1 << 20))
    return str(file)


@pytest.mark.real
def test_a_bundle_with_a_forbidden_member_is_refused_whole(
    parts: tuple[Manifest, list[bytes]], home: Home, tmp_path: Path
) -> None:
    import resource

    stack = Stack(home.environment())
    tried = 0
    for what, file in hostile(tmp_path, *parts):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BadBundle) as caught:
            import_bundle(stack, file, TRUSTED)
        assert "\n" not in str(caught.value), what
        assert not (home.path / ".cache").exists(), what
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 300 * 1024, f"{what}: {grown} KiB"
        tried += 1
    assert tried > 30


@pytest.mark.thorough
@pytest.mark.real
def test_frames_may_end_anywhere_but_must_be_frames(
    parts: tuple[Manifest, list[bytes]], home: Home, tmp_path: Path
) -> None:
    manifest, contents = parts
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in [
            member("manifest.json", manifest.to_bytes()),
            *(member(f"{n:07}", data) for n, data in enumerate(contents, 1)),
        ]:
            tar.addfile(info, io.BytesIO(data))
    whole = plain.getvalue()
    stack = Stack(home.environment())
    file = tmp_path / "bundle"
    for cuts in ([0, 1, 700], [len(whole) - 1], [len(whole) // 2] * 50_000):
        places = [0, *cuts, len(whole)]
        frames = {part: framed(whole[part[0] : part[1]]) for part in set(pairwise(places))}
        pieces = [frames[part] for part in pairwise(places)]
        file.write_bytes(b"".join(pieces))
        dry = import_bundle(stack, str(file), TRUSTED, dry_run=True)
        assert sum(layer.placed for layer in dry.layers) == len(contents)
        # What zstd skips is no frame of a bundle.
        file.write_bytes(b"".join([*pieces[:-1], b"\x50\x2a\x4d\x18" + bytes(4), pieces[-1]]))
        with pytest.raises(BadBundle):
            import_bundle(stack, str(file), TRUSTED, dry_run=True)


def test_a_small_bundle_cut_or_changed_anywhere_is_the_same_or_none() -> None:
    """Every cut, bits everywhere, and whatever follows. Of some bits of a compressed file nothing depends."""
    contents = [b"", b"a" * 600, random.Random(6).randbytes(513), b"x" * 512]  # noqa: S311 - content, no secret
    items = [Item("pocl", f"{n}", "", len(data), hashlib.sha256(data).hexdigest()) for n, data in enumerate(contents)]
    file = io.BytesIO()
    write_bundle(file, Manifest(tuple(items), {"pocl": {"PoCL": None}}), contents)
    whole = file.getvalue()
    # Of each byte one bit, or all.
    bits = range(0, 8 * len(whole), amount(9, 1))
    damaged: list[bytes | bytearray] = [whole[:length] for length in range(len(whole))]
    for number in bits:
        changed = bytearray(whole)
        changed[number // 8] ^= 1 << number % 8
        damaged.append(changed)
    after = (b"\0", MAGIC, framed(b""), whole)
    refused = 0
    for data in (*damaged, *(whole + more for more in after)):
        try:
            reader = Reader(io.BytesIO(data), len(data))
            assert list(reader.contents()) == list(zip(items, contents, strict=True))
        except BadBundle:
            refused += 1
    assert len(damaged) + len(after) - refused < 100


def test_a_bundle_is_not_written_with_other_contents_than_its_manifest_says() -> None:
    item = Item("cuda", "a", "cuda-entry/65", 1, hashlib.sha256(b"1").hexdigest())
    for contents in ([], [b"1", b"2"]):
        with pytest.raises(ValueError, match="zip"):
            write_bundle(io.BytesIO(), Manifest((item,), {"cuda": {}}), contents)


def test_a_manifest_of_less_than_nothing_is_none() -> None:
    """Eleven characters can also mean -1, which would read a buffer without its last byte."""
    data = framed(tar_header("manifest.json", -1) + Manifest((), {}).to_bytes() + bytes(1))
    with pytest.raises(BadBundle, match="does not begin with a manifest"):
        Reader(io.BytesIO(data), len(data))


@pytest.mark.real
def test_the_hand_made_bundle_is_one_when_it_is_not_hostile(
    parts: tuple[Manifest, list[bytes]], home: Home, tmp_path: Path
) -> None:
    manifest, contents = parts
    whole = [
        member("manifest.json", manifest.to_bytes()),
        *(member(f"{n:07}", data) for n, data in enumerate(contents, 1)),
    ]
    done = import_bundle(Stack(home.environment()), tarred(tmp_path / "bundle", whole), TRUSTED)
    assert sum(layer.placed for layer in done.layers) == len(contents)


@pytest.mark.real
def test_a_form_or_layer_that_is_not_known_is_refused_and_the_rest_placed(
    parts: tuple[Manifest, list[bytes]], home: Home, tmp_path: Path
) -> None:
    manifest, contents = parts
    chosen = [(item, data) for item, data in zip(*[manifest.items, contents], strict=True) if item.layer == "pocl"]
    strange = replace(chosen[0][0], form="pocl-entry/99")
    unknown = replace(chosen[0][0], layer="zzz")
    items = (strange, *(item for item, _ in chosen[1:]), unknown)
    prints = {"pocl": manifest.portability_keys["pocl"], "zzz": {}}
    file = write(tmp_path / "bundle", Manifest(items, prints), [*(data for _, data in chosen), chosen[0][1]])
    for arguments in (["--dry-run"], []):
        done = home.cachectl("import", file, "--trust", "--json", *arguments, check=False)
        assert done.returncode == 1
        layers = {layer["layer"]: layer for layer in json.loads(done.stdout)["layers"]}
        assert [note["key"] for note in layers["pocl"]["failed"]] == [strange.key]
        assert layers["pocl"]["placed"] == len(chosen) - 1
        assert len(layers["zzz"]["failed"]) == 1
