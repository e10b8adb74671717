"""Bundles at URLs: a real server of the web, and a real one of S3's protocol, both on this machine."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from support.kernels import add_kernels
from support.servers import BUCKET, client, objects
from tiers import thorough

from cachectl.moving.importing import Trust, import_bundle
from cachectl.moving.transfer import (
    TransferFailed,
    is_url,
    opened,
    place,
    signature_name,
    signature_of,
    translated,
    without_secrets,
)
from cachectl.stack import Stack

if TYPE_CHECKING:
    from homes import Home

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

pytestmark = pytest.mark.usefixtures("no_proxy")

KERNELS = 3


def keys(home: Home) -> set[str]:
    return {entry.key for entry in Stack(home.environment())["miopen"].entries()}


@pytest.fixture
def source(tmp_path: Path, new_home: Callable[[Path], Home]) -> Home:
    home = new_home(tmp_path / "source")
    add_kernels(home, range(KERNELS))
    return home


class Handler(SimpleHTTPRequestHandler):
    """Serve a folder, and at some addresses what a bad server or network would."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has there
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path.startswith("/broken"):
            self.send_error(500)
        elif self.path.startswith("/closed"):
            self.send_error(403)
        elif self.path.startswith("/cut"):
            data = (Path(self.directory) / "bundle").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            super().do_GET()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder; yield its address and the folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()


@pytest.fixture
def keygen(tmp_path: Path) -> tuple[Path, str]:
    """Make a key, and a list that allows it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text(f"ann@example.org {key.with_suffix('.pub').read_text()}")
    return key, str(allowed)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """See that a command failed in one line, and return the line."""
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


# ---------------------------------------------------------------------- the web


def test_a_bundle_is_imported_from_a_web_server(source: Home, home: Home, web: tuple[str, Path]) -> None:
    address, folder = web
    digest = source.json("export", str(folder / "bundle"), "miopen")["sha256"]
    assert home.json("import", f"{address}/bundle", "--sha256", digest, "--dry-run")["total"]["placed"] == KERNELS
    assert keys(home) == set()
    document = home.json("import", f"{address}/bundle", "--sha256", digest)
    assert document["sha256"] == digest
    assert keys(home) == keys(source) != set()


@pytest.mark.thorough
def test_a_signature_is_taken_from_beside_it(
    source: Home, home: Home, web: tuple[str, Path], keygen: tuple[Path, str]
) -> None:
    address, folder = web
    key, allowed = keygen
    source.cachectl("export", str(folder / "bundle"), "miopen", "--sign", str(key))
    (folder / "bundle.sig").rename(folder / "kept")
    line = refused(home.cachectl("import", f"{address}/bundle", "--allowed-signers", allowed, check=False))
    assert f"{address}/bundle.sig does not exist" in line
    (folder / "bundle.sig").write_bytes((folder / "kept").read_bytes().replace(b"U1NIU0lH", b"U1NIU0lI"))
    refused(home.cachectl("import", f"{address}/bundle", "--allowed-signers", allowed, check=False))
    assert not (home.path / ".cache").exists()
    (folder / "kept").rename(folder / "bundle.sig")
    document = home.json("import", f"{address}/bundle?token=abc", "--allowed-signers", allowed)
    assert document["trusted"] == "signed by ann@example.org"
    assert document["file"] == f"{address}/bundle?…"
    assert keys(home) == keys(source)


def test_no_signature_is_kept_where_others_can_exchange_it(
    home: Home, web: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a temporary folder that is not sticky, another user could put a signature in the place of the fetched one."""
    address, folder = web
    (folder / "bundle.sig").write_text("signed")
    with TemporaryDirectory() as name:
        place = Path(name).resolve()
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setenv("XDG_STATE_HOME", str(home.path))
        place.chmod(0o1777)
        with signature_of(f"{address}/bundle") as signature:
            assert Path(signature).read_text() == "signed"
            assert Path(signature).parent.parent == place / f"cachectl-{os.geteuid()}"
        place.chmod(0o777)
        with signature_of(f"{address}/bundle") as signature:
            assert Path(signature).parent.parent == home.path / "cachectl" / "scratch"
        assert not Path(signature).parent.exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing", "nothing is there"),
        ("cut", "ayload"),
        *thorough(("broken", "500"), ("closed", "credentials"), ("text", "not compr")),
    ],
)
def test_an_error_of_the_server_is_one_line_and_nothing_is_written(
    source: Home, home: Home, web: tuple[str, Path], path: str, words: str
) -> None:
    address, folder = web
    source.cachectl("export", str(folder / "bundle"), "miopen")
    (folder / "text").write_text("no bundle")
    line = refused(home.cachectl("import", f"{address}/{path}?secret=abc", "--trust", check=False))
    assert words in line
    assert f"{address}/{path}" in line
    assert "abc" not in line
    assert not (home.path / ".cache").exists()


def test_a_server_that_is_not_there_is_one_line(home: Home) -> None:
    # Taken, so that nobody else gets the port meanwhile, and not listened at.
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://ann:password@127.0.0.1:{taken.getsockname()[1]}/bundle"
        line = refused(home.cachectl("import", address, "--trust", check=False))
    assert "cannot read http://" in line
    assert "password" not in line


def test_a_web_server_is_not_written_to(source: Home, web: tuple[str, Path]) -> None:
    address, folder = web
    done = source.cachectl("export", f"{address}/bundle", check=False)
    assert "cannot write to a web server; export to a file" in refused(done)
    assert list(folder.iterdir()) == []


def test_a_scheme_that_nobody_knows_is_one_line(home: Home) -> None:
    assert "s3://" in refused(home.cachectl("import", "nonsense://place/bundle", "--trust", check=False))
    assert "s3://" in refused(home.cachectl("export", "nonsense://place/bundle", check=False))


def test_a_file_may_be_given_as_a_url(source: Home, home: Home, tmp_path: Path) -> None:
    source.cachectl("export", f"file://{tmp_path}/a%20bundle", "miopen")
    assert (tmp_path / "a bundle").is_file()
    home.cachectl("import", f"file://{tmp_path}/a%20bundle", "--trust")
    assert keys(home) == keys(source)


# ---------------------------------------------------------------------- the packages


@pytest.mark.thorough
def test_without_the_packages_a_url_names_them_and_a_file_works(source: Home, home: Home, tmp_path: Path) -> None:
    for name in ("fsspec", "aiohttp"):
        folder = tmp_path / f"without-{name}"
        folder.mkdir()
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('not installed', name={name!r})\n")
        path = f"{folder}:{home.variables.get('PYTHONPATH', '')}"
        line = refused(home.cachectl("import", "https://example.org/x", "--trust", check=False, PYTHONPATH=path))
        assert line.endswith("the extra remote: pip install 'opencl-cachectl[remote]'\n")
        source.cachectl("export", str(tmp_path / "bundle"), "miopen", PYTHONPATH=path)
        home.cachectl("import", str(tmp_path / "bundle"), "--trust", PYTHONPATH=path)
        assert keys(home) == keys(source)


def test_fsspec_is_not_loaded_for_a_file(source: Home, tmp_path: Path) -> None:
    code = (
        "import sys; from cachectl.cli.main import main; main(['export', sys.argv[1], 'miopen']); "
        "main(['import', sys.argv[1], '--trust']); sys.exit('fsspec' in sys.modules)"
    )
    source.run(sys.executable, "-c", code, str(tmp_path / "bundle"))


def test_urls_are_recognised_and_shown_without_secrets() -> None:
    assert [is_url(name) for name in ("s3://b/x", "simplecache::s3://b/x", "file:///x", "a/b", "C:\\x", "a::b")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert without_secrets("https://ann:pw@h/x?token=1") == "https://…@h/x?…"
    assert without_secrets("a?b") == "a?b"
    assert signature_name("https://h/x?token=1") == "https://h/x.sig?token=1"
    assert signature_name("s3://b/x") == "s3://b/x.sig"


# ---------------------------------------------------------------------- S3


@pytest.mark.thorough
def test_a_bundle_goes_to_s3_and_comes_from_there(
    source: Home, home: Home, s3: dict[str, str], keygen: tuple[Path, str], tmp_path: Path
) -> None:
    key, allowed = keygen
    there = replace(source, variables={**source.variables, **s3})
    here = replace(home, variables={**home.variables, **s3})
    url = f"s3://{BUCKET}/both/warm.cachectl"

    # The date of a signature is among the bytes that are signed.
    dated = type(there)(there.path, {**there.variables, "SOURCE_DATE_EPOCH": "1600000000"})
    document = dated.json("export", url, "miopen", "--sign", str(key))

    assert (document["file"], document["signature"]) == (url, f"{url}.sig")
    local = ("export", str(tmp_path / "local"), "miopen", "--sign", str(key))
    source.cachectl(*local, SOURCE_DATE_EPOCH="1600000000")
    stored = objects(s3, "both/")
    assert set(stored) == {"both/warm.cachectl", "both/warm.cachectl.sig"}
    assert stored["both/warm.cachectl"] == (tmp_path / "local").read_bytes()
    assert here.json("import", url, "--sha256", document["sha256"], "--dry-run")["total"]["placed"] == KERNELS
    assert here.json("import", url, "--allowed-signers", allowed)["trusted"] == "signed by ann@example.org"
    assert keys(home) == keys(source)
    assert here.json("import", url, "--trust")["total"]["there"] == KERNELS


@pytest.mark.thorough
def test_a_refusal_by_s3_is_one_line(source: Home, home: Home, s3: dict[str, str]) -> None:
    here = replace(home, variables={**home.variables, **s3})
    there = replace(source, variables={**source.variables, **s3})
    assert "nothing is there" in refused(here.cachectl("import", f"s3://{BUCKET}/none", "--trust", check=False))
    line = refused(there.cachectl("export", "s3://no-such-bucket/x", "miopen", check=False))
    assert "cannot write s3://no-such-bucket/x" in line
    nobody = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    line = refused(here.cachectl("import", f"s3://{BUCKET}/none", "--trust", check=False, **nobody))
    assert "credentials" in line
    assert not (home.path / ".cache").exists()


@pytest.mark.thorough
def test_an_upload_that_breaks_off_leaves_what_was_there(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    # Parts as small as S3 takes, so that some have arrived when it breaks.
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 << 20)
    url = f"s3://{BUCKET}/broken/bundle"

    def breaking() -> Iterator[bytes]:
        for _ in range(12):
            yield bytes(1 << 20)
        raise OSError(28, "No space left on device")

    with pytest.raises(TransferFailed, match="No space left"):
        place(url, breaking())
    assert objects(s3, "broken/") == {}
    place(url, iter([b"whole" * 3_000_000]))
    assert objects(s3, "broken/") == {"broken/bundle": b"whole" * 3_000_000}
    with pytest.raises(TransferFailed):
        place(url, breaking())
    assert objects(s3, "broken/") == {"broken/bundle": b"whole" * 3_000_000}
    assert client(s3).list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []
    with opened(url) as remote:
        assert io.BytesIO(remote.read(15_000_000)).getvalue() == b"whole" * 3_000_000
        assert remote.read(1) == b""


# ---------------------------------------------------------------------- SFTP


def test_a_bundle_goes_over_ssh_and_comes_back(source: Home, home: Home, sftp: tuple[str, Path]) -> None:
    address, folder = sftp
    document = source.json("export", f"{address}/bundle", "miopen")
    assert "password" not in document["file"]
    assert os.listdir(folder) == ["bundle"]
    assert hashlib.sha256((folder / "bundle").read_bytes()).hexdigest() == document["sha256"]
    home.cachectl("import", f"{address}/bundle", "--sha256", document["sha256"])
    assert keys(home) == keys(source)
    assert "nothing is there" in refused(home.cachectl("import", f"{address}/none", "--trust", check=False))

    def breaking() -> Iterator[bytes]:
        yield bytes(1 << 20)
        # What is there so far, under whatever name.
        assert len(os.listdir(folder)) == 2
        raise OSError(28, "No space left on device")

    with pytest.raises(TransferFailed, match="No space left"):
        place(f"{address}/bundle", breaking())
    assert os.listdir(folder) == ["bundle"]
    assert hashlib.sha256((folder / "bundle").read_bytes()).hexdigest() == document["sha256"]


def test_a_stack_imports_from_a_url_too(source: Home, home: Home, web: tuple[str, Path]) -> None:
    address, folder = web
    Stack(source.environment()).export(str(folder / "bundle"), layers=["miopen"])
    done = import_bundle(Stack(home.environment()), f"{address}/bundle", Trust(blindly=True))
    assert sum(layer.placed for layer in done.layers) == KERNELS


def test_a_password_in_the_text_of_an_error_is_hidden() -> None:
    with pytest.raises(TransferFailed) as raised, translated("read", "s3://ann:s3cret%20word@bucket/x?key=t0ken"):
        raise ValueError("invalid name ann:s3cret%20word@bucket, user ann, s3cret word, t0ken")
    assert not any(secret in str(raised.value) for secret in ("s3cret", "t0ken"))
    assert "user ann" in str(raised.value)
