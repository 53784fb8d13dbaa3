"""Shared code has no switch between quantization methods, and platforms do not know the layers of any.

Models know no format either: `QuantMethod` says what they need.
"""

from __future__ import annotations

import re
from pathlib import Path

from every import every
from named_strings import names_in

from srv.quantization.registry import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
NAMES = BUILT_IN.keys() - {"gguf", "bitsandbytes"}  # also values of --load-format
SHARED = [
    path
    for folder in ("args", "engine", "executor", "models", "planning", "platform", "worker")
    for path in sorted((ROOT / "core" / "srv" / folder).rglob("*.py"))
]
FORMATS = {target.partition(":")[0] for target in BUILT_IN.values()}
IMPORT = re.compile(rf"^\s*(from|import) srv\.quantization\.({'|'.join(map(re.escape, FORMATS))})\b", re.MULTILINE)
MODELS = [path for path in SHARED if "models" in path.relative_to(ROOT).parts]
PLATFORMS = [path for folder in ("platforms", "plugins") for path in sorted((ROOT / folder).glob("*/srv_*/**/*.py"))]


@every("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shared_code_names_no_method(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8"), NAMES) == []


@every("path", MODELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_models_import_no_format(path: Path) -> None:
    assert not IMPORT.search(path.read_text(encoding="utf-8"))


@every("path", PLATFORMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_platforms_import_no_layer_of_a_method(path: Path) -> None:
    assert "srv.quantization" not in path.read_text(encoding="utf-8")
