"""What the warehouse remembers: the messages it has handled, and the bookings they led to."""

from django.db import models


class ReceivedMessage(models.Model):
    """A message id that was handled. The unique constraint is what makes "once" true."""

    sender = models.CharField(max_length=64)
    message_id = models.CharField(max_length=64)
    times = models.PositiveIntegerField(default=1, help_text="how often it arrived")
    first_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["sender", "message_id"], name="warehouse_message_once"),
        ]

    def __str__(self) -> str:
        return self.message_id


class Booking(models.Model):
    """Goods set aside for one order."""

    order = models.CharField(max_length=32, unique=True)
    total = models.DecimalField(max_digits=10, decimal_places=2)
    booked_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.order
