"""The conformance kit: does a platform plugin keep what it declares?

    report = run("NAME", Level.L3)
    report.write("out.jsonl")

    model       what is said: levels, outcomes, the report
    catalogue   every check: name, level, one line, what it needs, where it is
    runner      runs them, each level in a child process of its own, with a time limit a check (child)
    kit         what a check is given: the plugin, its device, its live platform

    static      L0   manifest, versions, purity, statements, probe           (no torch)
    platform pool sampler          L1   laws that hold on any device
    ops attention graphs           L2   each op, backend and captured step against a reference
    engine                         L3   a small model through the real engine
    arguments                      L4   what is declared of arguments, against a real server

    setups bench                   how backends are set up here, and held against float64
    facts small local reference    a small model, written here; an engine around it; the same on the host
    values server                  values worth trying; a real `srv launch`

Needs nothing but the installed distributions: no checkout, no model, no network.
"""

from srv.testing.conformance.model import Level, Outcome, Report
from srv.testing.conformance.runner import run

__all__ = ["Level", "Outcome", "Report", "run"]
