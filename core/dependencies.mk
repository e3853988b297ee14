# Which compiler, libraries and headers there are, and what follows when one is missing; included by the Makefile.

# ---- Compiler and flags ----------------------------------------------------------------------------------------------
BUILD := build$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))$(if $(filter 1,$(DEBUG)),-debug)
OBJ   := $(BUILD)/obj
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
GTEST_NEEDS    := gtest/gtest.h libgtest.a libgtest_main.a
GTEST_VERSION  := $(shell sed -n 's/^Version: //p' $(dir $(call find,libgtest.a))pkgconfig/gtest.pc 2>/dev/null)
GTEST_PACKAGE  := libgtest-dev
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
network   := $(wildcard dist/collectives/ucx.cpp dist/server/ucx_channel.cpp dist/job/control.cpp dist/job/handshake.cpp dist/job/job.cpp dist/job/port_guard.cpp dist/job/rendezvous.cpp dist/strategies/registry.cpp)
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
json_missing := $(if $(call find,nlohmann/json.hpp),,nlohmann-json3-dev)# required; the rest is not
missing = $(sort $(if $(CXX_MISSING),$(CXX_PACKAGE)) $(json_missing) $(foreach n,$(filter-out CUDA,$(switches)),$(if $(filter 0,$($n)),,$($n_WANTS))))
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
  $(if $(json_missing),$(error Tandem needs nlohmann/json.hpp. Try: apt-get install $(json_missing)))
  $(if $(broken),$(error Cannot keep $(broken)$(if $(remedy),. Try: apt-get install $(remedy))))
endif

# -fopenmp-simd needs no library: loops marked `omp simd` are still vectorised, on one thread.
FLAGS += $(if $(OPENMP_ON),-fopenmp,-fopenmp-simd)
LIBS  := $(if $(ONEDNN_ON),-ldnnl) $(if $(ZLIB_ON),-lz) $(if $(PROTOBUF_ON),-lprotobuf-lite) \
         $(if $(UCX_ON),-lucp -lucs -lcrypto) -lpthread
cuda_folder := -L$(CUDA_HOME)/lib64 -Wl$(comma)-rpath$(comma)$(CUDA_HOME)/lib64
NCCL_ON := $(if $(NCCL_REASON),,$(CUDA_ON))
LIBS  += $(if $(CUDA_ON),$(cuda_folder) -lcudart -lcublas -lcublasLt -lcudnn) $(if $(NCCL_ON),-lnccl)

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
