# rocmforge: `make`, `make run`, `make test` need cc and make, nothing else. `make help` lists the targets.
CC     = cc
CXX    = c++
HIPCC  = hipcc
NVCC   = nvcc
# -O2: the supported build; -lm: rope and sampling; -pthread: the threads of the CPU device
CFLAGS = -O2
LIBS   = -lm -pthread
B      = build

# the server needs two libraries; `make server` says so where they are missing
HAVE_SERVER = $(shell printf '\043include <jansson.h>\n\043include <microhttpd.h>\n' | $(CC) -fsyntax-only -x c - 2>/dev/null && echo yes)
EXAMPLES = $(patsubst examples/%.c,$(B)/%,$(filter-out $(if $(HAVE_SERVER),,examples/rocmforge_server.c),$(wildcard examples/*.c)))
TESTS    = $(patsubst tests/%.c,$(B)/%,$(wildcard tests/test_*.c))
SCRIPTS  = $(wildcard tests/test_*.sh)
HEADERS  = rocmforge.h $(wildcard tests/*.h)
PROGRAMS = $(filter-out rocmforge_server,$(notdir $(EXAMPLES)))
# the emulated kernels need any C++11 compiler
HAVE_CXX = $(shell command -v $(CXX))
EMULATED = $(if $(HAVE_CXX),$(B)/test_hip $(B)/hip_model $(B)/hip_goldens $(B)/hip_recurrent $(B)/hip_mtp $(B)/hip_ahead $(B)/hip_group $(B)/hip_ranks $(B)/rocmforge_cli_emu $(B)/ranks_emu)
EMULATED_TESTS = $(filter-out %_emu,$(EMULATED))
# test_sanitizers.sh runs all of test_hip, its slow part too
SLOW_PARTS = $(B)/hip_goldens $(B)/hip_recurrent $(B)/hip_ahead $(B)/hip_group +$(B)/hip_ranks
IN_PARTS = $(B)/test_hip $(SLOW_PARTS)

# as many jobs as there are cores, unless -j says otherwise
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN)
endif
# with `make -n`, make would run commands that begin with +
JOBS = $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)

all: $(EXAMPLES)    ## build all examples into build/

run: $(B)/rocmforge_cli    ## write some Shakespeare with the model in examples/
	printf 'JULIET:\n' | ./$(B)/rocmforge_cli generate --gguf examples/shakespeare-5m.gguf --prompt-file - --echo \
	  --max-tokens 89 --temp 0 --repeat-penalty 1.2

server: $(B)/rocmforge_server    ## build the HTTP server (apt-get install libmicrohttpd-dev libjansson-dev)

run-server: $(B)/rocmforge_server    ## serve the model in examples/ at http://127.0.0.1:8080
	./$(B)/rocmforge_server examples/shakespeare-5m.gguf

# Nearly everything that a change can break shows in `make test`. `make test-all` runs the rest: the many combinations, and what
# needs other compilers, emulators and checkers. @quick and @slow are parts of a suite. The longest first.
SLOW  = tests/test_sanitizers.sh tests/test_hipcc.sh tests/test_isa.sh tests/test_emu.sh \
        tests/test_family_goldens.sh tests/test_once_cell.sh $(B)/test_fuzz $(B)/test_limits $(B)/hip_model
PARTS = tests/test_readme.sh tests/test_compile.sh tests/test_server.sh $(B)/test_corpus $(B)/test_draft
BUILT = $(EMULATED) $(EXAMPLES) $(TESTS)
test: $(filter-out $(SLOW),$(BUILT))    ## run the tests (3 to 4 minutes on two cores); suites that lack a tool are skipped
	$(JOBS)sh tests/run.sh $(B) $(if $(HAVE_CXX),$(IN_PARTS:=@quick) $(B)/hip_mtp) \
	  $(PARTS:=@quick) $(filter-out $(SLOW) $(PARTS),$(SCRIPTS) $(TESTS))

test-all: programs    ## run the tests that `make test` leaves out (make deps installs their tools)
	$(JOBS)sh tests/run.sh $(B) $(filter-out $(if $(HAVE_CXX),,$(B)/hip_%),$(SLOW)) \
	  $(if $(HAVE_CXX),$(SLOW_PARTS:=@slow)) $(PARTS:=@slow)

programs: $(BUILT)    ## build all that the tests run

test-emu: $(EMULATED)    ## all suites of the GPU kernels, emulated on the CPU
	$(JOBS)sh tests/run.sh $(B) $(EMULATED_TESTS) tests/test_emu.sh

test-emu-full: $(EMULATED)    ## every combination of types, shapes and options, emulated: hours
	./$(B)/test_hip --full

test-gpu:    ## run the kernels' tests on this machine's GPU (nvcc or hipcc)
	sh tests/gpu_run.sh $(B)

hip-check:    ## compile the kernels for all AMD GPUs that hipcc knows: no spills of vector registers
	sh tests/hip_check.sh

# the C suites alone, for other compilers and sanitizers:
#   make check-c B=build/asan CC=clang CFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
check-c: $(TESTS)    ## run the C suites alone (see the Makefile for sanitizer builds)
	$(JOBS)sh tests/run.sh $(B) $(TESTS)

FUZZ_SECONDS = 60
FUZZ_JOBS    = 2
FUZZ_TARGETS = gguf files tokenizer template answer grammar cli
fuzz: fuzz-inputs fuzz-models    ## both of these; FUZZ_SECONDS=60 each

fuzz-inputs: $(B)/fuzz $(B)/test_fuzz    ## fuzz bytes, each target (clang); FUZZ_JOBS=2; corpora are kept in build/fuzz.d
	@mkdir -p $(B)/fuzz.d && ./$(B)/test_fuzz seeds $(B)/fuzz.d
	printf '%s\n' $(FUZZ_TARGETS) | xargs -P $(FUZZ_JOBS) -I T sh -c './$(B)/fuzz T -dict=tests/fuzz.dict -timeout=5 \
	  -rss_limit_mb=2048 -max_len=16384 -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -verbosity=0 \
	  -artifact_prefix=$(B)/fuzz.d/T- $(B)/fuzz.d/T >$(B)/fuzz.d/T.log 2>&1 || { tail -n 40 $(B)/fuzz.d/T.log; exit 1; }'
	@for t in $(FUZZ_TARGETS); do echo "$$t: $$(sed -n 's/^stat::number_of_executed_units: *//p' $(B)/fuzz.d/$$t.log) inputs"; done

fuzz-server: $(B)/fuzz_server    ## fuzz the JSON bodies of the HTTP server (clang)
	@mkdir -p $(B)/fuzz.d/server
	./$(B)/fuzz_server -timeout=5 -rss_limit_mb=2048 -max_len=8192 -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$(B)/fuzz.d/server- \
	  $(B)/fuzz.d/server

leak-server: $(B)/rocmforge_server    ## 10,000 requests of all kinds to the HTTP server, which and whose library are under sanitizers
	LEAK_REQUESTS=10000 sh tests/test_server.sh $(B) case_leaks

# gcc: clang takes minutes for the kernels
fuzz-models:    ## fuzz whole models, on the CPU and emulated GPUs (sanitizers); FUZZ_SEED=1
	@mkdir -p $(B)/fuzz.d
	$(MAKE) $(B)/asan_emu/fuzz_models B=$(B)/asan_emu CC=gcc CXX=g++ \
	  CFLAGS="-g1 -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=address,undefined"
	./$(B)/asan_emu/fuzz_models $(FUZZ_SECONDS) $(or $(FUZZ_SEED),1) $(B)/fuzz.d

$(B)/fuzz: tests/test_fuzz.c examples/rocmforge_cli.c $(HEADERS)
	@mkdir -p $(@D)
	clang -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=fuzzer,address,undefined -DRF_LIBFUZZER \
	  -DROCMFORGE_NO_SIMD -I. $< -o $@ $(LIBS)

$(B)/fuzz_server: tests/server/fuzz_bodies.c examples/rocmforge_server.c $(HEADERS)
	@mkdir -p $(@D)
	clang -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=fuzzer,address,undefined -DRF_LIBFUZZER \
	  -DROCMFORGE_NO_SIMD -I. $< -o $@ -lmicrohttpd -ljansson $(LIBS)

gpu:    ## build the programs for AMD GPUs as build/*_gpu; GPU_ARCH=gfx1100
	@mkdir -p $(B)
	$(HIPCC) -O3 --offload-arch=$(or $(GPU_ARCH),gfx1100) -c rocmforge_kernels.hip -o $(B)/kernels_gpu.o
	$(call link_gpu,$(HIPCC))

# both names: nvcc 13 compiles twice for -arch=sm_90a alone; -O1: of host code, kernels are always optimized
NVARCH = $(or $(GPU_ARCH),sm_90a)
gpu-nvidia:    ## build the programs for NVIDIA GPUs as build/*_gpu; GPU_ARCH=sm_90a
	@mkdir -p $(B)
	$(NVCC) -O1 -arch=$(NVARCH:sm_%=compute_%) -code=$(NVARCH) -x cu -c rocmforge_kernels.hip -o $(B)/kernels_gpu.o
	$(call link_gpu,$(NVCC))

define link_gpu
for p in $(PROGRAMS); do $(CC) $(CFLAGS) -I. -c examples/$$p.c -o $(B)/$$p.o && \
  $(1) $(B)/$$p.o $(B)/kernels_gpu.o -o $(B)/$${p}_gpu -lm -lpthread || exit 1; done
endef

# npm comes with other makers' packages of Node.js, which conflict with Debian's
deps:    ## install what the optional suites need (Debian packages; run as root)
	apt-get install -y gcc g++ clang libclang-rt-14-dev valgrind libc6-dbg spin python3 python3-numpy musl-tools gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user universal-ctags hipcc debootstrap cmake libedit-dev python3-sentencepiece \
	  libmicrohttpd-dev libjansson-dev curl chromium chromium-driver nginx-light python3-jsonschema $$(command -v npm >/dev/null || echo nodejs npm)

clean:    ## remove build/
	rm -rf $(B)

help:    ## this list
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' Makefile | expand -t 18

# Sanitizers make vector kernels compile for minutes: they are left out there, unless SANITIZED= keeps them (with clang it is two
# minutes, and tests of models then take a fraction of the time).
SANITIZED := $(if $(findstring sanitize,$(CFLAGS)),-DROCMFORGE_NO_SIMD)

# The implementation is compiled once, into an archive. tests/internals.awk makes its static functions visible: suites
# include $(B)/inside/rocmforge.h, which declares them. That is compiled once, too: most suites would take longer to
# read it than for all their own. Programs with their own implementation link nothing from the archive.
$(B)/rocmforge.a: rocmforge.h tests/internals.awk
	@mkdir -p $(B)/inside
	awk -f tests/internals.awk $< >$(B)/inside/rocmforge.h
	awk -v bodies=1 -f tests/internals.awk $< >$(B)/inside/rocmforge.c
	$(CC) $(CFLAGS) $(SANITIZED) -DROCMFORGE_IMPLEMENTATION -c $(B)/inside/rocmforge.c -o $(B)/rocmforge.o
	rm -f $@ && ar rc $@ $(B)/rocmforge.o
$(B)/inside/rocmforge.h.gch: $(B)/rocmforge.a
	$(CC) $(CFLAGS) -Og $(SEEN) -x c-header $(B)/inside/rocmforge.h -o $@

# line editing in a chat, where libedit is installed
$(B)/rocmforge_cli: LIBS += $(shell echo 'int main(void) { return readline("") != 0; }' | $(CC) $(CFLAGS) -x c \
  -include stdio.h -include editline/readline.h - -o /dev/null -ledit 2>/dev/null && echo -DHAVE_EDITLINE -ledit)

$(B)/rocmforge_server: LIBS += -lmicrohttpd -ljansson
$(B)/rocmforge_server: examples/server_page.html

# built by hand the examples contain the implementation; here they link the archive
$(B)/%: examples/%.c rocmforge.h $(B)/rocmforge.a
	$(CC) $(CFLAGS) -DROCMFORGE_IMPLEMENTATION_DONE -I. $< $(B)/rocmforge.a -o $@ $(LIBS)

# Suites with an implementation of their own: those that set macros, and test_kernels where the archive has no vector
# kernels. Those that define _GNU_SOURCE read the declarations again.
SEEN   = -DROCMFORGE_IMPLEMENTATION= -pthread $(SANITIZED)
INSIDE = $(SEEN) -include $(B)/inside/rocmforge.h
$(B)/test_corpus $(B)/test_gguf: INSIDE = -I$(B)/inside $(SANITIZED)
$(B)/test_fuzz $(B)/test_limits: INSIDE = -O0 -DROCMFORGE_NO_SIMD
$(B)/test_kernels: INSIDE = $(if $(SANITIZED),-DROCMFORGE_STATIC,-I$(B)/inside)

# -Og compiles most quickly; few suites spend their time in code of their own, for which -O1 pays
SUITE_O = -Og
$(B)/test_kernels $(B)/test_model: SUITE_O = -O1
$(B)/%: tests/%.c $(HEADERS) $(B)/rocmforge.a $(B)/inside/rocmforge.h.gch
	$(CC) $(CFLAGS) $(SUITE_O) $(INSIDE) -I. $< $(B)/rocmforge.a -o $@ $(LIBS)

$(B)/test_fuzz: examples/rocmforge_cli.c

# -O1: compiles in two thirds of the time of -O2 and runs nearly as fast; with sanitizers it takes twice as long as -Og
EMULATED_O = $(if $(SANITIZED),-Og,-O1)
$(B)/kernels_emu.o: rocmforge_kernels.hip rocmforge.h tests/hip_emu.h tests/rccl_emu.h
	@mkdir -p $(@D)
	$(CXX) -std=c++11 $(CFLAGS) $(EMULATED_O) -x c++ -DROCMFORGE_HIP_EMU -DROCMFORGE_RCCL -include tests/hip_emu.h -include tests/rccl_emu.h -c $< -o $@

$(B)/test_hip: tests/test_hip.cpp $(B)/kernels_emu.o
	$(CXX) -std=c++11 $(CFLAGS) $(EMULATED_O) -DRF_TEST_EMU $^ -o $@ $(LIBS)

# programs with the emulated kernels; all but hip_mtp and hip_ahead see the library from outside
OUTSIDE = -DROCMFORGE_IMPLEMENTATION_DONE
$(B)/hip_model: tests/hip_model.c
$(B)/hip_goldens: tests/test_goldens.c
$(B)/hip_recurrent: tests/test_recurrent.c
$(B)/hip_mtp: tests/test_mtp.c
$(B)/hip_ahead: tests/hip_ahead.c
$(B)/hip_mtp $(B)/hip_ahead: OUTSIDE = $(INSIDE)
$(B)/hip_mtp $(B)/hip_ahead: $(B)/inside/rocmforge.h.gch
$(B)/hip_group: tests/test_group.c
$(B)/hip_ranks: tests/hip_ranks.c
$(B)/hip_threads: tests/test_threads.c
$(B)/rocmforge_cli_emu: examples/rocmforge_cli.c
$(B)/ranks_emu: examples/ranks.c
$(B)/fuzz_models: tests/fuzz_models.c examples/rocmforge_cli.c $(HEADERS)
$(B)/hip_model $(B)/hip_goldens $(B)/hip_recurrent $(B)/hip_mtp $(B)/hip_ahead $(B)/hip_group $(B)/hip_ranks $(B)/hip_threads $(B)/rocmforge_cli_emu $(B)/ranks_emu $(B)/fuzz_models: $(B)/kernels_emu.o $(B)/rocmforge.a
	$(CC) $(CFLAGS) $(SUITE_O) -DRF_TEST_EMU $(OUTSIDE) -I. -c $(firstword $(filter %.c,$^)) -o $@.o
	$(CXX) $(CFLAGS) $@.o $(filter %.o %.a,$^) -o $@ $(LIBS)

.PHONY: all run server run-server fuzz fuzz-server leak-server fuzz-inputs fuzz-models programs test test-emu test-emu-full test-gpu hip-check check-c gpu gpu-nvidia deps clean help
