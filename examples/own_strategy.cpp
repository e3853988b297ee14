// A strategy of your own: gossip. After each step a rank averages its weights with one neighbour's, and never waits for
// all. Even and odd pairs of a ring take turns, so what one rank learns reaches all others after a few steps (Lian et
// al. 2017 do the same with both neighbours at once).
//
//   build/tandem-run -n 4 --strategy gossip build/own_strategy
#include <cstdio>

#include "dist/job/job.h"
#include "dist/strategies/replicas.h"
#include "tandem.h"

using namespace tandem;

class Gossip : public Replicas {
 public:
  explicit Gossip(std::unique_ptr<Communicator> communicator) : Replicas(std::move(communicator), "gossip", false) {}

  void begin(FlatParameters& flat, Optimizer& optimizer) override {
    flat_ = &flat;
    optimizer.gradients_are_shares_of(size());  // each rank steps by the mean over its own samples
    compare_layouts(flat);                      // throws where a rank has another model
    broadcast(flat, *communicator_);            // the weights of rank 0, on all
    theirs_ = flat.values.clone();
  }

  // Called after each step of this rank.
  void finish(Optimizer& optimizer) override {
    if (step_ % 16 == 15 && !agree(optimizer)) return;  // was anybody asked to stop, and is every step finite?
    if (const int partner = partner_in(step_++); partner >= 0) {
      Work sent = communicator_->send(partner, buffer(flat_->values)),
           came = communicator_->recv(partner, buffer(theirs_));
      sent.wait(), came.wait();
      float* w = flat_->values.write<float>();
      const float* v = theirs_.data<float>();
      for (std::int64_t i = 0; i < flat_->numel(); i++) w[i] = (w[i] + v[i]) / 2;
      flat_->count_writes(flat_->all());
    }
  }

  // Called after the last step of an epoch. What is evaluated and saved is the mean of all ranks.
  EpochEnd end_epoch(const EpochEnd& mine) override {
    take_mean_of_all(*flat_);
    return Strategy::end_epoch(mine);
  }

 private:
  // Steps 0, 2, 4 …: the pairs (0, 1), (2, 3) …; steps 1, 3, 5 …: (1, 2), (3, 4) … −1: nobody is left to pair with.
  int partner_in(std::int64_t step) const {
    const bool first = (rank() + step) % 2 == 0;
    int partner = first ? rank() + 1 : rank() - 1;
    if (size() % 2 == 0) partner = (partner + size()) % size();  // an even ring is closed
    return size() > 1 && partner < size() ? partner : -1;
  }

  FlatParameters* flat_ = nullptr;
  Tensor theirs_;
  std::int64_t step_ = 0;
};

// What --strategy NAME means: null where the name is not ours.
StrategyMaker gossip_named(const std::string& name) {
  if (name != "gossip") return {};
  return [] { return std::make_unique<Gossip>(Job().communicator()); };
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Options o = parse_options(argc, argv, "LeNet-5 by gossip: start it with tandem-run -n 4.",
                              {.model = "lenet5", .fit = {.epochs = 2}, .learning_rate = 0.05},
                              {"--data", "--model", "--epochs", "--batch", "--lr", "--seed", "--metrics"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.fit.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);
    auto model = make_model(o.model, data.train.classes, 1, 28);
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    auto strategy = strategy_from_environment({{"gossip", gossip_named}});
    fit(*model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, fit_options(o), strategy.get());
  });
}
