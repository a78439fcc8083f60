// Attention of a chunk of a prompt over the paged KV pool, in bfloat16 on AMX tiles.
//
// One KV head at a time its keys and values are packed out of their pages, once for all queries; then each head's
// queries go over them in blocks with a running softmax, 32 queries to a task.
#include <new>
#include <vector>

#include "amx.h"
#include "kv.h"
#include "scratch.h"
#include "tiles.h"

using namespace moe_opt;

#ifdef MOE_OPT_AMX
namespace {

constexpr int kQueries = 32;  // of a task
constexpr int kKeys = 128;    // of a running softmax step
constexpr int64_t kWidest = 256;

struct Chunk {
  int64_t count, length;  // queries; tokens with KV, of which the queries are the last
  int64_t from;           // first token that is read
  int64_t window;         // how many tokens back a query sees, its own included; 0 for all
};

// keys: blocks of 16 tokens, each [dim / 2][16][2]; values: blocks of 16 columns, each [tokens / 2][16][2].
struct Packed {
  __m512i *keys, *values;
  int64_t value_size;  // vectors of a block of values
};

// Packs 32 tokens of a KV head, of which `count` are there; `rows` are their slots.
void pack_tokens(const MoeOptKV& kv, int64_t head, const int64_t* rows, int count, int64_t block, const Packed& packed) {
  const bf16 *keys = static_cast<const bf16*>(kv.keys), *values = static_cast<const bf16*>(kv.values);
  const bf16* from[32];
  const auto place = [&](int i) { return rows[i] * kv.slot_stride + head * kv.head_stride; };
  for (int i = 0; i < count; ++i) from[i] = keys + place(i);
  for (int half = 0; half < 2; ++half)
    pack16(from + 16 * half, std::max(0, std::min(16, count - 16 * half)), kv.dim,
           packed.keys + (2 * block + half) * packed_size(kv.dim));
  // Pairs of tokens beside one another: low and high halves of the words of 16 columns.
  for (int i = 0; i < count; ++i) from[i] = values + place(i);
  for (int64_t d = 0; d < kv.value_dim; d += 16) {
    __m512i* out = packed.values + d / 16 * packed.value_size + block * 16;
    for (int pair = 0; pair < 16; ++pair) {
      const auto row = [&](int i) {
        return i < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(from[i] + d))) : _mm512_setzero_si512();
      };
      out[pair] = _mm512_or_si512(row(2 * pair), _mm512_slli_epi32(row(2 * pair + 1), 16));
    }
  }
}

// scores[t] of one query becomes its share in bfloat16; returns what the sums so far shrink by. Tokens are counted from
// the block's first; those outside low ... high - 1 are not seen.
float shares_of(float* scores, int64_t low, int64_t high, float scale, float& highest, float& total, bf16* shares) {
  low = std::max<int64_t>(low, 0), high = std::min<int64_t>(high, kKeys);
  if (low >= high) {
    std::memset(shares, 0, sizeof(bf16) * kKeys);
    return 1;
  }
  for (int64_t t = 0; t < low; ++t) scores[t] = -INFINITY;
  for (int64_t t = high; t < kKeys; ++t) scores[t] = -INFINITY;
  const __m512 factor = _mm512_set1_ps(scale);
  __m512 peaks = _mm512_set1_ps(highest);
  for (int t = 0; t < kKeys; t += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + t), factor);
    _mm512_storeu_ps(scores + t, scaled);
    peaks = _mm512_max_ps(peaks, scaled);
  }
  const float peak = _mm512_reduce_max_ps(peaks), shrink = peak > highest ? std::exp(highest - peak) : 1.0f;
  const __m512 shift = _mm512_set1_ps(peak);
  __m512 sums = _mm512_setzero_ps();
  for (int t = 0; t < kKeys; t += 16) {
    const __m512 value = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), shift));
    sums = _mm512_add_ps(sums, value);
    store(shares + t, value, 0xffff);
  }
  total = total * shrink + _mm512_reduce_add_ps(sums);
  highest = peak;
  return shrink;
}

// 32 queries of one head, from `first` on.
void attend(const MoeOptKV& kv, const MoeOptRows& query, int64_t heads, int64_t head, int64_t first, const Chunk& chunk,
            const Packed& packed, float scale, const float* sinks, bf16* out) {
  const int64_t dim = kv.dim, width = kv.value_dim;
  const int count = static_cast<int>(std::min<int64_t>(kQueries, chunk.count - first));
  bf16 queries[kQueries * kWidest], shares[kQueries * kKeys];
  float scores[kQueries * kKeys], part[kQueries * kWidest], sums[kQueries * kWidest], highest[kQueries], total[kQueries];
  const bf16* q = static_cast<const bf16*>(query.data) + first * query.row_stride + head * query.head_stride;
  for (int m = 0; m < kQueries; ++m) {
    if (m < count)
      std::memcpy(queries + m * dim, q + m * query.row_stride, sizeof(bf16) * dim);
    else
      std::memset(queries + m * dim, 0, sizeof(bf16) * dim);
    highest[m] = sinks ? sinks[head] : -INFINITY;
    total[m] = sinks ? 1.0f : 0.0f;
  }
  std::fill(sums, sums + kQueries * width, 0.0f);
  const int64_t position = chunk.length - chunk.count + first;  // of the first query
  const int64_t end = position + count;                         // behind the last token that one of them sees
  int64_t begin = chunk.window ? std::max(chunk.from, position + 1 - chunk.window) : chunk.from;
  begin -= (begin - chunk.from) % kKeys;
  const int64_t size = packed_size(dim);
  for (int64_t at = begin; at < end; at += kKeys) {
    const int64_t block = (at - chunk.from) / 16;
    multiply_blocks<2>(queries, dim, packed.keys + block * size, size, kKeys / 16, dim, scores, kKeys);
    for (int m = 0; m < kQueries; ++m) {
      const int64_t own = position + std::min(m, count - 1);
      const int64_t low = chunk.window ? own + 1 - chunk.window - at : 0;
      const float shrink = shares_of(scores + m * kKeys, low, own + 1 - at, scale, highest[m], total[m], shares + m * kKeys);
      if (shrink != 1)
        for (int64_t d = 0; d < width; ++d) sums[m * width + d] *= shrink;
    }
    multiply_blocks<2>(shares, kKeys, packed.values + (at - chunk.from) / 2, packed.value_size,
                       static_cast<int>(width / 16), kKeys, part, width);
    for (int64_t n = 0; n < kQueries * width; ++n) sums[n] += part[n];
  }
  for (int m = 0; m < count; ++m)
    round_to(sums + m * width, 1 / total[m], width, out + ((first + m) * heads + head) * width);
}

}  // namespace
#endif

extern "C" {

// Attends for the `count` tokens of a chunk, the last of `length` that have KV, whose keys and values are written
// already. query, out: [count, heads, ...]. The sequence's tokens from `from` on lie in `runs` runs of neighbouring
// slots. window: 0 for none. sinks: [heads] or null. Returns 0, or 1 for other dtypes, widths and machines than it
// takes and for lack of memory.
int moe_opt_prefill(const MoeOptKV* kv, const MoeOptRows* query, int64_t heads, int64_t count, int64_t length,
                    int64_t from, const int64_t* first, const int64_t* tokens, int64_t runs, int64_t window,
                    float scale, const float* sinks, void* out, int threads) {
#ifdef MOE_OPT_AMX
  if (kv->dtype != 1 || kv->dim % 32 || kv->value_dim % 16 || std::max(kv->dim, kv->value_dim) > kWidest) return 1;
  if (!amx_ready()) return 1;
  try {
    const int64_t read = length - from, padded = (read + kKeys - 1) / kKeys * kKeys;
    std::vector<int64_t> slots(padded);
    for (int64_t run = 0, at = 0; run < runs; ++run)
      for (int64_t i = 0; i < tokens[run]; ++i) slots[at++] = first[run] + i;
    static thread_local Scratch scratch;
    const int64_t value_size = padded / 2, key_vectors = padded / 16 * packed_size(kv->dim);
    const int64_t vectors = key_vectors + kv->value_dim / 16 * value_size;
    const auto address = reinterpret_cast<uintptr_t>(scratch.of<char>((vectors + 1) * 64));
    __m512i* memory = reinterpret_cast<__m512i*>((address + 63) / 64 * 64);
    const Packed packed{memory, memory + key_vectors, value_size};
    const Chunk chunk{count, length, from, window};
    const int64_t group = heads / kv->kv_heads, parts = (count + kQueries - 1) / kQueries;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t head = 0; head < kv->kv_heads; ++head) {
#pragma omp for schedule(static)
      for (int64_t block = 0; block < padded / 32; ++block) {
        const int here = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(32, read - 32 * block)));
        pack_tokens(*kv, head, slots.data() + 32 * block, here, block, packed);
      }
      Tiles tiles;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < group * parts; ++task)  // the longest first
        attend(*kv, *query, heads, head * group + task % group, (parts - 1 - task / group) * kQueries, chunk, packed,
               scale, sinks, static_cast<bf16*>(out));
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
#else
  (void)kv, (void)query, (void)heads, (void)count, (void)length, (void)from, (void)first, (void)tokens, (void)runs;
  (void)window, (void)scale, (void)sinks, (void)out, (void)threads;
  return 1;
#endif
}
}
