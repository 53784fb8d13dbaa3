"""Read a YAML file of arguments (`--config FILE`): a flat mapping from argument names to values.

Reading is strict: an unknown or duplicate key and a value of the wrong type are rejected, with their line numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from srv.args.command_line import bad_value
from srv.args.config import all_names, find_any_argument, normalize_name
from srv.args.parser import SOURCE
from srv.args.spec import nearest
from srv.args.statement import Origin, UserStatement
from srv.errors import Rejection

MAX_FILE_BYTES = 2**20  # a typical file of arguments has a few hundred bytes


def read_file(path: Path) -> tuple[list[UserStatement], list[Rejection]]:
    """The arguments that a file sets, and a rejection for each invalid entry, or one if it cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            return [], [_bad_file(path, f"it is longer than {MAX_FILE_BYTES} bytes")]
        text = raw.decode("utf-8")
    except OSError as error:
        return [], [_bad_file(path, f"it cannot be read: {error.strerror or error}")]
    except ValueError as error:  # the file is not UTF-8, or the path is not valid
        return [], [_bad_file(path, f"it cannot be read: {error}")]
    return read_text(text, path)


def read_text(text: str, path: Path) -> tuple[list[UserStatement], list[Rejection]]:
    """Like `read_file`, but for the contents of a file; `path` is used in messages only."""
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return [], []
        if not isinstance(root, yaml.MappingNode):
            return [], [_bad_file(path, "it is not a mapping from argument names to values")]
        return _read_mapping(loader, root, path)
    except yaml.YAMLError as error:
        return [], [_bad_file(path, "it is not valid YAML: " + " ".join(str(error).split()))]
    except RecursionError:
        return [], [_bad_file(path, "it is nested too deeply")]
    finally:
        if loader is not None:
            loader.dispose()


def _read_mapping(
    loader: yaml.SafeLoader, root: yaml.MappingNode, path: Path
) -> tuple[list[UserStatement], list[Rejection]]:
    statements: list[UserStatement] = []
    rejections: list[Rejection] = []
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        source = f"config file {path} line {line}"
        read = _read_entry(loader, key_node, value_node, source)
        if isinstance(read, UserStatement) and read.argument in lines:
            reason = f"line {lines[read.argument]} sets it already"
            read = Rejection("duplicate_key", read.argument, None, source, reason, "Keep one of the two.")
        if isinstance(read, Rejection):
            rejections.append(read)
        else:
            lines[read.argument] = line
            statements.append(read)
    return statements, rejections


def _read_entry(loader: yaml.SafeLoader, key_node: Any, value_node: Any, source: str) -> UserStatement | Rejection:
    key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a key that is not a string"
    argument = find_any_argument(key)
    if argument is None or key.startswith("-"):
        closest = nearest(key.lstrip("-").replace("-", "_").lower(), all_names())
        remedy = f"Did you mean {closest}?" if closest else "`srv args list` shows all arguments."
        return Rejection("unknown_key", key, None, source, "there is no such argument", remedy)
    try:
        value = loader.construct_object(value_node, deep=True)
    except (ValueError, OverflowError) as error:
        return bad_value(argument, value_node.value, source, f"YAML cannot parse it: {error}")
    if value is None:
        return Rejection(
            "bad_value", argument.name, "null", source, "it is null", "Leave the key out to leave it unset."
        )
    try:
        name = normalize_name(key)
        alias = "" if name == argument.name else name
        return UserStatement(argument.name, argument.read(value), Origin.CONFIG_FILE, source, alias)
    except ValueError as error:
        return bad_value(argument, _as_in_file(value_node, value), source, f"it {error}")


def _as_in_file(node: Any, value: object) -> object:
    """A value as it is written in the file: `true`, not Python's True; a quoted string with its quotes."""
    if not isinstance(node, yaml.ScalarNode):
        return value
    return f"{node.style}{node.value}{node.style}" if node.style in ("'", '"') else node.value


def _bad_file(path: Path, reason: str) -> Rejection:
    return Rejection(
        "bad_config_file", "config", str(path), SOURCE, reason, "Pass a YAML file that maps argument names to values."
    )
