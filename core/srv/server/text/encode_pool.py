"""Processes that encode texts (`--tokenizer-worker-num`), so that long prompts use more processors than this one does.

Owns the processes: their start, their loss. A text that a lost process had is encoded here, and the process is
replaced. Must not know how a text is encoded.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from srv.io.child_pipe import end, receive, send
from srv.server.text.encode_frames import CODE, Ids, Texts

_MODULE = "srv.server.text.encode_child"
_START_SECONDS = 120.0  # to import what it needs and to load the tokenizer, on a busy machine
_ENCODE_SECONDS = 60.0
logger = logging.getLogger(__name__)

Encode = Callable[[Sequence[str], bool], list[list[int]]]


class EncodePool:
    """`count` processes with the tokenizer of `path`. Thread-safe; each process has one call at a time.

    encode: does the same in this process. remote_code: as in `load_tokenizer`.
    """

    def __init__(self, path: Path, count: int, encode: Encode, remote_code: bool = False) -> None:
        self._path, self._encode = path, encode
        self._closed = False
        self._idle: queue.SimpleQueue[_Encoder] = queue.SimpleQueue()
        self._all = [_Encoder(path, remote_code) for _ in range(count)]
        for process in self._all:
            self._idle.put(process)

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """The token ids of texts that are valid Unicode, in one call of the tokenizer."""
        encoder = self._idle.get()
        try:
            if not self._closed:
                return encoder.encode(texts, special)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            if not self._closed:
                encoder.restart()
                logger.warning("a process that encodes texts is lost (%s) and replaced", type(error).__name__)
        finally:
            self._idle.put(encoder)
        return self._encode(texts, special)

    def close(self) -> None:
        """End the processes, also while they encode."""
        self._closed = True
        for process in self._all:
            process.kill()


class _Encoder:
    """One process. It starts at once, and is waited for by the first call."""

    def __init__(self, path: Path, remote_code: bool) -> None:
        self._command = [sys.executable, "-P", "-m", _MODULE, str(path), *([CODE] if remote_code else [])]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stop = weakref.finalize(self, end, self._process)
        self._loaded = False

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        if not self._loaded:
            receive(self._process, time.monotonic() + _START_SECONDS)
            self._loaded = True
        deadline = time.monotonic() + _ENCODE_SECONDS
        send(self._process, msgspec.msgpack.encode(Texts(list(texts), special)), deadline)
        reply = msgspec.msgpack.decode(receive(self._process, deadline), type=Ids)
        return [array("i", ids).tolist() for ids in reply.ids]

    def restart(self) -> None:
        self._stop()
        self._start()

    def kill(self) -> None:
        """End it; a thread that waits for it gets an EOFError."""
        self._process.kill()
