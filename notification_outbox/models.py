"""The tables: what a message's row holds, what may never be true of it, and what is indexed.

Rows are written by ``outbox`` and moved by ``leases``; everybody else only reads. The CHECKs hold whatever a
mover or an operator's SQL does. ``available_at`` is the moment a worker may next take the row in every live
state: when due, or when the lease ends. ``due_at`` is never touched by claim or release, so "oldest due" stays
true of a row that bounces. The words of ``state``, ``blocked_by``, ``quarantine_reason`` and ``outcome`` are
those of ``lifecycle``; as model choices each new one would ask users for a migration.
"""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from .lifecycle import DEAD, LIVE, State

_LIVE = [state.value for state in LIVE]
_DEAD = [state.value for state in DEAD]
NOT_NEGATIVE = ("attempts", "past_attempts", "rejections", "lost_leases", "requeues")


class OutboxMessage(models.Model):
    """One message: clear columns for finding and moving it, its content sealed."""

    id = models.BigAutoField(primary_key=True)
    publisher = models.CharField(max_length=63)
    notification_type = models.CharField(_("type"), max_length=255)
    caller_scope_id = models.CharField(max_length=255)
    account_id = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001 - none is not ''
    signing_scope_id = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001 - none is not ''
    # for people: a webhook's host, a topic, a handler; the full destination lives only sealed
    destination = models.CharField(max_length=255)
    destination_key = models.UUIDField()
    idempotency_key = models.CharField(max_length=255)
    ordering_key = models.CharField(max_length=255, default="", blank=True)
    dedup_id = models.UUIDField(unique=True)
    content_mac = models.BinaryField(max_length=32)
    encryption_key_id = models.CharField(max_length=64)
    # null once expunged: the body is gone, the binding stays
    sealed = models.BinaryField(null=True)

    state = models.CharField(max_length=16, default=State.PENDING.value)
    blocked_by = models.CharField(max_length=16, default="", blank=True)
    attempts = models.PositiveIntegerField(default=0)
    past_attempts = models.PositiveIntegerField(default=0)  # those before the last requeue
    rejections = models.PositiveIntegerField(default=0)
    lost_leases = models.PositiveIntegerField(default=0)
    requeues = models.PositiveIntegerField(default=0)

    give_up_after = models.DurationField()
    due_at = models.DateTimeField()
    available_at = models.DateTimeField()
    retry_until = models.DateTimeField()
    lease_token = models.UUIDField(null=True, blank=True)
    leased_by = models.CharField(max_length=255, default="", blank=True)

    quarantine_reason = models.CharField(max_length=32, default="", blank=True)
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=128, default="", blank=True)
    traceparent = models.CharField(max_length=64, default="", blank=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        # what operators may do in the admin, besides seeing messages
        permissions = [
            ("reveal_outboxmessage", "Can read the body of a message"),
            ("requeue_outboxmessage", "Can requeue messages"),
            ("send_now_outboxmessage", "Can send messages now"),
            ("quarantine_outboxmessage", "Can quarantine messages"),
            ("cancel_outboxmessage", "Can cancel messages"),
            ("expunge_outboxmessage", "Can erase the bodies of messages"),
        ]
        indexes = [
            models.Index(
                fields=["publisher", "state", "available_at", "id"],
                name="outbox_claim",
                condition=Q(state__in=_LIVE),
            ),
            models.Index(
                fields=["destination_key", "ordering_key", "state", "id"],
                name="outbox_order",
                condition=Q(state__in=[*_LIVE, *_DEAD]) & ~Q(ordering_key=""),
            ),
            models.Index(fields=["destination_key", "state"], name="outbox_destination"),
            models.Index(fields=["account_id", "id"], name="outbox_account"),
            models.Index(
                fields=["state", "quarantine_reason", "id"],
                name="outbox_dead",
                condition=Q(state__in=_DEAD),
            ),
            models.Index(
                fields=["encryption_key_id", "id"], name="outbox_key", condition=Q(sealed__isnull=False)
            ),
            models.Index(fields=["state", "retry_until"], name="outbox_purge"),
            # on the MySQL family, without conditions, what was expunged is walked over until it is purged
            models.Index(
                fields=["settled_at"],
                name="outbox_expunge",
                condition=Q(state=State.DELIVERED.value, sealed__isnull=False),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="outbox_known_state", condition=Q(state__in=[state.value for state in State])
            ),
            models.CheckConstraint(
                name="outbox_in_flight_has_token",
                condition=Q(state=State.IN_FLIGHT.value, lease_token__isnull=False)
                | (~Q(state=State.IN_FLIGHT.value) & Q(lease_token__isnull=True)),
            ),
            models.CheckConstraint(
                name="outbox_quarantined_has_reason",
                condition=(Q(state=State.QUARANTINED.value) & ~Q(quarantine_reason=""))
                | (~Q(state=State.QUARANTINED.value) & Q(quarantine_reason="")),
            ),
            models.CheckConstraint(
                name="outbox_blocked_has_cause",
                condition=(Q(state=State.BLOCKED.value) & ~Q(blocked_by=""))
                | (~Q(state=State.BLOCKED.value) & Q(blocked_by="")),
            ),
            models.CheckConstraint(
                name="outbox_settled_or_live",
                condition=Q(state__in=_LIVE, settled_at__isnull=True)
                | (~Q(state__in=_LIVE) & Q(settled_at__isnull=False)),
            ),
            models.CheckConstraint(
                name="outbox_waits_within_time",
                condition=~Q(state__in=[State.PENDING.value, State.BLOCKED.value])
                | Q(available_at__lte=F("retry_until")),
            ),
            models.CheckConstraint(
                name="outbox_counts_not_negative",
                condition=Q(*[(f"{name}__gte", 0) for name in NOT_NEGATIVE]),
            ),
            models.CheckConstraint(
                name="outbox_account_not_empty", condition=Q(account_id__isnull=True) | ~Q(account_id="")
            ),
        ]

    def __str__(self) -> str:
        return self.message_id

    @property
    def message_id(self) -> str:
        """The message's constant name on the wire."""
        return f"msg_{self.dedup_id.hex}"


class DeliveryAttempt(models.Model):
    """One attempt at a message that is worth remembering (``LOG_ATTEMPTS``), written as it settles.

    ``number`` goes on after a requeue. A ``stale`` attempt ended after its lease was lost: it happened, and
    decided nothing. The reference has no database constraint: a foreign key's share lock on the message would
    stand in the claim's way.
    """

    id = models.BigAutoField(primary_key=True)
    message = models.ForeignKey(
        OutboxMessage,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="timeline",
    )
    number = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    duration_ms = models.PositiveIntegerField()
    phase = models.CharField(max_length=16, default="", blank=True)
    outcome = models.CharField(max_length=16)
    status = models.PositiveSmallIntegerField(null=True, blank=True)
    error = models.CharField(max_length=128, default="", blank=True)
    worker = models.CharField(max_length=255, default="", blank=True)
    peer = models.CharField(max_length=64, default="", blank=True)
    trigger = models.CharField(max_length=16, default="", blank=True)
    stale = models.BooleanField(default=False)

    class Meta:
        verbose_name = _("delivery attempt")
        verbose_name_plural = _("delivery attempts")
        constraints = [models.UniqueConstraint(fields=["message", "number"], name="outbox_attempt_number")]
        indexes = [models.Index(fields=["started_at"], name="outbox_attempt_age")]

    def __str__(self) -> str:
        return f"attempt {self.number}"


class OutboxStat(models.Model):
    """How many messages of a lane came to an outcome in a minute, as one run of a worker counted them.

    ``outcome`` is ``delivered``, ``retry``, ``expired``, or a quarantine's reason. Rows without ``worker`` hold
    a whole quarter of an hour of everybody's, from ``minute`` on: old ones are brought together.
    """

    id = models.BigAutoField(primary_key=True)
    minute = models.DateTimeField()
    lane = models.CharField(max_length=63)
    outcome = models.CharField(max_length=32)
    worker = models.CharField(max_length=32, default="", blank=True)
    n = models.PositiveBigIntegerField()

    class Meta:
        verbose_name = _("count of outcomes")
        verbose_name_plural = _("counts of outcomes")
        constraints = [
            models.UniqueConstraint(fields=["minute", "lane", "outcome", "worker"], name="outbox_stat_count")
        ]

    def __str__(self) -> str:
        return f"{self.n} {self.outcome}"
