// The matrix unit of Intel's servers since Sapphire Rapids (AMX): products of bfloat16 and of bytes.
//
// It has eight registers, tiles of up to 16 lines of 64 bytes. One instruction multiplies 16 rows of
// 32 bfloat16 with as many k of 16 columns, in the time that the dot product of vectors takes for two
// rows; and they lie as they are packed for that: a line of a row's chunk, and pairs of k side by side.
// What it adds to a sum is that of its even k and of its odd k: it depends on its row and column alone,
// as in `multiply`, but has other bits. Of bytes there are four to 32 bits, and sums are exact.
// NANOCORE_EMULATE_AMX does it in software, for tests.

#pragma once

#include <algorithm>
#include <cstdlib>

#if defined(__linux__) && defined(__AVX512BF16__) && !defined(NANOCORE_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "multiply.h"

namespace nanocore {

constexpr int kTileRows = 16;
constexpr int kMatrixRows = 2 * kTileRows;  // of a panel: two tiles of rows, times two of columns
constexpr int64_t kTileLine = 64;           // bytes: 32 values of a row, or 16 columns of a pair of k

struct TileShape {
    int lines, bytes;  // of each line
};

#if defined(__linux__) && defined(__AVX512BF16__) && !defined(NANOCORE_EMULATE_AMX)

constexpr bool kMayHaveAmx = true;

// Whether this machine has it and the system lets this process use it, for which it asks once.
// NANOCORE_CPU_AMX=0 says no, for tests.
inline bool has_amx() {
    static const bool has = [] {
        const char* wanted = std::getenv("NANOCORE_CPU_AMX");
        if (wanted && wanted[0] == '0') return false;
        constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // for bfloat16, at all, and for bytes
        unsigned eax, ebx, ecx, edx;
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kNeeded) != kNeeded) return false;
        constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl, since Linux 5.16
        return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return has;
}

// One thread's use of it. Tiles are numbered 0 to 7; strides are of bytes.
class TileUnit {
   public:
    TileUnit() = default;
    TileUnit(const TileUnit&) {}  // not in use yet
    TileUnit& operator=(const TileUnit&) = delete;
    ~TileUnit() {
        if (is_used_) asm volatile("tilerelease" ::: "memory");
    }

    void configure(const TileShape (&shapes)[8]) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes[16];
            uint8_t lines[16];
        } config = {};
        config.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[tile] = static_cast<uint16_t>(shapes[tile].bytes);
            config.lines[tile] = static_cast<uint8_t>(shapes[tile].lines);
        }
        is_used_ = true;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    template <int tile>
    NANOCORE_INLINE void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
    template <int tile>
    NANOCORE_INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
    }
    template <int tile>
    NANOCORE_INLINE void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
    }
    template <int sums, int rows, int columns>
    NANOCORE_INLINE void add_products() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns));
    }
    // Of rows, which are signed, and of columns, which may be.
    template <bool has_sign, int sums, int rows, int columns>
    NANOCORE_INLINE void add_byte_products() {
        if constexpr (has_sign)
            asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns));
        else
            asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns));
    }

   private:
    bool is_used_ = false;
};

#else

#if defined(NANOCORE_EMULATE_AMX)
constexpr bool kMayHaveAmx = true;
inline bool emulates_amx = true;  // as with the instructions, it is known when the library runs
inline bool has_amx() { return emulates_amx; }
#else
constexpr bool kMayHaveAmx = false;
inline bool has_amx() { return false; }
#endif

class TileUnit {
   public:
    void configure(const TileShape (&shapes)[8]) { std::copy(shapes, shapes + 8, shapes_); }
    template <int tile>
    void clear() { std::memset(data_[tile], 0, sizeof data_[tile]); }
    template <int tile>
    void load(const void* from, int64_t stride) {
        for (int i = 0; i < shapes_[tile].lines; ++i)
            std::memcpy(data_[tile][i], static_cast<const char*>(from) + i * stride, shapes_[tile].bytes);
    }
    template <int tile>
    void store(void* to, int64_t stride) const {
        for (int i = 0; i < shapes_[tile].lines; ++i)
            std::memcpy(static_cast<char*>(to) + i * stride, data_[tile][i], shapes_[tile].bytes);
    }
    template <int sums, int rows, int columns>
    void add_products() {
        for (int r = 0; r < shapes_[sums].lines; ++r)
            for (int c = 0; c < shapes_[sums].bytes / 4; ++c) {
                float parts[2] = {}, sum;
                for (int k = 0; k < shapes_[rows].bytes / 2; ++k) {
                    BFloat16 a, b;
                    std::memcpy(&a, data_[rows][r] + 2 * k, 2);
                    std::memcpy(&b, data_[columns][k / 2] + 4 * c + k % 2 * 2, 2);
                    parts[k % 2] = std::fma(to_float(a), to_float(b), parts[k % 2]);
                }
                std::memcpy(&sum, data_[sums][r] + 4 * c, 4);
                sum += parts[0] + parts[1];
                std::memcpy(data_[sums][r] + 4 * c, &sum, 4);
            }
    }
    template <bool has_sign, int sums, int rows, int columns>
    void add_byte_products() {
        for (int r = 0; r < shapes_[sums].lines; ++r)
            for (int c = 0; c < shapes_[sums].bytes / 4; ++c) {
                int32_t sum;
                std::memcpy(&sum, data_[sums][r] + 4 * c, 4);
                for (int k = 0; k < shapes_[rows].bytes; ++k) {
                    const char column = data_[columns][k / 4][4 * c + k % 4];
                    sum += static_cast<int8_t>(data_[rows][r][k]) *
                           (has_sign ? static_cast<int8_t>(column) : static_cast<uint8_t>(column));
                }
                std::memcpy(data_[sums][r] + 4 * c, &sum, 4);
            }
    }

   private:
    TileShape shapes_[8] = {};
    char data_[8][kTileRows][kTileLine];
};

#endif

// For products of up to 32 rows with 32 columns, so many bytes of k at a time: sums are as below, rows in
// tiles 4 and 5, columns in 6 and 7.
inline void configure_products(TileUnit& unit, int rows, int k_bytes) {
    const int line = kTileLine, upper = std::min(rows, kTileRows), lower = std::max(rows - kTileRows, 1);
    unit.configure({{upper, line}, {upper, line}, {lower, line}, {lower, line},
                    {upper, k_bytes}, {lower, k_bytes}, {k_bytes / 4, line}, {k_bytes / 4, line}});
}

// Sums of up to 16 rows and 32 columns are in tiles 0 and 1, those of 16 rows more, with kBoth, in 2 and 3.
// row_bytes: from a row of them to the next.
template <bool kBoth>
NANOCORE_INLINE void clear_sums(TileUnit& unit) {
    unit.clear<0>(), unit.clear<1>();
    if constexpr (kBoth) unit.clear<2>(), unit.clear<3>();
}
template <bool kBoth>
NANOCORE_INLINE void load_sums(TileUnit& unit, const void* from, int64_t row_bytes) {
    const char* start = static_cast<const char*>(from);
    unit.load<0>(start, row_bytes), unit.load<1>(start + kTileLine, row_bytes);
    start += kTileRows * row_bytes;
    if constexpr (kBoth) unit.load<2>(start, row_bytes), unit.load<3>(start + kTileLine, row_bytes);
}
template <bool kBoth>
NANOCORE_INLINE void store_sums(const TileUnit& unit, void* to, int64_t row_bytes) {
    char* start = static_cast<char*>(to);
    unit.store<0>(start, row_bytes), unit.store<1>(start + kTileLine, row_bytes);
    start += kTileRows * row_bytes;
    if constexpr (kBoth) unit.store<2>(start, row_bytes), unit.store<3>(start + kTileLine, row_bytes);
}

}  // namespace nanocore
