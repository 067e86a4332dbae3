"""Settings of the test suite. The database comes from ``DATABASE_URL``; ``run.py test`` sets it.

``OUTBOX_TEST_SETTINGS`` holds the whole of ``NOTIFICATION_OUTBOX`` as JSON for the worker processes that tests
start, with the signer left out: every process of the suite derives the same one.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import environ

from notification_outbox.signing import HttpMessageSigner

env = environ.Env()

SECRET_KEY = "the test suite's own secret key, used nowhere else"
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "notification_outbox",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "tests.policy.strict_policy",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"

DATABASES = {"default": env.db("DATABASE_URL", default="sqlite:///:memory:")}
_engine = DATABASES["default"]["ENGINE"]
if _engine.endswith("mysql"):
    import pymysql

    pymysql.install_as_MySQLdb()
    DATABASES["default"]["OPTIONS"] = {"charset": "utf8mb4"}
    DATABASES["default"]["TEST"] = {"CHARSET": "utf8mb4"}
if _engine.endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
    # worker threads and processes need a file: an in-memory database belongs to one connection
    DATABASES["default"]["TEST"] = {"NAME": os.environ.get("OUTBOX_TEST_SQLITE", "test.sqlite3")}

if _isolation := os.environ.get("OUTBOX_TEST_ISOLATION"):
    # a project's own default; psycopg takes its number, MySQL its name
    _number = {"repeatable read": 3, "serializable": 4}[_isolation]
    DATABASES["default"].setdefault("OPTIONS", {})["isolation_level"] = (
        _number if _engine.endswith("postgresql") else _isolation
    )

# a second database, as projects with several have: always SQLite, so that it runs everywhere
DATABASES["second"] = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": os.environ.get("OUTBOX_TEST_SECOND", ":memory:"),
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    "TEST": {"NAME": str(Path(tempfile.gettempdir()) / f"outbox-second-{os.getpid()}.sqlite3")},
}

SIGNER = HttpMessageSigner.from_secret(SECRET_KEY, key_id="test-key", tag="tests")

NOTIFICATION_OUTBOX = json.loads(os.environ.get("OUTBOX_TEST_SETTINGS", "{}"))
for _publisher in NOTIFICATION_OUTBOX.get("PUBLISHERS", {}).values():
    if "BACKEND" not in _publisher:
        _publisher.setdefault("OPTIONS", {})["signer"] = SIGNER

if _module := os.environ.get("OUTBOX_TEST_IMPORT"):
    # a module of the test's own, to be watched by the reloader
    importlib.import_module(_module)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    # of every library, or what one of them says at DEBUG would go unseen
    "root": {"handlers": ["stderr"], "level": os.environ.get("OUTBOX_TEST_LOG", "INFO")},
    "loggers": {"django": {"level": os.environ.get("OUTBOX_TEST_LOG", "INFO")}},
}
