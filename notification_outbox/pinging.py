"""One signed test message through the real path, kept nowhere: what an operator tries before customers do."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from . import conf
from .answers import Attempt
from .conf import PublisherSettings, Settings
from .delivery import classify
from .drafts import Draft
from .envelope import Message
from .lifecycle import NOT_HERE
from .publishers import Publisher, WebhookPublisher, build

TYPE = "outbox.ping"
BODY = b'{"type":"outbox.ping"}'


class Ping(NamedTuple):
    """What a test message came to.

    ``code`` is '' when it was accepted, else the word a real message would have as ``last_error``. ``display`` is
    what may be shown of the destination, ``phases`` how many seconds each phase took (webhooks: ``dns``, ``dial``,
    ``tls``, ``answer``), ``certificate_ends`` when the receiver's certificate expires.
    """

    display: str
    code: str
    status: int | None = None
    peer: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    certificate_ends: datetime | None = None


def ping(to: str, *, publisher: str = "default", settings: Settings | None = None) -> Ping:
    """Send one test message of type ``outbox.ping`` to ``to``, signed as any other, and say what came of it.

    Nothing is stored and nothing repeated. Raises ``InvalidMessage`` for a destination that must not be reached and
    ``ConfigurationError`` for settings that cannot work. Not for an event loop's thread.
    """
    settings = settings or conf.get()
    lane = settings.publisher(publisher)
    built = build(lane)
    draft = built.validate(Draft(TYPE, BODY, to=to))
    assert draft.to is not None
    shown = built.display(draft.to)
    if settings.deliver is not None and shown not in settings.deliver:
        return Ping(shown, NOT_HERE)
    message = Message(
        id=f"msg_{secrets.token_hex(16)}",
        notification_type=TYPE,
        publisher=publisher,
        destination=draft.to,
        body=BODY,
        created_at=datetime.now(UTC),
        idempotency_key="ping",
    )
    return asyncio.run(_ping(built, message, lane, shown))


async def _ping(publisher: Publisher, message: Message, lane: PublisherSettings, shown: str) -> Ping:
    attempt = Attempt(marks=[])
    clock = asyncio.get_running_loop().time
    await publisher.open()
    code, answer = "", None
    began = clock()
    try:
        async with asyncio.timeout(lane.attempt_timeout):
            if isinstance(publisher, WebhookPublisher):
                answer = await publisher.publish(message, attempt)
            else:
                answer = await publisher.publish(message)
    except Exception as error:
        outcome = classify(error, lane.retry)
        code, answer = outcome.error, outcome.answer
    ended = clock()
    await publisher.close()
    marks = [*(attempt.marks or [("publish", began)]), ("", ended)]
    return Ping(
        display=shown,
        code=code,
        status=answer.status if answer else None,
        peer=answer.peer if answer else "",
        phases=tuple(
            ("answer" if phase == "sent" else phase, later - mark)
            for (phase, mark), (_, later) in pairwise(marks)
            if phase != "answered"
        ),
        certificate_ends=_end(attempt.certificate),
    )


def _end(certificate: dict[str, Any] | None) -> datetime | None:
    if not certificate:
        return None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
