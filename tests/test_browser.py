"""The admin in a real browser: an operator's evening, under a policy that refuses everything inline or foreign.

What the pages say and who may do what is told apart in ``test_admin`` and ``test_health_page``; here is what only a
browser shows: that the buttons lead on, the style sheets come, nothing is refused, and nothing runs that should not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.db.models.functions import Now

from notification_outbox import enqueue
from notification_outbox.models import DeliveryAttempt, OutboxMessage, OutboxStat
from tests.browser import Browser, is_missing
from tests.policy import POLICY
from tests.processes import Outbox, wait_until
from tests.tables import make

# no page differs by database, and a browser takes its time
pytestmark = [pytest.mark.databases("postgresql"), pytest.mark.django_db(transaction=True)]

LIST = "/admin/notification_outbox/outboxmessage/"
HEALTH = f"{LIST}health/"
PASSWORD = "of the browser tests"
PERMISSIONS = ("requeue", "send_now", "quarantine", "cancel", "expunge", "reveal")


@pytest.fixture(scope="module")
def chromium(live_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all of these tests; each comes to it with nobody logged in."""
    if missing := is_missing():
        pytest.skip(f"no {missing} on this machine; on Debian: apt-get install chromium chromium-driver")
    folder = Path(os.environ.get("OUTBOX_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    with Browser(live_server.url, folder) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, which in the end has nothing to complain about: no refusal, no error, no request elsewhere."""
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


@pytest.fixture
def operator(browser: Browser) -> Browser:
    """The browser of somebody who may do everything."""
    return log_in(browser, *PERMISSIONS)


def log_in(browser: Browser, *permissions: str) -> Browser:
    """Log a new member of staff in who may see messages and what else is named."""
    user = User.objects.create_user("operator", password=PASSWORD, is_staff=True)
    names = [f"{name}_outboxmessage" for name in ("view", *permissions)]
    user.user_permissions.set(Permission.objects.filter(codename__in=names))
    browser.log_in("operator", PASSWORD)
    return browser


def page(row_id: int) -> str:
    return f"{LIST}{row_id}/change/"


def numbers(browser: Browser) -> set[str]:
    """Return the numbers of the messages in the list."""
    return {row.text for row in browser.find_all("#result_list .field-number")}


def hold(body: Any = None, **arguments: Any) -> int:
    """Commit one waiting message; return its number."""
    with transaction.atomic():
        arguments = {"to": "https://hooks.acme.com/orders?key=s3cret", **arguments}
        return enqueue("order.paid", {"order": 7} if body is None else body, **arguments).id


def test_an_operator_requeues_a_dead_letter_and_sees_it_delivered(operator: Browser, outbox: Outbox) -> None:
    """From the filter over the search, its three sentences and the confirmation to the word "delivered"."""
    outbox.configure(MAX_REJECTIONS=1)
    outbox.receiver.answer = lambda received: 404 if received.target == "/hooks/broken" else 410
    outbox.enqueue(account_id="acct-1")
    (mine, other) = (outbox.enqueue(path="/hooks/broken", account_id=f"acct-{n}")[0] for n in (7, 8))
    outbox.work()
    assert outbox.states() == {"quarantined": 3}

    operator.open("/admin/")
    operator.follow("Messages")
    operator.click('details[data-filter-title="reason"] a[href*="reason=rejected"]')
    assert numbers(operator) == {str(mine.id), str(other.id)}
    operator.find("#searchbar").send_keys("acct-7")
    operator.press("Search")
    assert numbers(operator) == {str(mine.id)}
    operator.follow(str(mine.id))

    assert "refused the message" in operator.text("#outbox-why")
    assert "HTTP 404" in operator.text("#outbox-why")
    assert operator.text("#outbox-next")
    assert "Yes, once the receiver takes such messages." in operator.text("#outbox-requeue")
    operator.press("Requeue")
    assert "Requeue: 1 message." in operator.text()
    operator.press("Yes, do it")
    assert operator.text(".messagelist") == "1 requeued."
    assert operator.text(".outbox-headline .outbox-badge") == "due"

    outbox.receiver.answer = lambda received: 200
    worker = outbox.start()

    def is_delivered() -> bool:
        operator.driver.refresh()
        return operator.text(".outbox-headline .outbox-badge") == "delivered"

    wait_until(is_delivered, "the page to say that it is delivered", poll=0.1)
    assert outbox.receiver.requests[-1].target == "/hooks/broken"
    assert outbox.states() == {"delivered": 1, "quarantined": 2}
    worker.terminate()
    assert worker.wait() == 0


def test_a_body_is_shown_to_who_may_and_the_history_says_so(operator: Browser) -> None:
    """The button shows body and full destination; whoever looks later finds who looked."""
    operator.open(page(hold({"order": 4711})))
    assert "s3cret" not in operator.text()
    operator.press("Show the body")
    assert operator.text("#outbox-body pre") == '{"order":4711}'
    assert "https://hooks.acme.com/orders?key=s3cret" in operator.text("#outbox-body")
    operator.follow("History")
    history = operator.text("#change-history")
    assert "reveal, shown" in history
    assert "operator" in history


def test_a_body_is_not_shown_to_others(browser: Browser) -> None:
    """There is no button, and a form made by hand is refused and leaves no trace."""
    log_in(browser, *(name for name in PERMISSIONS if name != "reveal"))
    row_id = hold()
    browser.open(page(row_id))
    assert "Cancel" in [button.get_attribute("value") for button in browser.find_all(".outbox-buttons input")]
    assert "Show the body" not in browser.driver.page_source
    # the form that every page has carries the token
    script = "const form = document.getElementById('logout-form'); form.action = arguments[0]; form.submit()"
    browser.leave(lambda: browser.driver.execute_script(script, f"{LIST}{row_id}/reveal/"))
    assert browser.driver.title == "403 Forbidden"
    assert "order" not in browser.text("body")
    assert LogEntry.objects.count() == 0
    (complaint,) = browser.complaints()
    assert "status of 403" in complaint


def count(outcome: str, n: int, ago: timedelta) -> None:
    OutboxStat.objects.create(minute=Now() - ago, lane="default", outcome=outcome, worker="w", n=n)


def a_day_of_outcomes() -> None:
    for hours in range(24):
        count("delivered", 400 + 37 * (hours * 7 % 11), timedelta(hours=hours, minutes=2))
        count("retry", 20 * (hours % 5), timedelta(hours=hours, minutes=2))
    count("rejected", 12, timedelta(hours=3))


def test_the_health_page_is_read_at_a_glance(operator: Browser) -> None:
    """A sentence with its light, lanes, and a plot whose bars stand in their colours."""
    a_day_of_outcomes()
    dead = make("quarantined", quarantine_reason="rejected")
    operator.open(LIST)
    operator.follow("Health")
    assert operator.text(".outbox-sentence").startswith("Green All is well")
    assert "default" in operator.text("#outbox-lanes + div")
    bars = operator.find_all(".outbox-plot rect.outbox-delivered")
    assert len(bars) >= 24
    assert all(bar.size["height"] > 0 for bar in bars)
    colours = {
        operator.find(f".outbox-plot rect.outbox-{series}").value_of_css_property("fill")
        for series in ("delivered", "retried", "dead")
    }
    assert len(colours) == 3
    operator.find("summary").click()
    assert "given up" in operator.text("details[open]").lower()
    operator.follow("rejected")
    assert numbers(operator) == {str(dead)}


def test_what_strangers_wrote_neither_runs_nor_stands_in_the_page(operator: Browser) -> None:
    """HTML in a body and in every column is read as it was written, on every page that shows it."""
    evil = "<img id=evil src=/x onerror=alert(1)>"
    names = ("notification_type", "account_id", "destination", "last_error", "leased_by", "publisher")
    row_id = hold(f"<script>alert(1)</script>{evil}")
    shown = hold(f"<script>alert(1)</script>{evil}")
    dead = {"state": "quarantined", "quarantine_reason": "rejected", "settled_at": Now()}
    OutboxMessage.objects.filter(id=row_id).update(**dict.fromkeys(names, evil), **dead)
    DeliveryAttempt.objects.create(
        message_id=row_id,
        number=1,
        started_at=Now(),
        duration_ms=1,
        outcome="retry",
        error=evil,
        worker=evil,
        peer=evil,
    )
    count("delivered", 1, timedelta(minutes=2))
    OutboxStat.objects.update(lane=evil)

    def holds_nothing_evil() -> None:
        # a dialogue would make this fail by itself
        assert operator.find_all("#evil") == []
        assert evil in operator.text("body")

    for address in (LIST, f"{LIST}?q={evil}", page(row_id), HEALTH):
        operator.open(address)
        holds_nothing_evil()
    operator.open(page(shown))
    operator.press("Show the body")
    holds_nothing_evil()
    operator.open(page(row_id))
    operator.press("Requeue")
    operator.press("Yes, do it")
    holds_nothing_evil()


def test_every_page_fits_a_telephone_and_a_desk(operator: Browser) -> None:
    """By day and by night, and none is wider than its window; the screenshots are for people to look at."""
    a_day_of_outcomes()
    late = {"due_at": Now() - timedelta(hours=3), "available_at": Now() - timedelta(hours=3)}
    later = {"available_at": Now() + timedelta(hours=1)}
    make(to="https://a-rather-long-customer-name.webhooks.eu-central-1.example.com/x", **late)
    make(**later)
    make(attempts=3, last_error="timeout", **later)
    make("in_flight", leased_by="web-7.acme.internal:4242:1f")
    make("blocked", account_id="7b4f0c36-6b0c-4d53-9d5f-3a2b8a1f7c11")
    make("delivered", attempts=1, last_status=200)
    make("expired", attempts=41, last_status=503, last_error="http_503")
    make("cancelled")
    dead = hold({"order": 4711, "lines": [{"sku": f"sku-{n}", "count": n} for n in range(9)]}, account_id=7)
    answered = {"last_status": 404, "last_error": "http_404", "attempts": 12, "rejections": 12}
    reason = {"state": "quarantined", "quarantine_reason": "rejected", "settled_at": Now()}
    OutboxMessage.objects.filter(id=dead).update(**answered, **reason)
    for number in range(1, 13):
        DeliveryAttempt.objects.create(
            message_id=dead,
            number=number,
            started_at=Now() - timedelta(minutes=13 - number),
            duration_ms=40 + number,
            outcome="retry" if number < 12 else "quarantined",
            status=404,
            error="http_404",
            phase="answered",
            peer="192.0.2.7:443",
            worker="web-7.acme.internal:4242:1f",
        )
    too_wide = []
    operator.open(LIST)
    too_wide += operator.photograph("list")
    operator.open(page(dead))
    too_wide += operator.photograph("message")
    operator.press("Show the body")
    too_wide += operator.photograph("body")
    operator.press("Requeue")
    too_wide += operator.photograph("question")
    operator.open(HEALTH)
    too_wide += operator.photograph("health")
    assert too_wide == []


def test_the_policy_is_one_that_refuses(operator: Browser) -> None:
    """What the other tests rest on: an inline script is refused, and the browser says so."""
    operator.open(LIST)
    answered = operator.driver.execute_async_script(
        "fetch(location.href).then(answer => arguments[0](answer.headers.get('Content-Security-Policy')))"
    )
    assert answered == POLICY
    operator.driver.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.ran = true';"
        "document.head.append(script)"
    )
    assert operator.driver.execute_script("return window.ran") is None
    (complaint,) = operator.complaints()
    assert "Content Security Policy" in complaint
