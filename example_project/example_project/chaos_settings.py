"""The example under chaos: attempts and leases so short that minutes hold many of their ends."""

from .settings import *  # noqa: F403
from .settings import NOTIFICATION_OUTBOX

NOTIFICATION_OUTBOX["PUBLISHERS"]["default"] |= {
    "ATTEMPT_TIMEOUT": 1,
    "LEASE": 3,
    "CONCURRENCY": {"worker": 8},
    "MAX_REJECTIONS": 12,
}
