"""Settings of a project without the admin and whatever it needs."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "notification_outbox"]
MIDDLEWARE: list[str] = []
TEMPLATES: list[dict[str, object]] = []
ROOT_URLCONF = "tests.bare_urls"
