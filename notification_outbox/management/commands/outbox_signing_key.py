"""``manage.py outbox_signing_key FILE``: a key to sign with, and the half of it to hand out."""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.core.management.base import CommandError, CommandParser

from ...signing import HttpMessageSigner
from ...signing.standard import SECRET
from ..base import COULD_NOT_RUN, ToldCommand

ALGORITHMS = ("ed25519", "p256", "whsec")


class Command(ToldCommand):
    help = (
        "Make a key to sign with. The secret half is written to FILE, which only its owner may read and which must "
        "not exist yet; the public half is printed as PEM and as JWK, to hand to receivers. A whsec secret has no "
        "public half: receivers get the same file's content, over a channel you trust."
    )
    exits = {0: "written"}
    could_not_run = "FILE exists or cannot be written"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, metavar="FILE", help="where the secret half goes")
        parser.add_argument(
            "--algorithm",
            choices=ALGORITHMS,
            default="ed25519",
            help="ed25519 (default) or p256 for HttpMessageSigner, whsec for StandardWebhooksSigner",
        )
        parser.add_argument("--key-id", default="key-1", help="the name in the JWK (default: key-1)")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["algorithm"] == "whsec":
            secret = f"{SECRET}{base64.b64encode(secrets.token_bytes(32)).decode()}\n"
            public = ""
        else:
            made = (
                Ed25519PrivateKey.generate()
                if options["algorithm"] == "ed25519"
                else generate_private_key(SECP256R1())
            )
            secret = made.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ).decode()
            signer = HttpMessageSigner(key=made, key_id=options["key_id"])
            public = f"{signer.public_pem()}{json.dumps(signer.public_jwk())}"
        self._write(options["file"], secret)
        if public:
            self.stdout.write(public)

    def _write(self, file: Path, secret: str) -> None:
        problem = ""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as output:
                output.write(secret)
        except FileExistsError:
            problem = "it exists already, and a key is never overwritten"
        except OSError as error:
            problem = type(error).__name__
        if problem:
            raise CommandError(f"FILE cannot be written: {problem}", returncode=COULD_NOT_RUN)
