"""A transactional outbox for Django.

``enqueue()`` inside ``transaction.atomic()`` stores a message that exists if and only if the business change
does; ``manage.py run_outbox_worker`` delivers it at least once. Importing the package needs no settings, and
``enqueue()`` brings no HTTP client into the process: names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .envelope import Message
    from .exceptions import (
        IdempotencyConflict,
        InvalidMessage,
        NotInTransaction,
        OutboxError,
        PermanentPublishError,
        TransientPublishError,
    )
    from .outbox import Receipt, enqueue
    from .publishers import Publisher

__version__ = "0.1.0"

_HOMES = {
    "IdempotencyConflict": "exceptions",
    "InvalidMessage": "exceptions",
    "Message": "envelope",
    "NotInTransaction": "exceptions",
    "OutboxError": "exceptions",
    "PermanentPublishError": "exceptions",
    "Publisher": "publishers",
    "Receipt": "outbox",
    "TransientPublishError": "exceptions",
    "enqueue": "outbox",
}

__all__ = [
    "IdempotencyConflict",
    "InvalidMessage",
    "Message",
    "NotInTransaction",
    "OutboxError",
    "PermanentPublishError",
    "Publisher",
    "Receipt",
    "TransientPublishError",
    "enqueue",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
