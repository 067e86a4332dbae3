"""What the demo does with the models, what it counts, and what each count should come to.

Imported only after ``django.setup()``.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from decimal import Decimal

from django.db.models import F, Sum
from tqdm import tqdm

from figures import Figures
from notification_outbox.models import OutboxMessage
from notification_outbox.operations import requeue
from shop.models import Order
from shop.payments import DECLINED_CARD, PaymentRefused
from shop.services import place_order
from warehouse.models import Booking, ReceivedMessage
from warehouse.trouble import BUSY_EVERY, REFUSED

ORDERS, DECLINED_EVERY = 300, 5
DECLINED = ORDERS // DECLINED_EVERY
COMMITTED = ORDERS - DECLINED
BUSY = COMMITTED // BUSY_EVERY
# of which max(REFUSED) are committed
MORE = max(REFUSED) * DECLINED_EVERY // (DECLINED_EVERY - 1)
UNSETTLED = ("pending", "in_flight", "blocked")


class DemoFigures(Figures):
    """The demo's table."""

    def count_first_run(self) -> None:
        messages = OutboxMessage.objects.all()
        dead = messages.filter(state="quarantined")
        reasons = Counter(dead.values_list("quarantine_reason", "last_status"))
        told = ", ".join(f"{count} {reason}, HTTP {status}" for (reason, status), count in reasons.items())
        retried = messages.filter(attempts__gt=1).count()
        self.add("delivered", messages.filter(state="delivered").count(), COMMITTED - len(REFUSED))
        self.add("retried", retried, BUSY, or_more=True, note=f"at least {BUSY}: answered 503 twice each")
        self.add("quarantined", dead.count(), len(REFUSED), note=told)
        self.add("  as rejected, HTTP 400", reasons["rejected", 400], len(REFUSED))

    def count_second_run(self) -> None:
        booked = set(Booking.objects.values_list("order", flat=True))
        committed = set(Order.objects.values_list("number", flat=True))
        self.add("delivered in the end", OutboxMessage.objects.filter(state="delivered").count(), COMMITTED)
        self.add("bookings", Booking.objects.count(), COMMITTED, note="one for each committed order")
        self.add("  for other orders", len(booked ^ committed), 0)
        repeats = ReceivedMessage.objects.aggregate(repeats=Sum(F("times") - 1))["repeats"]
        self.add("duplicates seen", repeats, note="recognised by their message id, booked once")


def place_orders(figures: DemoFigures) -> None:
    """Place the orders, and count what became of them."""
    refused = _place(range(1, ORDERS + 1))
    figures.add("placed", ORDERS, 300)
    figures.add("rolled back", refused, DECLINED)
    figures.add("committed", Order.objects.count(), COMMITTED)
    figures.add("  with a message", OutboxMessage.objects.count(), COMMITTED)


def place_more_orders() -> None:
    """Place so many more that a receiver's new bad day has each of its troubles."""
    _place(range(ORDERS + 1, ORDERS + 1 + MORE))


def _place(numbers: range) -> int:
    """Place orders; a declined card takes its order and the message about it back. Return how many did."""
    refused = 0
    for n in tqdm(numbers, unit=" orders", desc="placing"):
        card = DECLINED_CARD if n % DECLINED_EVERY == 0 else "4242 4242 4242 4242"
        try:
            place_order(f"D-{n:04}", Decimal(n) + Decimal("0.95"), card)
        except PaymentRefused:
            refused += 1
    return refused


def watch(worker: subprocess.Popen[bytes], patience: float) -> None:
    """Show how many messages are settled until the worker ends or ``patience`` seconds are over."""
    deadline = time.monotonic() + patience
    settled = OutboxMessage.objects.exclude(state__in=UNSETTLED)
    total = OutboxMessage.objects.count()
    with tqdm(total=total, initial=settled.count(), unit=" messages", desc="settled") as bar:
        running = True
        while running and time.monotonic() < deadline:
            running = worker.poll() is None  # asked before counting: the last count is the final one
            bar.update(settled.count() - bar.n)
            if running:
                time.sleep(0.1)


def quarantined() -> int:
    return OutboxMessage.objects.filter(state="quarantined").count()


def requeue_quarantined(figures: DemoFigures) -> None:
    ids = list(OutboxMessage.objects.filter(state="quarantined").values_list("pk", flat=True))
    figures.add("requeued", requeue(ids), len(REFUSED))
