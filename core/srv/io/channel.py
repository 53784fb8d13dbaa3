"""Channels between the API process and the engine process: ZeroMQ over `ipc://`, and an in-process one.

A channel carries `srv.io.messages`, encoded as MessagePack, in order and in both directions. The directory of the two
sockets is private to the user (mode 0700), so that no other user of the machine can connect to the engine.
This module must not know what messages mean.

    API process                               engine process
    ApiChannel    PUSH ──► to_engine.sock ──► PULL    EngineChannel
                  PULL ◄── from_engine.sock ◄─ PUSH
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from srv.io.messages import FromEngine, ToEngine

_LINGER_MS = 2000
_SCHEME = "ipc://"
_PREFIX = "srv-"
_LOCK = "lock"
_NAME_BYTES = len("/srv-12345678/from_engine.sock")


class EngineSide(Protocol):
    """The engine's end of a channel, as the engine loop uses it."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All messages that have arrived; waits up to `timeout_s` seconds for the first (0: does not wait)."""

    def send(self, message: FromEngine) -> None: ...


class SocketDirectory:
    """A private directory for the sockets of one server; `close` removes it.

    It is created in the temporary directory, or in /tmp if the path of the temporary directory is too long for a
    socket address (about 100 bytes). Its creator holds a lock on a file in it. A directory of this user whose lock is
    free was left behind by a server that was killed together with its engine, and is removed.
    """

    def __init__(self) -> None:
        temporary = tempfile.gettempdir()
        fits = len(os.fsencode(temporary)) + _NAME_BYTES <= zmq.IPC_PATH_MAX_LEN
        parent = Path(temporary if fits else "/tmp")
        _remove_stale_directories(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def to_engine(self) -> str:
        return self.address("to_engine")

    @property
    def from_engine(self) -> str:
        return self.address("from_engine")

    def address(self, name: str) -> str:
        """The address of a socket of this name, which is at most as long as "from_engine"."""
        return f"{_SCHEME}{self.path}/{name}.sock"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_stale_directories(parent: Path) -> None:
    """Remove directories that killed servers of this user left behind; one without a lock file may be new.

    Other users can put anything here: their directories, links and whatever is no plain file are never opened, and
    opening does not wait.
    """
    for path in parent.glob(f"{_PREFIX}*"):
        # OSError: locked, or removed by another process in the meantime
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
                _remove_if_unlocked(path)


def _remove_if_unlocked(directory: Path) -> None:
    """Raises OSError if another process holds the lock, or there is no lock file of this user."""
    lock = os.open(directory / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(lock)
        if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


class ApiChannel:
    """The API process's end. It binds the sockets, so that they exist before the engine process is started."""

    def __init__(self, directory: SocketDirectory) -> None:
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        for socket in (self._out, self._in):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._out.bind(directory.to_engine)
        self._in.bind(directory.from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    async def send(self, message: ToEngine) -> None:
        await self._out.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self._in.recv())
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


class EngineChannel:
    """The engine process's end."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        self._to_engine = to_engine
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket in (self._out, self._in):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._in.connect(to_engine)
        self._out.connect(from_engine)
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def wake_for(self, socket: zmq.Socket[bytes]) -> None:
        """Let `receive` return early when this socket has something, too."""
        self._poller.register(socket, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        if not self._poller.poll(int(timeout_s * 1000)):
            return []
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._in.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        self._out.close()
        self._in.close()
        self._context.term()

    def remove_directory(self) -> None:
        """Remove the private directory if the API process exited without doing so."""
        shutil.rmtree(Path(self._to_engine.removeprefix(_SCHEME)).parent, ignore_errors=True)


class InProcessChannel:
    """Both ends in one process, for an engine that tests drive from their own thread.

    Messages still pass through the encoder, so that a message that cannot be serialised fails here as well.
    """

    def __init__(self) -> None:
        self._to_engine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._from_engine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._to_decoder = msgspec.msgpack.Decoder(ToEngine)
        self._from_decoder = msgspec.msgpack.Decoder(FromEngine)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            messages.append(self._to_decoder.decode(self._to_engine.get(timeout_s > 0, timeout_s or None)))
            while True:
                messages.append(self._to_decoder.decode(self._to_engine.get_nowait()))
        except queue.Empty:
            return messages

    def send(self, message: FromEngine) -> None:
        self._from_engine.put(self._encoder.encode(message))

    def put(self, message: ToEngine) -> None:
        """Send a message to the engine."""
        self._to_engine.put(self._encoder.encode(message))

    def take(self, timeout_s: float) -> FromEngine:
        """The engine's next message. Raises `queue.Empty` if none arrives within `timeout_s` seconds."""
        encoded = self._from_engine.get(timeout_s > 0, timeout_s or None)
        message: FromEngine = self._from_decoder.decode(encoded)
        return message
