"""The guarded transport against peers that stall, flood, lie, break off or answer before they are asked."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest

from notification_outbox import transport as transport_room
from notification_outbox.exceptions import PublishFailed
from notification_outbox.lifecycle import Answer, Fault
from notification_outbox.resolver import Resolver
from notification_outbox.transport import GuardedTransport
from notification_outbox.urls import Destination

from .peer import (
    OK,
    Script,
    Talk,
    authority,
    by_hand,
    listening,
    looking_up,
    meeting,
    open_files,
    polite,
    posting,
    saying,
)

HEADERS = [("Content-Type", "application/json")]
SHORT = 0.4


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Whatever a peer does, a closed transport leaves neither a socket nor a task."""
    tasks, sockets = asyncio.all_tasks(), open_files()
    yield
    assert open_files() <= sockets
    assert asyncio.all_tasks() <= tasks | {task for task in [asyncio.current_task()] if task}


async def refusal(
    transport: GuardedTransport, destination: Destination, body: bytes = b"{}"
) -> PublishFailed:
    with pytest.raises(PublishFailed) as caught:
        await transport.post(destination, HEADERS, body)
    assert caught.value.fault is Fault.DESTINATION
    return caught.value


def dripping(start: bytes, drop: bytes) -> Script:
    """Return a script that sends ``start`` and then one ``drop`` after the other."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(start)
        while True:
            await talk.send(drop)
            await asyncio.sleep(0.02)

    return script


def flooding(start: bytes, wave: bytes) -> Script:
    """Return a script that sends ``start`` and then ``wave`` as fast as it is taken."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(start)
        while True:
            await talk.send(wave)

    return script


# -- deadlines


@pytest.mark.parametrize(
    ("script", "phase"),
    [
        (dripping(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"), "sent"),
        (dripping(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), "sent"),
        (dripping(b"HTTP/1.1 2", b""), "sent"),
    ],
    ids=["header drip", "slow 103", "half a line"],
)
async def test_no_final_head_in_time(script: Script, phase: str) -> None:
    """Whoever does not finish the final head before the deadline has not answered."""
    async with meeting(script, timeout=SHORT) as (peer, transport):
        async with asyncio.timeout(5):
            error = await refusal(transport, peer.at())
    assert error.code == "timeout"
    assert error.answer == Answer(None, phase, f"127.0.0.1:{peer.port}")


async def test_peer_that_reads_nothing() -> None:
    """A body that nobody takes ends at the deadline."""

    async def script(talk: Talk) -> None:
        talk.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with meeting(script, timeout=SHORT) as (peer, transport):
        error = await refusal(transport, peer.at(), b"x" * 8_000_000)
    assert (error.code, error.answer and error.answer.phase) == ("timeout", "sent")


async def test_slow_lookup() -> None:
    """A lookup that does not end is cut at the deadline, in the dns phase."""

    async def lookup(host: str) -> Iterable[str]:
        await asyncio.Event().wait()
        return []

    async with posting(resolver=Resolver(lookup), timeout=SHORT) as transport:
        error = await refusal(transport, by_hand("https://hooks.acme.com/"))
    assert (error.code, error.answer) == ("timeout", Answer(None, "dns", ""))


async def test_stalled_handshake() -> None:
    """A peer that accepts and says nothing of TLS is cut before the deadline, in the tls phase."""

    async def script(talk: Talk) -> None:
        await talk.gone()

    async with (
        listening(script, tls=False) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"], timeout=SHORT) as transport,
    ):
        error = await refusal(transport, peer.at())
    assert (error.code, error.answer) == ("timeout", Answer(None, "tls", f"127.0.0.1:{peer.port}"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
async def test_stalled_handshake_leaves_time_for_the_next_address() -> None:
    """When one address of a name stalls in TLS the next one is still tried within the deadline."""

    async def stall(talk: Talk) -> None:
        await talk.gone()

    async with (
        listening(polite) as good,
        listening(stall, tls=False, address="127.0.0.2", port=good.port) as bad,
        posting(
            allow_hosts=[f"localhost:{good.port}"],
            resolver=looking_up({"localhost": ["127.0.0.2", "127.0.0.1"]}),
            timeout=2 * SHORT,
        ) as transport,
    ):
        response = await transport.post(good.at(), HEADERS, b"{}")
        assert response.answer == Answer(200, "answered", f"127.0.0.1:{good.port}")
        assert bad.accepted == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address and a full backlog")
async def test_black_hole_beside_an_address_that_answers() -> None:
    """A name with one dead and one living address is delivered to the living one."""
    async with listening(polite) as good:
        with ExitStack() as stack:
            hole = stack.enter_context(socket.socket())
            hole.bind(("127.0.0.2", good.port))
            hole.listen(0)
            for _ in range(3):  # fills the backlog: further connects are neither accepted nor refused
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(hole.getsockname())
            names = looking_up({"localhost": ["127.0.0.2", "127.0.0.1"]})
            async with posting(
                allow_hosts=[f"localhost:{good.port}"], resolver=names, timeout=3.0
            ) as transport:
                response = await transport.post(good.at(), HEADERS, b"{}")
    assert response.answer.peer == f"127.0.0.1:{good.port}"


async def test_refused_connection() -> None:
    """A closed port is the destination's fault, found while dialling."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = taken.getsockname()[1]
        async with posting(allow_hosts=[f"localhost:{port}"]) as transport:
            error = await refusal(transport, by_hand(f"https://localhost:{port}/"))
    assert (error.code, error.answer) == ("refused", Answer(None, "dial", f"127.0.0.1:{port}"))


# -- the final head decides


@pytest.mark.parametrize(
    "script",
    [
        dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x"),
        saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nx"),
        saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"),
        saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense"),
        flooding(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        flooding(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"
        ),
        saying(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"),
        saying(b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
    ids=[
        "body drip",
        "truncated",
        "half a chunk",
        "bad chunk",
        "endless",
        "endless chunks",
        "no gzip",
        "103",
    ],
)
async def test_accepted_is_accepted(script: Script) -> None:
    """Once the final head says 200 the message is delivered, whatever becomes of the body."""
    async with meeting(script, timeout=SHORT) as (peer, transport):
        async with asyncio.timeout(5):
            response = await transport.post(peer.at(), HEADERS, b"{}")
    assert response.answer == Answer(200, "answered", f"127.0.0.1:{peer.port}")


async def test_endless_body_is_cut_by_its_size() -> None:
    """Of an endless body little is taken, however much time there is."""
    sent = 0

    async def script(talk: Talk) -> None:
        nonlocal sent
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await talk.send(b"x" * 65536)
            sent += 65536

    async with meeting(script, timeout=30.0) as (peer, transport):
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        await peer.until_open(0)
    assert sent < 16 * 1024 * 1024


async def test_answer_is_not_inflated() -> None:
    """A compressed answer is dropped as it is: a bomb stays small."""
    bomb = gzip.compress(b"\0" * 50_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    async with meeting(saying(head + bomb, OK)) as (peer, transport):
        for _ in range(2):
            assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        assert peer.accepted == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200", "reset"),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 9000 + b"\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 129 + b"\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "answer_too_large"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "protocol"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxyz", "protocol"),
        (b"HTTP/1.1 999 Never\r\nContent-Length: 0\r\n\r\n", "protocol"),
    ],
    ids=["nothing", "half a line", "garbage", "long header", "many headers", "no end", "CL+TE", "101", "999"],
)
async def test_answers_that_are_none(answer: bytes, code: str) -> None:
    """What is no final HTTP answer from 200 to 599 fails the attempt, without a status and without a retry."""
    async with meeting(saying(answer)) as (peer, transport):
        error = await refusal(transport, peer.at())
        assert error.code == code
        assert error.answer is not None
        assert error.answer.status is None
        assert peer.accepted == 1


async def test_reset() -> None:
    """A connection reset in the middle is a reset, not a crash."""

    async def script(talk: Talk) -> None:
        await talk.request()
        option = struct.pack("ii", 1, 0)  # closing with unsent data dropped sends RST
        talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        talk.writer.transport.abort()

    async with meeting(script) as (peer, transport):
        assert (await refusal(transport, peer.at())).code == "reset"


@pytest.mark.parametrize(
    "script",
    [
        flooding(b"", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 100),
        flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    ],
    ids=["103", "100"],
)
async def test_floods_before_the_final_head(script: Script) -> None:
    """A peer that sends interim answers without end is cut by their size, long before the deadline."""
    async with meeting(script, timeout=30.0) as (peer, transport):
        async with asyncio.timeout(5):
            error = await refusal(transport, peer.at())
        await peer.until_open(0)
    assert error.code == "answer_too_large"


@pytest.mark.parametrize("stage", ["accept", "hello", "request", "status", "head", "body"])
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
async def test_peer_that_leaves_at_every_stage(stage: str, way: str) -> None:
    """Before the final head that is a failure, after it the message is delivered; and soon, not at the deadline."""

    async def leave(talk: Talk) -> None:
        if way == "reset":
            option = struct.pack("ii", 1, 0)
            talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
            talk.writer.transport.abort()
        elif way == "half-close" and talk.writer.can_write_eof():
            talk.writer.write_eof()
            await talk.gone()

    said = {
        "status": b"HTTP/1.1 200",
        "head": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
    }

    async def script(talk: Talk) -> None:
        if stage == "hello":
            await talk.reader.read(10)
        elif stage != "accept":
            await talk.request()
            await talk.send(said.get(stage, b""))
        await leave(talk)

    async with (
        listening(script, tls=stage not in ("accept", "hello")) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"], timeout=30.0) as transport,
    ):
        async with asyncio.timeout(5):
            if stage == "body":
                assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
            else:
                assert (await refusal(transport, peer.at())).code in ("reset", "tls")
        assert peer.accepted == 1


async def test_a_certificate_that_has_expired() -> None:
    """Its peer is not spoken to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    authority().issue_cert("localhost", not_after=yesterday).configure_cert(context)
    async with (
        listening(context=context) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"]) as transport,
    ):
        error = await refusal(transport, peer.at())
    assert (error.code, error.answer and error.answer.phase) == ("tls", "tls")


async def test_one_black_hole_delays_nobody_else() -> None:
    """Fifty posts to a peer that never answers, and the next one to another peer goes through at once."""

    async def silent(talk: Talk) -> None:
        await talk.request()
        await talk.gone()

    async with listening(silent) as hole, listening() as good:
        hosts = [f"localhost:{peer.port}" for peer in (hole, good)]
        async with posting(allow_hosts=hosts, timeout=30.0) as transport:
            stuck = [asyncio.create_task(transport.post(hole.at(), HEADERS, b"{}")) for _ in range(50)]
            await hole.until_open(50)
            async with asyncio.timeout(2):
                assert (await transport.post(good.at(), HEADERS, b"{}")).status == 200
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


# -- which connection serves again


async def test_reuse_after_a_read_2xx() -> None:
    """A connection serves again after a 2xx whose body was read to its end, with or without a body."""
    answers = (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"HTTP/1.1 204 No Content\r\n\r\n")
    chunked = b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with meeting(saying(*answers, chunked, OK)) as (peer, transport):
        statuses = [(await transport.post(peer.at(), HEADERS, b"{}")).status for _ in range(4)]
        assert statuses == [200, 204, 202, 200]
        assert peer.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_no_reuse_against_the_peers_word(answer: bytes) -> None:
    """A peer that says it will close, or speaks HTTP/1.0, gets a new connection for the next message."""

    async def script(talk: Talk) -> None:
        while await talk.request():
            await talk.send(answer)

    async with meeting(script) as (peer, transport):
        for _ in range(2):
            assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        assert peer.accepted == 2


async def test_trailers_are_no_headers() -> None:
    """What follows a chunked body is read for the connection's sake and belongs to nothing."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nRetry-After: 9\r\n\r\n"
    async with meeting(saying(chunked, OK)) as (peer, transport):
        response = await transport.post(peer.at(), HEADERS, b"{}")
        assert response.headers == [("transfer-encoding", "chunked")]
        await transport.post(peer.at(), HEADERS, b"{}")
        assert peer.accepted == 1


async def test_headers_of_interim_answers_are_no_headers() -> None:
    """Only those of the final head count."""
    early = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\n\r\n"
    async with meeting(saying(early + OK)) as (peer, transport):
        assert (await transport.post(peer.at(), HEADERS, b"{}")).headers == [("content-length", "0")]


async def test_a_peer_that_speaks_before_tls() -> None:
    """What comes before the handshake is not read as part of it, nor as an answer."""

    async def script(talk: Talk) -> None:
        await talk.send(OK)
        await talk.gone()

    async with (
        listening(script, tls=False) as peer,
        posting(allow_hosts=[f"localhost:{peer.port}"]) as transport,
    ):
        assert (await refusal(transport, peer.at())).code == "tls"


@pytest.mark.parametrize("size", [1, 60_000, 66_000, 140_000, 200_000, 1_000_000])
async def test_large_bodies_leave_no_connection_stuck(size: int) -> None:
    """However much came with a 200, the next message is served."""
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * size
    async with meeting(saying(answer, answer), timeout=5.0) as (peer, transport):
        for _ in range(3):
            assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200


@pytest.mark.parametrize("status", [300, 302, 400, 404, 410, 429, 500, 503])
async def test_no_reuse_after_anything_else(status: int) -> None:
    """After any other status the connection is closed, even when its answer is complete."""
    answer = f"HTTP/1.1 {status} Other\r\nContent-Length: 0\r\n\r\n".encode()
    async with meeting(saying(answer, OK)) as (peer, transport):
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == status
        await peer.until_open(0)
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == status
        assert peer.accepted == 2


@pytest.mark.parametrize("status", [200, 413])
async def test_answer_before_the_body_was_read(status: int) -> None:
    """An answer that comes before the body went out counts, and its connection is not used again."""
    arrived: list[bytes] = []

    async def script(talk: Talk) -> None:
        if talk.number == 1:
            await talk.reader.readuntil(b"\r\n\r\n")
            await talk.send(f"HTTP/1.1 {status} Early\r\nContent-Length: 0\r\n\r\n".encode())
            await talk.gone()
        else:
            arrived.append(await talk.request())
            await talk.send(OK)

    async with meeting(script) as (peer, transport):
        first = await transport.post(peer.at(), HEADERS, b"x" * 5_000_000)
        second = await transport.post(peer.at("/second"), HEADERS, b"{}")
    assert (first.status, second.status) == (status, 200)
    assert arrived[0].startswith(b"POST /second ")
    assert arrived[0].endswith(b"\r\n\r\n{}")


GONE = b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("planted", [GONE, GONE[:20], b"\r\n", b"x"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_planted_answer(planted: bytes, at_once: bool) -> None:
    """An answer nobody asked for never becomes the answer to the next message."""
    spoken = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        if talk.number > 1:
            await talk.send(OK)
            return
        if at_once:
            await talk.send(OK + planted)
        else:
            await talk.send(OK)
            await asyncio.sleep(0.02)
            await talk.send(planted)
        spoken.set()
        # what is left of it comes as soon as the connection is used again
        if await talk.request():
            await talk.send(GONE[20:] if planted == GONE[:20] else OK)

    async with meeting(script) as (peer, transport):
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        await spoken.wait()
        await asyncio.sleep(0.02)
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200


@pytest.mark.parametrize("planted", [GONE, OK])
async def test_answer_planted_behind_a_body(planted: bytes) -> None:
    """A second answer in one piece with the first is dropped together with its connection."""
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    async with meeting(saying(body + planted, OK)) as (peer, transport):
        for _ in range(2):
            assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        assert peer.accepted == 2


@pytest.mark.parametrize("body", [b"hello", GONE])
async def test_a_204_has_no_body(body: bytes) -> None:
    """What comes behind one all the same is dropped with its connection."""
    async with meeting(saying(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n" + body)) as (
        peer,
        transport,
    ):
        for _ in range(2):
            assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 204
        assert peer.accepted == 2


# -- the free reconnect


def stale(limit: int) -> Script:
    """Return a script whose first ``limit`` connections answer once and close when asked again."""
    together = asyncio.Barrier(limit)

    async def script(talk: Talk) -> None:
        if talk.number > limit:
            await polite(talk)
            return
        await talk.request()
        await together.wait()  # so that every post has a connection of its own
        await talk.send(OK)
        await talk.request()

    return script


async def test_six_stale_connections() -> None:
    """One reconnect is enough, however many kept connections the peer has given up."""
    async with meeting(stale(6)) as (peer, transport):
        posts = [transport.post(peer.at(), HEADERS, b"{}") for _ in range(6)]
        assert {each.status for each in await asyncio.gather(*posts)} == {200}
        assert peer.accepted == 6
        assert (await transport.post(peer.at(), HEADERS, b"{}")).status == 200
        assert peer.accepted == 7


async def test_reconnect_is_made_once() -> None:
    """A peer that gives up the fresh connection as well has failed the attempt."""

    async def script(talk: Talk) -> None:
        await talk.request()
        if talk.number == 1:
            await talk.send(OK)
            await talk.request()

    async with meeting(script) as (peer, transport):
        await transport.post(peer.at(), HEADERS, b"{}")
        assert (await refusal(transport, peer.at())).code == "reset"
        assert peer.accepted == 2


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 20", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
async def test_no_reconnect_once_an_answer_began(begun: bytes) -> None:
    """When any byte of an answer came, the message may have been taken: it is not sent again."""
    async with meeting(saying(OK, begun)) as (peer, transport):
        await transport.post(peer.at(), HEADERS, b"{}")
        assert (await refusal(transport, peer.at())).code == "reset"
        assert peer.accepted == 1


async def test_no_reconnect_when_the_peer_took_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds a request for a while and hangs up had read it: it is not sent again in the same attempt."""
    monkeypatch.setattr(transport_room, "STALE_SECONDS", 0.1)

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(OK)
        await talk.request()
        await asyncio.sleep(0.3)

    async with meeting(script) as (peer, transport):
        await transport.post(peer.at(), HEADERS, b"{}")
        assert (await refusal(transport, peer.at())).code == "reset"
        assert peer.accepted == 1


@pytest.mark.parametrize("stray", [GONE, OK, b"x", b""])
async def test_an_answer_that_waits_in_the_kernel_is_not_believed(stray: bytes) -> None:
    """The loop had no time to see it: what came unasked, or the end, is looked for before a connection is used."""
    sent = threading.Event()

    def serve() -> None:
        with listener.accept()[0] as first:
            first.recv(65536)
            first.sendall(OK)
            first.sendall(stray)
            if not stray:
                first.shutdown(socket.SHUT_WR)
            sent.set()
            with listener.accept()[0] as second:
                second.recv(65536)
                second.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
                second.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        async with posting(insecure_hosts=[host]) as transport:
            destination = by_hand(f"http://{host}/")
            first = asyncio.create_task(transport.post(destination, HEADERS, b"{}"))
            assert (await first).status == 200
            # no turn of the loop between the stray bytes and the next post
            assert sent.wait(5)
            second = await transport.post(destination, HEADERS, b"{}")
        thread.join()
    assert second.status == 202


async def test_no_reconnect_on_a_fresh_connection() -> None:
    """A first connection that is dropped may have delivered: the attempt failed."""
    async with meeting(saying(b"")) as (peer, transport):
        assert (await refusal(transport, peer.at())).code == "reset"
        assert peer.accepted == 1
