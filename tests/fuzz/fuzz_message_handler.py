"""Coverage-guided fuzzing of the message handler and of the client's decoder, with atheris.

    python tests/fuzz/fuzz_message_handler.py [CORPUS_FOLDER] [libFuzzer's flags]

In an environment of its own, with atheris, msgspec, pyzmq, numpy and xxhash; neither torch nor a
model is needed. An input is a script as in tests/engine_core/io_script.py, which also says what
must hold: messages of three peers, outputs of steps, peers that stop reading or vanish, and
messages of an engine to a client. The first run writes seeds into the corpus folder. Any exception
is a finding: its input is written as `crash-...`; that file as the only argument runs it again.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import atheris
import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["nanocore"]):
    from nanocore.engine_core.io import message_handler
    from nanocore.engine_core.io.control_handler import ServedFiles
    from nanocore.protocol.codec import encode
    from nanocore.protocol.messages import Op
    from tests.engine_core.io_script import Kind, Record, ScriptRunner

HEADER = struct.Struct("<BBBH")
"""Of a record: kind, peer, op, and the number of bytes of the body that follows."""


def decode_script(data: bytes) -> Iterator[Record]:
    """The records of an input; the last body may be cut short."""
    offset = 0
    while offset + HEADER.size <= len(data):
        kind, peer, op, num_bytes = HEADER.unpack_from(data, offset)
        offset += HEADER.size
        yield Kind(kind % len(Kind)), peer % 3, op, data[offset : offset + num_bytes]
        offset += num_bytes


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time libFuzzer's own mutation; else one value of one msgpack body changes."""
    rng = random.Random(seed)
    script = list(decode_script(data))
    if not script or rng.random() < 0.5:
        return atheris.Mutate(data, max_size)
    index = rng.randrange(len(script))
    kind, peer, op, body = script[index]
    try:
        fields = msgspec.msgpack.decode(body)
        key = rng.choice(list(fields))
        fields[key] = rng.choice(
            [None, -1, 0, 2**31, 2**53, 2**64 - 1, 1.0, float("nan"), "", "x" * 300, b"", b"\1\0\0",
             b"\1\0\0\0", [], [fields[key]], {}, {"x": fields[key]}, True, *fields.values()]
        )  # fmt: skip
        body = msgspec.msgpack.encode(fields)
    except Exception:
        body = atheris.Mutate(body, len(body) + 16)
    script[index] = (kind, peer, op, body[:65535])
    if rng.random() < 0.2:
        script.insert(rng.randrange(len(script) + 1), rng.choice(script))
    return encode_script(script)[:max_size]


def encode_script(script: list[Record]) -> bytes:
    """The input that `decode_script` reads."""
    return b"".join(
        HEADER.pack(kind, peer, op, len(body)) + body for kind, peer, op, body in script
    )


def seeds() -> Iterator[bytes]:
    """One script for every sample message of either side, in an open session."""
    from tests.protocol.samples import CLIENT_MESSAGES, ENGINE_MESSAGES

    hello = (Kind.TO_ENGINE, 1, Op.HELLO, msgspec.msgpack.encode({"protocol": [1, 3]}))
    body = msgspec.msgpack.encode({"request_id": "r", "prompt_token_ids": b"\1\0\0\0"})
    submit = (Kind.TO_ENGINE, 1, Op.SUBMIT, body)
    stops_reading, reads_again = ((Kind.SOCKET_STATE, 1, state, b"") for state in (1, 0))
    for message in CLIENT_MESSAGES:
        op, body = encode(message)
        own = (Kind.TO_ENGINE, 1, op[0], body)
        yield encode_script([hello, own, (Kind.STEP, 1, 1, b""), own])
        waiting_siblings = [stops_reading, own, (Kind.STEP, 1, 0, b""), reads_again]
        yield encode_script([hello, submit, *waiting_siblings, (Kind.TIME, 0, 1, b"")])
    for message in ENGINE_MESSAGES:
        op, body = encode(message)
        yield encode_script([(Kind.TO_CLIENT, 0, op[0], body)])
    yield encode_script(
        [hello, submit, (Kind.SOCKET_STATE, 1, 2, b""), submit, (Kind.TIME, 0, 40, b"")]
    )
    yield encode_script([(Kind.RAW_FRAMES, 0, 1, b"\x10\x80\x80"), (Kind.RAW_FRAMES, 0, 0, b"")])


def main() -> None:
    """Write the seeds into the corpus folder, then fuzz."""
    corpus = next((Path(a) for a in sys.argv[1:] if not a.startswith("-")), None)
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed-{number:02}").write_bytes(seed)
    folder = Path(tempfile.mkdtemp(prefix="nc-fuzz-"))
    (folder / "tokenizer.json").write_bytes(b"{}" * 40_000)
    files = ServedFiles(folder)
    message_handler.logger.disabled = True

    def test_one_input(data: bytes) -> None:
        runner = ScriptRunner(files)
        runner.run(list(decode_script(data)))
        runner.leave()

    atheris.Setup(sys.argv, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
