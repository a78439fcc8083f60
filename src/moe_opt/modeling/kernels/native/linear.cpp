// x W^T + b for the few rows of a decode step, in bfloat16 on AMX tiles: the weight is read as it lies, where general
// libraries first copy it into an order of their own, at each call.
#include "amx.h"
#include "tiles.h"

using namespace moe_opt;

namespace {

constexpr int kRows = 64;      // rows of x that a task holds products of at a time
constexpr int kColumns = 128;  // columns of a task

#ifdef MOE_OPT_AMX
// One column, which fills no tile: products[m * kColumns] of each row.
void multiply_column(const bf16* const* a, int count, const bf16* weight, int64_t k, float* products) {
  for (int m = 0; m < count; m += 16) {
    const bf16* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = a[std::min(m + i, count - 1)];
    float tile[16];
    dot_tile<1>(&weight, rows, k, tile);
    for (int i = 0; i < 16 && m + i < count; ++i) products[(m + i) * kColumns] = tile[i];
  }
}
#endif

}  // namespace

extern "C" {

// Whether this processor and system have AMX tiles: without them moe_opt_linear takes nothing.
int moe_opt_has_tiles() {
#ifdef MOE_OPT_AMX
  return amx_ready();
#else
  return 0;
#endif
}

// out[rows, columns] = x[rows, k] w[columns, k]^T + bias[columns] (or null); all bfloat16. Returns 0, or 1 for an odd k
// and for machines without tiles.
int moe_opt_linear(const void* x, int64_t rows, int64_t k, const void* weight, const void* bias, int64_t columns,
                   void* out, int threads) {
#ifdef MOE_OPT_AMX
  if (!PackedRows::takes(k, 16)) return 1;
  const int64_t tasks = (columns + kColumns - 1) / kColumns;
  const bf16 *values = static_cast<const bf16*>(x), *w = static_cast<const bf16*>(weight);
  const bf16* b = static_cast<const bf16*>(bias);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, rows - first));
    const bf16* a[kRows];
    for (int m = 0; m < count; ++m) a[m] = values + (first + m) * k;
    const int team = static_cast<int>(std::min<int64_t>(threads, tasks));
#pragma omp parallel num_threads(team) if (team > 1)
    {
      PackedRows packed(a, count, k);  // by each thread for itself: tiles and their shapes are a thread's own
      float products[kRows * kColumns];
#pragma omp for schedule(static)
      for (int64_t task = 0; task < tasks; ++task) {
        const int64_t from = task * kColumns;
        const int width = static_cast<int>(std::min<int64_t>(kColumns, columns - from));
        packed.multiply(w + from * k, width / 16 * 16, products, kColumns);
        for (int n = width / 16 * 16; n < width; ++n) multiply_column(a, count, w + (from + n) * k, k, products + n);
        for (int m = 0; m < count; ++m) {
          float* row = products + m * kColumns;
          if (b)
            for (int n = 0; n < width; ++n) row[n] += to_float(b[from + n]);
          round_to(row, 1.0f, width, static_cast<bf16*>(out) + (first + m) * columns + from);
        }
      }
    }
  }
  return 0;
#else
  (void)x, (void)rows, (void)k, (void)weight, (void)bias, (void)columns, (void)out, (void)threads;
  return 1;
#endif
}
}
