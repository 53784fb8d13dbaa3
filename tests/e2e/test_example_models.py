"""A wheel of another distribution brings an architecture and a quantization method, which `srv` plans and serves.

    tests/packages/srv_example_models ──► its wheel ──┐
    this tree ──────────► the wheel of srv ───────────┴──► a folder that comes first on the import path of a child

`docs/architectures.md` and `docs/quantization.md` describe what the package does. The quick tests of the checks on such
packages are tests/core/models/families/test_third_party.py and tests/core/quantization/test_third_party.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_small import LENGTHS, greedy
from letters_model import ALPHABET, write_tokenizer
from models_small import SIZES, edit_config, expected_logits, randomized, small_model
from safetensors.torch import load_file, save_file

from srv.args.statement import amount_text

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.proof(minutes=1),
    pytest.mark.xdist_group("example models"),
]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "packages" / "srv_example_models"
PIP = (sys.executable, "-m", "pip")
GROUP = 16
TOKENS = 10
LETTERS = ALPHABET + "".join(map(chr, range(0x100, 0x100 + SIZES["vocab_size"] - len(ALPHABET))))

# What `srv plan` prints and imports, and the bytes of weights that it counts.
PLAN = """
import contextlib, io, json, sys
from pathlib import Path
from srv.args.config import make_config
from srv.cli.main import main
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes

output = io.StringIO()
with contextlib.redirect_stdout(output):
    status = main(["plan", "--json", "--device", "cpu", "--dtype", "float32", "--model-path", sys.argv[1]])
if status:
    sys.exit(status)
print(json.dumps({
    "plan": json.loads(output.getvalue()),
    "bytes": weight_bytes(make_config({"dtype": "float32"}), read_facts(Path(sys.argv[1]))),
    "heavy": sorted({"torch", "transformers"} & set(sys.modules)),
    "files": [sys.modules[name].__file__ for name in sys.argv[2:]],
}))
"""
# Greedy tokens with their log-probabilities, and the bytes of weights as they were loaded.
SERVE = """
import json, sys
from srv import LLM
from srv.testing.engine import LocalEngine

folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
flags = {"device": "cpu", "dtype": "float32", "model_impl": "srv", "max_total_tokens": 1024, "page_size": 4}
with LLM(folder, **flags) as llm:
    outputs = llm.generate(prompts, max_tokens=count, temperature=0, ignore_eos=True, logprobs=1)
words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
with LocalEngine.launch([*words, "--model-path", folder]) as engine:
    (memory,) = engine.executor.measure()
print(json.dumps({
    "tokens": [output.outputs[0].tokens for output in outputs],
    "logprobs": [[each.logprob for each in output.outputs[0].logprobs] for output in outputs],
    "bytes": memory.weight_bytes,
}))
"""


@dataclass(frozen=True)
class Site:
    """A folder with what the wheels contain."""

    folder: Path

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SRV_")}
        path = os.pathsep.join(filter(None, (str(self.folder), environment.get("PYTHONPATH"))))
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def json(self, script: str, *arguments: str) -> Any:
        process = self.run(script, *arguments)
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(process.stdout.splitlines()[-1])


def pip(*arguments: str | Path) -> None:
    process = subprocess.run([*PIP, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


def wheel(source: Path, folder: Path) -> Path:
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source)
    (built,) = folder.iterdir()
    return built


def installed(folder: Path, *wheels: Path) -> Site:
    pip("install", "-q", "--no-deps", "--no-index", "--target", folder, *wheels)
    return Site(folder)


@pytest.fixture(scope="module")
def srv_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(ROOT, tmp_path_factory.mktemp("srv"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, srv_wheel: Path) -> Site:
    folder = tmp_path_factory.mktemp("good")
    return installed(folder / "site", srv_wheel, wheel(SOURCE, folder / "wheel"))


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: Any
    prompts: list[list[int]]


def olmo3() -> Any:
    from transformers import AutoModelForCausalLM, Olmo3Config

    torch.manual_seed(0)
    config = Olmo3Config(**{**SIZES, "attention_bias": True, "pad_token_id": 0, "sliding_window": 5})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def save(folder: Path, model: Any) -> Saved:
    model.save_pretrained(folder)
    if model.config.model_type == "olmo3":
        edit_config(folder, architectures=["NormedForCausalLM"], model_type="normed")
    write_tokenizer(folder, LETTERS)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    return Saved(folder, model, prompts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("plain"), olmo3())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The projections are stored in 4 bits; `model` has the stored values, and is in float64."""
    saved = save(tmp_path_factory.mktemp("quantized"), olmo3())
    stored = load_file(saved.folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        packed, scale = pack(stored.pop(name).double().numpy())
        layer = name.removesuffix(".weight")
        stored[f"{layer}.weight_packed"] = torch.from_numpy(packed)
        stored[f"{layer}.weight_scale"] = torch.from_numpy(scale)
        saved.model.get_parameter(name).data = torch.from_numpy(unpack(packed, scale))
    save_file(stored, saved.folder / "model.safetensors")
    edit_config(saved.folder, quantization_config={"quant_method": "int4_groups", "bits": 4, "group_size": GROUP})
    saved.model.double()
    return saved


def pack(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [out, in] -> uint8 [out, in / 2], float32 [out, in / GROUP]: the largest magnitude of a group is 7."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = (np.abs(groups).max(-1) / 7).astype(np.float32)
    numbers = (np.rint(groups / scale[..., None]) + 8).astype(np.uint8).reshape(weight.shape)
    return numbers[:, 0::2] | numbers[:, 1::2] << 4, scale


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The stored weights in float64 [out, in], by the description of the format."""
    weight = np.empty((len(packed), 2 * packed.shape[1]))
    for column in range(weight.shape[1]):
        number = packed[:, column // 2] // 16 if column % 2 else packed[:, column // 2] % 16
        weight[:, column] = (number.astype(np.float64) - 8) * scale[:, column // GROUP]
    return weight


@pytest.mark.parametrize("name", ["plain", "quantized"])
def test_it_is_planned_exactly_and_served(name: str, site: Site, request: pytest.FixtureRequest) -> None:
    """Without torch, to the byte; greedy tokens equal those of transformers, of the dequantized weights if any."""
    saved: Saved = request.getfixturevalue(name)
    facts = ["srv", "srv_example_models.normed", *["srv_example_models.int4_groups"] * (name == "quantized")]
    planned = site.json(PLAN, str(saved.folder), *facts)
    assert planned["heavy"] == []
    assert [file for file in planned["files"] if not Path(file).is_relative_to(site.folder)] == []

    served = site.json(SERVE, str(saved.folder), json.dumps(saved.prompts), str(TOKENS))
    assert served["tokens"] == [greedy(saved.model, prompt, TOKENS) for prompt in saved.prompts]
    for prompt, tokens, logprobs in zip(saved.prompts, served["tokens"], served["logprobs"], strict=True):
        expected = expected_logits(saved.model, torch.tensor(prompt + tokens)).double().log_softmax(-1)
        chosen = expected[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), chosen, atol=5e-4, rtol=1e-4)
    assert planned["bytes"] == served["bytes"]
    assert (
        f" {amount_text(served['bytes'], 'bytes')} of weights" in dict(planned["plan"]["budget"]["breakdown"])["memory"]
    )


def test_a_damaged_one_is_refused_by_name_and_affects_no_other_model(
    srv_wheel: Path, plain: Saved, quantized: Saved, tmp_path: Path
) -> None:
    """Both modules of facts raise when they are imported."""
    source = shutil.copytree(SOURCE, tmp_path / "source")
    for module in ("normed", "int4_groups"):
        path = source / "srv_example_models" / f"{module}.py"
        path.write_text(
            path.read_text(encoding="utf-8") + f"\nraise RuntimeError('half of {module}')\n", encoding="utf-8"
        )
    site = installed(tmp_path / "site", srv_wheel, wheel(source, tmp_path / "wheel"))
    llama = save(tmp_path / "llama", small_model("llama")).folder
    described = llama.with_name("described")
    shutil.copytree(llama, described)
    shutil.copy(quantized.folder / "config.json", described)
    edit_config(described, architectures=["LlamaForCausalLM"], model_type="llama")
    for folder, fault in ((plain.folder, "half of normed"), (described, "half of int4_groups")):
        process = site.run(PLAN, str(folder))
        assert process.returncode == 2, process.stdout + process.stderr
        assert "srv-example-models" in process.stderr
        assert fault in process.stderr
    assert site.json(PLAN, str(llama), "srv")["plan"]["accepted"]
