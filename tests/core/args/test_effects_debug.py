"""Arguments of the group debug have an effect: with two values of each, a small engine behaves differently.

Each test starts the same engine as `srv launch` with these flags.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import OUTPUT, Small, engine, make_small, message, messages
from platform_plugins import write_plugin
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.errors import EngineDead, ModelError, Refusal
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

HOOK = f"""
from srv.platform.forward_hooks import ForwardHook

def make(config):
    from {__name__} import follow
    return follow(config)

HOOK = ForwardHook("zero", make)
"""
NAN_MODULE = "model.layers.1.mlp"
called: list[str] = []


def follow(config: Mapping[str, Any]) -> Any:
    """The forward hook that the tests install: it records the modules, and multiplies what they return."""

    def after(name: str, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        called.append(name)
        return output * config["factor"] if "factor" in config else None

    return after


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def broken(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The model with a NaN in the second layer's MLP."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(small.folder, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights[f"{NAN_MODULE}.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, file, {"format": "pt"})
    return Small(folder, small.model, small.prompts, small.tokens)


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward hook "zero" is installed."""
    write_plugin(tmp_path, "zero", HOOK, group="srv.forward_hooks", entry="zero", attribute="HOOK")
    monkeypatch.syspath_prepend(tmp_path)
    called.clear()


def tokens(small: Small, **flags: object) -> list[list[int]]:
    with engine(small, disable_graphs=True, **flags) as served:
        return [result.tokens for result in served.generate(messages(small.prompts[:2]))]


def hooks(**entry: Any) -> str:
    return json.dumps([{"hook": "zero", "target_modules": ["model.layers.*.mlp"], **entry}])


def dumped(folder: Path) -> list[dict[str, Tensor]]:
    return [load_file(file) for file in sorted((folder / "rank-0").iterdir())]


@covers("debug_tensor_dump_output_folder", platform="cpu")
def test_debug_tensor_dump_output_folder(small: Small, tmp_path: Path) -> None:
    """The dumped embedding and logits' input are what transformers computes for the prompt."""
    prompt = small.prompts[3]
    with engine(small, disable_graphs=True, debug_tensor_dump_output_folder=tmp_path) as served:
        (result,) = served.generate([message("a", prompt, 3)])
    assert result.tokens == small.tokens[3][:3]
    steps = dumped(tmp_path)
    assert len(steps) == 3
    embedded = steps[0]["model.embed_tokens"]
    expected = small.model.get_input_embeddings()(torch.tensor(prompt))
    assert torch.allclose(embedded.reshape(expected.shape), expected, atol=1e-5)
    assert {"model.layers.0.mlp", "model.layers.1.mlp"} <= steps[0].keys()
    assert len(steps[1]["model.embed_tokens"]) == 1
    with safe_open(sorted((tmp_path / "rank-0").iterdir())[0], "pt") as file:
        assert json.loads(file.metadata()["rows"]) == [{"request": "a", "position": 0, "positions": len(prompt)}]


@covers("debug_tensor_dump_prefill_only=true", "debug_tensor_dump_prefill_only=false", platform="cpu")
def test_debug_tensor_dump_prefill_only(small: Small, tmp_path: Path) -> None:
    for folder, flags in (("all", {}), ("prefill", {"debug_tensor_dump_prefill_only": True})):
        with engine(small, disable_graphs=True, debug_tensor_dump_output_folder=tmp_path / folder, **flags) as served:
            served.generate([message("a", small.prompts[3], 4)])
    assert [len(dumped(tmp_path / folder)) for folder in ("all", "prefill")] == [4, 1]


@covers("debug_tensor_dump_input_file", platform="cpu")
def test_debug_tensor_dump_input_file(small: Small, tmp_path: Path) -> None:
    file, folder = tmp_path / "prompt.json", tmp_path / "dumps"
    file.write_text(json.dumps(small.prompts[3]))
    flags = {"debug_tensor_dump_output_folder": folder, "debug_tensor_dump_input_file": file}
    with engine(small, disable_graphs=True, **flags) as served:
        served.generate([message("a", small.prompts[4], 4)])
        assert not dumped(folder)
        served.generate([message("b", small.prompts[3], 2)])
    assert len(dumped(folder)) == 2


@covers("forward_hooks", platform="cpu")
@pytest.mark.usefixtures("hook")
def test_forward_hooks(small: Small) -> None:
    """A hook that returns None only looks; one that returns a tensor changes what the next layer gets."""
    assert tokens(small, forward_hooks=hooks()) == small.tokens[:2]
    assert set(called) == {f"model.layers.{number}.mlp" for number in range(3)}
    assert tokens(small, forward_hooks=hooks(config={"factor": 0})) != small.tokens[:2]


@pytest.mark.usefixtures("hook")
def test_refusals(small: Small, tmp_path: Path) -> None:
    """Of hooks that are not installed, modules that do not exist, and values without an effect."""
    for flags, said in (
        ({"forward_hooks": hooks(hook="other")}, "no installed package has a forward hook called 'other'"),
        ({"forward_hooks": hooks(hook_factory="os:system")}, "the key 'hook_factory'"),
        ({"forward_hooks": hooks(target_modules=["nothing.*"])}, "no module is called nothing.*"),
        ({"forward_hooks": hooks(), "enable_torch_compile": True}, "a compiled step does not run the code"),
        ({"debug_tensor_dump_prefill_only": True}, "debug_tensor_dump_output_folder is not set"),
        ({"debug_tensor_dump_input_file": tmp_path, "debug_tensor_dump_output_folder": tmp_path}, "cannot be read"),
    ):
        with pytest.raises((Refusal, ModelError)) as refused, engine(small, disable_graphs=True, **flags):
            pass
        assert said in str(refused.value)


@covers("enable_nan_detection=true", "enable_nan_detection=false", platform="cpu")
def test_enable_nan_detection(broken: Small, caplog: pytest.LogCaptureFixture) -> None:
    """The request ends with an error either way; the log names the module only if that is asked for."""
    for flags, named in (({}, False), ({"enable_nan_detection": True}, True)):
        caplog.clear()
        with engine(broken, disable_graphs=True, **flags) as served:
            (result,) = served.generate([message("a", broken.prompts[3], 2)])
        assert result.error is not None
        assert result.error[0] == "non_finite_logits"
        actual = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
        assert bool(actual) is named
        assert not named or f"{NAN_MODULE}" in actual[0]


@covers("crash_on_nan=true", "crash_on_nan=false", platform="cpu")
def test_crash_on_nan(broken: Small, small: Small) -> None:
    with engine(broken) as served:
        assert served.generate([message("a", broken.prompts[3], 2)])[0].error is not None
    with pytest.raises(EngineDead, match="--crash-on-nan"), engine(broken, crash_on_nan=True) as served:
        served.generate([message("a", broken.prompts[3], 2)])
    with engine(small, crash_on_nan=True) as served:
        assert len(served.generate([message("a", small.prompts[3], OUTPUT)])[0].tokens) == OUTPUT
