"""Signatures that a receiver in any language can check. Pure: keys, time and nonce are arguments.

A signer turns a request that is about to be sent into the headers that vouch for it, afresh for every attempt.
"""

from .base import Scope, Signer, SigningRequest
from .http_message import HttpMessageSigner
from .standard import StandardWebhooksSigner

__all__ = ["HttpMessageSigner", "Scope", "Signer", "SigningRequest", "StandardWebhooksSigner"]
