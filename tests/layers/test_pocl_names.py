"""Kernel names that PoCL shortens in the folder names of its cache."""

import pytest
from homes import Driver, Home
from support.layers import got
from tiers import needing, real

from cachectl.layers.core.selection import Selection
from cachectl.layers.pocl import programs as pocl_programs

LONG = "long_kernel_of_" + "x" * 60
OTHER = LONG + "_two"
NAMES = ("brief", "k" * 59, "k" * 60, LONG, OTHER)
#: Folder names that PoCL 8.0-pre (5066640d) gave them.
SHORTENED = {
    "k" * 60: "kkkkkkkkkkkkkkkkkk.DLHGCGPBLKGOLNMFPPLAMNHOJBEBDOIIGMPIABEI",
    LONG: "long_kernel_of_xxx.DCKAECOBECAHDNBBJCGGEFIPJLEHMKKOGBGPLDEF",
    OTHER: "long_kernel_of_xxx.BJOBOPJKNIKACBGNHCJFBIAMMMDGICFEHOMHDBGE",
}


def test_a_candidate_is_taken_for_its_own_folder_alone() -> None:
    """Each version has its limit: 6.0 keeps 23 characters of a name of 64, 4.0 and 5.0 keep 214 of 255."""
    for name, folder in SHORTENED.items():
        others = [other for other in NAMES if other != name]
        assert pocl_programs.SHORTENED.fullmatch(folder)
        assert pocl_programs.whole_name(folder, [*others, name]) == name
        assert pocl_programs.whole_name(folder, others) is None
        assert pocl_programs.whole_name(folder.replace(".", " "), NAMES) == name
    letters = SHORTENED[LONG].rpartition(".")[2]
    # A name of 75 characters is not shortened if 255 are kept.
    kept = {23: LONG, 22: None, 34: None}
    assert {cut: pocl_programs.whole_name(f"{LONG[:cut]}.{letters}", NAMES) for cut in kept} == kept
    assert pocl_programs.whole_name("k" * 60, NAMES) == "k" * 60


@real
@pytest.mark.parametrize("driver", needing("built_pocl", "debian_pocl"))
def test_a_shortened_name_is_read_from_the_program(home: Home, driver: str, request: pytest.FixtureRequest) -> None:
    """The files are those of Debian's PoCL 3.1; only the folders have names of later versions."""
    pocl: Driver = request.getfixturevalue(driver)
    home.python("named.py", *NAMES, **pocl)
    (program,) = (path.parent for path in (home.path / ".cache/pocl/kcache").glob("*/*/program.bc"))
    if driver == "debian_pocl":
        # With the names of kernel folders and native files in newer versions.
        for name, folder in SHORTENED.items():
            for path in program.glob(f"{name}/*/{name}.so*"):
                path.rename(path.with_name(path.name.replace(name, folder)))
            (program / name).rename(program / folder)
    layer = home.stack["pocl"]
    assert {folder.name for folder in program.iterdir()} >= {*SHORTENED.values(), "brief", "k" * 59}
    (entry,) = home.json("ls pocl")["entries"]
    assert entry["kernels"] == sorted(NAMES)
    for kernel, found in ((OTHER, 1), ("long_*_two", 1), ("*_two", 1), ("k" * 60, 1), ("k" * 61, 0), ("long_*_six", 0)):
        assert len(list(layer.entries(Selection(kernel=kernel)))) == found, kernel
    artifact = got(layer, entry["key"])
    assert artifact.detail["kernels"] == " ".join(sorted(NAMES))
    # A program may have lost its native files, or its bitcode.
    bitcode, natives = program / "program.bc", list(program.glob("*/*/*.so*"))
    kept = [path.read_bytes() for path in (bitcode, *natives)]
    for path in natives:
        path.write_bytes(b"junk")
    (portable,) = layer.entries()
    assert portable.details.kernels == tuple(sorted(NAMES))
    # If none of them can be read, the names are unknown, and a purge by name keeps the program.
    bitcode.write_bytes(b"junk")
    (unknown,) = layer.entries()
    assert unknown.details.kernels is None
    assert "1 entry has no known kernel name and was left" in home.cachectl("purge pocl --kernel", OTHER).stderr
    for path, content in zip((bitcode, *natives), kept, strict=True):
        path.write_bytes(content)
    bitcode.unlink()
    (native,) = layer.entries()
    assert native.details.kernels == tuple(sorted(NAMES))
    home.cachectl("purge pocl --kernel", OTHER)
    assert list(layer.entries()) == []
