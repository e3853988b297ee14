// The readers of files: MNIST, CIFAR, NumPy's arrays, and folders of pictures.
#pragma once
#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// ---- MNIST and Fashion-MNIST ----------------------------------------------------------------------------------------
// MNIST (LeCun, Cortes, Burges 1998), handwritten digits, and Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), clothes: each
// 60 000 + 10 000 pictures, 28 × 28, grey, ten classes, in the same four files of the IDX format.

// Reads the four official files in `folder`, compressed or gunzipped (a plain file is preferred to its .gz).
Dataset mnist(const std::filesystem::path& folder);
Dataset fashion_mnist(const std::filesystem::path& folder);

// Reads an IDX file of bytes with `rank` axes as a u8 tensor in host memory.
Tensor read_idx(ByteSource& file, int rank);
// Pictures of one channel and their labels 0 … classes − 1 from two IDX files, .gz or plain. `remedy` is how to get the
// files (bytes.h). The caller sets mean and standard deviation.
Pictures idx_pictures(std::string name, const std::filesystem::path& images, const std::filesystem::path& labels,
                      int classes, const std::string& remedy);

// ---- CIFAR ----------------------------------------------------------------------------------------------------------
// CIFAR-10 and CIFAR-100 (Krizhevsky 2009), each 50 000 + 10 000 photographs, 32 × 32, RGB; the binary versions.

// Reads data_batch_1.bin … data_batch_5.bin and test_batch.bin in `folder`. The files contain no count, so each must
// have the official 10 000 records: otherwise a file truncated between two records would be accepted. For smaller sets
// pass the number of records.
Dataset cifar10(const std::filesystem::path& folder, std::int64_t pictures_per_file = 10000);

// Reads train.bin and test.bin. A picture has two labels: one of 100 fine classes, and the one of 20 coarse classes
// ("small_mammals") that the fine class belongs to.
enum class CifarLabels { fine, coarse };
Dataset cifar100(const std::filesystem::path& folder, CifarLabels labels = CifarLabels::fine,
                 std::int64_t training = 50000, std::int64_t testing = 10000);

// A record has labels, each below its bound ({10}, or {20, 100}), then 3072 bytes of pixels. Only the label at index
// `used` is returned.
struct CifarLayout {
  std::vector<int> bounds;
  std::size_t used = 0;
};
// Reads `count` records into u8 [count, 32, 32, 3] and i32 [count]; the file must end after them.
void read_cifar(ByteSource& file, const CifarLayout& layout, std::int64_t count, std::uint8_t* pixels,
                std::int32_t* labels);

// ---- NumPy's arrays -------------------------------------------------------------------------------------------------
// NumPy's .npy files: one array each.

// Reads an array into host memory, row-major. u8 and f32 are kept; integers of other widths (NumPy makes i64 labels)
// become i32. Throws for an integer that does not fit, Fortran order, big-endian numbers, other types, more than six
// axes, and a file longer or shorter than its header states. Supports versions 1 to 3 of the format.
Tensor read_npy(ByteSource& file);

// Reads pictures u8, or f32 within 0 … 1 (stored as bytes), of the shape [N, H, W] or [N, H, W, C], H = W, and labels
// [N] in the same folder: NAME.npy and NAME_labels.npy, or x_NAME.npy and y_NAME.npy. Test pictures are read from the
// files with "test" instead of "train" in their names; without such files, a tenth is held back. Training labels with a
// gap are refused, and so are test labels above the largest of them: otherwise labels that start at 1, or are of a
// subset, would give classes without pictures.
Dataset npy_dataset(const std::filesystem::path& images);

// The two arrays as pictures; the number of classes is the largest label + 1.
Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels);

// ---- folders of pictures --------------------------------------------------------------------------------------------
// A folder of picture files, one folder per class: DIR/cat/1.jpg, DIR/dog/1.png, …

// Classes are the names of the folders, sorted, and numbered in that order: the folders 0, 2 and 5 are the classes 0, 1
// and 2. Pictures are the picture files below them at any depth, as in PyTorch's ImageFolder, also through links to
// files and folders. Files of other kinds are counted on stderr. Hidden files are ignored. There must be at least two
// classes, and none may be empty. Either DIR has the class folders, and then a tenth of the pictures is held back for
// testing, or DIR/train has them and DIR/test or DIR/val has the same class folders (names with these beginnings, in
// upper or lower case, also count: Training, test_images, val2017). All pictures are decoded at once, by all cores,
// into bytes in memory: as grey pictures if all are grey, else as RGB. Throws when they would not fit into memory, for
// a picture that cannot be decoded, and for a path without read permission; the message has the path.
Dataset picture_folder(const std::filesystem::path& directory, const FolderOptions& options = {});

}  // namespace tandem
