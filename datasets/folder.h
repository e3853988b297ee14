// A folder of picture files, one folder per class: DIR/cat/1.jpg, DIR/dog/1.png, …
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Classes are the names of the folders, sorted, and numbered in that order: 0, 2 and 5 are the classes 0, 1 and 2. Pictures
// are what is below them at any depth (is_picture), as PyTorch's ImageFolder has it; other files are left alone. At least
// two classes, none of them empty.
// DIR has the class folders itself, and then a tenth of the pictures is held back for testing, or DIR/train has them and
// DIR/val or DIR/test the same ones. All is decoded at once, by all cores, into bytes in memory: as grey pictures when
// all are grey, else as RGB. Throws when they would not fit, and for a picture that cannot be decoded, with its path.
Dataset picture_folder(const std::filesystem::path& directory, const FolderOptions& options = {});

}  // namespace tandem
