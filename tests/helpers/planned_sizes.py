"""Whether the sizes of a model are the same in a plan from its configuration alone, in one with weights, and loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from srv.args.config import make_config
from srv.models.base import CausalLM
from srv.models.read import read_facts
from srv.planning.budget import loaded_bytes


def check_sizes(folder: Path, model: CausalLM) -> None:
    """model: that of the folder, loaded in float32, the dtype of its files, which its configuration need not state."""
    with TemporaryDirectory() as alone:
        for file in folder.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, alone)
        config_file = Path(alone, "config.json")
        config_file.write_text(json.dumps({"dtype": "float32", **json.loads(config_file.read_text())}))
        stored, planned = read_facts(folder), read_facts(Path(alone))
    config = make_config({"dtype": "float32"})
    assert (stored.format, planned.format) == ("safetensors", "config")
    assert planned.parameters == stored.parameters
    assert planned.weight_bytes == stored.weight_bytes
    assert loaded_bytes(config, planned) == loaded_bytes(config, stored) == model.loaded_bytes()


def planned_bytes(path: Path, dtype: str = "float32", **values: object) -> int:
    """The bytes of the loaded weights of a checkpoint in a plan. `values`: of arguments."""
    return loaded_bytes(make_config({"dtype": dtype, **values}), read_facts(path))
