// x W^T + b, and the gated MLP of three such products, in bfloat16 on AMX tiles: weights are read as they lie, where
// general libraries first copy them into an order of their own, at each call.
#include <vector>

#include "activation.h"
#include "amx.h"
#include "scratch.h"
#include "tiles.h"

using namespace moe_opt;

#ifdef MOE_OPT_AMX
namespace {

constexpr int kRows = 64;      // rows of x that a task holds products of at a time
constexpr int kChunk = 256;    // rows of a task that packs its weights
constexpr int kColumns = 128;  // columns of a task, of one weight or of two together

// W weights of [columns, k] that x is multiplied with at once.
template <int W>
struct Weights {
  const bf16* rows[W];
  int64_t k, columns;
};

// A task's products: weight w of row m and column n at values[w * apart + m * ld + n].
struct Products {
  float* values;
  int64_t apart, ld;
};

// One column, which fills no tile: products[m * ld] of each row.
void multiply_column(const bf16* const* a, int count, const bf16* weight, int64_t k, float* products, int64_t ld) {
  for (int m = 0; m < count; m += 16) {
    const bf16* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = a[std::min(m + i, count - 1)];
    float tile[16];
    dot_tile<1>(&weight, rows, k, tile);
    for (int i = 0; i < 16 && m + i < count; ++i) products[(m + i) * ld] = tile[i];
  }
}

// Few rows: they are packed, by each thread for itself.
template <int W, typename Done>
void multiply_few(const bf16* x, int64_t rows, const Weights<W>& weights, int threads, Done done) {
  constexpr int kWidth = kColumns / W;
  const int64_t k = weights.k, tasks = (weights.columns + kWidth - 1) / kWidth;
  const int team = static_cast<int>(std::min<int64_t>(threads, tasks));
  for (int64_t first = 0; first < rows; first += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, rows - first));
    const bf16* a[kRows];
    for (int m = 0; m < count; ++m) a[m] = x + (first + m) * k;
#pragma omp parallel num_threads(team) if (team > 1)
    {
      PackedRows packed(a, count, k);
      float products[W * kRows * kWidth];
#pragma omp for schedule(static)
      for (int64_t task = 0; task < tasks; ++task) {
        const int64_t from = task * kWidth;
        const int width = static_cast<int>(std::min<int64_t>(kWidth, weights.columns - from)), even = width / 16 * 16;
        for (int w = 0; w < W; ++w) {
          float* own = products + w * kRows * kWidth;
          const bf16* weight = weights.rows[w] + from * k;
          packed.multiply(weight, even, own, kWidth);
          for (int n = even; n < width; ++n) multiply_column(a, count, weight + n * k, k, own + n, kWidth);
        }
        done(first, count, from, width, Products{products, kRows * kWidth, kWidth});
      }
    }
  }
}

// Many rows: a task packs its columns of the weights and takes the rows as they lie.
template <int W, typename Done>
void multiply_many(const bf16* x, int64_t rows, const Weights<W>& weights, int threads, Done done) {
  constexpr int kWidth = kColumns / W, kStep = 32;
  const int64_t k = weights.k, size = packed_size(k);
  const int64_t across = (weights.columns + kWidth - 1) / kWidth, tasks = across * ((rows + kChunk - 1) / kChunk);
  const int team = static_cast<int>(std::min<int64_t>(threads, tasks));
#pragma omp parallel num_threads(team) if (team > 1)
  {
    static thread_local std::vector<__m512i> packed;
    static thread_local std::vector<bf16> last;  // the last rows, where fewer than a tile's are left
    if (packed.size() < static_cast<size_t>(kColumns / 16 * size)) packed.resize(kColumns / 16 * size);
    if (last.size() < static_cast<size_t>(kStep * k)) last.resize(kStep * k);
    float products[W * kStep * kWidth];
    Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t from = task % across * kWidth, begin = task / across * kChunk;
      const int width = static_cast<int>(std::min<int64_t>(kWidth, weights.columns - from)), blocks = width / 16;
      for (int w = 0; w < W; ++w)
        for (int block = 0; block < blocks; ++block) {
          const bf16* own[16];
          for (int i = 0; i < 16; ++i) own[i] = weights.rows[w] + (from + 16 * block + i) * k;
          pack16(own, 16, k, packed.data() + (w * blocks + block) * size);
        }
      for (int64_t first = begin; first < std::min(rows, begin + kChunk); first += kStep) {
        const int count = static_cast<int>(std::min<int64_t>(kStep, rows - first));
        const bf16* a = x + first * k;
        if (count < kStep) {
          std::memcpy(last.data(), a, sizeof(bf16) * count * k);
          a = last.data();
        }
        for (int w = 0; w < W; ++w) {
          float* own = products + w * kStep * kWidth;
          const __m512i* b = packed.data() + w * blocks * size;
          if (count > 16)
            multiply_blocks<2>(a, k, b, size, blocks, k, own, kWidth);
          else
            multiply_blocks<1>(a, k, b, size, blocks, k, own, kWidth);
        }
        done(first, count, from, width, Products{products, kStep * kWidth, kWidth});
      }
    }
  }
}

// done(first row, rows, first column, columns, products) for all parts of x times each weight.
template <int W, typename Done>
void multiply_all(const bf16* x, int64_t rows, const Weights<W>& weights, int threads, Done done) {
  // Packing a weight costs k a column, turning the products of packed rows a few instructions a row.
  const bool many = rows >= std::max<int64_t>(kRows, weights.k / 2);
  if (many && weights.k % 32 == 0 && weights.columns % 16 == 0)
    multiply_many<W>(x, rows, weights, threads, done);
  else
    multiply_few<W>(x, rows, weights, threads, done);
}

void linear(const bf16* x, int64_t rows, int64_t k, const bf16* weight, const bf16* bias, int64_t columns, bf16* out,
            int threads) {
  const auto done = [=](int64_t first, int count, int64_t from, int width, Products products) {
    for (int m = 0; m < count; ++m) {
      float* row = products.values + m * products.ld;
      if (bias)
        for (int n = 0; n < width; ++n) row[n] += to_float(bias[from + n]);
      round_to(row, 1.0f, width, out + (first + m) * columns + from);
    }
  };
  multiply_all(x, rows, Weights<1>{{weight}, k, columns}, threads, done);
}

}  // namespace
#endif

extern "C" {

// Whether this processor and system have AMX tiles: without them nothing here takes anything.
int moe_opt_has_tiles() {
#ifdef MOE_OPT_AMX
  return amx_ready();
#else
  return 0;
#endif
}

// out[rows, columns] = x[rows, k] weight[columns, k]^T + bias[columns] (or null); all bfloat16. Returns 0, or 1 for an
// odd k and for machines without tiles.
int moe_opt_linear(const void* x, int64_t rows, int64_t k, const void* weight, const void* bias, int64_t columns,
                   void* out, int threads) {
#ifdef MOE_OPT_AMX
  if (!PackedRows::takes(k, 16)) return 1;
  linear(static_cast<const bf16*>(x), rows, k, static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
         columns, static_cast<bf16*>(out), threads);
  return 0;
#else
  (void)x, (void)rows, (void)k, (void)weight, (void)bias, (void)columns, (void)out, (void)threads;
  return 1;
#endif
}

// out[rows, columns] = (act(x gate^T) * (x up^T)) down^T: x [rows, k], gate and up [inner, k], down [columns, inner];
// all bfloat16, the middle too. Returns 0, or 1 as moe_opt_linear does and for lack of memory.
int moe_opt_mlp(const void* x, int64_t rows, int64_t k, const void* gate, const void* up, int64_t inner,
                const void* down, int64_t columns, int activation, void* out, int threads) {
#ifdef MOE_OPT_AMX
  if (!PackedRows::takes(k, 16) || !PackedRows::takes(inner, 16)) return 1;
  static thread_local Scratch scratch;
  bf16* middle;
  try {
    middle = scratch.of<bf16>(rows * inner);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  const auto done = [=](int64_t first, int count, int64_t from, int width, Products products) {
    for (int m = 0; m < count; ++m) {
      float* row = products.values + m * products.ld;
      activate({activation}, row, row + products.apart, width);
      round_to(row, 1.0f, width, middle + (first + m) * inner + from);
    }
  };
  const Weights<2> both{{static_cast<const bf16*>(gate), static_cast<const bf16*>(up)}, k, inner};
  multiply_all(static_cast<const bf16*>(x), rows, both, threads, done);
  linear(middle, rows, inner, static_cast<const bf16*>(down), nullptr, columns, static_cast<bf16*>(out), threads);
  return 0;
#else
  (void)x, (void)rows, (void)k, (void)gate, (void)up, (void)inner, (void)down, (void)columns, (void)activation;
  (void)out, (void)threads;
  return 1;
#endif
}
}
