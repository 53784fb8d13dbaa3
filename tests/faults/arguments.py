"""Faults of the server arguments and of the budget of `srv plan`."""

from fault import Fault

_BACKENDS = "tests/core/args/test_backends.py"
_RESOLVE = "tests/core/args/test_resolve.py"
_SOURCES = "tests/core/args/test_sources.py"
_BUDGET = "tests/core/planning/test_budget.py"

FAULTS = (
    Fault(
        name="environment-outranks-command-line",
        file="core/srv/args/statement.py",
        text="ENVIRONMENT = 1\n    COMMAND_LINE = 2",
        planted="ENVIRONMENT = 2\n    COMMAND_LINE = 1",
        effect="A flag on the command line is ignored if an environment variable sets the same argument.",
        tests=(_SOURCES, _RESOLVE),
    ),
    Fault(
        name="platform-default-beats-user",
        file="core/srv/args/statement.py",
        text="    PLATFORM = 2\n",
        planted="    PLATFORM = 5\n",
        effect="A value that the user sets is overwritten by the platform's default.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="auto-does-not-cancel-the-file",
        file="core/srv/args/resolve.py",
        text="below = [each for each in ranked[position:] if each.layer < Layer.USER]",
        planted="below = ranked[position:]",
        effect='"auto" on the command line leaves the value of the config file in force.',
        tests=(_RESOLVE,),
    ),
    Fault(
        name="unknown-flag-accepted",
        file="core/srv/args/sources.py",
        text='    rejections += unknown_flags(getattr(namespace, "unknown", ()))\n',
        planted="",
        effect="A misspelt flag is silently ignored.",
        tests=(_SOURCES,),
    ),
    Fault(
        name="config-file-refusal-swallowed",
        file="core/srv/args/sources.py",
        text="read_file(Path(config))\n        statements, rejections = statements + more, rejections + rejected",
        planted="read_file(Path(config))\n        statements = statements + more",
        effect="A misspelt key of the config file is silently ignored.",
        tests=(_SOURCES,),
    ),
    Fault(
        name="platform-constraints-not-checked",
        file="core/srv/args/resolve.py",
        text="for each in (*manifest.facts.constraints, *declared)]",
        planted="for each in declared]",
        effect="Values that the platform cannot serve are accepted, and fail when the first request runs.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="one-refusal-at-a-time",
        file="core/srv/args/resolve.py",
        text="raise Refusal(list(dict.fromkeys(reworded(each, used) for each in state.rejections)))",
        planted="raise Refusal(list(dict.fromkeys(reworded(each, used) for each in state.rejections))[:1])",
        effect="An operator sees one wrong value per start instead of all of them.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="planned-value-accepted",
        file="core/srv/args/resolve.py",
        text="argument.planned_reason(value)",
        planted="argument.planned_reason(argument.default)",
        effect="A flag whose feature does not exist is accepted and has no effect.",
        tests=("tests/core/args/test_declared.py",),
    ),
    Fault(
        name="secret-in-the-report",
        file="core/srv/args/statement.py",
        text="return argument.show(value) if argument.arg.secret and value is not None else argument.kind.dump(value)",
        planted="return argument.kind.dump(value)",
        effect="The API key is in the start-up log and in /get_server_info.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="page-zero-not-in-the-budget",
        file="core/srv/planning/pools.py",
        text="return sum((count + 1) * size for",
        planted="return sum(count * size for",
        effect="The pool is one page larger than the memory that is left for it.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="reserved-memory-ignored",
        file="core/srv/planning/budget.py",
        text="pool = min(static - used, free_bytes - reserved_bytes)",
        planted="pool = min(static - used, free_bytes)",
        effect="A high --mem-fraction-static leaves no memory for activations.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="wrong-item-size",
        file="core/srv/dtypes.py",
        text='"bfloat16": 2',
        planted='"bfloat16": 4',
        effect="Weights and pool of bfloat16 count twice, so that only half of the pages fit.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="one-scale-per-token-not-counted",
        file="core/srv/specs.py",
        text="return elements + SCALE_BYTES if",
        planted="return elements + SCALE_BYTES // 2 if",
        effect="A pool of int8 is larger than its budget.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="backends-asked-about-the-whole-model",
        file="core/srv/args/backends.py",
        text="    return rank_facts(model, ranks)\n",
        planted="    return model\n",
        effect="A plan for several ranks accepts a backend that cannot compute the heads of one rank.",
        tests=(_BACKENDS,),
    ),
)
