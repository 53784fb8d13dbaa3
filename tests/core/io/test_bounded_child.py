"""The channels of a child process: frames pass, whatever its code prints or reads."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from srv.io.bounded_child import framed

CHILD = """
    import os, sys
    from srv.io.bounded_child import channels, read_frame, write_frame
    source, sink = channels()
    print("printed before", flush=True)
    while question := read_frame(source):
        os.write(1, b"written by a library")
        print("read:", sys.stdin.read(), flush=True)
        write_frame(sink, question.upper())
"""


def test_what_code_prints_or_reads_is_no_frame() -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(CHILD)],
        input=framed(b"one") + framed(b"two"),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert process.stdout == framed(b"ONE") + framed(b"TWO")
    assert process.stderr.count(b"written by a library") == process.stderr.count(b"read: \n") == 2
    assert b"printed before" in process.stderr
