// Small matrix products on rows that lie in memory as the model stores them: nothing is packed or converted ahead.
//
// Two forms. `dot_tile`: both operands have the reduction in their rows (a Linear's weight; keys). `axpy_tile`: the
// second operand has its outputs in its rows (a transposed weight; values). Sums are float32 for every dtype.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MOE_OPT_AVX512 1
#include <immintrin.h>
#endif

namespace moe_opt {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline float to_float(fp16 x) {
  uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023, wide;
  if (exponent == 31) {
    wide = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    wide = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: mantissa * 2^-24
    float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -tiny : tiny;
  }
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {  // to nearest, ties to even, as torch rounds
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) {
    out.bits = 0x7fc0;
    return;
  }
  out.bits = static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
}
inline void from_float(float x, fp16& out) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint16_t sign = static_cast<uint16_t>((wide >> 16) & 0x8000u);
  float size = std::fabs(x);
  if (!(size < 65520.0f)) {  // too large, infinite or not a number
    out.bits = static_cast<uint16_t>(sign | (size != size ? 0x7e00u : 0x7c00u));
    return;
  }
  if (size < 6.103515625e-5f) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the last bits
    float shifted = size + 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    out.bits = static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &size, 4);
  bits += 0xfffu + ((bits >> 13) & 1);
  out.bits = static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

// Asks for `bytes` from p on: what the next tile reads. These tiles jump between rows and pages too soon for a
// processor to see the pattern by itself.
inline void prefetch(const void* p, int64_t bytes) {
#if defined(__GNUC__)
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
#endif
}

constexpr int64_t kRowsAhead = 32;  // rows of keys, of values and of transposed weights that are asked for early

// How many rows of the first operand, and of the second, one call of `dot_tile<M>` multiplies: always 16 products.
template <int M>
constexpr int dot_columns() {
  return M == 1 ? 16 : M == 2 ? 8 : 4;
}

#ifdef MOE_OPT_AVX512

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m512 load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load(const float* p, __mmask16 some) { return _mm512_maskz_loadu_ps(some, p); }
inline __m512 load(const bf16* p, __mmask16 some) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
}
inline __m512 load(const fp16* p, __mmask16 some) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, p)); }

inline void store(float* p, __m512 x, __mmask16 some) { _mm512_mask_storeu_ps(p, some, x); }
inline void store(fp16* p, __m512 x, __mmask16 some) {
  _mm256_mask_storeu_epi16(p, some, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, __m512 x, __mmask16 some) {
#ifdef __AVX512BF16__
  _mm256_mask_storeu_epi16(p, some, (__m256i)_mm512_cvtneps_pbh(x));
#else
  float wide[16];
  bf16 narrow[16];
  _mm512_storeu_ps(wide, x);
  for (int i = 0; i < 16; ++i) from_float(wide[i], narrow[i]);
  _mm256_mask_storeu_epi16(p, some, _mm256_loadu_si256((const __m256i*)narrow));
#endif
}
// What is left of x when it is stored as T.
inline __m512 rounded(__m512 x, const float*) { return x; }
inline __m512 rounded(__m512 x, const fp16*) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline __m512 rounded(__m512 x, const bf16*) {
#ifdef __AVX512BF16__
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
#endif
  bf16 narrow[16];
  store(narrow, x, 0xffff);
  return load(narrow);
}
inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

// Lane i is the sum over the lanes of v[i].
inline __m512 sum_lanes(const __m512* v) {
  __m512 pair[8], quad[4];
  for (int i = 0; i < 8; ++i)
    pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    __m512d low = _mm512_castps_pd(pair[2 * i]), high = _mm512_castps_pd(pair[2 * i + 1]);
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  __m512 left = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  __m512 right = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(left, right, 0x88), _mm512_shuffle_f32x4(left, right, 0xdd));
}

template <int M, typename T>
inline void dot_tile(const T* const* a, const T* const* b, int64_t k, float* out) {
  constexpr int N = dot_columns<M>();
  __m512 sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  int64_t at = 0;
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, bf16>) {
    for (; at < k; at += 32) {
      __mmask32 some = k - at >= 32 ? 0xffffffffu : (1u << (k - at)) - 1;
      __m512bh rows[M];
      for (int m = 0; m < M; ++m) rows[m] = (__m512bh)_mm512_maskz_loadu_epi16(some, a[m] + at);
      for (int n = 0; n < N; ++n) {
        __m512bh column = (__m512bh)_mm512_maskz_loadu_epi16(some, b[n] + at);
        for (int m = 0; m < M; ++m) sums[m * N + n] = _mm512_dpbf16_ps(sums[m * N + n], rows[m], column);
      }
    }
    _mm512_storeu_ps(out, sum_lanes(sums));
    return;
  }
#endif
  for (; at + 16 <= k; at += 16) {
    __m512 rows[M];
    for (int m = 0; m < M; ++m) rows[m] = load(a[m] + at);
    for (int n = 0; n < N; ++n) {
      __m512 column = load(b[n] + at);
      for (int m = 0; m < M; ++m) sums[m * N + n] = _mm512_fmadd_ps(rows[m], column, sums[m * N + n]);
    }
  }
  if (at < k) {
    __mmask16 some = (1u << (k - at)) - 1;
    __m512 rows[M];
    for (int m = 0; m < M; ++m) rows[m] = load(a[m] + at, some);
    for (int n = 0; n < N; ++n) {
      __m512 column = load(b[n] + at, some);
      for (int m = 0; m < M; ++m) sums[m * N + n] = _mm512_fmadd_ps(rows[m], column, sums[m * N + n]);
    }
  }
  _mm512_storeu_ps(out, sum_lanes(sums));
}

// out[m][0..columns) += sum over k of a[m][k] * b[k * stride ...]; columns at most 64. a is read as float.
template <int M, typename A, typename T>
inline void axpy_tile(const A* const* a, const T* b, int64_t stride, int64_t k, int columns, float* const* out) {
  __m512 sums[M][4];
  __mmask16 some[4];
  int vectors = (columns + 15) / 16;
  for (int v = 0; v < 4; ++v) {
    int left = columns - 16 * v;
    some[v] = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
    for (int m = 0; m < M; ++m) sums[m][v] = _mm512_maskz_loadu_ps(some[v], out[m] + 16 * v);
  }
  if (columns == 64) {
    for (int64_t at = 0; at < k; ++at) {
      prefetch(b + (at + kRowsAhead) * stride, 64 * static_cast<int64_t>(sizeof(T)));
      __m512 row[4];
      for (int v = 0; v < 4; ++v) row[v] = load(b + at * stride + 16 * v);
      for (int m = 0; m < M; ++m) {
        __m512 factor = _mm512_set1_ps(to_float(a[m][at]));
        for (int v = 0; v < 4; ++v) sums[m][v] = _mm512_fmadd_ps(factor, row[v], sums[m][v]);
      }
    }
  } else {
    for (int64_t at = 0; at < k; ++at)
      for (int v = 0; v < vectors; ++v) {
        __m512 row = load(b + at * stride + 16 * v, some[v]);
        for (int m = 0; m < M; ++m)
          sums[m][v] = _mm512_fmadd_ps(_mm512_set1_ps(to_float(a[m][at])), row, sums[m][v]);
      }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < vectors; ++v) _mm512_mask_storeu_ps(out[m] + 16 * v, some[v], sums[m][v]);
}

// e^x to 2 ulp: 2^n * p(r), with Cephes' polynomial. Infinities come out right, and not a number stays so. Below the
// smallest normal number it is 0: a processor takes a hundred cycles for each subnormal one.
inline __m512 exp16(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  x = _mm512_min_ps(_mm512_set1_ps(128.0f), _mm512_max_ps(_mm512_set1_ps(-128.0f), x));  // in this order NaN passes
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0x08);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

inline float largest(const float* x, int64_t count, float least) {
  __m512 found = _mm512_set1_ps(least);
  for (int64_t at = 0; at < count; at += 16) {
    __mmask16 some = first_lanes(count - at);
    found = _mm512_mask_max_ps(found, some, found, _mm512_maskz_loadu_ps(some, x + at));
  }
  return _mm512_reduce_max_ps(found);
}

template <typename T>
inline void round_to(const float* x, float factor, int64_t count, T* out) {
  for (int64_t at = 0; at < count; at += 16) {
    __mmask16 some = first_lanes(count - at);
    store(out + at, _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_maskz_loadu_ps(some, x + at)), some);
  }
}

inline void exp_in_place(float* x, int64_t count, float minus, float& sum) {
  __m512 total = _mm512_setzero_ps(), shift = _mm512_set1_ps(minus);
  for (int64_t at = 0; at < count; at += 16) {
    __mmask16 some = first_lanes(count - at);
    __m512 value = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(some, x + at), shift));
    _mm512_mask_storeu_ps(x + at, some, value);
    total = _mm512_mask_add_ps(total, some, total, value);
  }
  sum += _mm512_reduce_add_ps(total);
}

// c of 16 x 16 words becomes its transpose.
inline void transpose16(__m512i* c) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(c[i], c[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(c[i], c[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    c[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    c[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    c[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    c[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(c[i], c[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(c[i], c[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(c[i + 8], c[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(c[i + 8], c[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    c[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    c[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

#else  // any other processor: plain loops, which compilers turn into vector code

template <int M, typename T>
inline void dot_tile(const T* const* a, const T* const* b, int64_t k, float* out) {
  constexpr int N = dot_columns<M>();
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      const T *x = a[m], *y = b[n];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t at = 0; at < k; ++at) sum += to_float(x[at]) * to_float(y[at]);
      out[m * N + n] = sum;
    }
}

template <int M, typename A, typename T>
inline void axpy_tile(const A* const* a, const T* b, int64_t stride, int64_t k, int columns, float* const* out) {
  for (int64_t at = 0; at < k; ++at)
    for (int m = 0; m < M; ++m) {
      float factor = to_float(a[m][at]);
      const T* row = b + at * stride;
      float* sums = out[m];
#pragma omp simd
      for (int n = 0; n < columns; ++n) sums[n] += factor * to_float(row[n]);
    }
}

inline float largest(const float* x, int64_t count, float least) {
  for (int64_t at = 0; at < count; ++at) least = x[at] > least ? x[at] : least;
  return least;
}

template <typename T>
inline void round_to(const float* x, float factor, int64_t count, T* out) {
  for (int64_t at = 0; at < count; ++at) from_float(factor * x[at], out[at]);
}

inline void exp_in_place(float* x, int64_t count, float minus, float& sum) {
  for (int64_t at = 0; at < count; ++at) {
    x[at] = std::exp(x[at] - minus);
    sum += x[at];
  }
}

#endif

}  // namespace moe_opt
