"""A process that encodes texts: `python -m srv.server.text.encode_child FILE_OR_FOLDER [CODE]`, the tokenizer's.

    parent                                child
          ◄────────────────────────────── an empty frame: the tokenizer is loaded
    Texts ──────────────────────────────► encodes them
          ◄────────────────────────────── Ids

Frames are those of `srv.io.bounded_child`, with MessagePack. The child ends when its standard input ends.
"""

from __future__ import annotations

import os
import sys
from array import array

import msgspec

from srv.io.bounded_child import channels, ignore_signals, read_frame, write_frame
from srv.server.text.encode_frames import CODE, Ids, Texts


def main(tokenizer: str, code: str = "") -> int:
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are several of these processes, each with one thread
    source, sink = channels()
    from srv.server.text.tokenizer import load_tokenizer

    text = load_tokenizer(tokenizer, remote_code=code == CODE)
    write_frame(sink, b"")
    while content := read_frame(source):
        request = msgspec.msgpack.decode(content, type=Texts)
        encoded = text.encode_batch(request.texts, request.special)
        write_frame(sink, msgspec.msgpack.encode(Ids([array("i", ids).tobytes() for ids in encoded])))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
