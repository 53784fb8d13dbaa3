"""Faults of the platform contract: discovery, checks, probes, choice."""

from fault import Fault

_PROBE = "tests/core/platform/test_probe.py"
_CHECKS = "tests/core/platform/test_checks.py"
_CHOOSE = "tests/core/platform/test_choose.py"
_REGISTRY = "tests/core/platform/test_registry.py"

FAULTS = (
    Fault(
        name="unknown-platform-member-accepted",
        file="core/srv/platform/contract.py",
        text="    check_known_names(public, members, distribution, type(live).__name__)\n",
        planted="",
        effect="A plugin's misspelt method is never called, and no error is reported.",
        tests=("tests/core/platform/test_contract.py",),
    ),
    Fault(
        name="unknown-manifest-member-accepted",
        file="core/srv/platform/checks.py",
        text='    _check_known(plugin, manifest, Manifest, "Manifest")\n',
        planted="",
        effect="A misspelt member of a manifest has no effect, and no error is reported.",
        tests=(_CHECKS, _REGISTRY),
    ),
    Fault(
        name="newer-contract-accepted",
        file="core/srv/platform/checks.py",
        text="        oldest <= version <= api,\n",
        planted="        oldest <= version,\n",
        effect="A plugin that was written for a newer srv is loaded and fails later.",
        tests=(_CHECKS,),
    ),
    Fault(
        name="optional-member-never-required",
        file="core/srv/platform/contract.py",
        text="OPTIONAL.get(member) in (None, *capabilities):",
        planted="member not in OPTIONAL:",
        effect="A platform that declares a communicator and has none is started, and fails when its ranks join.",
        tests=("tests/core/platform/test_contract.py",),
    ),
    Fault(
        name="probe-timeout-ignored",
        file="core/srv/platform/probe.py",
        text="ready = selector.select(max(0.0, deadline - time.monotonic()))",
        planted="ready = selector.select()",
        effect="One hanging driver makes every command of srv hang.",
        tests=(_PROBE,),
        hangs=True,
    ),
    Fault(
        name="probe-children-outlive-it",
        file="core/srv/platform/probe.py",
        text="        os.killpg(process.pid, signal.SIGKILL)\n",
        planted="        process.kill()\n",
        effect="Processes that a hanging probe has started keep running after the command has ended.",
        tests=(_PROBE,),
    ),
    Fault(
        name="autoload-stays-on-in-probes",
        file="core/srv/platform/probe.py",
        text='env={**os.environ, AUTOLOAD: "0"},',
        planted="env={**os.environ},",
        effect="A vendor's wheel without its driver makes the probe crash in `import torch`.",
        tests=(_PROBE,),
    ),
    Fault(
        name="simulated-device-chosen-automatically",
        file="core/srv/platform/choose.py",
        text=" and not result.device.simulated\n",
        planted="\n",
        effect="A server starts on a simulated card although there is a real device.",
        tests=(_CHOOSE,),
    ),
    Fault(
        name="patching-plugin-accepted",
        file="core/srv/platform/registry.py",
        text="    guard.check(distribution)\n    if wall.attempted:",
        planted="    if wall.attempted:",
        effect="A plugin that replaces functions of srv is loaded.",
        tests=(_REGISTRY,),
    ),
    Fault(
        name="variant-not-compared",
        file="core/srv/platform/choose.py",
        text="if variant is not None and result.device.variant != variant:",
        planted="if variant is not None and not result.device.variant:",
        effect="--device npu:a3 starts on an A2.",
        tests=(_CHOOSE,),
    ),
)
