"""System checks: what is wrong with the settings, found by ``manage.py check`` before a message is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, register

from . import conf
from .exceptions import ConfigurationError
from .publishers import build


@register
def check_settings(app_configs: Sequence[Any] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Read the settings and make every publisher once."""
    try:
        settings = conf.get()
    except ConfigurationError as error:
        return [Error(str(error), id="notification_outbox.E001")]
    found: list[CheckMessage] = []
    for publisher in settings.publishers.values():
        try:
            build(publisher)
        except ConfigurationError as error:
            found.append(Error(str(error), id="notification_outbox.E002"))
    return found
