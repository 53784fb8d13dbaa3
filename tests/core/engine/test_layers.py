"""A backend that cannot compute a layer is refused at plan, at launch and at load, before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attention_naive import NaiveAttention
from engine_small import FIELDS
from models_small import SIZES, randomized, small_model
from platform_plugins import write_plugin
from transformers import AutoConfig, AutoModelForCausalLM

from srv.cli.main import main
from srv.errors import PluginError, Refusal, StartError
from srv.planning.resolution import LaunchContext, resolve_launch
from srv.platform.interface import BackendContext
from srv.specs import AttentionLayer
from srv.testing.engine import LocalEngine, user_input

SPEC = f"""
from srv.platform.facts import BackendSpec, Requires

SPEC = BackendSpec(
    "{{name}}", 99, lambda context: Requires(), "{__name__}:{{target}}", "page_token_head", traits={{traits}}
)
"""
Install = Callable[..., None]


class Uncapped(NaiveAttention):
    """A backend whose kernel caps no scores."""

    def supports(self, layer: AttentionLayer) -> str | None:
        return None if layer.soft_cap is None else f"its kernel caps no scores (soft cap {layer.soft_cap})"


class Windowless(NaiveAttention):
    """A backend whose kernel masks no windows."""

    def supports(self, layer: AttentionLayer) -> str | None:
        return None if layer.window is None else "no windows here"


class Silent:
    """An attention backend without `supports`."""

    def __init__(self, context: BackendContext) -> None: ...

    def plan(self, batch: object) -> None: ...

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: object
    ) -> torch.Tensor:
        return q


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with soft caps of 50, which only transformers implements; two have a window of 5 tokens."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vaultgemma")
    config = AutoConfig.for_model("vaultgemma", **{**SIZES, **FIELDS["vaultgemma"]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomized(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which all but the third have a window of 6 tokens."""
    folder = tmp_path_factory.mktemp("gemma3")
    small_model("gemma3", **FIELDS["gemma3"]).save_pretrained(folder)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs an attention backend for the CPU, the best one, whose target is a class of this module."""

    def install(name: str, target: str, traits: tuple[str, ...]) -> None:
        source = SPEC.format(name=name, target=target, traits=traits)
        group = "srv.backends.attention"
        write_plugin(tmp_path, name, source, group=group, entry=f"cpu.{name}", attribute="SPEC")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--device", "cpu", "--model-path", str(folder), "--dtype", "float32", "--max-total-tokens", "256", *more]


def launched(folder: Path, *more: str) -> LaunchContext:
    return resolve_launch(user_input(arguments(folder, *more)))


def test_explicit_choice_is_refused_at_plan_and_launch(
    capped: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("plain", "Uncapped", ("window",))
    chosen = ("--attention-backend", "plain")
    with pytest.raises(Refusal) as refusal:
        launched(capped, *chosen)
    (rejected,) = refusal.value.rejections
    assert (rejected.code, rejected.what, rejected.value) == ("backend_unfit", "attention_backend", "plain")
    assert rejected.reason == "it cannot compute layers 0-2: it does not support a soft cap of 50.0"
    assert "torch_native" in rejected.remedy
    assert main(["plan", *arguments(capped, *chosen)]) == 2
    assert "it cannot compute layers 0-2: it does not support a soft cap of 50.0" in capsys.readouterr().err


def test_automatic_choice_passes_over_it_for_these_models_alone(capped: Path, gemma3: Path, install: Install) -> None:
    install("plain", "Uncapped", ())
    choice = launched(capped).resolved.backends["decode_attention_backend"]
    assert choice.spec.name != "plain"
    assert dict(choice.rejected)["plain"] == (
        "it cannot compute layers 0, 2: it does not support a sliding window of 5 tokens and a soft cap of 50.0",
        "it cannot compute layer 1: it does not support a soft cap of 50.0",
    )
    windows = launched(gemma3).resolved.backends["prefill_attention_backend"]
    assert dict(windows.rejected)["plain"] == (
        "it cannot compute layers 0-1, 3: it does not support a sliding window of 6 tokens",
    )


def test_live_backend_is_asked_before_weights_are_read(capped: Path, install: Install, tmp_path: Path) -> None:
    """Its spec claims more than the backend supports. The weights are missing, so that reading them would fail."""
    install("boastful", "Uncapped", ("window", "soft_cap"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in capped.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    context = launched(folder, "--attention-backend", "boastful")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartError) as refused:
        LocalEngine(context)
    (line,) = refused.value.lines
    assert refused.value.status == 2
    assert line.startswith(
        "attention backend boastful does not fit model: it cannot compute layers 0-2: its kernel caps no scores "
        "(soft cap 50.0). Choose another backend with --attention-backend ("
    )
    assert "torch_native" in line
    assert line.endswith(", or another platform with --device. [layers_unsupported]")


def test_backend_of_one_slot_is_named_with_its_flag(capped: Path, install: Install) -> None:
    install("boastful", "Uncapped", ("window", "soft_cap"))
    decode = ("--decode-attention-backend", "boastful", "--prefill-attention-backend", "torch_native")
    with pytest.raises(StartError, match="Choose another backend with --decode-attention-backend"):
        LocalEngine(launched(capped, *decode))


def test_backend_without_the_member_is_named(gemma3: Path, install: Install) -> None:
    install("silent", "Silent", ("window", "soft_cap"))
    with pytest.raises(PluginError, match=r"Silent\.supports: is missing\. Implement .*AttentionBackend\.supports"):
        LocalEngine(launched(gemma3))


def test_native_layers_are_checked_as_well(gemma3: Path, install: Install) -> None:
    install("boastful", "Windowless", ("window", "soft_cap"))
    with pytest.raises(StartError, match=r"it cannot compute layers 0-1, 3: no windows here\."):
        LocalEngine(launched(gemma3))
