// The six AMX instructions that the kernel uses. With PACPU_EMULATE_AMX they are emulated in C++, for tests on CPUs
// that lack them; the emulation refuses (by abort) what the hardware would refuse or leave undefined.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(PACPU_EMULATE_AMX)
#include <cstdlib>
#include <cstring>
#endif

namespace pacpu {
namespace {

constexpr int num_tiles = 8, max_tile_rows = 16, max_tile_bytes = 64;

// Palette 1: up to 16 rows of up to 64 bytes for each of the eight tiles.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(PACPU_EMULATE_AMX)

// As assembly: the compiler's intrinsics are macros that take no template parameter for a tile.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int tile>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
inline void load_tile(const void* p, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void store_tile(void* p, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
// sum[m][n] += <a[m], b[., n]>: a has rows of bf16 pairs along k, b has a row for each pair.
template <int sum, int a, int b>
inline void dot_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

#else

struct Tiles {
    TileConfig config;
    bool is_configured = false;
    unsigned char data[num_tiles][max_tile_rows][max_tile_bytes];

    void check(bool condition) const {
        if (!condition || !is_configured) std::abort();
    }
};
inline Tiles& tiles() {
    static thread_local Tiles instance;
    return instance;
}

inline void configure_tiles(const TileConfig& config) {
    Tiles& t = tiles();
    t.config = config;
    t.is_configured = true;
    t.check(config.palette == 1 && config.start_row == 0);
    for (int i = 0; i < 16; ++i) {
        t.check(config.rows[i] <= max_tile_rows && config.row_bytes[i] <= max_tile_bytes);
        t.check((config.rows[i] == 0) == (config.row_bytes[i] == 0) && (i < num_tiles || config.rows[i] == 0));
    }
    std::memset(t.data, 0, sizeof t.data);
}
inline void release_tiles() {
    tiles().check(true);
    tiles().is_configured = false;
}

template <int tile>
inline void zero_tile() {
    tiles().check(tiles().config.rows[tile] > 0);
    std::memset(tiles().data[tile], 0, sizeof tiles().data[tile]);
}
template <int tile>
inline void load_tile(const void* p, ptrdiff_t stride) {
    Tiles& t = tiles();
    zero_tile<tile>();
    for (int r = 0; r < t.config.rows[tile]; ++r)
        std::memcpy(t.data[tile][r], static_cast<const char*>(p) + r * stride, t.config.row_bytes[tile]);
}
template <int tile>
inline void store_tile(void* p, ptrdiff_t stride) {
    Tiles& t = tiles();
    t.check(t.config.rows[tile] > 0);
    for (int r = 0; r < t.config.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(p) + r * stride, t.data[tile][r], t.config.row_bytes[tile]);
}
template <int sum, int a, int b>
inline void dot_tiles() {
    Tiles& t = tiles();
    const auto rows = [&](int tile) { return t.config.rows[tile]; };
    const auto words = [&](int tile) { return t.config.row_bytes[tile] / 4; };
    t.check(sum != a && sum != b && a != b && rows(sum) > 0);
    t.check(rows(sum) == rows(a) && words(sum) == words(b) && words(a) == rows(b));
    const auto word = [&](int tile, int row, int column) {
        uint32_t bits;
        std::memcpy(&bits, &t.data[tile][row][4 * column], sizeof bits);
        return bits;
    };
    // Subnormal numbers, in and out, count as zero.
    const auto number = [](uint32_t bits) {
        float x;
        if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    };
    for (int m = 0; m < rows(a); ++m)
        for (int k = 0; k < rows(b); ++k)
            for (int n = 0; n < words(b); ++n) {
                const uint32_t x = word(a, m, k), y = word(b, k, n);
                float total = number(word(sum, m, n));
                total = __builtin_fmaf(number(x << 16), number(y << 16), total);
                total = __builtin_fmaf(number(x & 0xffff0000u), number(y & 0xffff0000u), total);
                uint32_t bits;
                std::memcpy(&bits, &total, sizeof bits);
                total = number(bits);
                std::memcpy(&t.data[sum][m][4 * n], &total, sizeof total);
            }
}

#endif

}  // namespace
}  // namespace pacpu
