"""Messages in the admin: a list that stays quick at millions of rows, and a page that explains one message.

Nobody adds, changes or deletes a row here: what moves one is an action, with a permission of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import mark_safe
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..explain import REASONS, STANDINGS, Facts, in_words, next_words
from ..models import OutboxMessage
from . import journal
from .actions import ACTIONS, act, for_list
from .facts import about, last_answer
from .filters import FILTERS, PARAMETERS, searched
from .health import health_urls
from .paging import BoundedList, BoundedPaginator
from .revealing import reveal

if TYPE_CHECKING:
    Base = admin.ModelAdmin[OutboxMessage]
else:
    Base = admin.ModelAdmin

TEMPLATES = "admin/notification_outbox/outboxmessage"
# in its column a sign of nothing; where there are no columns it is hidden
NOTHING = mark_safe('<span class="outbox-nothing">-</span>')


@admin.register(OutboxMessage)
class OutboxMessageAdmin(Base):
    """List, page and actions of messages. Rows carry ``now``, the database's, and whether one ``holds`` a body."""

    list_display = (
        "number",
        "standing",
        "reason",
        "next",
        "last_answer",
        "destination",
        "notification_type",
        "account",
        "attempts",
        "age",
    )
    list_filter = FILTERS
    list_per_page = 100
    list_max_show_all = 100
    ordering = ("-id",)
    sortable_by = ()
    search_fields = ("id",)
    search_help_text = _(
        "Message id (msg_…), number, account, idempotency key of a recent message, or full URL"
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    actions = tuple(for_list(action) for action in ACTIONS.values())

    class Media:
        css = {"all": ("notification_outbox/admin.css",)}

    # who may do what

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: OutboxMessage | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: OutboxMessage | None = None) -> bool:
        return False

    def may(self, request: HttpRequest, what: str) -> bool:
        """Say whether the user has the permission ``what`` on messages; each view asks first whether he sees them."""
        return request.user.has_perm(f"{self.opts.app_label}.{what}_{self.opts.model_name}")

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "requeue")

    def has_send_now_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "send_now")

    def has_quarantine_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "quarantine")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "cancel")

    def has_expunge_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "expunge")

    # the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxMessage]:
        holds = ExpressionWrapper(Q(sealed__isnull=False), output_field=BooleanField())
        return super().get_queryset(request).defer("sealed", "content_mac").annotate(now=Now(), holds=holds)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        # any column could be asked for in the address, without an index and letter by letter
        return lookup in PARAMETERS

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if search_term:
            queryset = queryset.filter(searched(request, search_term, queryset).condition)
        return queryset, False

    def filter_words(self, request: HttpRequest) -> str:
        """Return what the list was narrowed to, for the log: a URL that was searched for is not told."""
        narrowed = [f"{name}={request.GET[name]}" for name in sorted(PARAMETERS & set(request.GET))]
        if term := request.GET.get("q"):
            narrowed.append(searched(request, term, self.get_queryset(request)).said)
        return " and ".join(narrowed) or "all"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedList]:
        return BoundedList

    @transaction.non_atomic_requests
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        title = capfirst(self.opts.verbose_name_plural)
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    @admin.display(description=_("message"))
    def number(self, row: OutboxMessage) -> str:
        return str(row.pk)

    @admin.display(description=_("state"))
    def standing(self, row: OutboxMessage) -> str:
        standing = Facts.of(row).standing
        return format_html(
            '<span class="outbox-badge outbox-{}">{}</span>', standing.value, STANDINGS[standing]
        )

    @admin.display(description=_("account"), empty_value="-")
    def account(self, row: OutboxMessage) -> str | None:
        return row.account_id

    @admin.display(description=_("next"))
    def next(self, row: OutboxMessage) -> str:
        return next_words(Facts.of(row)) or NOTHING

    @admin.display(description=_("last answer"))
    def last_answer(self, row: OutboxMessage) -> str:
        return last_answer(row.last_status, row.last_error) or NOTHING

    @admin.display(description=_("reason"))
    def reason(self, row: OutboxMessage) -> Any:
        return REASONS[row.quarantine_reason].name if row.quarantine_reason else NOTHING

    @admin.display(description=_("age"))
    def age(self, row: OutboxMessage) -> str:
        return in_words(Facts.of(row).now - row.created_at)

    # the page of one message

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view
        return [
            *health_urls(self.admin_site),
            path("<int:pk>/act/<slug:what>/", view(self.act_view), name=f"{name}_act"),
            path("<int:pk>/reveal/", view(self.reveal_view), name=f"{name}_reveal"),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD"])
        return self._page(request, self._message(request, object_id), extra_context)

    # chunks commit as they are done, whatever ATOMIC_REQUESTS says
    @transaction.non_atomic_requests
    def act_view(self, request: HttpRequest, pk: int, what: str) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        action = ACTIONS.get(what)
        if action is None:
            raise Http404
        message = self._message(request, pk)
        if not self.may(request, action.permission):
            raise PermissionDenied
        rows = self.get_queryset(request).filter(pk=pk)
        answer = act(self, request, action, rows, ids=[pk], about=message)
        return answer or HttpResponseRedirect(self._address("change", pk))

    # the log's entry is committed before the body is opened
    @transaction.non_atomic_requests
    def reveal_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        message = self._message(request, pk)
        if not self.may(request, "reveal"):
            raise PermissionDenied
        entry = journal.begin(request, OutboxMessage, "reveal", message)
        revealed = reveal(message, conf.get().keyring)
        journal.finish(entry, "not opened" if revealed.problem else "shown")
        # the admin sends every page of its own with Cache-Control: no-store
        return self._page(request, message, {"revealed": revealed})

    def _message(self, request: HttpRequest, object_id: str | int) -> OutboxMessage:
        """Return the message. Raises ``PermissionDenied``, or ``Http404`` when it was purged or never was."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        message = self.get_object(request, str(object_id))
        if message is None:
            raise Http404
        return message

    def _address(self, what: str, *args: object) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{what}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    def _page(
        self, request: HttpRequest, message: OutboxMessage, extra_context: dict[str, Any] | None
    ) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            **about(message),
            "opts": self.opts,
            "media": self.media,
            "actions": [
                (action, self._address("act", message.pk, action.name))
                for action in ACTIONS.values()
                if message.state in action.states and self.may(request, action.permission)
            ],
            "reveal": self._address("reveal", message.pk) if self.may(request, "reveal") else "",
            "same_destination": f"{self._address('changelist')}?destination={message.destination_key}",
            **(extra_context or {}),
        }
        return TemplateResponse(request, f"{TEMPLATES}/message.html", context)
