"""Block keys and the prefix index: what may be found, and what never may."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.kv_cache import Block, Capacity, KeyChain, KVCacheManager, PrefixIndex
from tests.campaign import examples

BLOCK_SIZE = 4
Tokens = list[int]


def column(tokens: Tokens) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def chain(tokens: Tokens, salt: str | None = None, collide: bool = False) -> KeyChain:
    extra_keys = {"cache_salt": salt}
    keys = KeyChain(BLOCK_SIZE, extra_keys)
    if collide:
        keys = KeyChain(BLOCK_SIZE, extra_keys, digest=lambda _: b"x" * 16)
    keys.extend(column(tokens))
    return keys


def test_a_partial_block_has_no_key() -> None:
    assert len(chain(list(range(7))).keys) == 1
    assert len(chain(list(range(8))).keys) == 2


def test_extending_piecewise_gives_the_keys_of_the_whole() -> None:
    whole = chain(list(range(12)))
    pieces = chain(list(range(5)))
    pieces.extend(column(list(range(4, 12))))
    assert pieces.keys == whole.keys


def test_equal_blocks_after_different_prefixes_have_different_digests() -> None:
    a, b = chain([1, 1, 1, 1, 5, 5, 5, 5]), chain([2, 2, 2, 2, 5, 5, 5, 5])
    assert a.keys[1][1] == b.keys[1][1]
    assert a.keys[1][0] != b.keys[1][0]


def test_the_digest_is_xxh3_128_of_parent_digest_and_content() -> None:
    import xxhash

    keys = chain([1, 2, 3, 4, 5, 6, 7, 8]).keys
    first = xxhash.xxh3_128_digest(column([1, 2, 3, 4]))
    assert keys[0][0] == first
    assert keys[1][0] == xxhash.xxh3_128_digest(first + column([5, 6, 7, 8]))


def test_salts_separate_requests_and_are_tagged_with_their_length() -> None:
    tokens = [1, 2, 3, 4]
    digests = {chain(tokens, salt).keys[0][0] for salt in (None, "a", "b", "ab")}
    assert len(digests) == 4
    # Without the length, the salt "a" and a first token could trade bytes.
    assert chain(tokens, "a").keys[0][1] == b"cache_salt:1:a" + column(tokens)


def test_extra_keys_of_another_name_are_another_prefix() -> None:
    tokens = [1, 2, 3, 4]
    keys = []
    for extra in ({"cache_salt": "x"}, {"adapter": "x"}, {"adapter": "x", "cache_salt": None}):
        keys.append(KeyChain(BLOCK_SIZE, extra))
        keys[-1].extend(column(tokens))
    assert keys[0].keys != keys[1].keys == keys[2].keys


def test_a_hit_needs_the_parent_not_only_the_digest() -> None:
    index = PrefixIndex()
    keys = chain([1, 2, 3, 4, 5, 6, 7, 8]).keys
    index.put([Block(0)], None, keys[:1])
    index.put([Block(1)], chain([9, 9, 9, 9]).keys[0], keys[1:])
    assert [block.block_id for block in index.find_prefix(keys)] == [0]


def test_a_hit_needs_the_content_not_only_the_digest() -> None:
    index = PrefixIndex()
    index.put([Block(0)], None, chain([1, 2, 3, 4], collide=True).keys)
    assert index.find_prefix(chain([4, 3, 2, 1], collide=True).keys) == []
    assert len(index.find_prefix(chain([1, 2, 3, 4], collide=True).keys)) == 1


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=6), st.booleans())
def test_hits_are_exactly_the_common_full_blocks_and_never_wrong_when_every_digest_collides(
    prompts: list[Tokens], collide: bool
) -> None:
    kv_cache = KVCacheManager(Capacity(64, BLOCK_SIZE))
    contents: dict[int, Tokens] = {}  # what each block would hold
    for handle, tokens in enumerate(prompts):
        keys = chain(tokens, collide=collide).keys
        prefix = kv_cache.find_prefix(keys, len(tokens))
        for i, block in enumerate(prefix.blocks):
            assert contents[block.block_id] == tokens[: (i + 1) * BLOCK_SIZE]
        if not collide:
            limit = max(len(tokens) - 1, 0) // BLOCK_SIZE
            best = max((_common_blocks(tokens, other) for other in prompts[:handle]), default=0)
            assert len(prefix.blocks) == min(best, limit)
        block_ids = kv_cache.allocate(handle, len(tokens), prefix) or []
        kv_cache.register(handle, keys, len(keys))
        for i in range(len(keys)):
            contents[block_ids[i]] = tokens[: (i + 1) * BLOCK_SIZE]


def _common_blocks(a: Tokens, b: Tokens) -> int:
    count = 0
    while (count + 1) * BLOCK_SIZE <= min(len(a), len(b)) and a[: (count + 1) * BLOCK_SIZE] == b[
        : (count + 1) * BLOCK_SIZE
    ]:
        count += 1
    return count
