"""The conformance kit: does a platform plugin do what it declares?

    report = run("NAME", Level.L3)
    report.write("out.jsonl")

    model       levels, checks, outcomes, the report
    catalogue   every check: name, level, summary, requirements, function
    runner      runs the checks, each level in its own child process (child), with a time limit per check
    processes   starts the children, asks and ends them; template is the process that they are forked from
    kit         the argument of every check: the plugin, its device, its live platform

    static      L0   manifest, versions, purity, probe, resolution          (no torch)
    platform pool sampler          L1   rules that hold on any device
    ops attention graphs           L2   each op, backend and captured step against a reference
    steps invariance undeclared    L2   what steps leave behind; equal bits; features that work undeclared
    engine                         L3   a small model through the real engine
    arguments                      L4   declared and accepted argument values on a real server

    setups bench                   backends with small models, compared with float64
    facts small local reference    a small random model; an engine that runs it; a float32 reference on the host
    values server                  argument values to try; a real `srv launch`

Needs nothing but the installed distributions: no checkout, no model, no network.
"""

from srv.testing.conformance.model import Level, Outcome, Report
from srv.testing.conformance.runner import run

__all__ = ["Level", "Outcome", "Report", "run"]
