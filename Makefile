# rocmforge: `make`, `make run`, `make test` need cc and make, nothing else. `make help` lists the targets.
CC     = cc
# -O2: the supported build; -lm: rope and sampling; -pthread: the threads of the CPU device
CFLAGS = -O2
LIBS   = -lm -pthread
B      = build

EXAMPLES = $(patsubst examples/%.c,$(B)/%,$(wildcard examples/*.c))
TESTS    = $(patsubst tests/%.c,$(B)/%,$(wildcard tests/test_*.c))
SCRIPTS  = $(wildcard tests/test_*.sh)
HEADERS  = rocmforge.h $(wildcard tests/*.h)

all: $(EXAMPLES)    ## build all examples into build/

run: $(B)/rocmforge_cli    ## write some Shakespeare with the model in examples/
	./$(B)/rocmforge_cli generate --gguf examples/shakespeare-5m.gguf --prompt "ROMEO:" --max-tokens 160 --temp 0.8 --seed 7

test: $(EXAMPLES) $(TESTS)    ## run all tests; a suite whose tool is missing is counted as skipped
	sh tests/run.sh $(B) $(TESTS) $(SCRIPTS)

# the C suites alone, for other compilers and sanitizers:
#   make check-c B=build/asan CC=clang CFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
check-c: $(TESTS)    ## run the C suites alone (see the Makefile for sanitizer builds)
	sh tests/run.sh $(B) $(TESTS)

deps:    ## install what the optional suites need (Debian packages; run as root)
	apt-get install -y gcc g++ clang libclang-rt-14-dev valgrind libc6-dbg spin python3 python3-numpy musl-tools \
	  gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user universal-ctags

clean:    ## remove build/
	rm -rf $(B)

help:    ## this list
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' Makefile | expand -t 18

$(B)/%: examples/%.c rocmforge.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)

$(B)/%: tests/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)

.PHONY: all run test check-c deps clean help
