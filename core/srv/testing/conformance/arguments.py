"""L4: what is declared of the arguments, against a real server over HTTP.

Values are put together into as few launches as agree with one another; where such a launch fails, its halves tell
which value is at fault. Values that are worth trying but make no server that anyone could use (a context of one
token) are not among them: what a number does is core's matter, not the plugin's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from srv.args.command_line import read_text
from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.args.statement import Origin, UserStatement
from srv.args.support import REFUSED, by_argument, on_variant, support_of_value
from srv.errors import Refusal
from srv.models.read import read_facts
from srv.platform.facts import Support
from srv.specs import ModelFacts
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import folder_for, model_for, prompt
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.reference import Reference
from srv.testing.conformance.server import NotServing, Server, refused, serving
from srv.testing.conformance.setups import declared_dtypes, resolved
from srv.testing.conformance.values import SOURCE, says, texts

MOST_VALUES = 4  # of one argument
OUTPUT = 8
API_KEY = "conformance"

# Values of arguments that are no choice; those of arguments that are missing here and no choice either are not tried.
SENSIBLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
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
    }
)
FIXED = ("device", "model_path", "tokenizer_path", "chat_template", "revision", "host", "port")  # of every launch


def serves(kit: Kit) -> str:
    """A server starts with nothing set, answers, and its output is the reference's."""
    facts, folder = _model(kit)
    dtype = declared_dtypes(kit)[0]
    tokens = prompt(20, 1)
    with _serving(kit, folder, [says("dtype", dtype)]) as server:
        _generate(server, Reference(folder), tokens, dtype)
        info = _info(server)
        if info["platform"] != kit.name:
            raise Fault(f"asked for {kit.name}, the server says that it runs on {info['platform']}")
        return f"{facts.name} on {info['platform']}, {OUTPUT} tokens"


def supported(kit: Kit) -> str:
    """Everything that is accepted starts, answers and reads back as it was set."""
    _, folder = _model(kit)
    facts = read_facts(folder)
    wanted = _accepted(kit, facts)
    launches = _together(kit, facts, wanted)
    for said in launches:
        _check_launch(kit, folder, said)
    names = {each.argument for each in wanted}
    silent = [each.name for each in ARGUMENTS.values() if each.status == "implemented" and each.name not in names]
    return f"{len(wanted)} values of {len(names)} arguments in {len(launches)} launches; not tried: {', '.join(silent)}"


def refuses(kit: Kit) -> str:
    """What is declared unsupported or not applicable is refused with its code, before anything is loaded."""
    _, folder = _model(kit)
    facts = read_facts(folder)
    wanted = list(_declared(kit, REFUSED))
    if not wanted:
        raise NotApplicable("the plugin declares no value of an argument unsupported")
    for said in wanted:
        try:
            resolved(kit, facts, said)
        except Refusal as refusal:
            if not any(each.what == said.argument for each in refusal.rejections):
                raise Fault(
                    f"{_shown(said)} is declared unsupported, but the refusal is of others: {refusal}"
                ) from refusal
            continue
        raise Fault(f"{_shown(said)} is declared unsupported, but it is accepted")
    apart = {said.argument: said for said in wanted}  # one value an argument in one launch
    ended = refused(_line(kit, folder, list(apart.values())), kit.scratch)
    missing = [name for name in apart if f"{name} = " not in ended.text]
    if ended.status != 2 or missing:
        raise Fault(
            f"a launch with {', '.join(map(_shown, apart.values()))} ended with status {ended.status}"
            f"{f' and does not name {missing[0]}' if missing else ''}: {ended.last_line}"
        )
    return f"{len(wanted)} values of {len(apart)} arguments are refused"


def undeclared(kit: Kit) -> str:
    """Where a plugin declares support argument by argument, none that it is silent about is accepted and serves."""
    support = _support(kit)
    if not support:
        raise NotApplicable("the plugin declares nothing of single arguments: what core implements, it takes")
    _, folder = _model(kit)
    accepted = _accepted(kit, read_facts(folder))
    silent = sorted({said.argument for said in accepted} - set(support))
    if silent:
        raise Undeclared(
            f"accepted and served, and not declared: {', '.join(silent)}",
            "Add a srv.platform.facts.Support for each to PlatformFacts.support.",
        )
    return f"all of {len({said.argument for said in accepted})} arguments are declared"


def _model(kit: Kit) -> tuple[ModelFacts, Path]:
    facts = model_for(kit, declared_dtypes(kit)[0])
    return facts, folder_for(kit, facts)


def _accepted(kit: Kit, facts: ModelFacts) -> list[UserStatement]:
    """Values that the plugin accepts, each alone, for the small model on this device; few of each argument."""
    found: list[UserStatement] = []
    for argument in ARGUMENTS.values():
        if argument.status == "implemented" and argument.name not in FIXED:
            taken = [said for said in _candidates(argument, kit) if _accepts(kit, facts, [said])]
            found += taken[:MOST_VALUES]
    return found


def _candidates(argument: Argument, kit: Kit) -> list[UserStatement]:
    """Values worth a launch: all choices, and sensible ones of numbers and texts; never the declared default."""
    words = SENSIBLE.get(argument.name) or (
        texts(argument, kit.manifest) if argument.choices or argument.arg.family or argument.kind.base is bool else ()
    )
    if argument.name == "model_impl" and importlib.util.find_spec("transformers") is None:
        words = tuple(word for word in words if word != "transformers")
    read = (read_text(argument, word, Origin.COMMAND_LINE, SOURCE) for word in words)
    said = (each for each in read if isinstance(each, UserStatement))
    return [each for each in said if argument.validation_error(each.value) is None and each.value != argument.default]


def _accepts(kit: Kit, facts: ModelFacts, said: Sequence[UserStatement]) -> bool:
    try:
        resolved(kit, facts, *said)
    except Refusal:
        return False
    return True


def _together(kit: Kit, facts: ModelFacts, wanted: Sequence[UserStatement]) -> list[list[UserStatement]]:
    """As few launches as take every value once, each argument at most once in one."""
    left, launches = list(wanted), []
    while left:
        launch: list[UserStatement] = []
        for said in left:
            if all(said.argument != each.argument for each in launch) and _accepts(kit, facts, [*launch, said]):
                launch.append(said)
        left = [said for said in left if said not in launch]
        launches.append(launch)
    return launches


def _check_launch(kit: Kit, folder: Path, said: Sequence[UserStatement]) -> None:
    """Start a server with these values; Fault names the value (or the pair) at fault."""
    try:
        with _serving(kit, folder, said) as server:
            _generate(server)
            _check_read_back(_info(server), said)
    except NotServing as reason:
        if len(said) == 1:
            raise Fault(f"{_shown(said[0])} is accepted, but the server does not serve: {reason}") from reason
        middle = len(said) // 2
        _check_launch(kit, folder, said[:middle])
        _check_launch(kit, folder, said[middle:])
        together = ", ".join(map(_shown, said))
        raise Fault(f"{together} are accepted together, but the server does not serve: {reason}") from reason


def _serving(kit: Kit, folder: Path, said: Sequence[UserStatement]) -> AbstractContextManager[Server]:
    key = API_KEY if any(each.argument == "api_key" for each in said) else ""
    return serving(_line(kit, folder, said), kit.scratch, key)


def _line(kit: Kit, folder: Path, said: Sequence[UserStatement]) -> list[str]:
    """The command line. What no value says is set so that a small machine serves quickly."""
    named = {each.argument for each in said}
    line = ["--device", kit.device_text, "--model-path", str(folder)]
    line += [] if "max_total_tokens" in named else ["--max-total-tokens", "4096"]
    for each in said:
        argument = ARGUMENTS[each.argument]
        if argument.kind.base is bool and not argument.kind.many:
            line.append(argument.flag if each.value else f"--no-{argument.flag[2:]}")
        elif argument.kind.many:
            line += [argument.flag, *map(str, each.value)]
        else:
            line.append(f"{argument.flag}={each.value}")
    return line


def _generate(server: Server, reference: Reference | None = None, tokens: Sequence[int] = (), dtype: str = "") -> None:
    asked = {
        "input_ids": list(tokens) or prompt(12, 1),
        "sampling_params": {"max_new_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True},
    }
    status, answer = server.ask("/generate", asked)
    if status != 200 or len(answer.get("output_ids", ())) != OUTPUT:
        raise NotServing(f"/generate answered with status {status}: {answer}")
    if reference is not None:
        reference.check_greedy(tokens, answer["output_ids"], dtype, "output over HTTP")


def _info(server: Server) -> dict[str, object]:
    status, answer = server.ask("/get_server_info")
    if status != 200:
        raise NotServing(f"/get_server_info answered with status {status}")
    info: dict[str, object] = answer
    return info


def _check_read_back(info: Mapping[str, object], said: Sequence[UserStatement]) -> None:
    stories = info["arguments"]
    assert isinstance(stories, dict)
    for each in said:
        argument = ARGUMENTS[each.argument]
        if argument.arg.secret or argument.asks_for_automatic(each.value):
            continue
        value = stories[each.argument]["value"]
        if value != argument.kind.dump(each.value):
            raise Fault(f"{_shown(each)} was set, and /get_server_info says {value!r}")


def _support(kit: Kit) -> dict[str, tuple[Support, ...]]:
    """What the plugin declares of arguments on this device's variant."""
    variant = kit.device_facts.variant
    found = {name: on_variant(variant, said) for name, said in by_argument(kit.manifest.facts.support).items()}
    return {name: said for name, said in found.items() if said}


def _declared(kit: Kit, statuses: Sequence[str]) -> list[UserStatement]:
    """Values of implemented arguments of which the plugin declares one of these statuses."""
    found: list[UserStatement] = []
    for name, support in _support(kit).items():
        argument = ARGUMENTS[name]
        if argument.status != "implemented" or name in FIXED:
            continue
        for said in _candidates(argument, kit):
            verdict = support_of_value(argument, said.value, support)
            if verdict is not None and verdict.status in statuses:
                found.append(said)
    return found


def _shown(said: UserStatement) -> str:
    return f"{said.argument} = {ARGUMENTS[said.argument].show(said.value)}"
