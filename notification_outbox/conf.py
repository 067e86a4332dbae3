"""The settings, read once: the only room that knows ``django.conf``.

Everything else takes values as arguments. A wrong setting is a ``ConfigurationError`` that names the key, says
what is accepted and, for a misspelt key, which one was meant; it never repeats a value, which may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.encoding import force_bytes

from .drafts import identifier
from .envelope import KEY_BYTES, Keyring, LookupKey
from .exceptions import ConfigurationError, InvalidMessage
from .hosts import RuleError, host_name
from .lifecycle import RetryPolicy
from .payloads import HARD_MAX_BYTES, Validators
from .reading import (
    EMPTY,
    BadValue,
    Section,
    choice,
    dotted,
    duration,
    integer,
    mapping,
    number,
    optional,
    spoken,
    text,
    texts,
)
from .signing import HttpMessageSigner

NAME = "NOTIFICATION_OUTBOX"
DEFAULT_BACKEND = "notification_outbox.publishers.WebhookPublisher"
LOG_ATTEMPTS = ("failures", "all", "none")
BODIES = ("plain", "bound", "standard")
# seconds a worker needs before an attempt to start it, and after it to record it, inside the lease
LEASE_MARGIN = 1.0


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
    body: str

    def __repr__(self) -> str:
        return f"<PublisherSettings {self.alias!r}>"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what is settled is kept: ``delivered`` (and cancelled) and ``dead`` messages after the end of their
    time, ``attempts`` after they began, bodies of delivered messages after they settled (None: with the row)."""

    delivered: timedelta = timedelta(days=7)
    dead: timedelta = timedelta(days=90)
    attempts: timedelta = timedelta(days=90)
    expunge_delivered: timedelta | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Settings:
    """The whole of ``NOTIFICATION_OUTBOX``, checked and with its defaults.

    ``databases`` are those a worker serves, none meaning the router's choice. ``derived`` names what was made
    from ``SECRET_KEY`` because it was not set. ``deliver`` are the destinations that may be reached, as rows show
    them; None: all, an empty set: none.
    """

    publishers: Mapping[str, PublisherSettings]
    keyring: Keyring
    lookup: LookupKey
    caller_scope_id: str | Callable[[], str]
    max_body_bytes: int
    poll_interval: float
    log_attempts: str
    use_tz: bool
    validators: Validators
    retention: Retention
    databases: tuple[str, ...]
    deliver: frozenset[str] | None
    derived: frozenset[str]

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


def _scope(value: object) -> str | Callable[[], str]:
    if not isinstance(value, str) or "." in value:
        return dotted("text without a dot, a callable or the dotted path of a callable")(value)
    problem = ""
    try:
        return identifier("", value)
    except InvalidMessage as error:
        problem = error.hint.removeprefix("expected ")
    raise BadValue(problem)


def _deliver(value: object) -> frozenset[str] | None:
    """Return the hosts that may be reached, None for all."""
    what = '"all", "none" or a list of hosts without port such as ["hooks.example.com"]'
    if value in ("all", "none"):
        return None if value == "all" else frozenset()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadValue(what)
    hosts = set()
    for place, entry in enumerate(value, start=1):
        try:
            hosts.add(host_name(entry))
            continue
        except RuleError as broken:
            rule = broken.rule
        raise BadValue(f"{what}; entry {place} is none [{rule}]")
    return frozenset(hosts)


def _secret(value: object) -> bytes:
    material = value.encode(errors="replace") if isinstance(value, str) else value
    if not isinstance(material, bytes) or len(material) < 16:
        raise BadValue("a secret of at least 16 characters or bytes")
    return material


def _keyring(value: object) -> Keyring:
    problem = f"a dict of key id to {KEY_BYTES} bytes in base64, the sealing key first, or what returns one"
    if callable(value) or isinstance(value, str):
        load, value = dotted(problem)(value), None
        try:
            value = load()
        except Exception as error:
            # its text may hold what a vault answered
            problem = f"a callable that returns keys; it raised {type(error).__name__}"
    if not isinstance(value, Mapping) or not value:
        raise BadValue(problem)
    keys: dict[str, bytes] = {}
    for key_id, encoded in value.items():
        if not isinstance(key_id, str) or not 1 <= len(key_id) <= 64 or not key_id.isprintable():
            raise BadValue("key ids of 1 to 64 printable characters")
        key: bytes = b""
        if isinstance(encoded, bytes) and len(encoded) == KEY_BYTES:
            key = encoded
        elif isinstance(encoded, str | bytes):
            try:
                key = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise BadValue(problem) from None
        if len(key) != KEY_BYTES:
            raise BadValue(problem)
        keys[key_id] = key
    return Keyring(keys)


def _validators(value: object) -> Validators:
    what = "a dict of notification type patterns to callables or their dotted paths"
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
        raise BadValue(what)
    return Validators((pattern, dotted(what)(check)) for pattern, check in value.items())


def _retry(section: Section) -> RetryPolicy:
    defaults = RetryPolicy()
    max_attempts = section.take("MAX_ATTEMPTS", optional(integer(1, 10_000)), None)
    max_rejections = section.take("MAX_REJECTIONS", optional(integer(1, 10_000)), defaults.max_rejections)
    backoff = Section(f"{section.path}['BACKOFF']", section.take("BACKOFF", mapping('{"base": "5s"}'), EMPTY))
    policy = RetryPolicy(
        base=backoff.take("base", duration(0.001, 86400), defaults.base),
        factor=backoff.take("factor", number(1, 10), defaults.factor),
        cap=backoff.take("cap", duration(0.001, 7 * 86400), defaults.cap),
        jitter=backoff.take("jitter", number(0, 1), defaults.jitter),
        max_attempts=max_attempts,
        max_rejections=max_rejections,
    )
    backoff.close()
    if policy.base > policy.cap:
        raise ConfigurationError(
            f"{backoff.path}['base']: expected at most cap ({spoken(policy.cap)}), which no pause exceeds"
        )
    return policy


def _kept(value: object) -> timedelta:
    return timedelta(seconds=duration(0, 10 * 366 * 86400)(value))


def _retention(section: Section) -> Retention:
    defaults = Retention()
    kept = Section(
        f"{section.path}['RETENTION']", section.take("RETENTION", mapping('{"dead": "90d"}'), EMPTY)
    )
    retention = Retention(
        delivered=kept.take("delivered", _kept, defaults.delivered),
        dead=kept.take("dead", _kept, defaults.dead),
        attempts=kept.take("attempts", _kept, defaults.attempts),
        expunge_delivered=kept.take("expunge_delivered", optional(_kept), None),
    )
    kept.close()
    return retention


def _concurrency(section: Section) -> int:
    limits = Section(
        f"{section.path}['CONCURRENCY']", section.take("CONCURRENCY", mapping('{"worker": 64}'), EMPTY)
    )
    worker = limits.take("worker", integer(1, 10_000), 64)
    limits.close()
    return worker


def _publisher(path: str, alias: str, raw: object) -> PublisherSettings:
    section = Section(path, raw)
    publisher = PublisherSettings(
        alias=alias,
        backend=section.take("BACKEND", text, DEFAULT_BACKEND),
        options=section.take("OPTIONS", mapping('{"signer": HttpMessageSigner(...)}'), EMPTY),
        to=section.take("TO", optional(text), None),
        give_up_after=timedelta(seconds=section.take("GIVE_UP_AFTER", duration(60, 30 * 86400), 3 * 86400.0)),
        retry=_retry(section),
        attempt_timeout=section.take("ATTEMPT_TIMEOUT", duration(0.1, 3600), 20.0),
        lease=section.take("LEASE", duration(1, 86400), 60.0),
        concurrency=_concurrency(section),
        body=section.take("BODY", choice(*BODIES), "plain"),
    )
    section.close()
    if publisher.lease < publisher.attempt_timeout + 2 * LEASE_MARGIN:
        raise ConfigurationError(
            f"{path}['LEASE']: expected at least ATTEMPT_TIMEOUT and {2 * LEASE_MARGIN:g} s more, "
            "or an attempt could outlive its lease and be sent twice"
        )
    return publisher


def _publishers(section: Section, secret: bytes) -> Mapping[str, PublisherSettings]:
    raw = section.take("PUBLISHERS", mapping('{"default": {...}}'), EMPTY)
    found: dict[str, PublisherSettings] = {}
    if not raw:
        # zero settings run: receivers can verify, and a deploy check asks for a key of its own
        raw = {"default": {"OPTIONS": {"signer": HttpMessageSigner.from_secret(secret)}}}
    for alias, options in raw.items():
        path = f"{section.path}['PUBLISHERS']['{alias}']"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,63}", alias):
            raise ConfigurationError(f"{path}: expected an alias of 1 to 63 letters, digits, '_', '.', '-'")
        if alias.lower() in map(str.lower, found):
            raise ConfigurationError(f"{path}: another alias differs only in case")
        found[alias] = _publisher(path, alias, options)
    return MappingProxyType(found)


def read(raw: object, *, secrets: Sequence[bytes], use_tz: bool = True) -> Settings:
    """Return the settings that ``raw`` (the dict of ``NOTIFICATION_OUTBOX``) stands for, or raise.

    ``secrets`` are ``SECRET_KEY`` and its fallbacks, from which missing keys are derived.
    """
    section = Section(NAME, raw)
    default_scope: str | Callable[[], str] = "default"
    keys = ("ENCRYPTION_KEYS", "LOOKUP_KEY", "PUBLISHERS")
    derived = frozenset(key for key in keys if not section.raw.get(key))
    found = Settings(
        publishers=_publishers(section, secrets[0]),
        keyring=section.take("ENCRYPTION_KEYS", optional(_keyring), None) or Keyring.from_secrets(secrets),
        lookup=LookupKey(section.take("LOOKUP_KEY", optional(_secret), None) or secrets[0]),
        caller_scope_id=section.take("CALLER_SCOPE_ID", _scope, default_scope),
        max_body_bytes=section.take("MAX_BODY_BYTES", integer(1, HARD_MAX_BYTES), 1024 * 1024),
        poll_interval=section.take("POLL_INTERVAL", duration(0.01, 3600), 1.0),
        log_attempts=section.take("LOG_ATTEMPTS", choice(*LOG_ATTEMPTS), "failures"),
        use_tz=use_tz,
        validators=section.take("VALIDATORS", _validators, Validators()),
        retention=_retention(section),
        databases=section.take("DATABASES", texts, ()),
        deliver=section.take("DELIVER", _deliver, None),
        derived=derived,
    )
    section.close()
    return found


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return this process's settings, read at first use and again when a test changes them."""
    secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    return read(
        getattr(django_settings, NAME, {}),
        secrets=[force_bytes(secret) for secret in secrets],
        use_tz=django_settings.USE_TZ,
    )


def _forget(*, setting: str, **_kwargs: object) -> None:
    if setting in (NAME, "SECRET_KEY", "SECRET_KEY_FALLBACKS", "USE_TZ"):
        get.cache_clear()


setting_changed.connect(_forget, dispatch_uid="notification_outbox.conf")
