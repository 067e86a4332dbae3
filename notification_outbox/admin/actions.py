"""What operators may do to messages: each with its own permission, a question with a count, and an entry in the log.

Selected rows are done by their ids, so that what others did meanwhile is counted and told; everything that matches
a filter is done by the filter, in chunks, and may be repeated when it was interrupted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from .. import finding, operations
from ..lifecycle import DEAD, LIVE, SETTLED, State
from ..models import OutboxMessage
from . import journal
from .filters import sources

if TYPE_CHECKING:
    from .messages import OutboxMessageAdmin

Rows = QuerySet[OutboxMessage]
CONFIRMED = "confirmed"
# so many are looked at to say how many it would be; what is done has no such bound
COUNTED = finding.NEWEST
# one question may be about all messages of so many destinations
DESTINATIONS = 1_000
TOO_MANY = _("Too many messages to collect their destinations: filter the list further, or select some.")
# seconds between two chunks, so that workers are not kept waiting
PACE = 0.05


@dataclass(frozen=True)
class Action:
    """One thing to do. ``fits``: the rows it can do something for; ``everywhere``: not only to the selected rows,
    but to all of their destinations."""

    name: str
    permission: str
    label: Any
    effect: Any
    done: Any
    partly: Any
    states: Collection[State]
    run: Callable[..., int]
    fits: Q
    everywhere: bool = False

    def among(self, rows: Rows, everything: Rows) -> Rows:
        """Return those of the rows that it can do something for."""
        if self.everywhere:
            # looked up first: a requeue changes what a subquery would find
            rows = everything.filter(destination_key__in=_keys(rows))
        return rows.filter(self.fits, state__in=[state.value for state in self.states])


ANY = Q()
HOLDS = Q(sealed__isnull=False)

ACTIONS = {
    action.name: action
    for action in (
        Action(
            "requeue",
            "requeue",
            _("Requeue"),
            _(
                "Each is sent again, with fresh time and attempts. Its receiver sees the same message id as before."
            ),
            _("%(moved)s requeued."),
            _("%(moved)s of %(asked)s requeued: %(rest)s had moved on."),
            DEAD,
            operations.requeue,
            HOLDS,
        ),
        Action(
            "requeue_destination",
            "requeue",
            _("Requeue all for this destination"),
            _("Every quarantined or expired message for the same destination is sent again."),
            _("%(moved)s requeued."),
            _("%(moved)s of %(asked)s requeued: %(rest)s had moved on."),
            DEAD,
            operations.requeue,
            HOLDS,
            everywhere=True,
        ),
        Action(
            "send_now",
            "send_now",
            _("Send now"),
            _("Each is due at once instead of later. How long it is tried stays as it was."),
            _("%(moved)s made due now."),
            _("%(moved)s of %(asked)s made due now: %(rest)s had moved on."),
            [State.PENDING],
            operations.send_now,
            Q(available_at__gt=Now()),
        ),
        Action(
            "quarantine",
            "quarantine",
            _("Quarantine"),
            _("Each is set aside until somebody requeues it. One that is being sent may still arrive."),
            _("%(moved)s quarantined."),
            _("%(moved)s of %(asked)s quarantined: %(rest)s had moved on."),
            LIVE,
            operations.quarantine,
            ANY,
        ),
        Action(
            "cancel",
            "cancel",
            _("Cancel"),
            _("Each is given up for good; this cannot be undone. One that is being sent may still arrive."),
            _("%(moved)s cancelled."),
            _("%(moved)s of %(asked)s cancelled: %(rest)s had moved on."),
            LIVE,
            operations.cancel,
            ANY,
        ),
        Action(
            "expunge",
            "expunge",
            _("Erase the body"),
            _("Each loses its body for good; this cannot be undone. It can be neither read nor sent again."),
            _("%(moved)s bodies erased."),
            _("%(moved)s of %(asked)s bodies erased: %(rest)s had moved on."),
            SETTLED,
            operations.expunge,
            HOLDS,
        ),
    )
}


def for_list(action: Action) -> Callable[..., HttpResponse | None]:
    """Return the action as the list's menu offers it."""

    @admin.action(description=action.label, permissions=[action.permission])
    def ask(model_admin: OutboxMessageAdmin, request: HttpRequest, queryset: Rows) -> HttpResponse | None:
        if request.POST.get("select_across") == "1":
            return act(model_admin, request, action, queryset, filtered_by=model_admin.filter_words(request))
        ids = [int(value) for value in request.POST.getlist(ACTION_CHECKBOX_NAME) if value.isdecimal()]
        return act(
            model_admin, request, action, model_admin.get_queryset(request).filter(id__in=ids), ids=ids
        )

    ask.__name__ = action.name
    return ask


def act(
    model_admin: OutboxMessageAdmin,
    request: HttpRequest,
    action: Action,
    rows: Rows,
    *,
    ids: list[int] | None = None,
    filtered_by: str = "",
    about: OutboxMessage | None = None,
) -> HttpResponse | None:
    """Ask, or with the answer do it; None when it is done. ``ids`` were selected; None: a filter chose the rows."""
    everything = model_admin.get_queryset(request)
    if action.everywhere and ids is None:
        looked_at = finding.among(sources(request, rows), rows, limit=finding.NEWEST)
        rows = finding.of_ids(looked_at.ids, everything)
        if not looked_at.complete or _keys(rows)[DESTINATIONS:]:
            model_admin.message_user(request, TOO_MANY, messages.ERROR)
            return None
    found = action.among(rows, everything)
    by_filter = ids is None and not action.everywhere
    count = _count(found, sources(request, rows, action.states) if by_filter else None)
    if CONFIRMED not in request.POST:
        return _question(model_admin, request, action, found, count, ids, about)
    by_ids = ids is not None and not action.everywhere
    # those that were asked about: what is gone from among them by now had moved on
    asked = len(ids or ()) if by_ids else count.at_least
    which = f"id {', '.join(map(str, ids))}" if ids is not None else filtered_by
    words = f"{asked:,}" if by_ids else str(count)
    entry = journal.begin(request, OutboxMessage, f"{action.name}: {which}; {words} asked", about)
    targets: Any = list(rows.values_list("id", flat=True)) if by_ids else found.order_by()
    moved = action.run(targets, pace=PACE)
    asked = max(asked, moved)
    journal.finish(entry, f"{moved} done")
    told = {"moved": f"{moved:,}", "asked": f"{asked:,}", "rest": f"{asked - moved:,}"}
    if moved < asked:
        model_admin.message_user(request, action.partly % told, messages.WARNING)
    else:
        model_admin.message_user(request, action.done % told, messages.SUCCESS)
    return None


def _question(
    model_admin: OutboxMessageAdmin,
    request: HttpRequest,
    action: Action,
    found: Rows,
    count: Count,
    ids: list[int] | None,
    about: OutboxMessage | None,
) -> HttpResponse:
    if ids is not None and not action.everywhere:
        ids = list(found.order_by("id").values_list("id", flat=True))
    context = {
        **model_admin.admin_site.each_context(request),
        "title": action.label,
        "opts": model_admin.opts,
        "original": about,
        "action": action,
        "count": count,
        # an empty selection would be refused before it reaches us
        "ids": ids or [0],
        "across": ids is None,
        "confirmed": CONFIRMED,
        "checkbox": ACTION_CHECKBOX_NAME,
    }
    return TemplateResponse(request, "admin/notification_outbox/outboxmessage/question.html", context)


class Count(NamedTuple):
    """How many there are, as far as that was looked at."""

    at_least: int
    exact: bool

    def __str__(self) -> str:
        return f"{self.at_least:,}" + ("" if self.exact else "+")


def _count(found: Rows, where: list[finding.Source] | None) -> Count:
    """Count what was found in ``where``; None: by ids or destinations, which have their index."""
    if where is not None:
        ids, complete = finding.among(where, found, limit=COUNTED)
        return Count(len(ids), complete)
    count = found.order_by()[: COUNTED + 1].count()
    return Count(min(count, COUNTED), count <= COUNTED)


def _keys(rows: Rows) -> list[uuid.UUID]:
    return list(rows.order_by().values_list("destination_key", flat=True).distinct()[: DESTINATIONS + 1])
