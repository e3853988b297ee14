# Tandem. `make` builds the library and the examples, `make test` tests them, `make help` lists the rest.
#
# What is found is used and what is missing is left out; a new source, example or test needs no line here.
# From top to bottom: switches, compiler, what was found, sources, rules, targets.

VERSION := 0.1.0

# ---- Switches: make ONEDNN=0, make test SANITIZE=thread, … -----------------------------------------------------------
# auto uses what is there (the CUDA toolkit only where a GPU is, too), 1 is a promise (the build fails, with the reason,
# when it cannot be kept), 0 leaves it out.
CUDA      ?= auto
UCX       ?= auto
ONEDNN    ?= auto
OPENMP    ?= auto
ZLIB      ?= auto
STB       ?= auto
PROTOBUF  ?= auto
GTEST     ?= auto

MARCH     ?= native#         the CPU to build for; x86-64-v3 runs on any x86 server of the last ten years
PREFIX    ?= /usr/local#     where `make install` puts things (below DESTDIR)
SANITIZE  ?=#                address,undefined or thread; each has a build folder of its own
DEBUG     ?=#                1: no optimisation, debug symbols, in build-debug/
V         ?=#                1: whole command lines
CUDA_HOME ?= /usr/local/cuda
CUDA_ARCH ?= 80 90#          compute capabilities; the last one also as PTX, which later devices can run
WERROR    ?= $(if $(filter true 1,$(CI)),1)# warnings are errors; so they are in CI

# The names in Debian 12 and Ubuntu of what is looked for. The demo installs the first line; the second is for
# ONNX and TensorBoard files, the third for the tests, which install all three, and the last for .ci/run, which lays real
# data, looks for races with clang, and starts ranks by another launcher.
PACKAGES_DEMO  := git make g++ libdnnl-dev zlib1g-dev libstb-dev libucx-dev libssl-dev curl ca-certificates
PACKAGES_FILES := libprotobuf-dev protobuf-compiler
PACKAGES_TESTS := libgtest-dev nlohmann-json3-dev pkg-config procps iproute2 python3
PACKAGES_CI    := clang clang-format libclang-rt-dev libomp-dev llvm libjxl-tools zstd openmpi-bin libopenmpi-dev

# ---- make itself -----------------------------------------------------------------------------------------------------
.DEFAULT_GOAL := all
.SUFFIXES:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# All cores, unless the user gave -jN (which wins) or an outer make hands out the jobs.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  MAKEFLAGS += -j$(shell nproc)
endif
# Goals that compile nothing must work before there is a compiler; with only those, nothing below writes or fails.
compiling := $(filter-out help clean uninstall packages packages-demo demo check-deps gpu-check gpu-bundle,$(or $(MAKECMDGOALS),all))

comma  := ,
space  := $() $()
differ  = $(subst x$1,,x$2)$(subst x$2,,x$1)
# Writes the text $2 to the file $1 only when it differs: what depends on the file is rebuilt only then. make 4.3 sometimes
# keeps the newline at the end of $(file <…).
stamp   = $(if $(call differ,$(strip $(file <$1)),$(strip $2)),$(file >$1,$2))
hash   := \#
define newline


endef
# The words of $1 joined by $2.
join_by = $(subst $(space),$2,$(strip $1))

# ---- Compiler and flags ----------------------------------------------------------------------------------------------
BUILD := build$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))$(if $(filter 1,$(DEBUG)),-debug)
# ThreadSanitizer understands clang's OpenMP library; with gcc's it reports races that are none.
ifeq ($(origin CXX),default)
  CXX := $(if $(filter thread,$(SANITIZE)),clang++,g++)
endif

# Seven words: 1 or __clang__, clang's version, g++'s version.
compiler := $(shell echo __clang__ __clang_major__ __clang_minor__ __clang_patchlevel__ \
  __GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__ | $(CXX) -E -P -x c++ - 2>/dev/null)
clang       := $(filter 1,$(firstword $(compiler)))
CXX_VERSION := $(call join_by,$(if $(clang),$(wordlist 2,4,$(compiler)),$(wordlist 5,7,$(compiler))),.)
CXX_NAME    := $(if $(clang),clang++,g++) $(CXX_VERSION)
CXX_TOO_OLD := $(filter 1 2 3 4 5 6 7 8 9 10 11 $(if $(clang),12 13),$(firstword $(subst ., ,$(CXX_VERSION))))
CXX_PACKAGE := $(or $(filter g++-%,$(CXX)),$(if $(findstring clang,$(CXX)),clang libomp-dev,g++$(if $(compiler),-12)))
ifeq ($(compiler),)
  CXX_MISSING := no C++ compiler: $(CXX) does not run. Try: apt-get install $(CXX_PACKAGE)
else ifneq ($(CXX_TOO_OLD),)
  CXX_MISSING := Tandem is C++20 and needs g++ 12 or clang 14; $(CXX) is $(CXX_NAME). Try: apt-get install g++-12, \
    then make CXX=g++-12
endif

ifdef SANITIZE
  ifneq ($(shell echo 'int main() {}' | $(CXX) -fsanitize=$(SANITIZE) -x c++ - -o /dev/null 2>/dev/null || echo no),)
    CXX_MISSING ?= SANITIZE=$(SANITIZE): $(CXX) cannot build with it. Try: apt-get install $(if \
      $(findstring clang,$(CXX)),clang libclang-rt-dev libomp-dev,g++)
  endif
endif

optimise := $(if $(filter 1,$(DEBUG)),-O0 -g3,$(if $(SANITIZE),-O1 -g1 -fno-omit-frame-pointer,-O3))
optimise += $(if $(SANITIZE),-fsanitize=$(SANITIZE) $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize-recover=all))
# Never -ffast-math: checks for NaN would vanish. The two -fno- flags alone let g++ vectorise most loops.
FLAGS := -std=c++20 $(optimise) -march=$(strip $(MARCH)) -fno-math-errno -fno-trapping-math -Wall -Wextra
FLAGS += $(if $(filter 1,$(WERROR)),-Werror)
# clang warns of every `omp simd` loop that it leaves scalar, g++ 12 of its own AVX-512 headers (its bug 105593).
FLAGS += $(if $(clang),-Wno-pass-failed,-Wno-maybe-uninitialized)

# ---- What is there ---------------------------------------------------------------------------------------------------
# Looked for where the compiler itself looks, and in CUDA_HOME; CPPFLAGS=-I… and LDFLAGS=-L… add folders.
include_path := $(shell LC_ALL=C $(CXX) $(CPPFLAGS) -E -v -x c++ /dev/null 2>&1 | \
                  sed -n '/search starts here/,/^End/s/^ //p') $(CUDA_HOME)/include
library_path := $(patsubst -L%,%,$(filter -L%,$(LDFLAGS))) $(CUDA_HOME)/lib64 \
                $(shell LC_ALL=C $(CXX) -print-search-dirs 2>/dev/null | sed -n 's/^libraries: =//p' | tr : ' ')
# Where the header or library $1 lies, or nothing.
folders = $(if $(filter lib%.so lib%.a,$1),$(library_path),$(include_path))
find    = $(abspath $(firstword $(wildcard $(addsuffix /$1,$(folders)))))
# The numbers that the header $1 defines as the macros $2, joined by dots.
numbers = $(if $1,$(shell sed -nE 's/^ *\# *define +($(call join_by,$2,|)) +"?([0-9.]+).*/\2/p' $1))
version = $(call join_by,$(call numbers,$(call find,$1),$2),.)

ONEDNN_NAME    := oneDNN
ONEDNN_NEEDS   := dnnl.hpp libdnnl.so
ONEDNN_VERSION := $(call version,oneapi/dnnl/dnnl_version.h,DNNL_VERSION_MAJOR DNNL_VERSION_MINOR DNNL_VERSION_PATCH)
ONEDNN_PACKAGE := libdnnl-dev
ONEDNN_WITHOUT := the reference kernels train instead, tens of times slower

OPENMP_NAME    := OpenMP
OPENMP_NEEDS   := omp.h
OPENMP_VERSION := $(shell $(CXX) -fopenmp -dM -E -x c++ /dev/null 2>/dev/null | \
                    sed -n 's/.* _OPENMP //p' | sed 's/201511/4.5/; s/201811/5.0/; s/202011/5.1/; s/202111/5.2/')
OPENMP_PACKAGE := $(if $(clang),libomp-dev,g++)
OPENMP_WITHOUT := nothing is lost: the threads are our own

ZLIB_NAME      := zlib
ZLIB_NEEDS     := zlib.h libz.so
ZLIB_VERSION   := $(call version,zlib.h,ZLIB_VERSION)
ZLIB_PACKAGE   := zlib1g-dev
ZLIB_WITHOUT   := .gz files must be unpacked by hand

STB_NAME       := stb_image
STB_NEEDS      := stb/stb_image.h stb/stb_image_resize.h
STB_VERSION    := $(shell sed -n '1s/.* v\([0-9.]*\).*/\1/p' $(call find,stb/stb_image.h) /dev/null)
STB_PACKAGE    := libstb-dev
STB_WITHOUT    := picture files cannot be read

GTEST_NAME     := GoogleTest
GTEST_NEEDS    := gtest/gtest.h libgtest.a libgtest_main.a nlohmann/json.hpp#  a second opinion on the JSON we read and write
GTEST_VERSION  := $(shell sed -n 's/^Version: //p' $(dir $(call find,libgtest.a))pkgconfig/gtest.pc 2>/dev/null)
GTEST_PACKAGE  := libgtest-dev nlohmann-json3-dev
GTEST_WITHOUT  := make test will not build

PROTOBUF_NAME    := protobuf
PROTOBUF_NEEDS   := protoc google/protobuf/message_lite.h libprotobuf-lite.so
PROTOC           := $(shell command -v protoc)
PROTOBUF_VERSION := $(if $(PROTOC),$(lastword $(shell $(PROTOC) --version 2>/dev/null)))
PROTOBUF_PACKAGE := libprotobuf-dev protobuf-compiler
PROTOBUF_WITHOUT := no ONNX and TensorBoard files

CUDA_NAME      := CUDA
CUDA_NEEDS     := nvcc cuda_runtime.h libcudart.so libcublas.so libcublasLt.so cudnn.h libcudnn.so
NVCC           := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc))
CUDA_VERSION   := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'))
CUDA_PACKAGE   := cuda-toolkit-13-0 libcudnn9-dev-cuda-13 (from NVIDIA's repository)
CUDA_WITHOUT   := CPU only

CUDNN_NAME     := cuDNN
CUDNN_NEEDS    := cudnn.h libcudnn.so
CUDNN_VERSION  := $(call version,cudnn_version.h,CUDNN_MAJOR CUDNN_MINOR CUDNN_PATCHLEVEL)

NCCL_NAME      := NCCL
NCCL_NEEDS     := nccl.h libnccl.so
NCCL_VERSION   := $(call version,nccl.h,NCCL_MAJOR NCCL_MINOR NCCL_PATCH)

UCX_NAME       := UCX
UCX_NEEDS      := ucp/api/ucp.h libucp.so libucs.so openssl/hmac.h libcrypto.so
UCX_VERSION    := $(call version,ucp/api/ucp_version.h,UCP_API_MAJOR UCP_API_MINOR)
UCX_PACKAGE    := libucx-dev libssl-dev
UCX_WITHOUT    := one process

# A room that holds only its stand-in has nothing to switch on, whatever is installed.
cuda_room := $(filter-out cuda/none.cpp,$(wildcard cuda/*.cpp cuda/*.cu))
# Ranks in one process need no network library; these do.
network   := $(wildcard dist/collectives/ucx.cpp dist/server/ucx_channel.cpp dist/job/control.cpp dist/job/handshake.cpp dist/job/job.cpp dist/job/port_guard.cpp dist/job/rendezvous.cpp dist/job/survivor_agreement.cpp dist/job/membership.cpp dist/strategies/registry.cpp)
UCX_EMPTY  := $(if $(network),,dist/ holds no network yet)
CUDA_UNASKED := $(if $(wildcard /dev/nvidia0 /proc/driver/nvidia /dev/dxg),,no GPU on this machine; CUDA=1 builds for another)
CUDA_EMPTY := $(if $(SANITIZE)$(clang),nvcc is used with g++ and without sanitizers)
# core/cpu/ uses vector extensions that only g++ has, so the race detector looks at everything but its kernels.
ONEDNN_EMPTY := $(if $(clang),core/cpu/ needs g++)

# For each name: _FOUND paths, _REASON why it cannot be used; for a switch also _ON (1 or empty) and _STATE in words.
place = $(if $(filter nvcc,$1),$(NVCC),$(if $(filter protoc,$1),$(PROTOC),$(call find,$1)))
define examine
  $1_FOUND   := $(foreach n,$($1_NEEDS),$(call place,$n))
  $1_MISSING := $(foreach n,$($1_NEEDS),$(if $(call place,$n),,$n))
  $1_REASON  := $$(or $($1_EMPTY),$$(if $$($1_MISSING),$$($1_MISSING) not found))
endef
define decide
  $(if $(filter-out auto 0 1,$($1)),$(error $1=$($1): choose auto, 1 or 0))
  $1_OFF     := $(if $(filter 0,$($1)),$1=0,$(or $($1_REASON),$(if $(filter auto,$($1)),$($1_UNASKED))))
  $1_ON      := $$(if $$($1_OFF),,1)
  $1_STATE   := $$(if $$($1_OFF),off: $$($1_OFF),$($1_VERSION))
  $1_WANTS   := $(if $($1_EMPTY),,$(if $($1_MISSING),$($1_PACKAGE)))
endef
switches := ONEDNN OPENMP ZLIB STB PROTOBUF GTEST CUDA UCX
known    := ONEDNN OPENMP ZLIB STB PROTOBUF GTEST CUDA CUDNN NCCL UCX
$(foreach n,$(known),$(eval $(call examine,$n)))
$(foreach n,$(switches),$(eval $(call decide,$n)))

broken := $(strip $(foreach n,$(switches),$(if $(filter 1,$($n)),$(if $($n_REASON),$n=1 ($($n_REASON))))))
remedy := $(strip $(foreach n,$(switches),$(if $(filter 1,$($n)),$($n_WANTS))))

# `make test` first installs what the tests need, where something is not found. The file is read by make, so make writes it,
# and then begins again, with what is there by then.
missing = $(sort $(if $(CXX_MISSING),$(CXX_PACKAGE)) $(foreach n,$(filter-out CUDA,$(switches)),$(if $(filter 0,$($n)),,$($n_WANTS))))
dry_run := $(findstring n,$(filter-out -%,$(firstword $(MAKEFLAGS))))
ifneq ($(and $(filter test,$(MAKECMDGOALS)),$(missing),$(if $(dry_run)$(MAKE_RESTARTS),,1)),)
  compiling :=
  $(shell rm -f $(BUILD)/packages.mk)
  include $(BUILD)/packages.mk
endif
$(BUILD)/packages.mk:
	@mkdir -p $(BUILD)
	@bash examples/packages.sh 'a compiler, the libraries that Tandem uses, and GoogleTest and tools for the tests' \
	  $(PACKAGES_DEMO) $(PACKAGES_FILES) $(PACKAGES_TESTS) || true
	@touch $@

ifneq ($(compiling),)
  $(if $(CXX_MISSING),$(error $(CXX_MISSING)))
  $(if $(broken),$(error Cannot keep $(broken)$(if $(remedy),. Try: apt-get install $(remedy))))
endif

# -fopenmp-simd needs no library: loops marked `omp simd` are still vectorised, on one thread.
FLAGS += $(if $(OPENMP_ON),-fopenmp,-fopenmp-simd)
LIBS  := $(if $(ONEDNN_ON),-ldnnl) $(if $(ZLIB_ON),-lz) $(if $(PROTOBUF_ON),-lprotobuf-lite) \
         $(if $(UCX_ON),-lucp -lucs -lcrypto) -lpthread
cuda_folder := -L$(CUDA_HOME)/lib64 -Wl$(comma)-rpath$(comma)$(CUDA_HOME)/lib64
LIBS  += $(if $(CUDA_ON),$(cuda_folder) -lcudart -lcublas -lcublasLt -lcudnn)

# ---- Sources ---------------------------------------------------------------------------------------------------------
# A part that may be missing is chosen here, by source file, or by its stand-in; there is no #ifdef for it in the code.
either  = $(if $1,$2,$(wildcard $3))
chosen := $(call either,$(ONEDNN_ON),$(filter-out core/cpu/none.cpp,$(wildcard core/cpu/*.cpp)),core/cpu/none.cpp) \
          $(call either,$(ZLIB_ON),$(wildcard datasets/gzip.cpp),datasets/gzip_none.cpp) \
          $(call either,$(STB_ON),$(wildcard datasets/image.cpp),datasets/image_none.cpp) \
          $(call either,$(PROTOBUF_ON),layers/export/onnx.cpp layers/export/tensorboard.cpp,$\
            layers/export/onnx_none.cpp layers/export/tensorboard_none.cpp) \
          $(call either,$(CUDA_ON),$(cuda_room),cuda/none.cpp) \
          $(call either,$(if $(NCCL_REASON),,1),$(wildcard dist/collectives/nccl.cpp),dist/collectives/nccl_none.cpp) \
          $(call either,$(UCX_ON),$(network),dist/job/none.cpp)
pairs  := datasets/gzip.cpp datasets/gzip_none.cpp datasets/image.cpp datasets/image_none.cpp \
          layers/export/onnx.cpp layers/export/onnx_none.cpp layers/export/tensorboard.cpp layers/export/tensorboard_none.cpp \
          dist/collectives/nccl.cpp dist/collectives/nccl_none.cpp
common := $(wildcard $(addsuffix /*.cpp,core core/reference core/files core/trace autograd layers layers/* layers/train/callbacks datasets)) \
          $(filter-out $(network) dist/job/none.cpp dist/job/tandem-run.cpp,$(wildcard dist/*/*.cpp))

sources  := $(sort $(filter-out $(pairs),$(common)) $(chosen))
# cuDNN plans for GPUs that are not here (since 9.8) and so without CUDA, too.
plans := $(if $(or $(CUDA_EMPTY),$(filter-out nvcc,$(CUDA_MISSING)),$(filter $(foreach n,0 1 2 3 4 5 6 7,9.$n.%),$(CUDNN_VERSION))),,$\
           $(BUILD)/cuda_plans)
# Programs that look inside a room which is not there are left out with it.
rooms_off := $(if $(ONEDNN_ON),,core/cpu/) $(if $(CUDA_ON),,cuda/) $(if $(NCCL_REASON),dist/collectives/nccl_functions.h) $(if $(UCX_ON),,$(network:.cpp=.h))
programs_of = $(filter-out $(left_out),$(sort $(wildcard $1)))
left_out := $(if $(strip $(rooms_off)),$(filter-out $(if $(plans),tests/cuda_plans.cpp),$(shell grep -lE '^\#include "($(call join_by,$(rooms_off),|))' \
              examples/*.cpp tests/*.cpp tests/bench/*.cpp 2>/dev/null)))
examples := $(call programs_of,examples/*.cpp examples/course/naive.cpp)
benches  := $(call programs_of,tests/bench/*.cpp)
tests    := $(call programs_of,tests/test_*.cpp tests/support*.cpp tests/dumps.cpp tests/op_table.cpp tests/fuzz/targets.cpp)
gpu_check := $(wildcard tests/gpu/*.cpp) tests/dumps.cpp tests/op_table.cpp# what only a GPU can tell, without GoogleTest
CHECKS   ?= $(sort $(wildcard tests/check_*.sh))

OBJ      := $(BUILD)/obj
protos   := $(if $(PROTOBUF_ON),$(basename $(wildcard layers/export/*.proto)))
objects  := $(addprefix $(OBJ)/,$(addsuffix .o,$(basename $(sources)))) $(OBJ)/build_info.o $(protos:%=$(OBJ)/%.pb.o)
launcher := $(if $(UCX_ON),$(BUILD)/tandem-run)
programs := $(addprefix $(BUILD)/,$(basename $(notdir $(examples)))) $(launcher)
bench_programs := $(benches:tests/bench/%.cpp=$(BUILD)/bench_%)
test_objects   := $(tests:%.cpp=$(OBJ)/%.o)
every_object   := $(sort $(objects) $(test_objects) $(patsubst %.cpp,$(OBJ)/%.o,$(examples) $(benches) $(gpu_check) tests/strangers.cpp $(if $(plans),cuda/plans.cpp tests/cuda_plans.cpp))) \
                  $(if $(launcher),$(OBJ)/dist/job/tandem-run.o)

# ---- What was found, told once per configuration; a program tells it with build_info() -------------------------------
row = $($1_NAME) $($1_STATE)$(if $($1_ON),, ($($1_WITHOUT)))
native := $(if $(filter native,$(MARCH)),$(shell $(CXX) -march=native -Q --help=target 2>/dev/null | \
            sed -n 's/^ *-march= *\t*\([^ ]*\)$$/ (native: \1)/p'))
define summary
Tandem $(VERSION) in $(BUILD)/: $(CXX_NAME) $(strip $(FLAGS) $(CPPFLAGS) $(CXXFLAGS))$(native)
  $(call row,ONEDNN)
  $(call row,OPENMP)
  $(call row,ZLIB)
  $(call row,STB)
  $(call row,PROTOBUF)
  $(call row,GTEST)
  $(call row,CUDA)$(if $(CUDA_ON), for sm_$(call join_by,$(CUDA_ARCH),$(comma) sm_)
  cuDNN $(CUDNN_VERSION)
  NCCL $(if $(NCCL_REASON),off: $(NCCL_REASON),$(NCCL_VERSION)))
  $(call row,UCX)
endef
revision := $(if $(compiling),$(shell git describe --always --dirty 2>/dev/null))
define build_info
// Written by the Makefile.
#include "core/build_info.h"

const char* tandem::build_info() {
  return R"---($(summary)$(if $(revision),
  git $(revision)))---";
}
endef
ifneq ($(filter clean,$(MAKECMDGOALS)),)
  $(if $(dry_run),,$(shell rm -rf build build-*))# here, so that `make clean all` works
endif
ifneq ($(compiling),)
  $(shell mkdir -p $(OBJ))
  $(if $(call differ,$(file <$(BUILD)/summary),$(summary)),$(info $(summary))$(file >$(BUILD)/summary,$(summary)))
  $(call stamp,$(BUILD)/build_info.cpp,$(build_info))
endif

# ---- Rules -----------------------------------------------------------------------------------------------------------
say      = $(if $(filter 1,$(V)),,@echo '  $1';)
# The standard library's headers are parsed once, which spares a quarter of the build. Not with ccache: it would take every file
# for a new one. A source includes what it needs all the same.
std     := algorithm array atomic chrono cmath condition_variable cstdint cstdio cstring filesystem fstream functional map memory \
           mutex optional set span sstream stdexcept string thread utility variant vector
ccache  := $(findstring ccache,$(realpath $(shell command -v $(firstword $(CXX)))))
parsed  := $(if $(ccache),,$(BUILD)/std.h.$(if $(clang),pch,gch))
compile := $(CXX) $(strip $(FLAGS)) $(addprefix -include ,$(basename $(parsed))) -I. $(CPPFLAGS) $(CXXFLAGS)
link     = $(CXX) $(strip $(FLAGS) $(CXXFLAGS) $(LDFLAGS)) $(filter %.o %.a,$^) $1 $(strip $(LIBS) $(LDLIBS)) -o $@
newest  := $(lastword $(CUDA_ARCH))
device  := $(NVCC) -std=c++20 -O3 --expt-relaxed-constexpr -ccbin $(firstword $(CXX)) -I. \
           -Xcompiler=$(call join_by,$(filter-out -std=% -O% -Werror,$(FLAGS)),$(comma)) \
           $(foreach a,$(CUDA_ARCH),-gencode=arch=compute_$a$(comma)code=sm_$a) \
           -gencode=arch=compute_$(newest)$(comma)code=compute_$(newest)
# *.kernel.cpp, the element-wise kernels beside their operation, are device code where there is CUDA, else plain C++.
kernel  := $(if $(CUDA_ON),$(device) -x cu,$(compile))

ifneq ($(compiling),)
  $(call stamp,$(BUILD)/compile.flags,$(CXX_NAME) $(compile))
  $(call stamp,$(BUILD)/std.h,$(call join_by,$(std:%=$(hash)include<%>),$(newline)))
  $(call stamp,$(BUILD)/kernel.flags,$(CXX_NAME) $(CUDA_VERSION) $(kernel))
  $(call stamp,$(BUILD)/link.flags,$(CXX_NAME) $(LDFLAGS) $(LIBS) $(LDLIBS) $(objects))
  $(shell mkdir -p $(sort $(dir $(every_object))))
endif

# What arranges, parses and prints is no faster for -O3 (its kernels excepted, whose rule comes first), only slower to build.
light := $(if $(filter -O3,$(FLAGS)),-O1)
plumbing := $(filter-out %.kernel.cpp datasets/loader.cpp datasets/image.cpp,$(wildcard core/*.cpp datasets/*.cpp))
quick := $(filter-out dist/collectives/algorithms.cpp dist/collectives/node.cpp dist/server/shard_server.cpp dist/server/rules.cpp dist/server/shard_service.cpp dist/server/shard.cpp dist/server/worker.cpp,$(wildcard dist/*/*.cpp))# but for where numbers are added up
$(OBJ)/layers/%.o $(OBJ)/examples/%.o $(OBJ)/tests/%.o $(patsubst %.cpp,$(OBJ)/%.o,$(plumbing) $(quick)): compile += $(light)
# An example with an operation of its own is device code, too.
$(patsubst %.cpp,$(OBJ)/%.o,$(if $(CUDA_ON),$(shell grep -l '"autograd/elementwise.h"' examples/*.cpp))): compile = $(kernel)

$(BUILD)/std.h.gch $(BUILD)/std.h.pch: $(BUILD)/std.h $(BUILD)/compile.flags
	$(call say,$(CXX) $<)$(CXX) $(strip $(FLAGS) $(CPPFLAGS) $(CXXFLAGS)) -x c++-header $< -o $@
$(OBJ)/%.kernel.o: %.kernel.cpp $(BUILD)/kernel.flags | $(parsed)
	$(call say,$(if $(CUDA_ON),nvcc,$(CXX)) $<)$(kernel) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/%.o: %.cu $(BUILD)/kernel.flags
	$(call say,nvcc $<)$(device) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/cuda/%.o $(OBJ)/dist/%.o $(OBJ)/tests/test_cuda%.o: compile += $(if $(CUDA_ON),-I$(CUDA_HOME)/include)
$(OBJ)/dist/collectives/nccl.o $(OBJ)/tests/test_nccl.o $(if $(CUDA_ON),,$(OBJ)/cuda/plans.o) $(OBJ)/tests/cuda_plans.o: compile += -I$(CUDA_HOME)/include
# stb shifts signed numbers as it likes: UBSan would stop at the first picture.
$(OBJ)/datasets/image.o: compile += $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize=undefined)
# Runs before a sanitizer has begun.
$(OBJ)/core/process_start.o: compile = $(CXX) $(strip $(filter-out -fsanitize=%,$(FLAGS))) -I.
$(OBJ)/%.o: %.cpp $(BUILD)/compile.flags | $(parsed)
	$(call say,$(notdir $(firstword $(compile))) $<)$(compile) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/build_info.o: $(BUILD)/build_info.cpp $(BUILD)/compile.flags | $(parsed)
	$(call say,$(CXX) $<)$(compile) -MMD -MP -c $< -o $@

# Messages of other programs: a .proto becomes a header and a source in $(BUILD)/proto/, which are not ours to warn about.
$(BUILD)/proto/%.pb.cc $(BUILD)/proto/%.pb.h: %.proto
	$(call say,protoc $<)mkdir -p $(BUILD)/proto && $(PROTOC) --cpp_out=$(BUILD)/proto $<
$(OBJ)/%.pb.o: $(BUILD)/proto/%.pb.cc $(BUILD)/compile.flags | $(parsed)
	$(call say,$(CXX) $<)$(compile) -w -isystem $(BUILD)/proto -c $< -o $@
$(OBJ)/layers/export/onnx.o: $(BUILD)/proto/layers/export/onnx.pb.h
$(OBJ)/layers/export/tensorboard.o: $(BUILD)/proto/layers/export/event.pb.h
$(OBJ)/layers/export/onnx.o $(OBJ)/layers/export/tensorboard.o: compile += -isystem $(BUILD)/proto

$(BUILD)/libtandem.a: $(objects) $(BUILD)/link.flags
	@rm -f $@
	$(call say,ar $@)ar rcs $@ $(objects)
$(launcher): $(OBJ)/dist/job/tandem-run.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link)
$(filter-out $(launcher) $(BUILD)/naive,$(programs)): $(BUILD)/%: $(OBJ)/examples/%.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link)
$(BUILD)/naive: $(OBJ)/examples/course/naive.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link)
$(bench_programs): $(BUILD)/bench_%: $(OBJ)/tests/bench/%.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link)
$(BUILD)/strangers: $(OBJ)/tests/strangers.o
	$(call say,link $@)$(call link)
$(BUILD)/gpu_check: $(gpu_check:%.cpp=$(OBJ)/%.o) $(BUILD)/libtandem.a
	$(call say,link $@)$(call link)
$(BUILD)/cuda_plans: $(OBJ)/tests/cuda_plans.o $(OBJ)/tests/op_table.o $(OBJ)/tests/dumps.o $(if $(CUDA_ON),,$(OBJ)/cuda/plans.o) $(BUILD)/libtandem.a
	$(call say,link $@)$(call link,$(if $(CUDA_ON),,$(cuda_folder) -lcudnn))
$(BUILD)/tandem_tests: $(test_objects) $(BUILD)/libtandem.a
	$(call say,link $@)$(call link,-lgtest_main -lgtest)

$(BUILD)/fuzz_formats: $(OBJ)/tests/fuzz/libfuzzer.o $(OBJ)/tests/fuzz/targets.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link,-fsanitize=fuzzer)

-include $(every_object:.o=.d)
.SECONDARY: $(every_object) $(protos:%=$(BUILD)/proto/%.pb.cc)

# ---- Targets ---------------------------------------------------------------------------------------------------------
.PHONY: all launcher test needs-gtest fuzz libfuzzer bench bench-memory bench-network bench-shared drill strangers experiments-check gpu-check gpu-bundle cuda-plans demo check-deps packages packages-demo install uninstall clean help

all: $(BUILD)/libtandem.a $(programs)
launcher: $(launcher)# where there is a network library

# The pictures that some tests need lie in $TANDEM_DATA; without them those tests are skipped, by name.
# TESTS='Conv*:Tape*' runs some only; TEST_SHARDS=1 runs them in one process; CHECKS= leaves the scripts out.
test: $(if $(GTEST_ON),$(BUILD)/tandem_tests,needs-gtest) $(BUILD)/libtandem.a $(programs) $(BUILD)/gpu_check $(BUILD)/strangers $(plans)
	$(if $(left_out),@echo 'left out (no $(strip $(rooms_off))): $(left_out)')
	@BUILD=$(BUILD) CXX='$(CXX)' DEPENDENCIES='$(every_object:.o=.d)' $(if $(TESTS),GTEST_FILTER='$(TESTS)') \
	  sh tests/run.sh $(BUILD)/tandem_tests $(CHECKS)
needs-gtest:
	@echo 'make test needs GoogleTest ($(GTEST_STATE)). Try: apt-get install $(GTEST_PACKAGE)' >&2; exit 1

# What reads files and options, on damaged input: SEEDED=100000 mutations of each format, as in `make test`, and libFuzzer
# for TIME seconds on each where clang is there. `make fuzz TIME=0 SANITIZE=address,undefined` is the first part alone.
SEEDED  ?= 2000
TIME    ?= 10
FORMATS ?= idx cifar npy gzip image safetensors options schedule
CLANGXX := $(shell command -v clang++)
fuzz: $(if $(GTEST_ON),$(BUILD)/tandem_tests,needs-gtest)
	TANDEM_FUZZ_INPUTS=$(SEEDED) $(BUILD)/tandem_tests --gtest_filter='*Fuzz*' --gtest_brief=0
	$(if $(filter 0,$(TIME)),,$(if $(CLANGXX),+@$(MAKE) --no-print-directory libfuzzer CXX=$(CLANGXX) \
	  SANITIZE=address$(comma)fuzzer-no-link BUILD=build-fuzz,@echo 'no libFuzzer. Try: apt-get install clang'))
libfuzzer: $(BUILD)/fuzz_formats
	@for format in $(FORMATS); do \
	  mkdir -p $(BUILD)/seeds/$$format $(BUILD)/corpus/$$format; \
	  echo "libFuzzer, $$format, $(TIME) s"; \
	  TANDEM_FUZZ=$$format TANDEM_FUZZ_SEEDS=$(BUILD)/seeds/$$format $< -max_total_time=$(TIME) -timeout=20 \
	    -print_final_stats=1 -verbosity=0 -artifact_prefix=$(BUILD)/$$format- \
	    $(BUILD)/corpus/$$format $(BUILD)/seeds/$$format 2>&1 | grep -E 'stat::number|stat::average|ERROR|SUMMARY|Test unit'; \
	  ! ls $(BUILD)/$$format-* >/dev/null 2>&1 || exit 1; \
	done

# The training step beside every PyTorch of PYTHONS="python3 venv/bin/python" and the floor; `make bench-convolution` and
# `make bench-kernels` look closer.
bench: bench-step
bench-%: $(BUILD)/bench_%
	$< $(BENCH_ARGS)

# Training programs that share the cores: one, two and four at once, beside PyTorch's (BENCH_ARGS='--models mlp').
bench-shared: $(BUILD)/bench_shared
	python3 tests/bench/shared.py --worker $< $(BENCH_ARGS)

# Training within a budget of memory, beside accumulation and PyTorch's checkpoints (BENCH_ARGS="--pythons 'python3 venv/bin/python'").
bench-memory: $(BUILD)/bench_memory
	python3 tests/bench/memory.py --worker $< $(BENCH_ARGS)

# A last layer of many classes, cut over the ranks of a host, beside one whose gradient is all-reduced: BATCH, ms, MB moved, MB a rank.
HYBRID_ARGS ?= 100000 512 32 128 512
bench-hybrid: $(BUILD)/bench_hybrid $(BUILD)/tandem-run
	@for s in all-reduce hybrid hybrid:sample=0.1; do echo "$$s"; $(BUILD)/tandem-run -n 4 --strategy $$s $< $(HYBRID_ARGS) || exit 1; done

# All-reduce beside Open MPI and Gloo, and the training step beside DDP (PARTS="host hosts steps"); several hosts need root.
bench-network: $(BUILD)/bench_network $(BUILD)/bench_server $(BUILD)/bench_distributed $(BUILD)/tandem-run
	@BUILD=$(BUILD) bash tests/bench/network.sh $(PARTS)

# Accidents to training jobs: kills, stops and cut links, drawn from a seed.
DRILLS     ?= 50
DRILL_SEED ?= 1
drill: $(programs)
	@BUILD=$(BUILD) sh tests/drill.sh $(DRILLS) $(DRILL_SEED)
# Connections from somebody who does not belong there, while ranks meet and while they train.
STRANGERS ?= 10000
strangers: $(programs) $(BUILD)/strangers
	@BUILD=$(BUILD) sh tests/strangers.sh $(STRANGERS)

# Rows of the committed results of experiments, drawn anew each time, run again and compared: EXPERIMENT_CHECK=ROWS or ROWS,SEED.
EXPERIMENT_CHECK   ?= 3
EXPERIMENT_SECONDS ?= 300
measured_plans = $(wildcard $(patsubst %.jsonl,%.json,$(wildcard examples/experiments/*.jsonl)))
experiments-check: $(BUILD)/simulate
	@BUILD=$(BUILD) python3 dist/lab/experiment.py --check $(EXPERIMENT_CHECK) --check-seconds $(EXPERIMENT_SECONDS) $(measured_plans)

# Checks and measures on the GPU of this machine: all, or STAGE=ops, train, bench or memory (tests/gpu_check.sh).
# One of these names and nothing else: it stands in a shell's line.
gpu_stage = $(if $(value STAGE),$(or $(if $(filter 1,$(words $(value STAGE))),$(filter ops train bench memory,$(value STAGE))),$\
              $(error gpu-check: STAGE=$(value STAGE): choose ops, train, bench or memory)))
gpu-check:
	@env -u MAKELEVEL -u MAKEFLAGS CUDA_HOME='$(CUDA_HOME)' sh tests/gpu_check.sh $(gpu_stage)

# What the GPU of another machine can tell: programs for it, built here, for tests/gpu/run.sh there.
gpu-bundle:
	@env -u MAKELEVEL -u MAKEFLAGS sh tests/gpu/bundle.sh gpu-bundle

# Which convolutions cuDNN has plans for on GPUs that are not here, in every type (PLANS='--gpu sm_90 lenet5': some).
cuda-plans: $(plans)
	@$(if $(plans),$< $(PLANS),echo 'make cuda-plans needs g++, the CUDA toolkit and cuDNN 9.8 or later ($(or $(CUDA_EMPTY),$\
	  $(if $(CUDA_MISSING),$(CUDA_MISSING) not found,cuDNN $(CUDNN_VERSION))))' >&2; exit 1)

# The script installs what is missing before it builds, so it runs a make of its own, with the switches given here.
demo:
	@env -u MAKELEVEL MAKEFLAGS='$(MAKEOVERRIDES)' bash examples/demo.sh

check-deps:
	@printf '%-14s %-9s %s\n' compiler '$(if $(compiler),$(CXX_VERSION),-)' \
	  '$(or $(CXX_MISSING),$(shell command -v $(firstword $(CXX))))' $(foreach n,$(known),'$($n_NAME)' \
	  '$(or $($n_VERSION),-)' '$(strip $($n_FOUND) $(if $($n_MISSING),$($n_MISSING) not found))$\
	  $(if $($n_EMPTY), (not used: $($n_EMPTY)))')
	@echo '$(if $(missing),Missing: apt-get install $(missing),Nothing is missing.)'

packages:
	@echo $(PACKAGES_DEMO) $(PACKAGES_FILES) $(PACKAGES_TESTS) $(PACKAGES_CI)
packages-demo:
	@echo $(PACKAGES_DEMO)

# Headers keep their folders below include/tandem; tandem.pc says where that is and what to link.
target  = $(DESTDIR)$(strip $(PREFIX))
headers = tandem.h $(wildcard $(addsuffix /*.h,core core/* autograd layers layers/* layers/train/callbacks datasets cuda dist/*))
also    = $(if $(OPENMP_ON),-fopenmp) $(if $(SANITIZE),-fsanitize=$(SANITIZE))
define pkg_config
prefix=$(strip $(PREFIX))
includedir=$${prefix}/include
libdir=$${prefix}/lib

Name: tandem
Description: A compact deep learning framework in C++20
Version: $(VERSION)
Cflags: -I$${includedir}/tandem -I$${includedir} $(strip $(also))
Libs: -L$${libdir} -ltandem $(strip $(also) $(LIBS))
endef
install: $(BUILD)/libtandem.a
	@for h in $(headers); do install -D -m 644 $$h $(target)/include/tandem/$$h || exit 1; done
	@install -D -m 644 $(BUILD)/libtandem.a $(target)/lib/libtandem.a
	$(file >$(BUILD)/tandem.pc,$(pkg_config))@install -D -m 644 $(BUILD)/tandem.pc $(target)/lib/pkgconfig/tandem.pc
	@echo 'Installed in $(target). g++ -std=c++20 program.cpp $$(pkg-config --cflags --libs tandem)'
uninstall:
	rm -rf $(target)/include/tandem
	rm -f $(target)/lib/libtandem.a $(target)/lib/pkgconfig/tandem.pc

clean:
	@echo 'removed build and build-*'

help:
	@echo 'make              the library and the examples, in build/'
	@echo 'make test         builds and runs all tests; the last line counts them (TESTS=Conv* for some)'
	@echo 'make fuzz         damaged files and options on everything that reads them (SEEDED=100000 TIME=30)'
	@echo 'make bench        measures speed (BENCH_ARGS=…)'
	@echo 'make drill        kills, stops and cuts of training jobs, drawn from DRILL_SEED (DRILLS=50)'
	@echo 'make strangers    STRANGERS=10000 connections to a training job from somebody who does not belong there'
	@echo 'make experiments-check    runs EXPERIMENT_CHECK=3 rows of the committed experiments again and compares'
	@echo 'make gpu-check    what only a machine with a GPU can tell (STAGE=ops, train, bench or memory: a part)'
	@echo 'make gpu-bundle   the same for another machine: a folder with programs, libraries and data'
	@echo 'make cuda-plans   which convolutions cuDNN has plans for, on GPUs that are not here'
	@echo 'make demo         from nothing to a trained classifier, in one command'
	@echo 'make check-deps   what was found, where, and the apt-get line for what is missing'
	@echo 'make packages     the Debian packages that all of this can use'
	@echo 'make install      library, headers and tandem.pc below PREFIX ($(strip $(PREFIX))); also uninstall, clean'
	@echo
	@echo 'Switches: $(switches) = auto, 1 (a promise) or 0'
	@echo '          MARCH=native  SANITIZE=address,undefined or thread  DEBUG=1  WERROR=1  CXX=…  V=1'
