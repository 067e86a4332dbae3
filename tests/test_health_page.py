"""The health page: who may see it, what it shows of hostile names, what it costs, and that nobody needs it."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import translation

from notification_outbox import enqueue
from notification_outbox.models import OutboxMessage, OutboxStat
from tests.processes import ROOT, Outbox, database_url

# lengths and colours belong in the style sheet; what a strict policy refuses must not be there at all
INLINE = re.compile(
    r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|javascript:|(?:src|href)=\"(?:https?:)?//"
)


pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def operator(client: Client) -> Client:
    """A logged-in member of staff who may view messages and nothing else."""
    client.force_login(staff("view_outboxmessage"))
    return client


def staff(*permissions: str) -> User:
    user = User.objects.create_user("operator", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


def page(client: Client) -> str:
    answer = client.get(reverse("admin:notification_outbox_health"))
    assert answer.status_code == 200
    return answer.content.decode()


def words(page: str) -> str:
    """Return what a reader sees, spaces folded."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def count(outcome: str, n: int, ago: timedelta = timedelta(minutes=2), lane: str = "default") -> None:
    OutboxStat.objects.create(minute=Now() - ago, lane=lane, outcome=outcome, worker="w", n=n)


def message(**changes: Any) -> None:
    with transaction.atomic():
        row_id = enqueue("t", {}, to="https://hooks.acme.com/").id
    OutboxMessage.objects.filter(id=row_id).update(**changes)


def test_one_sentence_says_how_it_is(operator: Client) -> None:
    """In green when all is well, in red with what to do when a message waits and nobody comes."""
    count("delivered", 1200)
    found = words(page(operator))
    assert "Green All is well: nothing is late, and 1,200 messages were delivered" in found
    message(due_at=Now() - timedelta(hours=3), available_at=Now() - timedelta(hours=3))
    OutboxStat.objects.update(minute=Now() - timedelta(hours=2))
    found = words(page(operator))
    assert "Red Nobody takes messages of the lane “default”: its oldest has been due for 3 h." in found
    assert "Start a worker that serves it" in found


def test_numbers_stand_in_tables_and_in_the_plot(operator: Client) -> None:
    """Whoever does not see the bars reads the same from their title, the description and the table."""
    count("delivered", 1200)
    count("retry", 30)
    count("gone", 4)
    message(state="quarantined", quarantine_reason="gone", settled_at=Now())
    message(available_at=Now() + timedelta(hours=1), due_at=Now() + timedelta(hours=1))
    found = page(operator)
    lanes = words(found[found.index("<tbody>") :])
    assert re.match(r" default 0 \S 1 0 2\d\d\.\d \d\.\d 4 gone ", lanes)
    plot = found[found.index("<svg viewBox") : found.index('<ul class="outbox-legend')]
    assert 'role="img" aria-labelledby="outbox-plot-title outbox-plot-desc"' in plot
    assert plot.count("<rect") >= 3
    assert re.search(r"\d\d:\d\d: .*1200 delivered, 30 failed, 4 given up", plot)
    assert "1,200 messages delivered, 30 attempts failed and repeated, 4 messages given up" in plot
    assert re.search(r"1200 30 4 ", words(found[found.index("<details>") :]))
    assert re.search(r"Dead letters Reason Messages gone 1 ", words(found))


def test_lanes_reasons_and_keys_lead_to_their_messages(operator: Client) -> None:
    """One click from the number to the list of what it counts."""
    message(state="quarantined", quarantine_reason="gone", settled_at=Now(), encryption_key_id="k 1&2")
    message(state="expired", settled_at=Now())
    lists = re.findall(r'href="([^"]*outboxmessage/\?[^"]*)"', page(operator))
    assert len(lists) == 5
    for address in map(html.unescape, lists):
        assert operator.get(address).status_code == 200, address


def test_names_from_the_table_are_text(operator: Client) -> None:
    """A row's lane and key id may hold anything; the page shows it and runs nothing."""
    nasty = "\"><script>alert(1)</script>{{ 7|add:'1' }}"
    message(publisher=nasty, encryption_key_id=nasty)
    count("<b>gone</b>", 1, lane="<i>lane</i>")
    found = page(operator)
    assert "<script>alert" not in found
    assert "<b>gone" not in found
    assert "<i>lane" not in found
    assert nasty in words(found)


def test_a_strict_content_security_policy_finds_nothing(operator: Client) -> None:
    """No inline style or script, nothing from elsewhere, and the style sheet is the app's own."""
    count("delivered", 5)
    found = page(operator)
    ours = found[found.index('<div id="content-main"') : found.index("<!-- END Content -->")]
    assert not INLINE.search(ours)
    assert 'href="/static/notification_outbox/health.css"' in found
    style = Path(str(finders.find("notification_outbox/health.css"))).read_text()
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize(("permissions", "status"), [((), 403), (("view_outboxmessage",), 200)])
def test_only_who_may_view_messages_sees_it(
    client: Client, permissions: tuple[str, ...], status: int
) -> None:
    """Others of the staff are refused, strangers are asked to log in, and nothing can be posted."""
    url = reverse("admin:notification_outbox_health")
    assert client.get(url).status_code == 302
    client.force_login(staff(*permissions))
    assert client.get(url).status_code == status
    assert client.post(url).status_code == 405


def test_it_costs_few_queries_and_little_time(operator: Client) -> None:
    """As many for a day of many lanes as for one message."""
    message()
    with CaptureQueriesContext(connection) as few:
        page(operator)
    for lane in range(5):
        message(publisher=f"lane{lane}", encryption_key_id=f"key{lane}")
        for minutes in range(0, 24 * 60, 30):
            for outcome in ("delivered", "retry", "gone"):
                count(outcome, 100, timedelta(minutes=minutes), lane=f"lane{lane}")
    began = time.perf_counter()
    with CaptureQueriesContext(connection) as many:
        page(operator)
    assert len(many) == len(few) <= 11
    # 200 ms by itself; machines that run suites are shared
    assert time.perf_counter() - began < 2


def test_numbers_are_the_svgs_own_in_every_language(operator: Client) -> None:
    """A comma for a decimal point would end the drawing."""
    for ago in range(1, 40):
        count("delivered", 1000 + ago * 37, timedelta(minutes=15 * ago))
    with translation.override("de"):
        found = operator.get(
            reverse("admin:notification_outbox_health"), headers={"accept-language": "de"}
        ).content.decode()
    values = re.findall(
        r' (?:x|y|width|height)="([^"]*)"', found[found.index("<svg viewBox") : found.index("<details>")]
    )
    assert values
    assert [value for value in values if not re.fullmatch(r"\d+(\.\d+)?", value)] == []


def bare(*arguments: str) -> None:
    """Run a management command of a project that has no admin."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "django", *arguments],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "tests.bare_settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_without_the_admin_everything_else_works(outbox: Outbox) -> None:
    """A project that does not install it checks, migrates and delivers."""
    bare("check")
    bare("migrate", "--verbosity=0")
    bare("outbox_doctor")
    outbox.enqueue(2)
    assert outbox.start("--once", DJANGO_SETTINGS_MODULE="tests.bare_settings").wait() == 0
    assert outbox.states() == {"delivered": 2}
