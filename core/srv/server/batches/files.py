"""Files of clients, in one folder (`--file-storage-path`).

Owns the names in the folder, which never contain anything that a client has sent, and the bounds on number and size.
Must not know what a file contains. Its methods access the disk: call them in a thread.

    FOLDER/file-<32 digits>.json   owner, name and purpose     FOLDER/file-<32 digits>.data   the content
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from srv.errors import RequestError
from srv.server.fields import shorten

MAX_FILES = 10_000
MAX_BYTES = 4 * 2**30  # of all files
MAX_NAME = 255
_ID = re.compile(r"file-[0-9a-f]{32}")
logger = logging.getLogger(__name__)
T = TypeVar("T")


class StoredFile(msgspec.Struct, frozen=True):
    """A complete file. `owner`: as in `RequestSpec`; nobody else sees it. `filename`: as the client calls it."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    bytes: int

    def shown(self) -> dict[str, object]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


class FileStore:
    """The files of one folder, which is made for the first file. Files outlive the server, until they are deleted."""

    def __init__(self, folder: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._max_files, self._max_bytes = folder, max_files, max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, StoredFile] | None = None  # None: the folder has not been read
        self._used = 0
        self._readers: dict[str, int] = {}  # batches that read a file, by its id

    def put(self, owner: str, filename: str, purpose: str, data: bytes) -> StoredFile:
        """Raises RequestError if the storage is full, or cannot be written."""
        writer = self.writer(owner, filename, purpose)
        try:
            writer.append(data)
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def writer(self, owner: str, filename: str, purpose: str) -> FileWriter:
        """Begin a file that nobody sees before it is finished. Raises RequestError."""
        with self._lock:
            if len(self._index()) >= self._max_files:
                raise _full(f"{self._max_files} files")
        name = f"file-{uuid.uuid4().hex}"
        file = StoredFile(name, owner, filename[:MAX_NAME], purpose, int(time.time()), 0)
        return FileWriter(self, file, self.guarded(lambda: self._open_new(name)))

    def get(self, owner: str, name: str, param: str | None = None) -> StoredFile:
        """Raises RequestError (404) if this owner has no such file. `param`: the field with its id."""
        with self._lock:
            found = self._index().get(name)
        if found is None or found.owner != owner:
            raise RequestError(
                f"there is no file {shorten(name)}; GET /v1/files lists yours",
                code="file_not_found",
                param=param,
                status=404,
            )
        return found

    def all(self, owner: str) -> list[StoredFile]:
        """Those of an owner, the oldest first."""
        with self._lock:
            found = [file for file in self._index().values() if file.owner == owner]
        return sorted(found, key=lambda file: (file.created_at, file.id))

    def path(self, file: StoredFile) -> Path:
        """Where the content is."""
        return self._folder / f"{file.id}.data"

    def delete(self, owner: str, name: str) -> None:
        """Raises RequestError if there is no such file, or a batch reads it."""
        file = self.get(owner, name)
        with self._lock:
            if self._readers.get(name):
                raise RequestError(
                    f"file {name} is refused: a batch reads it; cancel the batch, or wait for its end",
                    code="file_in_use",
                    status=409,
                )
            if self._index().pop(name, None) is None:
                return
            self._used -= file.bytes
        for suffix in (".json", ".data"):
            self.guarded(partial((self._folder / f"{name}{suffix}").unlink, missing_ok=True))

    def hold(self, file: StoredFile, change: int) -> None:
        """Count readers, for which a file is kept: `change` is 1 or -1."""
        with self._lock:
            count = self._readers.pop(file.id, 0) + change
            if count:
                self._readers[file.id] = count

    # ---- for writers

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be written; negative ones were not. Raises RequestError if there is no room."""
        with self._lock:
            self._index()
            if self._used + size > self._max_bytes:
                raise _full(f"{self._max_bytes} bytes")
            self._used += size

    def add(self, file: StoredFile) -> None:
        data = msgspec.json.encode(file)
        self.guarded(lambda: (self._folder / f"{file.id}.json").write_bytes(data))
        with self._lock:
            self._index()[file.id] = file

    def remove_data(self, file: StoredFile) -> None:
        self.guarded(partial(self.path(file).unlink, missing_ok=True))

    # ---- internals

    def _open_new(self, name: str) -> BinaryIO:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (self._folder / f"{name}.data").open("xb")

    def _index(self) -> dict[str, StoredFile]:
        if self._files is None:
            self._files = self.guarded(self._read_folder)
        return self._files

    def _read_folder(self) -> dict[str, StoredFile]:
        found: dict[str, StoredFile] = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            size = path.lstat().st_size
            self._used += size if path.suffix == ".data" else 0  # also of files that an end in the middle left behind
            if path.suffix != ".json" or not _ID.fullmatch(path.stem):
                continue
            try:
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                content = path.with_suffix(".data").lstat().st_size
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("%s is not a stored file and is left alone: %s", path, error)
                continue
            found[path.stem] = msgspec.structs.replace(file, id=path.stem, bytes=content)
        return found

    def guarded(self, work: Callable[[], T]) -> T:
        """The result of work on the disk. Raises RequestError (503) if it fails."""
        try:
            return work()
        except OSError as error:
            logger.error("files cannot be stored in %s: %s", self._folder, error)
            raise RequestError(
                f"the server cannot use its file storage: {error.strerror or type(error).__name__}; tell its operator",
                code="file_storage_failed",
                status=503,
            ) from None


class FileWriter:
    """One file that is being written. Finish or discard it."""

    def __init__(self, store: FileStore, file: StoredFile, stream: BinaryIO) -> None:
        self._store, self._file, self._stream = store, file, stream

    def append(self, data: bytes) -> None:
        """Raises RequestError if the storage is full, or cannot be written."""
        self._store.reserve(len(data))
        self._file = msgspec.structs.replace(self._file, bytes=self._file.bytes + len(data))
        self._store.guarded(lambda: self._stream.write(data))

    def finish(self) -> StoredFile:
        self._store.guarded(self._stream.close)
        self._store.add(self._file)
        return self._file

    def discard(self) -> None:
        """Forget what was written."""
        self._store.reserve(-self._file.bytes)
        self._store.guarded(self._stream.close)
        self._store.remove_data(self._file)


def _full(limit: str) -> RequestError:
    return RequestError(
        f"the file storage is full: its limit is {limit}; delete files that are no longer needed",
        code="file_storage_full",
        status=413,
    )
