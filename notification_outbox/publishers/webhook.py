"""Signed HTTPS webhooks: builds the request, has it signed, reads the answer as an outcome.

The socket belongs to ``transport``, which is imported only when a worker opens the publisher: ``enqueue()``
runs in web processes that should not carry an HTTP client. No request content reaches an error or a log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils.module_loading import import_string

from ..answers import Attempt, accepted
from ..drafts import Draft
from ..envelope import Message
from ..exceptions import (
    ConfigurationError,
    InvalidMessage,
    PermanentPublishError,
    PublishFailed,
    ScopePermanentlyUnknown,
    TransientPublishError,
)
from ..lifecycle import Answer, Fault, QuarantineReason
from ..proxies import Proxy
from ..reading import option_seconds
from ..signing import Scope, Signer, SigningRequest
from ..tls import client_context
from ..urls import Destination, DestinationPolicy
from .base import Publisher

if TYPE_CHECKING:
    import httpx

    from ..transport import Transport

USER_AGENT = "django-notification-outbox"
WIRE_KEYS = ("message", "key")
ONE_OF = "OPTIONS need exactly one of 'signer', 'signers', 'signer_resolver' and 'unsigned': True"


class WebhookPublisher(Publisher):
    """POSTs the message to its URL over TLS, freshly signed, through a guarded socket.

    ``signer`` signs every attempt, or each of ``signers`` does; ``unsigned=True``: nobody does.
    ``signer_resolver(scope)``, a callable or its dotted path, sync or async, is asked on every attempt for the signer
    of a ``Scope``; it may raise ``ScopePermanentlyUnknown`` or ``ScopeTransientlyUnavailable``. ``wire_key``: what
    the ``Idempotency-Key`` header says, the "message" id or the caller's own "key". ``timeout``: from the name lookup
    to the answer's head, a duration as in the settings. ``ca_file``: PEM file of the authorities to trust instead of
    the system's. ``client_cert``: PEM file with our certificate, its chain and unencrypted key, which only the hosts
    of ``allow_hosts`` are shown. ``ports``: those a URL may name. ``allow_hosts`` (``"host"`` or ``"host:port"``) and
    ``allow_networks`` open exactly what they name beyond public addresses; ``insecure_hosts`` are allowed hosts that
    may be reached over plain http. ``allow_nat64`` opens 64:ff9b::/96 as far as the IPv4 addresses inside are open.
    ``proxy``: ``http://user:password@host:port`` of a proxy to go through, which then decides what a name leads to.
    ``transport``: an ``httpx.AsyncBaseTransport`` that sends instead of ours, and answers for whom it dials.
    """

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        signers: Sequence[Signer] = (),
        signer_resolver: Callable[[Scope], object] | str | None = None,
        unsigned: bool = False,
        wire_key: str = "message",
        timeout: float | timedelta | str = 15.0,
        ca_file: str | None = None,
        client_cert: str | None = None,
        ports: Iterable[int] = (443, 8443),
        allow_hosts: Iterable[str] = (),
        allow_networks: Iterable[str] = (),
        insecure_hosts: Iterable[str] = (),
        allow_nat64: bool = False,
        proxy: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if [signer is not None, bool(signers), signer_resolver is not None, bool(unsigned)].count(True) != 1:
            raise ConfigurationError(ONE_OF)
        self._signers = _signers(signer, signers)
        self._resolver = None if signer_resolver is None else _callable("signer_resolver", signer_resolver)
        if wire_key not in WIRE_KEYS:
            raise ConfigurationError(f"option 'wire_key': expected one of {', '.join(WIRE_KEYS)}")
        self._wire_key = wire_key
        self._timeout = option_seconds("timeout", timeout)
        # what a resolver takes is the worker's to bound
        self.own_timeout = None if self._resolver else self._timeout
        if transport is not None and (ca_file, client_cert, proxy) != (None, None, None):
            raise ConfigurationError("option 'transport': it has its own ca_file, client_cert and proxy")
        if transport is not None and not hasattr(transport, "handle_async_request"):
            raise ConfigurationError("option 'transport': expected an httpx.AsyncBaseTransport")
        self._proxy = None if proxy is None else Proxy.parse(proxy)
        self._plugged = transport
        self._ca_file = ca_file
        self._client_cert = client_cert
        self._policy = DestinationPolicy.from_options(
            ports=ports,
            allow_hosts=allow_hosts,
            allow_networks=allow_networks,
            insecure_hosts=insecure_hosts,
            allow_nat64=allow_nat64,
        )
        if client_cert is not None and not self._policy.secure:
            raise ConfigurationError("option 'client_cert': name in allow_hosts the hosts that are to see it")
        self._parse = lru_cache(maxsize=1024)(self._policy.parse)
        self._transport: Transport | None = None

    def validate(self, draft: Draft) -> Draft:
        if draft.signing_scope_id is not None and self._resolver is None:
            raise InvalidMessage("signing_scope_id", "scope-unused", "this publisher signs with one signer")
        if draft.to is None:
            raise InvalidMessage("to", "missing", "expected the URL of the receiver")
        key = draft.idempotency_key
        if self._wire_key == "key" and isinstance(key, str) and not (key.isascii() and key.isprintable()):
            raise InvalidMessage(
                "idempotency_key", "wire-key", "expected printable ASCII: it goes into a header"
            )
        return draft.replace(to=self._policy.parse(draft.to).url)

    def display(self, destination: str) -> str:
        return self._parse(destination).host

    def check(self) -> Iterable[str]:
        if self._policy.insecure:
            yield "insecure_hosts lets messages travel unencrypted; it is meant for development only."
        if not self._signers and self._resolver is None:
            yield "unsigned=True: receivers cannot tell these messages from anybody else's."

    def problems(self) -> Iterable[str]:
        try:
            client_context(self._ca_file, self._client_cert)
        except ConfigurationError as error:
            yield str(error)
        if any(signer.symmetric for signer in self._signers) and not self._policy.secure:
            yield (
                "one symmetric secret for every receiver lets each of them sign in your name to the others: use an "
                "asymmetric key, or name the receivers that share it in allow_hosts."
            )

    async def open(self) -> None:
        if self._plugged is not None:
            from ..plugged import PluggedTransport

            self._transport = PluggedTransport(self._policy, self._plugged, timeout=self._timeout)
        else:
            from ..transport import GuardedTransport

            self._transport = GuardedTransport(
                self._policy,
                timeout=self._timeout,
                ca_file=self._ca_file,
                client_cert=self._client_cert,
                proxy=self._proxy,
            )
        await self._transport.open()

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()
            self._transport = None

    async def publish(self, message: Message, attempt: Attempt | None = None) -> Answer:
        """POST the message; an ``attempt`` handed in is told how far it got, and when."""
        if self._transport is None:
            raise ConfigurationError("publish() before open()")
        destination = self._destination(message.destination)
        signers = (
            self._signers if self._resolver is None else [await self._resolved(message, destination.host)]
        )
        headers = self._headers(message, destination, signers)
        response = await self._transport.post(destination, headers, message.body, attempt)
        return accepted(response)

    def _destination(self, url: str) -> Destination:
        # judged again: the policy may have become stricter since the message was enqueued
        try:
            return self._parse(url)
        except InvalidMessage:
            pass
        raise PublishFailed("forbidden_url", Fault.FORBIDDEN)

    async def _resolved(self, message: Message, host: str) -> Signer:
        """Ask for the message's signer, on every attempt. What fails in there is ours: no attempt is burned."""
        assert self._resolver is not None
        scope = Scope(message.signing_scope_id, message.account_id, message.caller_scope_id, host)
        try:
            if iscoroutinefunction(self._resolver):
                found = await self._resolver(scope)
            else:
                # it may ask a database; threads close the connections that went bad
                found = await sync_to_async(self._resolver, thread_sensitive=False)(scope)
            if isinstance(found, Signer):
                return found
            failed = f"type_{type(found).__name__}"
        except ScopePermanentlyUnknown:
            failed = ""
        except Exception as error:
            failed = type(error).__name__
        if not failed:
            raise PermanentPublishError(QuarantineReason.SCOPE_UNKNOWN)
        raise TransientPublishError(f"local_signer_{failed}", holds="lane")

    def _headers(
        self, message: Message, destination: Destination, signers: Sequence[Signer]
    ) -> list[tuple[str, str]]:
        request = SigningRequest(
            target_uri=destination.url,
            authority=destination.authority,
            content_type=message.content_type,
            body=message.body,
            message_id=message.id,
            idempotency_key=message.id if self._wire_key == "message" else message.idempotency_key,
            headers=message.headers,
        )
        signed = _signed(request, signers)
        return [
            ("Content-Type", message.content_type),
            ("Accept-Encoding", "identity"),
            ("User-Agent", USER_AGENT),
            *message.headers,
            *signed,
        ]


def _signed(request: SigningRequest, signers: Sequence[Signer]) -> list[tuple[str, str]]:
    try:
        # the one clock that must agree with the receiver's is this machine's, not the database's
        created, nonce = int(time.time()), secrets.token_urlsafe(16)
        return [header for signer in signers for header in signer.sign(request, created=created, nonce=nonce)]
    except Exception as error:
        failed = type(error).__name__
    # ours, not the destination's: a key that cannot be read burns no attempt
    raise TransientPublishError(f"local_signer_{failed}", holds="lane")


def _callable(option: str, value: object) -> Callable[[Scope], Any]:
    """Return a callable given as such or by its dotted path. Raises ``ConfigurationError``."""
    found = value
    if isinstance(value, str):
        try:
            found = import_string(value)
        except (ImportError, ValueError):
            found = None
    if not callable(found):
        raise ConfigurationError(f"option {option!r}: expected a callable or the dotted path of one")
    return found


def _signers(signer: Signer | None, signers: Sequence[Signer]) -> tuple[Signer, ...]:
    """Return who signs. Raises ``ConfigurationError``."""
    if not isinstance(signers, list | tuple):
        raise ConfigurationError("option 'signers': expected a list")
    chosen = tuple(signers) if signer is None else (signer,)
    if not all(isinstance(one, Signer) for one in chosen):
        raise ConfigurationError("option 'signer': expected a Signer, such as HttpMessageSigner(...)")
    if len({type(one) for one in chosen}) < len(chosen):
        raise ConfigurationError("option 'signers': two of one kind would write the same headers")
    return chosen
