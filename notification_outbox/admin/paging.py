"""Pages of a list that may have millions of rows: nobody counts them, and nobody leafs to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.utils.functional import cached_property
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import finding
from ..models import OutboxMessage

if TYPE_CHECKING:
    Base = Paginator[OutboxMessage]
else:
    Base = Paginator

# rows that can be leafed through, and that are counted exactly; beyond, filters and searches find better
REACH = 10_000


class BoundedPaginator(Base):
    """Counts at most ``REACH`` rows. ``words`` says how many there are, as well as that is known."""

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
        return self._found[1]
