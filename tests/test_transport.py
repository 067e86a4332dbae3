"""The guarded transport: what may be dialled, what goes on the wire, and what nobody else gets to see."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from notification_outbox import connector
from notification_outbox.exceptions import (
    ConfigurationError,
    InvalidMessage,
    OutboxError,
    PermanentPublishError,
    PublishFailed,
    TransientPublishError,
)
from notification_outbox.lifecycle import Answer, Fault, QuarantineReason
from notification_outbox.resolver import Resolver
from notification_outbox.tls import client_context
from notification_outbox.transport import GuardedTransport
from notification_outbox.urls import Destination, DestinationPolicy

from .peer import OK, Talk, authority, by_hand, listening, looking_up, meeting, polite, posting, saying
from .receiver import Receiver

MARK = "s3cr3t"
HEADERS = [("Content-Type", "application/json"), ("X-Key", "1")]


@contextmanager
def trap(address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A real listening socket that nothing must ever reach."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def reached(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


async def refusal(transport: GuardedTransport, destination: Destination) -> PublishFailed:
    with pytest.raises(PublishFailed) as caught:
        await transport.post(destination, HEADERS, b"{}")
    return caught.value


# -- what may be dialled


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::1]",
        "0.0.0.0",
        "127.1",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "127.0.0.1.",
        "loop.acme.com",
        "loop.acme.com.",
        "localhost",
    ],
)
async def test_loopback_is_never_dialled(host: str) -> None:
    """No spelling of this machine is dialled, neither through parse() nor straight into post()."""
    names = {
        "loop.acme.com": ["127.0.0.1"],
        "loop.acme.com.": ["127.0.0.1"],
        "localhost": ["127.0.0.1"],
        "0x7f000001": ["127.0.0.1"],
    }
    with trap("::1" if host == "[::1]" else "127.0.0.1") as listener:
        port = listener.getsockname()[1]
        url = f"https://{host}:{port}/"
        async with posting(ports=[port], resolver=looking_up(names), timeout=2.0) as transport:
            policy = DestinationPolicy.from_options(ports=[port])
            try:
                destination = policy.parse(url)
            except InvalidMessage:
                pass
            else:
                assert (await refusal(transport, destination)).code == "forbidden_address"
            # a destination made by hand is believed in nothing but its URL
            error = await refusal(transport, by_hand(url, "hooks.acme.com", 443))
            assert (error.code, error.fault) == ("forbidden_address", Fault.FORBIDDEN)
            assert error.answer is not None
            assert error.answer.status is None
        assert not reached(listener)


async def test_opened_addresses_are_dialled() -> None:
    """The same addresses are reached once their host is opened, as literal and as name."""
    async with listening(names=["127.0.0.1", "loop.acme.com"]) as peer:
        hosts = ["127.0.0.1", "loop.acme.com"]
        async with posting(allow_hosts=[f"{host}:{peer.port}" for host in hosts]) as transport:
            for host in hosts:
                response = await transport.post(by_hand(f"https://{host}:{peer.port}/"), HEADERS, b"{}")
                assert response.answer == Answer(200, "answered", f"127.0.0.1:{peer.port}")


async def test_opened_network_is_dialled() -> None:
    """An opened network lets every name lead there."""
    async with (
        listening(names=["hooks.acme.com"]) as peer,
        posting(ports=[peer.port], allow_networks=["127.0.0.0/8"]) as transport,
    ):
        url = f"https://hooks.acme.com:{peer.port}/"
        assert (await transport.post(by_hand(url), HEADERS, b"{}")).status == 200


async def test_each_dial_is_judged_for_its_own_host() -> None:
    """Of two names on one address only the opened one is dialled, also when both are under way at once."""
    names = ["open.acme.com", "shut.acme.com"]
    async with listening(names=names) as peer:
        async with posting(ports=[peer.port], allow_hosts=["open.acme.com"]) as transport:
            urls = [f"https://{name}:{peer.port}/" for name in names * 10]
            results = await asyncio.gather(
                *(transport.post(by_hand(url), HEADERS, b"{}") for url in urls), return_exceptions=True
            )
        assert [getattr(result, "status", None) for result in results] == [200, None] * 10
        assert {result.code for result in results if isinstance(result, PublishFailed)} == {
            "forbidden_address"
        }
        assert peer.accepted <= 10


@pytest.mark.parametrize("tail", [":{other}/", ":{port}/"])
async def test_scheme_and_port_are_judged_again(tail: str) -> None:
    """A destination made by hand gets no http and no port that the policy does not open."""
    with trap() as listener:
        port = listener.getsockname()[1]
        scheme = "http" if "{port}" in tail else "https"
        async with posting(allow_networks=["127.0.0.0/8"], ports=[port + 1]) as transport:
            url = f"{scheme}://hooks.acme.com" + tail.format(port=port + 1, other=port)
            assert (await refusal(transport, by_hand(url))).code == "forbidden_address"
        assert not reached(listener)


async def test_userinfo_is_refused() -> None:
    """A user name in a hand-made URL would go out as a password header: it is refused."""
    with trap() as listener:
        port = listener.getsockname()[1]
        async with posting(allow_hosts=[f"localhost:{port}"]) as transport:
            error = await refusal(transport, by_hand(f"https://user:{MARK}@localhost:{port}/"))
        assert error.code == "forbidden_address"
        assert not reached(listener)


async def test_one_refused_answer_spoils_the_name() -> None:
    """When one address of a name is refused none is dialled, whichever comes first."""
    good, bad = "127.0.0.1", "127.0.0.2"
    async with listening(names=["hooks.acme.com"]) as peer:
        for answers in ([good, bad], [bad, good]):
            async with posting(
                ports=[peer.port],
                allow_networks=[f"{good}/32"],
                resolver=looking_up({"hooks.acme.com": answers}),
            ) as transport:
                error = await refusal(transport, by_hand(f"https://hooks.acme.com:{peer.port}/"))
            assert (error.code, error.fault) == ("forbidden_address", Fault.FORBIDDEN)
            assert error.answer == Answer(None, "dns", "")
        assert peer.accepted == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_answers(status: int) -> None:
    """A redirect is handed back as the answer; where it points is not dialled, allowed or not."""
    with trap() as listener:
        target = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        answer = f"HTTP/1.1 {status} Over There\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
        async with listening(saying(answer.encode())) as peer:
            hosts = [f"localhost:{peer.port}", f"127.0.0.1:{listener.getsockname()[1]}"]
            async with posting(allow_hosts=hosts) as transport:
                url = f"https://localhost:{peer.port}/"
                response = await transport.post(by_hand(url), HEADERS, b"{}")
        assert response.status == status
        assert ("location", target) in response.headers
        assert not reached(listener)


async def test_one_lookup_per_connection() -> None:
    """A name is looked up once per connection, and what a later lookup says is judged afresh."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    async with listening(saying(OK, OK), names=["hooks.acme.com"]) as peer:

        async def lookup(host: str) -> list[str]:
            return answers.pop(0)

        async with posting(
            ports=[peer.port], allow_networks=["127.0.0.1/32"], resolver=Resolver(lookup)
        ) as transport:
            destination = by_hand(f"https://hooks.acme.com:{peer.port}/")
            for _ in range(2):
                assert (await transport.post(destination, HEADERS, b"{}")).status == 200
            await peer.until_open(0)
            assert (await refusal(transport, destination)).code == "forbidden_address"
    assert not answers


DNS = json.loads((Path(__file__).parent / "cases" / "dns.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", DNS, ids=lambda case: ",".join(case["answers"][:3]))
async def test_what_a_names_answers_come_to(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the judged addresses are handed to the dialler, or the post ends undialled."""
    dialled: list[str] = []

    async def start_connection(infos: Any, **options: Any) -> socket.socket:
        dialled.extend(info[4][0] for info in infos)
        raise ConnectionRefusedError

    monkeypatch.setattr(connector, "start_connection", start_connection)
    async with posting(resolver=looking_up({"hooks.acme.com": case["answers"]})) as transport:
        with pytest.raises(PublishFailed) as caught:
            await transport.post(by_hand("https://hooks.acme.com/"), HEADERS, b"{}")
    assert (caught.value.code, dialled) == (case.get("code", "refused"), case.get("dialled", []))


async def test_name_that_does_not_resolve() -> None:
    """A name without an answer is the name's fault, found in the dns phase."""
    async with posting(resolver=looking_up({})) as transport:
        error = await refusal(transport, by_hand("https://hooks.acme.com/"))
    assert (error.code, error.fault) == ("dns", Fault.NAME)
    assert error.answer == Answer(None, "dns", "")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL])
async def test_our_own_lack(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this machine has no socket left the lane waits, and no destination is blamed."""

    def no_socket(*args: object) -> socket.socket:
        raise OSError(number, MARK)

    async with posting(allow_hosts=["localhost"]) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", no_socket)
            with pytest.raises(TransientPublishError) as caught:
                await transport.post(by_hand("https://localhost/"), HEADERS, b"{}")
    assert caught.value.code == f"local_{errno.errorcode[number].lower()}"
    assert caught.value.holds == "lane"


# -- what goes on the wire


async def test_exactly_our_bytes() -> None:
    """On the wire stand our headers as given, Host and Content-Length, the target and the body; no more."""
    requests: list[bytes] = []
    bodies = [b'{"a": 1}', b"", b"x" * 3_000_000, b'{"a": 1}']

    async def script(talk: Talk) -> None:
        while request := await talk.request():
            requests.append(request)
            await talk.send(OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b; Secure\r\n\r\n"))

    headers = [
        ("content-TYPE", "application/json"),
        ("X-Sig", "sig1=:AAA=:, b"),
        ("accept-encoding", "identity"),
    ]
    async with listening(script) as peer, posting(allow_hosts=[f"localhost:{peer.port}"]) as transport:
        destination = peer.at("/a%2Fb?x=%7e")
        for body in bodies:
            await transport.post(destination, headers, body)
    for request, body in zip(requests, bodies, strict=True):
        head, _, sent = request.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first == b"POST /a%2Fb?x=%7e HTTP/1.1"
        assert sorted(lines) == sorted(
            [
                f"Host: localhost:{peer.port}".encode(),
                f"Content-Length: {len(body)}".encode(),
                b"content-TYPE: application/json",
                b"X-Sig: sig1=:AAA=:, b",
                b"accept-encoding: identity",
            ]
        )
        assert sent == body
    assert peer.accepted == 1


TARGETS = """
/ // /// /a//b /. /.. /../x /a/./b /a/../b /%2e%2e/ /%2F /%2f /%7E /%7e /~ /%41 /%zz /% /%2 /%00 /+ /%20 /a+b
/; /;a=b /, /: /:80 /@ /a@b /! /$ /& /' /( /) /* /= /| /^ /` /{x} /[x] /<x> /" /x?? /x?a /x?a=%2F /x?a=/ /x?a=?
/x?a=b&a=c&& /x?; /x?%2B+ /x?[x]=1 /x?'" /x?a=%zz /x?a=%7E~ /x?=& /x?a=https://b.c/d /é /%C3%A9 /x?é=ü /日本
""".split()


def test_targets_survive(tmp_path: Path) -> None:
    """The target that is stored, and so signed, is the target on the wire, byte for byte."""
    with Receiver() as receiver:
        policy = DestinationPolicy.from_options(allow_hosts=[receiver.host])
        stored = [policy.parse(receiver.url(target)) for target in TARGETS]

        async def run() -> None:
            transport = GuardedTransport(policy, timeout=10.0, ca_file=receiver.ca_file)
            await transport.open()
            for destination in stored:
                await transport.post(destination, HEADERS, b"{}")
            await transport.close()

        asyncio.run(run())
        origin = receiver.url("")
        assert [origin + request.target for request in receiver.requests] == [each.url for each in stored]
        assert receiver.connections == 1
    sent = [request.target for request in receiver.requests]
    assert all(target == raw for target, raw in zip(TARGETS, sent, strict=True) if target.isascii())


TARGET = st.text(st.sampled_from("abcXYZ019-._~!$&'()*+,;=:@/?é日 %".replace(" ", "")), max_size=40).map(
    lambda text: text.replace("%", "%2F")
)
NAMES = ["hooks.acme.com", "bücher.acme.com", "HOOKS.Acme.com", "xn--bcher-kva.acme.com"]


def test_what_is_signed_is_what_is_sent() -> None:
    """For generated targets and names ``@target-uri`` and ``@authority`` are those that a raw server saw."""
    with Receiver(names=("hooks.acme.com", "xn--bcher-kva.acme.com")) as receiver:
        port = receiver.port
        policy = DestinationPolicy.from_options(ports=[port], allow_networks=["127.0.0.0/8"])
        signed: list[str] = []

        async def run(destinations: list[Destination]) -> None:
            transport = GuardedTransport(
                policy, timeout=10.0, ca_file=receiver.ca_file, resolver=Resolver(_loopback)
            )
            await transport.open()
            for destination in destinations:
                await transport.post(destination, HEADERS, b"{}")
            await transport.close()

        @settings(max_examples=200)
        @given(st.sampled_from(NAMES), TARGET)
        def collect(name: str, target: str) -> None:
            signed.append(f"https://{name}:{port}/{target}")

        collect()
        destinations = [policy.parse(url) for url in signed]
        asyncio.run(run(destinations))
        sent = [(request.header("Host"), request.target) for request in receiver.requests]
        assert [(host, f"https://{host}{target}") for host, target in sent] == [
            (each.authority, each.url) for each in destinations
        ]
        assert len(sent) >= 200


async def _loopback(host: str) -> list[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize(
    "header",
    [
        ("X V", "1"),
        ("X:V", "1"),
        ("", "1"),
        ("X-É", "1"),
        ("X-V\r\nX-W", "1"),
        ("X-V", "1\r\nX-W: 2"),
        ("X-V", "\x00"),
        ("X-V", "é"),
        ("X-V", " 1"),
        ("X-V", "1\t"),
        ("x-key", "2"),
        ("Host", "evil.com"),
        ("content-length", "3"),
        ("Transfer-Encoding", "chunked"),
        ("Expect", "100-continue"),
        ("Connection", "close"),
    ],
)
async def test_headers_that_are_none(header: tuple[str, str]) -> None:
    """A header that would not go out as written, or changes the framing, is refused before any dial."""
    with trap() as listener:
        port = listener.getsockname()[1]
        async with posting(allow_hosts=[f"localhost:{port}"]) as transport:
            with pytest.raises(PermanentPublishError) as caught:
                await transport.post(by_hand(f"https://localhost:{port}/"), [*HEADERS, header], b"{}")
        assert caught.value.reason is QuarantineReason.INVALID_REQUEST
        assert not reached(listener)


async def test_plain_http_where_opened() -> None:
    """An insecure host is reached without TLS."""
    async with listening(tls=False) as peer, posting(insecure_hosts=[f"localhost:{peer.port}"]) as transport:
        response = await transport.post(by_hand(f"http://localhost:{peer.port}/"), HEADERS, b"{}")
    assert response.status == 200


async def test_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Proxies, key logs and passwords of the environment change nothing."""
    with trap() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        keys, netrc = tmp_path / "keys", tmp_path / "netrc"
        netrc.write_text(f"machine localhost login x password {MARK}\n", encoding="ascii")
        monkeypatch.setenv("SSLKEYLOGFILE", str(keys))
        monkeypatch.setenv("NETRC", str(netrc))
        seen: list[bytes] = []

        async def script(talk: Talk) -> None:
            seen.append(await talk.request())
            await talk.send(OK)

        async with listening(script) as peer, posting(allow_hosts=[f"localhost:{peer.port}"]) as transport:
            await transport.post(peer.at(), HEADERS, b"{}")
        assert not reached(proxy)
        assert not keys.exists()
        assert b"authorization" not in seen[0].lower()


# -- who is spoken to


async def test_wrong_certificate() -> None:
    """A certificate for another name, or from an unknown authority, ends the attempt in the tls phase."""
    async with listening(names=["other.acme.com"]) as peer:
        async with posting(ports=[peer.port], allow_hosts=["localhost"]) as transport:
            error = await refusal(transport, peer.at())
        assert error.code == "tls"
        assert error.answer == Answer(None, "tls", f"127.0.0.1:{peer.port}")
        async with posting(allow_hosts=[f"other.acme.com:{peer.port}"], trust=trustme.CA()) as transport:
            error = await refusal(transport, by_hand(f"https://other.acme.com:{peer.port}/"))
        assert error.code == "tls"


async def test_two_names_on_one_address() -> None:
    """Two names on one address get a connection each, asked for by their own name."""
    asked: list[str | None] = []
    names = ["a.acme.com", "b.acme.com"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert(*names).configure_cert(context)
    context.sni_callback = lambda _object, name, _context: asked.append(name)
    async with listening(context=context) as peer:
        async with posting(allow_hosts=[f"{name}:{peer.port}" for name in names]) as transport:
            for name in [*names, *names]:
                await transport.post(by_hand(f"https://{name}:{peer.port}/"), HEADERS, b"{}")
        assert peer.accepted == 2
    assert asked == names


@pytest.fixture
def client_cert(tmp_path: Path) -> str:
    file = tmp_path / "client.pem"
    authority().issue_cert("sender.acme.com").private_key_and_cert_chain_pem.write_to_path(str(file))
    return str(file)


def asking_for_a_certificate(*names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert(*names).configure_cert(context)
    authority().configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def asked(context: ssl.SSLContext) -> Iterator[int]:
    """Serve one connection in a thread, by blocking calls, which tell a client why they hang up; yield the port."""

    def serve() -> None:
        raw, _ = listener.accept()
        # what it still sends would have the kernel take our last word back
        with raw.dup() as still_open:
            with suppress(ssl.SSLError), context.wrap_socket(raw, server_side=True) as wire:
                wire.recv(65536)
                wire.sendall(OK)
            while still_open.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_mutual_tls(client_cert: str, version: ssl.TLSVersion) -> None:
    """A peer that asks who we are is shown our certificate; without one the attempt ends as its refusal."""
    context = asking_for_a_certificate("localhost")
    context.maximum_version = version
    for file in (client_cert, None):
        with asked(context) as port:
            async with posting(allow_hosts=[f"localhost:{port}"], client_cert=file) as transport:
                post = transport.post(by_hand(f"https://localhost:{port}/"), HEADERS, b"{}")
                if file:
                    assert (await post).status == 200
                else:
                    with pytest.raises(PublishFailed, match=r"^tls$"):
                        await post


async def test_strangers_are_not_shown_who_we_are(client_cert: str) -> None:
    """Only hosts opened by name see the certificate, whoever asks for it."""
    with asked(asking_for_a_certificate("hooks.acme.com")) as port:
        async with posting(
            ports=[port],
            allow_networks=["127.0.0.0/8"],
            allow_hosts=["partner.acme.com"],
            client_cert=client_cert,
        ) as transport:
            error = await refusal(transport, by_hand(f"https://hooks.acme.com:{port}/"))
    assert error.code == "tls"


def test_old_tls_is_not_spoken() -> None:
    """The TLS settings start at version 1.2 and check name and chain."""
    context = client_context(None)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.keylog_filename is None


@pytest.mark.parametrize("option", ["ca_file", "client_cert"])
def test_unreadable_files(option: str, tmp_path: Path) -> None:
    """A file without certificates, or with a key under a password, is an error that does not repeat its path."""
    empty, locked = tmp_path / f"{MARK}.pem", tmp_path / f"{MARK}-locked.pem"
    empty.write_text("", encoding="ascii")
    pair = authority().issue_cert("sender.acme.com")
    key = serialization.load_pem_private_key(pair.private_key_pem.bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"password")
    form = serialization.PrivateFormat.PKCS8
    locked.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, encryption)
        + (b"" if option == "ca_file" else pair.cert_chain_pems[0].bytes())
    )
    for path in (empty, locked, tmp_path / MARK):
        files: dict[str, Any] = {option: str(path)}
        with pytest.raises(ConfigurationError, match=f"option '{option}'") as caught:
            GuardedTransport(DestinationPolicy(), timeout=1.0, **files)
        assert MARK not in str(caught.value)
        assert caught.value.__context__ is None


async def test_open_comes_first() -> None:
    """Posting before open() says so."""
    transport = GuardedTransport(DestinationPolicy(), timeout=1.0)
    with pytest.raises(ConfigurationError, match="open"):
        await transport.post(by_hand("https://hooks.acme.com/"), HEADERS, b"{}")


# -- connections


async def test_idle_connections_are_bounded() -> None:
    """Beyond ``max_idle`` the connection that idled longest is closed."""
    names = [f"h{number}.acme.com" for number in range(5)]
    async with (
        listening(names=names) as peer,
        posting(allow_hosts=[f"{name}:{peer.port}" for name in names], max_idle=2) as transport,
    ):
        for name in names:
            await transport.post(by_hand(f"https://{name}:{peer.port}/"), HEADERS, b"{}")
        await peer.until_open(2)
        for name in names[3:]:
            await transport.post(by_hand(f"https://{name}:{peer.port}/"), HEADERS, b"{}")
        assert peer.accepted == 5


async def test_idle_connections_are_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers give up idle connections without a word: ours are closed first, also those that nobody asks for again."""
    monkeypatch.setattr(connector, "KEEP_IDLE_SECONDS", 0.2)
    async with meeting() as (peer, transport):
        for _ in range(2):
            await transport.post(peer.at(), HEADERS, b"{}")
        assert peer.accepted == 1
        await peer.until_open(0)


async def test_a_connection_that_idled_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when nobody has closed it yet."""
    async with meeting() as (peer, transport):
        await transport.post(peer.at(), HEADERS, b"{}")
        monkeypatch.setattr(connector, "KEEP_IDLE_SECONDS", 0.0)
        await transport.post(peer.at(), HEADERS, b"{}")
        assert peer.accepted == 2


@asynccontextmanager
async def held(script: Any = None) -> AsyncIterator[tuple[asyncio.Event, Any]]:
    """A peer that never answers, and an event that says a request reached it."""
    arrived = asyncio.Event()

    async def hold(talk: Talk) -> None:
        await talk.request()
        arrived.set()
        await talk.gone()

    async with listening(hold) as peer:
        yield arrived, peer


async def test_cancelled_while_waiting() -> None:
    """A cancelled post ends as cancelled and leaves neither a connection nor a task behind."""
    before = asyncio.all_tasks()
    async with held() as (arrived, peer), posting(allow_hosts=[f"localhost:{peer.port}"]) as transport:
        post = asyncio.create_task(transport.post(peer.at(), HEADERS, b"x" * 100_000))
        await arrived.wait()
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        await peer.until_open(0)
    assert asyncio.all_tasks() == before


async def test_cancelled_while_resolving() -> None:
    """A post cancelled in its lookup ends as cancelled, and the next one is served."""
    asked, go = asyncio.Event(), asyncio.Event()

    async def lookup(host: str) -> list[str]:
        asked.set()
        await go.wait()
        return ["127.0.0.1"]

    async with meeting(polite, resolver=Resolver(lookup)) as (peer, transport):
        destination = peer.at()
        first = asyncio.create_task(transport.post(destination, HEADERS, b"{}"))
        await asked.wait()
        second = asyncio.create_task(transport.post(destination, HEADERS, b"{}"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert (await second).status == 200


async def test_close_ends_posts_under_way() -> None:
    """Closing the transport fails what is under way by an error of ours."""
    async with held() as (arrived, peer), posting(allow_hosts=[f"localhost:{peer.port}"]) as transport:
        post = asyncio.create_task(transport.post(peer.at(), HEADERS, b"{}"))
        await arrived.wait()
        await transport.close()
        with pytest.raises(OutboxError):
            await post


async def test_a_dial_that_ends_after_close_leaves_no_connection() -> None:
    """What was on its way when the transport closed fails, and is closed too."""
    arrived, go = asyncio.Event(), asyncio.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("localhost").configure_cert(context)

    async def relay(talk: Talk) -> None:
        # holds TLS back until the transport is closed
        arrived.set()
        await go.wait()
        await talk.writer.start_tls(context)
        await talk.gone()

    async with (
        listening(relay, tls=False) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"]) as transport,
    ):
        post = asyncio.create_task(transport.post(peer.at(), HEADERS, b"{}"))
        await arrived.wait()
        await transport.close()
        go.set()
        # not only at its deadline
        async with asyncio.timeout(3):
            with pytest.raises(OutboxError):
                await post
        await peer.until_open(0)


# -- what others see


FAILURES = {
    "reset": b"",
    "protocol": b"HTTP/1.1 " + MARK.encode() + b"\r\n\r\n",
    "answer_too_large": b"HTTP/1.1 103 Early\r\nX: " + MARK.encode() * 900 + b"\r\n\r\n",
    "timeout": b"HTTP/1.1 200 OK\r\nX: " + MARK.encode(),
    "tls": b"",
    "refused": b"",
    "dns": b"",
    "forbidden_address": b"",
}


@pytest.mark.parametrize("code", FAILURES)
async def test_errors_and_logs_hold_no_secret(code: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither error, nor its context and frames, nor any library's debug log shows what was sent or answered."""
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)

    async def script(talk: Talk) -> None:
        await talk.request()
        if code == "reset":
            return
        for _ in range(30 if code == "answer_too_large" else 1):
            await talk.send(FAILURES[code])
        await talk.gone()

    async with listening(script, names=["other.acme.com" if code == "tls" else "localhost"]) as peer:
        with trap() as listener:
            port = listener.getsockname()[1] if code == "refused" else peer.port
        opened: dict[str, Any] = {} if code == "forbidden_address" else {"allow_hosts": ["localhost"]}
        resolver = looking_up({}) if code == "dns" else None
        async with posting(ports=[port], timeout=0.4, resolver=resolver, **opened) as transport:
            url = f"https://localhost:{port}/{MARK}?{MARK}"
            headers = [*HEADERS, ("Authorization", MARK)]
            with pytest.raises(PublishFailed) as caught:
                await transport.post(by_hand(url), headers, MARK.encode())
    error = caught.value
    assert error.code == code
    assert error.__context__ is None
    assert error.__cause__ is None
    frames = caught.traceback[1:]
    shown = [f"{error!s} {error!r} {error.args} {error.answer}", caplog.text]
    shown += [repr(value) for frame in frames for value in frame.frame.f_locals.values()]
    assert frames
    assert MARK not in " ".join(shown)


async def test_response_shows_no_peer_text() -> None:
    """A response's repr holds status and peer, none of the headers."""
    async with meeting(saying(OK.replace(b"OK", MARK.encode()))) as (peer, transport):
        response = await transport.post(peer.at(), HEADERS, b"{}")
    assert ("content-length", "0") in response.headers
    assert "content-length" not in repr(response)
    assert MARK not in repr(response)
