# test_sanitizers.sh BUILD: the C suites under clang's address and undefined-behaviour sanitizers, those with threads under its
# thread sanitizer, the emulated kernels, mutated models and threads on emulated GPUs under gcc's sanitizers, the fuzzers for some
# seconds, and three programs under valgrind.
. tests/rf_test.sh

# clang 14's sanitizers do not know the address layouts of newer kernels; setarch -R gives the old one, where it is allowed
old_layout=
setarch "$(uname -m)" -R true 2>/dev/null && old_layout="setarch $(uname -m) -R"
flags="-g1 -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
# Sums of pointers that wrap around are looked for by the fuzzers alone. Null pointers and the ends of objects are the address
# sanitizer's. Without these three gcc takes 197 s instead of 236 for the emulated kernels.
sanitize="-fsanitize=address,undefined -fno-sanitize=pointer-overflow,null,object-size"

# quiet COMMAND...: its output, from the first failed check or report on, only if it fails
quiet() {
    if "$@" >"$dir/$name.out" 2>&1; then tail -n 1 "$dir/$name.out"; return; fi
    sed -n '/^    tests\/\|FAIL\|error:\|Sanitizer/,$p' "$dir/$name.out"
    return 1
}
name=${2-}

case_emulated_kernels() {
    need g++ g++
    quiet $old_layout make check-c B="$build/asan_emu" CC=gcc CXX=g++ TESTS="$build/asan_emu/test_hip $build/asan_emu/fuzz_models" \
        CFLAGS="$flags $sanitize"
}
case_address_and_undefined() {
    need clang 'clang libclang-rt-14-dev'
    quiet $old_layout make check-c B="$build/asan" CC=clang SANITIZED= \
        CFLAGS="$flags $sanitize"
}
case_threads() {
    need clang 'clang libclang-rt-14-dev'
    suites=
    for suite in sync lazy stream experts model threads; do suites="$suites $build/tsan/test_$suite"; done
    quiet $old_layout make check-c B="$build/tsan" CC=clang TESTS="$suites" SANITIZED= CFLAGS="$flags -fsanitize=thread"
}
case_threads_of_emulated_gpus() {
    need g++ g++
    quiet $old_layout make check-c B="$build/tsan_emu" CC=gcc CXX=g++ TESTS="$build/tsan_emu/hip_threads" \
        CFLAGS="$flags -fsanitize=thread -DROCMFORGE_TYPES=Q8_0,F16"
}
case_fuzz() {
    need clang 'clang libclang-rt-14-dev'
    quiet $old_layout make fuzz-inputs B="$build" FUZZ_SECONDS=6 FUZZ_JOBS=1
}

memcheck() {
    need valgrind 'valgrind libc6-dbg'
    valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=all "$@"
}
# valgrind 3.19 decodes no AVX-512
case_valgrind_generate() {
    memcheck "$build/rocmforge_cli" generate --gguf examples/shakespeare-5m.gguf --prompt ROMEO: --max-tokens 4 --temp 0 \
        --threads 2 --isa avx2
}
case_valgrind_lazy() { memcheck "$build/lazy" examples/shakespeare-5m.gguf; }
case_valgrind_hello() { memcheck "$build/hello"; }

run_cases "$@"
