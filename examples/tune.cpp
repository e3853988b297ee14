// Finds the minibatch that trains fastest per sample within a memory budget, and a learning rate for it
// (layers/train/tuner.h).
//
//   build/tune --model resnet20 --memory-budget 200M
//   build/tune --model resnet152 --memory-budget 8G --on h200 --ranks 4 --link 10G
#include <cmath>
#include <cstdio>

#include "tandem.h"

using namespace tandem;

namespace {

// "32,64" or "1x,4x": numbers of samples, and multiples of the largest minibatch that fits with all tensors kept.
void read_batches(const std::string& list, TunerOptions& tuner) {
  for (const std::string& one : parts_of(list, ','))
    if (one.ends_with('x'))
      tuner.multiples.push_back(
          OptionRows::parse("--batches", one.substr(0, one.size() - 1), 0.01, 1e6, "multiples from 0.01x: 1x,4x"));
    else
      tuner.batches.push_back(
          OptionRows::parse<std::int64_t>("--batches", one, 1, OptionRows::large, "whole numbers from 1: 32,64"));
}

RunConfig options(int argc, char** argv, TuneRequest& r) {
  constexpr int large = OptionRows::large;
  ExchangeModel& x = r.tuner.exchange;
  std::string on = "here", exchange = "server";
  OptionRows own;
  own.choice("--on", on, {"here", "h200"}, "here: this machine, measured; h200: a simulated GPU");
  own.add({"--batches",
           "the minibatches to try: 32,64, or 1x,4x: times the largest that needs no plan (default: from 8 until none "
           "fits)",
           "", [&](const std::string& v) { read_batches(v, r.tuner); }});
  own.number("--base-batch", r.base_batch, 1, large, "the minibatch for which --lr was chosen");
  own.choice("--rate-rule", r.rule, {RateRule::linear, RateRule::square_root, RateRule::lars, RateRule::adascale},
             "how the learning rate follows: linear, sqrt, lars or adascale");
  own.number("--noise-steps", r.noise_steps, 1, large, "steps of 16 pictures before the gradient's noise is measured");
  own.number("--ranks", x.ranks, 1, large, "how many train together");
  own.add({"--link", "bit/s of each rank's link: 10G, 500M (default: no limit)", "", [&](const std::string& v) {
             const double unit = v.ends_with('G') ? 1e9 : v.ends_with('M') ? 1e6 : 0;
             x.link = parsed<double>(v.substr(0, v.size() - 1)).value_or(0) * unit / 8;
             if (!(x.link > 0) || !std::isfinite(x.link)) refuse("--link ", v, ": expected bit/s: 10G, 500M");
           }});
  own.choice("--exchange", exchange, {"server", "all-reduce"}, "server or all-reduce");
  own.flag("--measure", r.measure, true, "run the plans here too");
  RunConfig o =
      parse_options(argc, argv, "Finds the minibatch that is fastest per sample within a budget of memory.",
                    {.data_set = "cifar10", .model = "resnet20", .epochs = 8, .learning_rate = 0.1},
                    {"--data", "--data-set", "--size", "--model", "--epochs", "--schedule", "--optimizer", "--dtype",
                     "--threads", "--seed", "--memory-budget", "--swap", "--scratch", "--lr", "--metrics"},
                    own.all);
  r.simulated = on == "h200";
  x.server = exchange == "server";
  if (r.simulated && o.memory_budget == 0) refuse("--on h200: how much of its memory? Say --memory-budget 100G");
  if (r.measure && r.simulated) refuse("--measure: only what is --on here can be measured here");
  if (x.link > 0 && x.ranks == 1) refuse("--link is that between ranks: say --ranks too");
  MetricsFile can_be_written(o.metrics, true);  // checks the file and writes nothing
  return o;
}

std::string line_of(const TunedBatch& r, const ExchangeModel& x, std::int64_t samples) {
  if (!r.fits()) return printed("%7ld  does not fit: at least %s", r.batch, readable_bytes(double(r.least)).c_str());
  const Forecast& f = r.choice.forecast;
  return printed("%7ld %11s %11s %11s %10.4g %10.3g %10.3g %10ld", r.batch, readable_bytes(double(f.peak)).c_str(),
                 f.swapped ? readable_bytes(double(f.swapped)).c_str() : "–",
                 f.recomputed ? readable_bytes(double(f.recomputed)).c_str() : "–", 1e3 * r.predicted_sample(),
                 1e3 * f.stall, 1e3 * r.exposed, (samples + r.batch * x.ranks - 1) / (r.batch * x.ranks)) +
         (r.measured ? printed(" %10.4g", 1e3 * r.per_sample()) : "");
}

// Prints the command that trains with the chosen minibatch and learning rate. Before it, the predicted time with
// --accumulate, if a smaller row divides the minibatch; the command accumulates where that is faster than the plan.
void print_command(const Tuned& t, const RunConfig& o) {
  const TunedBatch &whole = t.rows[t.best], *part = part_of(whole, t.rows);
  const std::int64_t parts = part ? whole.batch / part->batch : 1;
  const bool accumulates = part && part->per_sample(parts) < whole.per_sample();
  if (part)
    std::printf("%ld minibatches of %ld with --accumulate %ld: %.4g ms/sample%s\n", parts, part->batch, parts,
                1e3 * part->per_sample(parts), accumulates ? " ← chosen" : "");
  std::string c;
  if (const ExchangeModel& x = t.tuner.exchange; x.ranks > 1)
    c = printed("build/tandem-run -n %d --strategy %s ", x.ranks, x.server ? "asp+ddc-asgd" : "all-reduce");
  c += printed("build/train --data-set %s --model %s --batch %ld%s --lr %s", o.data_set.c_str(), o.model.c_str(),
               accumulates ? t.batch / parts : t.batch, accumulates ? printed(" --accumulate %ld", parts).c_str() : "",
               digits(t.rate, 4).c_str());
  std::set<std::string> kept{"--data", "--size", "--dtype", "--epochs", "--seed", "--swap", "--scratch", "--optimizer"};
  for (const auto& [name, value] : o.given)
    if (kept.count(name)) c += " " + name + " " + value;
  if (t.schedule != usual_schedule) c += " --schedule " + t.schedule;
  if (o.memory_budget > 0) c += printed(" --memory-budget %zu", o.memory_budget);
  std::printf("%s\n", c.c_str());
}

void print(const Tuned& t, const RunConfig& o, const TuneRequest& r, std::int64_t samples) {
  std::printf("%s, %s, %s: budget %s", o.model.c_str(), name_of(o.dtype),
              r.simulated ? "a simulated H200" : "measured here", readable_bytes(double(t.tuner.budget)).c_str());
  if (t.tuner.means.swap)
    std::printf(", copies %s/s out and %s/s in", readable_bytes(t.tuner.means.out).c_str(),
                readable_bytes(t.tuner.means.in).c_str());
  std::printf("\n  batch        peak     swapped  recomputed  ms/sample   stall ms exposed ms pushes/epoch%s\n",
              r.measure ? " measured" : "");
  for (std::size_t i = 0; i < t.rows.size(); i++)
    std::printf("%s%s\n", line_of(t.rows[i], t.tuner.exchange, samples).c_str(), i == t.best ? "  ← chosen" : "");
  std::printf("gradient noise scale: %s\n",
              t.noise ? (short_number(t.noise->scale()) + " samples (of a larger minibatch each brings little)").c_str()
                      : "not measured on a simulated device");
  std::printf("learning rate %s at %ld → %s at %ld (%s)\n", digits(o.learning_rate).c_str(), r.base_batch,
              digits(t.rate, 4).c_str(), t.batch, name_of(r.rule));
  print_command(t, o);
}

// Writes the choice and the data that it is based on, for examples/report.py.
void write_tuned(const Tuned& t, const RunConfig& o, const TuneRequest& r) {
  MetricsFile file(o.metrics);
  file.write({{"event", std::string("tuned")},
              {"model", o.model},
              {"dtype", std::string(name_of(o.dtype))},
              {"device", std::string(r.simulated ? "a simulated H200" : "measured here")},
              {"budget", std::int64_t(t.tuner.budget)},
              {"copies_out", t.tuner.means.out},
              {"copies_in", t.tuner.means.in},
              {"minibatch", t.rows[t.best].batch},
              {"batch", t.batch},
              {"learning_rate", t.rate},
              {"noise_scale", t.noise ? t.noise->scale() : NAN}});
  for (const MetricFields& line : tuner_lines(t.rows, t.rows[t.best], t.tuner.means)) file.write(line);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    TuneRequest request;
    const RunConfig o = options(argc, argv, request);
    auto backend = make_backend(o);
    const Dataset data = load_dataset(o.data_set, o.data, o.folder);
    const Tuned t = tune_for(o, data, *backend, request);
    print(t, o, request, data.train.count());
    write_tuned(t, o, request);
  });
}
