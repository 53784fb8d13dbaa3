"""The start of the engine process: its imports before it gets its specification, and its end if it gets none."""

from __future__ import annotations

import subprocess
import sys

from srv.engine.supervisor import EngineProcess

WITHOUT_SPECIFICATION = """
import sys, types
from srv.engine import process

def read():
    print("srv.engine.build" in sys.modules, "torch" in sys.modules)
    return b""  # the parent has closed the pipe

sys.stdin = types.SimpleNamespace(buffer=types.SimpleNamespace(read=read))
print(process.main())
"""
SHARDED = """
import sys
from srv.engine import build, loop, process
from srv.executor.multi_process import MultiProcessExecutor
print("torch" in sys.modules)
"""


def output(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()


def test_modules_are_imported_before_the_specification_arrives() -> None:
    assert output(WITHOUT_SPECIFICATION, "srv.worker.rank") == ["True", "True", "1"]


def test_an_engine_whose_ranks_are_other_processes_imports_no_torch() -> None:
    assert output(WITHOUT_SPECIFICATION) == ["True", "False", "1"]
    assert output(SHARDED) == ["False"]


def test_a_process_without_a_specification_can_be_ended() -> None:
    engine = EngineProcess()
    engine.start(lambda rank: {})
    process = engine._process
    assert process is not None
    assert process.poll() is None
    engine.close(drained=False)
    assert process.returncode is not None
    assert process.stdin is not None
    assert process.stdin.closed


def test_the_engine_imports_only_what_every_model_needs() -> None:
    """Progress bars, GGUF decoders, transformers and torch's compiler are imported only when they are used."""
    names = ("rich", "gguf", "transformers", "torch._dynamo", "sympy")
    code = f"import sys, srv.engine.build, srv.worker.rank; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
