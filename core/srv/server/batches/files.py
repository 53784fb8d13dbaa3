"""Files of clients, in one folder (`--file-storage-path`).

Owns the names in the folder, which never contain anything that a client has sent, and the bounds on number and size.
Must not know what a file contains. Its methods access the disk: call them in a thread.

    FOLDER/file-<32 digits>.json   owner, name and purpose, written last     .tmp   while it is written
    FOLDER/file-<32 digits>.data   the content; its writer holds a lock on it (flock)
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from srv.errors import RequestError
from srv.server.request.fields import shorten

MAX_FILES = 10_000
MAX_BYTES = 4 * 2**30  # of all files
OWNER_SHARE = 2  # one of several owners may have this fraction of the files and bytes: 1 / OWNER_SHARE
MAX_NAME = 255
_ID = re.compile(r"file-[0-9a-f]{32}")
logger = logging.getLogger(__name__)
T = TypeVar("T")


class BatchFile(msgspec.Struct, frozen=True):
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
    """The files of one folder, which is made for the first file. Files outlive the server, until they are deleted.

    shared: by several owners, none of whom may fill it.
    """

    def __init__(
        self, folder: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES, *, shared: bool = False
    ) -> None:
        self._folder, self._max_files, self._max_bytes = folder, max_files, max_bytes
        self._shared = shared
        self._lock = threading.Lock()
        self._files: dict[str, BatchFile] | None = None  # None: the folder has not been read
        self._unfinished: Counter[str] = Counter()  # files that are being written, by owner
        self._used = 0  # bytes of all files, unfinished ones included
        self._used_by: Counter[str] = Counter()  # of these, those of each owner
        self._readers: dict[str, int] = {}  # who reads a file, by its id

    def load(self) -> None:
        """Read the folder, and remove what a crash has left in it. Later calls do so otherwise."""
        with suppress(RequestError), self._lock:  # it has been logged, and the first request gets it again
            self._index()

    def put(self, owner: str, filename: str, purpose: str, data: bytes) -> BatchFile:
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
            if len(self._index()) + self._unfinished.total() >= self._max_files:
                raise _full(f"{self._max_files} files")
            count = sum(file.owner == owner for file in self._index().values()) + self._unfinished[owner]
            if self._shared and count >= (limit := self._max_files // OWNER_SHARE):
                raise _full(f"{limit} files of one API key")
            self._unfinished[owner] += 1
        name = f"file-{uuid.uuid4().hex}"
        file = BatchFile(name, owner, filename[:MAX_NAME], purpose, int(time.time()), 0)
        try:
            return FileWriter(self, file, self.guarded(partial(_create, self.path(file), _metadata(file))))
        except BaseException:
            self.drop_unfinished(owner, 0)
            raise

    def get(self, owner: str, name: str, param: str | None = None) -> BatchFile:
        """Raises RequestError (404) if this owner has no such file. `param`: the field with its id."""
        with self._lock:
            return self._get(owner, name, param)

    def _get(self, owner: str, name: str, param: str | None) -> BatchFile:
        file = self._index().get(name)
        if file is None or file.owner != owner:
            raise RequestError(
                f"there is no file {shorten(name)}; GET /v1/files lists yours",
                code="file_not_found",
                param=param,
                status=404,
            )
        return file

    def all(self, owner: str) -> list[BatchFile]:
        """Those of an owner, the oldest first."""
        with self._lock:
            files = [file for file in self._index().values() if file.owner == owner]
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def path(self, file: BatchFile) -> Path:
        """Where the content is."""
        return self._folder / f"{file.id}.data"

    def delete(self, owner: str, name: str) -> None:
        """Raises RequestError if there is no such file, or somebody reads it."""
        with self._lock:
            file = self._get(owner, name, None)
            if self._readers.get(name):
                raise RequestError(
                    f"file {name} is refused: a batch or a download reads it; cancel the batch, or wait for the end",
                    code="file_in_use",
                    status=409,
                )
            del self._index()[name]
        try:
            for suffix in (".json", ".data"):  # a crash in between leaves what the next start removes
                self.guarded(partial((self._folder / f"{name}{suffix}").unlink, missing_ok=True))
        except BaseException:
            with self._lock:
                self._index()[name] = file
            raise
        self.unreserve(owner, file.bytes)

    def hold(self, owner: str, name: str, param: str | None = None) -> BatchFile:
        """Like `get`; the file is not deleted before `release`."""
        with self._lock:
            file = self._get(owner, name, param)
            self._readers[name] = self._readers.get(name, 0) + 1
        return file

    def release(self, file: BatchFile) -> None:
        with self._lock:
            if count := self._readers.pop(file.id) - 1:
                self._readers[file.id] = count

    # ---- for writers

    def reserve(self, owner: str, size: int) -> None:
        """Count bytes that are about to be written. Raises RequestError if there is no room."""
        with self._lock:
            self._index()
            if self._used + size > self._max_bytes:
                raise _full(f"{self._max_bytes} bytes")
            if self._shared and self._used_by[owner] + size > (limit := self._max_bytes // OWNER_SHARE):
                raise _full(f"{limit} bytes of one API key")
            self._used += size
            self._used_by[owner] += size

    def unreserve(self, owner: str, size: int) -> None:
        """Count bytes no more, which are not there."""
        with self._lock:
            self._used -= size
            self._used_by[owner] -= size

    def add(self, file: BatchFile) -> None:
        """An unfinished file is finished."""
        data, path = _metadata(file), self._folder / f"{file.id}.json"

        def write() -> None:
            with path.with_suffix(".tmp").open("r+b") as stream:
                stream.write(data)
            path.with_suffix(".tmp").replace(path)

        self.guarded(write)
        with self._lock:
            self._index()[file.id] = file
            self._unfinished[file.owner] -= 1

    def drop_unfinished(self, owner: str, size: int) -> None:
        """An unfinished file, of so many bytes, has been removed."""
        self.unreserve(owner, size)
        with self._lock:
            self._unfinished[owner] -= 1

    # ---- internals

    def _index(self) -> dict[str, BatchFile]:
        if self._files is None:
            self._files = self.guarded(self._read_folder)
        return self._files

    def _read_folder(self) -> dict[str, BatchFile]:
        files: dict[str, BatchFile] = {}
        used = 0
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        for name in sorted({path.stem for path in paths if _ID.fullmatch(path.stem)}):
            base = self._folder / name
            if not _remove_remains(base) and (file := _read(base)) is not None:
                files[name] = file
                self._used_by[file.owner] += file.bytes
            with suppress(FileNotFoundError):
                used += base.with_suffix(".data").lstat().st_size  # also of those that another server is writing
        self._used = used
        return files

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

    def __init__(self, store: FileStore, file: BatchFile, stream: FileIO) -> None:
        self._store, self._file, self._stream = store, file, stream
        self._lock = threading.Lock()  # a thread goes on when the task that waits for it is cancelled

    def append(self, data: bytes) -> None:
        """Raises RequestError if the storage is full, or cannot be written; the file is then as it was before."""
        with self._lock:
            self._store.reserve(self._file.owner, len(data))
            try:
                self._store.guarded(partial(self._write, data))
            except BaseException:
                self._store.unreserve(self._file.owner, len(data))
                raise
            self._file = msgspec.structs.replace(self._file, bytes=self._file.bytes + len(data))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._stream.truncate(self._file.bytes)
                self._stream.seek(self._file.bytes)
            raise

    def finish(self) -> BatchFile:
        """Raises RequestError if the storage cannot be written."""
        with self._lock:
            self._store.add(self._file)
            self._stream.close()
            return self._file

    def discard(self) -> None:
        """Forget what was written."""
        with self._lock:
            path, size = self._store.path(self._file), self._file.bytes
            for file in (path.with_suffix(".tmp"), path):
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    logger.error("%s cannot be removed: %s", file, error)
                    size = 0  # it still counts
            self._stream.close()
            self._store.drop_unfinished(self._file.owner, size)


def _metadata(file: BatchFile) -> bytes:
    """Of the same length whatever the size of the file."""
    return msgspec.json.encode(file).ljust(len(msgspec.json.encode(msgspec.structs.replace(file, bytes=2**62))))


def _create(path: Path, metadata: bytes) -> FileIO:
    """A new file, locked until it is closed, so that no server that starts takes it for a remainder.

    Its metadata is written at once, to be overwritten at the end: what a file has must not be lost if the disk is full
    then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        stream = FileIO(path, "x")
        with suppress(OSError):  # a file system without locks: nothing is removed from it
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:  # else it was removed before it was locked
            break
        stream.close()
    try:
        path.with_suffix(".tmp").write_bytes(metadata)
    except OSError:
        for file in (path.with_suffix(".tmp"), path):
            file.unlink(missing_ok=True)
        stream.close()
        raise
    return stream


def _read(base: Path) -> BatchFile | None:
    path = base.with_suffix(".json")
    try:
        file = msgspec.json.decode(path.read_bytes(), type=BatchFile)
        size = base.with_suffix(".data").lstat().st_size
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("%s is not a stored file and is left alone: %s", path, error)
        return None
    return msgspec.structs.replace(file, id=base.name, bytes=size)


def _remove_remains(base: Path) -> bool:
    """Remove a file that is not complete, unless another server is writing it. Returns whether it is not complete."""
    data, metadata = base.with_suffix(".data"), base.with_suffix(".json")
    if data.exists() and metadata.exists():
        return False
    try:
        if data.exists():
            with data.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if metadata.exists():  # it has been finished meanwhile
                    return False
                data.unlink()
        for path in (metadata, base.with_suffix(".tmp")):
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.info("%s is not complete and is left alone: %s", base, error)
    else:
        logger.warning("%s was not complete and has been removed", base)
    return True


def _full(limit: str) -> RequestError:
    return RequestError(
        f"the file storage is full: its limit is {limit}; delete files that are no longer needed",
        code="file_storage_full",
        status=413,
    )
