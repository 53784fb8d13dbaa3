"""Models on a hub: their headers by range requests, or the whole checkpoint. Torch-free.

`read_headers` makes a folder that the readers of local models accept: small files as they are, and of each weight file
only the header, followed by a hole of the size of the weights (a sparse file, which takes no room on the disk).

    model.safetensors   | 8 bytes | header |  hole  ...                     |
    model.gguf          | metadata, tensors |  hole ... | rope_freqs | hole |

Every error of the hub becomes a ModelError. Must not know what any header means.
"""

from __future__ import annotations

import posixpath
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from srv.errors import ModelError
from srv.models.checkpoints.gguf_header import ROPE_FACTORS, header_size, part_names, read_header
from srv.models.checkpoints.safetensors_header import INDEX, MAX_HEADER_BYTES, SINGLE, leaves_folder, weight_files

# Weights in torch's pickle format are never downloaded, because srv does not load pickles.
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "tokenizer*")
CODE = "*.py"  # downloaded only if it may be run
_FACT_FILES = (
    "config.json",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "*/config.json",  # of the modules of sentence-transformers
    INDEX,
    *("quant_model_description*.json", "hf_quant_config.json"),  # of ModelSlim and ModelOpt
    *("quantize_config.json", "quant_config.json"),  # of AutoGPTQ and AutoAWQ
)
_PICKLES = ("*.bin", "*.pt", "*.pth")
_MAX_SMALL_FILE = 64 << 20
_GGUF_CHUNK = 1 << 20
_MAX_FREQ_FACTORS = 65536  # bytes; a larger tensor is refused by its reader
_CONNECTIONS = 8


class HubModel(NamedTuple):
    """A model that a hub offers. `file`: a GGUF file of the repository; None for the folder of a checkpoint.

    `cache`: the folder to which it is downloaded; None for the hub library's own.
    """

    repo: str
    file: str | None = None
    revision: str | None = None
    cache: Path | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The GGUF file, or all files of its model, the first one first. Raises ModelError if it is another one."""
        if self.file is None:
            return ()
        folder, name = posixpath.split(self.file)
        try:
            return tuple(posixpath.join(folder, each) for each in part_names(name)) or (self.file,)
        except ValueError as error:
            remedy = f"Give the first one, {posixpath.join(folder, str(error))}"
            raise ModelError("unsupported_format", self.name, "it is one of several parts", remedy) from error

    @property
    def name(self) -> str:
        """As the user wrote it, for messages."""
        name = self.repo if self.file is None else f"{self.repo}/{self.file}"
        return name if self.revision is None else f"{name}@{self.revision}"


class Listing(NamedTuple):
    """The files of a repository at one commit, with their sizes in bytes."""

    commit: str
    sizes: Mapping[str, int]


def list_files(model: HubModel) -> Listing | None:
    """The files that a hub offers; None if it cannot be reached, or if it does not tell their sizes.

    Raises ModelError with code not_found or hub_gated.
    """
    from huggingface_hub import HfApi

    try:
        with _hub_errors(model):
            info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True)
    except ModelError as error:
        if error.code in ("hub_unreachable", "hub_failed"):
            return None  # the hub's cache may have it
        raise
    sizes = {each.rfilename: each.size for each in info.siblings or () if each.size is not None}
    complete = info.sha is not None and len(sizes) == len(info.siblings or ())
    return Listing(str(info.sha), sizes) if complete and sizes else None


def is_cached(model: HubModel, listing: Listing, code: bool = False) -> bool:
    """Whether a download would find everything that it needs in the hub's cache. `code`: as in `fetch`."""
    from huggingface_hub import try_to_load_from_cache

    names = list(model.files) if model.file else [name for name in listing.sizes if _matches(name, _patterns(code))]
    cached = (try_to_load_from_cache(model.repo, name, model.cache, listing.commit) for name in names)
    return all(isinstance(each, str) for each in cached)


def fetch(model: HubModel, code: bool = False) -> Path:
    """Download a model, or find it in the hub's cache, which also works offline. `code`: with its Python files.

    Raises ModelError.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    with _hub_errors(model):
        if model.file is not None:
            files = [
                hf_hub_download(model.repo, name, revision=model.revision, cache_dir=model.cache)
                for name in model.files
            ]
            return Path(files[0]).absolute()
        found = snapshot_download(
            model.repo, revision=model.revision, allow_patterns=list(_patterns(code)), cache_dir=model.cache
        )
        return Path(found).absolute()


@contextmanager
def read_headers(model: HubModel, listing: Listing) -> Iterator[Path]:
    """A folder or GGUF file with the headers of a model, until the context ends. Its weights are holes.

    Raises ModelError with code not_found, damaged, or hub_failed (the server has no range requests). Every ModelError
    in the context names the model as the user did, since the files exist only for now.
    """
    root = Path(tempfile.mkdtemp(prefix="srv-headers-"))
    # The layout of the hub's own cache, from which the name of a model follows.
    folder = root / f"models--{model.repo.replace('/', '--')}" / "snapshots" / listing.commit
    path = folder if model.file is None else folder / Path(model.file).name
    remote = _Remote(model, listing)
    try:
        folder.mkdir(parents=True)
        if model.file is not None:
            for name in model.files:
                _copy_gguf(remote, name, folder / Path(name).name)
            _copy_factors(remote, model.files, path)
        else:
            _copy_folder(remote, folder)
        yield path
    except ModelError as error:
        raise error.renamed(str(path), model.name) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Remote:
    """Reads parts of the files of one commit."""

    def __init__(self, model: HubModel, listing: Listing) -> None:
        self.model, self.listing = model, listing

    def size(self, name: str) -> int:
        if name not in self.listing.sizes:
            raise ModelError(
                "not_found", self.model.name, f"the hub has no file {name}", "Check the repository on its page"
            )
        return self.listing.sizes[name]

    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of a file. The answer is left unread if it is not a partial one."""
        from huggingface_hub import hf_hub_url, utils

        if begin >= end:
            return b""
        url = hf_hub_url(self.model.repo, name, revision=self.listing.commit)
        client: Any = utils  # its names are imported from private modules
        headers = {**client.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with _hub_errors(self.model), client.get_session().stream("GET", url, headers=headers) as answer:
            client.hf_raise_for_status(answer)
            if answer.status_code != 206 and not (begin == 0 and end == self.size(name)):
                reason = f"the server sends whole files only, and {name} has {self.size(name)} bytes"
                raise ModelError("hub_failed", self.model.name, reason, "Download it, and give its local path")
            data: bytes = answer.read()
        if len(data) != end - begin:
            reason = f"the server sent {len(data)} bytes of {name} instead of {end - begin}"
            raise ModelError("hub_failed", self.model.name, reason, "Try again, or give a local path")
        return data


def _patterns(code: bool) -> tuple[str, ...]:
    return (*PATTERNS, CODE) if code else PATTERNS


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _copy_folder(remote: _Remote, folder: Path) -> None:
    sizes = {name: size for name, size in remote.listing.sizes.items() if not leaves_folder(name)}
    top_level = [name for name in sizes if "/" not in name]
    pickles = [name for name in top_level if _matches(name, _PICKLES)]
    offered = [name for name in top_level if name.endswith(".safetensors")]
    for name in () if offered else pickles:
        _write_sparse(folder / name, {}, sizes[name])  # what refuses pickles sees that there are some

    def copy(name: str) -> None:
        if sizes[name] > _MAX_SMALL_FILE:
            reason = f"its {name} has {sizes[name]} bytes, more than {_MAX_SMALL_FILE}"
            raise ModelError("damaged", remote.model.name, reason, "Check the repository on its page")
        _write_sparse(folder / name, {0: remote.read(name, 0, sizes[name])}, sizes[name])

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(copy, [name for name in sizes if _matches(name, _FACT_FILES)]))
        present = [name for name in weight_files(folder, offered) if name in sizes]  # readers report those that are not
        modules = [name for name in sizes if name.endswith(f"/{SINGLE}") and _config_beside(name) in sizes]
        list(pool.map(lambda name: _copy_safetensors(remote, name, folder / name), [*present, *modules]))


def _config_beside(name: str) -> str:
    return name.removesuffix(SINGLE) + "config.json"


def _copy_safetensors(remote: _Remote, name: str, path: Path) -> None:
    size = remote.size(name)
    prefix = remote.read(name, 0, min(8, size))
    length = int.from_bytes(prefix, "little")
    end = min(8 + length, size) if length <= MAX_HEADER_BYTES else len(prefix)
    _write_sparse(path, {0: prefix, 8: remote.read(name, 8, end)}, size)


def _copy_gguf(remote: _Remote, name: str, path: Path) -> None:
    """Chunks until the header is complete."""
    size = remote.size(name)
    data = b""
    while len(data) < size:
        end = min(size, len(data) + max(_GGUF_CHUNK, len(data) // 2))
        data += remote.read(name, len(data), end)
        _write_sparse(path, {0: data}, len(data))
        if header_size(path) is not None:
            break
    _write_sparse(path, {0: data}, size)


def _copy_factors(remote: _Remote, names: Sequence[str], path: Path) -> None:
    """The only tensors of which the reader of facts needs the values; `path`: of the first of the files."""
    header = read_header(path)
    found = (header.tensors[each] for each in ROPE_FACTORS if each in header.tensors)
    for tensor in found:
        if tensor.size <= _MAX_FREQ_FACTORS:
            with header.paths[tensor.file].open("r+b") as file:
                file.seek(tensor.offset)
                file.write(remote.read(names[tensor.file], tensor.offset, tensor.offset + tensor.size))


def _write_sparse(path: Path, parts: Mapping[int, bytes], size: int) -> None:
    """A file of `size` bytes with these parts, by their offsets; the rest is a hole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)
        file.truncate(size)


@contextmanager
def _hub_errors(model: HubModel) -> Iterator[None]:
    """Turn every error of the hub's client into a ModelError."""
    from huggingface_hub import errors as hub

    try:
        yield
    except ModelError:
        raise
    except hub.GatedRepoError as error:
        remedy = "Ask for access on its hub page, then log in with `hf auth login`"
        raise ModelError("hub_gated", model.name, "the hub restricts it to approved accounts", remedy) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        remedy = "Check the id, or give the path of a local file or folder"
        raise ModelError("not_found", model.name, "it is neither a local path nor on the hub", remedy) from error
    except (hub.RevisionNotFoundError, hub.RemoteEntryNotFoundError) as error:
        reason = "the hub has no such revision or file"
        raise ModelError("not_found", model.name, reason, "Check both on its page") from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        reason = "it is neither a local path nor in the hub's cache, and the hub cannot be reached"
        remedy = "Connect to the network, or give a local path"
        raise ModelError("hub_unreachable", model.name, reason, remedy) from error
    except Exception as error:  # the hub's HTTP client may raise anything
        remedy = "Try again, or give a local path"
        raise ModelError("hub_failed", model.name, f"fetching it failed: {error}", remedy) from error
