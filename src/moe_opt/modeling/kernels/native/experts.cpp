// The routed experts of a decode step on a CPU: gate/up with activation, down, and the weighted sum, in one call.
//
// Assignments are listed by expert; a task owns a tile of one expert's weights, reads it once and applies it to all
// tokens of that expert. Rows of a token are added up in the order of its assignments, so that equal inputs give equal
// outputs with any number of threads. `experts_reference` (storage.py) says the same in torch.
#include <new>
#include <vector>

#include "activation.h"
#include "amx.h"
#include "scratch.h"
#include "tiles.h"

using namespace moe_opt;

extern "C" {
// One layer's storage: see FusedWeights (storage.py). dtype: 0 float32, 1 bfloat16, 2 float16.
struct MoeOptExperts {
  const void *gate_up, *down, *gate_up_bias, *down_bias;
  int64_t slots, width, inner;
  int32_t transposed, interleaved, activation, dtype;
  float alpha, limit;
};
}

namespace {

constexpr int kBlock = 256;           // columns of a task
constexpr int kFewest = 3;            // tokens for which packing pays
constexpr int64_t kAhead = 1 << 12;  // bytes of a weight that are asked for ahead of time, at most

struct Lists {
  std::vector<int64_t> active, first, assignments;  // slots with tokens; where each one's list begins; token * top_k + j
};

template <typename T>
struct Call {
  const MoeOptExperts& layer;
  const T* hidden;
  int64_t top_k;
  const float* weights;
  Lists lists;
  T* middle;    // [assignments, inner]
  float* rows;  // [assignments, width]
};

// products[m][n] of rows a[0..count) with `columns` rows of a weight, n from `from`. Transposed weights have the outputs
// in their rows. products is [count][ld].
template <int M, typename T>
void multiply_rows(const T* const* a, const T* weight, bool transposed, int64_t outputs, int64_t k, int64_t from,
                   int columns, float* products, int ld) {
  if (transposed) {
    float* out[M];
    for (int m = 0; m < M; ++m) {
      out[m] = products + m * ld;
      std::fill(out[m], out[m] + columns, 0.0f);
    }
    for (int n = 0; n < columns; n += 64) {
      float* part[M];
      for (int m = 0; m < M; ++m) part[m] = out[m] + n;
      axpy_tile<M>(a, weight + from + n, outputs, k, std::min(64, columns - n), part);
    }
    return;
  }
  constexpr int N = dot_columns<M>();
  for (int n = 0; n < columns; n += N) {
    const T* b[N];
    for (int i = 0; i < N; ++i) b[i] = weight + (from + std::min(n + i, columns - 1)) * k;
    prefetch(b[0] + N * k, std::min<int64_t>(N * k * sizeof(T), kAhead));
    float tile[16];
    dot_tile<M>(a, b, k, tile);
    for (int m = 0; m < M; ++m)  // behind the last column too: rows of products are a multiple of 16 long
      for (int i = 0; i < N; ++i) products[m * ld + n + i] = tile[m * N + i];
  }
}

struct Range {
  int64_t from;  // first row of the weight
  float* products;
};

// products[m * ld + n] of `count` rows with `columns` rows of a weight, for each of one or two ranges of such rows.
template <typename T>
void multiply(const T* const* a, int count, const T* weight, bool transposed, int64_t outputs, int64_t k,
              const Range* ranges, int number, int columns, int ld) {
#ifdef MOE_OPT_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (count >= kFewest && !transposed && PackedRows::takes(k, columns)) {
      PackedRows packed(a, count, k);
      for (int r = 0; r < number; ++r)
        packed.multiply(weight + ranges[r].from * k, columns, ranges[r].products, ld);
      return;
    }
  }
#endif
  for (int r = 0; r < number; ++r) {
    const int64_t from = ranges[r].from;
    float* products = ranges[r].products;
    int m = 0;
    for (; m + 4 <= count; m += 4)
      multiply_rows<4>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
    if (m + 2 <= count) {
      multiply_rows<2>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
      m += 2;
    }
    if (m < count) multiply_rows<1>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
  }
}

constexpr int kRows = 32;  // tokens of one expert that a task holds products of at a time

template <typename T>
void gate_up_task(Call<T>& call, int64_t which, int64_t from) {
  const MoeOptExperts& layer = call.layer;
  const int64_t slot = call.lists.active[which], width = layer.width, inner = layer.inner;
  const T* weight = static_cast<const T*>(layer.gate_up) + slot * 2 * inner * width;
  const T* bias = layer.gate_up_bias ? static_cast<const T*>(layer.gate_up_bias) + slot * 2 * inner : nullptr;
  const int columns = static_cast<int>(std::min<int64_t>(kBlock, inner - from));
  float products[kRows * 2 * kBlock], apart[2 * kBlock];
  for (int64_t begin = call.lists.first[which]; begin < call.lists.first[which + 1]; begin += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, call.lists.first[which + 1] - begin));
    const T* a[kRows];
    for (int m = 0; m < count; ++m) a[m] = call.hidden + call.lists.assignments[begin + m] / call.top_k * width;
    if (layer.interleaved) {
      const Range both{2 * from, products};
      multiply(a, count, weight, layer.transposed, 2 * inner, width, &both, 1, 2 * columns, 2 * kBlock);
    } else {
      const Range each[2] = {{from, products}, {inner + from, products + kBlock}};
      multiply(a, count, weight, layer.transposed, 2 * inner, width, each, 2, columns, 2 * kBlock);
    }
    for (int m = 0; m < count; ++m) {
      float *gate = products + m * 2 * kBlock, *up = gate + kBlock;
      if (layer.interleaved) {
        for (int n = 0; n < columns; ++n) apart[n] = gate[2 * n], apart[kBlock + n] = gate[2 * n + 1];
        gate = apart, up = apart + kBlock;
      }
      if (bias)
        for (int n = 0; n < columns; ++n) {
          const int64_t g = layer.interleaved ? 2 * (from + n) : from + n;
          gate[n] += to_float(bias[g]), up[n] += to_float(bias[layer.interleaved ? g + 1 : g + inner]);
        }
      activate({layer.activation, layer.alpha, layer.limit}, gate, up, columns);
      round_to(gate, 1.0f, columns, call.middle + call.lists.assignments[begin + m] * inner + from);
    }
  }
}

template <typename T>
void down_task(Call<T>& call, int64_t which, int64_t from) {
  const MoeOptExperts& layer = call.layer;
  const int64_t slot = call.lists.active[which], width = layer.width, inner = layer.inner;
  const T* weight = static_cast<const T*>(layer.down) + slot * inner * width;
  const T* bias = layer.down_bias ? static_cast<const T*>(layer.down_bias) + slot * width : nullptr;
  const int columns = static_cast<int>(std::min<int64_t>(kBlock, width - from));
  float products[kRows * kBlock];
  for (int64_t begin = call.lists.first[which]; begin < call.lists.first[which + 1]; begin += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, call.lists.first[which + 1] - begin));
    const T* a[kRows];
    for (int m = 0; m < count; ++m) a[m] = call.middle + call.lists.assignments[begin + m] * inner;
    const Range all{from, products};
    multiply(a, count, weight, layer.transposed, width, inner, &all, 1, columns, kBlock);
    for (int m = 0; m < count; ++m) {
      const int64_t assignment = call.lists.assignments[begin + m];
      const float share = call.weights[assignment];
      float *row = products + m * kBlock, *out = call.rows + assignment * width + from;
      if (bias)
        for (int n = 0; n < columns; ++n) row[n] += to_float(bias[from + n]);
      round_to(row, share, columns, out);
    }
  }
}

template <typename T>
void run(const MoeOptExperts& layer, const void* hidden, int64_t tokens, const int64_t* ids, int64_t top_k,
         const float* weights, void* out, int threads) {
  const int64_t total = tokens * top_k, width = layer.width, inner = layer.inner, slots = layer.slots;
  std::vector<int64_t> place(slots + 1, 0);
  for (int64_t i = 0; i < total; ++i)
    if (ids[i] >= 0 && ids[i] < slots) ++place[ids[i]];
  Call<T> call{layer, static_cast<const T*>(hidden), top_k, weights, {}, nullptr, nullptr};
  int64_t at = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t count = place[slot];
    place[slot] = at;
    if (!count) continue;
    call.lists.active.push_back(slot);
    call.lists.first.push_back(at);
    at += count;
  }
  call.lists.first.push_back(at);
  call.lists.assignments.resize(at);
  for (int64_t i = 0; i < total; ++i)
    if (ids[i] >= 0 && ids[i] < slots) call.lists.assignments[place[ids[i]]++] = i;
  static thread_local Scratch middle, rows;
  call.middle = middle.of<T>(total * inner);
  call.rows = rows.of<float>(total * width);
  const int64_t active = static_cast<int64_t>(call.lists.active.size());
  const int64_t inner_blocks = (inner + kBlock - 1) / kBlock, width_blocks = (width + kBlock - 1) / kBlock;
  T* result = static_cast<T*>(out);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < active * inner_blocks; ++task)
      gate_up_task(call, task / inner_blocks, task % inner_blocks * kBlock);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < active * width_blocks; ++task)
      down_task(call, task / width_blocks, task % width_blocks * kBlock);
#pragma omp for
    for (int64_t token = 0; token < tokens; ++token) {
      float* first = nullptr;  // sums grow in the row of the token's first assignment that counts
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t id = ids[token * top_k + j];
        if (id < 0 || id >= slots) continue;
        float* row = call.rows + (token * top_k + j) * width;
        if (!first) {
          first = row;
          continue;
        }
        for (int64_t n = 0; n < width; ++n) first[n] += row[n];
      }
      if (first)
        round_to(first, 1.0f, width, result + token * width);
      else
        std::memset(result + token * width, 0, sizeof(T) * width);
    }
  }
}

}  // namespace

extern "C" {

// out[t] = sum over j of weights[t, j] * expert ids[t, j] (hidden[t]); ids outside 0 ... slots - 1 are dropped. hidden,
// out: [tokens, width] of the layer's dtype; ids, weights: [tokens, top_k]. Returns 0, or 1 for lack of memory.
int moe_opt_experts(const MoeOptExperts* layer, const void* hidden, int64_t tokens, const int64_t* ids, int64_t top_k,
                    const float* weights, void* out, int threads) {
  try {
    switch (layer->dtype) {
      case 0: run<float>(*layer, hidden, tokens, ids, top_k, weights, out, threads); break;
      case 1: run<bf16>(*layer, hidden, tokens, ids, top_k, weights, out, threads); break;
      default: run<fp16>(*layer, hidden, tokens, ids, top_k, weights, out, threads);
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}
