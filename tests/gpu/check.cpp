// What only a GPU can tell, for `make gpu-check` (tests/gpu/run.sh). Prints one table (table.h).
//   ops    every row of the op table, convolutions, products, optimizers and batches against the host; all of it twice;
//          what several ranks stand on
//   touch  the same work once, compared with nothing: for compute-sanitizer
//   train  the same seed on the host and on the GPU: steps 1–20, and 200 steps smoothed beside the host's own spread
//   bench  milliseconds of a training step (one replay), and the shares of the card's ceilings of product and copy
//   memory the losses of training within budgets of memory beside those without; pictures a second at multiples of what
//   fits
// --device cpu tries the program itself, with small sizes, where there is no GPU.
#include <map>

#include "layers/train/options.h"
#include "tests/gpu/table.h"

using namespace tandem;

int main(int argc, char** argv) {
  int held = 0;
  const int status = run_program(argc, argv, [&] {
    RunConfig o{.device = "cuda"};
    std::string jsonl;
    double seconds = 1e9;
    std::vector<std::string> words;
    OptionRows own;
    own.text("--device", o.device, "cuda, cuda:1, or cpu to try the program itself");
    own.text("--jsonl", jsonl, "file for the table as JSON lines");
    own.number("--seconds", seconds, 0, 1e9, "after which nothing new is begun");
    parse_command_line(argc, argv, "What only a GPU can tell: ops, touch, train, bench or memory.", own.all, &words);
    using Stage = void (*)(const gpu::Machine&, gpu::Table&);
    const std::map<std::string, Stage> stages{{"ops", gpu::check_operations},
                                              {"touch", gpu::touch_operations},
                                              {"train", gpu::check_training},
                                              {"bench", gpu::measure_speed},
                                              {"memory", gpu::check_memory}};
    const auto stage = stages.find(words.size() == 1 ? words[0] : "");
    if (stage == stages.end()) refuse("name one stage: ops, touch, train, bench or memory");
    const bool small = o.device == "cpu" || o.device == "reference";
    const gpu::Machine machine{[&] { return make_backend(o); },
                               [&] { return small ? reference_backend(2) : cpu_backend(0); }, small};
    gpu::Table table(jsonl, seconds);
    if (stage->first != "touch") table.note(machine.device()->description());
    stage->second(machine, table);
    held = table.status();
  });
  return status ? status : held;
}
