"""Everything that can go wrong, as one tree.

An error names the field and the rule it broke and never repeats a value: payloads, URLs, header values and
peer text stay out of every message, because exceptions end in logs and error trackers. Foreign errors are
mapped where they are met and raised again from here, without their context.

    OutboxError
    ├── ConfigurationError       the project's settings are wrong; says what to write instead
    ├── NotInTransaction         enqueue() outside atomic(): the message could outlive the change
    ├── InvalidMessage           what the caller passed breaks a rule
    ├── IdempotencyConflict      the key is taken by other content
    ├── EnvelopeError            a sealed row cannot be opened
    │   ├── UnknownKey           this process lacks its key or does not know its version: not the row's fault
    │   └── Tampered             its authentication failed: it is never sent
    ├── TransientPublishError    infrastructure is down: no attempt is burned, the message waits
    ├── PermanentPublishError    no retry can help: quarantined now
    └── PublishFailed            this attempt failed in a way the retry policy judges
"""

from __future__ import annotations

from typing import Any, Literal

from .lifecycle import Answer, Fault, QuarantineReason


class OutboxError(Exception):
    """Base of everything this package raises on purpose.

    ``position`` is set by ``enqueue_many()``: which of its drafts was refused, counted from 0.
    """

    position: int | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.position is None else f"draft {self.position}: {text}"

    def __reduce__(self) -> tuple[Any, ...]:
        # constructors differ from args: task queues and parallel test runs carry errors to other processes
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[OutboxError], args: tuple[Any, ...], state: dict[str, Any]) -> OutboxError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class ConfigurationError(OutboxError):
    """A setting is missing, unknown or has a bad value. The text names the setting and the remedy."""


class NotInTransaction(OutboxError):
    """``enqueue()`` was called outside ``transaction.atomic()``."""


class InvalidMessage(OutboxError):
    """An argument breaks a rule.

    ``field`` is the argument's name, ``rule`` a stable code, ``hint`` a sentence saying what is accepted.
    ``data`` tells a rule that a customer's data can break (a URL, a body) from one that only code can.
    """

    def __init__(self, field: str, rule: str, hint: str, *, data: bool = False) -> None:
        super().__init__(f"{field}: {hint} [{rule}]")
        self.field = field
        self.rule = rule
        self.hint = hint
        self.data = data


class IdempotencyConflict(OutboxError):
    """The idempotency key already stands for another message; ``part`` says what differs."""

    def __init__(self, part: str) -> None:
        super().__init__(
            f"this idempotency key already names a message with another {part}: "
            "use a new key for new content, or repeat the first call unchanged"
        )
        self.part = part


class EnvelopeError(OutboxError):
    """A sealed row cannot be opened."""


class UnknownKey(EnvelopeError):
    """This process holds no key ``key_id``, or (``key_id`` like ``version 2``) is older than the row."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no encryption key with id {key_id!r} is configured here")
        self.key_id = key_id


class Tampered(EnvelopeError):
    """The row's authentication failed: it was changed after it was sealed, or sealed under another key."""

    def __init__(self) -> None:
        super().__init__("the sealed row does not authenticate")


class TransientPublishError(OutboxError):
    """What publishes is down, not the message's fault: no attempt is burned and the message waits.

    ``retry_after`` is in seconds (None: the retry policy's pause). ``holds`` says what waits with it.
    ``code`` is a short stable word for logs and ``last_error``.
    """

    def __init__(
        self,
        code: str = "transient",
        *,
        retry_after: float | None = None,
        holds: Literal["message", "destination", "lane"] = "destination",
    ) -> None:
        super().__init__(code)
        self.code = code
        self.retry_after = retry_after
        self.holds = holds


class PermanentPublishError(OutboxError):
    """No retry can help: the message is quarantined now, for ``reason``."""

    def __init__(
        self,
        reason: QuarantineReason | str = QuarantineReason.PUBLISHER_REFUSED,
        *,
        answer: Answer | None = None,
    ) -> None:
        self.reason = QuarantineReason(reason)
        super().__init__(self.reason.value)
        self.answer = answer


class ScopePermanentlyUnknown(OutboxError):
    """What a ``signer_resolver`` raises for a scope that will never have a signer: the message is quarantined."""


class ScopeTransientlyUnavailable(OutboxError):
    """What a ``signer_resolver`` raises while it cannot tell: the message waits, no attempt is burned."""


class PublishFailed(OutboxError):
    """One attempt failed. ``fault`` says whose fault it is, which is all the retry policy needs to know.

    ``code`` is a short stable word (``timeout``, ``http_503``), ``answer`` what is known of the peer's answer,
    ``retry_after`` the pause in seconds the peer asked for.
    """

    def __init__(
        self,
        code: str,
        fault: Fault = Fault.DESTINATION,
        *,
        answer: Answer | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code)
        self.code = code
        self.fault = fault
        self.answer = answer
        self.retry_after = retry_after
