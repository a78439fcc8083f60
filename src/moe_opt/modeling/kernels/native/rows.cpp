// What a decode step does row by row beside its matrix products: norms, and what sampling needs of the logits.
#include "tiles.h"

using namespace moe_opt;

namespace {

// weight * round(x / sqrt(mean(x^2) + eps)), rounded again: as Transformers' norms of Llama's kind compute it.
template <typename T>
void norm(const T* x, int64_t rows, int64_t width, const T* weight, float eps, T* out) {
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t n = 0; n < width; ++n) squares += to_float(x[n]) * to_float(x[n]);
    const float factor = 1 / std::sqrt(squares / static_cast<float>(width) + eps);
    for (int64_t n = 0; n < width; ++n) {
      T inner;
      from_float(to_float(x[n]) * factor, inner);
      from_float(to_float(weight[n]) * to_float(inner), out[n]);
    }
  }
}

}  // namespace

extern "C" {

// x, out: [rows, width]; weight: [width]; dtype: 0 float32, 1 bfloat16, 2 float16.
void moe_opt_norm(const void* x, int64_t rows, int64_t width, const void* weight, float eps, void* out, int dtype) {
  switch (dtype) {
    case 0:
      norm(static_cast<const float*>(x), rows, width, static_cast<const float*>(weight), eps, static_cast<float*>(out));
      break;
    case 1:
      norm(static_cast<const bf16*>(x), rows, width, static_cast<const bf16*>(weight), eps, static_cast<bf16*>(out));
      break;
    default:
      norm(static_cast<const fp16*>(x), rows, width, static_cast<const fp16*>(weight), eps, static_cast<fp16*>(out));
  }
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
