"""The health page: one sentence that says how it is, and the numbers behind it.

Shows what ``stats`` counts and ``health`` says of it, in a fixed number of queries whatever the tables hold. No
script, no inline style, nothing from elsewhere: a strict Content-Security-Policy finds nothing to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from .. import conf, stats
from ..explain import in_words
from ..health import judge
from ..models import OutboxMessage
from ..stats import Lane, Quarter, bounded

# the plot's own units; it is stretched to the page
WIDTH, HEIGHT = 960, 180
# what is there at all is seen, however small
LEAST = 2.0
SERIES = ("delivered", "retried", "dead")


def health_urls(site: AdminSite) -> list[URLPattern]:
    """Return the page's URL, ``admin:notification_outbox_health``, for the ``get_urls()`` of a ``ModelAdmin``."""
    view = site.admin_view(partial(health_page, site=site))
    return [path("health/", view, name="notification_outbox_health")]


@require_safe
def health_page(request: HttpRequest, site: AdminSite) -> TemplateResponse:
    """Answer with the health of the outbox, for who may view messages."""
    opts = OutboxMessage._meta
    if not request.user.has_perm(f"{opts.app_label}.view_{opts.model_name}"):
        raise PermissionDenied
    settings = conf.get()
    numbers = stats.numbers(settings.publishers, using=router.db_for_read(OutboxMessage))
    first, *others = judge(numbers, publishers=settings.publishers, is_known=settings.keyring.__contains__)
    context = {
        **site.each_context(request),
        "title": _("Health of the outbox"),
        "opts": opts,
        "sign": first,
        "other_signs": others,
        "lanes": [_lane(lane, configured=lane.name in settings.publishers) for lane in numbers.lanes],
        "plot": _plot(numbers.quarters),
        "dead": [(reason, bounded(count)) for reason, count in numbers.dead.items()],
        "keys": [(key, bounded(count), key in settings.keyring) for key, count in numbers.keys.items()],
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/notification_outbox/health.html", context)


def _lane(lane: Lane, *, configured: bool) -> dict[str, Any]:
    """Return one row of the table of lanes, as text."""
    backlog = lane.backlog
    return {
        "name": lane.name,
        "configured": configured,
        "due": bounded(backlog.due),
        "oldest_due": "" if backlog.oldest_due is None else in_words(timedelta(seconds=backlog.oldest_due)),
        "scheduled": bounded(backlog.scheduled),
        "in_flight": bounded(backlog.in_flight),
        "delivered": number_format(lane.delivered, 1, force_grouping=True),
        "failed": number_format(lane.failed, 1, force_grouping=True),
        "dead": [(reason, _number(count)) for reason, count in sorted(lane.dead.items())],
    }


class Bar(NamedTuple):
    """One quarter of an hour in the plot: its numbers, and its parts as (series, x, y, height) in SVG's text."""

    quarter: Quarter
    parts: list[tuple[str, str, str, str]]


class Plot(NamedTuple):
    """Bars, the number at the plot's top, and each series' sum."""

    bars: list[Bar]
    top: str
    middle: str
    sums: dict[str, str]
    width: int = WIDTH
    height: int = HEIGHT


def _plot(quarters: Sequence[Quarter]) -> Plot:
    top = _round_up(max(quarter.delivered + quarter.retried + quarter.dead for quarter in quarters))
    bars = []
    for place, quarter in enumerate(quarters):
        ground = float(HEIGHT)
        parts = []
        for series in SERIES:
            if count := getattr(quarter, series):
                height = max(count / top * HEIGHT, LEAST)
                ground = max(ground - height, 0.0)
                parts.append((series, str(place * WIDTH // len(quarters)), f"{ground:.1f}", f"{height:.1f}"))
        bars.append(Bar(quarter, parts))
    sums = {series: _number(sum(getattr(quarter, series) for quarter in quarters)) for series in SERIES}
    return Plot(bars, _number(top), _number(top // 2), sums)


def _round_up(most: int) -> int:
    """Return the round and even number that an axis for so many ends at, at least 2."""
    magnitude = int("1" + "0" * (len(str(most)) - 1))
    return max(2, next(step * magnitude for step in (1, 2, 4, 6, 8, 10) if step * magnitude >= most))


def _number(count: int) -> str:
    return number_format(count, force_grouping=True)
