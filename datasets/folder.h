// A folder of picture files, one folder per class: DIR/cat/1.jpg, DIR/dog/1.png, …
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Classes are the names of the folders, sorted, and numbered in that order: 0, 2 and 5 are the classes 0, 1 and 2.
// Pictures are what is below them at any depth, as PyTorch's ImageFolder has it, through links to files and folders
// too. Files of other kinds are counted on stderr. Hidden ones are passed over. At least two classes, none of them
// empty. DIR has the class folders itself, and then a tenth of the pictures is held back for testing, or DIR/train has
// them and DIR/test or DIR/val the same ones (training, Testing, validation, train_set and the like are other
// spellings). All is decoded at once, by all cores, into bytes in memory: as grey pictures when all are grey, else as
// RGB. Throws when they would not fit, for a picture that cannot be decoded, and for what may not be read, with its
// path.
Dataset picture_folder(const std::filesystem::path& directory, const FolderOptions& options = {});

}  // namespace tandem
