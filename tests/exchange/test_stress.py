"""Eight writers and eight readers on one store, of which two are killed every second."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.servers import BUCKET, S3
from tiers import amount

if TYPE_CHECKING:
    from homes import Home

#: ``CACHECTL_TEST_STRESS`` gives other seconds, such as 60.
SECONDS = os.environ.get("CACHECTL_TEST_STRESS") or amount("2", "30")


def stress(home: Home, url: str, folder: Path, crowd: str = "8", **variables: str) -> None:
    """Let writers and readers work on a store, and see that nothing is damaged, wrong or lost."""
    done = home.python("store_stress.py", url, str(folder), SECONDS, crowd, crowd, **variables)
    for name in ("deaths", "damaged", "lost", "wrong"):
        assert done[name] == []
    assert done["acknowledged"] > 0
    assert done["kills"] > 0


@pytest.mark.parametrize(
    ("name", "crowd"),
    [
        *(("store", "1"), ("store.zip", "1")),
        *(pytest.param(*row, marks=pytest.mark.hazard) for row in (("store", "8"), ("store.zip", "4"))),
    ],
)
def test_nothing_that_a_push_acknowledged_is_lost(home: Home, tmp_path: Path, name: str, crowd: str) -> None:
    stress(home, str(tmp_path / name), tmp_path / "homes", crowd)


@pytest.mark.hazard
@pytest.mark.usefixtures("no_proxy")
def test_nothing_that_a_push_acknowledged_is_lost_on_s3(home: Home, tmp_path: Path, s3_server: S3) -> None:
    stress(home, f"s3://{BUCKET}/{tmp_path.name}/stress", tmp_path / "homes", **s3_server.variables)


@pytest.mark.hazard
def test_nothing_that_a_push_acknowledged_is_lost_over_ssh(home: Home, tmp_path: Path, sftp: tuple[str, Path]) -> None:
    stress(home, f"{sftp[0]}/store", tmp_path / "homes")
