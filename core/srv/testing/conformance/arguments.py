"""L4: argument values that the plugin declares or accepts, on a real server over HTTP.

Values that are accepted together are combined into as few launches as possible. If a launch fails, it is halved until
the value at fault is found, or the few that fail together. Extreme values that make no useful server (a context of one
token) are not tried: their effect is up to core, not to the plugin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from srv.args.command_line import read_text
from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.args.spec import Argument
from srv.args.statement import Origin, UserStatement
from srv.args.support import REFUSED, by_argument, on_variant, support_of_value
from srv.errors import Refusal
from srv.models.read import read_facts
from srv.platform.facts import Support
from srv.specs import ModelFacts
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import accepted_model, model_folder, prompt
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.reference import Reference
from srv.testing.conformance.server import NotServing, Server, running_server, wait_for_exit
from srv.testing.conformance.setups import declared_dtypes, resolve_for
from srv.testing.conformance.values import SOURCE, candidate_texts, user_statement

MAX_VALUES = 4  # per argument
OUTPUT_TOKENS = 8
Value = TypeVar("Value")
API_KEY = "conformance"

# Values of arguments without choices; such an argument that is missing here is not tried.
TRIED_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "served_model_name": ("renamed",),
        "context_length": ("512",),
        "random_seed": ("7",),
        "mem_fraction_static": ("0.6", "0.8"),
        "max_total_tokens": ("2048", "8192"),
        "page_size": ("1", "16", "32", "64", "128"),
        "max_running_requests": ("2", "16"),
        "max_queued_requests": ("32",),
        "chunked_prefill_size": ("-1", "64", "512"),
        "max_prefill_tokens": ("256",),
        "schedule_conservativeness": ("0.5", "2"),
        "api_key": (API_KEY,),
        "max_request_bytes": ("1000000",),
        "max_stop_strings": ("4",),
        "graceful_shutdown_seconds": ("1",),
        "engine_start_timeout_seconds": ("170",),
        "graph_max_batch_size": ("4", "8"),
        "graph_batch_sizes": ("1,2,4",),
        "torch_compile_max_bs": ("2",),
    }
)
FIXED_ARGUMENTS = (
    "device",
    "model_path",
    "tokenizer_path",
    "chat_template",
    "revision",
    "host",
    "port",
)  # set in every launch
# Groups of arguments that concern requests, connections and logs: no platform has a part in them.
OF_ANY_PLATFORM = ("server", "observe")
# The last one would delete the model that the next launch needs.
NOT_TRIED = (*FIXED_ARGUMENTS, "delete_ckpt_after_loading")


def serves(kit: Kit) -> str:
    """A server starts with default arguments, answers, and its output is that of the reference."""
    facts, folder = _model(kit)
    dtype = declared_dtypes(kit)[0]
    tokens = prompt(20, 1)
    with serving(kit, folder, [user_statement("dtype", dtype)]) as server:
        _generate(server, Reference(folder), tokens, dtype)
        info = _info(server)
        if info["platform"] != kit.name:
            raise Fault(f"{kit.name} was requested, but the server reports platform {info['platform']}")
        return f"{facts.name} on {info['platform']}, {OUTPUT_TOKENS} tokens"


def supported(kit: Kit) -> str:
    """With every accepted value a server starts, answers, and reports the value as it was set."""
    _, folder = _model(kit)
    facts = read_facts(folder)
    statements = accepted_values(kit, facts)
    launches = group_into_launches(kit, facts, statements)
    for launch in launches:
        _check_launch(kit, folder, facts, launch)
    names = {statement.argument for statement in statements}
    untried = [
        argument.name
        for argument in ARGUMENTS.values()
        if argument.status == "implemented" and argument.name not in names
    ]
    tried = f"{len(statements)} values of {len(names)} arguments in {len(launches)} launches"
    return f"{tried}; not tried: {', '.join(untried)}"


def refuses(kit: Kit) -> str:
    """A value that is declared unsupported or not applicable is refused with its code, before anything is loaded."""
    _, folder = _model(kit)
    facts = read_facts(folder)
    statements = list(_declared(kit, REFUSED))
    if not statements:
        raise NotApplicable("the plugin declares no value of an argument unsupported")
    for statement in statements:
        try:
            resolve_for(kit, facts, statement)
        except Refusal as refusal:
            if not any(rejection.what == statement.argument for rejection in refusal.rejections):
                raise Fault(
                    f"{shown(statement)} is declared unsupported, but other arguments were refused: {refusal}"
                ) from refusal
            continue
        raise Fault(f"{shown(statement)} is declared unsupported, but it is accepted")
    launched = {statement.argument: statement for statement in statements}  # one value per argument in one launch
    exited = wait_for_exit(_command_line(kit, folder, list(launched.values())), kit.scratch)
    missing = [name for name in launched if f"{name} = " not in exited.output]
    if exited.status != 2 or missing:
        raise Fault(
            f"a launch with {', '.join(map(shown, launched.values()))} exited with status {exited.status}"
            f"{f' and does not name {missing[0]}' if missing else ''}: {exited.last_line}"
        )
    return f"{len(statements)} values of {len(launched)} arguments are refused"


def undeclared(kit: Kit) -> str:
    """If a plugin declares support of single arguments, it accepts no others that a platform can have a part in."""
    support = _support(kit)
    if not support:
        raise NotApplicable("the plugin declares no support of single arguments: it accepts what core implements")
    _, folder = _model(kit)
    accepted = {statement.argument for statement in accepted_values(kit, read_facts(folder))}
    undeclared_arguments = sorted(name for name in accepted - set(support) if asks_a_platform(ARGUMENTS[name]))
    if undeclared_arguments:
        raise Undeclared(
            f"accepted and working, but not declared: {', '.join(undeclared_arguments)}",
            "Add a srv.platform.facts.Support for each to PlatformFacts.support.",
        )
    return f"all of {len(accepted)} arguments are declared, or concern no device"


def asks_a_platform(argument: Argument) -> bool:
    return argument.group not in OF_ANY_PLATFORM


def _model(kit: Kit) -> tuple[ModelFacts, Path]:
    facts = accepted_model(kit, declared_dtypes(kit)[0])
    return facts, model_folder(kit, facts)


def accepted_values(kit: Kit, facts: ModelFacts) -> list[UserStatement]:
    """Values that the plugin accepts one at a time for the small model on this device, a few per argument."""
    accepted_statements: list[UserStatement] = []
    for argument in ARGUMENTS.values():
        if argument.status == "implemented" and argument.name not in NOT_TRIED and not needs_file(argument):
            accepted = [candidate for candidate in _candidates(argument, kit) if _accepts(kit, facts, [candidate])]
            accepted_statements += accepted[:MAX_VALUES]
    return accepted_statements


def needs_file(argument: Argument) -> bool:
    """Whether it has an effect only beside a file of the user's, which no launch here has."""
    return any(ARGUMENTS[name].kind.base is Path for name in argument.arg.only_with[:1])


def _candidates(argument: Argument, kit: Kit) -> list[UserStatement]:
    """Values to launch with: all choices, and those of `TRIED_VALUES`; never the declared default."""
    texts = TRIED_VALUES.get(argument.name) or (
        candidate_texts(argument, kit.manifest)
        if argument.choices or argument.arg.family or argument.kind.base is bool
        else ()
    )
    if argument.name == "model_impl" and importlib.util.find_spec("transformers") is None:
        texts = tuple(text for text in texts if text != "transformers")
    read = (read_text(argument, text, Origin.COMMAND_LINE, SOURCE) for text in texts)
    statements = (candidate for candidate in read if isinstance(candidate, UserStatement))
    return [
        statement
        for statement in statements
        if argument.validation_error(statement.value) is None and statement.value != argument.default
    ]


def _with_prerequisites(statements: Sequence[UserStatement]) -> list[UserStatement]:
    """The statements, after those for arguments without which they have no effect."""
    values: dict[str, object] = {}
    for statement in statements:
        values |= with_prerequisite(statement.argument, statement.value)
    values |= {statement.argument: statement.value for statement in statements}
    return [user_statement(name, value) for name, value in values.items()]


def _accepts(kit: Kit, facts: ModelFacts, statements: Sequence[UserStatement]) -> bool:
    try:
        resolve_for(kit, facts, *_with_prerequisites(statements))
    except Refusal:
        return False
    return True


def group_into_launches(kit: Kit, facts: ModelFacts, statements: Sequence[UserStatement]) -> list[list[UserStatement]]:
    """Few launches that together have every value once, with at most one value per argument each."""
    remaining, launches = list(statements), []
    while remaining:
        launch: list[UserStatement] = []
        for statement in remaining:
            if all(statement.argument != other.argument for other in launch) and _accepts(
                kit, facts, [*launch, statement]
            ):
                launch.append(statement)
        remaining = [value for value in remaining if value not in launch]
        launches.append(launch)
    return launches


def _check_launch(kit: Kit, folder: Path, facts: ModelFacts, statements: Sequence[UserStatement]) -> None:
    """Start a server with these values. Fault names the value at fault, or the smallest combination that was found."""
    reasons: list[NotServing] = []

    def fails(tried: Sequence[UserStatement]) -> bool:
        if not _accepts(kit, facts, tried):
            return False
        try:
            with serving(kit, folder, tried) as server:
                _generate(server)
                _check_read_back(_info(server), tried)
        except NotServing as reason:
            reasons.append(reason)
            return True
        return False

    if not fails(statements):
        return
    culprits: Sequence[UserStatement] = at_fault(statements, fails)
    if len(culprits) < len(statements) and not fails(culprits):  # it fails by chance
        culprits = statements
    accepted = "is accepted" if len(culprits) == 1 else "are accepted together"
    shown_values = " and ".join(map(shown, culprits))
    raise Fault(f"{shown_values} {accepted}, but the server does not serve: {reasons[-1]}") from reasons[-1]


def at_fault(
    values: Sequence[Value], fails: Callable[[Sequence[Value]], bool], fixed: Sequence[Value] = ()
) -> list[Value]:
    """Those of `values` that fail with `fixed`, and none too many: delta debugging (Zeller, ESEC 1999)."""
    if len(values) == 1:
        return list(values)
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    for half in (first, second):
        if fails([*fixed, *half]):
            return at_fault(half, fails, fixed)
    in_first = at_fault(first, fails, [*fixed, *second])
    return [*in_first, *at_fault(second, fails, [*fixed, *in_first])]


def serving(kit: Kit, folder: Path, statements: Sequence[UserStatement]) -> AbstractContextManager[Server]:
    """A server with these values."""
    key = API_KEY if any(statement.argument == "api_key" for statement in statements) else ""
    return running_server(_command_line(kit, folder, statements), kit.scratch, key)


def _command_line(kit: Kit, folder: Path, statements: Sequence[UserStatement]) -> list[str]:
    """The command line, with a small pool unless a value sets it, so that a small machine starts quickly."""
    names = {statement.argument for statement in statements}
    arguments = ["--device", kit.device_text, "--model-path", str(folder)]
    arguments += [] if "max_total_tokens" in names else ["--max-total-tokens", "4096"]
    for statement in _with_prerequisites(statements):
        argument = ARGUMENTS[statement.argument]
        if argument.kind.base is bool and not argument.kind.many:
            arguments.append(argument.flag if statement.value else f"--no-{argument.flag[2:]}")
        elif argument.kind.many:
            arguments += [argument.flag, *map(str, statement.value)]
        else:
            arguments.append(f"{argument.flag}={statement.value}")
    return arguments


def _generate(server: Server, reference: Reference | None = None, tokens: Sequence[int] = (), dtype: str = "") -> None:
    body = {
        "input_ids": list(tokens) or prompt(12, 1),
        "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True},
    }
    status, answer = server.request("/generate", body)
    if status != 200 or len(answer.get("output_ids", ())) != OUTPUT_TOKENS:
        raise NotServing(f"/generate answered with status {status}: {answer}")
    if reference is not None:
        reference.check_greedy(tokens, answer["output_ids"], dtype, "output over HTTP")


def _info(server: Server) -> dict[str, object]:
    status, answer = server.request("/get_server_info")
    if status != 200:
        raise NotServing(f"/get_server_info answered with status {status}")
    info: dict[str, object] = answer
    return info


def _check_read_back(info: Mapping[str, object], statements: Sequence[UserStatement]) -> None:
    provenances = info["arguments"]
    assert isinstance(provenances, dict)
    for statement in statements:
        argument = ARGUMENTS[statement.argument]
        if argument.arg.secret or argument.asks_for_automatic(statement.value):
            continue
        value = provenances[statement.argument]["value"]
        if value != argument.kind.dump(statement.value):
            raise Fault(f"{shown(statement)} was set, but /get_server_info reports {value!r}")


def _support(kit: Kit) -> dict[str, tuple[Support, ...]]:
    """The support that the plugin declares for arguments on this device's variant."""
    variant = kit.device_facts.variant
    support_by_name = {
        name: on_variant(variant, declarations)
        for name, declarations in by_argument(kit.manifest.facts.support).items()
    }
    return {name: support for name, support in support_by_name.items() if support}


def _declared(kit: Kit, statuses: Sequence[str]) -> list[UserStatement]:
    """Values of implemented arguments for which the plugin declares one of these statuses."""
    statements: list[UserStatement] = []
    for name, support in _support(kit).items():
        argument = ARGUMENTS[name]
        if argument.status != "implemented" or name in NOT_TRIED:
            continue
        for statement in _candidates(argument, kit):
            verdict = support_of_value(argument, statement.value, support)
            if verdict is not None and verdict.status in statuses:
                statements.append(statement)
    return statements


def shown(statement: UserStatement) -> str:
    return f"{statement.argument} = {ARGUMENTS[statement.argument].show(statement.value)}"
