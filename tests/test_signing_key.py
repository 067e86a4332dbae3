"""Keys to sign with: the secret half to a file, the public one to whoever asks, by command or by view."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.test import RequestFactory

from notification_outbox.signing import HttpMessageSigner, StandardWebhooksSigner
from notification_outbox.views import jwks


def make(file: Path, *arguments: str) -> str:
    out = io.StringIO()
    call_command("outbox_signing_key", str(file), *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.parametrize(("algorithm", "curve"), [("ed25519", "Ed25519"), ("p256", "P-256")])
def test_a_pair_is_made_and_only_its_public_half_is_said(tmp_path: Path, algorithm: str, curve: str) -> None:
    """The file is for its owner's eyes, and signs; PEM and JWK are those of the same key."""
    file = tmp_path / "key.pem"
    said = make(file, "--algorithm", algorithm, "--key-id", "shop-1")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    signer = HttpMessageSigner(key=file.read_bytes(), key_id="shop-1")
    pem, _, jwk = said.partition("{")
    assert pem == signer.public_pem()
    assert json.loads(f"{{{jwk}") == signer.public_jwk()
    assert signer.public_jwk()["crv"] == curve
    assert "PRIVATE" not in said


def test_a_shared_secret_is_not_said_at_all(tmp_path: Path) -> None:
    """It goes to its file only."""
    file = tmp_path / "secret"
    assert make(file, "--algorithm", "whsec") == ""
    assert StandardWebhooksSigner(secrets=[file.read_text().strip()]).symmetric


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    """Nor is a path that cannot be written anything but named by its problem."""
    file = tmp_path / "key.pem"
    make(file)
    before = file.read_bytes()
    for path, problem in ((file, "exists already"), (tmp_path / "no" / "key.pem", "FileNotFoundError")):
        with pytest.raises(CommandError, match=problem) as caught:
            make(path)
        assert caught.value.returncode == 2
    assert file.read_bytes() == before


def test_receivers_fetch_the_public_keys(configure: Callable[..., None], rf: RequestFactory) -> None:
    """Of every publisher once, none of the shared secrets, and for a while."""
    first, second = (HttpMessageSigner.from_secret(name, key_id=name) for name in ("first", "second"))
    shared = StandardWebhooksSigner(secrets=[f"whsec_{'A' * 32}"])
    configure(
        PUBLISHERS={
            "default": {"OPTIONS": {"signer": first}},
            "both": {"OPTIONS": {"signers": [second, shared], "allow_hosts": ["partner.acme.com"]}},
            "again": {"OPTIONS": {"signer": first}},
        }
    )
    answer = jwks(rf.get("/.well-known/jwks.json"))
    assert json.loads(answer.content) == {"keys": [first.public_jwk(), second.public_jwk()]}
    assert answer["Content-Type"] == "application/jwk-set+json"
    assert answer["Cache-Control"] == "public, max-age=300"
    assert jwks(rf.post("/")).status_code == 405
