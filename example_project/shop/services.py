"""Placing an order: it and the message about it are written in one transaction, so both exist, or none."""

from decimal import Decimal

from django.conf import settings
from django.db import transaction

from notification_outbox import enqueue

from .models import Order
from .payments import charge


def place_order(number: str, total: Decimal, card: str) -> Order:
    """Save the order, have the warehouse told, and take the money.

    Raises ``PaymentRefused``, and then nothing has happened: the row and its message are rolled back with
    the transaction. An order number that is taken raises ``IntegrityError``.
    """
    with transaction.atomic():
        order = Order.objects.create(number=number, total=total)
        enqueue(
            "order.placed",
            {"order": number, "total": str(total)},
            to=settings.WAREHOUSE_URL,
            idempotency_key=f"order-{number}",
        )
        charge(card, total)
    return order
