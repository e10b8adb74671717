"""What people see all day: equal messages, progress, and words that command line and Python share."""

from pathlib import Path

from homes import Home


def cut(cuda: Home, number: int) -> list[Path]:
    """Cut off the end of some entries of a ComputeCache."""
    entries = sorted((cuda.path / ".nv/ComputeCache").glob("?/?/*"))[:number]
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-9])
    return entries


def test_equal_messages_are_one_line(cuda: Home) -> None:
    """Each has a count and three examples, and with ``-v`` all."""
    entries = cut(cuda, 9)
    lines = cuda.cachectl("verify cuda", check=False).stdout.splitlines()
    assert [lines[0].split(" (")[0], lines[4:]] == [
        "cuda: 9 times damaged",
        ["  6 more; -v shows all", "  fix: cachectl purge --damaged cuda"],
    ]
    assert len(cuda.cachectl("verify cuda -v", check=False).stdout.splitlines()) >= 11
    (said,) = cuda.cachectl("ls cuda", check=False).stderr.splitlines()
    assert (said.count(str(entries[0].parent.parent.parent)), said[-21:]) == (3, "6 more; -v shows all"), said
    assert len(cuda.cachectl("ls cuda -v", check=False).stderr.splitlines()) == 9
