// The keys and values of a sequence, as attention passes by them: a tile of 128 after the other.

#pragma once

#include "kv_cache.h"

namespace nanocore {

constexpr int kKeys = 128;  // of a tile; it begins at a multiple
constexpr int kUnits = kKeys / kBlockUnit;
// Never written, so no memory is taken but the system's page of zeros.
alignas(64) inline char kZeros[16 << 20];

// Some keys and their values, 16 in a unit, of which `count` are there.
struct KeyTile {
    int64_t key;
    int count;
    const char* keys[kUnits];
    const char* values[kUnits];
    int64_t key_stride;  // bytes between dimensions, or in bfloat16 between pairs of them
    bool is_int8;
    const float* key_scale;    // of int8, widened or not; else null
    const float* value_scale;  // the same
};

template <typename T>
class KeyTiles {
   public:
    // Those of the keys from the multiple of 128 before `first` on, to `end`. Blocks before that of
    // `first` may be another request's by now, whatever the table says: zeros stand in for them, for
    // what nobody sees must still be finite. memory: `num_floats` of int8.
    KeyTiles(const PagedKV<T>& cache, const int32_t* table, int64_t head, int64_t first, int64_t end,
             float* memory)
        : cache_(cache), own_(table + first / cache.block_size), head_(head),
          key_(first / kKeys * kKeys), end_(end), scales_(memory), widened_(memory + 2 * kKeys) {
        table_ = table + key_ / cache.block_size;
        slot_ = key_ % cache.block_size;
    }

    // Where the next tile lies; without units beyond the end.
    KeyTile next() {
        const int64_t row_bytes = cache_.is_quantized() ? 1 : 4;
        KeyTile tile{key_, 0, {}, {}, cache_.block_size * row_bytes, cache_.is_quantized(),
                     nullptr, nullptr};
        for (; tile.count < kUnits && key_ < end_; ++tile.count, key_ += kBlockUnit) {
            const int i = tile.count;
            const bool is_own = table_ >= own_;
            const char* keys = is_own ? head_block(cache_.k) : zeros(head_block_bytes());
            const char* values = is_own ? head_block(cache_.v) : keys;
            tile.keys[i] = keys + slot_ * row_bytes;
            tile.values[i] = values + slot_ * cache_.head_dim * value_bytes();
            if (cache_.is_quantized()) {
                const auto* none = reinterpret_cast<const BFloat16*>(keys);
                of_keys_[i] = (is_own ? cache_.scales(cache_.k_scale, *table_, head_) : none) + slot_;
                of_values_[i] = (is_own ? cache_.scales(cache_.v_scale, *table_, head_) : none) + slot_;
            }
            slot_ += kBlockUnit;
            if (slot_ == cache_.block_size) slot_ = 0, ++table_;
        }
        return tile;
    }

    // Of int8 the tile that `next` gave last, with its scales; they are there until another's are.
    KeyTile scaled(const KeyTile& tile) const {
        KeyTile scaled = tile;
        scaled.key_scale = scales_, scaled.value_scale = scales_ + kKeys;
        for (int i = 0; i < tile.count; ++i)
            for (int j = 0; j < kBlockUnit; j += kLanes) {
                store(load(of_keys_[i] + j), scales_ + i * kBlockUnit + j);
                store(load(of_values_[i] + j), scales_ + kKeys + i * kBlockUnit + j);
            }
        for (int i = tile.count * kBlockUnit; i < kKeys; ++i) scales_[i] = scales_[kKeys + i] = 0;
        return scaled;
    }

    // The same, widened to what products of T read.
    KeyTile widened(const KeyTile& tile) const {
        KeyTile wide = scaled(tile);
        const int64_t head_dim = cache_.head_dim, floats = widened_floats<T>(head_dim);
        for (int i = 0; i < tile.count; ++i) {
            float *keys = widened_ + i * floats, *values = keys + kUnits * floats;
            widen_keys<T>(reinterpret_cast<const int8_t*>(tile.keys[i]), cache_.block_size,
                          head_dim, tile.values[i], keys);
            widen_values<T>(reinterpret_cast<const int8_t*>(tile.values[i]), head_dim, values);
            wide.keys[i] = reinterpret_cast<const char*>(keys);
            wide.values[i] = reinterpret_cast<const char*>(values);
        }
        wide.key_stride = kBlockUnit * 4;
        wide.is_int8 = false;
        return wide;
    }

    static int64_t num_floats(int64_t head_dim) {
        return 2 * kKeys + 2 * kUnits * widened_floats<T>(head_dim);
    }

   private:
    int64_t value_bytes() const { return cache_.is_quantized() ? 1 : sizeof(T); }

    const char* head_block(void* base) const {
        return static_cast<const char*>(base) + *table_ * cache_.block_bytes +
               head_ * head_block_bytes();
    }

    int64_t head_block_bytes() const { return cache_.block_size * cache_.head_dim * value_bytes(); }

    // Blocks larger than all zeros that there are get their own first one in place of them.
    const char* zeros(int64_t num_bytes) const {
        return num_bytes <= static_cast<int64_t>(sizeof kZeros) ? kZeros : first_block();
    }

    const char* first_block() const {
        return static_cast<const char*>(cache_.k) + *own_ * cache_.block_bytes +
               head_ * head_block_bytes();
    }

    const PagedKV<T>& cache_;
    const int32_t *table_, *own_;
    int64_t head_, slot_, key_, end_;
    float *scales_, *widened_;
    const BFloat16 *of_keys_[kUnits], *of_values_[kUnits];
};

}  // namespace nanocore
