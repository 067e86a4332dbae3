"""The admin's own log: who did what to which messages. Written before it happens, completed afterwards.

An entry that says "began" and nothing more belongs to something that was interrupted; it may be repeated.
"""

from __future__ import annotations

from typing import cast

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest


def begin(request: HttpRequest, model: type[Model], what: str, about: Model | None = None) -> LogEntry:
    """Write that somebody begins ``what``, to one object or (None) to those that ``what`` names."""
    entry = LogEntry(
        user_id=cast(int, request.user.pk),  # nobody is anonymous behind the admin's login
        content_type=ContentType.objects.get_for_model(model),
        object_id=None if about is None else str(about.pk),
        object_repr=str(about or model._meta.verbose_name_plural)[:200],
        action_flag=CHANGE,
        change_message=f"{what}, began",
    )
    entry.save()
    return entry


def finish(entry: LogEntry, result: str) -> None:
    """Write what came of it."""
    entry.change_message = f"{entry.change_message.removesuffix('began')}{result}"
    entry.save(update_fields=["change_message"])
