"""Booking an order once, however often its message arrives."""

from django.db import transaction
from django.db.models import F

from .models import Booking, ReceivedMessage


def book_once(sender: str, message_id: str, order: str, total: str) -> bool:
    """Book the order unless this message was handled before; tell whether it was booked now.

    The message id and the booking are written in one transaction, so a crash between them leaves neither.
    Of two deliveries at the same time, the second waits at the unique constraint and then counts itself.
    """
    with transaction.atomic():
        seen, new = ReceivedMessage.objects.get_or_create(sender=sender, message_id=message_id)
        if new:
            Booking.objects.create(order=order, total=total)
        else:
            ReceivedMessage.objects.filter(pk=seen.pk).update(times=F("times") + 1)
    return new
