"""Shared code has no switch between architectures: each one is described by a file of its own."""

from __future__ import annotations

from pathlib import Path

from every import every
from named_strings import names_in

from srv.models.families.registry import BUILT_IN, is_native

CORE = Path(__file__).resolve().parents[2] / "core" / "srv"
FAMILIES = CORE / "models" / "families"
MODULES = {module.partition(":")[0] for module in BUILT_IN.values()}
TABLES = ("registry", "vision_models")
OWN = {FAMILIES / f"{module}.py" for module in (*MODULES, *TABLES)}
SHARED = [
    path
    for folder in ("models", "quantization", "planning", "worker", "engine", "executor", "sample", "memory")
    for path in sorted((CORE / folder).rglob("*.py"))
    if path not in OWN
]


# The GGUF files of a native architecture have the name of its module.
NAMES = {*BUILT_IN, *(module.partition(":")[0] for name, module in BUILT_IN.items() if is_native(name))}


def test_a_switch_is_found() -> None:
    planted = (
        'def f(name):\n    """For "LlamaForCausalLM"."""\n    return name == "LlamaForCausalLM" or name in ("qwen2",)'
    )
    assert names_in(planted, NAMES) == ["LlamaForCausalLM", "qwen2"]


@every("path", SHARED, ids=lambda path: str(path.relative_to(CORE)))
def test_shared_code_names_no_architecture(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8"), NAMES) == []
