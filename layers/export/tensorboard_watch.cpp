// What of a model goes into an event file.
#include "layers/export/tensorboard.h"

namespace tandem {
namespace {

void every_module(Module& m, const std::function<void(Module&)>& f) {
  f(m);
  for (auto& [name, child] : m.children()) every_module(*child, f);
}

}  // namespace

WatchActivations::WatchActivations(Module& model, EventFile& file, std::int64_t step) {
  every_module(model, [&](Module& m) {
    auto look = [&file, step](Module& module, const Variable& y) {
      file.histogram(step, "activations/" + (module.path().empty() ? "output" : module.path()), y.value());
    };
    before_.emplace_back(&m, nullptr);
    before_.back().second =
        m.on_forward([look, also = &before_, at = before_.size() - 1](Module& module, const Variable& y) {
          look(module, y);
          if (const auto& hook = (*also)[at].second) hook(module, y);
        });
  });
}

WatchActivations::~WatchActivations() {
  for (auto& [module, hook] : before_) module->on_forward(std::move(hook));
}

void write_gradients(const FlatParameters& flat, EventFile& file, std::int64_t step) {
  for (const ParameterRange& s : flat.parameter_ranges())
    if (s.leaf->has_grad) {
      const std::string part = s.slice.count == 1 ? ""
                                                  : " (slice " + std::to_string(s.slice.index) + " of " +
                                                        std::to_string(s.slice.count) + ")";
      file.histogram(step, "gradients/" + s.name + part, s.leaf->grad);
    }
}

}  // namespace tandem
