// The routed experts of a decode step on a CPU: gate/up with activation, down, and the weighted sum, in one call.
//
// Assignments are listed by expert; a task owns a tile of one expert's weights, reads it once and applies it to all
// tokens of that expert. Rows of a token are added up in the order of its assignments, so that equal inputs give equal
// outputs with any number of threads. `experts_reference` (storage.py) says the same in torch.
#include <new>
#include <vector>

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

constexpr int kBlock = 64;  // columns of a task

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
    float tile[16];
    dot_tile<M>(a, b, k, tile);
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N && n + i < columns; ++i) products[m * ld + n + i] = tile[m * N + i];
  }
}

template <typename T>
void multiply(const T* const* a, int count, const T* weight, bool transposed, int64_t outputs, int64_t k, int64_t from,
              int columns, float* products, int ld) {
  int m = 0;
  for (; m + 4 <= count; m += 4)
    multiply_rows<4>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
  if (count - m == 3) {
    const T* padded[4] = {a[m], a[m + 1], a[m + 2], a[m + 2]};
    float four[4 * 2 * kBlock];
    multiply_rows<4>(padded, weight, transposed, outputs, k, from, columns, four, 2 * kBlock);
    for (int i = 0; i < 3; ++i)
      std::memcpy(products + (m + i) * ld, four + i * 2 * kBlock, sizeof(float) * static_cast<size_t>(columns));
  } else if (count - m == 2) {
    multiply_rows<2>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
  } else if (count - m == 1) {
    multiply_rows<1>(a + m, weight, transposed, outputs, k, from, columns, products + m * ld, ld);
  }
}

inline void activate(const MoeOptExperts& layer, float* gate, const float* up, int count) {
  switch (layer.activation) {
    case 0: {  // silu
      int at = 0;
#ifdef MOE_OPT_AVX512
      for (; at < count; at += 16) {
        __mmask16 some = count - at >= 16 ? 0xffff : (1u << (count - at)) - 1;
        __m512 g = _mm512_maskz_loadu_ps(some, gate + at), u = _mm512_maskz_loadu_ps(some, up + at);
        // e^-g overflows to infinity below -88, and g / infinity is the 0 that silu has there
        __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
        __m512 out = _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e)), u);
        _mm512_mask_storeu_ps(gate + at, some, out);
      }
#endif
      for (; at < count; ++at) gate[at] = gate[at] / (1 + std::exp(-gate[at])) * up[at];
      return;
    }
    case 1:  // gelu, tanh form
      for (int at = 0; at < count; ++at) {
        float g = gate[at], cubic = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        gate[at] = 0.5f * g * (1 + std::tanh(cubic)) * up[at];
      }
      return;
    default:  // gpt-oss
      for (int at = 0; at < count; ++at) {
        float g = std::min(gate[at], layer.limit), u = std::max(-layer.limit, std::min(up[at], layer.limit));
        gate[at] = (u + 1) * g / (1 + std::exp(-layer.alpha * g));
      }
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
  const bool transposed = layer.transposed;
  float products[kRows * 2 * kBlock], gate[kBlock], up[kBlock];
  for (int64_t begin = call.lists.first[which]; begin < call.lists.first[which + 1]; begin += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, call.lists.first[which + 1] - begin));
    const T* a[kRows];
    for (int m = 0; m < count; ++m) a[m] = call.hidden + call.lists.assignments[begin + m] / call.top_k * width;
    if (layer.interleaved) {
      multiply(a, count, weight, transposed, 2 * inner, width, 2 * from, 2 * columns, products, 2 * kBlock);
    } else {
      multiply(a, count, weight, transposed, 2 * inner, width, from, columns, products, 2 * kBlock);
      multiply(a, count, weight, transposed, 2 * inner, width, inner + from, columns, products + kBlock, 2 * kBlock);
    }
    for (int m = 0; m < count; ++m) {
      const float* row = products + m * 2 * kBlock;
      for (int n = 0; n < columns; ++n) {
        const int64_t g = layer.interleaved ? 2 * (from + n) : from + n, u = layer.interleaved ? g + 1 : g + inner;
        gate[n] = layer.interleaved ? row[2 * n] : row[n];
        up[n] = layer.interleaved ? row[2 * n + 1] : row[kBlock + n];
        if (bias) gate[n] += to_float(bias[g]), up[n] += to_float(bias[u]);
      }
      activate(layer, gate, up, columns);
      T* out = call.middle + call.lists.assignments[begin + m] * inner + from;
      for (int n = 0; n < columns; ++n) from_float(gate[n], out[n]);
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
    multiply(a, count, weight, layer.transposed, width, inner, from, columns, products, kBlock);
    for (int m = 0; m < count; ++m) {
      const int64_t assignment = call.lists.assignments[begin + m];
      const float share = call.weights[assignment];
      float* out = call.rows + assignment * width + from;
      for (int n = 0; n < columns; ++n)
        out[n] = share * (products[m * kBlock + n] + (bias ? to_float(bias[from + n]) : 0.0f));
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
  std::vector<T> middle(total * inner);
  std::vector<float> rows(total * width);
  call.middle = middle.data();
  call.rows = rows.data();
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
      for (int64_t n = 0; n < width; ++n) from_float(first ? first[n] : 0.0f, result[token * width + n]);
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
