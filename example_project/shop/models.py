"""What the shop remembers: its orders."""

from django.db import models


class Order(models.Model):
    """One order a customer placed and paid."""

    number = models.CharField(max_length=32, unique=True)
    total = models.DecimalField(max_digits=10, decimal_places=2)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.number
