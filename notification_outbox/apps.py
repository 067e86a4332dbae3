"""The Django application."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class NotificationOutboxConfig(AppConfig):
    name = "notification_outbox"
    verbose_name = _("notification outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401 - registers the system checks
