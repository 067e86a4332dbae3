"""Publishers: what takes an opened message to its destination.

``BACKEND`` of an alias is the dotted path of a class, its ``OPTIONS`` that class's keyword arguments. A
publisher never sees the table: it is given a ``Message`` and says, by returning or raising, what came of it.
"""

from .base import Publisher, build, publisher_for
from .webhook import WebhookPublisher

__all__ = ["Publisher", "WebhookPublisher", "build", "publisher_for"]
