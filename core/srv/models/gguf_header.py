"""A strict reader of GGUF headers: metadata and the table of tensors, never the weights. Torch-free.

Owns the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian). Must not know what any key means. A file comes from anywhere, so nothing in it is believed:
each length is checked against the bytes that are left before anything is read or allocated by it.

    magic "GGUF" | version u32 | tensors u64 | pairs u64
    pairs:   key string | type u32 | value               (string: length u64, UTF-8 bytes)
    tensors: name string | axes u32 | u64 an axis, fastest first | type u32 | offset u64
    padding to general.alignment, then the tensors' data
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from srv.errors import ModelError
from srv.models.gguf_types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_KEY_BYTES = 65535
MAX_ENTRIES = 1 << 20
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FETCH_AGAIN = "The file is incomplete or damaged: fetch it again and compare its checksum"


class GGUFTensor(NamedTuple):
    """One tensor of a file. `shape` as torch would print it (slowest axis first); offsets and sizes in bytes."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size: int


class GGUFHeader(NamedTuple):
    """What a file says before its weights.

    `metadata` holds scalars (int, float, bool, str) and the arrays that were asked for (tuples); `skipped`
    gives the lengths of the others. `tensors` in file order, offsets from the file's start. `places`: for each
    array that was searched, the texts that it holds, each with its first position.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    skipped: Mapping[str, int] = MappingProxyType({})
    places: Mapping[str, Mapping[str, int]] = MappingProxyType({})


def read_header(
    path: Path | str,
    want_arrays: Collection[str] | None = (),
    find: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> GGUFHeader:
    """Read the header of a GGUF file.

    `want_arrays`: keys of the arrays to decode; the others are walked over. None decodes every array.
    `find`: texts to look up in arrays of strings that are walked over; a fifth of the cost of decoding them.
    Raises ModelError with code not_found, truncated, damaged or unsupported_format.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelError("truncated", str(path), f"it has {size} bytes, fewer than any header", FETCH_AGAIN)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, want_arrays, find).read()
    except OSError as error:
        remedy = "Give the path of a GGUF file that this user may read"
        raise ModelError("not_found", str(path), f"it cannot be read ({error.strerror})", remedy) from error


class _Reader:
    """A cursor over the mapped file. `at` is the next byte; `take` is the only way forward."""

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        want_arrays: Collection[str] | None,
        find: Mapping[str, Collection[str]],
    ) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.want_arrays = want_arrays
        self.find = find
        self.skipped: dict[str, int] = {}
        self.places: dict[str, dict[str, int]] = {}

    def read(self) -> GGUFHeader:
        version = self._begin()
        tensors, pairs = self._count("tensor", 32), self._count("metadata pair", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string(limit=MAX_KEY_BYTES)
            if key in metadata or key in self.skipped:
                self._damaged(f"metadata key {key!r} occurs twice")
            value = self._value(key)
            if value is not None:
                metadata[key] = value
        table = [self._tensor() for _ in range(tensors)]
        return GGUFHeader(self.path, version, metadata, self._place(table, metadata), self.skipped, self.places)

    def _begin(self) -> int:
        magic = self.data[:4]
        if magic != MAGIC:
            reason = f"it begins with {magic!r} where a GGUF file has {MAGIC!r}"
            raise ModelError("damaged", str(self.path), reason, "Give a GGUF file")
        self.at = 4
        version = int(self._scalar("I"))
        if version not in VERSIONS:
            order = "of a big-endian machine" if version >> 16 else f"of version {version}"
            reason = f"it is a GGUF file {order}; srv reads versions {VERSIONS}, little-endian"
            raise ModelError("unsupported_format", str(self.path), reason, "Convert it with a recent llama.cpp")
        return version

    def _damaged(self, reason: str) -> NoReturn:
        raise ModelError("damaged", str(self.path), f"{reason} (near byte {self.at})", FETCH_AGAIN)

    def _need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            reason = f"{what} at byte {self.at} needs {count} bytes and the file ends after {self.size - self.at}"
            raise ModelError("truncated", str(self.path), reason, FETCH_AGAIN)

    def _scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self._need(width, "a number")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value

    def _count(self, what: str, smallest: int) -> int:
        """A number of things that take at least `smallest` bytes each, so that it cannot be absurd."""
        count = int(self._scalar("Q"))
        if count > MAX_ENTRIES:
            self._damaged(f"it announces {count} {what}s, more than {MAX_ENTRIES}")
        self._need(count * smallest, f"a list of {count} {what}s")
        return count

    def _string(self, limit: int | None = None) -> str:
        length = int(self._scalar("Q"))
        if limit is not None and length > limit:
            self._damaged(f"a name of {length} bytes is longer than the {limit} allowed")
        self._need(length, "a string")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._damaged("a string is not UTF-8")

    def _value(self, key: str) -> Any:
        """The value of a pair; None for an array that nobody asked for (its length goes to `skipped`)."""
        kind = int(self._scalar("I"))
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(self._code(kind, key))
        kind = int(self._scalar("I"))
        count = int(self._scalar("Q"))
        wanted = self.want_arrays is None or key in self.want_arrays
        if kind == STRING:
            return self._strings(key, count, wanted)
        code = f"{count}{self._code(kind, key)}"
        width = count * struct.calcsize("<" + self._code(kind, key))
        self._need(width, f"array {key!r}")
        start, self.at = self.at, self.at + width
        if not wanted:
            self.skipped[key] = count
            return None
        return struct.unpack_from("<" + code, self.data, start)

    def _code(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            self._damaged(f"metadata key {key!r} has the unknown type {kind}")
        return SCALARS[kind]

    def _strings(self, key: str, count: int, wanted: bool) -> tuple[str, ...] | None:
        """An array of strings. Vocabularies have some 10^5, so the walk is a plain loop over lengths."""
        self._need(count * 8, f"array {key!r}")
        if wanted:
            return tuple(self._string() for _ in range(count))
        self._walk(key, count)
        self.skipped[key] = count
        return None

    def _walk(self, key: str, count: int) -> None:
        """Pass over an array of strings, noting where the texts lie that are looked for in it."""
        texts = {text.encode(): text for text in self.find.get(key, ())}
        lengths = {len(raw) for raw in texts}
        places: dict[str, int] = {}
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        try:  # a length that leads out of the file is noticed when the next one is read there, or by the last check
            if not texts:
                for _ in range(count):
                    at += 8 + unpack(data, at)[0]
            for place in range(count) if texts else ():
                (length,) = unpack(data, at)
                at += 8 + length
                if length in lengths and (text := texts.get(data[at - length : at])) is not None:
                    places.setdefault(text, place)
        except (struct.error, OverflowError):
            at += 8
        self._need(at - self.at, f"array {key!r}")
        self.at = at
        if texts:
            self.places[key] = places

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string(limit=MAX_KEY_BYTES)
        axes = int(self._scalar("I"))
        if not 1 <= axes <= MAX_AXES:
            self._damaged(f"tensor {name!r} has {axes} axes; 1 to {MAX_AXES} are possible")
        shape = tuple(int(self._scalar("Q")) for _ in range(axes))[::-1]
        kind = int(self._scalar("I"))
        if kind not in TENSOR_TYPES:
            reason = f"tensor {name!r} has type {kind}, which srv does not know"
            raise ModelError("unsupported_quantization", str(self.path), reason, "Use a file of another quantization")
        if 0 in shape or shape[-1] % TENSOR_TYPES[kind].elements:
            self._damaged(f"tensor {name!r} of type {TENSOR_TYPES[kind].name} cannot have the shape {shape}")
        return name, shape, TENSOR_TYPES[kind], int(self._scalar("Q"))

    def _place(
        self, table: list[tuple[str, tuple[int, ...], TensorType, int]], metadata: Mapping[str, Any]
    ) -> dict[str, GGUFTensor]:
        """Offsets from the file's start, each tensor's data checked to lie within the file."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            self._damaged(f"general.alignment is {alignment!r}, not a multiple of 8")
        start = -(-self.at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in table:
            size = math.prod(shape) // kind.elements * kind.size
            if name in placed or offset % alignment:
                self._damaged(f"tensor {name!r} occurs twice or lies at the unaligned offset {offset}")
            if start + offset + size > self.size:
                reason = f"tensor {name!r} ends at byte {start + offset + size} and the file has {self.size}"
                raise ModelError("truncated", str(self.path), reason, FETCH_AGAIN)
            placed[name] = GGUFTensor(name, shape, kind, start + offset, size)
        return placed
