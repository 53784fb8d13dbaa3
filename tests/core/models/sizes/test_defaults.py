"""The defaults of configuration fields are those of transformers' classes. Run this file to write them again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from srv.models.sizes.fields import DEFAULTS_FILE
from srv.models.sizes.registry import FAMILIES


def generated() -> dict[str, Any]:
    """The defaults and alternative names of all fields that a family may read, by model type."""
    folder = DEFAULTS_FILE.parent
    read = {word for module in folder.glob("*.py") for word in re.findall(r"\w+", module.read_text("utf-8"))}
    found = {}
    for config in _configs():
        names = {alias: real for alias, real in config.attribute_map.items() if alias in read or real in read}
        fields = {each.name: _default(each) for each in dataclasses.fields(config)}
        wanted = read | set(names.values()) | set(names)
        defaults = {
            name: value for name, value in fields.items() if name in wanted and value is not dataclasses.MISSING
        }
        found[config.model_type] = {"defaults": dict(sorted(defaults.items())), "names": dict(sorted(names.items()))}
    return dict(sorted(found.items()))


def _configs() -> Iterator[Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES.values():
        config = CONFIG_MAPPING[family.model_type]
        yield config
        for part in ("text_config", "vision_config"):
            nested: dict[str, Any] = config.sub_configs
            if part in nested and dataclasses.is_dataclass(nested[part]):
                yield nested[part]


def _default(field: Any) -> Any:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int | float | str | list | None) else dataclasses.MISSING


def test_defaults_are_those_of_transformers() -> None:
    assert json.loads(DEFAULTS_FILE.read_text(encoding="utf-8")) == generated(), f"run {__file__}"


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in generated().items())
    DEFAULTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
