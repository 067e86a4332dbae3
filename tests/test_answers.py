"""What a receiver's answer means, and how long it asks us to wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.utils.http import parse_http_date

from notification_outbox.answers import Response, accepted, retry_after
from notification_outbox.exceptions import PermanentPublishError, PublishFailed
from notification_outbox.lifecycle import Answer, Fault, QuarantineReason

RETRY_AFTER = json.loads((Path(__file__).parent / "cases" / "retry_after.json").read_text(encoding="utf-8"))
NOW = RETRY_AFTER["now"]


def answered(status: int, *headers: tuple[bytes, bytes]) -> Response:
    return Response(status, list(headers), Answer(status, "answered", "192.0.2.1:443"))


@pytest.mark.parametrize("case", RETRY_AFTER["cases"], ids=lambda case: repr(case["values"]))
def test_retry_after(case: dict[str, Any]) -> None:
    """Seconds and the three date formats are understood; what is neither is as if absent."""
    headers = [("retry-after", value) for value in case["values"]]
    # the answer's own Date counts, however wrong this machine's clock is
    assert retry_after([*headers, ("date", NOW)], now=0.0) == case["seconds"]
    assert retry_after(headers, now=parse_http_date(NOW)) == case["seconds"]


@pytest.mark.parametrize("dates", [["yesterday"], [NOW, NOW], ["Wed, 21 Oct 2026 06:00:00"]])
def test_a_date_that_is_none_counts_for_nothing(dates: list[str]) -> None:
    """Then a date in Retry-After is measured by this machine's clock."""
    headers = [("retry-after", "Wed, 21 Oct 2026 07:01:00 GMT"), *(("date", date) for date in dates)]
    assert retry_after(headers, now=parse_http_date(NOW)) == 60


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_a_2xx_is_delivered(status: int) -> None:
    """Whatever it asks for besides."""
    assert accepted(answered(status, (b"Retry-After", b"9"))) == Answer(status, "answered", "192.0.2.1:443")


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        *((status, Fault.DESTINATION) for status in (408, 409, 425, 429, 500, 503, 599)),
        *((status, Fault.REJECTION) for status in (300, 302, 307, 400, 401, 403, 404, 413, 422)),
    ],
)
def test_who_is_busy_is_asked_again_and_who_refuses_is_counted(status: int, fault: Fault) -> None:
    """The code names the status, and the pause the receiver asks for comes along."""
    with pytest.raises(PublishFailed) as caught:
        accepted(answered(status, (b"RETRY-AFTER", b" 120 ")))
    assert (caught.value.code, caught.value.fault) == (f"http_{status}", fault)
    assert caught.value.retry_after == 120
    assert caught.value.answer == Answer(status, "answered", "192.0.2.1:443")


def test_gone_is_gone() -> None:
    """410 says that no retry can help."""
    with pytest.raises(PermanentPublishError) as caught:
        accepted(answered(410))
    assert caught.value.reason is QuarantineReason.GONE
