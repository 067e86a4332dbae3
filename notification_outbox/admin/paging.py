"""Pages of a list that may have millions of rows: nobody counts them, and nobody leafs to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import finding
from ..models import OutboxMessage
from .filters import sources

if TYPE_CHECKING:
    Base = Paginator[OutboxMessage]
else:
    Base = Paginator

# rows that can be leafed through, and that are counted exactly; beyond, filters and searches find better
REACH = 10_000


class BoundedPaginator(Base):
    """Counts at most ``REACH`` rows. ``words`` says how many there are, as well as that is known.

    ``complete``: the rows are all that fit, and not only those that were looked at.
    """

    complete = True

    @cached_property
    def _found(self) -> tuple[int, str]:
        rows = cast(QuerySet[OutboxMessage], self.object_list)
        guess = None if rows.query.where else finding.estimated_rows(using=rows.db)
        if guess is not None and guess > REACH:
            return REACH, _("about %(count)s messages") % {"count": f"{guess:,}"}
        count = rows[: REACH + 1].count()
        if count > REACH:
            return REACH, _("more than %(count)s messages") % {"count": f"{REACH:,}"}
        return count, ngettext("%(count)s message", "%(count)s messages", count) % {"count": f"{count:,}"}

    @cached_property
    def count(self) -> int:
        return self._found[0]

    @property
    def words(self) -> str:
        words = self._found[1]
        if self.complete:
            return words
        looked_at = f"{finding.NEWEST:,}"
        return _("%(words)s among %(looked_at)s looked at") % {"words": words, "looked_at": looked_at}


class BoundedList(ChangeList):
    """Shows what was found among as many rows as may be looked at. Actions take the filters as they are."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> list[Any]:
        # whatever the address asks for: no other order has an index
        return list(self.model_admin.get_ordering(request))

    def get_results(self, request: HttpRequest) -> None:
        complete = True
        if self.queryset.query.where:
            found = finding.among(sources(request, self.queryset), self.queryset, limit=finding.NEWEST)
            self.queryset = finding.of_ids(found.ids[: REACH + 1], self.root_queryset)
            # beyond what can be leafed through nobody sees a difference
            complete = found.complete or len(found.ids) > REACH
        super().get_results(request)
        cast(BoundedPaginator, self.paginator).complete = complete
