"""Helpers shared by the tests of mesa."""

import hashlib
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from homes import Home

from cachectl.layers.core.entry import Artifact
from cachectl.layers.mesa import entries as mesa_entries
from cachectl.layers.mesa.cache import MesaShaderCache
from support.layers import environment_of

#: Variables with which the loader loads Rusticl alone, which then shows the processor as a device.
RUSTICL: dict[str, Any] = {"RUSTICL_ENABLE": "llvmpipe", "OCL_ICD_VENDORS": "/etc/OpenCL/vendors/rusticl.icd"}
OPENCL = "0" * 39 + "1"
#: What Mesa's GL itself stored of a shader (the first byte of a seed chooses the parser), and the driver it names.
GLSL = Path(__file__).parents[1].joinpath("fuzz/corpus/14-glsl").read_bytes()[1:]
GL = "d18d2453ebb39aedc0a206b22ff67ba23e87a028"
STORES = {
    "multi-file": {},
    "single-file": {"MESA_DISK_CACHE_SINGLE_FILE": "1"},
    "database": {"MESA_DISK_CACHE_DATABASE": "true"},
}
DB_FILES = ("mesa_cache.db", "mesa_cache.idx")
FOLDERS = {"multi-file": "mesa_shader_cache", "single-file": "mesa_shader_cache_sf", "database": "mesa_shader_cache_db"}


def crc(data: bytes) -> int:
    return zlib.crc32(data) ^ 0xFFFFFFFF


def entry(payload: bytes, driver: str = OPENCL, device: str = "llvmpipe") -> bytes:
    packed = zlib.compress(payload)
    head = b"\1" + driver.encode() + b"\0" + device.encode() + b"\0" + struct.pack("<BQI", 8, 0, 0)
    return head + struct.pack("<II", crc(packed), len(payload)) + packed


def artifact(key: str, content: bytes) -> Artifact:
    return Artifact("mesa", key, "mesa-entry/1", content)


def kernel(name: str) -> bytes:
    return bytes(60) + b"\x0d\0\0\0" + f"__wrapped_{name}".encode() + bytes(80)


def key(text: str, width: int = 20) -> str:
    """Return the name of a file; since Mesa 26 its keys have 32 bytes."""
    sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    digest = sha1 if width == 20 else hashlib.blake2b(text.encode(), digest_size=width).hexdigest()
    return f"{digest[:2]}/{digest[2:]}"


def key_in(store: str, text: str, width: int = 20) -> str:
    """Return the key of one of the entries below in a store."""
    name = key(text, width)
    if store == "multi-file":
        return name
    file = "mesa_cache.db" if store == "database" else f"{GL if text in 'gh' else OPENCL}/llvmpipe/foz_cache.foz"
    return f"{file}::{name.replace('/', '')}"


def contents(width: int = 20) -> dict[str, bytes]:
    """Return two kernels and their machine code, which is larger."""
    code = random.Random(5).randbytes(700)  # noqa: S311 - repeatable
    return {
        key("a", width): entry(kernel("rk0")),
        key("b", width): entry(b"\x7fELF" + code[:500]),
        key("c", width): entry(kernel("rk1")),
        key("d", width): entry(b"\x7fELF" + code),
    }


def graphics(width: int = 20) -> dict[str, bytes]:
    return {key("g", width): glsl(width), key("h", width): entry(b"\x7fELF" + bytes(90), GL)}


def glsl(width: int) -> bytes:
    """Return what GL stored, as a Mesa with keys of another length would have: they are listed in its header."""
    at = GLSL.index(b"\0\0\0\0\0\0\0\0\1\0\0\0") + 12
    (count,) = struct.unpack_from("<I", GLSL, at)
    keys = [GLSL[at + 4 + number * 20 :][:20] for number in range(count)]
    return GLSL[: at + 4] + b"".join((one * 2)[:width] for one in keys) + GLSL[at + 4 + count * 20 :]


def fill(base: Path, store: str, entries: dict[str, bytes], *, part: str = "") -> Path:
    root = base / FOLDERS[store]
    if store == "multi-file":
        fill_tree(root, entries)
    elif store == "single-file":
        fill_foz(root, entries)
    else:
        fill_db(root / part, entries)
    return root


def fill_tree(root: Path, entries: dict[str, bytes]) -> None:
    for name, data in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    blocks = sum(path.stat().st_blocks * 512 for path in root.glob("??/*"))
    (root / "index").write_bytes(struct.pack("<Q", blocks) + bytes(65536 * (max(map(len, entries)) // 2)))


def fill_foz(root: Path, entries: dict[str, bytes]) -> None:
    magic = b"\x81FOSSILIZEDB\0\0\0\6"
    for name, data in entries.items():
        header = mesa_entries.read_header(data)
        assert header is not None
        folder = root / header.driver / header.device
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index").write_bytes(bytes(1310728))
        store, index = folder / "foz_cache.foz", folder / "foz_cache_idx.foz"
        for path in (store, index):
            if not path.exists():
                path.write_bytes(magic)
        name40 = name.replace("/", "").encode()
        place = store.stat().st_size + 40
        with store.open("ab") as file:
            file.write(name40 + struct.pack("<IIII", len(data), 1, crc(data), len(data)) + data)
        with index.open("ab") as file:
            file.write(name40 + struct.pack("<IIII", 8, 1, 0, 8) + struct.pack("<Q", place))


def fill_db(folder: Path, entries: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = struct.pack("<8sIQ", b"MESA_DB\0", 1, 77 << 32)
    # As a Mesa of another width does, which adds to what is there.
    store, index = (path.read_bytes() if path.exists() else head for path in map(folder.joinpath, DB_FILES))
    for name, data in entries.items():
        digest = bytes.fromhex(name.replace("/", ""))
        index += struct.pack("<8sIQQ", digest[:8], len(data), 123456789, len(store))
        store += digest + struct.pack("<II", crc(data), len(data)) + data
    for name, content in zip(DB_FILES, (store, index), strict=True):
        (folder / name).write_bytes(content)


def layer_of(home: Path, store: str, **variables: str) -> MesaShaderCache:
    home.mkdir(exist_ok=True)
    return MesaShaderCache(environment_of(home, **STORES[store], **variables))


def rusticl(home: Home, count: int = 2, /, **changes: str) -> Any:  # noqa: ANN401 - JSON
    (home.path / ".cache").mkdir(exist_ok=True)
    # PoCL, which the same loader starts, is kept out of what is looked at.
    aside = {"POCL_CACHE_DIR": str(home.path / "pocl")}
    return home.python("rusticl.py", str(count), **{**RUSTICL, **aside, **changes})
