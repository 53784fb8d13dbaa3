"""Arguments on the files of a model: other values of its configuration, and Python code in its folder."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import OUTPUT, Small, engine, greedy, make_small, messages
from every import every
from models_reference_ops import reference_ops
from models_small import HOST, edit_config, small_model, write_gguf

from srv.cli.main import main
from srv.errors import ModelError, Refusal
from srv.models.build import build
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.options import ReadOptions
from srv.models.read import read_facts
from srv.server.text.tokenizer import load_text_processor
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}}
MARK = "the code of the model was run"
CONFIGURATION = """
from transformers import LlamaConfig


class AcmeConfig(LlamaConfig):
    model_type = "acme"
"""
MODELING = f"""
import os
from pathlib import Path

from transformers import LlamaForCausalLM

from .configuration_acme import AcmeConfig

Path(os.environ["ACME_MARK"]).write_text("{MARK}")


class AcmeForCausalLM(LlamaForCausalLM):
    config_class = AcmeConfig
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"))


def planned(folder: Path, *more: str) -> list[str]:
    return ["plan", "--json", "--device", "cpu", "--model-path", str(folder), "--max-running-requests", "4", *more]


def refused(folder: Path, **flags: Any) -> tuple[str, str]:
    """Code and text of the first refusal of an engine with these arguments."""
    with pytest.raises(Refusal) as error, engine(Small(folder, None, [], []), **flags):
        pass
    return error.value.rejections[0].code, str(error.value)


@covers("json_model_override_args", platform="cpu")
def test_json_model_override_args(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    """Native layers, those of transformers and plans have the other values; tokens are those of such a model."""
    model = copy.deepcopy(small.model)
    config = type(model.config).from_dict({**model.config.to_dict(), **ROPE})
    changed = type(model)._from_config(config, attn_implementation="eager", dtype=model.dtype).eval()
    changed.load_state_dict(model.state_dict())
    expected = [greedy(changed, prompt, OUTPUT) for prompt in small.prompts]
    assert expected != small.tokens
    for impl in ("srv", "transformers"):
        with engine(small, json_model_override_args=json.dumps(ROPE), model_impl=impl) as served:
            assert served.context.model.overrides == ROPE
            assert [result.tokens for result in served.generate(messages(small.prompts))] == expected

    assert main(planned(small.folder, "--json-model-override-args", '{"max_position_embeddings": 64}')) == 0
    plan = json.loads(capsys.readouterr().out)
    assert any("max_position_embeddings = 64" in note for note in plan["notes"])
    words = ["--from", "vllm", "--", "--model", str(small.folder), "--hf-overrides", '{"max_position": 64}']
    assert main(["args", "translate", *words]) == 2
    assert "'max_position' in --json-model-override-args is no field" in capsys.readouterr().err


@every(
    ("overrides", "code", "named"),
    [
        ("{", "bad_value", "a JSON object"),
        ("[1]", "bad_value", "a JSON object"),
        ('{"rope_thet": 5}', "unknown_override", "Did you mean 'rope_theta'?"),
        ('{"rope_theta": "high"}', "unsupported_config", "rope_theta is 'high'; it must be a number"),
        ('{"num_hidden_layers": -1}', "unsupported_config", "-1"),
    ],
)
def test_overrides_that_are_refused(small: Small, overrides: str, code: str, named: str) -> None:
    actual_code, text = refused(small.folder, json_model_override_args=overrides)
    assert actual_code == code
    assert named in text


def test_overrides_of_nested_configurations_and_gguf_files(tmp_path: Path) -> None:
    model = small_model("llama")
    write_gguf(tmp_path / "model.gguf", model, "llama")
    facts = read_facts(tmp_path / "model.gguf", ReadOptions({"max_position_embeddings": 32}))
    assert (facts.context_length, facts.overrides) == (32, {"max_position_embeddings": 32})
    model.save_pretrained(tmp_path / "nested")
    config = json.loads((tmp_path / "nested" / "config.json").read_text())
    edit_config(
        tmp_path / "nested", text_config={"max_position_embeddings": 200, "rope_parameters": config["rope_parameters"]}
    )
    assert read_facts(tmp_path / "nested").context_length == 200
    assert read_facts(tmp_path / "nested", ReadOptions({"max_position_embeddings": 32})).context_length == 32


@covers("trust_remote_code=true", "trust_remote_code=false", platform="cpu")
def test_trust_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, no code of the folder is run, also not by a plan, and the refusal names the files."""
    folder, mark = tmp_path / "acme", tmp_path / "mark"
    monkeypatch.setenv("ACME_MARK", str(mark))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    small = make_small("llama", folder)
    classes = {"AutoConfig": "configuration_acme.AcmeConfig", "AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"}
    edit_config(folder, architectures=["AcmeForCausalLM"], model_type="acme", auto_map=classes)
    (folder / "configuration_acme.py").write_text(CONFIGURATION)
    (folder / "modeling_acme.py").write_text(MODELING)

    named = r"configuration_acme\.py, modeling_acme\.py\), which is not run"
    with pytest.raises(ModelError, match=named) as error, engine(small):
        pass
    assert (error.value.code, "--trust-remote-code runs it" in error.value.remedy) == ("remote_code", True)
    assert main(planned(folder)) == 2
    assert '"code": "remote_code"' in capsys.readouterr().out
    assert not mark.exists()

    assert main(planned(folder, "--trust-remote-code")) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(
        "Python code in the folder of acme is run (trust_remote_code): configuration_acme.py" in n for n in notes
    )
    mark.unlink(missing_ok=True)
    with engine(small, trust_remote_code=True) as served:
        assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
    assert mark.read_text() == MARK


BUILT = LayerOptions(), BuildContext(HOST, torch.float32, reference_ops())
TOKENIZER = f"""
import os
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Path(os.environ["ACME_MARK"]).write_text("{MARK}")


class AcmeTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **more):
        tokenizer = Tokenizer(models.WordLevel({{"he": 0, "it": 1}}, unk_token="it"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        super().__init__(tokenizer_object=tokenizer)
"""


def acme_tokenizer(folder: Path, name: str, *, listed: bool = False) -> None:
    """A tokenizer that only code of the folder implements. `name`: of the class in `auto_map`."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "vocab.txt").write_text("he")
    tokenizer_config = {
        "tokenizer_class": "AcmeTokenizer",
        "auto_map": {"AutoTokenizer": [name, None] if listed else name},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "tokenization_acme.py").write_text(TOKENIZER)


def test_code_of_a_tokenizer_is_noted_and_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, mark = tmp_path / "acme", tmp_path / "mark"
    monkeypatch.setenv("ACME_MARK", str(mark))
    small_model("llama").save_pretrained(folder)
    acme_tokenizer(folder, "tokenization_acme.AcmeTokenizer", listed=True)
    facts = read_facts(folder, ReadOptions(remote_code=True))
    assert main(planned(folder, "--trust-remote-code")) == 0
    note = "is run for its tokenizer (trust_remote_code): tokenization_acme.py"
    assert [n for n in json.loads(capsys.readouterr().out)["notes"] if n.endswith(note)]
    for more in (["--trust-remote-code", "--skip-tokenizer-init"], []):
        assert main(planned(folder, *more)) == 0
        assert "tokenization_acme" not in capsys.readouterr().out
    with pytest.raises(ModelError) as error:
        load_text_processor(read_facts(folder))
    assert (error.value.code, mark.exists()) == ("no_tokenizer", False)
    assert load_text_processor(facts).encode("he it he") == [0, 1, 0]
    assert mark.read_text() == MARK
    mark.unlink()
    assert "Python code of the tokenizer is run: tokenization_acme.py" in caplog.text


def test_code_of_another_repository_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers, tokenizer, used = tmp_path / "layers", tmp_path / "tokenizer", tmp_path / "used"
    for folder in (layers, tokenizer, used):
        small_model("llama").save_pretrained(folder)
    classes = {"AutoConfig": "other/code--configuration_acme.AcmeConfig", "AutoModelForCausalLM": "a.B"}
    edit_config(layers, architectures=["AcmeForCausalLM"], model_type="acme", auto_map=classes)
    for trusted in (True, False):
        facts = read_facts(layers, ReadOptions(remote_code=trusted))
        with pytest.raises(ModelError, match="the code of its layers is in the repository other/code") as error:
            build(facts, *BUILT)
        assert "download it into the folder" in error.value.remedy

    assert main(planned(layers, "--trust-remote-code")) == 2
    assert "in the repository other/code" in capsys.readouterr().out
    acme_tokenizer(tokenizer, "other/code--tokenization_acme.AcmeTokenizer")
    with pytest.raises(ModelError, match="the code of its tokenizer is in the repository other/code") as error:
        load_text_processor(read_facts(tokenizer, ReadOptions(remote_code=True)))
    assert error.value.code == "remote_code"
    assert main(planned(tokenizer, "--trust-remote-code")) == 2
    assert "the code of its tokenizer" in capsys.readouterr().out

    edit_config(used, auto_map=classes)  # native layers need no code
    assert main(planned(used, "--trust-remote-code")) == 0


def test_a_model_with_native_layers_runs_no_code(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many checkpoints on the hub, which bring code that transformers has by now."""
    small.model.save_pretrained(tmp_path)
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"})
    monkeypatch.setenv("ACME_MARK", str(tmp_path / "mark"))
    (tmp_path / "modeling_acme.py").write_text(MODELING)
    for trusted in (False, True):
        with engine(small, model_path=tmp_path, **({"trust_remote_code": True} if trusted else {})) as served:
            assert [result.tokens for result in served.generate(messages(small.prompts[:2]))] == small.tokens[:2]
    assert not (tmp_path / "mark").exists()


def test_reading_facts_imports_no_torch(small: Small) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom srv.models.options import ReadOptions\n"
        "from srv.models.read import read_facts\n"
        "read_facts(Path(sys.argv[1]), ReadOptions({'rope_theta': 5.0}, True))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(small.folder)], check=True)
