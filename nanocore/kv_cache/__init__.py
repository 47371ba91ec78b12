"""The KV cache's bookkeeping: which block holds what, who holds it, and what can be reused.

Pure Python on the engine's step loop; the memory itself belongs to the workers. Blocks are fixed in
size and addressed by id (PagedAttention: Kwon et al., SOSP 2023).
"""

from nanocore.kv_cache.block_key import BlockKey, KeyChain
from nanocore.kv_cache.block_pool import Block, BlockPool
from nanocore.kv_cache.capacity import FULL, CacheGroup, Capacity
from nanocore.kv_cache.manager import KVCacheManager, Prefix
from nanocore.kv_cache.prefix_index import PrefixIndex
from nanocore.kv_cache.stats import PrefixCacheStats

__all__ = [
    "FULL",
    "Block",
    "BlockKey",
    "BlockPool",
    "CacheGroup",
    "Capacity",
    "KVCacheManager",
    "KeyChain",
    "Prefix",
    "PrefixCacheStats",
    "PrefixIndex",
]
