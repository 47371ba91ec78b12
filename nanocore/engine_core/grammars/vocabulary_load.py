"""VocabularyLoad: structured outputs' vocabulary, loaded once the engine serves.

llguidance takes seconds for 262,144 tokens, in the engine and once more in the compile process, and
holds the interpreter's lock meanwhile. No other request needs it. So it is loaded in a moment in
which the engine has nothing to do, or when a request asks for a structured output.
"""

from __future__ import annotations

import logging
import threading
import time

from nanocore.engine_core.grammars.compile_process import CompileProcess
from nanocore.engine_core.grammars.grammar_compiler import GrammarCompiler
from nanocore.engine_core.grammars.matcher import GrammarSource, NoGrammars
from nanocore.engine_core.grammars.token_table import TokenTable, VocabularySource
from nanocore.protocol.errors import EngineOverloadedError, InvalidRequestError
from nanocore.protocol.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)


class VocabularyLoad:
    """Loads a model's vocabulary and starts the compile process, once.

    Implements `Compiler` by that process. Without a vocabulary a model is served all the same, and
    structured outputs are refused with the reason. Any thread may call it.

    """

    def __init__(self, source: VocabularySource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._result: TokenTable | Exception | None = None
        self._process: CompileProcess | None = None
        self._is_closed = threading.Event()

    def grammars(self) -> GrammarSource:
        """Return the compiler of structured outputs, or what refuses them."""
        try:
            self._source.check()
        except InvalidRequestError as why:
            logger.info("%s", why)
            return NoGrammars(str(why))
        return GrammarCompiler(self.get, self)

    def get(self, is_urgent: bool = True) -> TokenTable:
        """Return the vocabulary; load it, if no other thread has.

        The first caller's thread has to live as long as the compile process, which the kernel ends
        with it. is_urgent: a request waits.

        Raises:
            InvalidRequestError: there is none. Exception: a bug that its loading met.
        """
        with self._lock:
            if self._result is None:
                self._result = self._load(is_urgent)
        if isinstance(self._result, TokenTable):
            return self._result
        raise self._result

    def load_and_stay(self) -> None:
        """Load it for a request to come, and return when this is closed."""
        try:
            self.get(is_urgent=False)
        except Exception as error:
            logger.info("%s", error)
        self._is_closed.wait()

    def run(self, place: int, wanted: StructuredOutputs) -> tuple[str, list[str]]:
        """See `CompileProcess.run`; the vocabulary has been loaded."""
        if self._process is None:
            raise EngineOverloadedError("the engine ends: try again later")
        return self._process.run(place, wanted)

    def close(self) -> None:
        """End the compile process. Idempotent."""
        self._is_closed.set()
        if self._process is not None:
            self._process.close()

    def _load(self, is_urgent: bool) -> TokenTable | Exception:
        if self._is_closed.is_set():
            return InvalidRequestError("the engine ends")
        start_s = time.monotonic()
        self._process = CompileProcess(self._source, is_urgent)
        try:
            table = TokenTable.load(self._source)
        except Exception as error:
            self._process.close()
            return error
        logger.info("structured outputs: vocabulary in %.2f s", time.monotonic() - start_s)
        if self._is_closed.is_set():
            self._process.close()  # which was closed before there was one
        return table
