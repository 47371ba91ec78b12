"""`nanocore-engine --check`: would an engine start with these flags?

Weights are not read, except to check that a tied head equals the embedding.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io.served_files import ServedFiles
from nanocore.engine_core.process.cache_size import longest_request, size_cache
from nanocore.engine_core.process.memory_table import memory_table
from nanocore.engine_core.process.process import find_model, proposer_of
from nanocore.engine_core.process.start_log import describe_workers
from nanocore.worker.devices import select_device
from nanocore.worker.dry_run import dry_run
from nanocore.worker.memory.host_memory import resident_bytes
from nanocore.worker.models import load_model_config

logger = logging.getLogger(__name__)

_FILES_TOKEN_BYTES: Final = 170
"""Size of the tokenizer's files for each token, which the engine serves; as measured."""
_GRAMMAR_BYTES: Final = 66 * 10**6, 1660
"""Memory for structured outputs: of libraries and processes, and for each token; as measured."""


def check_engine(config: EngineConfig) -> None:
    """Log the sizes that an engine would have, and print its memory to stdout.

    Raises:
        StartError: it would not start.
    """
    if config.curve_dir is not None:
        from nanocore.protocol.sockets.curve import EngineKeys  # imports zmq

        EngineKeys.load(Path(config.curve_dir))
    config = config.for_device(select_device(config.device).type)
    proposer_of(config)  # it can be made
    folder = find_model(config)
    model_config = load_model_config(folder, config.hf_overrides, config.override_generation_config)
    max_model_len = longest_request(config, model_config)
    ServedFiles(folder)  # they can be read, or made
    process_bytes = resident_bytes()  # of what an engine imports, and no weights yet
    ranks = dry_run(config.worker_config(str(folder), max_model_len))
    size = size_cache(config, ranks, max_model_len)
    logger.info("model %s (%s), %s", folder, model_config.architecture, describe_workers(ranks))
    for number, rank in enumerate(ranks):
        logger.info(
            "rank %d: %.1f MB of weights, %.1f MB for KV",
            number,
            rank.weight_bytes / 1e6,
            size.rank_bytes(rank) / 1e6,
        )
    logger.info(
        "%s of %d tokens, requests of %d tokens at most: an engine would start",
        size.capacity.shared_blocks,
        size.capacity.block_size,
        size.max_model_len,
    )
    process_bytes += model_config.vocab_size * _FILES_TOKEN_BYTES
    grammar_bytes = _GRAMMAR_BYTES[0] + model_config.vocab_size * _GRAMMAR_BYTES[1]
    print("\n".join(memory_table(config, ranks, size, process_bytes, grammar_bytes)))
