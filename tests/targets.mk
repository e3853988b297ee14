# Targets of make that measure, and that try more than `make test` does; included by the Makefile.

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
$(BUILD)/fuzz_formats: $(OBJ)/tests/fuzz/libfuzzer.o $(OBJ)/tests/fuzz/targets.o $(BUILD)/libtandem.a
	$(call say,link $@)$(call link,-fsanitize=fuzzer)
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

# Checks and measures on the GPU of this machine: everything, or one STAGE (tests/gpu/run.sh).
# One of these names and nothing else: it stands in a shell's line.
gpu_stages := start ops learn train bench peer air memcheck memory
gpu_stage = $(if $(value STAGE),$(or $(if $(filter 1,$(words $(value STAGE))),$(filter $(gpu_stages),$(value STAGE))),$\
              $(error gpu-check: STAGE=$(value STAGE): choose one of $(gpu_stages))))
gpu-check:
	@env -u MAKELEVEL -u MAKEFLAGS CUDA_HOME='$(CUDA_HOME)' bash tests/gpu/run.sh $(gpu_stage)

# What the GPU of another machine can tell: programs for it, built here, for tests/gpu/run.sh there.
gpu-bundle:
	@env -u MAKELEVEL -u MAKEFLAGS sh tests/gpu/bundle.sh gpu-bundle

# Which convolutions cuDNN has plans for on GPUs that are not here, in every type (PLANS='--gpu sm_90 lenet5': some).
cuda-plans: $(plans)
	@$(if $(plans),$< $(PLANS),echo 'make cuda-plans needs g++, the CUDA toolkit and cuDNN 9.8 or later ($(or $(CUDA_EMPTY),$\
	  $(if $(CUDA_MISSING),$(CUDA_MISSING) not found,cuDNN $(CUDNN_VERSION))))' >&2; exit 1)
