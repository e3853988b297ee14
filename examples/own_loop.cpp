// A training loop of your own, from the same parts as fit(). Each batch: forward, loss, backward, learning rate, step.
// Each epoch: an evaluation, and a checkpoint from which it can be continued. Trains LeNet-5 for one epoch, on one
// machine or, under tandem-run, on several ranks.
#include <cstdio>
#include <filesystem>

#include "core/files/files.h"
#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "A user's own training loop.",
                                {.model = "lenet5", .epochs = 1, .learning_rate = 0.05},
                                {"--data", "--model", "--epochs", "--batch", "--lr", "--schedule", "--seed", "--device",
                                 "--dtype", "--checkpoint"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    auto strategy = strategy_from_environment();  // this machine, or one of several ranks
    // --batch is divided among the ranks; under an asynchronous strategy each rank has its own batches.
    const bool cut = strategy->size() == 1 || strategy->ranks().batch_shares > 1;
    const int own = cut ? 0 : o.batch;
    Loader train(data.train, {.batch = o.batch, .batch_per_rank = own, .dtype = o.dtype, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);

    for (Loader* loader : {&train, &test}) loader->share(strategy->rank(), strategy->size());

    auto model = make_model(o.model, 10, 1, 28);
    // The parameters get their memory: one flat vector.
    FlatParameters flat(model, *backend, o.seed, strategy->memory());
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    sgd.bind(flat);
    strategy->begin(flat, sgd);

    const Schedule schedule = Schedule::parse(o.schedule);
    const double per_epoch = double(train.batches_per_epoch()), all = per_epoch * o.epochs;
    RunPosition at;  // with --checkpoint FOLDER: the saved position
    const std::filesystem::path file = std::filesystem::path(o.checkpoint) / "own_loop.safetensors";
    if (!o.checkpoint.empty()) make_folder("--checkpoint " + o.checkpoint, o.checkpoint);
    if (!o.checkpoint.empty() && exists(file)) at = load_checkpoint(file, {flat, sgd});
    while (at.epoch < o.epochs) {
      MetricSums sums;
      train.start(at.epoch);
      for (Batch batch; train.next(batch);) {
        Variable logits = model(Variable(batch.images));
        Variable loss = cross_entropy(logits, batch.labels);
        flat.zero_gradients();
        flat.backward(loss, batch.weight());  // this rank's share of the mean
        sgd.learning_rate(o.learning_rate * schedule.factor(double(at.step), all, per_epoch));
        // Throws NotFinite when the loss or a gradient is not finite; the weights do not change then
        strategy->step(sgd, loss);
        sums.loss += loss.item() * double(batch.size());
        sums.samples += double(batch.size());
        at.step++;
      }
      strategy->end_epoch({.epochs = ++at.epoch});
      sums = strategy->sum(sums);
      strategy->synchronize(Strategy::Shared::buffers, flat, sgd);
      Evaluation e = evaluate(model, test, strategy.get());
      if (strategy->rank() > 0) continue;
      std::printf("epoch %d: loss %.3f, test accuracy %.2f %%\n", int(at.epoch), sums.loss / sums.samples,
                  100 * e.accuracy);
      if (o.checkpoint.empty()) continue;
      // Under a parameter server this fetches the momentum from the servers
      strategy->synchronize(Strategy::Shared::optimizer, flat, sgd);
      save_checkpoint(file, {flat, sgd}, at);
    }
    strategy->end();
  });
}
