// Attention of one-token rows over the paged KV pool on a CPU, and the writing of new keys and values.
//
// A row reads the runs of neighbouring slots that hold its tokens, in place, a block at a time with a running softmax.
// A task is a row and a KV head: the heads that share keys are the rows of its small matrix products.
#include "kv.h"
#include "tiles.h"

using namespace moe_opt;

namespace {

constexpr int64_t kBlock = 256;    // tokens of a running softmax step
constexpr int64_t kWidest = 1024;  // widest value

template <typename T>
void store(const MoeOptKV& kv, const MoeOptRows& key, const MoeOptRows& value, const int64_t* slots, int64_t tokens) {
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
      const int64_t to = slots[token] * kv.slot_stride + head * kv.head_stride;
      const T* k = static_cast<const T*>(key.data) + token * key.row_stride + head * key.head_stride;
      const T* v = static_cast<const T*>(value.data) + token * value.row_stride + head * value.head_stride;
      std::memcpy(static_cast<T*>(kv.keys) + to, k, sizeof(T) * kv.dim);
      std::memcpy(static_cast<T*>(kv.values) + to, v, sizeof(T) * kv.value_dim);
    }
}

// scores[m][t] = scale * q[m] . k[t], t below count; rows of scores are kBlock long.
template <int M, typename T>
void score_rows(const T* const* q, const T* keys, int64_t stride, int64_t count, int64_t dim, float scale,
                float* scores) {
  constexpr int N = dot_columns<M>();
  for (int64_t t = 0; t < count; t += N) {
    const T* b[N];
    for (int i = 0; i < N; ++i) {
      b[i] = keys + std::min(t + i, count - 1) * stride;
      prefetch(b[i] + kRowsAhead * stride, dim * static_cast<int64_t>(sizeof(T)));
    }
    float tile[16];
    dot_tile<M>(q, b, dim, tile);
    for (int m = 0; m < M; ++m)  // behind the last token too: kBlock is a multiple of N
      for (int i = 0; i < N; ++i) scores[m * kBlock + t + i] = scale * tile[m * N + i];
  }
}

template <int M, typename T>
void add_values(const float* const* shares, const T* values, int64_t stride, int64_t count, int64_t dim,
                float* const* out) {
  for (int64_t d = 0; d < dim; d += 64) {
    float* part[M];
    for (int m = 0; m < M; ++m) part[m] = out[m] + d;
    axpy_tile<M>(shares, values + d, stride, count, static_cast<int>(std::min<int64_t>(64, dim - d)), part);
  }
}

// Up to four heads of one row that share a KV head.
template <int M, typename T>
void attend(const MoeOptKV& kv, const T* const* q, int64_t head, const int64_t* first, const int64_t* tokens,
            int64_t runs, float scale, const float* sinks, T* const* out) {
  float scores[M * kBlock], memory[M * kWidest];
  float* sums[M];
  float highest[M], total[M];
  for (int m = 0; m < M; ++m) {
    sums[m] = memory + m * kWidest;
    std::fill(sums[m], sums[m] + kv.value_dim, 0.0f);
    highest[m] = sinks ? sinks[m] : -INFINITY;
    total[m] = sinks ? 1.0f : 0.0f;
  }
  for (int64_t run = 0; run < runs; ++run)
    for (int64_t at = 0; at < tokens[run]; at += kBlock) {
      const int64_t count = std::min(kBlock, tokens[run] - at);
      const int64_t from = (first[run] + at) * kv.slot_stride + head * kv.head_stride;
      score_rows<M>(q, static_cast<const T*>(kv.keys) + from, kv.slot_stride, count, kv.dim, scale, scores);
      const float* shares[M];
      for (int m = 0; m < M; ++m) {
        float* row = scores + m * kBlock;
        const float peak = largest(row, count, highest[m]);
        if (peak > highest[m]) {
          const float shrink = std::exp(highest[m] - peak);
          total[m] *= shrink;
          for (int64_t d = 0; d < kv.value_dim; ++d) sums[m][d] *= shrink;
          highest[m] = peak;
        }
        exp_in_place(row, count, peak, total[m]);
        shares[m] = row;
      }
      add_values<M>(shares, static_cast<const T*>(kv.values) + from, kv.slot_stride, count, kv.value_dim, sums);
    }
  for (int m = 0; m < M; ++m) round_to(sums[m], 1 / total[m], kv.value_dim, out[m]);
}

template <typename T>
void decode(const MoeOptKV& kv, const MoeOptRows& query, int64_t rows, int64_t heads, const int64_t* begins,
            const int64_t* first, const int64_t* tokens, float scale, const float* sinks, void* out, int threads) {
  const int64_t group = heads / kv.kv_heads, dim = kv.value_dim;
  T* result = static_cast<T*>(out);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t task = 0; task < rows * kv.kv_heads; ++task) {
    const int64_t row = task / kv.kv_heads, head = task % kv.kv_heads, runs = begins[row + 1] - begins[row];
    for (int64_t at = 0; at < group;) {
      const T* q[4];
      T* o[4];
      const int count = group - at >= 4 ? 4 : group - at >= 2 ? 2 : 1;
      const int64_t h = head * group + at;
      for (int m = 0; m < count; ++m) {
        q[m] = static_cast<const T*>(query.data) + row * query.row_stride + (h + m) * query.head_stride;
        o[m] = result + (row * heads + h + m) * dim;
      }
      const float* sink = sinks ? sinks + h : nullptr;
      const int64_t *f = first + begins[row], *t = tokens + begins[row];
      if (count == 4)
        attend<4>(kv, q, head, f, t, runs, scale, sink, o);
      else if (count == 2)
        attend<2>(kv, q, head, f, t, runs, scale, sink, o);
      else
        attend<1>(kv, q, head, f, t, runs, scale, sink, o);
      at += count;
    }
  }
}

}  // namespace

extern "C" {

// Writes `tokens` new keys and values to their slots, then attends for the first `rows` of them, one token each.
// begins [rows + 1], first, tokens_of_run [runs]: row r reads runs begins[r] ... begins[r + 1] - 1. sinks: [heads]
// or null. out: [rows, heads, value_dim]. Returns 0, or 1 if values are wider than 1024.
int moe_opt_attend(const MoeOptKV* kv, const MoeOptRows* query, const MoeOptRows* key, const MoeOptRows* value,
                   const int64_t* slots, int64_t tokens, int64_t rows, int64_t heads, const int64_t* begins,
                   const int64_t* first, const int64_t* tokens_of_run, float scale, const float* sinks, void* out,
                   int threads) {
  if (kv->value_dim > kWidest) return 1;
  switch (kv->dtype) {
    case 0:
      store<float>(*kv, *key, *value, slots, tokens);
      decode<float>(*kv, *query, rows, heads, begins, first, tokens_of_run, scale, sinks, out, threads);
      break;
    case 1:
      store<bf16>(*kv, *key, *value, slots, tokens);
      decode<bf16>(*kv, *query, rows, heads, begins, first, tokens_of_run, scale, sinks, out, threads);
      break;
    default:
      store<fp16>(*kv, *key, *value, slots, tokens);
      decode<fp16>(*kv, *query, rows, heads, begins, first, tokens_of_run, scale, sinks, out, threads);
  }
  return 0;
}
}
