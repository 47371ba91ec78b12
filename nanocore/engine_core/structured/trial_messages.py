"""What an engine and its trial process say to each other."""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from nanocore.protocol.errors import shorten
from nanocore.protocol.structured_outputs import StructuredOutputs

NUM_TRIALS: Final = 4
"""That run at a time: each has a socket pair of its own, and the engine a thread for it."""
CPU_LIMIT_S: Final = 0.5
MEMORY_LIMIT_MIB: Final = 512
"""Of address space, beyond what a trial began with."""
WALL_LIMIT_S: Final = 60
"""Far beyond the CPU's limit: the machine may be busy, and a trial is less urgent than all else."""
VERDICT_SIGNALS: Final = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""With which a grammar ends its trial; whatever else ends one is the machine's doing."""


class Trial(msgspec.Struct, frozen=True):
    """Try what a request wants. number: from 1, of its socket pair."""

    number: int
    wanted: StructuredOutputs


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """llguidance's text for it, or why it is refused; else the signal that ended its process.

    number: its trial's; if the process was ended just after its verdict, there are two of them.
    not_held: what was left out. signal: 0 if the process ended by itself.
    """

    number: int
    text: str | None = None
    not_held: list[str] = []
    refusal: str | None = None
    signal: int = 0


class TrialStart(msgspec.Struct, frozen=True):
    """For which vocabulary; as `Vocabulary.load` has it. On the command line, as JSON, before the
    model's folder, whose path need not be text.
    """

    vocab_size: int
    eos_token_ids: list[int]
    sockets: list[int]


def engine_error(wanted: StructuredOutputs, what: str) -> str:
    """The refusal for a bug of ours."""
    return (
        f"structured_outputs.{wanted.kind} could not be compiled, by an error of the engine "
        f"({shorten(what)}): please report it"
    )


def too_complex(wanted: StructuredOutputs, ended_by: int) -> str:
    """The refusal for what a trial's process was ended by, one of `VERDICT_SIGNALS`."""
    if ended_by == signal.SIGPROF:
        limit = f"takes more than {CPU_LIMIT_S} s of CPU time"
    elif ended_by == signal.SIGABRT:
        limit = f"takes more than {MEMORY_LIMIT_MIB} MiB of memory"
    else:
        limit = "takes more stack than there is"
    return f"structured_outputs.{wanted.kind} is too complex: compiling it {limit}; make it simpler"
