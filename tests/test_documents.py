"""The documents against the code: PROTOCOL.md's tables and examples, flags, exit codes, models."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import nanocore.client
from nanocore.client.connection.engine_connection import (
    ENGINE_TIMEOUT_S,
    GRACE_S,
    TCP_ENGINE_TIMEOUT_S,
)
from nanocore.engine_core.cli import build_parser
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.control_handler import MAX_CALLS
from nanocore.engine_core.io.handshake import (
    MIN_SILENT_CHECKS,
    PING_INTERVAL_S,
    SESSION_TIMEOUT_S,
)
from nanocore.engine_core.io.kv_event_publisher import (
    MAX_QUEUED_BATCHES,
    MAX_RING_BATCHES,
    MAX_RING_BYTES,
    REPLAY_TIMEOUT_S,
)
from nanocore.engine_core.io.limits import DEFAULT_MAX_NUM_CLIENTS
from nanocore.engine_core.io.message_handler import BACKLOG_TIMEOUT_S
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.engine_core.log.event_log import StepDone
from nanocore.engine_core.log.trace import StepTrace
from nanocore.kv_cache import CacheGroup
from nanocore.protocol.codec import MAX_BODY_BYTES, MAX_RETURNED_ID_CHARS, MAX_SUBMIT_BYTES
from nanocore.protocol.errors import CacheMemoryError, ConfigError, ErrorCode, ModelFileError
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
    ModelFileName,
    Op,
)
from nanocore.protocol.sampling import SamplingParams
from nanocore.protocol.sockets.curve_router import MAX_UNANSWERED_S
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES, PEER_HIGH_WATER_MARK
from nanocore.tracing.reader import Step
from nanocore.worker.models import ARCHITECTURES
from tests.fakes import make_request, make_scheduler
from tests.protocol.samples import directions
from tests.protocol_files.examples import EXAMPLES, MARK, with_examples
from tests.protocol_files.parameters import ACTS_IN, with_parameters
from tests.protocol_files.schema import make_schema
from tests.protocol_files.tables import (
    HEADINGS,
    SAME_TABLE,
    expected_rows,
    read_tables,
    table_after,
)
from tools.reference.parsers import commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROTOCOL = (ROOT / "PROTOCOL.md").read_text("utf-8")
KV_EVENTS = (DOCS / "kv-events.md").read_text("utf-8")
TABLES = read_tables(PROTOCOL)
ENGINE = (DOCS / "engine.md").read_text("utf-8")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
WORDS_PER_MINUTE = 240
OF_OTHERS = {"agents.md", "coming-from.md", "lm-eval.md"}
"""They name flags of other programs."""
MESSAGES = {message.op.name: message for message in (*FROM_CLIENT, *FROM_ENGINE)}


def in_one_line(document: str) -> str:
    """Its words, wherever lines end."""
    return " ".join(document.split())


def test_the_versions_agree() -> None:
    major, minor = PROTOCOL_VERSION
    assert f"# The nanocore wire protocol, version {major}.{minor}\n" in PROTOCOL
    changelog = PROTOCOL[PROTOCOL.index("Changelog\n") :]
    assert changelog.split("\n")[4].startswith(f"| {major}.{minor} | ")


@pytest.mark.parametrize("heading", HEADINGS)
def test_each_table_of_fields_follows_from_the_types(heading: str) -> None:
    written = [row[:5] for row in TABLES[heading]]
    assert written == expected_rows(HEADINGS[heading])
    assert all(row[5] for row in TABLES[heading]), "each field has a meaning"


def test_the_protocol_names_every_file_that_is_served() -> None:
    listed = PROTOCOL.partition("\n| file | since |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(.+?)`", listed)} == {*get_args(ModelFileName)}


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
    text = in_one_line(KV_EVENTS)
    assert f"up to {MAX_QUEUED_BATCHES} unpublished" in text
    assert f"the last {MAX_RING_BATCHES}, of {MAX_RING_BYTES // 2**20} MiB" in text
    assert f"takes nothing for {REPLAY_TIMEOUT_S:.0f} s" in text
    assert f"END_SEQ is `{END_SEQ.hex()}`" in text


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
    schema = (ROOT / "conformance" / "nanocore_conformance" / "schema.json").read_text("utf-8")
    assert schema == make_schema(PROTOCOL), "run python -m tests.protocol_files"


def test_no_document_names_a_flag_that_no_command_has() -> None:
    known = {flag for parser, _ in commands().values() for flag in flags_of(parser)}
    for document in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *DOCS.rglob("*.md")):
        text = re.sub(r"`python\s[^`]*`", "", document.read_text("utf-8"))
        if document.name not in OF_OTHERS:
            assert set(FLAG.findall(text)) <= known, document.name


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if action.help != "==SUPPRESS==" and option.startswith("--")
    }


def test_the_exit_codes_are_those_of_the_command() -> None:
    rows = table_after(ENGINE, "## Will it start?")
    epilog = build_parser().epilog
    assert epilog is not None
    said = in_one_line(epilog.partition(":")[2]).split(", ")
    for row, theirs in zip(rows, said, strict=True):
        assert set(theirs.split()) <= set(" ".join(row).split())
    codes = {int(code) for code, _ in rows}
    assert {error.exit_code for error in (ConfigError, ModelFileError, CacheMemoryError)} <= codes


def test_defaults_that_depend_on_the_machine_are_those_in_the_code() -> None:
    """The parser knows the others, and the reference has them from it."""
    page = (DOCS / "reference" / "nanocore-engine.md").read_text("utf-8")
    items = {item.split("`")[0]: in_one_line(item) for item in page.split("\n- `")[1:]}
    config = EngineConfig()
    cpu, cuda = config.for_device("cpu"), config.for_device("cuda")
    for flag, numbers in {
        "--block-size": (cpu.block_size, cuda.block_size),
        "--max-num-seqs": (cpu.max_num_seqs,),
        "--max-num-batched-tokens": (cpu.max_num_batched_tokens, cuda.max_num_batched_tokens),
        "--max-num-clients": (DEFAULT_MAX_NUM_CLIENTS,),
    }.items():
        assert [int(word) for word in re.findall(r"\d+", items[flag].replace(",", ""))][
            : len(numbers)
        ] == [*numbers]
    assert cpu.max_num_seqs == cuda.max_num_seqs


def test_the_limits_of_the_operations_page_are_those_in_the_code() -> None:
    text = in_one_line((DOCS / "operations.md").read_text("utf-8"))
    backlog = f"{BACKLOG_TIMEOUT_S:.0f} s, or {MAX_BACKLOG_BYTES // 2**20} MiB of answers"
    assert f"| a client that reads nothing | {backlog} |" in text
    assert f"| a client that says nothing | {SESSION_TIMEOUT_S:.0f} s;" in text
    assert f"| a message | {MAX_FRAME_BYTES // 2**20} MiB a frame;" in text
    silence = f"clients after {ENGINE_TIMEOUT_S:.0f} s of silence, over TCP after"
    assert f"{silence} {TCP_ENGINE_TIMEOUT_S:g}; a second later they" in text
    assert GRACE_S == PING_INTERVAL_S == 1
    assert TCP_ENGINE_TIMEOUT_S + GRACE_S < 3
    assert MAX_UNANSWERED_S + PING_INTERVAL_S < 3
    assert "over TCP both sides, within 3 s" in text
    assert f"the engine after {SESSION_TIMEOUT_S:.0f} s of silence, or" in text
    assert f"at least {MIN_SILENT_CHECKS * PING_INTERVAL_S:.0f} s" in text
    assert f"`--shutdown-timeout` ({EngineConfig().shutdown_timeout:g} s)" in text


def test_the_models_page_has_a_line_for_each_architecture_that_is_served() -> None:
    rows = table_after((DOCS / "models.md").read_text("utf-8"), "## Families")
    assert {row[0].strip("`") for row in rows} == ARCHITECTURES.keys()


def traced_keys(path: Path, *groups: CacheGroup, num_drafts: int = 0) -> set[str]:
    """Keys of a step in which a request decodes."""
    scheduler, executor = make_scheduler(cache_groups=groups, num_speculative_tokens=num_drafts)
    trace = StepTrace(str(path))
    trace.attach(scheduler)
    scheduler.add(make_request(1, [1, 2], 8))
    for _ in range(2):
        plan = scheduler.schedule()
        trace.begin()
        scheduler.update(executor.execute(plan))
        scheduler.log.append(StepDone(0.0))
    trace.close()
    return set(msgspec.json.decode(path.read_bytes().splitlines()[-1]))


def test_the_step_traces_keys_are_those_in_the_text(tmp_path: Path) -> None:
    groups = CacheGroup("full"), CacheGroup("window(4)", 4)
    written = traced_keys(tmp_path / "two", *groups, num_drafts=1)
    always = written - {"lost", "groups", "accepted"}
    assert traced_keys(tmp_path / "one", CacheGroup("full")) == always
    rows = table_after((DOCS / "observability.md").read_text("utf-8"), "### Keys")
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(explained) == sorted(written)
    assert set(Step.__struct_fields__) == written, "what is read is what is written"


def test_the_clients_exceptions_are_named() -> None:
    text = (DOCS / "client.md").read_text("utf-8")
    errors = {name for name in nanocore.client.__all__ if name.endswith("Error")}
    assert {name for name in errors if f"`{name}`" not in text} == {"NanocoreError"}


def test_the_clients_sampling_parameters_are_those_of_the_types() -> None:
    text = (DOCS / "client.md").read_text("utf-8")
    assert with_parameters(text) == text, "run python -m tests.protocol_files"
    rows = table_after(text, "## Sampling parameters")
    assert [row[0].strip("`") for row in rows] == [*SamplingParams.__struct_fields__]
    assert ACTS_IN.keys() <= {*SamplingParams.__struct_fields__}


def test_the_specification_can_be_read_in_twenty_minutes() -> None:
    """Its prose, that is; tables and examples are for looking things up."""
    text = re.sub(r"^```.*?^```", "", PROTOCOL, flags=re.DOTALL | re.MULTILINE)
    words = [word for line in text.splitlines() if line[:1] != "|" for word in line.split()]
    assert len(words) <= 20 * WORDS_PER_MINUTE


def test_the_timings_and_limits_in_the_text_are_those_in_the_code() -> None:
    text = in_one_line(PROTOCOL)
    assert f"nothing for {SESSION_TIMEOUT_S:.0f} s (`session_timeout_ms`)" in text
    assert f"takes nothing for {BACKLOG_TIMEOUT_S:.0f} s is closed" in text
    assert f"silent for {ENGINE_TIMEOUT_S:.0f} s as dead" in text
    assert f"| SNDHWM, RCVHWM | {PEER_HIGH_WATER_MARK} |" in text
    assert f"| MAXMSGSIZE | {MAX_FRAME_BYTES // 2**20} MiB |" in text
    assert f"at most {MAX_FRAME_BYTES // 2**20} MiB" in text
    assert f"{MAX_FILE_BYTES // 2**20} MiB per file" in text
    assert f"more than {MAX_BACKLOG_BYTES // 2**20} MiB unread" in text
    assert f"may have {MAX_BODY_BYTES // 2**20} MiB, and a SUBMIT" in text
    assert f"a SUBMIT {MAX_SUBMIT_BYTES // 2**10} KiB in addition to its tokens" in text
    assert f"may have {MAX_CALLS} CONTROLs in progress" in text
    assert f"nil above {MAX_RETURNED_ID_CHARS} characters" in text
    assert PING_INTERVAL_S == 1.0
    assert "PING to every session every second" in text
