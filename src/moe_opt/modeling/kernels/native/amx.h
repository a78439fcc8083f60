// Matrix products of bfloat16 on AMX tiles, where the processor and the system have them.
//
// One operand is loaded as it lies, 16 rows x 32 of the reduction to a tile; the other is packed, pairs of the reduction
// beside one another as the instruction wants them. With few tokens these are packed (`PackedRows`), and products come
// out by output and are turned; with many the weights are (`multiply_packed`), and products come out by token.
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

// The shapes of the thread's tiles while it multiplies: 16 rows of 32, and in tiles 6 and 7 what is left of a reduction
// that is no multiple of 32.
class Tiles {
 public:
  explicit Tiles(int64_t k = 32) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = 16;
    if (const int64_t tail = k % 32) shape.bytes[6] = 2 * tail, shape.rows[7] = tail / 2;
    _tile_loadconfig(&shape);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
};

// Vectors that 16 rows of k values take when they are packed.
inline int64_t packed_size(int64_t k) { return (k + 31) / 32 * 16; }

// 16 rows of k values as [k / 2][16 rows][2]: the order in which the instruction wants its second operand. What is
// missing is zero.
inline void pack16(const bf16* const* rows, int count, int64_t k, __m512i* out) {
  for (int64_t at = 0; at < k; at += 32) {
    __mmask32 some = k - at >= 32 ? 0xffffffffu : (1u << (k - at)) - 1;
    __m512i* tile = out + at / 2;
    for (int i = 0; i < 16; ++i)
      tile[i] = i < count ? _mm512_maskz_loadu_epi16(some, rows[i] + at) : _mm512_setzero_si512();
    transpose16(tile);
  }
}

// products[m * ld + n] of 16 R rows as they lie, `stride` values apart, with 16 C packed rows, blocks of them `apart`
// vectors apart. For a k that is a multiple of 32, between the making and the end of `Tiles`.
template <int R, int C>
inline void multiply_packed(const bf16* a, int64_t stride, const __m512i* b, int64_t apart, int64_t k, float* products,
                            int64_t ld) {
  _tile_zero(0);
  if constexpr (C > 1) _tile_zero(1);
  if constexpr (R > 1) _tile_zero(2);
  if constexpr (R > 1 && C > 1) _tile_zero(3);
  for (int64_t at = 0; at < k; at += 32) {
    _tile_loadd(4, a + at, 2 * stride);
    if constexpr (R > 1) _tile_loadd(5, a + 16 * stride + at, 2 * stride);
    _tile_loadd(6, b + at / 2, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C > 1) {
      _tile_loadd(7, b + apart + at / 2, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, products, 4 * ld);
  if constexpr (C > 1) _tile_stored(1, products + 16, 4 * ld);
  if constexpr (R > 1) _tile_stored(2, products + 16 * ld, 4 * ld);
  if constexpr (R > 1 && C > 1) _tile_stored(3, products + 16 * ld + 16, 4 * ld);
}

// The same for any number of blocks of packed rows.
template <int R>
inline void multiply_blocks(const bf16* a, int64_t stride, const __m512i* b, int64_t apart, int blocks, int64_t k,
                            float* products, int64_t ld) {
  int n = 0;
  for (; n + 2 <= blocks; n += 2) multiply_packed<R, 2>(a, stride, b + n * apart, apart, k, products + 16 * n, ld);
  if (n < blocks) multiply_packed<R, 1>(a, stride, b + n * apart, apart, k, products + 16 * n, ld);
}

// `count` rows of k values, packed in blocks of 16, as the second operand of products with weights as they lie. The
// memory is the thread's own: one at a time.
class PackedRows {
 public:
  PackedRows(const bf16* const* rows, int count, int64_t k) : tiles_(k), count_(count), k_(k) {
    const int64_t pairs = packed_size(k);
    static thread_local std::vector<__m512i> memory;
    if (memory.size() < static_cast<size_t>(blocks() * pairs)) memory.resize(blocks() * pairs);
    data_ = memory.data();
    for (int block = 0; block < blocks(); ++block)
      pack16(rows + 16 * block, std::min(16, count - 16 * block), k, data_ + block * pairs);
  }
  PackedRows(const PackedRows&) = delete;
  PackedRows& operator=(const PackedRows&) = delete;

  static bool takes(int64_t k, int64_t columns) { return k % 2 == 0 && columns % 16 == 0 && amx_ready(); }

  // products[m * ld + n] for the `columns` weight rows from `weight` on (a multiple of 16).
  void multiply(const bf16* weight, int columns, float* products, int64_t ld) const {
    for (int n = 0; n < columns; n += 64) {
      const int tiles = std::min(columns - n, 64) / 16;
      for (int block = 0; block < blocks(); ++block) {
        const bf16* rows = weight + n * k_;
        const __m512i* tokens = data_ + block * packed_size(k_);
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

  Tiles tiles_;
  int count_;
  int64_t k_;
  __m512i* data_;
};

}  // namespace moe_opt
#endif
