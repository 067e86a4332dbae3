"""Signals a worker sends after its commit, for metrics and alarms. They carry ids, never content.

The first three have ``sender=Worker`` and the keywords ``id`` (the row's), ``message_id`` and ``using`` (the
database's alias), one call for each message; the last two ``worker_id`` and ``using``. Receivers run in a thread
of the worker with a connection of their own; what they raise is logged by Django and stops nothing. A worker
that dies between its commit and the signal never sends it: act on the table where every one counts.
"""

from __future__ import annotations

from django.dispatch import Signal

message_delivered = Signal()
message_quarantined = Signal()
message_expired = Signal()
worker_started = Signal()
worker_stopped = Signal()
