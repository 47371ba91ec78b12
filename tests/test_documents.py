"""The documents against the code: PROTOCOL.md's tables and examples, the README's flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from nanocore.client.connection import ENGINE_TIMEOUT_S
from nanocore.engine_core.cli import build_parser
from nanocore.engine_core.io.control_desk import MAX_CALLS
from nanocore.engine_core.io.front_desk import BACKLOG_TIMEOUT_S
from nanocore.engine_core.io.kv_event_publisher import MAX_QUEUED_BATCHES
from nanocore.engine_core.io.kv_event_replay import (
    MAX_RING_BATCHES,
    MAX_RING_BYTES,
    REPLAY_TIMEOUT_S,
)
from nanocore.engine_core.io.reception import PING_INTERVAL_S, SESSION_TIMEOUT_S
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.protocol.codec import MAX_BODY_BYTES, MAX_RETURNED_ID_CHARS, MAX_SUBMIT_BYTES
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
    MAX_FILE_BYTES,
    PROTOCOL_VERSION,
    Capability,
    Message,
    Op,
)
from nanocore.protocol.sockets import MAX_FRAME_BYTES
from nanocore.protocol.sockets.options import PEER_HIGH_WATER_MARK
from tests.protocol.samples import directions
from tests.protocol_files.examples import EXAMPLES, MARK, with_examples
from tests.protocol_files.schema import make_schema
from tests.protocol_files.tables import (
    HEADINGS,
    SAME_TABLE,
    expected_rows,
    read_tables,
    table_after,
)

ROOT = Path(__file__).parents[1]
PROTOCOL = (ROOT / "PROTOCOL.md").read_text("utf-8")
KV_EVENTS = (ROOT / "KV_EVENTS.md").read_text("utf-8")
TABLES = read_tables(PROTOCOL)
README = (ROOT / "README.md").read_text()
MESSAGES = {message.op.name: message for message in (*FROM_CLIENT, *FROM_ENGINE)}


def test_the_versions_agree() -> None:
    major, minor = PROTOCOL_VERSION
    assert f"# The nanocore wire protocol, version {major}.{minor}\n" in PROTOCOL
    changelog = PROTOCOL[PROTOCOL.index("Changelog\n") :]
    assert changelog.split("\n")[2].startswith(f"- {major}.{minor}: ")


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_table_of_fields_follows_from_the_types(heading: str) -> None:
    written = [row[:5] for row in TABLES[heading]]
    assert written == expected_rows(HEADINGS[heading])
    assert all(row[5] for row in TABLES[heading]), "each field has a meaning"


def test_every_struct_of_the_wire_has_a_table() -> None:
    _, definitions = msgspec.json.schema_components([*FROM_CLIENT, *FROM_ENGINE])
    described = (*HEADINGS.values(), *SAME_TABLE.values())
    assert {struct.__name__ for struct in described} == definitions.keys()


def test_the_table_of_operations_is_complete() -> None:
    rows = {
        int(row[0], 16): (row[1].split("]")[0].strip("["), row[2])
        for row in table_after(PROTOCOL, "## 7. Operations")
    }
    senders: dict[type[Message], str] = {}
    for message in MESSAGES.values():
        both = message in FROM_CLIENT and message in FROM_ENGINE
        senders[message] = "either" if both else "client" if message in FROM_CLIENT else "engine"
    assert rows == {int(m.op): (m.op.name, sender) for m, sender in senders.items()}
    assert {int(op) for op in Op} == rows.keys()


@pytest.mark.parametrize("struct", [KVEventBatch, BlockStored, BlockRemoved, AllBlocksCleared])
def test_the_kv_event_tables_hold_the_fields_in_order(struct: type[msgspec.Struct]) -> None:
    rows = [row[0] for row in table_after(KV_EVENTS, f"## {struct.__name__}")]
    config = struct.__struct_config__
    tag = [config.tag_field] if config.tag else []
    assert rows == [*tag, *struct.__struct_fields__]


def test_the_kv_event_limits_in_the_text_are_those_in_the_code() -> None:
    assert f"up to {MAX_QUEUED_BATCHES} unpublished" in KV_EVENTS
    assert f"the last {MAX_RING_BATCHES}, of {MAX_RING_BYTES // 2**20} MiB" in KV_EVENTS
    assert f"takes nothing for {REPLAY_TIMEOUT_S:.0f} s" in KV_EVENTS
    assert f"END_SEQ is `{END_SEQ.hex()}`" in KV_EVENTS


def test_the_error_codes_and_capabilities_are_the_closed_sets() -> None:
    assert [row[0] for row in table_after(PROTOCOL, "## 12. Errors")] == list(get_args(ErrorCode))
    rows = table_after(PROTOCOL, "## 6. Versions and capabilities")
    assert [row[0] for row in rows] == list(get_args(Capability))


def test_the_byte_examples_are_what_the_code_sends() -> None:
    assert with_examples(PROTOCOL) == PROTOCOL, "run python -m tests.protocol_files"
    assert {mark[1] for mark in MARK.finditer(PROTOCOL)} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bytes_of_an_example_read_off_the_page_are_its_message(name: str) -> None:
    block = PROTOCOL.split(f"<!-- example: {name} -->\n```\n", 1)[1].split("\n```", 1)[0]
    op, *body = (bytes.fromhex(line.split("│")[1]) for line in block.splitlines())
    for decoder, accepted, _ in directions():
        if type(EXAMPLES[name]) in accepted:
            assert decoder.decode([op, b"".join(body)]) == EXAMPLES[name]


def test_the_schema_is_up_to_date() -> None:
    schema = (ROOT / "nanocore" / "conformance" / "schema.json").read_text("utf-8")
    assert schema == make_schema(PROTOCOL), "run python -m tests.protocol_files"


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


def test_the_timings_and_limits_in_the_text_are_those_in_the_code() -> None:
    assert f"nothing for {SESSION_TIMEOUT_S:.0f} s (`session_timeout_ms`)" in PROTOCOL
    assert f"takes nothing for {BACKLOG_TIMEOUT_S:.0f} s is closed" in PROTOCOL
    assert f"silent for {ENGINE_TIMEOUT_S:.0f} s for dead" in PROTOCOL
    assert f"| SNDHWM, RCVHWM | {PEER_HIGH_WATER_MARK} |" in PROTOCOL
    assert f"| MAXMSGSIZE | {MAX_FRAME_BYTES // 2**20} MiB |" in PROTOCOL
    assert f"at most {MAX_FRAME_BYTES // 2**20} MiB" in PROTOCOL
    assert f"{MAX_FILE_BYTES // 2**20} MiB per file" in PROTOCOL
    assert f"more than {MAX_BACKLOG_BYTES // 2**20} MiB unread" in PROTOCOL
    assert f"may have {MAX_BODY_BYTES // 2**20} MiB, and a SUBMIT" in PROTOCOL
    assert f"a SUBMIT {MAX_SUBMIT_BYTES // 2**10} KiB beside its prompt" in PROTOCOL
    assert f"may have {MAX_CALLS} CONTROLs under way" in PROTOCOL
    assert f"nil above {MAX_RETURNED_ID_CHARS} characters" in PROTOCOL
    assert PING_INTERVAL_S == 1.0
    assert "PING to every session every second" in PROTOCOL
