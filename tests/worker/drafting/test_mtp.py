"""A checkpoint's MTP head beside one that is made of transformers' layers.

Guesses are those of the head over all tokens before, however they were computed: in chunks, by
other guesses that were wrong, in a row that another request had, several steps in flight. Tokens
are those of plain decoding.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.kv_quantization import kv_cache_format
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.drafting import mtp
from nanocore.worker.drafting.mtp import MtpProposer, fill_draft
from nanocore.worker.dry_run import dry_run
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.memory.kv_groups import joined_groups
from nanocore.worker.memory.kv_memory import KVLayout
from nanocore.worker.rank_messages import Quantization, WorkerConfig
from nanocore.worker.step.batch_step import BatchStep
from nanocore.worker.step.drafts import Proposal
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from nanocore.worker.worker import Worker
from tests.campaign import examples, in_campaign
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.model_families import FULL, make_tiny, rewrite_config
from tests.mtp_head import Oracle, add_mtp_head
from tests.step_plans import make_plan, make_row
from tests.worker.configs import make_worker_config
from tests.worker.device_engine import DeviceKernels, load_model
from tests.worker.drafted_plans import (
    BLOCK_SIZE,
    BLOCKS_OF_A_ROW,
    MAX_DRAFTS,
    NUM_ROWS,
    Driver,
    TruthTeller,
    Wish,
)
from tests.worker.ranks import run_ranks

GREEDY = EngineSamplingParams(temperature=0.0)
MTP = {"method": "mtp", "num_speculative_tokens": MAX_DRAFTS}


def make_wishes() -> list[Wish]:
    rng = np.random.default_rng(3)
    return [
        Wish([i, *rng.integers(0, 300, int(rng.integers(1, 30))).tolist()], int(count), GREEDY)
        for i, count in enumerate(rng.integers(4, 16, 7))
    ]


WISHES = make_wishes()


class Recording(MtpProposer):
    """Keeps what it guessed behind which tokens, where a row had computed all but the last one.

    Plans of the scheduler have drafts nowhere else. others: proposes in its place what it guessed
    for; the tiny head is hardly ever right.
    """

    others: TruthTeller | None = None

    def __init__(self, target: DecoderModel, kernels: Kernels, rounds_head: bool = False) -> None:
        super().__init__(target, kernels, rounds_head)
        self.guesses: list[tuple[list[int], list[int]]] = []

    def propose(self, step: BatchStep) -> Proposal:
        proposal = super().propose(step)
        is_decode = step.order.counts_B - step.num_drafts_B == 1
        decodes = set(step.order.rows_B[is_decode].tolist())

        def guess(fields: Mapping[str, Tensor], places: TokenPlaces, is_certain: bool) -> Tensor:
            drafts_D = proposal.guess(fields, places, is_certain)
            for row in decodes & set(places.rows_R.tolist()):
                of_row = places.rows_R == row
                known = places.token_table[row, : places.positions_R[of_row][0]].tolist()
                self.guesses.append((known, drafts_D[of_row].tolist()))
            return self.others.of_places(fields, places, is_certain) if self.others else drafts_D

        return Proposal(proposal.columns, guess)

    def check(self, oracle: Oracle, most: int, starts: tuple[int, ...] = ()) -> int:
        """Compare some guesses with the oracle's; how many drafts were."""
        compared = 0
        for known, drafts in self.guesses[:: len(self.guesses) // most + 1]:
            for draft, good in zip(drafts, oracle.drafts(known, len(drafts), starts), strict=True):
                assert draft in good, (known, drafts)
                compared += 1
                if len(good) > 1:
                    break  # what follows may be of another one
        return compared


def make_runner(
    folder: Path,
    kernels: Kernels,
    *,
    stream: Stream | None = None,
    block_size: int = BLOCK_SIZE,
    drafts: bool = True,
    tp: Communicator | None = None,
) -> tuple[ModelRunner, Recording | None]:
    model = load_model(folder, tp=tp)
    proposer = Recording(model, kernels) if drafts else None
    max_drafts = MAX_DRAFTS if proposer else 0
    runner = ModelRunner(model, kernels, stream=stream, max_drafts=max_drafts, proposer=proposer)
    kv_format = kv_cache_format("auto", torch.float32)
    specs = [*model.cache_specs, *(proposer.cache_specs if proposer else ())]
    groups = joined_groups([KVLayout(specs, kv_format, block_size).groups])
    if proposer is not None:
        config = make_worker_config(folder=str(folder), load_format="auto")
        fill_draft(config, proposer.model, kernels, progress=False)
    num_slabs = (1 + NUM_ROWS * BLOCKS_OF_A_ROW) * len(groups)
    sizes = block_size, NUM_ROWS, BLOCKS_OF_A_ROW * block_size
    runner.allocate(kv_format, num_slabs, *sizes, groups=groups)
    runner.capture(120)
    return runner, proposer


class Family:
    """A model's folder, its oracle, and what each request gets without drafts."""

    def __init__(self, name: str, scratch: Path, **changes: Any) -> None:
        self.folder = add_mtp_head(make_tiny(name, scratch / "model", **changes))
        self.oracle = Oracle(self.folder, scratch / "oracle")
        self.truth = [self.alone(request) for request in range(len(WISHES))]

    def alone(self, request: int) -> list[int]:
        runner, _ = make_runner(self.folder, TorchKernels(), drafts=False)
        driver = Driver(runner, WISHES, np.random.default_rng(0), 1, is_rough=False)
        return driver.run([request])[request].tokens


@pytest.fixture(
    scope="module", params=["qwen35", *in_campaign("qwen35_square", "qwen35_moe", "qwen3_next")]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("mtp"))


SEEN: Counter[str] = Counter()


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3), has_graphs=st.booleans())
@example(seed=0, depth=0, has_graphs=False)
@example(seed=1, depth=2, has_graphs=True)
def test_guesses_are_the_heads_over_all_tokens_before_and_tokens_those_of_plain_decoding(
    family: Family, seed: int, depth: int, has_graphs: bool
) -> None:
    check_guesses(family, seed, depth, has_graphs)


def check_guesses(family: Family, seed: int, depth: int, has_graphs: bool) -> None:
    stream = FakeStream(depth, FakeGraphRecorder() if has_graphs else None) if depth else None
    kernels = DeviceKernels() if depth else TorchKernels()
    runner, proposer = make_runner(family.folder, kernels, stream=stream)
    assert proposer is not None
    rng = np.random.default_rng(seed)
    proposer.others = TruthTeller(WISHES, 0.3, seed)
    proposer.others.truth = family.truth
    driver = Driver(runner, WISHES, rng, max(1, depth), MAX_DRAFTS)
    heard = driver.run(rng.permutation(len(WISHES)).tolist())
    for request, (got, right) in enumerate(zip(heard, family.truth, strict=True)):
        is_whole = request not in driver.aborted
        assert got.tokens == (right if is_whole else right[: len(got.tokens)])
    SEEN["compared"] += proposer.check(family.oracle, most=6)
    SEEN.update(driver.seen)


def test_a_model_whose_layers_keep_no_states_has_a_head(tmp_path: Path) -> None:
    """It, too, goes on from the hidden state of the last draft that was right."""
    family = Family("qwen35", tmp_path, layer_types=[FULL] * 5)
    for depth in (0, 2):
        check_guesses(family, 1, depth, has_graphs=False)


def test_drafts_were_right_and_wrong() -> None:
    """Runs behind the property above."""
    kinds = {"none right", "some right", "all right", "preempted", "in flight", "compared"}
    assert kinds <= {kind for kind, count in SEEN.items() if count}


def take_steps(runner: ModelRunner, count: int, rows: int) -> list[list[int]]:
    """Tokens that each row gets when all draft as many as there may be."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(count):
        output = runner.execute(make_plan(chunks=dict.fromkeys(range(rows), 1 + MAX_DRAFTS)))
        sampled = np.frombuffer(output.token_ids, "<i4").tolist()
        for row, own in enumerate(np.frombuffer(output.counts, "<i4").tolist()):
            tokens[row] += sampled[:own]
            sampled = sampled[own:]
    return tokens


def begin(runner: ModelRunner, row: int, prompt: list[int], cached: int = 0) -> None:
    """Compute a prompt in a row that has blocks of its own, but for those that are cached."""
    assert runner.kv_memory is not None
    size = runner.batch.block_size
    starts = [
        number * len(pool) // len(runner.kv_memory.blocks)
        for number, pool in enumerate(runner.kv_memory.blocks)
    ]
    own = range(1 + 10 * row, 11 + 10 * row)
    blocks = [*range(1, 1 + cached // size), *own][:10]
    ids = [start + block for start in starts for block in blocks]
    new = make_row(row, prompt, GREEDY, num_computed=cached, blocks=ids)
    runner.execute(make_plan([new], {**dict.fromkeys(range(row), 0), row: len(prompt) - cached}))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_native_kernels_guess_the_same(
    family: Family, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "MtpProposer", Recording)
    config = config_of(
        family.folder, attention_backend="cpu", enforce_eager=enforce_eager, max_num_seqs=3,
        max_num_batched_tokens=64, max_model_len=160,
    )  # fmt: skip
    worker = Worker(config)
    worker.load_model()
    groups = joined_groups([worker.profile().kv_groups])
    worker.allocate_kv_cache(200, config.max_model_len, groups)
    assert worker.runner.is_captured != enforce_eager
    for row, length in enumerate((1, 17, 33)):
        begin(worker.runner, row, [(7 * i + row) % 300 for i in range(length)])
    take_steps(worker.runner, 5, rows=3)
    proposer = worker.runner.proposer
    assert isinstance(proposer, Recording)
    assert proposer.check(family.oracle, most=15) > 20


@pytest.mark.parametrize("cached", [16, 32])
def test_behind_a_prefix_hit_a_single_token_has_none_before_it(family: Family, cached: int) -> None:
    """K and V of what hits are those that another row computed."""
    runner, proposer = make_runner(family.folder, TorchKernels(), block_size=16)
    assert proposer is not None
    prompt = [(11 * i + 5) % 300 for i in range(45)]
    begin(runner, 0, prompt[:cached])
    begin(runner, 1, prompt, cached)
    output = runner.execute(make_plan(chunks={0: 0, 1: 1 + MAX_DRAFTS}))
    assert output.counts
    assert proposer.check(family.oracle, most=1, starts=(cached,)) > 1


def test_a_row_begins_with_nothing_of_the_one_before(family: Family) -> None:
    runner, proposer = make_runner(family.folder, TorchKernels(), block_size=16)
    assert proposer is not None
    begin(runner, 0, [(7 * i) % 300 for i in range(20)])
    take_steps(runner, 2, rows=1)
    runner.execute(make_plan(removed=[0], num_tokens=0))
    proposer.guesses.clear()
    begin(runner, 0, [5, 9, 200])
    take_steps(runner, 1, rows=1)
    assert proposer.check(family.oracle, most=1) > 1


def test_ranks_guess_together(family: Family) -> None:
    def of_rank(tp: Communicator) -> list[tuple[list[int], list[int]]]:
        runner, proposer = make_runner(family.folder, TorchKernels(), block_size=16, tp=tp)
        assert proposer is not None
        begin(runner, 0, [(7 * i) % 300 for i in range(20)])
        take_steps(runner, 4, rows=1)
        proposer.check(family.oracle, most=4)
        return proposer.guesses

    first, second = run_ranks(2, of_rank)
    assert first == second


def config_of(folder: Path, **changes: Any) -> WorkerConfig:
    usual: dict[str, Any] = {"load_format": "auto", "speculative_config": MTP}
    return make_worker_config(folder=str(folder), **{**usual, **changes})


def refuse(config: WorkerConfig, kind: type[Exception], match: str) -> None:
    for start in (Worker, dry_run):
        with pytest.raises(kind, match=match):
            start(config)


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_checkpoint_without_a_head_is_refused(family: Family, tmp_path: Path) -> None:
    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    folder = rewritten(family.folder, tmp_path / "none", remove)
    match = r'"mtp" needs .* MTP head, and .*/none has none .*: its files have no .* mtp.*"suffix"'
    refuse(config_of(folder), ConfigError, match)
    dry_run(config_of(folder, load_format="dummy"))
    rewrite_config(folder, lambda config: config.pop("mtp_num_hidden_layers"))
    match = r"has none that is served: its config.json has no mtp_num_hidden_layers; or take"
    refuse(config_of(folder, load_format="dummy"), ConfigError, match)


def test_several_mtp_layers_are_refused(family: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(family.folder, tmp_path / "two")
    rewrite_config(folder, lambda config: config.update(mtp_num_hidden_layers=2))
    refuse(
        config_of(folder), ConfigError, r"two has 2 MTP layers \(mtp_num_hidden_layers\), and one"
    )


def test_a_head_of_another_shape_is_refused(family: Family, tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-1].contiguous()

    folder = rewritten(family.folder, tmp_path / "cut", cut)
    refuse(config_of(folder), ModelFileError, r"mtp\.fc\.weight")
    folder = rewritten(family.folder, tmp_path / "less", lambda all: all.pop("mtp.norm.weight"))
    refuse(config_of(folder), ModelFileError, r"mtp\.norm\.weight")
    without = {"speculative_config": {}}
    (info,), (other,) = (dry_run(config_of(one, **without)) for one in (folder, family.folder))
    assert info.cost == other.cost


def test_a_head_may_be_of_fp8_as_the_model(family: Family, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if re.search(r"(layers\.4|mtp.*)\.mlp\.\w*_proj", name)]
        for name in names:
            blocks = [-(-size // 128) for size in tensors[name].shape]
            tensors[f"{name}_scale_inv"] = torch.full(blocks, 2.0**-6)
            tensors[name] = (tensors[name] * 2**6).to(torch.float8_e4m3fn)

    folder = rewritten(family.folder, tmp_path / "fp8", quantize)
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    }  # fmt: skip
    rewrite_config(folder, lambda config: config.update(quantization_config=quantization))
    worker = Worker(config_of(folder))
    worker.load_model()
    dry_run(config_of(folder))
    dry_run(config_of(folder, speculative_config={}))


def test_its_memory_counts_and_bits_do_not_change(family: Family) -> None:
    plain, drafting = config_of(family.folder, speculative_config={}), config_of(family.folder)
    (without,), (outlined,) = dry_run(plain), dry_run(drafting)
    own_bytes = outlined.weight_bytes - without.weight_bytes
    assert own_bytes > 0
    assert outlined.cost == without.cost
    assert outlined.kv_groups[0].block_bytes > without.kv_groups[0].block_bytes
    assert outlined.kv_groups[1] == without.kv_groups[1]
    ranks = []
    for config in (plain, drafting):
        worker = Worker(config)
        worker.load_model()
        ranks.append(worker.profile())
    taken_bytes = ranks[1].weight_bytes - ranks[0].weight_bytes
    assert own_bytes <= taken_bytes < 1.2 * own_bytes  # tiny experts fill no whole tiles
    assert ranks[1].numerics == ranks[0].numerics is not None


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_head_of_16_bits_guesses_by_a_copy_of_eight(
    family: Family, quantization: Quantization | None
) -> None:
    config = config_of(family.folder, dtype="bfloat16", quantization=quantization)
    worker = Worker(config)
    worker.load_model()
    target, proposer = worker.runner.model, worker.runner.proposer
    assert isinstance(proposer, MtpProposer)
    head, kernels = proposer.model.head, worker.runner.kernels
    assert head is not None
    assert (head is target.head) == (quantization is not None)
    hidden = torch.randn(5, target.config.hidden_size).bfloat16()
    rounded, exact = (one.compute_logits(hidden, kernels) for one in (proposer.model, target))
    assert 0 < head.weight.packed.num_bytes < 0.8 * target.config.vocab_size * hidden.nbytes / 5
    torch.testing.assert_close(rounded, exact, atol=0.05 * float(exact.std()), rtol=0)
    assert worker.profile().weight_bytes > 0
