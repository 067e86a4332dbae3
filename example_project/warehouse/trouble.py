"""A receiver having a bad day, for the demo. Off unless ``WAREHOUSE_TROUBLE`` is set; one process only.

By order of first arrival, every 7th message is answered 503 twice and two others 400 once; then all is well.
"""

import threading

BUSY_EVERY, BUSY_TIMES = 7, 2
REFUSED = {50, 100}  # neither is a multiple of 7


class Trouble:
    """Remembers which messages came and how often each was sent away."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrival: dict[str, int] = {}
        self._sent_away: dict[str, int] = {}

    def status_for(self, message_id: str) -> int | None:
        """Return the status to send this message away with, or None when it is to be handled."""
        with self._lock:
            arrival = self._arrival.setdefault(message_id, len(self._arrival) + 1)
            if arrival in REFUSED:
                status, times = 400, 1
            elif arrival % BUSY_EVERY == 0:
                status, times = 503, BUSY_TIMES
            else:
                return None
            done = self._sent_away.get(message_id, 0)
            self._sent_away[message_id] = done + 1
            return status if done < times else None


trouble = Trouble()
