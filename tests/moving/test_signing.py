"""Signer and time of a signature: patterns in the list of signers, and old bundles with a good signature."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.selection import moment_text, parse_moment
from cachectl.moving.bundle import BadBundle, Manifest, parse_manifest
from cachectl.moving.signing import Untrusted, sign, signer

if TYPE_CHECKING:
    from pathlib import Path

    from homes import Home


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return a private key; its public one lies beside it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def allow(key: Path, *principals: str) -> str:
    lines = (f"{principal} {key.with_suffix('.pub').read_text()}" for principal in principals)
    (key.parent / "allowed").write_text("".join(lines))
    return str(key.parent / "allowed")


def fingerprint(key: Path) -> str:
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(key)], capture_output=True, text=True, check=True).stdout
    return f"ED25519 key {shown.split()[1]}"


def test_a_key_that_does_not_exist_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with open(os.devnull, "rb") as file, pytest.raises(BadRequest, match="none: this key does not exist; ssh-keygen"):
        sign(file, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("principals", "name"),
    [
        ("!eve@x,*@x", "*@x (KEY)"),
        ("*@x,!eve@x", "*@x (KEY)"),
        ("an?@x", "an?@x (KEY)"),
        ("*@x,ann@x", "ann@x"),
        ("ann@x,bob@x", "ann@x"),
        ("!*@x,*@x", None),
        ("!eve@x", None),
        ("!ann@x,ann@x", None),
    ],
)
def test_a_signer_is_named_as_far_as_the_list_says_who_it_is(key: Path, principals: str, name: str | None) -> None:
    data = key.parent / "data"
    data.write_bytes(b"data")
    with data.open("rb") as file:
        (key.parent / "data.sig").write_bytes(sign(file, str(key)))
        arguments = (file, str(data) + ".sig", allow(key, principals))
        if name is None:
            with pytest.raises(Untrusted):
                signer(*arguments)
        else:
            assert signer(*arguments) == name.replace("KEY", fingerprint(key))


@pytest.fixture
def cuda(home: Home, compute_cache: Callable[[Path], None]) -> Home:
    """Return a home with entries to export."""
    compute_cache(home.path / ".nv" / "ComputeCache")
    return home


def test_a_signed_bundle_says_when_it_was_made_and_an_old_one_can_be_refused(cuda: Home, key: Path) -> None:
    home = cuda
    options = ("--allowed-signers", allow(key, "ann@x"), "--dry-run")
    home.cachectl("export", "old", "--sign", str(key), SOURCE_DATE_EPOCH="1600000000")
    home.cachectl("export", "new", "--sign", str(key))
    assert home.json("import", "old", *options)["made"] == 1600000000
    assert "made: 2020-09-13 12:26 UTC" in home.cachectl("import", "old", *options).stdout
    for moment in ("30d", "2026-01-01", "2020-09-13T12:26:40"):
        done = home.cachectl("import", "old", *options, "--newer-than", moment, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "old: was made 2020-09-13 12:26 UTC" in done.stderr
        assert home.cachectl("import", "new", *options, "--newer-than", moment).returncode == 0
    home.cachectl("import", "old", *options, "--newer-than", "2020-09-13T12:26:39")
    # An older signature does not fit: the moment is among the bytes that are signed.
    os.replace(home.path / "new.sig", home.path / "old.sig")
    assert "not signed" in home.cachectl("import", "old", *options, check=False).stderr
    assert home.cachectl("import", "new", "--trust", "--newer-than", "soon", check=False).returncode == 2


def test_the_signature_of_an_older_bundle_is_said_to_be_one(cuda: Home, key: Path) -> None:
    (cuda.path / "signers").write_text(f"ann {key.with_suffix('.pub').read_text()}")
    cuda.cachectl("export", "b.cachectl", "--sign", str(key))
    cuda.cachectl("export", "b.cachectl")
    done = cuda.cachectl("import", "b.cachectl", "--allowed-signers", "signers", check=False)
    assert done.returncode == 1
    assert "the signature is damaged or of other content; sign again, as by cachectl export --sign KEY" in done.stderr


def test_an_unsigned_bundle_depends_on_its_content_alone(cuda: Home, key: Path) -> None:
    home = cuda
    for name in ("one", "other"):
        home.cachectl("export", name)
    assert (home.path / "one").read_bytes() == (home.path / "other").read_bytes()
    assert home.json("import", "one", "--trust")["made"] is None
    done = home.cachectl("import", "one", "--trust", "--newer-than", "30d", check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "has no time of signing" in done.stderr
    # Signed ones do too, if the moment is given.
    for name in ("one", "other"):
        home.cachectl("export", name, "--sign", str(key), SOURCE_DATE_EPOCH="1600000000")
    assert (home.path / "one").read_bytes() == (home.path / "other").read_bytes()


@pytest.mark.parametrize("made", [-1, 1.5, "1600000000", True, 1 << 60, [], {}])
def test_a_moment_that_is_none_is_refused(made: object) -> None:
    text = Manifest((), {}, made=1600000000).to_bytes()
    assert parse_manifest(text).made == 1600000000
    with pytest.raises(BadBundle):
        parse_manifest(text.replace(b"1600000000", json.dumps(made).encode()))


def test_a_moment_is_an_age_or_a_date() -> None:
    assert parse_moment("2h", 10_000.0) == 2800.0
    assert parse_moment("1970-01-02", 0.0) == 86400.0
    assert parse_moment("1970-01-01T01:00+01:00", 0.0) == 0.0
    for text in ("", "soon", "30", "2026-13-01", "1.2.3d", "nan"):
        with pytest.raises(BadRequest):
            parse_moment(text, 0.0)
    assert moment_text(1e300).endswith("after 1970")
