# Tandem. `make` builds the library and the examples, `make test` tests them, `make help` lists the rest.
#
# What is found is used and what is missing is left out; a new source, example or test needs no line here.
# Here: switches, sources, rules, targets. The compiler and what was found: core/dependencies.mk.

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
UNITED    ?=#                1: one compilation for a folder of plain sources; a first build takes less time, a change more
CUDA_HOME ?= /usr/local/cuda
CUDA_ARCH ?= 80 90#          compute capabilities; the last one also as PTX, which later devices can run
WERROR    ?= $(if $(filter true 1,$(CI)),1)# warnings are errors; so they are in CI

# The names in Debian 12 and Ubuntu of what is looked for. The demo installs the first line; the second is for
# ONNX and TensorBoard files, the third for the tests, which install all three, and the last for .ci/run, which lays real
# data, looks for races with clang, and starts ranks by another launcher.
PACKAGES_DEMO  := git make g++ nlohmann-json3-dev libdnnl-dev zlib1g-dev libstb-dev libucx-dev libssl-dev curl ca-certificates
PACKAGES_FILES := libprotobuf-dev protobuf-compiler
PACKAGES_TESTS := libgtest-dev pkg-config procps iproute2 python3
PACKAGES_CI    := python3-matplotlib python3-scipy clang clang-format libclang-rt-dev libomp-dev llvm libjxl-tools zstd openmpi-bin libopenmpi-dev

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

include core/dependencies.mk

# ---- Sources ---------------------------------------------------------------------------------------------------------
# A part that may be missing is chosen here, by source file, or by its stand-in; there is no #ifdef for it in the code.
either  = $(if $1,$2,$(wildcard $3))
chosen := $(call either,$(ONEDNN_ON),$(filter-out core/cpu/none.cpp,$(wildcard core/cpu/*.cpp)),core/cpu/none.cpp) \
          $(call either,$(ZLIB_ON),$(wildcard datasets/gzip.cpp),datasets/gzip_none.cpp) \
          $(call either,$(STB_ON),$(wildcard datasets/image.cpp),datasets/image_none.cpp) \
          $(call either,$(PROTOBUF_ON),layers/export/onnx.cpp layers/export/tensorboard.cpp,layers/export/none.cpp) \
          $(call either,$(CUDA_ON),$(cuda_room),cuda/none.cpp) \
          $(call either,$(NCCL_ON),$(wildcard dist/collectives/nccl.cpp),dist/collectives/nccl_none.cpp) \
          $(call either,$(UCX_ON),$(network),dist/job/none.cpp)
pairs  := datasets/gzip.cpp datasets/gzip_none.cpp datasets/image.cpp datasets/image_none.cpp \
          layers/export/onnx.cpp layers/export/tensorboard.cpp layers/export/none.cpp \
          dist/collectives/nccl.cpp dist/collectives/nccl_none.cpp
common := $(wildcard $(addsuffix /*.cpp,core core/reference core/files core/trace autograd layers layers/* layers/train/callbacks datasets)) \
          $(filter-out $(network) dist/job/none.cpp dist/job/tandem-run.cpp,$(wildcard dist/*/*.cpp))

sources  := $(sort $(filter-out $(pairs),$(common)) $(chosen))
light := $(if $(filter -O3,$(FLAGS)),-O1)# what arranges, parses and prints is no faster for -O3, only slower to build
middle := $(light:-O1=-O2)# nor are element-wise kernels, whose loops are vectorised by `omp simd`
plumbing := $(filter-out %.kernel.cpp datasets/loader.cpp datasets/image.cpp,$(wildcard core/*.cpp datasets/*.cpp))
quick := $(filter-out dist/collectives/algorithms.cpp dist/collectives/node.cpp dist/server/shard_server.cpp dist/server/rules.cpp dist/server/shard_service.cpp dist/server/shard.cpp dist/server/worker.cpp,$(wildcard dist/*/*.cpp))# but for where numbers are added up
united := $(if $(UNITED),$(filter-out $(pairs) %.kernel.cpp core/process_start.cpp,$(filter autograd/% core/files/% layers/% $(plumbing) $(quick),$(sources))))
folders := $(sort $(dir $(united)))
# cuDNN plans for GPUs that are not here (since 9.8) and so without CUDA, too.
plans := $(if $(or $(CUDA_EMPTY),$(filter-out nvcc,$(CUDA_MISSING)),$(filter $(foreach n,0 1 2 3 4 5 6 7,9.$n.%),$(CUDNN_VERSION))),,$\
           $(BUILD)/cuda_plans)
# Programs that look inside a room which is not there are left out with it.
rooms_off := $(if $(ONEDNN_ON),,core/cpu/) $(if $(CUDA_ON),,cuda/) $(if $(NCCL_REASON),tests/fake_nccl.h) $(if $(UCX_ON),,$(network:.cpp=.h))
programs_of = $(filter-out $(left_out),$(sort $(wildcard $1)))
left_out := $(if $(strip $(rooms_off)),$(filter-out $(if $(plans),tests/cuda_plans.cpp),$(shell grep -lE '^\#include "($(call join_by,$(rooms_off),|))' \
              examples/*.cpp tests/*.cpp tests/bench/*.cpp 2>/dev/null)))
examples := $(call programs_of,examples/*.cpp)
benches  := $(call programs_of,tests/bench/*.cpp)
tests    := $(call programs_of,tests/test_*.cpp tests/support*.cpp tests/fake_nccl.cpp tests/dumps.cpp tests/op_table.cpp tests/fuzz/targets.cpp)
gpu_check := $(wildcard tests/gpu/*.cpp) tests/dumps.cpp tests/op_table.cpp# what only a GPU can tell, without GoogleTest
CHECKS   ?= $(sort $(wildcard tests/check_*.sh))

protos   := $(if $(PROTOBUF_ON),$(basename $(wildcard layers/export/*.proto)))
objects  := $(addprefix $(OBJ)/,$(addsuffix .o,$(basename $(filter-out $(united),$(sources)))) $(folders:=united.o)) $(OBJ)/build_info.o $(protos:%=$(OBJ)/%.pb.o)
launcher := $(if $(UCX_ON),$(BUILD)/tandem-run)
programs := $(addprefix $(BUILD)/,$(basename $(notdir $(examples)))) $(launcher)
bench_programs := $(benches:tests/bench/%.cpp=$(BUILD)/bench_%)
test_objects   := $(tests:%.cpp=$(OBJ)/%.o) $(if $(NCCL_ON)$(filter-out $(tests),tests/fake_nccl.cpp),,$(OBJ)/dist/collectives/nccl.o)# tested without a GPU, too
every_object   := $(sort $(objects) $(test_objects) $(patsubst %.cpp,$(OBJ)/%.o,$(examples) $(benches) $(gpu_check) tests/strangers.cpp $(if $(plans),cuda/plans.cpp tests/cuda_plans.cpp))) \
                  $(if $(launcher),$(OBJ)/dist/job/tandem-run.o)

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
  $(shell mkdir -p $(sort $(dir $(every_object))) $(OBJ)/examples/course)
  $(foreach f,$(folders),$(call stamp,$(OBJ)/$funited.cpp,$(call join_by,$(foreach s,$(united),$(if $(filter $f,$(dir $s)),$(hash)include<$s>)),$(newline))))
endif

$(OBJ)/layers/%.o $(OBJ)/examples/%.o $(OBJ)/tests/%.o $(patsubst %.cpp,$(OBJ)/%.o,$(plumbing) $(quick)) \
$(addprefix $(OBJ)/,$(addsuffix united.o,$(filter-out autograd/ core/files/ layers/%,$(folders)))): compile += $(light)
$(OBJ)/autograd/%.o $(OBJ)/core/files/%.o $(OBJ)/datasets/image.o: compile += $(middle)
$(OBJ)/autograd/%.kernel.o: kernel := $(kernel:-O3=-O2)
# An example with an operation of its own is device code, too.
$(patsubst %.cpp,$(OBJ)/%.o,$(if $(CUDA_ON),$(shell grep -l '"autograd/elementwise.h"' examples/*.cpp))): compile = $(kernel)

$(BUILD)/std.h.gch $(BUILD)/std.h.pch: $(BUILD)/std.h $(BUILD)/compile.flags
	$(call say,$(CXX) $<)$(CXX) $(strip $(FLAGS) $(CPPFLAGS) $(CXXFLAGS)) -x c++-header $< -o $@
$(OBJ)/%.kernel.o: %.kernel.cpp $(BUILD)/kernel.flags | $(parsed)
	$(call say,$(if $(CUDA_ON),nvcc,$(CXX)) $<)$(kernel) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/%.o: %.cu $(BUILD)/kernel.flags
	$(call say,nvcc $<)$(device) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/cuda/%.o $(OBJ)/dist/%.o $(OBJ)/tests/test_cuda%.o: compile += $(if $(CUDA_ON),-I$(CUDA_HOME)/include)
$(OBJ)/dist/collectives/nccl.o $(OBJ)/tests/fake_nccl.o $(OBJ)/tests/test_nccl.o $(if $(CUDA_ON),,$(OBJ)/cuda/plans.o) $(OBJ)/tests/cuda_plans.o: compile += -I$(CUDA_HOME)/include
# stb shifts signed numbers as it likes: UBSan would stop at the first picture.
$(OBJ)/datasets/image.o: compile += $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize=undefined)
# Runs before a sanitizer has begun.
$(OBJ)/core/process_start.o: compile = $(CXX) $(strip $(filter-out -fsanitize=%,$(FLAGS))) -I.
$(OBJ)/%.o: %.cpp $(BUILD)/compile.flags | $(parsed)
	$(call say,$(notdir $(firstword $(compile))) $<)$(compile) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
vpath %united.cpp $(OBJ)
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
$(filter-out $(launcher),$(programs)): $(BUILD)/%: $(OBJ)/examples/%.o $(BUILD)/libtandem.a
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

-include $(every_object:.o=.d)
.SECONDARY: $(every_object) $(protos:%=$(BUILD)/proto/%.pb.cc)

# ---- Targets ---------------------------------------------------------------------------------------------------------
.PHONY: all launcher test course course-programs needs-gtest fuzz libfuzzer bench bench-memory bench-network bench-shared drill strangers experiments-check gpu-check gpu-bundle cuda-plans demo check-deps packages packages-demo install uninstall clean help

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

include tests/targets.mk examples/course/targets.mk

# The script installs what is missing before it builds, so it runs a make of its own, with the switches given here.
demo:
	@env -u MAKELEVEL MAKEFLAGS='$(MAKEOVERRIDES)' bash examples/demo.sh

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
	@echo 'make gpu-check    what only a machine with a GPU can tell (STAGE=ops, train, bench, memory, …: a part)'
	@echo 'make gpu-bundle   the same for another machine: a folder with programs, libraries and data'
	@echo 'make cuda-plans   which convolutions cuDNN has plans for, on GPUs that are not here'
	@echo 'make course       checks the exercises of examples/course (N=3: one; SOLUTIONS=1: with the solutions)'
	@echo 'make demo         from nothing to a trained classifier, in one command'
	@echo 'make check-deps   what was found, where, and the apt-get line for what is missing'
	@echo 'make packages     the Debian packages that all of this can use'
	@echo 'make install      library, headers and tandem.pc below PREFIX ($(strip $(PREFIX))); also uninstall, clean'
	@echo
	@echo 'Switches: $(switches) = auto, 1 (a promise) or 0'
	@echo '          MARCH=native  SANITIZE=address,undefined or thread  DEBUG=1  WERROR=1  UNITED=1  CXX=…  V=1'
