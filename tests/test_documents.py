"""The documents against the code: PROTOCOL.md's tables and examples, the README's flags."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from nanocore.engine_core.cli import build_parser
from nanocore.engine_core.kv_event_publisher import MAX_QUEUED_BATCHES
from nanocore.engine_core.kv_event_replay import (
    MAX_RING_BATCHES,
    MAX_RING_BYTES,
    REPLAY_TIMEOUT_S,
)
from nanocore.protocol.codec import encode
from nanocore.protocol.errors import ErrorCode
from nanocore.protocol.kv_events import (
    END_SEQ,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from nanocore.protocol.messages import (
    FROM_CLIENT,
    FROM_ENGINE,
    MAX_CACHE_SALT_CHARS,
    MAX_REQUEST_ID_CHARS,
    PROTOCOL_VERSION,
    Event,
    Limits,
    Message,
    ModelCard,
    Op,
    Output,
)
from nanocore.protocol.sampling import EngineSamplingParams

ROOT = Path(__file__).parents[1]
PROTOCOL = (ROOT / "PROTOCOL.md").read_text()
README = (ROOT / "README.md").read_text()
MESSAGES = {message.op.name: message for message in (*FROM_CLIENT, *FROM_ENGINE)}


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its first two lines."""
    section = PROTOCOL.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def defaults(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field name to default, as the tables write it."""
    written = {}
    for field in msgspec.structs.fields(struct):
        if field.required:
            written[field.encode_name] = "required"
            continue
        value = field.default
        if value is msgspec.NODEFAULT:
            value = field.default_factory()
        if isinstance(value, msgspec.Struct):
            value = "{}"
        spelled = {None: "nil", b"": "empty", "": '""', True: "true", False: "false"}
        key = value if isinstance(value, (str, bytes, bool, type(None))) else NotImplemented
        written[field.encode_name] = spelled.get(key, str(value))
    return written


def test_the_versions_agree() -> None:
    major, minor = PROTOCOL_VERSION
    assert f"# The nanocore wire protocol, version {major}.{minor}\n" in PROTOCOL
    changelog = PROTOCOL[PROTOCOL.index("Changelog\n") :]
    assert changelog.split("\n")[2].startswith(f"{major}.{minor}: ")


@pytest.mark.parametrize("name", MESSAGES)
def test_each_messages_table_holds_its_fields_and_defaults(name: str) -> None:
    rows = {row[0]: row[2] for row in table_after(f"### {name}")}
    assert rows == defaults(MESSAGES[name])


def test_the_table_of_operations_is_complete() -> None:
    rows = {int(row[0], 16): (row[1], row[2]) for row in table_after("## 6. Operations")}
    senders: dict[type[Message], str] = {}
    for message in MESSAGES.values():
        both = message in FROM_CLIENT and message in FROM_ENGINE
        senders[message] = "either" if both else "client" if message in FROM_CLIENT else "engine"
    assert rows == {int(m.op): (m.op.name, sender) for m, sender in senders.items()}
    assert {int(op) for op in Op} == rows.keys()


def test_the_sampling_table_holds_the_fields_and_defaults() -> None:
    rows = {row[0]: row[2] for row in table_after("## 7. Sampling parameters")}
    assert rows == defaults(EngineSamplingParams)


@pytest.mark.parametrize("struct", [KVEventBatch, BlockStored, BlockRemoved, AllBlocksCleared])
def test_the_kv_event_tables_hold_the_fields_in_order(struct: type[msgspec.Struct]) -> None:
    rows = [row[0] for row in table_after(f"### {struct.__name__}")]
    config = struct.__struct_config__
    tag = [config.tag_field] if config.tag else []
    assert rows == [*tag, *struct.__struct_fields__]


def test_the_kv_event_limits_in_the_text_are_those_in_the_code() -> None:
    assert f"up to {MAX_QUEUED_BATCHES} unpublished" in PROTOCOL
    assert f"the last {MAX_RING_BATCHES}, of {MAX_RING_BYTES // 2**20} MiB" in PROTOCOL
    assert f"takes nothing for {REPLAY_TIMEOUT_S:.0f} s" in PROTOCOL
    assert f"END_SEQ is `{END_SEQ.hex()}`" in PROTOCOL


def test_the_error_codes_are_the_closed_set() -> None:
    rows = [row[0] for row in table_after("## 8. Error codes")]
    assert rows == list(ErrorCode.__args__)


@pytest.mark.parametrize("struct", [ModelCard, Limits, Event])
def test_maps_inside_messages_name_every_field(struct: type[msgspec.Struct]) -> None:
    for name in struct.__struct_fields__:
        assert f"`{name}`" in PROTOCOL


def test_the_limits_in_the_text_are_those_in_the_code() -> None:
    assert f"1 to {MAX_REQUEST_ID_CHARS} characters" in PROTOCOL
    assert f"1 to {MAX_CACHE_SALT_CHARS} characters" in PROTOCOL


def test_the_hex_example_is_what_the_code_sends() -> None:
    match = re.search(r"frames `([0-9a-f ]+)` and `([0-9a-f ]+)`", PROTOCOL)
    assert match is not None
    written = [bytes.fromhex(part) for part in match.groups()]
    assert written == encode(Output(handles=b"\7\0\0\0", tokens=b"\x2a\0\0\0"))


def test_the_documents_name_every_flag_and_no_other() -> None:
    flags = {
        option
        for action in build_parser()._actions
        for option in action.option_strings
        if action.help != "==SUPPRESS==" and option.startswith("--")
    }
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README.split("## Flags")[1]))
    assert written == flags


def test_no_document_is_too_long_to_read() -> None:
    assert len(PROTOCOL.splitlines()) <= 700
