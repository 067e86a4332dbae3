"""The operators' door: shows what ``explain`` and ``finding`` know, and has ``operations`` do what is asked.

Imported by the admin's own autodiscover, so a project without ``django.contrib.admin`` never meets it. Shows no
body, full destination or header but through ``reveal``; whatever a stranger may have written is shown as text.
"""

from .messages import OutboxMessageAdmin

__all__ = ["OutboxMessageAdmin"]
