"""``outbox_ping``: one test message through the real path, and what the operator is told of it."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from django.core.management import CommandError, call_command

from notification_outbox import Message, Publisher, operations
from notification_outbox.exceptions import PermanentPublishError, TransientPublishError
from notification_outbox.models import OutboxMessage
from tests.processes import Outbox

MARK = "s3cr3t"


def ping(url: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command("outbox_ping", url, *arguments, stdout=out)
    return out.getvalue()


def refused(url: str, *arguments: str) -> tuple[int, str]:
    with pytest.raises(CommandError) as caught:
        ping(url, *arguments)
    return caught.value.returncode, str(caught.value)


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_answers_is_told_of_phase_by_phase(outbox: Outbox) -> None:
    """Times, peer, certificate, status; signed as any other message, stored nowhere, the path not repeated."""
    said = ping(outbox.receiver.url(f"/{MARK}?{MARK}"))
    assert re.findall(r"^  (\w+) +\d+\.\d ms$", said, re.MULTILINE) == ["dns", "dial", "tls", "answer"]
    assert f"127.0.0.1:{outbox.receiver.port}" in said
    assert re.search(r"its certificate ends \d{4}-\d\d-\d\d \d\d:\d\d UTC", said)
    assert said.endswith("accepted (HTTP 200)\n")
    assert MARK not in said
    (request,) = outbox.receiver.requests
    assert request.body == b'{"type":"outbox.ping"}'
    assert "keyid=" in (request.header("Signature-Input") or "")
    assert not OutboxMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "does not know this address"),
        (503, "failure of its own"),
        (410, "gone"),
        (302, "points elsewhere"),
    ],
)
def test_an_answer_that_is_no_yes_is_explained(outbox: Outbox, status: int, words: str) -> None:
    """In the words of the admin; exit 1."""
    outbox.receiver.answer = lambda received: status
    code, said = refused(outbox.receiver.url(f"/{MARK}"))
    assert code == 1
    assert words in said
    assert MARK not in said


@pytest.mark.parametrize(
    ("url", "rule"),
    [("https://127.0.0.1/", "denied-address"), ("http://hooks.acme.com/", "scheme"), ("nonsense", "scheme")],
)
def test_what_must_not_be_reached_is_not_dialled(url: str, rule: str, configure: Callable[..., None]) -> None:
    """The rule and what to do about it; exit 1."""
    configure()
    code, said = refused(url)
    assert code == 1
    assert said.startswith("not sent: ")
    assert f"[{rule}]" in said


@pytest.mark.django_db(transaction=True)
def test_a_peer_that_is_not_trusted_is_not_spoken_to(outbox: Outbox, configure: Callable[..., None]) -> None:
    """Without the authority's file its certificate means nothing."""
    signer = outbox.raw["PUBLISHERS"]["default"]["OPTIONS"]
    outbox.configure({"ca_file": None, "allow_hosts": signer["allow_hosts"]})
    code, said = refused(outbox.receiver.url("/"))
    assert code == 1
    assert "not accepted (tls)" in said


class Broker(Publisher):
    """Takes what it is told to take."""

    async def publish(self, message: Message) -> None:
        match message.destination:
            case "refuses":
                raise PermanentPublishError
            case "down":
                raise TransientPublishError("broker_down")
            case "breaks":
                raise KeyError(MARK)


@pytest.mark.parametrize(
    ("topic", "code"), [("refuses", "publisher_refused"), ("down", "broker_down"), ("breaks", "KeyError")]
)
def test_other_publishers_are_tried_too(topic: str, code: str, configure: Callable[..., None]) -> None:
    """Whatever one raises becomes its code; its text goes nowhere."""
    configure(PUBLISHERS={"broker": {"BACKEND": "tests.test_ping.Broker"}})
    assert "accepted" in ping("orders", "--publisher", "broker")
    returncode, said = refused(topic, "--publisher", "broker")
    assert returncode == 1
    assert f"({code})" in said
    assert MARK not in said


def test_a_copy_that_may_reach_nobody_pings_nobody(configure: Callable[..., None]) -> None:
    """``DELIVER`` holds for tests as well."""
    configure(DELIVER="none")
    code, said = refused("https://hooks.acme.com/")
    assert code == 1
    assert "DELIVER" in said


def test_wrong_settings_and_aliases_exit_with_two(configure: Callable[..., None]) -> None:
    """As for every command."""
    configure()
    code, said = refused("https://hooks.acme.com/", "--publisher", "nope")
    assert code == 2
    assert "no publisher of that alias" in said


def test_the_help_tells_the_exit_codes() -> None:
    """Without the source."""
    command = [sys.executable, "-m", "django", "outbox_ping", "--help", "--settings", "tests.settings"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for promise in ("Exit codes: 0", "1 it did not", "2 could not run", "--publisher"):
        assert promise in re.sub(r"\s+", " ", said)


@pytest.mark.django_db(transaction=True)
def test_an_application_can_ask_too(outbox: Outbox) -> None:
    """``operations.ping()`` returns the same as a value."""
    pong = operations.ping(outbox.receiver.url("/"))
    assert (pong.code, pong.status, pong.display) == ("", 200, "localhost")
    assert [phase for phase, _ in pong.phases] == ["dns", "dial", "tls", "answer"]
    assert all(0 <= seconds < 30 for _, seconds in pong.phases)
    assert pong.certificate_ends
    assert pong.certificate_ends > datetime.now(UTC)
