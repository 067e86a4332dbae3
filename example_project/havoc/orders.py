"""Customers who place orders all the time, some of which come to nothing."""

from __future__ import annotations

import itertools
import random
import threading
from decimal import Decimal

from django.db import Error, connection, transaction

from shop.payments import DECLINED_CARD, PaymentRefused
from shop.services import place_order

PAUSE = 0.02  # seconds between purchases
ATTEMPTS_PAUSE = 0.2  # while the database is away


class ChangedMind(Exception):
    """The customer leaves before paying: everything in the transaction is taken back."""


class Customers(threading.Thread):
    """Place orders until ``stop()``. ``placed`` counts them all, ``confirmed`` those whose transaction committed."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(name="customers", daemon=True)
        self.placed: list[str] = []
        self.confirmed: list[str] = []
        self.failure: BaseException | None = None
        self._dice = dice
        self._numbers = itertools.count(1)
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.wait(PAUSE):
                try:
                    self.confirmed += self._purchase()
                except ChangedMind:
                    pass
                except Error:
                    connection.close()
                    self._stopping.wait(ATTEMPTS_PAUSE)
        except BaseException as failure:  # told to whoever stops us
            self.failure = failure
        finally:
            connection.close()

    def stop(self) -> None:
        """Let the last purchase end. Raises what ended them, if anything did."""
        self._stopping.set()
        self.join()
        if self.failure is not None:
            raise self.failure

    def _purchase(self) -> list[str]:
        """Place one to five orders in one transaction; a declined card takes its order back, a changed mind all."""
        bought = []
        with transaction.atomic():
            for _ in range(self._dice.choice((1, 1, 1, 2, 5))):
                number = f"C-{next(self._numbers):06}"
                self.placed.append(number)
                card = DECLINED_CARD if self._dice.random() < 0.15 else "4242 4242 4242 4242"
                try:
                    place_order(number, Decimal("9.95"), card)
                except PaymentRefused:
                    continue
                bought.append(number)
            if self._dice.random() < 0.1:
                raise ChangedMind
        return bought
