"""Stands for a payment provider: it accepts every card but one."""

from decimal import Decimal

DECLINED_CARD = "4000 0000 0000 0002"


class PaymentRefused(Exception):
    """The provider refuses the card."""


def charge(card: str, total: Decimal) -> None:
    """Take ``total`` from ``card`` or raise ``PaymentRefused``."""
    if card == DECLINED_CARD:
        raise PaymentRefused
