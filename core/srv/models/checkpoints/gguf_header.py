"""A strict reader of GGUF headers: metadata and the table of tensors, never the weights. Torch-free.

Owns the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian). Must
not know the meaning of any key. Files are untrusted: each length is checked against the remaining bytes of the file
before it is used to read or to allocate anything.

    magic "GGUF" | version u32 | number of tensors u64 | number of metadata pairs u64
    each pair:   key string | type u32 | value               (string: length u64, UTF-8 bytes)
    each tensor: name string | number of axes u32 | one u64 per axis, fastest first | type u32 | offset u64
    padding to general.alignment, then the tensors' data
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from bisect import insort
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TENSOR_TYPES, TensorType

ROPE_FREQ_FACTORS = "rope_freqs.weight"  # divides the RoPE frequencies: configuration, not a weight
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # likewise, one or the other
ROPE_FACTORS = (ROPE_FREQ_FACTORS, *LONG_ROPE_FACTORS)
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_KEY_BYTES = 65535
MAX_ENTRIES = 1 << 20  # of tensors, and of metadata pairs
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
PARTS, PART = "split.count", "split.no"
MAX_PARTS = 1000
_PART = re.compile(r"(?P<name>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DOWNLOAD_AGAIN = "The file is incomplete or damaged: download it again and compare its checksum"


TableEntry = tuple[str, tuple[int, ...], TensorType, int]  # name, shape, type, offset from the start of the data


class GGUFTensor(NamedTuple):
    """One tensor of a file. `shape`: slowest axis first, as in torch; `offset` from the start of the file; in bytes.

    `rows`: of a part of a stored tensor, which rows it consists of, counted from `offset`; None: consecutive ones.
    `file`: of a model in several files, which one has it.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size: int
    rows: tuple[int, ...] | None = None
    file: int = 0


class GGUFHeader(NamedTuple):
    """The header of a file, or of all files of a model, whose metadata are those of the first one.

    `paths`: of the files. `metadata` contains the scalars (int, float, bool, str) and the requested arrays (tuples);
    `skipped` has the lengths of the other arrays. `tensors`: by name, in file order. `found`: for each array that was
    searched, the first index of each string that was found in it.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    skipped: Mapping[str, int] = MappingProxyType({})
    found: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    paths: tuple[Path, ...] = ()


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a model, from that of one; () if it is not named as one of several.

    Raises ValueError if it is not the first one.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return ()
    if int(found["part"]) != 1:
        raise ValueError(f"{found['name']}-{1:05}-of-{found['count']}.gguf")
    count = min(int(found["count"]), MAX_PARTS)
    return tuple(f"{found['name']}-{part:05}-of-{found['count']}.gguf" for part in range(1, count + 1))


def read_header(
    path: Path | str,
    decode_arrays: Collection[str] | None = (),
    search: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> GGUFHeader:
    """Read the header of a GGUF file. If the model is in several, `path` is the first one, and all are read.

    `decode_arrays`: keys of the arrays to decode, which may lack the architecture's prefix; the others are skipped.
    None decodes every array.
    `search`: strings to search for in arrays of strings that are skipped, by key. This takes a fifth of the time of
    decoding the array. Raises ModelError with code not_found, truncated, damaged or unsupported_format.
    """
    path = Path(path)
    header = _read_file(path, decode_arrays, search)
    count = header.metadata.get(PARTS, 1)
    if not isinstance(count, int) or count <= 1:
        return header._replace(paths=(path,))
    try:
        names = part_names(path.name)
    except ValueError as error:
        raise _not_whole(path, count, f"Give the first one, {error}") from error
    if len(names) != count:
        raise _not_whole(
            path, count, "Name them NAME-00001-of-00003.gguf, or join them with `llama-gguf-split --merge`"
        )
    tensors = dict(header.tensors)
    for number, name in enumerate(names[1:], 1):
        part = _read_file(path.with_name(name), (), MappingProxyType({}))
        if part.metadata.get(PARTS) != count or part.metadata.get(PART) != number or tensors.keys() & part.tensors:
            reason = f"{name} is not part {number + 1} of this model"
            raise ModelError("damaged", str(path), reason, "Download all parts from one place")
        tensors |= {name: tensor._replace(file=number) for name, tensor in part.tensors.items()}
    return header._replace(tensors=tensors, paths=tuple(path.with_name(name) for name in names))


def _not_whole(path: Path, count: int, remedy: str) -> ModelError:
    return ModelError("unsupported_format", str(path), f"it is one of {count} parts", remedy)


def _read_file(path: Path, decode_arrays: Collection[str] | None, search: Mapping[str, Collection[str]]) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelError(
                    "truncated", str(path), f"it has {size} bytes, fewer than any GGUF header", DOWNLOAD_AGAIN
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, decode_arrays, search).read()
    except OSError as error:
        remedy = "Give the path of a GGUF file that this user may read"
        raise ModelError("not_found", str(path), f"it cannot be read ({error.strerror})", remedy) from error


def header_size(path: Path) -> int | None:
    """The number of bytes of the header, if this beginning of a GGUF file contains it; None if it ends within it.

    Raises ModelError like `read_header`.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data, (), {})
            reader.read_table()
            return reader.position
    except ModelError as error:
        if error.code == "truncated":
            return None
        raise


class _Reader:
    """Reads the memory-mapped file from front to back. `position` is the offset of the next byte."""

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        decode_arrays: Collection[str] | None,
        search: Mapping[str, Collection[str]],
    ) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0
        self.decode_arrays = decode_arrays
        self.search = search
        self.skipped: dict[str, int] = {}
        self.found: dict[str, dict[str, int]] = {}

    def read(self) -> GGUFHeader:
        metadata, table = self.read_table()
        return GGUFHeader(self.path, metadata, self._resolve_offsets(table, metadata), self.skipped, self.found)

    def read_table(self) -> tuple[dict[str, Any], list[TableEntry]]:
        """The metadata, and the table of tensors with offsets from the start of the data."""
        self._preamble()
        tensors, pairs = self._count("tensor", 32), self._count("metadata pair", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string(limit=MAX_KEY_BYTES)
            if key in metadata or key in self.skipped:
                self._raise_damaged(f"metadata key {key!r} occurs twice")
            value = self._value(key)
            if value is not None:
                metadata[key] = value
        return metadata, [self._tensor() for _ in range(tensors)]

    def _preamble(self) -> None:
        """Check the magic and the version."""
        magic = self.data[:4]
        if magic != MAGIC:
            reason = f"it begins with {magic!r} instead of {MAGIC!r}"
            raise ModelError("damaged", str(self.path), reason, "Give the path of a GGUF file")
        self.position = 4
        version = int(self._scalar("I"))
        if version not in VERSIONS:
            found = "of a big-endian machine" if version >> 16 else f"of version {version}"
            reason = f"it is a GGUF file {found}; srv reads versions {VERSIONS}, little-endian"
            raise ModelError("unsupported_format", str(self.path), reason, "Convert it with a recent llama.cpp")

    def _raise_damaged(self, reason: str) -> NoReturn:
        raise ModelError("damaged", str(self.path), f"{reason} (near byte {self.position})", DOWNLOAD_AGAIN)

    def _require(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            reason = (
                f"{what} at byte {self.position} needs {count} bytes, but only {self.size - self.position} are left"
            )
            raise ModelError("truncated", str(self.path), reason, DOWNLOAD_AGAIN)

    def _scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self._require(width, "a number")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += width
        return value

    def _count(self, what: str, smallest: int) -> int:
        """A number of items of at least `smallest` bytes each, which limits how many the file can contain."""
        count = int(self._scalar("Q"))
        if count > MAX_ENTRIES:
            self._raise_damaged(f"its header declares {count} {what}s, more than {MAX_ENTRIES}")
        self._require(count * smallest, f"a list of {count} {what}s")
        return count

    def _string(self, limit: int | None = None) -> str:
        length = int(self._scalar("Q"))
        if limit is not None and length > limit:
            self._raise_damaged(f"a name of {length} bytes is longer than the {limit} allowed")
        self._require(length, "a string")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._raise_damaged("a string is not UTF-8")

    def _value(self, key: str) -> Any:
        """The value of a metadata pair; None for an array that is skipped (its length is added to `skipped`)."""
        kind = int(self._scalar("I"))
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(self._code(kind, key))
        kind = int(self._scalar("I"))
        count = int(self._scalar("Q"))
        wanted = self.decode_arrays
        decode = wanted is None or key in wanted or key.partition(".")[2] in wanted
        if kind == STRING:
            return self._strings(key, count, decode)
        code = f"{count}{self._code(kind, key)}"
        width = count * struct.calcsize("<" + self._code(kind, key))
        self._require(width, f"array {key!r}")
        start, self.position = self.position, self.position + width
        if not decode:
            self.skipped[key] = count
            return None
        return struct.unpack_from("<" + code, self.data, start)

    def _code(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            self._raise_damaged(f"metadata key {key!r} has the unknown type {kind}")
        return SCALARS[kind]

    def _strings(self, key: str, count: int, decode: bool) -> tuple[str, ...] | None:
        """An array of strings; None if it is skipped."""
        self._require(count * 8, f"array {key!r}")
        if decode:
            return tuple(self._string() for _ in range(count))
        self._skip_strings(key, count)
        self.skipped[key] = count
        return None

    def _skip_strings(self, key: str, count: int) -> None:
        """Skip an array of strings, recording the first index of each string that is searched for.

        Vocabularies have about 10^5 entries, so this is a plain loop over the lengths.
        """
        unpack, data, begin = struct.Struct("<Q").unpack_from, self.data, self.position
        end = begin
        try:  # a length beyond the end of the file is detected when the next one is read there, or by the check below
            for _ in range(count):
                end += 8 + unpack(data, end)[0]
        except (struct.error, OverflowError):
            end += 8
        self._require(end - begin, f"array {key!r}")
        self.position = end
        if searched := self.search.get(key):
            self.found[key] = self._find_strings(begin, end, searched)

    def _find_strings(self, begin: int, end: int, searched: Collection[str]) -> dict[str, int]:
        """The first index of each searched string in an array of strings that occupies bytes [begin, end).

        The bytes of a string with its length are searched first; only up to where they occur are strings counted.
        """
        unpack, data = struct.Struct("<Q").unpack_from, self.data
        encoded = {text: struct.pack("<Q", len(raw := text.encode())) + raw for text in searched}
        pending = sorted((data.find(entry, begin, end), text) for text, entry in encoded.items())
        found: dict[str, int] = {}
        position, index = begin, 0
        while pending:
            place, text = pending.pop(0)
            while position < place:
                position += 8 + unpack(data, position)[0]
                index += 1
            if position == place:
                found[text] = index
            elif place >= 0 and (later := data.find(encoded[text], position, end)) >= 0:
                insort(pending, (later, text))  # those bytes were a part of another string
        return found

    def _tensor(self) -> TableEntry:
        name = self._string(limit=MAX_KEY_BYTES)
        axes = int(self._scalar("I"))
        if not 1 <= axes <= MAX_AXES:
            self._raise_damaged(f"tensor {name!r} has {axes} axes, not 1 to {MAX_AXES}")
        shape = tuple(int(self._scalar("Q")) for _ in range(axes))[::-1]
        kind = int(self._scalar("I"))
        if kind not in TENSOR_TYPES:
            reason = f"tensor {name!r} has the unknown type {kind}"
            raise ModelError(
                "unsupported_quantization", str(self.path), reason, "Use a file of another quantization type"
            )
        if 0 in shape or shape[-1] % TENSOR_TYPES[kind].elements:
            self._raise_damaged(f"tensor {name!r} of type {TENSOR_TYPES[kind].name} cannot have the shape {shape}")
        return name, shape, TENSOR_TYPES[kind], int(self._scalar("Q"))

    def _resolve_offsets(self, table: list[TableEntry], metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
        """The tensors with offsets from the start of the file. Checks that the data of each is within the file."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            self._raise_damaged(f"general.alignment is {alignment!r}, not a multiple of 8")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end = 0  # of the tensors so far, from the start of the data
        for name, shape, kind, offset in sorted(table, key=lambda entry: entry[3]):
            size = math.prod(shape) // kind.elements * kind.size
            if name in tensors or offset % alignment:
                self._raise_damaged(f"tensor {name!r} occurs twice or has the unaligned offset {offset}")
            if start + offset + size > self.size:
                reason = f"tensor {name!r} ends at byte {start + offset + size} but the file has only {self.size}"
                raise ModelError("truncated", str(self.path), reason, DOWNLOAD_AGAIN)
            if offset != end:
                state = "overlaps the one before it" if offset < end else "does not follow the one before it"
                self._raise_damaged(f"tensor {name!r} at offset {offset} {state}, which ends at {end}")
            tensors[name] = GGUFTensor(name, shape, kind, start + offset, size)
            end = -(-(offset + size) // alignment) * alignment
        return {name: tensors[name] for name, *_ in table}
