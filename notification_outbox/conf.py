"""The settings, read once: the only room that knows ``django.conf``.

Everything else takes values as arguments. A wrong setting is a ``ConfigurationError`` that names the key, says
what is accepted and, for a misspelt key, which one was meant; it never repeats a value, which may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.encoding import force_bytes
from django.utils.module_loading import import_string

from .envelope import KEY_BYTES, Keyring, LookupKey
from .exceptions import ConfigurationError
from .lifecycle import RetryPolicy
from .signing import HttpMessageSigner

NAME = "NOTIFICATION_OUTBOX"
DEFAULT_BACKEND = "notification_outbox.publishers.WebhookPublisher"
HARD_MAX_BODY_BYTES = 10 * 1024 * 1024
LOG_ATTEMPTS = ("failures", "all", "none")

T = TypeVar("T")
EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False, repr=False)
class PublisherSettings:
    """One alias of ``PUBLISHERS``. Durations in seconds, but ``give_up_after``, which the database adds."""

    alias: str
    backend: str
    options: Mapping[str, Any]
    to: str | None
    give_up_after: timedelta
    retry: RetryPolicy
    attempt_timeout: float
    lease: float
    concurrency: int

    def __repr__(self) -> str:
        return f"<PublisherSettings {self.alias!r}>"


@dataclass(frozen=True, eq=False, repr=False)
class Settings:
    """The whole of ``NOTIFICATION_OUTBOX``, checked and with its defaults."""

    publishers: Mapping[str, PublisherSettings]
    keyring: Keyring
    lookup: LookupKey
    caller_scope_id: str | Callable[[], str]
    max_body_bytes: int
    poll_interval: float
    log_attempts: str

    def __repr__(self) -> str:
        return f"<Settings publishers={sorted(self.publishers)}>"

    def publisher(self, alias: str) -> PublisherSettings:
        """Return one alias's settings. Raises ``ConfigurationError`` naming the aliases there are."""
        try:
            return self.publishers[alias]
        except (KeyError, TypeError):
            pass
        raise ConfigurationError(
            f"there is no publisher of that alias; {NAME}['PUBLISHERS'] has {', '.join(sorted(self.publishers))}"
        )


class _Section:
    """One dict of settings being read: keys are taken one by one, what is left over is unknown."""

    def __init__(self, path: str, raw: object) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigurationError(f"{path}: expected a dict")
        self.path = path
        self.raw = dict(raw)
        self.known: list[str] = []

    def take(self, key: str, read: Callable[[object], T], default: T) -> T:
        self.known.append(key)
        if key not in self.raw:
            return default
        problem = None
        try:
            return read(self.raw.pop(key))
        except _Bad as bad:
            problem = str(bad)
        raise ConfigurationError(f"{self.path}['{key}']: expected {problem}")

    def close(self) -> None:
        for key in self.raw:
            raise ConfigurationError(
                f"{self.path}: unknown key {key!r}{suggestion(str(key), self.known)}; "
                f"known keys are {', '.join(sorted(self.known))}"
            )


class _Bad(Exception):
    """A value breaks its rule; the text says what was expected."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` when one of ``known`` is close to ``name``."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        seconds: float | None = None
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        elif isinstance(value, str) and (match := _DURATION.match(value)):
            seconds = float(match[1]) * _UNITS[match[2]]
        if seconds is None or not low <= seconds <= high:
            raise _Bad(
                f"{low:g} to {high:g} seconds as a number, a timedelta or text like '90s', '15m', '3d'"
            )
        return seconds

    return read


def _integer(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Bad(f"a whole number from {low} to {high}")
        return value

    return read


def _number(low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _Bad(f"a number from {low:g} to {high:g}")
        return float(value)

    return read


def _optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    def read_optional(value: object) -> T | None:
        return None if value is None else read(value)

    return read_optional


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _Bad("text that is not empty")
    return value


def _choice(*choices: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in choices:
            raise _Bad(f"one of {', '.join(map(repr, choices))}")
        return str(value)

    return read


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _Bad("a dict with text keys")
    return MappingProxyType(dict(value))


def _scope(value: object) -> str | Callable[[], str]:
    if callable(value):
        return value
    if not isinstance(value, str) or not value:
        raise _Bad("text, a callable or the dotted path of one")
    if "." not in value:
        return value
    found = None
    try:
        found = import_string(value)
    except ImportError:
        pass
    if not callable(found):
        raise _Bad("text without a dot, a callable or the dotted path of a callable")
    return found  # type: ignore[no-any-return]


def _secret(value: object) -> bytes:
    material = value.encode() if isinstance(value, str) else value
    if not isinstance(material, bytes) or len(material) < 16:
        raise _Bad("a secret of at least 16 characters or bytes")
    return material


def _keyring(value: object) -> Keyring:
    problem = f"a dict of key id to {KEY_BYTES} bytes in base64, the sealing key first"
    if not isinstance(value, Mapping) or not value:
        raise _Bad(problem)
    keys: dict[str, bytes] = {}
    for key_id, encoded in value.items():
        if not isinstance(key_id, str) or not 1 <= len(key_id) <= 64 or not key_id.isprintable():
            raise _Bad("key ids of 1 to 64 printable characters")
        key: bytes = b""
        if isinstance(encoded, bytes) and len(encoded) == KEY_BYTES:
            key = encoded
        elif isinstance(encoded, str | bytes):
            try:
                key = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise _Bad(problem) from None
        if len(key) != KEY_BYTES:
            raise _Bad(problem)
        keys[key_id] = key
    return Keyring(keys)


def _retry(section: _Section) -> RetryPolicy:
    defaults = RetryPolicy()
    max_attempts = section.take("MAX_ATTEMPTS", _optional(_integer(1, 10_000)), None)
    max_rejections = section.take("MAX_REJECTIONS", _optional(_integer(1, 10_000)), defaults.max_rejections)
    backoff = _Section(f"{section.path}['BACKOFF']", section.take("BACKOFF", _mapping, EMPTY))
    policy = RetryPolicy(
        base=backoff.take("base", _duration(0.001, 86400), defaults.base),
        factor=backoff.take("factor", _number(1, 10), defaults.factor),
        cap=backoff.take("cap", _duration(0.001, 7 * 86400), defaults.cap),
        jitter=backoff.take("jitter", _number(0, 1), defaults.jitter),
        max_attempts=max_attempts,
        max_rejections=max_rejections,
    )
    backoff.close()
    return policy


def _publisher(path: str, alias: str, raw: object) -> PublisherSettings:
    section = _Section(path, raw)
    publisher = PublisherSettings(
        alias=alias,
        backend=section.take("BACKEND", _text, DEFAULT_BACKEND),
        options=section.take("OPTIONS", _mapping, EMPTY),
        to=section.take("TO", _optional(_text), None),
        give_up_after=timedelta(
            seconds=section.take("GIVE_UP_AFTER", _duration(60, 30 * 86400), 3 * 86400.0)
        ),
        retry=_retry(section),
        attempt_timeout=section.take("ATTEMPT_TIMEOUT", _duration(0.1, 3600), 20.0),
        lease=section.take("LEASE", _duration(1, 86400), 60.0),
        concurrency=section.take("CONCURRENCY", _integer(1, 10_000), 64),
    )
    section.close()
    if publisher.lease < publisher.attempt_timeout + LEASE_MARGIN:
        raise ConfigurationError(
            f"{path}['LEASE']: expected at least ATTEMPT_TIMEOUT and {LEASE_MARGIN:g} s more, "
            "or an attempt could outlive its lease and be sent twice"
        )
    return publisher


# what a worker needs besides the attempt itself to settle inside the lease
LEASE_MARGIN = 1.0


def _publishers(section: _Section, secret: bytes) -> Mapping[str, PublisherSettings]:
    raw = section.take("PUBLISHERS", _mapping, EMPTY)
    found = {}
    if not raw:
        # zero settings run: receivers can verify, and a deploy check asks for a key of its own
        raw = {"default": {"OPTIONS": {"signer": HttpMessageSigner.from_secret(secret)}}}
    for alias, options in raw.items():
        path = f"{section.path}['PUBLISHERS']['{alias}']"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,63}", alias):
            raise ConfigurationError(f"{path}: expected an alias of 1 to 63 letters, digits, '_', '.', '-'")
        found[alias] = _publisher(path, alias, options)
    return MappingProxyType(found)


def read(raw: object, *, secrets: Sequence[bytes]) -> Settings:
    """Return the settings that ``raw`` (the dict of ``NOTIFICATION_OUTBOX``) stands for, or raise.

    ``secrets`` are ``SECRET_KEY`` and its fallbacks, from which missing keys are derived.
    """
    section = _Section(NAME, raw)
    default_scope: str | Callable[[], str] = "default"
    found = Settings(
        publishers=_publishers(section, secrets[0]),
        keyring=section.take("ENCRYPTION_KEYS", _optional(_keyring), None) or Keyring.from_secrets(secrets),
        lookup=LookupKey(section.take("LOOKUP_KEY", _secret, secrets[0])),
        caller_scope_id=section.take("CALLER_SCOPE_ID", _scope, default_scope),
        max_body_bytes=section.take("MAX_BODY_BYTES", _integer(1, HARD_MAX_BODY_BYTES), 1024 * 1024),
        poll_interval=section.take("POLL_INTERVAL", _duration(0.01, 3600), 1.0),
        log_attempts=section.take("LOG_ATTEMPTS", _choice(*LOG_ATTEMPTS), "failures"),
    )
    section.close()
    return found


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return this process's settings, read at first use and again when a test changes them."""
    secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    return read(getattr(django_settings, NAME, {}), secrets=[force_bytes(secret) for secret in secrets])


def _forget(*, setting: str, **_kwargs: object) -> None:
    if setting in (NAME, "SECRET_KEY", "SECRET_KEY_FALLBACKS"):
        get.cache_clear()


setting_changed.connect(_forget, dispatch_uid="notification_outbox.conf")
