"""What is before a step's layers, in one launch, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.linear_weight import TokenEmbedding, pack_output_scales
from nanocore.kernels.step import StepRows
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import begin_step as module
from nanocore.kernels.triton.begin_step import begin_step
from tests.campaign import in_campaign

REFERENCE = TorchKernels()
NUM_ROWS, SPARE_ROW, VOCAB, BLOCK_SIZE = 7, 6, 40, 4


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)


def make_rows(
    seqs: list[tuple[int, int]],
    appended: list[tuple[int, int, int]],
    num_columns: int = 21,
    places: list[tuple[int, int]] | None = None,
) -> StepRows:
    """A step of sequences (row, length), whose tokens are at places, by default each one's last.

    appended: blocks as (row, column, id). All else in the tables is random.
    """
    generator = torch.Generator().manual_seed(len(seqs) + len(appended))

    def draw(limit: int, width: int) -> Tensor:
        shape = NUM_ROWS, width
        return torch.randint(0, limit, shape, dtype=torch.int32, generator=generator)

    if places is None:
        places = [(row, max(0, length - 1)) for row, length in seqs]
    columns = [torch.tensor(column) for column in zip(*appended, strict=True)]
    rows_W, columns_W, ids_W = columns or [torch.zeros(0, dtype=torch.int64)] * 3
    return StepRows(
        token_table=draw(VOCAB, num_columns * BLOCK_SIZE),
        block_tables=draw(500, num_columns),
        block_size=BLOCK_SIZE,
        rows_T=torch.tensor([row for row, _ in places]),
        positions_T=torch.tensor([position for _, position in places]),
        rows_B=torch.tensor([row for row, _ in seqs]),
        seq_lens_B=torch.tensor([length for _, length in seqs], dtype=torch.int32),
        block_rows_W=rows_W,
        block_columns_W=columns_W,
        block_ids_W=ids_W.int(),
    )


def make_embedding(
    size: int = 12,
    quantization: str | None = None,
    factor: float = 1.0,
    tokens: slice = slice(0, VOCAB),
    dtype: torch.dtype = torch.float32,
) -> TokenEmbedding:
    weight = torch.randn(VOCAB, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    pack = REFERENCE.pack_linear if quantization is None else pack_output_scales
    packed = pack(weight[tokens].clone())
    return TokenEmbedding(packed, tokens.start, factor, dtype)


def check(rows: StepRows, embedding: TokenEmbedding | None) -> Tensor | None:
    """Exactly the reference's; ids past a sequence's length are valid ones."""
    ours, theirs = (replace(rows, block_tables=rows.block_tables.clone()) for _ in range(2))
    begun, expected = begin_step(ours, embedding), REFERENCE.begin_step(theirs, embedding)
    assert begun.table_rows_B is expected.table_rows_B is None
    table_BM, x_TE = begun.block_tables[0], begun.x_TE
    expected_BM, expected_TE = expected.block_tables[0], expected.x_TE
    assert torch.equal(ours.block_tables, theirs.block_tables)
    assert (table_BM.shape, table_BM.dtype) == (expected_BM.shape, torch.int32)
    assert table_BM.min() >= 0
    assert table_BM.max() < 1000
    for ids, expected_ids, length in zip(
        table_BM, expected_BM, rows.seq_lens_B.tolist(), strict=True
    ):
        num_blocks = -(-length // BLOCK_SIZE)
        assert torch.equal(ids[:num_blocks], expected_ids[:num_blocks])
    # Copies may come after the appended blocks are in the table, too.
    again_BM = begin_step(replace(ours), embedding).block_tables[0]
    assert torch.equal(again_BM, table_BM)
    if x_TE is None or expected_TE is None:
        assert x_TE is expected_TE
        return None
    assert x_TE.dtype == expected_TE.dtype
    assert torch.equal(x_TE, expected_TE)
    return x_TE


def test_blocks_appended_in_this_step_are_in_the_table_and_in_the_copy() -> None:
    rows = make_rows(
        [(3, 40), (0, 1), (5, 84), (2, 33)],
        [(3, 9, 900), (5, 20, 901), (2, 7, 902), (2, 8, 903), (4, 2, 904)],
    )
    check(rows, make_embedding())
    table_BM = begin_step(rows, None).block_tables[0]
    assert table_BM[0, 9] == 900
    assert table_BM[3, 7:9].tolist() == [902, 903]
    assert rows.block_tables[4, 2] == 904, "a row that waits for more has it in the next step"


def test_a_row_may_get_many_blocks_at_once() -> None:
    appended = [(1, column, 900 + column) for column in range(1, 20)]
    check(make_rows([(0, 9), (1, 80)], [(0, 2, 999), *appended]), make_embedding())


@pytest.mark.parametrize("num_columns", [1, 9, *in_campaign(7, 8, 33)])
def test_tables_may_be_of_any_width(num_columns: int) -> None:
    last = num_columns - 1
    rows = make_rows([(2, num_columns * BLOCK_SIZE), (4, 1)], [(2, last, 900)], num_columns)
    check(rows, make_embedding())


@pytest.mark.parametrize("size", [8, 30, *in_campaign(1, 7, 9)])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_hidden_states_may_be_of_any_size(size: int, quantization: str | None) -> None:
    rows = make_rows([(1, 5), (2, 30)], [], places=[(1, 4), (2, 27), (2, 28), (2, 29), (1, 0)])
    x_TE = check(rows, make_embedding(size, quantization, factor=11.3125))
    assert x_TE is not None
    assert x_TE.any(dim=1).all()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_scaled_embeddings_are_rounded_as_the_reference_rounds(quantization: str | None) -> None:
    rows = make_rows([(1, 5), (2, 30)], [], places=[(2, i) for i in range(8)])
    check(rows, make_embedding(40, quantization, 33.9375, dtype=torch.float16))


def test_ranks_embed_their_share_of_the_vocabulary() -> None:
    rows = make_rows([(1, 80)], [], places=[(1, i) for i in range(0, 80, 7)])
    whole = check(rows, make_embedding())
    shares = [check(rows, make_embedding(tokens=slice(i, i + 14))) for i in (0, 14, 28)]
    assert whole is not None
    assert all(share is not None and (share == 0).all(dim=1).any() for share in shares)
    assert torch.equal(torch.stack([share for share in shares if share is not None]).sum(0), whole)


def test_a_row_without_a_token_is_embedded_as_zeros() -> None:
    rows = make_rows([(1, 5), (2, 6)], [])
    rows.token_table[1, 4] = -1
    x_TE = check(rows, make_embedding())
    assert x_TE is not None
    assert not x_TE[0].any()
    assert x_TE[1].any()


def test_padding_belongs_to_the_spare_row_and_touches_no_other() -> None:
    seqs, appended = [(3, 40), (0, 1)], [(3, 9, 900)]
    padding = 5
    rows = make_rows(
        seqs + [(SPARE_ROW, 0)] * padding,
        appended + [(SPARE_ROW, 0, 0)] * padding,
        places=[(3, 39), (0, 0)] + [(SPARE_ROW, 0)] * padding,
    )
    x_TE = check(rows, make_embedding())
    alone = replace(
        rows,
        rows_T=rows.rows_T[:2],
        positions_T=rows.positions_T[:2],
        rows_B=rows.rows_B[:2],
        seq_lens_B=rows.seq_lens_B[:2],
        block_rows_W=rows.block_rows_W[:1],
        block_columns_W=rows.block_columns_W[:1],
        block_ids_W=rows.block_ids_W[:1],
        block_tables=rows.block_tables.clone(),
    )
    own = check(alone, make_embedding())
    assert x_TE is not None
    assert own is not None
    assert torch.equal(x_TE[:2], own)
    begin_step(rows, None)
    begin_step(alone, None)
    assert torch.equal(rows.block_tables[:SPARE_ROW], alone.block_tables[:SPARE_ROW])


def test_a_later_stage_gets_its_blocks_and_embeds_nothing() -> None:
    rows = make_rows([(3, 40), (0, 1)], [(3, 9, 900), (1, 4, 901)])
    assert check(rows, None) is None


def test_what_a_row_once_had_past_its_length_is_not_copied() -> None:
    rows = make_rows([(3, 9)], [(3, 2, 900)])
    table_BM = begin_step(rows, None).block_tables[0]
    assert table_BM[0, 2] == 900
    assert not table_BM[0, 3:].any()
