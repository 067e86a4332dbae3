"""The list's filters: their choices cost index probes, and the one that leaves least says where rows are found."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from .. import conf, finding, stats
from ..explain import REASONS, STANDINGS, Standing
from ..lifecycle import QuarantineReason, State
from ..models import OutboxMessage

Rows = QuerySet[OutboxMessage]
# of these there are few, or an index finds those of one publisher
_INDEXED = frozenset(set(Standing) - {Standing.DELIVERED, Standing.CANCELLED})


class Filter(admin.SimpleListFilter):
    """A filter whose value must make sense: else it is refused, or an unfiltered list would be acted upon."""

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        value = self.value()
        if value is None:
            return queryset
        try:
            found = self.read(value)
        except (KeyError, ValueError):
            raise IncorrectLookupParameters from None
        return self.narrow(request, queryset, found)

    def read(self, value: str) -> Any:
        """Return what the value means. ``KeyError`` or ``ValueError``: nothing."""
        return value

    def narrow(self, request: HttpRequest, rows: Rows, value: Any) -> Rows:
        """Return the rows that fit."""
        raise NotImplementedError


class StateFilter(Filter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(standing.value, words) for standing, words in STANDINGS.items()]

    def read(self, value: str) -> Standing:
        return Standing(value)

    def narrow(self, request: HttpRequest, rows: Rows, value: Standing) -> Rows:
        return rows.filter(finding.is_standing(value))


class ReasonFilter(Filter):
    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(str(reason), meaning.name) for reason, meaning in REASONS.items()]

    def read(self, value: str) -> str:
        return QuarantineReason(value).value

    def narrow(self, request: HttpRequest, rows: Rows, value: str) -> Rows:
        # with the state, as the index of dead letters has it
        return rows.filter(state=State.QUARANTINED.value, quarantine_reason=value)


class PublisherFilter(Filter):
    title = _("publisher")
    parameter_name = "publisher"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        waiting = stats.lanes(using=model_admin.get_queryset(request).db)
        return [(alias, alias) for alias in sorted({*conf.get().publishers, *waiting})]

    def narrow(self, request: HttpRequest, rows: Rows, value: str) -> Rows:
        rows = rows.filter(publisher=value)
        if request.GET.get("state") in _INDEXED or {"reason", "destination", "q"} & set(request.GET):
            return rows
        self.title = _("publisher (of the newest messages)")
        return rows.filter(id__gt=finding.newest(using=rows.db))


class KeyFilter(Filter):
    title = _("encryption key")
    parameter_name = "key"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        keyring = conf.get().keyring
        return [
            (key_id, key_id if key_id in keyring else _("%(key)s (not known here)") % {"key": key_id})
            for key_id in stats.key_ids(using=model_admin.get_queryset(request).db)
        ]

    def narrow(self, request: HttpRequest, rows: Rows, value: str) -> Rows:
        return rows.filter(encryption_key_id=value, sealed__isnull=False)


class AgeFilter(Filter):
    title = _("age")
    parameter_name = "age"
    choices_of_age = {
        "1h": (_("last hour"), timedelta(hours=1), True),
        "1d": (_("last 24 hours"), timedelta(days=1), True),
        "7d": (_("last 7 days"), timedelta(days=7), True),
        "over-1d": (_("older than a day"), timedelta(days=1), False),
        "over-7d": (_("older than 7 days"), timedelta(days=7), False),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(value, words) for value, (words, *_rest) in self.choices_of_age.items()]

    def read(self, value: str) -> tuple[Any, timedelta, bool]:
        return self.choices_of_age[value]

    def narrow(self, request: HttpRequest, rows: Rows, value: tuple[Any, timedelta, bool]) -> Rows:
        _words, ago, newer = value
        edge = finding.edge(ago, using=rows.db)
        if edge is None:
            return rows
        if newer:
            return rows.filter(id__gte=edge.low, created_at__gte=edge.moment)
        return rows.filter(id__lt=edge.high, created_at__lt=edge.moment)


class DestinationFilter(Filter):
    """One destination, as a message's page links to it; it offers no choices of its own."""

    title = _("destination")
    parameter_name = "destination"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        value = request.GET.get(self.parameter_name)
        return [] if value is None else [(value, _("that of one message"))]

    def read(self, value: str) -> uuid.UUID:
        return uuid.UUID(value)

    def narrow(self, request: HttpRequest, rows: Rows, value: uuid.UUID) -> Rows:
        return rows.filter(destination_key=value)


FILTERS = (StateFilter, ReasonFilter, PublisherFilter, AgeFilter, KeyFilter, DestinationFilter)
PARAMETERS = frozenset(filter_class.parameter_name for filter_class in FILTERS)


def searched(request: HttpRequest, term: str, rows: Rows) -> finding.Search:
    """Return what a search term names; list, question and log of one request look it up once."""
    known: dict[str, finding.Search] = request.__dict__.setdefault("_outbox_searched", {})
    if term not in known:
        known[term] = finding.search(term, conf.get(), rows)
    return known[term]


def sources(
    request: HttpRequest, rows: Rows, states: Collection[State] | None = None
) -> list[finding.Source]:
    """Return where to look for what the address asks for, which must make sense: by what leaves least, if an index
    knows it. ``states``: only messages in these are of interest.
    """
    asked, using = request.GET, rows.db
    if term := asked.get("q"):
        return searched(request, term, rows).sources
    if key := asked.get("destination"):
        each: Collection[State | None] = states or [None]
        return [finding.of_destination(uuid.UUID(key), state=state, using=using) for state in each]
    if reason := asked.get("reason"):
        possible = states is None or State.QUARANTINED in states
        return [finding.of_reason(reason, using=using)] if possible else []
    if value := asked.get("state"):
        standing = Standing(value)
        possible = states is None or finding.state_of(standing) in states
        return finding.of_standing(standing, using=using) if possible else []
    # of all states only this one grows without end
    if states is not None and State.DELIVERED not in states:
        return [finding.of_state(state, using=using) for state in states]
    if key_id := asked.get("key"):
        return [finding.of_key(key_id, using=using)]
    if age := asked.get("age"):
        _words, ago, newer = AgeFilter.choices_of_age[age]
        edge = finding.edge(ago, using=using)
        if edge is None:
            return []
        return [finding.of_newest(using=using, **({"since": edge.low} if newer else {"below": edge.high}))]
    return [finding.of_newest(using=using)]
