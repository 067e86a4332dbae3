"""A transactional outbox for Django.

``enqueue()`` inside ``transaction.atomic()`` stores a message that exists if and only if the business change
does; ``manage.py run_outbox_worker`` delivers it at least once. Importing the package needs no settings, and
``enqueue()`` brings no HTTP client into the process: names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafts import Draft
    from .envelope import Message
    from .exceptions import (
        IdempotencyConflict,
        InvalidMessage,
        NotInTransaction,
        OutboxError,
        PermanentPublishError,
        TransientPublishError,
    )
    from .outbox import Receipt, enqueue, enqueue_many, validate_destination
    from .publishers import Publisher

__version__ = "0.1.0"

_HOMES = {
    "Draft": "drafts",
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
    "enqueue_many": "outbox",
    "validate_destination": "outbox",
}

__all__ = [
    "Draft",
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
    "enqueue_many",
    "validate_destination",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
