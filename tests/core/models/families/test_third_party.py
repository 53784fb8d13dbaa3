"""Architectures of other distributions: found by entry point, checked, and never in the way of other models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of, write_gguf
from platform_plugins import write_plugin

from srv.errors import ModelError, PluginError
from srv.models import derive
from srv.models.build import load_layers
from srv.models.families.registry import find, native_names
from srv.models.families.trees import native_tree, pooled_of
from srv.models.read import read_facts

NAME = "AcmeForCausalLM"
SOURCE = f"""
from srv.models.families.builders import parts
from srv.models.families.architecture import Architecture
from srv.models.families.builders.decoder_fields import DEFAULTS
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.builders.decoder_fields import decoder_sizes


def tree(config):
    sizes = decoder_sizes(config)
    attention = parts.attention(sizes, bias=True, output_bias=False)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, parts.mlp(sizes)))


ARCHITECTURE = Architecture(
    name="{NAME}",
    tree=tree,
    defaults={{**DEFAULTS, "max_position_embeddings": 256}},
    gguf=GGUFLayout("acme", weights=(PermuteRotary(),)),
)
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one architecture. One that was installed before under the same name is hidden."""

    def write(source: str = SOURCE, name: str = "acme", entry: str = NAME) -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_plugin(folder, name, source, group="srv.architectures", entry=entry, attribute="ARCHITECTURE")
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return write


def saved(folder: Path) -> Any:
    """A Qwen2 model, whose queries, keys and values have biases, under the name of the third party's architecture."""
    model = small_model("qwen2")
    model.save_pretrained(folder)
    edit_config(folder, architectures=[NAME], model_type="acme")
    return model


def test_an_installed_architecture_has_native_layers(install: Install, tmp_path: Path) -> None:
    install()
    folder = tmp_path / "model"
    model = saved(folder)
    assert NAME in native_names()
    tokens = tokens_of(model)
    torch.testing.assert_close(
        our_logits(built(folder, impl="srv"), tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4
    )
    facts = read_facts(folder)
    assert derive.parameters(native_tree(NAME, facts.config)) == facts.parameters
    edit_config(folder, architectures=None)
    assert read_facts(folder).architecture == NAME  # by its model_type
    write_gguf(tmp_path / "model.gguf", small_model("llama"), "llama")
    assert read_facts(tmp_path / "model.gguf").architecture == "LlamaForCausalLM"


def test_the_sizes_of_a_configuration_without_weights(install: Install, tmp_path: Path) -> None:
    """They follow from its tree, also those of weights that a known method quantizes."""
    install()
    folder = tmp_path / "model"
    saved(folder)
    stored = read_facts(folder)
    (folder / "model.safetensors").unlink()
    facts = read_facts(folder)
    assert (facts.parameters, facts.weight_bytes) == (stored.parameters, stored.weight_bytes)
    assert facts.unknown_sizes is None
    edit_config(folder, quantization_config={"quant_method": "riddle"})
    facts = read_facts(folder)
    assert (facts.parameters, facts.weight_bytes) == (stored.parameters, 0)
    assert "weights that are quantized with riddle are not known" in str(facts.unknown_sizes)
    edit_config(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    facts = read_facts(folder)
    assert facts.unknown_sizes is None
    assert stored.weight_bytes > facts.weight_bytes > facts.parameters > facts.stored_types["float8_e4m3fn"] > 0


def test_its_gguf_files_are_read(install: Install, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, small_model("qwen2"), "acme")
    with pytest.raises(ModelError, match="its architecture is 'acme'"):
        read_facts(path)
    install()
    assert read_facts(path).architecture == NAME
    install(SOURCE.replace(NAME, "OtherForCausalLM"), "other", "OtherForCausalLM")
    with pytest.raises(PluginError, match="srv-acme and srv-other: GGUF architecture acme: both claim this name"):
        read_facts(path)


def test_it_is_found_without_torch(install: Install, tmp_path: Path) -> None:
    folder = install()
    code = (
        "import sys; from srv.models.read import read_facts; from pathlib import Path;"
        "print(read_facts(Path(sys.argv[1])).context_length, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    model = tmp_path / "model"
    saved(model)
    edit_config(model, max_position_embeddings=None)
    path = [str(folder), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}", str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "256 []"


@every(
    ("source", "entry", "fault"),
    [
        ("raise RuntimeError('half installed')", NAME, "importing it raised RuntimeError: half installed"),
        ("import torch\nARCHITECTURE = 1", NAME, "importing it"),
        ("ARCHITECTURE = {}", NAME, "is dict, not an Architecture"),
        (SOURCE, "AcmeModel", f"entry point AcmeModel: has an architecture called {NAME!r}"),
        (SOURCE.replace("tree=tree", "tree=7"), NAME, "tree: is not a function"),
        (SOURCE.replace("    tree=tree", "    make_config=tree"), NAME, "docs/architectures.md says what"),
        (SOURCE.replace("gguf=GGUFLayout", "layers='decoder', gguf=GGUFLayout"), NAME, "layers: is 'decoder', not"),
        (SOURCE.replace("defaults={", "defaults=7 or {"), NAME, "defaults: is 7"),
        (
            SOURCE.replace("families.architecture", "architectures.architecture"),
            NAME,
            "docs/architectures.md says what",
        ),
        (SOURCE.replace("gguf=", "layers=None, gguf="), NAME, "layers: is None"),
        (SOURCE.replace("gguf=", "names=7, gguf="), NAME, "names: is 7"),
        (
            SOURCE.replace("gguf=", "published_names=('A',), gguf="),
            NAME,
            "published_names: is for architectures of srv",
        ),
        (SOURCE.replace("gguf=", "weights=None, gguf="), NAME, "weights: is None"),
        (SOURCE.replace("gguf=", "pooled='last', gguf="), NAME, "pooled: is 'last', not a function"),
        (SOURCE.replace("gguf=", "weights=('q_proj',), gguf="), NAME, "weights: has 'q_proj'"),
        (SOURCE.replace("weights=(P", "weights=(7, P"), NAME, "gguf.weights: has 7, which GGUF files do not take"),
        (SOURCE.replace("weights=(", "permuted=("), NAME, "unexpected keyword argument 'permuted'"),
        (SOURCE.replace("Architecture(\n", "Architecture(\n    size=7,\n"), NAME, "unexpected keyword argument 'size'"),
    ],
)
def test_a_faulty_architecture_is_refused_by_name(source: str, entry: str, fault: str, install: Install) -> None:
    install(source, entry=entry)
    with pytest.raises(PluginError) as caught:
        find(entry)
    assert caught.value.distribution == "srv-acme"
    assert fault in str(caught.value) or "torch" in source
    assert derive.parameters(native_tree("LlamaForCausalLM", SIZES)) > 0, "another model is affected"


SIZES = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@every(
    ("source", "fault"),
    [
        (SOURCE.replace("sizes = decoder", "sizes = {}.missing or decoder"), "tree: raised AttributeError"),
        (SOURCE.replace("return parts", "return 5 or parts"), "tree: returns 5, which is no tree of"),
        (
            SOURCE.replace("gguf=GGUFLayout", "layers='nowhere:M', gguf=GGUFLayout"),
            "importing nowhere:M raised",
        ),
        (SOURCE.replace("gguf=GGUFLayout", "layers='json:JSONEncoder', gguf=GGUFLayout"), "is not a subclass of"),
        (SOURCE.replace("gguf=GGUFLayout", "pooled=lambda config: 5, gguf=GGUFLayout"), "pooled: returns 5, which is"),
        (SOURCE.replace("gguf=GGUFLayout", "pooled=lambda c: c.missing, gguf=GGUFLayout"), "pooled: raised Attrib"),
    ],
)
def test_faults_in_its_functions_are_attributed_to_it(source: str, fault: str, install: Install) -> None:
    install(source)
    with pytest.raises(PluginError, match="plugin srv-acme: AcmeForCausalLM") as caught:
        _use(NAME)
    assert fault in str(caught.value)


def _use(name: str) -> None:
    native_tree(name, SIZES)
    pooled_of(name, SIZES)
    load_layers(name)


def test_two_distributions_of_one_name_are_both_refused(install: Install) -> None:
    install()
    install(name="zenith")
    with pytest.raises(PluginError, match=f"srv-acme and srv-zenith: architecture {NAME}: both claim this name"):
        find(NAME)


def test_none_replaces_an_architecture_of_srv(install: Install) -> None:
    install(SOURCE.replace(NAME, "LlamaForCausalLM"), entry="LlamaForCausalLM")
    with pytest.raises(PluginError) as caught:
        find("LlamaForCausalLM")
    assert str(caught.value) == (
        "plugin srv and srv-acme: architecture LlamaForCausalLM: both claim this name. Uninstall srv-acme"
    )
    assert find("Qwen2ForCausalLM") is not None
