"""Tampered stores: changed, cut, swapped, replayed and foreign files are refused, and nothing is written."""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from homes import CACHECTL, Home, make_home
from support.bundles import TRUSTED, refused
from support.miopen_kernels import add_kernels
from support.servers import watched
from tiers import amount, as_root, thorough, thorough_only

from cachectl.exchange import place, trust, wire
from cachectl.layers.core.entry import Entry
from cachectl.layers.formats import zstd
from cachectl.stack import Stack

#: Random changes, beside those that are written down.
RANDOM = amount(12, 250)


@pytest.fixture(scope="module")
def key(keygen: Callable[[str], str]) -> Path:
    return Path(keygen("ann"))


@pytest.fixture(scope="module")
def good(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a signed ``store`` of two pushes; beside it lies ``older``, the same after the first one."""
    folder = tmp_path_factory.mktemp("good")
    home = make_home(folder / "home")
    stack = home.stack
    add_kernels(home, range(5))
    add_kernels(home, range(5, 7), size=400 << 10)
    stack.push(f"{folder}/store", sign=str(key))
    shutil.copytree(folder / "store", folder / "older")
    add_kernels(home, range(7, 9))
    # Parts of one second are in no order.
    stack = Stack(home.environment()._replace(clock=lambda: time.time() + 5))
    for name in ("store", "store.zip"):
        stack.push(folder / name, sign=str(key))
    return folder


@pytest.fixture
def store(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def signed(key: Path) -> trust.Trust:
    return trust.Trust(allowed_signers=str(key.with_name("allowed")))


def names(store: Path) -> Sequence[str]:
    return wire.sort_names(place.FolderPlace(store).names("index"))[0]


def parts(store: Path) -> list[Path]:
    return [store / "index" / name for name in names(store)]


def rewritten(store: Path, change: Callable[[bytes], bytes], key: Path | None = None) -> None:
    """Change the text of the newest index part, and name it anew; ``key`` signs it again."""
    path, name = parts(store)[-1], names(store)[-1]
    text, signature = wire.open_part(name, path.read_bytes())
    text = change(text)
    file = wire.file_of(text, signature if key is None else trust.sign(text, str(key)))
    path.unlink()
    path.with_name(f"{name[:-64]}{hashlib.sha256(file).hexdigest()}").write_bytes(file)


def changed(at: int, **changes: object) -> Callable[[bytes], bytes]:
    """Return what changes members of a line in an index part: 0 is the first line, 1 the first entry."""

    def change(text: bytes) -> bytes:
        lines = text.split(b"\n")
        lines[at] = wire.canonical({**json.loads(lines[at]), **changes})
        return b"\n".join(lines)

    return change


@pytest.mark.parametrize("name", ["store", "store.zip"])
def test_random_changes_of_any_file_are_refused(
    good: Path, tmp_path: Path, home: Home, signed: trust.Trust, name: str
) -> None:
    """Every file of the store is needed here: a change of one byte, a cut or an addition is noticed."""
    draw = random.Random(17)  # noqa: S311 - no secret
    whole = (good / "store.zip").read_bytes()
    for number in range(RANDOM):
        store = tmp_path / f"{number}-{name}"
        (shutil.copytree if name == "store" else shutil.copy)(good / name, store)
        path = draw.choice(sorted(path for path in (store, *store.rglob("*")) if path.is_file()))
        data = bytearray(path.read_bytes())
        how = draw.choice(["flip", "cut", "add", *(["remove"] if name == "store" else ())])
        if how == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del data[draw.randrange(len(data)) :]
        elif how == "add":
            data += draw.randbytes(draw.randrange(1, 99))
        path.write_bytes(data)
        if how == "remove":
            path.unlink()
            if path.parent.name == "index" and "key-" not in path.name:
                # Without the newest part it is an older store, which only a machine that has read it knows.
                continue
        if name == "store":
            refused(home, store, draw.choice([signed, TRUSTED]))
            continue
        refused(home, store, trust.Trust(digest=hashlib.sha256(whole).hexdigest()))
        with suppress(place.BadStore, trust.Untrusted, place.Missing):
            # Some bytes of a zip say nothing that is used.
            assert (how, home.stack.pull(str(store), TRUSTED).total.placed) == ("flip", 9)
            home.stack.purge()
    assert name != "store" or not (home.path / ".cache").exists()


def test_signatures_and_digests_decide_before_anything_is_parsed(
    home: Home, store: Path, key: Path, signed: trust.Trust, keygen: Callable[[str], str]
) -> None:
    eve, stack = Path(keygen("eve")), home.stack
    digest = stack.store(store).ls().digest

    def parse(*_: object) -> None:
        raise AssertionError("it was parsed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachectl.exchange.wire.parse_part", parse)
        assert "no part of its index" in refused(
            home, store, trust.Trust(allowed_signers=str(eve.with_name("allowed")))
        )
        assert "its digest is" in refused(home, store, trust.Trust(digest="0" * 64))
        with pytest.raises(AssertionError, match="it was parsed"):
            stack.pull(store, TRUSTED)
    # A part of somebody else is left out and named; one that was changed needs a new signature.
    stranger, evil = (Path(shutil.copytree(store, store.with_name(name))) for name in ("stranger", "evil"))
    rewritten(evil, changed(1, key="3.3.0.a85ca8a54/gfx90a6e.ukdb/evil"))
    assert "its signature is for other content" in refused(home, evil, signed)
    rewritten(stranger, lambda text: text, eve)
    done = stack.pull(stranger, signed)
    assert done.total.placed == 7
    assert [note.because for note in done.left_out] == [f"signed by nobody in {key.with_name('allowed')}"]
    done = stack.pull(store, signed)
    assert (done.total.placed, done.total.there, done.trusted) == (2, 7, ("signed by ann@example.org",))
    assert stack.pull(store, trust.Trust(digest=digest)).total.there == 9


@as_root
@thorough_only
def test_a_user_without_an_account_is_not_told_of_a_forgery(home: Home, store: Path, signed: trust.Trust) -> None:
    """Containers may run as a number that no account has; ssh-keygen then verifies nothing."""
    as_number = ("setpriv", "--reuid=54321", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    pull = (*CACHECTL, "pull", str(store), "--allowed-signers", str(signed.allowed_signers))
    done = home.run(*as_number, *pull, check=False)
    assert done.stderr.startswith("cachectl: signatures need an account (No user exists for uid 54321): ")
    assert (done.returncode, (home.path / ".cache").exists()) == (1, False)


#: Changed members of the first entry of a part, and of its first line.
ENTRIES: Sequence[dict[str, Any]] = (
    *({"bytes": True}, {"form": []}, {"detail": {"a": 1}}, {"versions": []}, {"more": 1}, {"kernels": 1}),
    *({"modified": ""}, {"device": []}, {"modified": 1e300}, {"offset": 1 << 30}, {"offset": -1}, {"bytes": 1.0}),
    *({"sha256": "0" * 64}, {"sha256": "../" * 20}, {"pack": "../../../etc/passwd"}, {"pack": None}),
)
HEADS: Sequence[dict[str, Any]] = (
    *({"made": 0}, {"layer": "pocl"}, {"facts": {}}, {"facts": {"a": 1}}, {"schema": "cachectl/store-index/2"}),
    *({"packs": {}}, {"packs": {"..": [1, 1]}}, {"packs": {"0" * 64: [1, 1 << 40]}}, {"packs": {"0" * 64: 1}}),
)
#: What stands in the place of the whole text.
TEXTS = (
    *(b'{"made":%b}\n' % number for number in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000)),
    *(b"", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"a":' * 50_000 + b"\n", b"\n" * (1 << 20)),
    b"0" * (8 << 20) + b"\n",
)


@pytest.mark.parametrize(
    "change",
    [
        *(changed(1, key=key) for key in ("/etc/passwd", "../../evil", "a\nb", "a\x1b", "a\x9b", "a\u202eb")),
        *(changed(1, bytes=size) for size in (-1, 1 << 40)),
        *thorough(
            *(changed(1, **lie) for lie in ENTRIES),
            *(changed(0, **lie) for lie in HEADS),
            *((lambda _text, other=other: other) for other in TEXTS),
            lambda text: text + text.split(b"\n")[1] + b"\n",
            lambda text: text[:-1],
        ),
    ],
)
def test_a_lie_in_an_index_part_is_refused_even_if_it_is_signed(
    change: Callable[[bytes], bytes], home: Home, store: Path, key: Path, signed: trust.Trust
) -> None:
    rewritten(store, change, key)
    refused(home, store, signed)
    refused(home, store)


def test_numbers_that_are_not_json_are_as_malformed_as_other_documents() -> None:
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1.5", b"-0.0"):
        document = b'{"schema":"cachectl/store-key/1","layer":"pocl","facts":{"a":%b}}' % number
        with pytest.raises(place.BadStore, match="cannot be read: ValueError"):
            wire.parse_key(hashlib.sha256(document).hexdigest()[:16], document)


def test_a_small_store_of_large_entries_costs_the_memory_of_one(home: Home, tmp_path: Path) -> None:
    """Entries of 6 MiB, which are zeros: a hostile part lists the same bytes many times, an honest one never does."""
    size, number = 6 << 20, 16
    apart, over = (tmp_path / name for name in ("apart", "over"))
    pack = wire.file_of(bytes(number * size))
    digests = {zeros: hashlib.sha256(bytes(zeros)).hexdigest() for zeros in (size, size - 1)}
    for folder, step in ((apart, size), (over, 1)):
        key, entries = wire.StoreKey("pocl", {}), []
        for one in range(number):
            entry = Entry("pocl", f"AB/{one:038}", Path(), size - (step == 1), 0)
            name = f"packs/{hashlib.sha256(pack).hexdigest()}"
            file = wire.Pack(name, len(pack), number * size)
            entries.append(wire.StoredEntry(entry, "pocl-entry/1", digests[entry.bytes], file, one * step))
        listed = wire.file_of(wire.part_of(1, key, entries))
        files = {f"index/key-{key.name}": key.to_bytes(), name: pack}
        files[f"index/1-{key.name}-{hashlib.sha256(listed).hexdigest()}"] = listed
        for path, data in files.items():
            place.FolderPlace(folder).write(path, data)
    done = watched(home, "store", "verify", str(apart))
    assert (done.status, "16 entries" in done.said) == (0, True)
    # An interpreter, and one entry beside it.
    assert done.peak < (60 << 20) + 2 * size
    done = watched(home, "store", "verify", str(over))
    assert (done.status, "has entries that overlap" in done.said) == (1, True)
    assert done.peak < 60 << 20


def test_verify_finds_a_missing_pack_beside_a_damaged_part(home: Home, store: Path) -> None:
    (first, last), name = parts(store), names(store)[-1]
    pack = min(wire.parse_part(name, wire.open_part(name, last.read_bytes())[0]).packs)
    (store / pack).unlink()
    first.write_bytes(b"")
    findings = home.stack.store(store).verify().findings
    assert [finding.code for finding in findings] == ["damaged", "missing"]


def test_bombs_are_not_unpacked(home: Home, store: Path, signed: trust.Trust) -> None:
    file = wire.file_of(b"")[:8] + zstd.compress(bytes(128 << 20), 1)
    parts(store)[-1].unlink()
    (store / f"index/9-{wire.key_of(names(store)[-1])}-{hashlib.sha256(file).hexdigest()}").write_bytes(file)
    assert "bomb" in refused(home, store, signed)


def test_an_older_state_is_refused_where_the_newer_one_was_read(
    home: Home, good: Path, store: Path, signed: trust.Trust
) -> None:
    stack = home.stack
    stack.pull(store, signed)
    stack.purge()
    shutil.rmtree(store)
    shutil.copytree(good / "older", store)
    assert "is older than this machine has seen it" in refused(home, store, signed)
    # Giving the older part a newer name is no way around.
    old = parts(store)[0]
    old.rename(old.with_name(f"{1 << 33}{old.name[old.name.index('-') :]}"))
    refused(home, store, signed)
    shutil.rmtree(store)
    shutil.copytree(good / "older", store)
    digest = stack.store(store).ls().digest
    assert stack.pull(store, trust.Trust(digest=digest)).total.placed == 7
    assert stack.pull(store, signed).total.there == 7


def test_a_part_that_was_removed_is_not_taken_again(
    home: Home, store: Path, signed: trust.Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with the same home may have another store at that path, so it remembers its own."""
    stack, first = home.stack, parts(store)[0]
    stack.pull(str(store), signed)
    kept = first.read_bytes()
    first.unlink()
    stack.pull(store, signed)
    stack.purge()
    first.write_bytes(kept)
    done = stack.pull(store, signed)
    assert [note.because for note in done.left_out] == ["it was removed from the store earlier, and has reappeared"]
    assert done.total.placed == 2
    monkeypatch.setattr("platform.node", lambda: "another")
    assert stack.pull(store, signed).left_out == ()


@pytest.mark.thorough
def test_links_and_odd_names_are_not_followed(home: Home, store: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in ("..", "a\nb", "9-0-0", "key-zz", f"1-{'0' * 16}-{'0' * 63}g"):
        path = store / "index" / name
        if not path.exists():
            path.write_text("x")
    (store / f"index/7-{'0' * 16}-{'0' * 64}").symlink_to(secret)
    (store / "packs" / ("0" * 64)).symlink_to(secret)
    stack = home.stack
    assert stack.pull(store, TRUSTED).total.placed == 9
    pack = next(path for path in (store / "packs").iterdir() if not path.is_symlink())
    pack.rename(tmp_path / "moved")
    pack.symlink_to(tmp_path / "moved")
    stack.purge()
    assert "is missing" in refused(home, store)
    # A writer replaces a link, and does not write through it.
    place.FolderPlace(store).write(f"packs/{'0' * 64}", b"new")
    assert secret.read_text() == "secret"
    shutil.move(store / "packs", tmp_path / "elsewhere")
    (store / "packs").symlink_to(tmp_path / "elsewhere")
    assert "is a link" in refused(home, store)
