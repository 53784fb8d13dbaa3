"""Methods of other distributions: found by entry point, checked, served, and never in the way of other models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from args_world import CAPABLE, manifest, model, resolved, user
from engine_small import Small, engine, greedy, make_small, messages
from every import every
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from offloaded_weights import check_offloaded
from planned_sizes import planned_bytes
from platform_plugins import write_plugin
from safetensors.torch import load_file, save_file

from srv.args.config import make_config
from srv.errors import ModelError, PluginError, Refusal
from srv.models import derive
from srv.models.blueprint import Part
from srv.models.facts.sharding import divisions
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.planning.offload import host_layers
from srv.quantization.method import QuantMethod, StoredMatrix, StoredModel
from srv.quantization.registry import chosen, detect, find
from srv.specs import ModelFacts

NAME = "acme4"
FACTS = f"""
from srv.quantization.method import QuantMethod


def detect(folder, config):
    stated = config.get("quantization_config") or {{}}
    if stated.get("quant_method") not in ("acme4", "acme"):
        return False
    return stated.get("bits") == 4 or f"it has weights of {{stated.get('bits')}} bits, not 4"


METHOD = QuantMethod(
    name="{NAME}",
    layers="plugin_acme.layers:AcmeLayerFactory",
    storage="plugin_acme.layers:AcmeStorageFormat",
    ops=("linear_int8",),
    detect=detect,
)
"""
SCHEMES = """
class Acme(Scheme):
    op = "linear_int8"

    def tensors(self, matrix):
        outputs = sum(matrix.outputs)
        return HeldTensor("weight", (outputs, matrix.inputs), "int8"), HeldTensor("scale", (outputs,), "float32")


def schemes(model):
    return lambda names, inputs, embedding: Acme() if names[0].endswith("_proj") else None


METHOD ="""
WITH_SCHEMES = FACTS.replace("    detect=", "    schemes=schemes,\n    detect=").replace("METHOD =", SCHEMES)
WITH_SCHEMES = f"from srv.quantization.schemes import HeldTensor, Scheme\n{WITH_SCHEMES}"
# Two weights of 4 bits in a byte become int8, and are multiplied by an op that srv has.
LAYERS = """
import torch
from srv.models.checkpoints.storage import StorageFormat
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection


class AcmeLinear(Projection):
    op = "linear_int8"

    def __init__(self, context, shards, inputs, bias):
        super().__init__(context.dtype, shards, inputs)
        outputs = sum(shards.values())
        self.integers = context.empty(outputs, inputs, dtype=torch.int8)
        self.scales = context.empty(outputs, dtype=torch.float32)
        self.bias = context.empty(outputs) if bias else None
        multiply = context.bind(self.op, inputs=inputs, outputs=outputs)
        self.kernel = lambda x: multiply(x, **self.operands()[0])

    def operands(self):
        return ({"weight": self.integers, "weight_scale": self.scales, "bias": self.bias},)

    def weight_views(self):
        views = self.part_views("weight", self.integers) | self.part_views("scale", self.scales)
        return views if self.bias is None else views | self.part_views("bias", self.bias)


class AcmeLayerFactory(LayerFactory):
    def __init__(self, context, model):
        super().__init__(context)
        self._types = model.types

    def linear(self, shards, inputs, bias, split=None, unit=1):
        if all(self._types[f"{name}.weight"] == "uint8" for name in shards):
            return AcmeLinear(self.context, shards, inputs, bias)
        return super().linear(shards, inputs, bias, split, unit)


class AcmeStorageFormat(StorageFormat):
    def __init__(self, model):
        self._types = model.types

    def shapes(self, stored):
        return {
            name: (shape[0], 2 * shape[1]) if self._types[name] == "uint8" else shape
            for name, shape in stored.items()
        }

    def convert(self, name, stored):
        if stored.dtype is not torch.uint8:
            return {name: stored}
        return {name: torch.cat((stored & 15, stored >> 4), 1).to(torch.int8) - 8}
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one method. One that was installed before under the same name is hidden."""

    def write(source: str = FACTS, name: str = "acme", entry: str = NAME, layers: str = LAYERS) -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        sys.modules.pop(f"plugin_{name}.layers", None)
        write_plugin(folder, name, source, group="srv.quantization", entry=entry, attribute="METHOD")
        (folder / f"plugin_{name}" / "layers.py").write_text(layers)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return write


def quantize(folder: Path, model: Any, stated: str = NAME, bits: int = 4) -> None:
    """Store the projections of a model in 4 bits, and replace those of `model` by the stored values."""
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        scale = parameter.detach().abs().amax(1) / 7
        integers = (parameter.detach() / scale[:, None]).round()
        parameter.data = integers * scale[:, None]
        low, high = (integers + 8).to(torch.uint8).chunk(2, 1)
        stored[name], stored[name.replace(".weight", ".scale")] = low | high << 4, scale
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": stated, "bits": bits})


def saved(folder: Path, layers: int = 2, **stated: Any) -> Any:
    model = small_model("qwen2", num_hidden_layers=layers)
    model.save_pretrained(folder)
    quantize(folder, model, **stated)
    return model


def test_an_installed_method_is_detected_and_its_layers_compute(install: Install, tmp_path: Path) -> None:
    install()
    for stated in (NAME, "acme"):  # its own name, and another one that only the method knows
        folder = tmp_path / stated
        model = saved(folder, stated=stated)
        assert read_facts(folder).quantization == NAME
        tokens = tokens_of(model)
        torch.testing.assert_close(
            our_logits(built(folder), tokens), expected_logits(model, tokens), atol=5e-4, rtol=1e-4
        )


def test_it_is_served(install: Install, tmp_path: Path) -> None:
    """With the argument as without it, and its layers count as their schemes say."""
    install(WITH_SCHEMES)
    small = make_small("llama", tmp_path)
    quantize(small.folder, small.model)
    prompts = small.prompts[:3]
    expected = [greedy(small.model, prompt, 6) for prompt in prompts]
    for flags in ({}, {"quantization": NAME}):
        with engine(small, **flags) as served:
            assert [result.tokens for result in served.generate(messages(prompts, 6))] == expected
    assert planned_bytes(small.folder) == built(small.folder).loaded_bytes()
    assert refused(small, quantization="modelslim") == "other_method"
    assert refused(small, torchao_config=NAME) == "other_method"
    assert refused(small, torchao_config="acme5") == "bad_value"
    assert refused(small, tp_size=2) == "not_divisible"


def test_layers_in_host_memory(install: Install, tmp_path: Path) -> None:
    """Of a method that says the bytes of its tensors; of others, layers stay on the device."""
    install()
    saved(tmp_path / "model", layers=3)
    with pytest.raises(Refusal, match=r"weights stay on the device: acme4 does not say the bytes of its tensors"):
        host_layers(make_config({"host_offload_gb": 1}), read_facts(tmp_path / "model"))
    layers = LAYERS.replace(
        "    def operands",
        "    def weight_tensors(self):\n        return self.integers, self.scales\n\n    def operands",
    )
    install(WITH_SCHEMES, layers=layers)
    assert check_offloaded(tmp_path / "model") == {"linear_int8"}
    install(WITH_SCHEMES.replace("Acme() if", "'int8' if"))
    with pytest.raises(PluginError, match=r"acme4\.schemes: returned 'int8' for .*, neither a Scheme nor None"):
        host_layers(make_config({"host_offload_gb": 1}), read_facts(tmp_path / "model"))


def test_schemes_of_srv_need_no_layers_of_its_own(install: Install, tmp_path: Path) -> None:
    """The method converts what is stored, and `srv` has the layers."""
    source = FACTS.replace('    layers="plugin_acme.layers:AcmeLayerFactory",\n', "    schemes=schemes,\n")
    held = 'Int8("none") if names[0].endswith("_proj") else None'
    function = f"def schemes(model):\n    return lambda names, inputs, embedding: {held}\n\n\nMETHOD ="
    renamed = LAYERS.replace(
        "        return {\n            name: (shape",
        "        stored = {name.replace('.scale', '.weight_scale'): (*shape, 1) if name.endswith('.scale') else shape\n"
        "                  for name, shape in stored.items()}\n"
        "        return {\n            name: (shape",
    ).replace('self._types[name] == "uint8"', 'self._types.get(name) == "uint8"')
    renamed = renamed.replace(
        "            return {name: stored}\n        return",
        "            scale = name.endswith('.scale')\n"
        "            return {name.replace('.scale', '.weight_scale'): stored.unsqueeze(1) if scale else stored}\n"
        "        return",
    ).replace(
        "    def shapes",
        "    def parts(self, name):\n        return (name.replace('.scale', '.weight_scale'),)\n\n    def shapes",
    )
    install(f"from srv.quantization.schemes import Int8\n{source.replace('METHOD =', function)}", layers=renamed)
    model = saved(tmp_path / "model")
    tokens, ours = tokens_of(model), built(tmp_path / "model")
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=5e-4, rtol=1e-4)
    assert planned_bytes(tmp_path / "model") == ours.loaded_bytes()


def test_what_its_architecture_says_holds_for_a_quantized_checkpoint(install: Install, tmp_path: Path) -> None:
    """The architecture does not see how weights are stored."""
    install(WITH_SCHEMES.replace("    detect=", "    sharding=None,\n    detect="))
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    model = saved(quantized)
    model.save_pretrained(plain)
    facts = read_facts(quantized)
    expected = read_native(plain)
    assert planned_bytes(quantized) == built(quantized).loaded_bytes()
    parts = divisions(facts, in_blocks=False)
    assert not isinstance(parts, str), parts
    sizes = {name: size for name, size, *_ in parts.sizes}
    assert (sizes["attention heads"], sizes["tokens of vocabulary"]) == (facts.heads, facts.vocab_size)
    (quantized / "model.safetensors").unlink()
    assert read_facts(quantized).parameters == derive.parameters(expected)  # without weights


def read_native(folder: Path) -> Part:
    facts = read_facts(folder)
    return native_tree(facts.architecture, facts.config)


def refused(small: Small, **flags: object) -> str:
    """The code of the first refusal of an engine with these arguments."""
    with pytest.raises(Refusal) as caught, engine(small, **flags):
        pass
    return caught.value.rejections[0].code


def test_its_ops_are_checked_before_weights_are_read(install: Install) -> None:
    install()
    quantized = model(quantization=NAME, stored_types={"uint8": 9})
    with pytest.raises(Refusal, match=r"weights quantized with acme4 \(capability int8_weights\)"):
        resolved(user(), model=quantized)
    able = manifest(capabilities=CAPABLE | {"int8_weights"})
    assert resolved(user(), able, model=quantized).config.weights.quantization == NAME


def test_its_ops_may_depend_on_the_form_of_the_checkpoint(install: Install) -> None:
    form = "lambda model: METHOD._replace(ops=() if model.stored_types.get('uint8') == 9 else ('linear_w8a8',))"
    install(FACTS.replace("    detect=", f"    of_form={form},\n    detect="))
    small, other = (model(quantization=NAME, stored_types={"uint8": count}) for count in (9, 8))
    assert resolved(user(), model=small).config.weights.quantization == NAME
    with pytest.raises(Refusal, match=r"weights quantized with acme4 \(capability w8a8\)"):
        resolved(user(), manifest(capabilities=CAPABLE - {"w8a8"}), model=other)
    install(FACTS.replace("    detect=", "    of_form=lambda model: 4,\n    detect="))
    with pytest.raises(PluginError, match=r"srv-acme: acme4\.of_form: returned int, not a QuantMethod"):
        resolved(user(), model=small)


def test_a_form_that_it_does_not_support_is_refused_with_its_reason(install: Install, tmp_path: Path) -> None:
    install()
    clause = "it has weights of 3 bits, not 4"
    saved(tmp_path / "own", bits=3)
    with pytest.raises(ModelError, match=f"the method of srv-acme does not load: {clause}"):
        read_facts(tmp_path / "own")
    saved(tmp_path / "shared", bits=3, stated="acme")
    assert read_facts(tmp_path / "shared").quantization == "acme"
    with pytest.raises(ModelError, match=f"quantized with acme, which srv does not load yet in this form: {clause}"):
        built(tmp_path / "shared")


def test_it_is_found_without_torch(install: Install, tmp_path: Path) -> None:
    folder = install()
    model_folder = tmp_path / "model"
    saved(model_folder)
    code = (
        "from srv.models.read import read_facts; from pathlib import Path;"
        "print(read_facts(Path(sys.argv[1])).quantization, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    path = [str(folder), *filter(None, sys.path)]
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}", str(model_folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert process.stdout.strip() == f"{NAME} []"


@every(
    ("source", "fault"),
    [
        ("raise RuntimeError('half installed')", "importing it raised RuntimeError: half installed"),
        ("METHOD = {}", "is dict, not a QuantMethod"),
        (FACTS.replace('name="acme4"', 'name="acme5"'), "entry point acme4: has a quantization method called 'acme5'"),
        (FACTS.replace("detect=detect", "detect=7"), "detect: is not a function"),
        (FACTS.replace(":AcmeLayerFactory", ""), "layers: is 'plugin_acme.layers', not"),
        (FACTS.replace('("linear_int8",)', '"linear_int8"'), "ops: is 'linear_int8'"),
        (FACTS.replace("QuantMethod(\n", "QuantMethod(\n    bits=4,\n"), "unexpected keyword argument 'bits'"),
        (FACTS.replace("QuantMethod(\n", "QuantMethod(\n    weight_bytes=len,\n"), "docs/quantization.md"),
        (FACTS.replace('    layers="plugin_acme.layers:AcmeLayerFactory",\n', ""), "has neither layers nor schemes"),
    ],
)
def test_a_faulty_method_is_refused_by_name(source: str, fault: str, install: Install) -> None:
    install(source)
    with pytest.raises(PluginError) as caught:
        find(NAME)
    assert caught.value.distribution == "srv-acme"
    assert fault in str(caught.value)
    assert find("w8a8_int8") is not None, "another method is affected"


@every(
    ("source", "layers", "fault"),
    [
        (FACTS.replace("stated = ", "stated = missing or "), LAYERS, "acme4.detect: raised NameError"),
        (FACTS, "raise RuntimeError('no kernels')", "importing plugin_acme.layers:AcmeLayerFactory raised Runtime"),
        (
            FACTS.replace(":AcmeStorageFormat", ":AcmeLinear"),
            LAYERS,
            "is not a subclass of srv.models.checkpoints.storage",
        ),
        (FACTS, LAYERS.replace("self._types = model.types", "missing", 1), "acme4.layers: raised NameError"),
        (FACTS, LAYERS.replace(") - 8}", ") - missing}"), "proj.weight): raised NameError: name 'missing'"),
        (
            FACTS,
            LAYERS.replace(") - 8}", ")[:1]}"),
            "down_proj.weight of the shape [1, 80], but `shapes` announced [48, 80]",
        ),
        (FACTS, LAYERS.replace("return {name: torch.cat", "return {name + 's': torch.cat"), "announced no such tensor"),
        (FACTS, LAYERS.replace("- 8}", "- 8}.items()"), "returned dict_items, not tensors by their names"),
        (FACTS, LAYERS.replace("self._types[name] ==", "missing =="), "acme4.storage.shapes: raised NameError"),
    ],
)
def test_faults_in_its_functions_and_layers_are_attributed_to_it(
    source: str, layers: str, fault: str, install: Install, tmp_path: Path
) -> None:
    install(source, layers=layers)
    saved(tmp_path / "model")
    with pytest.raises(PluginError, match="plugin srv-acme: acme4") as caught:
        built(tmp_path / "model")
    assert fault in str(caught.value)
    plain = tmp_path / "plain"
    small_model("llama").save_pretrained(plain)
    assert built(plain) is not None, "an unquantized model is affected"


@every(
    ("member", "source"),
    [
        ("of_form", "lambda model: missing"),
        ("at_load", "lambda model: missing"),
        ("schemes", "lambda model: missing"),
        ("stored", "lambda config, dtype: missing"),
        ("stored", "lambda config, dtype: lambda matrix: missing"),
        ("schemes", "lambda model: lambda names, inputs, embedding: missing"),
    ],
)
def test_faults_in_what_a_plan_asks_are_attributed_to_it(member: str, source: str, install: Install) -> None:
    install(FACTS.replace("    detect=", f"    {member}={source},\n    detect="))
    method = find(NAME)
    assert method is not None
    facts = model(quantization=NAME, stored_types={"uint8": 9})
    with pytest.raises(PluginError, match=rf"plugin srv-acme: acme4\.{member}: raised NameError"):
        asked(method, facts)


def asked(method: QuantMethod, facts: ModelFacts) -> None:
    """What a plan asks of a method that has one of these functions."""
    if method.of_form is not None:
        method.of_form(facts)
    if method.at_load is not None:
        method.at_load(facts)
    if method.stored is not None:
        method.stored({}, "bfloat16")(StoredMatrix("q_proj", 64, 64))
    if method.schemes is not None:
        method.schemes(StoredModel(facts, {}))(("q_proj",), 64, False)


def test_a_name_that_it_does_not_have_is_refused(install: Install) -> None:
    install(FACTS.replace("    detect=", "    at_load=lambda model: 'acme9',\n    detect="))
    with pytest.raises(PluginError, match=r"acme4\.at_load: returned 'acme9', which is the name of no method"):
        chosen(model(), NAME, None, dequantize=False)


def test_a_method_that_fits_is_used_although_another_one_is_faulty(install: Install, tmp_path: Path) -> None:
    install("raise RuntimeError('half installed')", "broken", "broken")
    config = {"quantization_config": {"quant_method": "acme", "bits": 4}}
    with pytest.raises(PluginError, match="srv-broken"):
        detect(tmp_path, config)
    install()
    assert detect(tmp_path, config) == NAME
    install(FACTS.replace('name="acme4"', 'name="zenith"'), "zenith", "zenith")
    with pytest.raises(PluginError, match=r"srv-acme and srv-zenith: .* both claim the same checkpoint"):
        detect(tmp_path, config)


def test_a_name_that_two_claim_is_refused(install: Install) -> None:
    install(FACTS.replace('name="acme4"', 'name="w8a8_int8"'), entry="w8a8_int8")
    with pytest.raises(PluginError) as caught:
        find("w8a8_int8")
    assert str(caught.value) == (
        "plugin srv and srv-acme: quantization method w8a8_int8: both claim this name. Uninstall srv-acme"
    )
    install(name="one")
    install(name="two")
    with pytest.raises(PluginError, match="srv-one and srv-two: quantization method acme4: both claim this name"):
        find(NAME)
