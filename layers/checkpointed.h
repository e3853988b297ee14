// checkpoint(module): trades time for memory. In training the module keeps only its input; backward runs it once more,
// with the same random draws, and goes through that tape. Gradients and running statistics are those of the module
// alone, bit for bit.
//
//   model.attach("block1", checkpoint(std::make_unique<BasicBlock>(64, 64)));
//
// Parameters are called as without it, so weights and checkpoints of files fit either. Chen et al. 2016.
#pragma once
#include "layers/module.h"

namespace tandem {

class Checkpointed : public Module {
 public:
  explicit Checkpointed(Model module) : module_(&wrap(std::move(module))) {}
  Variable forward(const Variable& x) override;

 private:
  Module* module_;
};

std::unique_ptr<Checkpointed> checkpoint(Model module);

}  // namespace tandem
