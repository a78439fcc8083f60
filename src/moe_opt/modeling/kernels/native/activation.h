// What stands between gate/up and down.
#pragma once
#include "tiles.h"

namespace moe_opt {

// kind: its index in ACTIVATIONS (storage.py). alpha, limit: gpt-oss's.
struct Activation {
  int kind;
  float alpha = 0, limit = 0;
};

// gate[n] becomes act(gate[n]) * up[n].
inline void activate(Activation by, float* gate, const float* up, int count) {
  switch (by.kind) {
    case 0: {  // silu
      int at = 0;
#ifdef MOE_OPT_AVX512
      for (; at < count; at += 16) {
        __mmask16 some = first_lanes(count - at);
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
        float g = std::min(gate[at], by.limit), u = std::max(-by.limit, std::min(up[at], by.limit));
        gate[at] = (u + 1) * g / (1 + std::exp(-by.alpha * g));
      }
  }
}

}  // namespace moe_opt
