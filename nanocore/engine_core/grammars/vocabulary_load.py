"""VocabularyLoad: structured outputs' vocabulary, loaded once the engine serves.

llguidance takes seconds for 262,144 tokens, in the engine and once more in the compile process, and
holds the interpreter's lock meanwhile. No other request needs it. So it is loaded in a moment in
which the engine has nothing to do, or when a request asks for a structured output.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from nanocore.engine_core.grammars.compile_process import CompileProcess
from nanocore.engine_core.grammars.grammar_compiler import GrammarCompiler
from nanocore.engine_core.grammars.matcher import GrammarSource, NoGrammars
from nanocore.engine_core.grammars.token_table import TokenTable, require_vocabulary
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs
from nanocore.system.large_stack_threads import start_thread

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_NUM_IDLE_POLLS: Final = 3
"""Consecutive polls that find nothing to do: requests tend to follow each other."""


class VocabularyLoad:
    """Loads the vocabulary of a model folder in a thread, and starts the compile process.

    Implements `Compiler` by that process. Without a vocabulary a model is served all the same, and
    structured outputs are refused with the reason.

    Args:
        folder: the model's, or its first GGUF file. vocab_size: number of the model's logits.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._arguments = folder, vocab_size, eos_token_ids
        self._loaded: Future[TokenTable] = Future()
        self._process: Future[CompileProcess] = Future()
        self._is_needed = threading.Event()
        self._is_closed = threading.Event()

    def grammars(self) -> GrammarSource:
        """Return the compiler of structured outputs, or what refuses them."""
        try:
            require_vocabulary(*self._arguments)
        except InvalidRequestError as why:
            logger.info("%s", why)
            return NoGrammars(str(why))
        return GrammarCompiler(self.get, self)

    def start(self, is_idle: Callable[[], bool]) -> None:
        """Start the thread. is_idle: whether the engine has no request; called by the thread."""
        start_thread(lambda: self._run(is_idle), "vocabulary")

    def get(self) -> TokenTable:
        """Return the vocabulary; wait until it is loaded, which begins now at the latest.

        Raises:
            InvalidRequestError: there is none. Exception: a bug that its loading met.
        """
        self._is_needed.set()
        return self._loaded.result()

    def run(self, place: int, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        """See `CompileProcess.run`."""
        return self._process.result().run(place, wanted)

    def close(self) -> None:
        """End the compile process, and a wait for idleness. Idempotent."""
        self._is_closed.set()
        self._is_needed.set()
        if self._process.done():
            self._process.result().close()

    def _run(self, is_idle: Callable[[], bool]) -> None:
        num_idle = 0
        while num_idle < _NUM_IDLE_POLLS and not self._is_needed.wait(_POLL_S):
            num_idle = num_idle + 1 if is_idle() else 0
        if self._is_closed.is_set():
            self._loaded.set_exception(InvalidRequestError("the engine ends"))
            return
        start_s = time.monotonic()
        folder, vocab_size, eos_token_ids = self._arguments
        process = CompileProcess(folder, vocab_size, eos_token_ids, self._is_needed.is_set())
        self._process.set_result(process)
        try:
            table = TokenTable.load(folder, vocab_size, eos_token_ids)
            logger.info("structured outputs: vocabulary in %.2f s", time.monotonic() - start_s)
            self._loaded.set_result(table)
        except BaseException as error:
            logger.info("%s", error)
            self._loaded.set_exception(error)
        # The kernel ends the compile process with the thread that started it.
        self._is_closed.wait()
        process.close()
