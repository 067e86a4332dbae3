"""Settings of a shop that tells a warehouse about its orders. Everything that differs between machines is
read from the environment; the defaults suit the demo and must not be used anywhere else.
"""

import base64
import hashlib
from pathlib import Path

import environ

from notification_outbox.signing import HttpMessageSigner, StandardWebhooksSigner

env = environ.Env()
BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = env("SECRET_KEY", default="only-for-the-demo-" + "0" * 40)
DEBUG = env.bool("DEBUG", default=False)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1"])

DATABASES = {"default": env.db("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'db.sqlite3'}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # A transaction that reads first and writes later fails with "database is locked" at once; one that
    # takes the write lock at its start waits for its turn.
    DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
if DATABASES["default"]["ENGINE"] == "django.db.backends.mysql":
    import pymysql

    pymysql.install_as_MySQLdb()  # the driver that installs without a compiler

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "notification_outbox",
    "shop",
    "warehouse",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
ROOT_URLCONF = "example_project.urls"
ASGI_APPLICATION = "example_project.asgi.application"
STATIC_URL = "static/"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The sender: the shop signs with a key of its own, whose public half the warehouse knows.
SHOP_SIGNER = HttpMessageSigner.from_secret(
    env("SHOP_SIGNING_SECRET", default="only-for-the-demo"), key_id="shop-demo", tag="shop"
)
# Standard Webhooks: the shop and the warehouse share a secret.
SHOP_SHARED_SECRET = (
    "whsec_"
    + base64.b64encode(
        hashlib.sha256(env("SHOP_SIGNING_SECRET", default="only-for-the-demo").encode()).digest()
    ).decode()
)
SHOP_SIGNATURES = env("SHOP_SIGNATURES", default="rfc9421")  # or "standard", or "both" at once
SHOP_SIGNERS = {
    "rfc9421": [SHOP_SIGNER],
    "standard": [StandardWebhooksSigner(secrets=[SHOP_SHARED_SECRET])],
}
SHOP_SIGNERS["both"] = SHOP_SIGNERS["rfc9421"] + SHOP_SIGNERS["standard"]
WAREHOUSE_ORIGIN = env("WAREHOUSE_ORIGIN", default="https://localhost:8443")
WAREHOUSE_URL = f"{WAREHOUSE_ORIGIN}/warehouse/orders/"
NOTIFICATION_OUTBOX = {
    "PUBLISHERS": {
        "default": {
            "BACKEND": "notification_outbox.publishers.WebhookPublisher",
            "OPTIONS": {
                "signers": SHOP_SIGNERS[SHOP_SIGNATURES],
                "ca_file": env("WAREHOUSE_CA_FILE", default=None),
                # localhost is refused unless it is named: a webhook must not reach into one's own network
                "allow_hosts": env.list("WAREHOUSE_ALLOW_HOSTS", default=[]),
            },
            # The demo shows a rejection and its requeue, and must not take hours: one rejection is final
            # and retries come soon. The defaults suit production.
            "MAX_REJECTIONS": 1,
            "BACKOFF": {"base": 0.2, "factor": 2, "cap": 2, "jitter": 0.25},
        }
    }
}

# The receiver: whose signatures the warehouse accepts, and whether it plays a receiver in trouble.
WAREHOUSE_TRUSTS = {"shop-demo": SHOP_SIGNER.public_key}
WAREHOUSE_SHARED_SECRET = SHOP_SHARED_SECRET
WAREHOUSE_SIGNATURES = SHOP_SIGNATURES
WAREHOUSE_TROUBLE = env.bool("WAREHOUSE_TROUBLE", default=False)
