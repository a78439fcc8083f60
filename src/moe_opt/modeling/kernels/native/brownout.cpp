// Algorithm 1 of BrownoutServe on one layer's assignments, as `plan_brownout_cpu` and `merge_duplicates` have it: a few
// microseconds for a decode step, where the experts themselves take little more.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

constexpr double kTolerance = 1e-6;  // TOLERANCE of brownout.py

struct Layer {
  std::vector<int64_t> counts, order, members, slots;
  std::vector<char> pinned, kept;
  std::vector<float> score;
};

template <typename Key>
void sort_by(std::vector<int64_t>& order, Key key) {  // descending, equals by their number
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
}

}  // namespace

extern "C" {

// ids, slots: [tokens, top_k]; weights, merged: [tokens, top_k]; group: [experts]; valid, exact: [tokens] or null;
// priority: [experts] or null. united: delegate to `experts + group`, else drop. Returns 0, or 1 where the plan changes
// nothing; then slots and merged are not written.
int moe_opt_delegate(const int64_t* ids, int64_t tokens, int64_t top_k, const float* weights, int64_t experts,
                     const int64_t* group, double threshold, int united, const uint8_t* valid, const uint8_t* exact,
                     const float* priority, int64_t* slots, float* merged) {
  static thread_local Layer layer;
  layer.counts.assign(experts, 0), layer.pinned.assign(experts, 0), layer.kept.assign(experts, 0);
  layer.order.resize(experts), layer.slots.resize(experts), layer.score.resize(experts);
  const auto known = [&](int64_t id) { return id >= 0 && id < experts; };
  for (int64_t token = 0; token < tokens; ++token) {
    if (valid && !valid[token]) continue;
    const bool keeps = exact && exact[token];
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t id = ids[token * top_k + j];
      if (!known(id)) continue;
      if (keeps)
        layer.pinned[id] = 1;
      else
        ++layer.counts[id];
    }
  }
  const int64_t total = std::accumulate(layer.counts.begin(), layer.counts.end(), int64_t{0});
  const auto& counts = layer.counts;
  sort_by(layer.order, [&](int64_t e) { return counts[e] + layer.pinned[e] * (total + 1); });
  const double wanted = threshold * static_cast<double>(total) * (1.0 - kTolerance);
  int64_t before = 0, number = 0;
  for (int64_t e : layer.order) {
    const bool keep = static_cast<double>(before) < wanted && counts[e] > 0;
    layer.kept[e] = keep, number += keep;
    before += counts[e];
  }
  if (priority) {
    for (int64_t e = 0; e < experts; ++e) {
      const float own = std::isnan(priority[e]) ? -INFINITY : priority[e];
      layer.score[e] = counts[e] == 0 ? -INFINITY : layer.pinned[e] ? INFINITY : own;
    }
    sort_by(layer.order, [&](int64_t e) { return layer.score[e]; });
    std::fill(layer.kept.begin(), layer.kept.end(), 0);
    for (int64_t place = 0; place < number; ++place) layer.kept[layer.order[place]] = 1;
  }
  const auto leaves = [&](int64_t e) { return counts[e] > 0 && !layer.kept[e] && !layer.pinned[e]; };
  layer.members.assign(experts, 0);
  for (int64_t e = 0; e < experts; ++e) layer.members[group[e]] += leaves(e);
  bool changed = false;
  for (int64_t e = 0; e < experts; ++e) {
    layer.slots[e] = e;
    if (!leaves(e) || (united && layer.members[group[e]] < 2)) continue;
    layer.slots[e] = united ? experts + group[e] : -1;
    changed = true;
  }
  if (!changed) return 1;
  for (int64_t token = 0; token < tokens; ++token, ids += top_k, weights += top_k, slots += top_k, merged += top_k) {
    const bool skipped = valid && !valid[token], keeps = exact && exact[token];
    for (int64_t j = 0; j < top_k; ++j) {
      slots[j] = skipped || !known(ids[j]) ? -1 : keeps ? ids[j] : layer.slots[ids[j]];
      merged[j] = slots[j] < 0 ? 0.0f : weights[j];
      for (int64_t i = 0; i < j && slots[j] >= 0; ++i)
        if (slots[i] == slots[j]) {
          merged[i] += weights[j];
          slots[j] = -1, merged[j] = 0;
        }
    }
  }
  return 0;
}
}
