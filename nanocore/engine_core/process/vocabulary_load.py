"""The vocabulary of structured outputs, built beside the model's loading.

It holds the interpreter's lock for a second or so, which nobody minds before the engine is ready.
Without one, or without llguidance, a model is served all the same, and requests for structured
outputs are told why not.
The process that tries grammars begins at the same time, and nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from nanocore.engine_core.structured.grammars import Grammars
from nanocore.engine_core.structured.matcher import GrammarSource
from nanocore.engine_core.structured.no_grammars import NoGrammars
from nanocore.engine_core.structured.threads import start_thread
from nanocore.engine_core.structured.trial_process import TrialProcess
from nanocore.engine_core.structured.vocabulary import Vocabulary
from nanocore.protocol.errors import InvalidRequestError


class VocabularyLoad:
    """Begins to build the vocabulary of a model folder's tokenizer.json, in a thread."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._arguments = folder, vocab_size, eos_token_ids
        self._result: Vocabulary | BaseException | None = None
        self._seconds = 0.0
        # By this thread: the kernel ends the process with the thread that started it.
        self._trials = TrialProcess(folder, vocab_size, eos_token_ids)
        self._thread = start_thread(self._run, "vocabulary")

    def wait(self, notes: list[str]) -> GrammarSource:
        """What compiles grammars for it. notes: takes what is worth a line in the log.

        Raises:
            Exception: a bug that its building met.
        """
        self._thread.join()
        match self._result:
            case InvalidRequestError() as why:
                self.close()
                notes.append(str(why))
                return NoGrammars(str(why))
            case Vocabulary() as vocabulary:
                notes.append(f"vocabulary made in {self._seconds:.2f} s beside the others")
                return Grammars(vocabulary, self._trials)
            case error:
                self.close()
                assert error is not None
                raise error

    def close(self) -> None:
        """End the process that tries grammars. Idempotent."""
        self._trials.close()

    def _run(self) -> None:
        start_s = time.monotonic()
        try:
            self._result = Vocabulary.load(*self._arguments)
        except BaseException as error:
            self._result = error
        self._seconds = time.monotonic() - start_s
