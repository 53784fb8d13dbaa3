"""Arguments on how weight files are found, read and removed: two values of each, and what is refused."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_small import Small, engine, make_small, messages
from every import every
from models_small import write_gguf
from platform_plugins import write_plugin

from srv.errors import Refusal
from srv.worker.progress import LoadProgress
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

THREADS = '{"enable_multithread_load": true, "num_threads": 3}'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"))


def tokens(small: Small, **flags: Any) -> list[tuple[int, ...]]:
    with engine(small, **flags) as served:
        return [result.tokens for result in served.generate(messages(small.prompts))]


def refused(small: Small, **flags: Any) -> tuple[str, str]:
    """Code and text of the first refusal of an engine with these arguments."""
    with pytest.raises(Refusal) as error, engine(small, **flags):
        pass
    return error.value.rejections[0].code, str(error.value)


class Seen(LoadProgress):
    """Notes the threads that load, and whether the weight file of `folder` is mapped meanwhile."""

    threads: set[str]
    mapped: set[bool]
    folder: Path

    def __call__(self, total_bytes: int, done_bytes: int, name: str) -> None:
        if name:
            self.threads.add(threading.current_thread().name.partition("_")[0])
            self.mapped.add(str(self.folder / "model.safetensors") in Path("/proc/self/maps").read_text())
        super().__call__(total_bytes, done_bytes, name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> type[Seen]:
    from srv.worker import load

    Seen.threads, Seen.mapped, Seen.folder = set(), set(), Path()
    monkeypatch.setattr(load, "LoadProgress", Seen)
    return Seen


@covers("weight_loader_disable_mmap=true", "weight_loader_disable_mmap=false", platform="cpu")
def test_weight_loader_disable_mmap(small: Small, seen: type[Seen], tmp_path: Path) -> None:
    """Each engine has its own copy of the weights: a file may stay mapped until the engine before it is collected."""
    for value, flags in ((True, {}), (False, {"weight_loader_disable_mmap": True})):
        seen.mapped, seen.folder = set(), tmp_path / str(value)
        shutil.copytree(small.folder, seen.folder)
        assert tokens(replace(small, folder=seen.folder), **flags) == small.tokens
        assert seen.mapped == {value}


@covers("model_loader_extra_config", platform="cpu")
def test_model_loader_extra_config(small: Small, seen: type[Seen]) -> None:
    for flags, threads in (({}, {"MainThread"}), ({"model_loader_extra_config": THREADS}, {"load"})):
        seen.threads = set()
        assert tokens(small, **flags) == small.tokens
        assert seen.threads == threads


LOADER = """
from pathlib import Path

from safetensors.torch import load_file
from srv.models.checkpoints.third_party import LoaderFacts
from srv.models.checkpoints.weight_source import WeightSource


class Elsewhere(WeightSource):
    def __init__(self, model):
        super().__init__(model)
        self.tensors = load_file(Path(model.path).parent / "elsewhere.safetensors")

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


LOADER = LoaderFacts("elsewhere", "plugin_acme.manifest:Elsewhere", lambda model: None)
"""


@covers("custom_weight_loader", platform="cpu")
def test_custom_weight_loader(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without weight files is served with what the loader of a package gives; without it, it is refused."""
    write_plugin(tmp_path / "site", "acme", LOADER, group="srv.weight_loaders", entry="elsewhere", attribute="LOADER")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = tmp_path / "model"
    shutil.copytree(small.folder, folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    assert tokens(small, model_path=folder, custom_weight_loader="elsewhere") == small.tokens
    assert refused(small, model_path=folder)[0] == "format_not_there"


@covers("download_dir", platform="cpu", note="a made-up hub")
def test_download_dir(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are downloaded to the folder, and found in it."""
    import huggingface_hub

    other = make_small("llama", tmp_path / "other", num_hidden_layers=1)
    folders = {None: small.folder, tmp_path / "models": other.folder}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, cache_dir, **more: str(folders[cache_dir]))
    assert tokens(small, model_path="org/name") == small.tokens
    assert tokens(other, model_path="org/name", download_dir=tmp_path / "models") == other.tokens
    assert refused(small, download_dir=tmp_path)[0] == "inert"


@covers("delete_ckpt_after_loading=true", "delete_ckpt_after_loading=false", platform="cpu")
def test_delete_ckpt_after_loading(small: Small, tmp_path: Path) -> None:
    copy = Small(tmp_path / "copy", small.model, small.prompts, small.tokens)
    shutil.copytree(small.folder, copy.folder)
    assert tokens(copy) == small.tokens
    assert (copy.folder / "model.safetensors").is_file()
    assert tokens(copy, delete_ckpt_after_loading=True) == small.tokens
    assert [path.name for path in copy.folder.glob("*.safetensors")] == []
    assert (copy.folder / "config.json").is_file()
    write_gguf(tmp_path / "model.gguf", small.model, "llama")
    code, text = refused(Small(tmp_path / "model.gguf", None, [], []), delete_ckpt_after_loading=True)
    assert (code, "also holds the tokenizer" in text) == ("excluded", True)
    assert (tmp_path / "model.gguf").is_file()


@every(
    ("flags", "code", "named"),
    [
        ({"model_loader_extra_config": '{"threads": 3}'}, "bad_value", "no setting 'threads'; it has enable_mul"),
        ({"model_loader_extra_config": '{"num_threads": 3}'}, "bad_value", "has no effect while"),
        (
            {"model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 0}'},
            "bad_value",
            "num_threads is 0; it must be an integer from 1 to",
        ),
        ({"model_loader_extra_config": '{"enable_multithread_load": 1}'}, "bad_value", "is 1; it must be true"),
        ({"model_loader_extra_config": "[]"}, "bad_value", "a JSON object"),
        ({"model_loader_extra_config": THREADS, "load_format": "dummy"}, "inert", "random weights"),
        ({"weight_loader_disable_mmap": True, "load_format": "dummy"}, "inert", "random weights"),
        ({"weight_loader_disable_mmap": True, "model_impl": "transformers"}, "inert", "for layers of transformers"),
        ({"delete_ckpt_after_loading": True, "load_format": "dummy"}, "excluded", "random weights have no files"),
        ({"load_format": "remote"}, "planned", "from files of this machine"),
        ({"load_format": "runai_streamer"}, "planned", "from files of this machine"),
        ({"model_path": "s3://bucket/model"}, "unsupported_format", "it is an address (s3://)"),
        ({"custom_weight_loader": "a.b"}, "bad_value", "no installed package has a weight loader 'a.b'"),
        ({"remote_instance_weight_loader_seed_instance_ip": "host"}, "planned", "another running server"),
    ],
)
def test_what_has_no_effect_or_is_not_there_is_refused(
    small: Small, flags: dict[str, Any], code: str, named: str
) -> None:
    actual_code, text = refused(small, **flags)
    assert actual_code == code
    assert named in text
