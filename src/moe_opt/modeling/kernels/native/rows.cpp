// What a step does row by row beside its matrix products: norms, rotary embeddings, the choice of experts, and what
// sampling needs of the logits.
#include "tiles.h"

using namespace moe_opt;

extern "C" {
// [rows, heads, dim] with these strides; the last dimension is contiguous.
struct MoeOptHeads {
  void* data;
  int64_t row_stride, head_stride, heads;
};
}

namespace {

constexpr int64_t kRowsOfThread = 64;  // rows for which a thread of its own pays
constexpr int64_t kMostExperts = 2048;

// Threads for so many rows.
int team_of(int64_t rows, int threads) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, rows / kRowsOfThread)));
}

// weight * round(x / sqrt(mean(x^2) + eps)), rounded again: as Transformers' norms of Llama's kind compute it.
template <typename T>
void norm(const T* x, int64_t width, const T* weight, float eps, T* out) {
#ifdef MOE_OPT_AVX512
  __m512 sums = _mm512_setzero_ps();
  for (int64_t n = 0; n < width; n += 16) {
    const __m512 values = load(x + n, first_lanes(width - n));
    sums = _mm512_fmadd_ps(values, values, sums);
  }
  const float squares = _mm512_reduce_add_ps(sums);
#else
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t n = 0; n < width; ++n) squares += to_float(x[n]) * to_float(x[n]);
#endif
  const float factor = 1 / std::sqrt(squares / static_cast<float>(width) + eps);
#ifdef MOE_OPT_AVX512
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t n = 0; n < width; n += 16) {
    const __mmask16 some = first_lanes(width - n);
    const __m512 inner = rounded(_mm512_mul_ps(load(x + n, some), factors), x);
    store(out + n, _mm512_mul_ps(load(weight + n, some), inner), some);
  }
#else
  for (int64_t n = 0; n < width; ++n) {
    T inner;
    from_float(to_float(x[n]) * factor, inner);
    from_float(to_float(weight[n]) * to_float(inner), out[n]);
  }
#endif
}

template <typename T>
void norms(const T* x, int64_t rows, int64_t width, const T* weight, float eps, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) norm(x + row * width, width, weight, eps, out + row * width);
}

// x cos + (-x2, x1) sin of one head, x1 and x2 its halves, every product and the sum rounded as torch rounds them.
template <typename T>
void rotate(const T* x, int64_t half, const T* cosines, const T* sines, T* out) {
#ifdef MOE_OPT_AVX512
  for (int64_t n = 0; n < half; n += 16) {
    const __mmask16 some = first_lanes(half - n);
    const __m512 low = load(x + n, some), high = load(x + half + n, some);
    const auto times = [&](__m512 values, const T* by) {
      return rounded(_mm512_mul_ps(values, load(by + n, some)), x);
    };
    store(out + n, _mm512_sub_ps(times(low, cosines), times(high, sines)), some);
    store(out + half + n, _mm512_add_ps(times(high, cosines + half), times(low, sines + half)), some);
  }
#else
  const auto times = [](T a, T b) {
    T product;
    from_float(to_float(a) * to_float(b), product);
    return to_float(product);
  };
  for (int64_t n = 0; n < half; ++n) {
    from_float(times(x[n], cosines[n]) - times(x[half + n], sines[n]), out[n]);
    from_float(times(x[half + n], cosines[half + n]) + times(x[n], sines[half + n]), out[half + n]);
  }
#endif
}

template <typename T>
void rotate_all(const MoeOptHeads& in, const MoeOptHeads& result, int64_t rows, int64_t dim, const void* cosines,
                const void* sines, int threads) {
  const T *x = static_cast<const T*>(in.data), *c = static_cast<const T*>(cosines), *s = static_cast<const T*>(sines);
  T* out = static_cast<T*>(result.data);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < in.heads; ++head)
      rotate(x + row * in.row_stride + head * in.head_stride, dim / 2, c + row * dim, s + row * dim,
             out + row * result.row_stride + head * result.head_stride);
}

// The top_k largest of a row of logits, the first of equals first, with their share of the softmax over all or, if
// `among`, over the chosen.
template <typename T>
void choose(const T* logits, int64_t experts, int64_t top_k, bool among, float* values, float* shares, int64_t* ids) {
  float highest = -INFINITY, total = 0, chosen = 0;
  for (int64_t e = 0; e < experts; ++e) values[e] = to_float(logits[e]), highest = std::max(highest, values[e]);
  for (int64_t e = 0, held = 0; e < experts; ++e) {
    if (held == top_k && !(values[e] > values[ids[top_k - 1]])) continue;
    int64_t at = held < top_k ? held++ : top_k - 1;
    for (; at > 0 && values[e] > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = e;
  }
  for (int64_t j = 0; j < top_k; ++j) chosen += shares[j] = std::exp(values[ids[j]] - highest);
  if (!among) exp_in_place(values, experts, highest, total);
  for (int64_t j = 0; j < top_k; ++j) shares[j] /= among ? chosen : total;
}

}  // namespace

extern "C" {

// x, out: [rows, width]; weight: [width]; dtype: 0 float32, 1 bfloat16, 2 float16.
void moe_opt_norm(const void* x, int64_t rows, int64_t width, const void* weight, float eps, void* out, int dtype,
                  int threads) {
  const int team = team_of(rows, threads);
  const auto as = [&](auto* values) {
    using T = std::remove_pointer_t<decltype(values)>;
    norms(static_cast<const T*>(x), rows, width, static_cast<const T*>(weight), eps, static_cast<T*>(out), team);
  };
  dtype == 0 ? as((float*)nullptr) : dtype == 1 ? as((bf16*)nullptr) : as((fp16*)nullptr);
}

// Rotary embedding in halves of `tensors` of in, one result in out each. cosines, sines: [rows, dim] of their dtype.
void moe_opt_rotate(const MoeOptHeads* in, const MoeOptHeads* out, int64_t tensors, int64_t rows, int64_t dim,
                    const void* cosines, const void* sines, int dtype, int threads) {
  const int team = team_of(rows, threads);
  for (int64_t which = 0; which < tensors; ++which) {
    const auto as = [&](auto* values) {
      using T = std::remove_pointer_t<decltype(values)>;
      rotate_all<T>(in[which], out[which], rows, dim, cosines, sines, team);
    };
    dtype == 0 ? as((float*)nullptr) : dtype == 1 ? as((bf16*)nullptr) : as((fp16*)nullptr);
  }
}

// Of each row of a router's logits [rows, experts]: ids and shares [rows, top_k] of the chosen experts, shares in
// float32 of the softmax over all logits or, if `among`, over the chosen. Returns 0, or 1 for too many experts.
int moe_opt_choose(const void* logits, int64_t rows, int64_t experts, int64_t top_k, int among, float* shares,
                   int64_t* ids, int dtype, int threads) {
  if (experts > kMostExperts || top_k > experts || top_k < 1) return 1;
  const int team = team_of(rows, threads);
  const auto as = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t row = 0; row < rows; ++row) {
      float values[kMostExperts];
      choose(static_cast<const T*>(logits) + row * experts, experts, top_k, among, values, shares + row * top_k,
             ids + row * top_k);
    }
  };
  dtype == 0 ? as((float*)nullptr) : dtype == 1 ? as((bf16*)nullptr) : as((fp16*)nullptr);
  return 0;
}

// Of each row of logits [rows, width], float32: log(sum(exp)). Rows with infinities or NaN get what torch gives them.
void moe_opt_logsumexp(const float* logits, int64_t rows, int64_t width, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = logits + row * width;
    const float highest = largest(x, width, -INFINITY);
    if (!std::isfinite(highest)) {
      bool odd = false;  // minus infinity everywhere, an infinity, or not a number
      for (int64_t n = 0; n < width; ++n) odd |= x[n] != x[n];
      out[row] = odd ? NAN : highest;
      continue;
    }
    float sum = 0, part[256];
    for (int64_t at = 0; at < width; at += 256) {
      const int64_t count = std::min<int64_t>(256, width - at);
      std::memcpy(part, x + at, sizeof(float) * count);
      exp_in_place(part, count, highest, sum);
    }
    out[row] = highest + std::log(sum);
  }
}
}
