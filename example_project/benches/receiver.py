"""A receiver for benches, as lean as Python allows: TLS on loopback, 200 for every request, nothing kept.

Run as a process of its own, ``python receiver.py CERTIFICATE``: prints its port and serves until killed.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import sys

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Answering(asyncio.Protocol):
    """Answers as soon as a request is complete; requests may come in pieces or several at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.waiting = b""

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        while (end := self.waiting.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self.waiting, 0, end)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self.waiting) < whole:
                return
            self.waiting = self.waiting[whole:]
            self.transport.write(ANSWER)


async def serve(certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.get_running_loop().create_server(
        Answering, "127.0.0.1", 0, ssl=context, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
