"""JSON is strict in both directions."""

import pytest

from cachectl.layers.base.documents import encode_json, parse_json

INVALID = ("NaN", "[1e999]", '{"a": -Infinity}', "-1e400", "[" * 100_000, b"\xff", b"\xff\xfe1\x00", "", "{} {}")


@pytest.mark.parametrize("text", [*INVALID, "1" * 5000 + "e1"])
def test_anything_but_json_is_one_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - with any message of the parser
        parse_json(text)


def test_numbers_and_texts_are_read_as_written() -> None:
    assert parse_json(b'{"a": [1, 1e3, 0.5, null], "\\ud800": "\\u0000"}') == {
        "a": [1, 1000.0, 0.5, None],
        "\ud800": "\0",
    }
    for value in (float("nan"), [float("inf")], {"a": -float("inf")}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            encode_json(value)
