// What the tuner predicted, as lines of metrics.
#include <algorithm>
#include <cmath>

#include "layers/train/tuner.h"

namespace tandem {
namespace {

MetricFields line_of(const TunedBatch& b) {
  MetricFields line{{"event", std::string("minibatch")}, {"minibatch", b.batch}};
  if (!b.fits()) {
    line.push_back({"least", std::int64_t(b.least)});
    return line;
  }
  const Forecast& f = b.choice.forecast;
  line.insert(line.end(), {{"peak", std::int64_t(f.peak)},
                           {"swapped", std::int64_t(f.swapped)},
                           {"recomputed", std::int64_t(f.recomputed)},
                           {"seconds", f.seconds},
                           {"stall", f.stall},
                           {"exposed", b.exposed},
                           {"sample_seconds", b.per_sample()}});
  if (b.measured) line.push_back({"measured_sample_seconds", (*b.measured + b.exposed) / double(b.batch)});
  return line;
}

// Bytes in each event of the saved tensors with this fate that are there whatever the copies do.
std::vector<double> held(const TunedBatch& b, Fate fate) {
  const std::size_t events = b.record.events.size();
  std::vector<double> bytes(events);
  for (std::size_t i = 0; i < b.record.saved.size(); i++) {
    const SavedRecord& s = b.record.saved[i];
    if (s.saved < 0 || b.choice.fates[i] != fate) continue;
    const int end = s.gone < 0 ? int(events) - 1 : s.gone, read = b.choice.forecast.read_at[i];
    for (int e = s.saved + 1; e <= end; e++)
      if (fate == Fate::keep || e <= std::max(s.free_at, s.last_used) || e >= read)
        bytes[std::size_t(e)] += double(s.bytes);
  }
  return bytes;
}

void add_memory(const TunedBatch& b, std::vector<MetricFields>& lines) {
  const std::vector<double> kept = held(b, Fate::keep), recomputed = held(b, Fate::recompute);
  for (std::size_t e = 0; e < b.choice.forecast.live.size(); e++) {
    const double all = double(b.choice.forecast.live[e]), rest = std::min(all, double(b.record.events[e].base));
    const double with_kept = std::min(all, rest + kept[e]), with_recomputed = std::min(all, with_kept + recomputed[e]);
    lines.push_back({{"event", std::string("memory")},
                     {"seconds", b.record.events[e].seconds},
                     {"rest", std::int64_t(rest)},
                     {"kept", std::int64_t(with_kept - rest)},
                     {"recomputed", std::int64_t(with_recomputed - with_kept)},
                     {"swapped", std::int64_t(all - with_recomputed)}});
  }
}

// Budgets from the least to what needs no plan.
void add_budgets(const TunedBatch& b, MemoryMeans means, const std::string& name, std::vector<MetricFields>& lines) {
  const double least = double(smallest_budget(b.record, means)), most = double(peak_kept(b.record));
  for (int k = 0; k <= 10; k++) {
    const auto budget = std::size_t(std::ceil(least + (most - least) * k / 10));
    const MemoryChoice c = choose_memory(b.record, budget, means);
    if (!c.fits) continue;
    lines.push_back({{"event", std::string("budget")},
                     {"means", name},
                     {"budget", std::int64_t(budget)},
                     {"seconds", c.forecast.seconds}});
  }
}

}  // namespace

std::vector<MetricFields> tuner_lines(const std::vector<TunedBatch>& rows, const TunedBatch& chosen,
                                      const MemoryMeans& means) {
  std::vector<MetricFields> lines;
  for (const TunedBatch& row : rows) lines.push_back(line_of(row));
  MemoryMeans swap = means, recompute = means;
  swap.recompute = recompute.swap = false;
  if (means.swap && means.recompute) add_budgets(chosen, means, "swap and recompute", lines);
  if (means.swap) add_budgets(chosen, swap, "swap", lines);
  if (means.recompute) add_budgets(chosen, recompute, "recompute", lines);
  add_memory(chosen, lines);
  return lines;
}

}  // namespace tandem
