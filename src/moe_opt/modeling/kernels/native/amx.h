// Matrix products of bfloat16 on AMX tiles, where the processor and the system have them.
//
// A weight's rows are loaded as they lie: 16 outputs x 32 of the reduction are one tile. The few tokens are packed
// instead, pairs of the reduction beside one another as the instruction wants them, once for all outputs of a task.
#pragma once
#include "tiles.h"

#if defined(MOE_OPT_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define MOE_OPT_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

namespace moe_opt {

// Linux hands out the tiles' registers on request (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline bool amx_ready() {
  static const bool ready = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return ready;
}

// `count` rows of k values, in blocks of 16: [block][k / 2][16 rows][2]. What is missing is zero. The memory and the
// tiles' shapes are the thread's own: one at a time.
class PackedRows {
 public:
  PackedRows(const bf16* const* rows, int count, int64_t k) : count_(count), k_(k) {
    const int64_t pairs = (k + 31) / 32 * 16;
    static thread_local std::vector<__m512i> memory;
    if (memory.size() < static_cast<size_t>(blocks() * pairs)) memory.resize(blocks() * pairs);
    data_ = memory.data();
    for (int block = 0; block < blocks(); ++block)
      for (int64_t at = 0; at < k; at += 32) {
        __mmask32 some = k - at >= 32 ? 0xffffffffu : (1u << (k - at)) - 1;
        __m512i* tile = data_ + block * pairs + at / 2;
        for (int i = 0; i < 16; ++i)
          tile[i] = 16 * block + i < count ? _mm512_maskz_loadu_epi16(some, rows[16 * block + i] + at)
                                           : _mm512_setzero_si512();
        transpose16(tile);
      }
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 6; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = 16;
    const int64_t tail = k % 32;  // tiles 6 and 7 take what is left of the reduction
    shape.bytes[6] = tail ? 2 * tail : 64, shape.rows[6] = 16;
    shape.bytes[7] = 64, shape.rows[7] = tail ? tail / 2 : 16;
    _tile_loadconfig(&shape);
  }
  PackedRows(const PackedRows&) = delete;
  PackedRows& operator=(const PackedRows&) = delete;
  ~PackedRows() { _tile_release(); }

  static bool takes(int64_t k, int64_t columns) { return k % 2 == 0 && columns % 16 == 0 && amx_ready(); }

  // products[m * ld + n] for the `columns` weight rows from `weight` on (a multiple of 16).
  void multiply(const bf16* weight, int columns, float* products, int64_t ld) const {
    for (int n = 0; n < columns; n += 64) {
      const int tiles = std::min(columns - n, 64) / 16;
      for (int block = 0; block < blocks(); ++block) {
        const bf16* rows = weight + n * k_;
        const __m512i* tokens = data_ + block * ((k_ + 31) / 32 * 16);
        if (tiles == 4)
          sums<4>(rows, tokens);
        else if (tiles == 3)
          sums<3>(rows, tokens);
        else if (tiles == 2)
          sums<2>(rows, tokens);
        else
          sums<1>(rows, tokens);
        float* out = products + 16 * block * ld + n;
        const int m = std::min(16, count_ - 16 * block);
        give<0>(out, ld, m);
        if (tiles > 1) give<1>(out + 16, ld, m);
        if (tiles > 2) give<2>(out + 32, ld, m);
        if (tiles > 3) give<3>(out + 48, ld, m);
      }
    }
  }

 private:
  int blocks() const { return (count_ + 15) / 16; }

  // Tiles 0 to N - 1: 16 outputs x 16 tokens each.
  template <int N>
  void sums(const bf16* rows, const __m512i* tokens) const {
    const int64_t stride = k_ * 2, next = 16 * k_;
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
    int64_t at = 0;
// A macro, for the assembler wants tiles by number.
#define MOE_OPT_ADD(C, A, B)                        \
  if constexpr (N > C) {                            \
    _tile_loadd(A, rows + C * next + at, stride);   \
    _tile_dpbf16ps(C, A, B);                        \
  }
#define MOE_OPT_STEP(A, B)                          \
  _tile_loadd(B, tokens + at / 2, 64);              \
  MOE_OPT_ADD(0, A, B) MOE_OPT_ADD(1, A, B) MOE_OPT_ADD(2, A, B) MOE_OPT_ADD(3, A, B)
    for (; at + 32 <= k_; at += 32) {
      MOE_OPT_STEP(4, 5)
    }
    if (at < k_) {
      MOE_OPT_STEP(6, 7)
    }
#undef MOE_OPT_STEP
#undef MOE_OPT_ADD
  }

  template <int TILE>
  static void give(float* out, int64_t ld, int tokens) {
    __m512i c[16];
    if constexpr (TILE == 0) _tile_stored(0, c, 64);
    if constexpr (TILE == 1) _tile_stored(1, c, 64);
    if constexpr (TILE == 2) _tile_stored(2, c, 64);
    if constexpr (TILE == 3) _tile_stored(3, c, 64);
    transpose16(c);
    for (int m = 0; m < tokens; ++m) _mm512_storeu_si512(out + m * ld, c[m]);
  }

  int count_;
  int64_t k_;
  __m512i* data_;
};

}  // namespace moe_opt
#endif
