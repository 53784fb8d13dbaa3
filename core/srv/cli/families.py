"""The families of plugins: what an installed distribution may add to `srv`, each by an entry-point group of its own.

Owns their list, by which `srv doctor` reports what is installed, and `srv plugin` makes packages and prints pages. Must
not know what a plugin is for: the module that each family is read by checks what is loaded. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from srv.cli.main import COMMAND_GROUP, COMMANDS
from srv.errors import PluginError
from srv.grammar import facts as grammar_facts
from srv.grammar import registry as grammars
from srv.models.checkpoints import third_party as weight_loaders
from srv.models.families import architecture
from srv.models.families import registry as architectures
from srv.platform import forward_hooks, hook_plugins, registry
from srv.platform.installed import Entry, entries, entries_of_srv
from srv.quantization import method
from srv.quantization import registry as quantization
from srv.reply import formats
from srv.sample import third_party as logit_processors
from srv.speculative import algorithm
from srv.speculative import registry as drafters

DOCTOR_GROUP = "srv.doctor"

State = Literal["ok", "warning", "error", "not examined"]


class Family(NamedTuple):
    """One family. `kind`: its name for `srv plugin new --kind`. `page`: that of its documentation, in docs/.

    `load(entry)`: load and check what an entry point names; returns details, or raises what is wrong.
    `needed`: a fault of one stops every launch, not only those that use it.

    Of the package that `srv plugin new` makes, with placeholders for its names (`srv.cli.plugin`): `entry` and `target`
    of its entry point, and `use`, a command that uses it; "" if there is no such package. `find(name)`: what `srv` or
    an installed package has of this name; false if nothing.
    """

    kind: str
    group: str
    noun: str
    page: str
    load: Callable[[Entry], str]
    needed: bool = False
    entry: str = "{{name}}"
    target: str = "facts:{{NAME}}"
    use: str = ""
    find: Callable[[str], object] = lambda name: None

    def has(self, name: str) -> bool:
        """Whether an entry point of this name would claim what is there already."""
        return any(entry.name == name for entry in entries(self.group)) or bool(self.find(name))


class Plugin(NamedTuple):
    """One entry point of a group of `srv`, and what is known of it. `family`: the noun; "" for an unknown group.

    `state`: "warning" if it cannot be used, and "error" if that stops every launch.
    """

    family: str
    group: str
    name: str
    distribution: str
    version: str
    state: State
    detail: str = ""
    remedy: str = ""


def installed_plugins(platforms: frozenset[str] | None = None) -> Iterator[Plugin]:
    """All plugins, in the order of `FAMILIES`, then by name. `platforms`: only these are loaded; None: all."""
    all_entries = sorted(entries_of_srv(), key=lambda entry: (entry.name, entry.distribution))
    for family in FAMILIES:
        for entry in (member for member in all_entries if member.group == family.group):
            if entry.group == registry.PLATFORM_GROUP and platforms is not None and entry.name not in platforms:
                yield _plugin(family.noun, entry, "not examined")
            else:
                yield _examined(family, entry)
    for entry in all_entries:
        if entry.group not in GROUPS:
            detail = f"this srv reads no entry-point group {entry.group}"
            yield _plugin("", entry, "warning", detail, f"The groups are {', '.join(GROUPS)}.")


def absent_families() -> tuple[str, ...]:
    """The nouns of the families of which nothing is installed."""
    present = {entry.group for entry in entries_of_srv()}
    return tuple(family.noun for family in FAMILIES if family.group not in present)


def _examined(family: Family, entry: Entry) -> Plugin:
    faulty: State = "error" if family.needed else "warning"
    try:
        return _plugin(family.noun, entry, "ok", family.load(entry))
    except PluginError as error:
        return _plugin(family.noun, entry, faulty, f"{error.member}: {error.reason}", error.remedy)
    except Exception as error:  # noqa: BLE001 - a distribution may raise anything; the others are still listed
        remedy = f"Update or uninstall {entry.distribution}, or report this to its maintainer."
        return _plugin(family.noun, entry, faulty, f"{entry.value} raised {type(error).__name__}: {error}", remedy)


def _plugin(noun: str, entry: Entry, state: State, detail: str = "", remedy: str = "") -> Plugin:
    return Plugin(noun, entry.group, entry.name, entry.distribution, entry.version, state, detail, remedy)


def _platform(entry: Entry) -> str:
    return registry.find_platforms()[entry.name].loaded.summary


def _backend(entry: Entry) -> str:
    """A third party's backend; a fault is raised."""
    spec = registry.checked_backend(entry)
    platform = entry.name.partition(".")[0]
    absent = "" if platform in registry.find_platforms() else ", which is not installed"
    return f"priority {spec.priority} on platform {platform}{absent}"


def _hooks(entry: Entry) -> str:
    """The hooks that a plugin implements. Each is asked alone if one of them is faulty."""
    try:
        loaded = hook_plugins.hook_plugins()
    except PluginError:
        loaded = hook_plugins.load(
            tuple(hook_entry for hook_entry in entries(entry.group) if hook_entry.name == entry.name)
        )
    return next(", ".join(plugin.hooks) for plugin in loaded if plugin.name == entry.name)


def _named(
    kind: str, group: str, noun: str, page: str, find: Callable[[str], object], use: str, entry: str = "{{name}}"
) -> Family:
    """A family whose plugins are found by their names."""

    def load(plugin: Entry) -> str:
        find(plugin.name)
        return ""

    return Family(kind, group, noun, page, load, use=use, entry=entry, find=find)


def _function(entry: Entry) -> str:
    """What is called as it is: a command, or findings of the doctor."""
    registry.check_requirement(entry)
    if not callable(entry.load()):
        remedy = f"Update or uninstall {entry.distribution}"
        raise PluginError(entry.distribution, entry.value, "is not a function", remedy)
    return ""


def _backends(family: str, noun: str, argument: str) -> Family:
    """Those of the template are for the platform that `srv plugin new` is given."""

    def find(name: str) -> object:
        platform, _, backend = name.partition(".")
        specs = registry.find_platforms()[platform].loaded.facts.backends.get(family, ())
        return backend in (spec.name for spec in specs)

    kind, group = f"{family}-backend", f"{registry.BACKEND_GROUP}.{family}"
    entry, use = "{{platform}}.{{name}}", f"srv launch --device {{{{platform}}}} {argument} {{{{name}}}}"
    return Family(kind, group, noun, "plugin-families", _backend, entry=entry, use=use, find=find)


FAMILIES = (
    Family("platform", registry.PLATFORM_GROUP, "platform", "plugin-authors", _platform, target="manifest:MANIFEST"),
    _backends("attention", "attention backend", "--attention-backend"),
    _backends("sampling", "sampling backend", "--sampling-backend"),
    _backends("moe", "backend of experts", "--moe-runner-backend"),
    Family(
        "hooks",
        hook_plugins.HOOK_GROUP,
        "plugin of hooks",
        "hooks",
        _hooks,
        needed=True,
        target="hooks:{{Name}}",
        use="srv launch, and then: curl localhost:30000/{{name}}",
    ),
    _named(
        "forward-hook",
        forward_hooks.GROUP,
        "forward hook",
        "hooks",
        forward_hooks.HOOKS.find,
        """srv launch --disable-graphs --forward-hooks '[{"hook": "{{name}}", "target_modules": ["*.mlp"]}]'""",
    ),
    _named(
        "architecture",
        architecture.GROUP,
        "architecture",
        "architectures",
        architectures.find,
        "srv plan --model-path FOLDER",
        entry="{{Name}}ForCausalLM",
    ),
    _named(
        "quantization",
        method.GROUP,
        "quantization method",
        "quantization",
        quantization.find,
        "srv plan --model-path FOLDER",
    ),
    _named(
        "weight-loader",
        weight_loaders.GROUP,
        "weight loader",
        "weight-loaders",
        weight_loaders.LOADERS.find,
        "srv launch --model-path FOLDER --custom-weight-loader {{name}}",
    ),
    _named(
        "drafter",
        algorithm.GROUP,
        "draft algorithm",
        "drafters",
        drafters.find,
        "srv launch --speculative-algorithm {{NAME}}",
        entry="{{NAME}}",
    ),
    _named(
        "grammar",
        grammar_facts.GROUP,
        "grammar backend",
        "grammars",
        grammars.find,
        "srv launch --grammar-backend {{name}}",
    ),
    _named(
        "logit-processor",
        logit_processors.GROUP,
        "logit processor",
        "logit-processors",
        logit_processors.PROCESSORS.find,
        "srv launch --enable-custom-logit-processor",
    ),
    _named(
        "tool-format",
        formats.TOOL_GROUP,
        "tool format",
        "reply-formats",
        formats.find_tool_format,
        "srv launch --tool-call-parser {{name}}",
    ),
    _named(
        "reasoning-format",
        formats.REASONING_GROUP,
        "reasoning format",
        "reply-formats",
        formats.find_reasoning_format,
        "srv launch --reasoning-parser {{name}}",
    ),
    Family(
        "command",
        COMMAND_GROUP,
        "command",
        "plugin-families",
        _function,
        target="command:add",
        use="srv {{name}}",
        find=COMMANDS.__contains__,
    ),
    Family(
        "doctor",
        DOCTOR_GROUP,
        "findings of the doctor",
        "plugin-families",
        _function,
        target="findings:findings",
        use="srv doctor",
    ),
)
GROUPS = tuple(family.group for family in FAMILIES)
