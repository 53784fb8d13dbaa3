"""Weight loaders of installed packages: what they give is served, and what is wrong with them is refused by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of, write_gguf
from platform_plugins import write_plugin
from safetensors.torch import load_file, save_file

from srv.args.config import make_config
from srv.dist.group import RankGroup
from srv.errors import ModelError, PluginError, Rejection, SrvError
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import LaunchPlan, make_plan
from srv.testing.engine import user_input

FACTS = """
from srv.models.checkpoints.third_party import LoaderFacts


def refusal(model):
    return None if "vault" in model.path else "it is in no vault"


LOADER = LoaderFacts("vault", "plugin_acme.source:Vault", refusal)
"""
# Weights lie in a format of the package's own: a file per tensor, beside the configuration.
SOURCE = """
from pathlib import Path

import torch
from srv.models.checkpoints.weight_source import WeightSource


class Vault(WeightSource):
    opened = []

    def __init__(self, model):
        super().__init__(model)
        self.files = {path.stem: path for path in Path(model.path).glob("*.tensor")}
        self.opened.append(self)
        self.closed = 0

    def shapes(self):
        return {name: tuple(self.load(name).shape) for name in self.files}

    def load(self, name):
        return torch.load(self.files[name], weights_only=True)

    def read(self, name):
        return self.load(name)

    def close(self):
        self.closed += 1
"""
Install = Callable[..., Path]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one loader. One that was installed before under the same name is hidden."""

    def write(source: str = SOURCE, facts: str = FACTS, name: str = "acme", entry: str = "vault") -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_plugin(folder, name, facts, group="srv.weight_loaders", entry=entry, attribute="LOADER")
        monkeypatch.delitem(sys.modules, f"plugin_{name}.source", raising=False)
        (folder / f"plugin_{name}" / "source.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return write


def stored(folder: Path, kind: str = "llama", files: Path | None = None, **fields: Any) -> Any:
    """A model whose weights are in the package's files, and nowhere else but in `files`, as safetensors."""
    model = small_model(kind, **fields)
    model.save_pretrained(folder)
    if files is not None:
        model.save_pretrained(files)
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.save(tensor, folder / f"{name}.tensor")
    (folder / "model.safetensors").unlink()
    return model


def plan(folder: Path, *arguments: str, loader: str = "vault") -> LaunchPlan:
    words = ["--device", "cpu:avx512", "--model-path", str(folder), "--custom-weight-loader", loader, *arguments]
    return make_plan(user_input(words))


def refusals(folder: Path, *arguments: str, loader: str = "vault") -> tuple[Rejection, ...]:
    return plan(folder, *arguments, loader=loader).refusals


@every("quantization", [None, "fp8", "w8a8_int8"])
def test_what_a_loader_gives_is_what_files_would(quantization: str | None, install: Install, tmp_path: Path) -> None:
    """Quantized at load as well. The plan has the bytes that are loaded, and names the package."""
    install()
    plain, vault = tmp_path / f"plain {quantization}", tmp_path / f"vault {quantization}"
    model = stored(vault, "qwen3", plain)
    tokens = tokens_of(model, 8)
    ours = built(vault, loaders=("vault",), quantization=quantization)
    assert torch.equal(our_logits(ours, tokens), our_logits(built(plain, quantization=quantization), tokens))
    settings = {"dtype": "float32", "custom_weight_loader": ["vault"], "quantization": quantization}
    assert ours.loaded_bytes() == weight_bytes(make_config(settings), read_facts(vault))
    made = plan(vault, *(["--quantization", quantization] if quantization else []))
    assert made.refusals == ()
    assert any("given by vault of srv-acme, whose code runs in each worker" in note for note in made.notes)


def test_a_tied_output_layer_must_be_a_copy(install: Install, tmp_path: Path) -> None:
    install()
    folder = tmp_path / "vault"
    model = stored(folder, tie_word_embeddings=True)
    head = model.lm_head.weight.detach().clone()
    torch.save(head, folder / "lm_head.weight.tensor")
    tokens = tokens_of(model, 8)
    assert torch.allclose(our_logits(built(folder, loaders=("vault",)), tokens), expected_logits(model, tokens), 1e-3)
    head[-1] += 1
    torch.save(head, folder / "lm_head.weight.tensor")
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as caught:
        built(folder, loaders=("vault",))
    assert caught.value.remedy == "Serve both with --json-model-override-args '{\"tie_word_embeddings\": false}'"


def test_a_source_is_closed_once(install: Install, tmp_path: Path) -> None:
    install()
    stored(tmp_path / "vault")
    built(tmp_path / "vault", loaders=("vault",))
    from plugin_acme.source import Vault  # type: ignore[import-not-found]

    assert [source.closed for source in Vault.opened] == [1]


def test_a_rank_gets_its_part(install: Install, tmp_path: Path) -> None:
    install()
    plain, vault = tmp_path / "plain", tmp_path / "vault"
    stored(vault, files=plain, vocab_size=96)
    for rank in range(2):
        group = RankGroup(rank=rank, size=2)
        ours: Any = built(vault, loaders=("vault",), group=group)
        files: Any = built(plain, group=group)
        expected = files.weight_views()
        assert all(torch.equal(view, expected[name]) for name, view in ours.weight_views().items())


def test_experts_in_fused_tensors_are_divided(install: Install, tmp_path: Path) -> None:
    """As the files of an architecture may fuse them, so may a loader."""
    install()
    plain, vault = tmp_path / "plain", tmp_path / "vault"
    model = stored(vault, "qwen3_moe", plain)
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            fused = dict(model.named_parameters())[f"{prefix}.{name}"].detach()
            torch.save(fused, vault / f"{prefix}.{name}.tensor")
        for path in vault.glob(f"{prefix}.*.*_proj.weight.tensor"):
            path.unlink()
    tokens = tokens_of(model, 8)
    ours = built(vault, loaders=("vault",))
    assert torch.equal(our_logits(ours, tokens), our_logits(built(plain), tokens))


def test_several_loaders_share_the_tensors(install: Install, tmp_path: Path) -> None:
    """One that two of them give is refused, with both."""
    half = "name for name in self.files if ('.mlp.' in name) is {}"
    install(SOURCE.replace("name in self.files}", f"name in ({half.format(True)})}}"))
    other = FACTS.replace("vault", "cellar").replace("plugin_acme", "plugin_other").replace('"cellar" in', '"vault" in')
    source = SOURCE.replace("name in self.files}", f"name in ({half.format(False)})}}")
    install(source, other, "other", "cellar")
    tokens = tokens_of(stored(tmp_path / "vault", files=tmp_path / "plain"), 8)
    ours = built(tmp_path / "vault", loaders=("vault", "cellar"))
    assert torch.equal(our_logits(ours, tokens), our_logits(built(tmp_path / "plain"), tokens))
    install(SOURCE, other, "other", "cellar")
    with pytest.raises(ModelError, match=r"mlp\S+ is given by vault and by cellar") as caught:
        built(tmp_path / "vault", loaders=("vault", "cellar"))
    assert "given by vault of srv-acme and cellar of srv-other" in str(caught.value)


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


def with_shapes(expression: str) -> str:
    return changed("return {name: tuple(self.load(name).shape) for name in self.files}", f"return {expression}")


SHAPES = "{name: tuple(self.load(name).shape) for name in self.files"
FAULTY: list[tuple[str, type[SrvError], str]] = [
    (with_shapes(SHAPES + f" if name != '{DOWN}'}}"), ModelError, f"vault of srv-acme: it lacks {DOWN}"),
    (with_shapes(SHAPES + "} | {'extra': (1,)}"), ModelError, "vault of srv-acme: it contains tensors .* extra"),
    (with_shapes(SHAPES + f"}} | {{'{DOWN}': (3, 4)}}"), ModelError, rf"{DOWN} \(stored \[3, 4\]"),
    (with_shapes("{'a': [1, 2]}"), PluginError, r"vault\.shapes: has 'a': \[1, 2\], not a name and a tuple"),
    (with_shapes("{3: (1,)}"), PluginError, r"vault\.shapes: has 3: \(1,\), not a name"),
    (with_shapes("{'a': (True, -1)}"), PluginError, r"has 'a': \(True, -1\)"),
    (with_shapes("None"), PluginError, r"vault\.shapes: raised TypeError"),
    (changed("return self.load(name)\n", "return self.load(name)[:1]\n"), PluginError, r"read: returned the shape \[1"),
    (changed("return self.load(name)\n", "return self.load(name).tolist()\n"), PluginError, "returned list for"),
    (changed("return self.load(name)\n", "return self.load(name).int()\n"), PluginError, "returned int32 for"),
    (
        changed("return self.load(name)\n", "return self.load(name).to(torch.float8_e4m3fn)\n"),
        *(PluginError, "returned float8_e4m3fn for .*, not floats of 16 bits"),
    ),
    (changed("return self.load(name)\n", "raise OSError('gone')\n"), PluginError, r"vault\.read: raised OSError: gone"),
    (changed("self.closed += 1", "1 / 0"), PluginError, r"vault\.close: raised ZeroDivisionError"),
    (changed("self.closed = 0", "raise KeyError('no key')"), PluginError, r"vault\.target: raised KeyError"),
    (
        changed("class Vault(WeightSource)", "class Vault"),
        PluginError,
        "is not a subclass of srv.models.checkpoints.weight",
    ),
    ("import nothing_of_this_name\n", PluginError, "importing plugin_acme.source:Vault raised ModuleNotFoundError"),
]


@every(("source", "kind", "part"), FAULTY, ids=str)
def test_a_faulty_loader_is_refused_by_name(
    source: str, kind: type[SrvError], part: str, install: Install, tmp_path: Path
) -> None:
    install(source)
    vault = tmp_path / f"vault {len(list(tmp_path.iterdir()))}"
    stored(vault, num_hidden_layers=1)
    with pytest.raises(kind, match=part) as caught:
        built(vault, loaders=("vault",))
    assert "srv-acme" in str(caught.value)


def test_a_refused_loader_leaves_no_modules(install: Install, tmp_path: Path) -> None:
    """They would hide those of an updated package. Of a package that is in use, the others stay."""
    stored(tmp_path / "vault", num_hidden_layers=1)
    facts = FACTS.replace('"vault",', '"cave",', 1)
    folder = install(changed("class Vault(WeightSource)", "class Vault"), facts) / "plugin_acme"
    with pytest.raises(PluginError, match="has a weight loader called 'cave'"):
        built(tmp_path / "vault", loaders=("vault",))
    assert not [name for name in sys.modules if name.startswith("plugin_acme")]
    (module,) = (path for path in folder.glob("*.py") if "LOADER" in path.read_text())
    module.write_text(module.read_text().replace('"cave",', '"vault",'))
    importlib.invalidate_caches()
    with pytest.raises(PluginError, match="is not a subclass of"):
        built(tmp_path / "vault", loaders=("vault",))
    assert "plugin_acme" in sys.modules
    assert "plugin_acme.source" not in sys.modules
    (folder / "source.py").write_text(SOURCE)
    importlib.invalidate_caches()
    assert built(tmp_path / "vault", loaders=("vault",)) is not None


def test_names_are_those_of_installed_packages(install: Install, tmp_path: Path) -> None:
    """No path and no module is looked up; the code beside the model is not run."""
    vault = tmp_path / "vault"
    stored(vault)
    (vault / "evil.py").write_text("raise SystemExit('run')")
    assert "there is none" in refusals(vault)[0].reason
    install()
    for name in (
        "vaults",
        "evil",
        f"{vault}/evil.py",
        f"{vault}/evil.py:load",
        "plugin_acme.source:Vault",
        "os.system",
    ):
        (found,) = refusals(vault, loader=name)
        assert (found.code, found.what) == ("bad_value", "custom_weight_loader")
        assert f"has a weight loader {name!r}; they have vault" in found.reason
    assert "vault is named twice" in refusals(vault, "vault")[0].reason


def test_models_that_it_has_no_weights_for_are_refused(install: Install, tmp_path: Path) -> None:
    install()
    plain, vault = tmp_path / "plain", tmp_path / "vault"
    small_model("llama").save_pretrained(plain)
    stored(vault)

    def reason(folder: Path, *arguments: str, code: str = "loader_unfit") -> str:
        found = refusals(folder, *arguments)
        assert code in [each.code for each in found], found
        return next(each.reason for each in found if each.code == code)

    assert f"the weight loader vault refuses {plain}: it is in no vault" in reason(plain)
    assert "the weights are random" in reason(vault, "--load-format", "dummy", code="inert")
    assert "given by a loader" in reason(vault, "--weight-loader-disable-mmap", code="inert")
    assert "given by a loader" in reason(vault, "--delete-ckpt-after-loading", code="excluded")
    assert "layers of transformers" in reason(vault, "--model-impl", "transformers")
    file = tmp_path / "vault.gguf"
    write_gguf(file, small_model("llama"), "llama")
    assert "its file holds quantized blocks" in reason(file)
    quantized = tmp_path / "vault 8"
    small_model("llama").save_pretrained(quantized)
    edit_config(quantized, quantization_config={"quant_method": "w8a8_int8"})
    assert "its weights are quantized with w8a8_int8" in reason(quantized)
    with pytest.raises(ModelError, match="its weights are quantized with w8a8_int8, and weight loaders give"):
        built(quantized, loaders=("vault",))


@every(
    ("facts", "fault"),
    [
        (
            FACTS.replace('return None if "vault" in model.path else', "return missing,"),
            "vault.refusal: raised NameErr",
        ),
        (FACTS.replace("plugin_acme.source:Vault", "plugin_acme.source"), "target: is 'plugin_acme.source', not"),
        (FACTS.replace('LoaderFacts("vault"', 'LoaderFacts("cave"'), "has a weight loader called 'cave'"),
        ("raise RuntimeError('half installed')", "importing it raised RuntimeError: half installed"),
    ],
)
def test_faulty_facts_are_refused_by_name(facts: str, fault: str, install: Install, tmp_path: Path) -> None:
    install(facts=facts)
    vault = tmp_path / f"vault {len(list(tmp_path.iterdir()))}"
    stored(vault)
    with pytest.raises(PluginError) as caught:
        plan(vault)
    assert fault in str(caught.value)
    assert "srv-acme" in str(caught.value)


def test_files_of_the_model_are_not_read(install: Install, tmp_path: Path) -> None:
    """If the folder has weights as well, they are the loader's that are served."""
    install()
    vault = tmp_path / "vault"
    model = stored(vault)
    same = {path.stem: torch.load(path, weights_only=True) for path in vault.glob("*.tensor")}
    tokens = tokens_of(model, 8)
    expected = our_logits(built(vault, loaders=("vault",)), tokens)
    save_file({name: torch.zeros_like(tensor) for name, tensor in same.items()}, vault / "model.safetensors")
    assert torch.equal(our_logits(built(vault, loaders=("vault",)), tokens), expected)
