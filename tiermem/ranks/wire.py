"""The wire: one connection of each rank to the coordinator, beside the process group that carries the data.

Short messages in both directions, in order. A connection that ends says at once that a process has died, and one that
is shut down wakes whoever reads from it; a process group does neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from tiermem.errors import RanksError
from tiermem.ranks.coordinator import Coordinator, Decision, Message, together
from tiermem.ranks.held import SMALL_NBYTES

_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<I")
_SIOCGIFADDR = 0x8915
PATIENCE = 0.01
"""Seconds for which a page that some ranks want waits for the others to want it too."""


class Connection:
    """One end of a connection. :meth:`send` may be called from any thread, :meth:`receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that vanishes sends no end: half a minute of silence to a question is one.
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._pending = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, together. Raises OSError when the connection has ended."""
        text = json.dumps(messages, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self) -> list[Message]:
        """What has come, at least one message: blocks until then. Raises OSError when the connection has ended."""
        messages: list[Message] = []
        while not messages:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._pending += data
            while len(self._pending) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._pending)
                if len(self._pending) < _LENGTH.size + length:
                    break
                messages += json.loads(self._pending[_LENGTH.size : _LENGTH.size + length])
                del self._pending[: _LENGTH.size + length]
        return messages

    def shut(self) -> None:
        """End it: whoever receives, on either side, is woken with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and free the descriptor."""
        self.shut()
        self._socket.close()


class Server:
    """The coordinator's thread, and its connections to all ranks.

    Small pages move together, up to ``limit`` bytes of ``slices``, which are sizes by page.
    """

    def __init__(self, coordinator: Coordinator, slices: Sequence[int] = (), limit: int = 0) -> None:
        self._coordinator = coordinator
        self._slices = slices
        self._limit = limit
        self._connections: dict[int, Connection] = {}
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._token = secrets.token_bytes(32)
        self._thread: threading.Thread | None = None
        self._end = 0.0
        try:
            self._listener.bind(("", 0))
            self._listener.listen(coordinator.world)
        except BaseException:
            self._listener.close()
            raise

    @property
    def invitation(self) -> dict[str, Any]:
        """What a rank has to know to connect: addresses, port and a token."""
        return {"addresses": addresses(), "port": self._listener.getsockname()[1], "token": self._token.hex()}

    def start(self, timeout: float) -> None:
        """Serve from now on: first those who connect, until all ranks have, or ``timeout`` seconds are over."""
        self._end = monotonic() + timeout
        self._thread = threading.Thread(target=self._run, name="tiermem-coordinator", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """End all connections; who is at their other ends has been told why, or is gone."""
        for connection in list(self._connections.values()):
            connection.shut()

    def close(self) -> None:
        """Wait until all ranks have ended their connections, which they do after having closed."""
        if self._thread is not None:
            self._thread.join()
        self._listener.close()  # of a server that was never started
        for connection in self._connections.values():
            connection.close()

    def _run(self) -> None:
        world = self._coordinator.world
        with contextlib.closing(self._listener):
            while len(self._connections) < world:
                self._listener.settimeout(max(0.001, self._end - monotonic()))
                try:
                    sock, _ = self._listener.accept()
                except OSError:  # also when it was closed meanwhile
                    missing = sorted(set(range(world)) - set(self._connections))
                    text = f"ranks {missing} have not connected to rank 0: have they died?"
                    self._tell(self._coordinator.fail(text, None))
                    break
                rank = _admit(sock, self._token, world)
                if rank is not None:
                    self._connections[rank] = Connection(sock)
        self._serve()

    def _serve(self) -> None:
        coordinator = self._coordinator
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            since = 0.0  # when something began to wait for others to want it too; 0: nothing does
            while selector.get_map():
                wait = max(0.0, since + PATIENCE - monotonic()) if since else None
                decisions: list[Decision] = []
                for key, _ in selector.select(wait):
                    rank, connection = key.data, self._connections[key.data]
                    try:
                        for message in connection.receive():
                            decisions += coordinator.hear(rank, message)
                    except OSError as error:
                        selector.unregister(connection)
                        decisions += coordinator.lost(rank, error.strerror or str(error))
                if coordinator.impatient:
                    since = since or monotonic()
                    if monotonic() >= since + PATIENCE:
                        decisions += coordinator.hurry()
                        since = 0.0
                else:
                    since = 0.0
                self._tell(decisions)

    def _tell(self, decisions: list[Decision]) -> None:
        decisions = together(decisions, self._slices, SMALL_NBYTES, self._limit)
        for rank, connection in self._connections.items():
            messages = [message for ranks, message in decisions if rank in ranks]
            if messages:
                with contextlib.suppress(OSError):  # its end is noticed where it is read from
                    connection.send(messages)


def connect(invitation: dict[str, Any], rank: int, timeout: float) -> Connection:
    """Connect to the coordinator that wrote the invitation, trying its addresses in turn.

    Raises RanksError, naming them, when none leads there.
    """
    token = bytes.fromhex(invitation["token"])
    tried = []
    for address in invitation["addresses"]:
        try:
            sock = socket.create_connection((address, invitation["port"]), min(timeout, 10))
        except OSError as error:
            tried.append(f"{address}: {error.strerror or error}")
            continue
        try:
            sock.sendall(_HELLO.pack(rank) + token)
            answer = _exactly(sock, len(token))
            if hmac.compare_digest(answer, _answer(token)):
                sock.settimeout(None)
                return Connection(sock)
            tried.append(f"{address}: somebody else listens there")
        except OSError as error:
            tried.append(f"{address}: {error.strerror or error}")
        sock.close()
    raise RanksError(
        f"rank {rank} can't reach the first rank on port {invitation['port']} of any of its addresses "
        f"({'; '.join(tried)}): let ranks connect to each other, or set GLOO_SOCKET_IFNAME to an interface "
        "that leads there"
    )


def addresses() -> list[str]:
    """The addresses of this machine at which others may reach it, the likeliest first."""
    found: list[str] = []
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                request = struct.pack("256s", name[:15].encode())
                found.append(socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24]))
    master = os.environ.get("MASTER_ADDR")
    if master:
        # From where the way to the master begins; nothing is sent.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((master, 9))
            found.append(sock.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _admit(sock: socket.socket, token: bytes, world: int) -> int | None:
    """Which rank it is that has connected; None for anybody else."""
    try:
        sock.settimeout(10)
        hello = _exactly(sock, _HELLO.size + len(token))
        (rank,) = _HELLO.unpack_from(hello)
        if hmac.compare_digest(hello[_HELLO.size :], token) and rank < world:
            sock.sendall(_answer(token))
            sock.settimeout(None)
            return int(rank)
    except OSError:
        pass
    sock.close()
    return None


def _answer(token: bytes) -> bytes:
    return hmac.digest(token, b"tiermem coordinator", "sha256")


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data
