// A folder of picture files, one folder per class: DIR/cat/1.jpg, DIR/dog/1.png, …
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Classes are the names of the folders, sorted, and numbered in that order: the folders 0, 2 and 5 are the classes 0, 1
// and 2. Pictures are the picture files below them at any depth, as in PyTorch's ImageFolder, also through links to
// files and folders. Files of other kinds are counted on stderr. Hidden files are ignored. There must be at least two
// classes, and none may be empty. Either DIR has the class folders, and then a tenth of the pictures is held back for
// testing, or DIR/train has them and DIR/test or DIR/val has the same class folders (names that begin so, in any case,
// are the same: Training, test_images, val2017). All pictures are decoded at once, by all cores, into bytes in memory:
// as grey pictures if all are grey, else as RGB. Throws when they would not fit into memory, for a picture that cannot
// be decoded, and for a path without read permission; the message has the path.
Dataset picture_folder(const std::filesystem::path& directory, const FolderOptions& options = {});

}  // namespace tandem
