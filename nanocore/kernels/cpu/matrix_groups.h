// Products of eight-bit rows with grouped integer weights in the matrix unit; see integers.h and amx.h.
//
// Sums of a group are the same integers, and the chain over groups has the same order: so results have
// the bits that vectors give them, which take few rows in less time.

#pragma once

#include "amx.h"
#include "grouped_products.h"

namespace nanocore {

template <typename T, int kBits, bool kVnni>
struct MatrixGroups {
    static constexpr int kPanelRows = kMatrixRows;
    static constexpr bool kSigned = kBits == 4;  // whether weights are, when they are multiplied
    static constexpr int kTogether = 4;          // groups that go into the chain at once
    typedef GroupedProducts<T, IntegerGroups<kBits, kVnni>> Few;
    typedef int8_t Bytes __attribute__((vector_size(kLanes * 4)));

    Few few;  // the same in vectors
    const LinearWeight& weight = few.weight;
    TileUnit unit = {};
    int configured_rows = 0;

    int64_t panel_bytes() const { return num_groups() * group_bytes(kPanelRows); }

    void pack(const T* x, int64_t stride, int rows, char* to) const {
        if (rows <= kMaxRows) return few.pack(x, stride, rows, to);
        const int64_t chunk = chunk_bytes(), group = weight.format.group;
        for (int r = 0; r < rows; ++r)
            IntegerGroups<kBits, true>::loop_groups(  // the unit takes unsigned weights, too
                Inputs<T>{x + r * stride, weight.permutation}, weight.format, weight.in_features, to, rows, r,
                group_bytes(rows), [&](const int8_t* from, char* header) {
                    char* lines = header + header_bytes(rows) + r * chunk;
                    for (int64_t i = 0; i < group; i += chunk, lines += rows * chunk)
                        std::memcpy(lines, from + i, chunk);
                });
    }

    void multiply(const char* packed, int rows, const void* tile, const Prefetch& ahead, float* products) {
        if (rows <= kMaxRows) return few.multiply(packed, rows, tile, ahead, products);
        if (rows != configured_rows)
            configure_products(unit, configured_rows = rows, static_cast<int>(chunk_bytes()));
        if (rows > kTileRows) multiply_tile<true>(packed, rows, static_cast<const char*>(tile), ahead, products);
        else multiply_tile<false>(packed, rows, static_cast<const char*>(tile), ahead, products);
    }

   private:
    int64_t num_groups() const { return weight.format.num_groups(weight.in_features); }
    // Of a group there are scales, offsets and scaled sums of all rows, then chunks: a line of each row.
    static int64_t header_bytes(int rows) { return (12 * rows + kTileLine - 1) / kTileLine * kTileLine; }
    int64_t group_bytes(int rows) const { return header_bytes(rows) + rows * weight.format.group; }
    // How many k of a group an instruction takes: as many as fit, in equal parts.
    int64_t chunk_bytes() const {
        const int64_t group = weight.format.group;
        int64_t parts = (group + kTileLine - 1) / kTileLine;
        while (group % (4 * parts)) ++parts;
        return group / parts;
    }

    // A group's products, and what the chain takes of it.
    struct Group {
        const char* header;  // of the rows
        ColumnScales of[kTileColumns / kLanes];
        alignas(64) int32_t sums[kMatrixRows * kTileColumns];
    };

    template <bool kBoth>
    void multiply_tile(const char* packed, int rows, const char* tile, const Prefetch& ahead, float* products) {
        const GroupFormat& format = weight.format;
        const int64_t group = format.group, num_steps = group * kBits / kLanes / 2, count = num_groups();
        PrefetchCursor next(ahead);
        Group groups[kTogether];
        alignas(64) char unpacked[kMaxGroup * kTileColumns];
        const char* header = nullptr;
        std::memset(products, 0, rows * kTileColumns * sizeof(float));
        for (int64_t index = 0; index < count; ++index, packed += group_bytes(rows), tile += format.group_bytes()) {
            if (format.scales == Scales::kTwoLevel && index % format.groups_of_header() == 0) {
                header = tile;
                tile += format.header_bytes();
            }
            for (int64_t step = 0; step < num_steps; ++step) next.advance();
            const char* values = tile + format.scale_bytes() + format.minima_bytes();
            if constexpr (kBits == 4) {
                unpack(values, group, unpacked);
                values = unpacked;
            }
            Group& to = groups[index % kTogether];
            to.header = packed;
            for (int part = 0; part < kTileColumns / kLanes; ++part)
                to.of[part] = column_scales(format, tile, header, part * kLanes);
            add_up<kBoth>(packed + header_bytes(rows), rows, values, to.sums);
            if (index % kTogether == kTogether - 1) add_groups<kTogether>(groups, rows, products);
        }
        for (int64_t i = 0; i < count % kTogether; ++i) add_groups<1>(groups + i, rows, products);
    }

    // To a byte each, four k of a column side by side; less the zero, so that rows need no offset.
    void unpack(const char* values, int64_t group, char* to) const {
        const U zero = broadcast(static_cast<uint32_t>(weight.format.zero()) * 0x01010101u);
        for (int64_t k = 0; k < group; k += 8, values += 4 * kTileColumns, to += 8 * kTileColumns)
            for (int column = 0; column < kTileColumns; column += kLanes) {
                const U both = load(reinterpret_cast<const uint32_t*>(values) + column);
                uint32_t* line = reinterpret_cast<uint32_t*>(to) + column;
                *reinterpret_cast<UAny*>(line) = less(both & 0x0f0f0f0fu, zero);
                *reinterpret_cast<UAny*>(line + kTileColumns) = less((both >> 4) & 0x0f0f0f0fu, zero);
            }
    }

    // Of each byte.
    static NANOCORE_INLINE U less(U a, U b) {
        return reinterpret_cast<U>(reinterpret_cast<Bytes>(a) - reinterpret_cast<Bytes>(b));
    }

    // Of one group, to sums[rows][32].
    template <bool kBoth>
    NANOCORE_INLINE void add_up(const char* lines, int rows, const char* values, int32_t* sums) {
        constexpr int64_t kApart = kTileColumns * 4;
        const int64_t chunk = chunk_bytes();
        clear_sums<kBoth>(unit);
        for (int64_t k = 0; k < weight.format.group; k += chunk, lines += rows * chunk) {
            const char* columns = values + k * kTileColumns;
            unit.load<6>(columns, kApart);
            unit.load<4>(lines, chunk);
            unit.add_byte_products<kSigned, 0, 4, 6>();
            unit.load<7>(columns + kTileLine, kApart);
            unit.add_byte_products<kSigned, 1, 4, 7>();
            if constexpr (kBoth) {
                unit.load<5>(lines + kTileRows * chunk, chunk);
                unit.add_byte_products<kSigned, 2, 5, 6>();
                unit.add_byte_products<kSigned, 3, 5, 7>();
            }
        }
        store_sums<kBoth>(unit, sums, kApart);
    }

    // Goes on with the chain over groups, as `multiply_groups` does.
    template <int kCount>
    __attribute__((noinline)) void add_groups(const Group* groups, int rows, float* products) const {
        if (weight.format.minima == Minima::kNone) add_groups_with<kCount, false>(groups, rows, products);
        else add_groups_with<kCount, true>(groups, rows, products);
    }

    template <int kCount, bool kHasMinima>
    NANOCORE_INLINE void add_groups_with(const Group* groups, int rows, float* products) const {
        for (int part = 0; part < kTileColumns / kLanes; ++part) {
            F scale[kCount], minimum[kCount];
            for (int g = 0; g < kCount; ++g) {
                scale[g] = groups[g].of[part].scale;
                minimum[g] = groups[g].of[part].minimum;
            }
            for (int r = 0; r < rows; ++r) {
                float* to = products + r * kTileColumns + part * kLanes;
                F total = load(to);
#pragma GCC unroll 4
                for (int g = 0; g < kCount; ++g) {
                    const float* of_rows = reinterpret_cast<const float*>(groups[g].header);
                    const int32_t* from = groups[g].sums + r * kTileColumns + part * kLanes;
                    I sum = reinterpret_cast<I>(load(reinterpret_cast<const uint32_t*>(from)));
                    if constexpr (!kSigned) sum += reinterpret_cast<const int32_t*>(of_rows)[rows + r];
                    total = multiply_add(__builtin_convertvector(sum, F) * of_rows[r], scale[g], total);
                    if constexpr (kHasMinima)
                        total = multiply_add(broadcast(of_rows[2 * rows + r]), minimum[g], total);
                }
                store(total, to);
            }
        }
    }
};

}  // namespace nanocore
