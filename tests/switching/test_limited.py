"""Layers of other people that cannot be switched off or moved, or that fail: left out, said, and fatal to nothing."""

import sys
from pathlib import Path

import pytest
from homes import PYTEST, SAYS_SEVEN, Home, beside
from tiers import every_tier, real, thorough, thorough_only

LIMITED = Path(__file__).parents[1] / "plugin/limited"
#: Those that can be neither switched off nor moved.
STAYING = ["ending", "failing", "placeless", "readonly"]
ALL = sorted([*STAYING, "switchless"])


@pytest.fixture
def limited(home: Home) -> Home:
    return beside(home, LIMITED)


def staying(said: str) -> list[str]:
    """Return the layers of which a line says that they stay as they are."""
    lines = [line for line in said.splitlines() if " stays as it is: " in line]
    return sorted(line.partition(" stays as it is: ")[0].split()[-1] for line in lines)


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("run --no-cache", STAYING),
        ("run --isolated", STAYING),
        *thorough(("run --isolated=root", STAYING), ("run --base base", STAYING)),
        ("run --store store --trust", []),
        ("run --prove", []),
        ("trace --no-ledger", []),
    ],
)
def test_a_command_runs_whatever_layers_lack(limited: Home, line: str, left_out: list[str]) -> None:
    (limited.path / "base").mkdir()
    done = limited.cachectl(line, "--", *SAYS_SEVEN, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout == "RAN\n", done.stderr
    assert done.returncode == (1 if "--prove" in line else 7)
    assert staying(done.stderr) == left_out


@pytest.mark.parametrize("name", ["ending", "readonly", *thorough("failing", "placeless")])
def test_a_named_layer_that_stays_as_it_is_is_refused_before_the_command(limited: Home, name: str) -> None:
    for line in ("run --no-cache", *(["run --isolated"] * every_tier)):
        said = limited.refused(f"{line} --layer {name} -- echo RAN", says=f"{name}: stays as it is: ")
        assert said.count("\n") == 1
    for line in ("env --disable", "env --root moved"):
        done = limited.cachectl(f"{line} --layer {name}", check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_variables_are_printed_without_the_layers_that_have_none(limited: Home) -> None:
    for line, without in (("--disable", ALL), ("--enable", ALL), ("--root moved", STAYING)):
        done = limited.cachectl(f"env {line} --shell sh")
        assert "POCL_" in done.stdout
        names = [one.split()[1] for one in done.stderr.splitlines() if " cannot " in one]
        assert sorted(name for name in names if not name.startswith("miopen-system")) == without


PROGRAM = """
import os, sys, warnings
import cachectl
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with cachectl.disabled() as held:
        assert os.environ["POCL_KERNEL_CACHE"] == "0"
    off = sorted(name for name, hold in held.items() if hold.status == "on")
    with cachectl.isolated() as root:
        assert os.environ["POCL_CACHE_DIR"].startswith(str(root))
        assert os.environ["SWITCHLESS_DIR"].startswith(str(root))
    with cachectl.traced():
        pass
print(*off)
for warning in said:
    print(warning.message, file=sys.stderr)
for name in held:
    try:
        with cachectl.disabled(name):
            pass
    except cachectl.StillOn as error:
        print(*error.layers)
with warnings.catch_warnings(record=True) as said, cachectl.disabled("readonly", strict=False) as held:
    print(held["readonly"].status, len(said))
"""


def test_blocks_of_a_program_leave_them_out_and_say_so(limited: Home) -> None:
    """Of a layer that is named, the block is refused, but ``strict=False``."""
    done = limited.run(sys.executable, "-W", "always", "-c", PROGRAM)
    first, *refused, last = done.stdout.splitlines()
    assert first.split() == ALL
    assert sorted(refused) == ALL
    assert last == "on 1"
    # A block of disabled() says all of them, one of isolated() those that it cannot move.
    assert staying(done.stderr) == sorted([*ALL, *STAYING])


@thorough_only
def test_a_session_of_pytest_runs_without_them(limited: Home) -> None:
    (limited.path / "test_it.py").write_text(
        "def test_cold(disabled_caches): assert disabled_caches['readonly'].status == 'on'\n"
        "def test_isolated(isolated_caches): pass\n"
    )
    (limited.path / "pytest.ini").write_text("[pytest]\n")
    done = limited.run(*PYTEST, "-q", "test_it.py", check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@real
@thorough_only
def test_the_demo_runs_beside_them(limited: Home) -> None:
    done = limited.cachectl("demo")
    assert staying(done.stderr) == STAYING
