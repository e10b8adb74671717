"""Shared stores on real servers: what is asked for, how many bytes travel, and what crowds of writers lose: nothing."""

import os
from pathlib import Path

import pytest
from homes import Home
from support.bundles import TRUSTED
from support.miopen_kernels import add_kernels, kernels_in
from support.servers import BUCKET, S3
from tiers import amount, thorough, thorough_only

from cachectl.exchange.place import Missing, TransferFailed
from cachectl.layers.base.errors import BadRequest

pytest.importorskip("fsspec")

pytestmark = pytest.mark.usefixtures("no_proxy")
KERNELS = 10_000
#: How long a crowd works; ``CACHECTL_TEST_STRESS`` gives other seconds, such as 60.
SECONDS = os.environ.get("CACHECTL_TEST_STRESS") or amount("2", "30")


@pytest.fixture
def s3_url(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}/store"


@thorough_only
def test_s3_is_asked_once_for_an_unchanged_store_and_rarely_for_one_kernel(
    home: Home, other: Home, s3_url: str, s3_server: S3
) -> None:
    add_kernels(home, range(KERNELS))
    here, there = home.stack, other.stack
    here.push(s3_url)
    assert there.pull(s3_url, TRUSTED).total.placed == KERNELS
    assert kernels_in(other) == kernels_in(home)

    s3_server.requests.clear()
    assert there.pull(s3_url, TRUSTED).total.there == KERNELS
    assert [method for method, _ in s3_server.requests] == ["GET"]

    add_kernels(other, [KERNELS])
    s3_server.requests.clear()
    done = there.push(s3_url)
    requests = list(s3_server.requests)
    assert (done.total.placed, done.total.there) == (1, KERNELS)
    assert len(requests) < 10
    assert done.moved <= sum(sent for _, sent in requests) < 4000
    # The pack and the index part.
    assert [method for method, _ in requests].count("PUT") == 2

    s3_server.requests.clear()
    pulled = here.pull(s3_url, TRUSTED)
    assert (pulled.total.placed, pulled.total.there) == (1, KERNELS)
    # The listing, the new index part, and the pack.
    assert len(s3_server.requests) == 3
    assert pulled.moved < 1000
    assert here.store(s3_url).verify().findings == ()


@thorough_only
def test_a_store_over_ssh_gets_only_what_is_new(home: Home, other: Home, sftp: tuple[str, Path]) -> None:
    address, folder = sftp
    url, log = f"{address}/store", folder.with_name("requests")
    add_kernels(home, range(20))
    here, there = home.stack, other.stack
    assert "password" not in here.push(url).url
    assert there.pull(url, TRUSTED).total.placed == 20
    add_kernels(other, [20])
    log.unlink()
    done = there.push(url)
    asked = [line.split()[0] for line in log.read_text().splitlines()]
    assert done.total.placed == 1
    assert (asked.count("list"), asked.count("read"), asked.count("write")) == (1, 0, 2)
    assert not [path for path in folder.rglob(".*") if path.is_file()]
    assert here.pull(url, TRUSTED).total.placed == 1
    assert kernels_in(home) == kernels_in(other)
    assert there.store(url).verify().findings == ()
    for path in folder.rglob("packs/*"):
        os.utime(path, (path.stat().st_mtime - 2 * 86400,) * 2)
    assert there.store(url).gc(older_than=-1.0).removed == 2


@thorough_only
def test_a_server_that_fails_is_one_line_without_its_password(home: Home, sftp: tuple[str, Path], s3_url: str) -> None:
    address, folder = sftp
    stack = home.stack
    for url in (f"{address}/none", f"{s3_url}/none"):
        with pytest.raises(Missing, match="there is no store") as raised:
            stack.pull(url, TRUSTED)
        assert "password" not in str(raised.value)
    add_kernels(home, range(2))
    with pytest.raises(TransferFailed, match="cannot") as failed:
        stack.push("s3://no-such-bucket/store")
    assert len(str(failed.value).splitlines()) == 1
    with pytest.raises(BadRequest, match="must not contain"):
        stack.push(f"{s3_url}/team*")
    said = home.refused("pull ssh://ann:password@127.0.0.1:1/store --trust", says="cachectl: ")
    assert (len(said.splitlines()), "password" in said) == (1, False)
    assert os.listdir(folder) == []


@thorough_only
@pytest.mark.parametrize(
    ("place", "crowd"),
    [
        ("store", "1"),
        *thorough(("store.zip", "1")),
        *(pytest.param(place, "4", marks=pytest.mark.hazard) for place in ("store", "store.zip", "s3", "ssh")),
    ],
)
def test_nothing_that_a_push_acknowledged_is_lost(
    home: Home, tmp_path: Path, request: pytest.FixtureRequest, place: str, crowd: str
) -> None:
    """Writers, readers and a collector work on one store, of which two are killed every second."""
    url = str(tmp_path / place)
    if place == "s3":
        url = str(request.getfixturevalue("s3_url"))
    elif place == "ssh":
        url = f"{request.getfixturevalue('sftp')[0]}/store"
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    done = home.python("store_stress.py", url, f"{tmp_path}/homes", SECONDS, crowd, crowd, **variables)
    assert [done[name] for name in ("deaths", "damaged", "lost", "wrong")] == [[]] * 4
    assert min(done["acknowledged"], done["kills"]) > 0
