"""Bodies: strict JSON whatever the caller passes, other content types untouched."""

from __future__ import annotations

import contextlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notification_outbox.exceptions import InvalidMessage
from notification_outbox.payloads import read_json, serialise

CASES = json.loads((Path(__file__).parent / "cases/json_bodies.json").read_text())["cases"]
LIMIT = 1_000_000


def case_body(case: dict[str, Any]) -> bytes:
    if "hex" in case:
        return bytes.fromhex(case["hex"])
    if "nested" in case:
        return b'{"a":' + b"[" * case["nested"] + b"]" * case["nested"] + b"}"
    if "digits" in case:
        return b'{"a":' + b"9" * case["digits"] + b"}"
    return str(case["text"]).encode()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bytes_get_the_verdict_of_the_case(case: dict[str, Any]) -> None:
    """Accepted bytes are kept byte for byte; refused ones raise our error and nobody else's."""
    body, content_type = case_body(case), case.get("content_type", "application/json")
    if case["accepted"]:
        assert serialise(body, content_type, LIMIT) == body
        return
    with pytest.raises(InvalidMessage) as caught:
        serialise(body, content_type, LIMIT)
    assert caught.value.field == "payload"
    assert caught.value.__context__ is None or isinstance(caught.value.__context__, InvalidMessage)


def nest(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (float("inf"), "json-value"),
        (circle(), "json-value"),
        (10**5000, "json-value"),
        ({"a": "\ud800"}, "json-surrogate"),
        (nest(101), "json-depth"),
        (nest(9000), "json-depth"),
        ({1, 2}, "json-type"),
        ({1: "a", "1": "b"}, "json-duplicate-key"),
        ([{"a": {True: 1, "true": 2}}], "json-duplicate-key"),
        ({None: 1, "null": 2}, "json-duplicate-key"),
        ({1e20: 1, "1e+20": 2}, "json-duplicate-key"),
    ],
    ids=[
        "infinity",
        "circle",
        "digits",
        "surrogate",
        "depth 101",
        "depth 9000",
        "set",
        "1 twice",
        "true twice",
        "null twice",
        "1e20 twice",
    ],
)
def test_values_that_are_no_strict_json_are_refused(value: Any, rule: str) -> None:
    """A Python value gets the same rules as bytes, under our own error."""
    with pytest.raises(InvalidMessage) as caught:
        serialise(value, "application/json", LIMIT)
    assert caught.value.rule == rule
    assert caught.value.__context__ is None


def test_a_hundred_levels_are_accepted() -> None:
    """The bound is the same for values and bytes."""
    assert serialise(nest(100), "application/json", LIMIT) == case_body({"nested": 100})


def test_brackets_inside_strings_are_no_levels() -> None:
    """Only structure counts."""
    body = json.dumps({"a": "[" * 500, "b": '\\"[' * 200}).encode()
    assert serialise(body, "application/json", LIMIT) == body


def test_decimals_keep_their_digits() -> None:
    """Money is text in Django's JSON."""
    assert serialise({"total": Decimal("10.00")}, "application/json", LIMIT) == b'{"total":"10.00"}'


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_we_serialise_we_accept_and_read_back(value: Any) -> None:
    """Any JSON value becomes strict JSON bytes of the same value."""
    assert read_json(serialise(value, "application/json", LIMIT)) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """No input leads to another library's error."""
    with contextlib.suppress(InvalidMessage):
        read_json(body)
