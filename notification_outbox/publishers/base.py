"""The interface of a publisher and how one is made from settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache

from django.utils.module_loading import import_string

from ..conf import PublisherSettings
from ..drafts import Draft, identifier
from ..envelope import Message
from ..exceptions import ConfigurationError
from ..lifecycle import Answer
from ..reading import suggestion


class Publisher:
    """Takes messages to one kind of destination. Subclass it and implement ``publish``.

    ``__init__`` takes the alias's ``OPTIONS`` as keyword arguments. ``validate`` and ``display`` run in the web
    process at enqueue and must stay cheap; ``open``, ``publish`` and ``close`` run in the worker's event loop.
    ``own_timeout`` is after how many seconds ``publish`` gives up by itself, if it does: within ``ATTEMPT_TIMEOUT``
    the worker takes its word for it and sets no timer of its own.
    """

    own_timeout: float | None = None

    def validate(self, draft: Draft) -> Draft:
        """Return the draft as it is to be stored, ``to`` in its one normal form. Raises ``InvalidMessage``."""
        return draft.replace(to=identifier("to", draft.to))

    def display(self, destination: str) -> str:
        """Return what people may see of a normal-form destination; nothing secret."""
        return destination

    def check(self) -> Iterable[str]:
        """Return what about the options should not be deployed, in sentences for ``manage.py check --deploy``."""
        return ()

    def problems(self) -> Iterable[str]:
        """Return what would keep a worker on this machine from opening it, such as a file it cannot read, in
        sentences for ``manage.py check``: errors there. No network."""
        return ()

    async def open(self) -> None:
        """Get ready to publish; called once per worker start."""

    async def publish(self, message: Message) -> Answer | None:
        """Deliver one message. Returning means delivered; an ``Answer`` says more for the record.

        ``TransientPublishError`` means that infrastructure is down: no attempt is burned.
        ``PermanentPublishError`` quarantines. ``PublishFailed`` and anything else is a failed attempt.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what ``open`` took; called once, after the last ``publish``."""


def build(settings: PublisherSettings) -> Publisher:
    """Return a new publisher of this alias. Raises ``ConfigurationError`` naming alias, key and remedy."""
    path = f"PUBLISHERS['{settings.alias}']"
    cls: object = None
    why = ""
    try:
        cls = import_string(settings.backend)
    except (ImportError, ValueError):
        pass
    except Exception as error:
        why = f"; importing it raised {type(error).__name__}"
    if not isinstance(cls, type) or not issubclass(cls, Publisher):
        raise ConfigurationError(
            f"{path}: BACKEND is not the dotted path of a Publisher that can be imported{why}"
        )
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in settings.options:
            if option not in parameters:
                raise ConfigurationError(
                    f"{path}: unknown option {option!r}{suggestion(option, parameters)}; "
                    f"{cls.__name__} takes {', '.join(parameters) or 'none'}"
                )
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
        if required and name not in settings.options:
            raise ConfigurationError(f"{path}: OPTIONS lack {name!r}, which {cls.__name__} needs")
    problem = None
    try:
        return cls(**settings.options)
    except ConfigurationError as error:
        problem = str(error)
    except TypeError:
        problem = f"OPTIONS do not fit {cls.__name__}({', '.join(parameters)})"
    except Exception as error:
        # its text may hold an option's value
        problem = f"{cls.__name__} raised {type(error).__name__} for its OPTIONS"
    raise ConfigurationError(f"{path}: {problem}")


@lru_cache(maxsize=64)
def publisher_for(settings: PublisherSettings) -> Publisher:
    """Return the publisher that ``enqueue()`` asks for ``validate`` and ``display``; it is never opened."""
    return build(settings)
