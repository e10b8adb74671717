"""What the library of each layer leaves in a home, and the layer over it."""

import hashlib
import struct
import tarfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.trees import native
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.layer import Layer
from cachectl.layers.registry import built_in_layer
from support import mesa
from support.dictionaries import FILE, NONE, dictionary
from support.layers import environment_of, write
from support.miopen_kernels import ARGS, CODE, FIND, NAME, packed, store, user_file

DATA = Path(__file__).parents[1] / "data"


def unpack(archive: str, folder: Path) -> None:
    """Unpack the files of an archive of real content."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DATA / f"{archive}.tar.gz") as tar:
        for member in tar:
            if member.isfile():
                tar.extract(member, folder, set_attrs=False)


# ---------------------------------------------------------------------- NEO

#: What ocloc 22.43 stored of one source with two kernels, for Skylake and for Arc: wrapped, bare, and as SPIR-V.
WRAPPED = ("90acc8ebe339bbdf", "a759d5e93348ae0d")
BARE = ("43c3b6a22730c983", "c081d9943ea50613")
SPIRV = ("7accbe5d8c3df6d1", "d45d9b649667820f")
DEEP = "9/0/90acc8ebe339bbdf.cl_cache"


def fill_neo(home: Path) -> None:
    """Lay out what ocloc wrote, flat as it is, and the wrapped programs again as a newer driver keeps them."""
    folder = home / ".cache" / "neo_compiler_cache"
    unpack("neo-ocloc-22.43", folder)
    for name in WRAPPED:
        content = (folder / f"{name}.ocloc_cache").read_bytes()
        deep = write(folder / name[0] / name[1] / f"{name}.cl_cache", content)
        (deep.parent / "stats").write_bytes(struct.pack("=QQQ", 1, 1, 1))
    (folder / "stats").write_bytes(struct.pack("=QQQ", 5, 2, 1))
    (folder / "config.file").write_bytes(struct.pack("=Q", held(folder)))


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*_cache"))


# ---------------------------------------------------------------------- comgr


@cache
def compiled() -> dict[str, bytes]:
    """Return one module with the kernels axpy and scale, and a function that is none: bitcode, objects of two GPUs."""
    with tarfile.open(DATA / "amdgpu-llvm14.tar.gz") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def comgr_entry(output: bytes, log: bytes = b"") -> bytes:
    """Return an entry in the form of ``serializeCacheEntry``."""
    return struct.pack("<Q", len(output)) + output + struct.pack("<Q", len(log)) + log


def comgr_key(what: str) -> str:
    return f"llvmcache-{hashlib.sha256(what.encode()).hexdigest()}"


def fill_comgr(home: Path) -> None:
    folder = home / ".cache" / "comgr"
    for what in ("axpy.bc", "axpy-gfx906.o", "axpy-gfx90a.o"):
        write(folder / comgr_key(what), comgr_entry(compiled()[what], b"a warning\n"))
    module = bytes.fromhex("030223070000010000000000010000000000000038000100")
    (folder / comgr_key("spirv")).write_bytes(comgr_entry(module))
    (folder / "llvmcache.timestamp").touch()


# ---------------------------------------------------------------------- PoCL

#: The least that is whole: bitcode of one empty module.
BITCODE = b"BC\xc0\xde" + bytes.fromhex("210c0000 01000000 00000000")
NATIVE = native("k", "add", "mul", "matmul_fp32x4")
POCL_KEY = "AB/" + "C" * 37


def place(root: Path, key: str, files: Mapping[str, bytes]) -> Path:
    """Write the files of an entry; return its folder."""
    for path, content in files.items():
        write(root / key / path, content)
    return root / key


def fill_pocl(home: Path) -> None:
    for key in (POCL_KEY, "AB/" + "D" * 37):
        place(home / ".cache" / "pocl" / "kcache", key, {"program.bc": BITCODE, "k/0-0-0/k.so": NATIVE})


# ---------------------------------------------------------------------- pytools and MIOpen


def fill_pytools(home: Path) -> None:
    dictionary(home / ".cache/pytools" / FILE, {letter * 16: NONE for letter in "ab"})


OBJECT = "2.2.1/0123456789abcdef0123456789abcdef/MIOpenPooling.cl.o"
OTHER = ("Conv_Winograd_v21_1_3.s.o", " -mcpu=gfx90a")


def fill_kernels(home: Path) -> None:
    """Make one cache of each generation of MIOpen."""
    store(user_file(home), {(NAME, ARGS): packed(CODE), OTHER: packed(b"\x7fELF raw")}, wal=True)
    store(user_file(home, "gfx906_60", "3.2.0.x"), {(NAME, ARGS): (CODE, packed(CODE)[1], 0)})
    write(home / ".cache" / "miopen" / OBJECT, CODE)


def fill_system_kernels(home: Path) -> None:
    store(home / "db" / "gfx90a.kdb", {(NAME, ARGS): packed(CODE), ("other.s.o", ARGS): packed(CODE)})


PERF = "gfx90a6e.HIP.3_3_0_a85ca8a54.udb.txt"
PROBLEM = "128-28-28-3x3-256-28-28-64-1x1-1x1-1x1-0-NCHW-FP32-F"
LINE = f"{PROBLEM}=ConvBinWinogradRxSf2x3g1:0.031,0,miopenConvolutionFwdAlgoWinograd"
TUNED = "2x960x8x8x1x3x3x1x960x8x1x1x0x1x1x0x1x1x0x0x1xNHWCxFP32xW"


def fill_tuning(home: Path) -> Path:
    folder = home / ".config" / "miopen"
    write(folder / FIND, f"{LINE}\nother=S:1.5,0,A;T:2.5,0,B\n")
    write(folder / PERF, f"{TUNED}=ConvHipImplicitGemm:256,64,[2x2]\n")
    return folder


def fill_system_tuning(home: Path) -> None:
    write(home / "db" / "gfx906_60.HIP.fdb.txt", f"{LINE}\nother=S:1,0,A\n")


# ---------------------------------------------------------------------- all of them


class Product(NamedTuple):
    """The name of a layer, what fills a home with its content, and the variables under which it is found there."""

    layer: str
    fill: Callable[[Path], object]
    variables: Mapping[str, str] = MappingProxyType({})

    def environment(self, home: Path, **changes: Any) -> Environment:  # noqa: ANN401 - fields of an environment
        """Return an environment on a machine without programs, GPUs and network file systems."""
        variables = {name: value.format(home=home) for name, value in self.variables.items()}
        return environment_of(home, **variables)._replace(cwd=home / "cwd", **changes)

    def filled(self, folder: Path, **changes: Any) -> Layer:  # noqa: ANN401 - fields of an environment
        """Fill ``folder/home``, and return the layer over it."""
        self.fill(folder / "home")
        return built_in_layer(self.layer, self.environment(folder / "home", **changes))


def _fill_mesa(home: Path, store: str, part: str = "") -> None:
    mesa.fill(home / ".cache", store, mesa.contents(), part=part)


_SYSTEM = {"MIOPEN_SYSTEM_DB_PATH": "{home}/db"}
PRODUCTS = {
    "cuda": Product("cuda", lambda home: unpack("computecache-h200-opencl", home / ".nv" / "ComputeCache")),
    "neo": Product("neo", fill_neo),
    "comgr": Product("comgr", fill_comgr),
    **{f"mesa {store}": Product("mesa", partial(_fill_mesa, store=store), mesa.STORES[store])
       for store in mesa.STORES},
    "mesa in parts": Product(
        "mesa", partial(_fill_mesa, store="database", part="part3"), mesa.STORES["database"]
    ),
    "miopen": Product("miopen", fill_kernels),
    "miopen-system": Product("miopen-system", fill_system_kernels, _SYSTEM),
    "miopen-tuning": Product("miopen-tuning", fill_tuning),
    "miopen-system-tuning": Product("miopen-system-tuning", fill_system_tuning, _SYSTEM),
    "pocl": Product("pocl", fill_pocl),
    "pytools": Product("pytools", fill_pytools),
}  # fmt: skip
