"""The verdict on an address, case by case: ``cases/addresses.json`` holds both edges of every block."""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import Path

import pytest

from notification_outbox.addresses import Denial, judge

CASES = json.loads((Path(__file__).parent / "cases" / "addresses.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["address"]))
def test_verdict(case: dict[str, str | None]) -> None:
    """An address is refused under the name of its block, or allowed."""
    denial = judge(str(case["address"]))
    assert (None if denial is None else denial.value) == case["denial"]


@pytest.mark.parametrize("address", ["1.1.1.1", "10.0.0.1", "2606:4700::1", "fe80::1%lo"])
def test_text_and_object_agree(address: str) -> None:
    """An address object gets the verdict of its text."""
    assert judge(ip_address(address)) == judge(address)


def test_zone_is_refused_before_the_table() -> None:
    """A zone id names an interface of this machine, so it is refused on a public address too."""
    assert judge("2606:4700::1%eth0") is Denial.ZONE
