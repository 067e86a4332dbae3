"""The example's shop without a single outbox setting, and its warehouse against forged and repeated messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "example_project"

SHOP_WITHOUT_SETTINGS = """
import django
from django.conf import settings
del settings.NOTIFICATION_OUTBOX
django.setup()
from decimal import Decimal
from django.core.management import call_command
from notification_outbox.models import OutboxMessage
from shop.payments import PaymentRefused
from shop.services import place_order
call_command("migrate", verbosity=0)
call_command("check")
place_order("A-1", Decimal("12.50"), "4111")
print(OutboxMessage.objects.get().destination, OutboxMessage.objects.get().state)
"""

WAREHOUSE = """
import asyncio, time
import django
django.setup()
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from asgiref.testing import ApplicationCommunicator
from notification_outbox.signing import HttpMessageSigner, SigningRequest
from warehouse.models import Booking
call_command("migrate", verbosity=0)
application = get_asgi_application()
BODY = b'{"order":"A-1","total":"12.50"}'
URL = settings.WAREHOUSE_URL

def signed(signer=settings.SHOP_SIGNER, message_id="msg_" + "a" * 32, created=None, body=BODY):
    request = SigningRequest(URL, "warehouse.acme.com", "application/json", body, message_id, message_id)
    headers = {"Content-Type": "application/json", "Host": "warehouse.acme.com", "Content-Length": str(len(BODY))}
    return headers | dict(signer.sign(request, created=created or int(time.time()), nonce=str(time.time())))

async def post(headers, body=BODY):
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/warehouse/orders/",
             "raw_path": b"/warehouse/orders/", "query_string": b"", "scheme": "https",
             "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]}
    talk = ApplicationCommunicator(application, scope)
    await talk.send_input({"type": "http.request", "body": body})
    return (await talk.receive_output(20))["status"]

def status(headers, body=BODY):
    return asyncio.run(post(headers, body))

stranger = HttpMessageSigner.from_secret("a stranger's secret", key_id="shop-demo", tag="shop")
otherwise = HttpMessageSigner.from_secret("only-for-the-demo", key_id="shop-demo", tag="blog")
print("unsigned", status({"Content-Type": "application/json", "Host": "warehouse.acme.com"}))
print("stranger", status(signed(stranger)))
print("tag", status(signed(otherwise)))
print("old", status(signed(created=int(time.time()) - 3600)))
print("body", status(signed(), BODY.replace(b"12", b"13")))
print("id", status(signed() | {"Idempotency-Key": '"msg_' + "b" * 32 + '"'}))
print("booked", Booking.objects.count())
print("first", status(signed()), "again", status(signed()))
print("booked", Booking.objects.count())
"""


BOTH = (
    WAREHOUSE.split("stranger = ")[0]
    + """
from notification_outbox.signing import StandardWebhooksSigner
(ours, shared) = settings.SHOP_SIGNERS["both"]
foreign = StandardWebhooksSigner(secrets=["whsec_" + "A" * 44])
both = signed(ours) | signed(shared)
print("http signature alone", status(signed(ours)))
print("standard alone", status(signed(shared)))
print("foreign secret", status(signed(ours) | signed(foreign)))
print("old", status(signed(ours) | signed(shared, created=int(time.time()) - 3600)))
print("two ids", status(signed(ours) | signed(shared, message_id="msg_" + "b" * 32)))
print("body", status(both, BODY.replace(b"12", b"13")))
print("first", status(both), "again", status(both))
print("booked", Booking.objects.count())
"""
)


def run(script: str, folder: Path, **more: str) -> list[str]:
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{folder / 'example.sqlite3'}",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "WAREHOUSE_ORIGIN": "https://warehouse.acme.com",
        "ALLOWED_HOSTS": "warehouse.acme.com",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=EXAMPLE,
        env={**environment, **more, "PYTHONPATH": str(EXAMPLE.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_shop_works_without_any_outbox_setting(tmp_path: Path) -> None:
    """Zero settings run: the order is placed and its message waits, signed with a derived key when sent."""
    assert run(SHOP_WITHOUT_SETTINGS, tmp_path)[-1] == "warehouse.acme.com pending"


def test_the_warehouse_books_what_is_signed_and_books_it_once(tmp_path: Path) -> None:
    """Forged, foreign, stale and altered messages are refused; a repeated one is accepted and not booked again."""
    assert run(WAREHOUSE, tmp_path) == [
        "unsigned 401",
        "stranger 401",
        "tag 401",
        "old 401",
        "body 401",
        "id 401",
        "booked 0",
        "first 200 again 200",
        "booked 1",
    ]


def test_the_warehouse_that_demands_two_signatures_is_content_with_no_less(tmp_path: Path) -> None:
    """Each must hold, and both must speak of the same message."""
    assert run(BOTH, tmp_path, SHOP_SIGNATURES="both") == [
        "http signature alone 401",
        "standard alone 401",
        "foreign secret 401",
        "old 401",
        "two ids 401",
        "body 401",
        "first 200 again 200",
        "booked 1",
    ]
