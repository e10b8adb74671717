"""``python -m benchmarks.house`` fails above a ceiling."""

import pytest

from benchmarks import house


def test_a_measure_above_its_ceiling_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(house, "measure", lambda: {"lines": 11})
    monkeypatch.setattr(house, "measure_commands", dict)
    for ceiling, status in ((10, 1), (11, 0)):
        monkeypatch.setattr(house, "ceilings", lambda most=ceiling: {"lines": {"ceiling": most, "goal": 5}})
        assert house.main(["--check"]) == status
        assert ("above its ceiling" in capsys.readouterr().out) is bool(status)
