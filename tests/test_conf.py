"""Settings: what they mean, what is refused, what the refusal says and what it never shows."""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.db.utils import ConnectionHandler

from notification_outbox import Draft, Publisher, conf
from notification_outbox.checks import database_warnings
from notification_outbox.exceptions import ConfigurationError
from notification_outbox.publishers import build, publisher_for
from tests.settings import SIGNER

KEY = base64.b64encode(b"k" * 32).decode()


class Quiet(Publisher):
    """A stranger's publisher with one option."""

    def __init__(self, *, volume: int = 1) -> None:
        self.volume = volume


class Loud(Publisher):
    """One that refuses its options."""

    def __init__(self, **options: Any) -> None:
        raise ConfigurationError("option 'volume': expected 11")


class Positional(Publisher):
    """One whose option may be given without its name."""

    def __init__(self, volume: int) -> None:
        self.volume = volume


class Fragile(Publisher):
    """A stranger's, full of mistakes."""

    def __init__(self, *, broken: str = "") -> None:
        self.broken = broken
        if broken == "init":
            raise RuntimeError("secretmark")

    def validate(self, draft: Draft) -> Draft:
        return draft.replace(to=draft.payload["secretmark"])

    def check(self) -> list[str]:
        raise RuntimeError("secretmark")

    def problems(self) -> list[str]:
        if self.broken == "problems":
            raise RuntimeError("secretmark")
        return []


def scope() -> str:
    return "from a callable"


def broken_vault() -> None:
    raise RuntimeError("secretmark")


def no_request() -> str:
    raise LookupError("secretmark")


def nobody() -> None:
    return None


NOT_CALLABLE = "text"


def read(**raw: Any) -> conf.Settings:
    return conf.read(raw, secrets=[b"a secret key for these tests", b"an older one"])


def alias(**raw: Any) -> conf.PublisherSettings:
    return read(PUBLISHERS={"default": raw}).publishers["default"]


def test_without_any_settings_there_is_a_signed_webhook_publisher() -> None:
    """Zero settings run: the default alias signs with a key derived from SECRET_KEY."""
    settings = read()
    assert list(settings.publishers) == ["default"]
    default = settings.publishers["default"]
    assert default.backend == "notification_outbox.publishers.WebhookPublisher"
    assert "signer" in default.options
    assert (default.lease, default.attempt_timeout, default.concurrency) == (60, 20, 64)
    assert default.give_up_after == timedelta(days=3)
    assert default.retry.max_rejections == 12
    build(default)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        (90.5, 90.5),
        ("90s", 90),
        ("15m", 900),
        ("4h", 14400),
        ("3d", 259200),
        (timedelta(hours=1), 3600),
    ],
)
def test_durations_have_many_spellings(value: Any, seconds: float) -> None:
    """Seconds, timedeltas and short text are the same."""
    assert alias(GIVE_UP_AFTER=value).give_up_after == timedelta(seconds=max(seconds, 60))


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"PUBLISHER": {}}, r"unknown key 'PUBLISHER' \(did you mean 'PUBLISHERS'\?\)"),
        ({"PUBLISHERS": []}, r"\['PUBLISHERS'\]: expected a dict"),
        ({"PUBLISHERS": {"a b": {}}}, "expected an alias"),
        ({"PUBLISHERS": {"x": {"LEESE": 1}}}, r"\['x'\]: unknown key 'LEESE' \(did you mean 'LEASE'\?\)"),
        ({"PUBLISHERS": {"x": {"LEASE": 20}}}, r"\['x'\]\['LEASE'\]: expected at least ATTEMPT_TIMEOUT"),
        ({"PUBLISHERS": {"x": {"LEASE": 21.9}}}, r"expected at least ATTEMPT_TIMEOUT and 2 s more"),
        ({"PUBLISHERS": {"x": {"LEASE": "soon"}}}, r"\['LEASE'\]: expected 1 s to 1 d, as seconds"),
        ({"PUBLISHERS": {"x": {"LEASE": True}}}, r"\['LEASE'\]: expected"),
        ({"PUBLISHERS": {"x": {"GIVE_UP_AFTER": "31d"}}}, r"\['GIVE_UP_AFTER'\]: expected 1 min to 30 d"),
        (
            {"RETENTION": {"dead": -1}},
            r"""\['dead'\]: expected 0 s to 3660 d, as .* text like "90s", "15m", "4h", "3d"$""",
        ),
        ({"POLL_INTERVAL": "x"}, r"\['POLL_INTERVAL'\]: expected 0.01 s to 1 h,"),
        (
            {"PUBLISHERS": {"x": {"CONCURRENCY": 64}}},
            r"""\['CONCURRENCY'\]: expected a dict such as {"worker": 64}$""",
        ),
        (
            {"PUBLISHERS": {"x": {"BACKOFF": "5s"}}},
            r"""\['BACKOFF'\]: expected a dict such as {"base": "5s"}$""",
        ),
        (
            {"PUBLISHERS": {"x": {"BACKOFF": {"cap": 1}}}},
            r"\['BACKOFF'\]\['base'\]: expected at most cap \(1 s\)",
        ),
        ({"RETENTION": "90d"}, r"""\['RETENTION'\]: expected a dict such as {"dead": "90d"}$"""),
        ({"DATABASES": "default"}, r"""\['DATABASES'\]: expected a list of texts such as \["default"\]$"""),
        ({"DELIVER": "some"}, r"""\['DELIVER'\]: expected "all", "none" or a list of hosts without port"""),
        ({"DELIVER": None}, r"\['DELIVER'\]: expected"),
        ({"DELIVER": 5}, r"\['DELIVER'\]: expected"),
        ({"DELIVER": {"secretmark.com": True}}, r"\['DELIVER'\]: expected"),
        ({"DELIVER": ["a.com", "https://secretmark.com/"]}, r"entry 2 is none \[syntax\]$"),
        ({"DELIVER": ["secretmark.com:443"]}, r"entry 1 is none \[port\]$"),
        ({"DELIVER": ["*.secretmark.com"]}, r"entry 1 is none \[syntax\]$"),
        ({"DELIVER": [7]}, r"entry 1 is none \[not-text\]$"),
        ({"PUBLISHERS": {"x": {"MAX_ATTEMPTS": 0}}}, r"\['MAX_ATTEMPTS'\]: expected a whole number"),
        (
            {"PUBLISHERS": {"x": {"BACKOFF": {"bass": 1}}}},
            r"\['BACKOFF'\]: unknown key 'bass' \(did you mean 'base'",
        ),
        ({"PUBLISHERS": {"x": {"BACKOFF": {"jitter": 2}}}}, r"\['jitter'\]: expected a number from 0 to 1"),
        ({"PUBLISHERS": {"x": {"TO": ""}}}, r"\['TO'\]: expected text"),
        ({"PUBLISHERS": {"x": {"OPTIONS": 3}}}, r"\['OPTIONS'\]: expected a dict"),
        ({"ENCRYPTION_KEYS": {}}, r"\['ENCRYPTION_KEYS'\]: expected a dict of key id to 32 bytes"),
        ({"ENCRYPTION_KEYS": {"a": "short"}}, "expected a dict of key id to 32 bytes"),
        ({"ENCRYPTION_KEYS": {"a": "!secretmark!"}}, "expected a dict of key id to 32 bytes"),
        ({"ENCRYPTION_KEYS": {"": KEY}}, "expected key ids"),
        ({"ENCRYPTION_KEYS": broken_vault}, "a callable that returns keys; it raised RuntimeError"),
        ({"ENCRYPTION_KEYS": ".x"}, "expected a dict of key id to 32 bytes"),
        ({"VALIDATORS": {"a": ".x"}}, "expected a dict of notification type patterns"),
        ({"PUBLISHERS": {"x": {"GIVE_UP_AFTER": 10**400}}}, r"\['GIVE_UP_AFTER'\]: expected"),
        ({"PUBLISHERS": {"x": {}, "X": {}}}, "another alias differs only in case"),
        ({"VALIDATORS": {"a": "tests.raises.secretmark"}}, "importing it raised RuntimeError"),
        ({"ENCRYPTION_KEYS": "tests.raises.secretmark"}, "importing it raised RuntimeError"),
        ({"CALLER_SCOPE_ID": "tests.raises.secretmark"}, "importing it raised RuntimeError"),
        ({"LOOKUP_KEY": "secretmark"}, r"\['LOOKUP_KEY'\]: expected a secret of at least 16"),
        ({"CALLER_SCOPE_ID": ""}, r"\['CALLER_SCOPE_ID'\]: expected 1 to 255 UTF-8 bytes"),
        ({"CALLER_SCOPE_ID": "a\nsecretmark"}, r"\['CALLER_SCOPE_ID'\]: expected printable"),
        ({"CALLER_SCOPE_ID": 7}, r"\['CALLER_SCOPE_ID'\]: expected text"),
        ({"CALLER_SCOPE_ID": "tests.test_conf.NOT_CALLABLE"}, "expected text without a dot"),
        ({"CALLER_SCOPE_ID": "no.such.place"}, "expected text without a dot"),
        ({"MAX_BODY_BYTES": 11 * 2**20}, r"\['MAX_BODY_BYTES'\]: expected a whole number"),
        ({"RETENTION": {"expunge_delivered": "soon"}}, r"\['expunge_delivered'\]: expected 0 s to"),
        ({"RETENTION": {"delivered": None}}, r"\['RETENTION'\]\['delivered'\]: expected 0 s to"),
        ({"RETENTION": {"expunge_deliverd": 1}}, "did you mean 'expunge_delivered'"),
        ({"LOG_ATTEMPTS": "some"}, "expected one of 'failures', 'all', 'none'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_expected(raw: dict[str, Any], told: str) -> None:
    """The error names the key and the rule, suggests the key that was meant, and shows no value."""
    with pytest.raises(ConfigurationError, match=told) as caught:
        read(**raw)
    assert "secretmark" not in str(caught.value)
    assert caught.value.__context__ is None


def test_retention_is_read_as_durations() -> None:
    """What is not set keeps its default; bodies stay with their rows unless a duration says otherwise."""
    assert read().retention == conf.Retention()
    kept = read(RETENTION={"dead": "1d", "expunge_delivered": "2h"}).retention
    assert kept == conf.Retention(dead=timedelta(days=1), expunge_delivered=timedelta(hours=2))
    assert read(RETENTION={"expunge_delivered": None}).retention.expunge_delivered is None


def test_the_first_encryption_key_seals() -> None:
    """Keys are ordered; base64 and raw bytes are the same."""
    keyring = read(ENCRYPTION_KEYS={"2026": KEY, "2025": b"o" * 32}).keyring
    assert keyring.current_id == "2026"
    assert (keyring.master("2026"), keyring.master("2025")) == (b"k" * 32, b"o" * 32)


@pytest.mark.parametrize("key", ["ENCRYPTION_KEYS", "LOOKUP_KEY"])
def test_none_is_the_key_that_is_not_set(key: str) -> None:
    """A variable that the environment lacks leaves the key derived, which the deploy check says."""
    unset, none = read(), read(**{key: None})
    assert key in none.derived
    assert none.keyring.current_id == unset.keyring.current_id
    assert none.lookup.destination_key("a", "b") == unset.lookup.destination_key("a", "b")


@pytest.mark.parametrize(
    ("value", "deliver"),
    [
        ("all", None),
        ("none", frozenset()),
        ([], frozenset()),
        (
            ("Hooks.Acme.COM", "Bücher.example", "10.0.0.7", "::1", "[0::2]", "localhost", "acme.com."),
            frozenset(
                {
                    "hooks.acme.com",
                    "xn--bcher-kva.example",
                    "10.0.0.7",
                    "::1",
                    "::2",
                    "localhost",
                    "acme.com",
                }
            ),
        ),
    ],
)
def test_a_copy_of_the_project_may_reach_what_it_names(value: Any, deliver: frozenset[str] | None) -> None:
    """Hosts are kept as rows show them, whatever their spelling."""
    assert read(DELIVER=value).deliver == deliver


def test_without_encryption_keys_they_come_from_the_secret_key_and_its_fallbacks() -> None:
    """Rotating SECRET_KEY through its fallbacks loses nothing."""
    older = conf.read({}, secrets=[b"an older one"]).keyring
    assert older.current_id in read().keyring


@pytest.mark.parametrize("value", [scope, "tests.test_conf.scope"])
def test_the_caller_scope_can_be_a_callable(value: Any) -> None:
    """A project of many sites says per call who it is."""
    found = read(CALLER_SCOPE_ID=value).caller_scope_id
    assert callable(found)
    assert found() == "from a callable"


def test_settings_are_read_again_when_a_test_changes_them(configure: Callable[..., None]) -> None:
    """``override_settings`` works as for every Django setting."""
    configure(MAX_BODY_BYTES=77)
    assert conf.get().max_body_bytes == 77
    configure()
    assert conf.get().max_body_bytes == 1024 * 1024


def test_reprs_show_no_secret() -> None:
    """Settings end in debug pages and logs."""
    settings = read(ENCRYPTION_KEYS={"2026": KEY}, PUBLISHERS={"x": {"OPTIONS": {"token": "secretmark"}}})
    shown = repr(settings) + repr(settings.publishers["x"]) + repr(settings.keyring) + repr(settings.lookup)
    for secret in ("secretmark", KEY, "kkkk"):
        assert secret not in shown


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"BACKEND": "no.such.Publisher"}, r"PUBLISHERS\['default'\]: BACKEND is not the dotted path"),
        ({"BACKEND": ".x"}, "BACKEND is not the dotted path"),
        ({"BACKEND": "tests.test_conf.KEY"}, "BACKEND is not the dotted path of a Publisher"),
        (
            {"BACKEND": "tests.test_conf.Quiet", "OPTIONS": {"volum": 3}},
            r"PUBLISHERS\['default'\]: unknown option 'volum' \(did you mean 'volume'\?\); Quiet takes volume",
        ),
        ({"BACKEND": "tests.test_conf.Loud"}, r"PUBLISHERS\['default'\]: option 'volume': expected 11"),
        (
            {},
            r"PUBLISHERS\['default'\]: OPTIONS need exactly one of 'signer', 'signers', 'signer_resolver'",
        ),
        ({"BACKEND": "tests.test_conf.Positional"}, r"OPTIONS do not fit Positional\(volume\)"),
        ({"OPTIONS": {"signer": "a key"}}, "option 'signer': expected a Signer"),
        ({"BACKEND": "tests.raises.Publisher"}, "can be imported; importing it raised RuntimeError$"),
        (
            {"BACKEND": "tests.test_conf.Fragile", "OPTIONS": {"broken": "init"}},
            r"PUBLISHERS\['default'\]: Fragile raised RuntimeError for its OPTIONS$",
        ),
        (
            {"OPTIONS": {"signer": SIGNER, "timeout": 0}},
            "option 'timeout': expected 0.1 s to 1 h, as seconds",
        ),
        ({"OPTIONS": {"signer": SIGNER, "timeout": "soon"}}, "option 'timeout': expected 0.1 s to 1 h"),
        ({"OPTIONS": {"signer": SIGNER, "allow_hosts": ["https://x/"]}}, "allow_hosts"),
        ({"OPTIONS": {"signer": SIGNER, "allow_hosts": 5}}, r"\['default'\]: allow_hosts: expected a list"),
    ],
)
def test_a_wrong_publisher_is_named_with_its_alias(
    raw: dict[str, Any], told: str, configure: Callable[..., None]
) -> None:
    """The worker, enqueue and ``manage.py check`` say the same of it."""
    with pytest.raises(ConfigurationError, match=told):
        build(alias(**raw))
    configure(PUBLISHERS={"default": raw})
    (error,) = [found for found in run_checks() if found.id == "notification_outbox.E002"]
    assert error.msg
    assert "secretmark" not in error.msg


def ours(*, deploy: bool = False) -> list[CheckMessage]:
    """Return what the checks say of the outbox: but of derived keys, which is said by deploy alone."""
    found = run_checks(include_deployment_checks=deploy)
    names = [message for message in found if (message.id or "").startswith("notification_outbox")]
    return [message for message in names if message.id != "notification_outbox.W003"]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"PUBLISHERS": {"default": {"LEESE": 1}}}, "did you mean 'LEASE'?"),
        ({"ENCRYPTION_KEYS": broken_vault}, "it raised RuntimeError"),
        ({"ENCRYPTION_KEYS": "tests.test_conf.broken_vault"}, "it raised RuntimeError"),
        ({"VALIDATORS": {"*": "tests.raises.secretmark"}}, "importing it raised RuntimeError"),
        ({"CALLER_SCOPE_ID": "tests.raises.secretmark"}, "importing it raised RuntimeError"),
        ({"PUBLISHERS": {"default": {"BACKOFF": {"base": "5h"}}}}, "expected at most cap (4 h)"),
    ],
)
def test_the_checks_report_settings_that_cannot_be_read(
    raw: dict[str, Any], told: str, configure: Callable[..., None]
) -> None:
    """``manage.py check`` fails before a message is lost, and never with a traceback."""
    configure(**raw)
    (error,) = ours(deploy=True)
    assert error.id == "notification_outbox.E001"
    assert told in error.msg
    assert "secretmark" not in error.msg


def test_the_checks_report_a_project_without_a_secret_key(settings: Any) -> None:
    """Keys cannot be derived of nothing."""
    settings.SECRET_KEY = ""
    (error,) = ours(deploy=True)
    assert error.id == "notification_outbox.E001"
    assert "SECRET_KEY" in error.msg


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_the_checks_report_authorities_that_a_worker_could_not_read(
    content: str | None, tmp_path: Path, configure: Callable[..., None]
) -> None:
    """A worker would not start; ``enqueue()``, which needs no file, goes on."""
    ca_file = tmp_path / "secretmark.pem"
    if content is not None:
        ca_file.write_text(content)
    configure(PUBLISHERS={"default": {"OPTIONS": {"signer": SIGNER, "ca_file": str(ca_file)}}})
    publisher_for(conf.get().publishers["default"])
    (error,) = ours()
    assert (error.id, error.msg) == (
        "notification_outbox.E004",
        "PUBLISHERS['default']: option 'ca_file': expected the path of a readable PEM file of certificates",
    )


@pytest.mark.parametrize(
    ("to", "rule"), [("http://secretmark/", "[scheme]"), ("https://10.0.0.1/secretmark", "[denied-address]")]
)
def test_the_checks_report_a_default_destination_that_is_refused(
    to: str, rule: str, configure: Callable[..., None]
) -> None:
    """``TO`` is held to its own publisher's rules before a call relies on it."""
    configure(PUBLISHERS={"default": {"TO": to, "OPTIONS": {"signer": SIGNER}}})
    (error,) = ours()
    assert error.id == "notification_outbox.E005"
    assert error.msg.startswith("PUBLISHERS['default']['TO']: ")
    assert error.msg.endswith(rule)
    assert "secretmark" not in error.msg


@pytest.mark.parametrize(("timeout", "told"), [(10, 0), ("10s", 0), (15.5, 1), ("15m", 1), (None, 1)])
def test_a_timeout_that_the_attempts_own_cuts_short_is_warned_about(
    timeout: Any, told: int, configure: Callable[..., None]
) -> None:
    """The smaller bound wins, which nobody who set the larger one expects; the default is a bound too."""
    options = {"signer": SIGNER} | ({} if timeout is None else {"timeout": timeout})
    configure(PUBLISHERS={"default": {"ATTEMPT_TIMEOUT": 10, "OPTIONS": options}})
    found = ours()
    assert [message.id for message in found] == ["notification_outbox.W006"] * told
    assert all("after 10 s" in message.msg for message in found)


@pytest.mark.parametrize(
    ("value", "told"), [(no_request, "raised LookupError"), ("tests.test_conf.nobody", "no identifier")]
)
def test_a_caller_scope_that_fails_outside_a_request_is_warned_about(
    value: Any, told: str, configure: Callable[..., None]
) -> None:
    """It may be meant for requests alone, so it is no error."""
    configure(CALLER_SCOPE_ID=value)
    (warning,) = ours()
    assert warning.id == "notification_outbox.W007"
    assert told in warning.msg
    assert "secretmark" not in warning.msg


def test_a_strangers_publisher_does_not_break_the_checks(configure: Callable[..., None]) -> None:
    """What its hooks raise is named, and shown no further."""
    fragile = {"BACKEND": "tests.test_conf.Fragile", "TO": "x"}
    configure(PUBLISHERS={"a": fragile, "b": {**fragile, "OPTIONS": {"broken": "problems"}}})
    found = {message.id: message.msg for message in ours(deploy=True)}
    assert set(found) == {"notification_outbox.E004", "notification_outbox.W004"}
    assert found["notification_outbox.E004"] == "PUBLISHERS['b']: Fragile.problems() raised RuntimeError."


def test_the_deploy_checks_are_silent_about_what_a_copy_delivers(configure: Callable[..., None]) -> None:
    """A staging copy that reaches nobody is as it should be."""
    for value in ("none", ["hooks.acme.com"]):
        configure(DELIVER=value, PUBLISHERS={"default": {"OPTIONS": {"signer": SIGNER}}})
        assert ours(deploy=True) == []


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        (None, 0),
        (False, 0),
        (True, 0),
        ({}, 0),
        ({"max_size": 3}, 0),
        ({"min_size": 1, "max_size": 2}, 1),
        ({"min_size": 2}, 1),
        ({"min_size": 2, "max_size": None}, 1),
        ({"min_size": 4}, 0),
    ],
)
def test_a_pool_too_small_for_a_worker_is_warned_about(pool: Any, told: int) -> None:
    """Each worker keeps three connections; with fewer, outcomes wait for one that never comes."""
    engine = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "OPTIONS": {"pool": pool}}
    found = database_warnings(ConnectionHandler({"default": engine}))
    assert [warning.id for warning in found] == ["notification_outbox.W005"] * told
    assert all("at least 3" in (warning.hint or "") for warning in found)


def test_sqlite_without_immediate_transactions_is_warned_about() -> None:
    """Two writers that begin by reading fail at once with "locked"; one option makes them wait."""
    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    (warning,) = database_warnings(handler)
    assert warning.id == "notification_outbox.W001"
    assert '"transaction_mode": "IMMEDIATE"' in (warning.hint or "")
    handler.settings["default"]["OPTIONS"]["transaction_mode"] = "IMMEDIATE"
    assert database_warnings(handler) == []


def test_the_suites_own_settings_pass_the_checks() -> None:
    """A correct project is told nothing."""
    assert [found for found in run_checks() if (found.id or "").startswith("notification_outbox")] == []


def test_enqueue_makes_each_publisher_once() -> None:
    """Validation must not import and build a class per call."""
    settings = alias(BACKEND="tests.test_conf.Quiet")
    assert publisher_for(settings) is publisher_for(settings)
