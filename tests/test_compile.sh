# test_compile.sh BUILD: rocmforge.h compiles with the compilers, language modes, macros and kinds of linking that it promises, and
# its object files hold nothing that they must not. -fsyntax-only wherever no code is needed.
. tests/rf_test.sh

command -v gcc >/dev/null || { skip compile "install gcc with 'apt-get install gcc' (make deps)"; finish; }
strict="-Wall -Wextra -Wpedantic -Wconversion -Werror"
model=examples/shakespeare-5m.gguf
libs="-lm -pthread"
small="-O0 -DROCMFORGE_NO_SIMD" # the vector kernels take long to compile
quick=gcc # where any compiler will do: at -O0 clang takes a third of gcc's time
command -v clang >/dev/null && quick=clang

# The program of the header's first comment, with and without the implementation: with the prompt of expected_generate.txt, and
# 32 tokens, as at -O0 they take seconds;
# a translation unit that is only the implementation; one that only includes the header.
sources() {
    sed -n '/A complete program/,/^ \* Recipes/s/^ \*     //p' rocmforge.h |
        sed 's/"ROMEO:\\n"/"CASSIUS:\\nWhere is"/; s/\.max_tokens = 64/.max_tokens = 32/' >"$dir/hello.c.new"
    sed '/define ROCMFORGE_IMPLEMENTATION/d' "$dir/hello.c.new" >"$dir/hello_decl.c.new"
    printf '#define ROCMFORGE_IMPLEMENTATION\n#include "rocmforge.h"\n' >"$dir/impl.c.new"
    printf '#include "rocmforge.h"\nint n_layers(const rf_model *m);\nint n_layers(const rf_model *m) {
    return (int)rf_model_get_info(m).n_layers; }\n' >"$dir/decl.c.new"
    for f in hello hello_decl impl decl; do mv "$dir/$f.c.new" "$dir/$f.c"; done
}
[ -n "${2-}" ] && [ -f "$dir/decl.c" ] || sources

# syntax COMMAND... <SOURCE: the C program on stdin compiles without warnings.
syntax() { "$@" -I. -fsyntax-only -x c -; }

# first_errors N TEXT COMMAND... <SOURCE: compiling fails, the first error says TEXT, and there are N errors (N = any: or more).
first_errors() {
    want=$1 text=$2
    shift 2
    if "$@" -I. -fsyntax-only - >"$dir/$name.err" 2>&1; then echo "compiled, but must not"; return 1; fi
    cat "$dir/$name.err"
    count=$(grep -c 'error:' "$dir/$name.err")
    grep -m 1 'error:' "$dir/$name.err" | grep -q -- "$text" && { [ "$want" = any ] || [ "$count" -eq "$want" ]; } ||
        { echo "want $want errors, the first with: $text; there are $count"; return 1; }
}
name=${2-}

slow="case_gnu11_after_stdio build_static case_run_static case_c11_after_declarations_is_refused
    case_c11_with_gnu_source case_default_mode_after_libc case_c17 case_included_twice build_gcc_o2 build_clang_o2
    build_arm64 build_musl build_o3 build_undefined build_allocator build_shared build_types_used build_types_other
    case_run_allocator case_run_shared case_run_types case_gcc_o2 case_clang_o2 case_objects_o2 case_run_o3
    case_run_undefined case_run_musl case_run_arm64"

# ---- whole compilations: gcc and clang see more warnings when they generate code; without clang two of these are the same ----

build_quick() { $quick $small -std=c11 $strict -I. -c "$dir/impl.c" -o "$dir/quick.o"; }
build_gcc_o2() { gcc -O2 -std=c11 $strict -I. -c "$dir/impl.c" -o "$dir/gcc_o2.o"; }
build_clang_o2() { need clang clang; clang -O2 -std=c11 $strict -I. -c "$dir/impl.c" -o "$dir/clang_o2.o"; }
build_arm64() {
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    aarch64-linux-gnu-gcc -O2 $strict -I. -static examples/rocmforge_cli.c -o "$dir/cli_arm64" $libs
}
build_musl() {
    need musl-gcc musl-tools
    syntax musl-gcc -std=c11 $strict <"$dir/hello.c"
    musl-gcc $small -std=c11 $strict -I. -static "$dir/hello.c" -o "$dir/hello_musl" $libs
}
build_o3() { gcc -O3 -DNDEBUG -DROCMFORGE_NO_SIMD $strict -I. "$dir/hello.c" -o "$dir/hello_o3" $libs; }
build_undefined() {
    $quick $small -fsanitize=undefined -fno-sanitize-recover=all -I. "$dir/hello.c" -o "$dir/hello_undefined" $libs
}
# all allocations go through the macros: the object must not refer to malloc
build_allocator() {
    cat >"$dir/allocator.c" <<'EOF'
#include <stddef.h>
void *my_malloc(size_t n);
void my_free(void *p);
#define ROCMFORGE_MALLOC(n) my_malloc(n)
#define ROCMFORGE_FREE(p) my_free(p)
#define ROCMFORGE_IMPLEMENTATION
#include "rocmforge.h"
EOF
    cat >"$dir/my_malloc.c" <<'EOF'
#include <stdio.h>
#include <stdlib.h>
void *my_malloc(size_t n);
void my_free(void *p);
static long blocks, calls;
static void report(void) { if (blocks || !calls) fprintf(stderr, "%ld of %ld blocks are left\n", blocks, calls), _Exit(3); }
void *my_malloc(size_t n) {
    if (!calls++) atexit(report);
    blocks++;
    return malloc(n);
}
void my_free(void *p) { blocks -= p != NULL; free(p); }
EOF
    $quick $small $strict -I. -c "$dir/allocator.c" -o "$dir/allocator.o"
    gcc -I. "$dir/hello_decl.c" "$dir/my_malloc.c" "$dir/allocator.o" -o "$dir/hello_allocator" $libs
}
build_static() {
    need clang clang
    printf '#define ROCMFORGE_STATIC\n#include "hello.c"\n' >"$dir/static_1.c"
    printf '#define ROCMFORGE_STATIC\n#include "impl.c"\nconst char *other(void);\nconst char *other(void) { return rf_version(); }\n' \
        >"$dir/static_2.c"
    gcc $small $strict -I. -c "$dir/static_1.c" -o "$dir/static_1.o"
    clang $small $strict -I. -c "$dir/static_2.c" -o "$dir/static_2.o"
    gcc "$dir/static_1.o" "$dir/static_2.o" -o "$dir/hello_static" $libs
}
build_shared() {
    $quick $small -fPIC -shared -fvisibility=hidden -DROCMFORGE_API='extern __attribute__((visibility("default")))' $strict -I. \
        "$dir/impl.c" -o "$dir/librocmforge.so" $libs
    gcc -I. -DROCMFORGE_API=extern "$dir/hello_decl.c" -o "$dir/hello_shared" -L"$dir" -lrocmforge '-Wl,-rpath,$ORIGIN'
}
# kernels of the model's types, and of types of which it has too few
build_types_used() { $quick $small $strict -I. -DROCMFORGE_TYPES=Q4_K,Q6_K "$dir/hello.c" -o "$dir/hello_types_used" $libs; }
build_types_other() { $quick $small $strict -I. -DROCMFORGE_TYPES=Q6_K,F16 "$dir/hello.c" -o "$dir/hello_types_other" $libs; }
build_hip() { $quick $small -DROCMFORGE_HIP=1 $strict -I. -c "$dir/impl.c" -o "$dir/hip.o"; }

# ---- language modes ----

case_gnu11_after_stdio() {
    for cc in gcc clang; do
        need $cc $cc # warnings: gcc's here, clang's in case_default_mode_after_libc
        { echo '#include <stdio.h>'; cat "$dir/impl.c"; } | syntax $cc -std=gnu11 $([ $cc = gcc ] && echo $strict || echo -Werror)
    done
}
case_default_mode_after_libc() {
    for cc in gcc clang; do
        need $cc $cc
        { for h in assert ctype errno fcntl inttypes limits locale math pthread sched signal stdatomic stdbool stdio stdlib string \
            sys/mman sys/stat time unistd; do echo "#include <$h.h>"; done; cat "$dir/impl.c"; } | syntax $cc $strict
    done
}
case_c11_with_gnu_source() {
    for cc in gcc clang; do
        need $cc $cc
        { echo '#include <stdio.h>'; cat "$dir/impl.c"; } | syntax $cc -std=c11 -D_GNU_SOURCE $strict
    done
}
case_c11_after_stdio_is_refused() {
    for cc in gcc clang; do
        need $cc $cc
        { echo '#include <stdio.h>'; cat "$dir/impl.c"; } |
            first_errors 1 'under -std=c11 include it before every other header' $cc -std=c11 -x c
    done
}
# a project's own header included rocmforge.h, and so libc, first
case_c11_after_declarations_is_refused() {
    for cc in gcc clang; do
        need $cc $cc
        { cat "$dir/decl.c"; cat "$dir/impl.c"; } |
            first_errors 1 'under -std=c11 include it before every other header' $cc -std=c11 -x c
        { cat "$dir/decl.c"; cat "$dir/impl.c"; } | syntax $cc -std=c11 -D_GNU_SOURCE $strict
        { cat "$dir/impl.c"; cat "$dir/impl.c"; } | syntax $cc -std=c11 -Wall -Wextra -Werror
    done
}
case_fast_math_is_refused() {
    for cc in gcc clang; do
        need $cc $cc
        for flag in -ffast-math -Ofast -ffinite-math-only; do
            first_errors 1 'compile it without -ffast-math' $cc $flag -x c <"$dir/impl.c"
            syntax $cc $flag $strict <"$dir/decl.c"
        done
    done
}
case_c17() { syntax gcc -std=c17 $strict <"$dir/impl.c"; }
case_declarations_c11() {
    for cc in gcc clang; do
        need $cc $cc
        syntax $cc -std=c11 $strict <"$dir/decl.c"
        { echo '#include <stdio.h>'; cat "$dir/decl.c"; } | syntax $cc -std=c11 $strict
    done
}
case_declarations_cxx() {
    for std in c++11 c++17; do
        for cxx in g++ clang++; do
            need $cxx "$(echo $cxx | sed 's/clang++/clang/')"
            sed 's/int n_layers(const rf_model \*m);//' "$dir/decl.c" |
                $cxx -std=$std -Wall -Wextra -Wpedantic -Werror -I. -fsyntax-only -x c++ -
        done
    done
}
case_implementation_in_cxx_is_refused() {
    for cxx in g++ clang++; do
        need $cxx "$(echo $cxx | sed 's/clang++/clang/')"
        first_errors 1 'define ROCMFORGE_IMPLEMENTATION in a C file' $cxx -x c++ <"$dir/impl.c"
    done
}
case_c99_is_refused() { first_errors any 'needs C11 with atomics' gcc -std=gnu99 -x c <"$dir/impl.c"; }
case_other_systems_are_refused() {
    first_errors any 'supports Linux on x86-64 and arm64' gcc -U__linux__ -x c <"$dir/impl.c"
    first_errors any 'supports little-endian machines' gcc -U__BYTE_ORDER__ -x c <"$dir/impl.c"
}
case_half_an_allocator_is_refused() {
    first_errors any 'define both ROCMFORGE_MALLOC(size) and ROCMFORGE_FREE(ptr)' gcc '-DROCMFORGE_MALLOC(n)=malloc(n)' -x c <"$dir/impl.c"
    first_errors any 'define both ROCMFORGE_MALLOC(size) and ROCMFORGE_FREE(ptr)' gcc '-DROCMFORGE_FREE(p)=free(p)' -x c <"$dir/impl.c"
}
case_included_twice() {
    cat "$dir/impl.c" "$dir/impl.c" "$dir/decl.c" | syntax gcc $strict
    cat "$dir/decl.c" "$dir/impl.c" "$dir/impl.c" | syntax gcc $strict
}

# ---- the programs built above, run ----

# same_text NAME: hello_NAME writes expected_generate.txt (tests/make_expected.py) and goes on from there
same_text() {
    "$dir/hello_$1" $model >"$dir/$1.txt"
    cat "$dir/$1.txt"
    head -c "$(wc -c <tests/expected_generate.txt)" "$dir/$1.txt" | cmp - tests/expected_generate.txt
}
# declarations in one file, the implementation in another, by another compiler
linked() {
    gcc -O2 $strict -I. "$dir/hello_decl.c" "$dir/$1.o" -o "$dir/hello_$1" $libs
    same_text "$1"
}
case_two_files() { linked quick; }
case_gcc_o2() { linked gcc_o2; }
case_clang_o2() { need clang clang; linked clang_o2; }
case_run_o3() { same_text o3; }
case_run_undefined() { same_text undefined; }
case_run_allocator() {
    nm -u "$dir/allocator.o" | grep -wE 'malloc|calloc|realloc|free|aligned_alloc|posix_memalign|strdup' && return 1
    same_text allocator
}
case_run_static() {
    nm -g --defined-only "$dir/static_1.o" "$dir/static_2.o" | grep ' rf_' && return 1
    same_text static
}
case_run_shared() {
    nm -D --defined-only "$dir/librocmforge.so" | grep -v ' T rf_' && return 1
    same_text shared
}
# ROCMFORGE_TYPES: a model of these types gives the same text, one of others is refused by tensor and type
case_run_types() {
    same_text types_used
    if "$dir/hello_types_other" $model >"$dir/types_other.txt" 2>&1; then return 1; fi
    cat "$dir/types_other.txt"
    grep -q 'cpu: [a-z0-9_.]*weight is of type q4_K, which is not among ROCMFORGE_TYPES' "$dir/types_other.txt"
}
case_wrong_types_are_refused() {
    first_errors any 'RF_TYPE_Q4K' gcc -DROCMFORGE_TYPES=Q4K -x c <"$dir/impl.c"
    first_errors any 'want types that run' gcc -DROCMFORGE_TYPES=Q8_K -x c <"$dir/impl.c"
}
case_run_musl() { need musl-gcc musl-tools; same_text musl; }
case_run_arm64() {
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    need qemu-aarch64 qemu-user
    for isa in scalar neon i8mm; do
        printf 'JULIET:\n' | qemu-aarch64 -cpu max "$dir/cli_arm64" generate --gguf $model --prompt-file - --echo --max-tokens 89 \
            --temp 0 --repeat-penalty 1.2 --isa $isa >"$dir/arm64.txt"
        cat "$dir/arm64.txt"
        cmp "$dir/arm64.txt" tests/expected_run.txt
    done
}

# ---- object files ----

# those that this part has built
objects() { for o in quick gcc_o2 clang_o2; do ls "$dir/$o.o" 2>/dev/null || true; done; }
# what the implementation defines is what the declarations promise, no more and no less
case_exported_symbols() {
    sed -n '/>>base$/q; s/^ROCMFORGE_API[^(]*\b\(rf_[a-z0-9_]*\)(.*/\1/p' rocmforge.h | sort >"$dir/declared"
    [ "$(wc -l <"$dir/declared")" -gt 40 ]
    for o in $(objects); do nm -g --defined-only "$o" | awk '{ print $3 }' | sort | diff "$dir/declared" -; done
}
case_hip_reference_is_weak() {
    for o in $(objects); do nm "$o" | grep -q ' w rocmforge_hip_api$'; done
    nm "$dir/hip.o" | grep -q ' U rocmforge_hip_api$'
}
# A library does not end the process, print, read the environment, touch signals or locale, start programs, or use libc
# functions with hidden state; sprintf and the like have no bounds.
case_imported_symbols() {
    deny='abort|exit|_exit|_Exit|quick_exit|atexit|__assert_fail|raise|kill|longjmp|setjmp|_setjmp'
    deny="$deny|printf|vprintf|fprintf|vfprintf|dprintf|puts|putchar|fputs|fputc|putc|fwrite|perror|stdin|stdout|stderr|syslog"
    deny="$deny|sprintf|vsprintf|strcpy|strcat|stpcpy|gets|fgets|scanf|sscanf|atoi|atol|atof|alloca"
    deny="$deny|getenv|secure_getenv|setenv|putenv|unsetenv|environ|chdir|umask"
    deny="$deny|signal|sigaction|sigprocmask|pthread_sigmask|pthread_kill|pthread_cancel|pthread_exit|alarm|setlocale|uselocale"
    deny="$deny|system|popen|fork|vfork|execve|execvp|posix_spawn|dlopen|dlsym|socket"
    deny="$deny|rand|srand|random|srandom|drand48|strtok|strerror|localtime|gmtime|ctime|asctime|readdir|tmpnam|mktemp"
    for o in $(objects); do
        nm -u "$o" | awk '{ sub(/^_*/, "", $2); sub(/_chk$/, "", $2); print $2 }' | grep -xE "$deny" && return 1
    done
    return 0
}
# Tables of pointers live in .data.rel.ro: written by the loader, read-only afterwards.
case_no_writable_data() {
    for o in $(objects); do
        nm -f sysv "$o" | awk -F'|' '$NF ~ /^(\.data|\.bss|\.tdata|\.tbss|\*COM\*)/ && $NF !~ /^\.data\.rel\.ro/' | grep . && return 1
    done
    return 0
}

case_objects_o2() { case_exported_symbols && case_imported_symbols && case_no_writable_data; }

# ---- the kernels file is missing, or of another version ----

hip_sources() {
    cat >"$dir/hip_main_$1.c" <<'EOF'
#include "rocmforge.h"
#include <stdio.h>
int main(void) {
    rf_device_info info[8];
    rf_device *d = NULL;
    rf_error err;
    uint32_t n = 0;
    if (rf_device_list(info, 8, &n, &err) != RF_OK || n < 2 || n > 8) return 1;
    printf("list %s usable %u: %s\n", info[0].name, (unsigned)info[0].usable, info[0].note);
    rf_result r = rf_device_open("hip:0", NULL, &d, &err);
    printf("open %s: %s\n", rf_result_name(r), err.text);
    if (d || rf_device_open("auto", NULL, &d, &err) != RF_OK || rf_device_get_info(d).is_gpu) return 1;
    printf("auto %s: %s\n", rf_device_get_info(d).name, rf_device_get_info(d).note);
    return rf_device_close(d, &err) != RF_OK;
}
EOF
    cat >"$dir/hip_stale_$1.cc" <<'EOF'
#include "rocmforge.h"
extern "C" const rf_device_api *rocmforge_hip_api(void) {
    static rf_device_api api;
    api.size_bytes = sizeof api;
    api.version = RF_DEVICE_API_VERSION + 1;
    api.op_bytes = sizeof(rf_op);
    api.step_bytes = sizeof(rf_step);
    api.name = "hip";
    return &api;
}
EOF
    gcc $strict -I. -c "$dir/hip_main_$1.c" -o "$dir/hip_main_$1.o"
    g++ -Wall -Wextra -Werror -fPIC -I. -c "$dir/hip_stale_$1.cc" -o "$dir/hip_stale_$1.o"
}
# hip_says PROGRAM CODE TEXT: listing and opening a GPU fail with this, and "auto" falls back to the CPU saying so
hip_says() {
    "$1" >"$1.txt"
    cat "$1.txt"
    grep -q "^list hip:0 usable 0: hip: .*$3" "$1.txt"
    grep -q "^open $2: hip: .*$3" "$1.txt"
    grep -q "^auto cpu: no GPU: hip: .*$3" "$1.txt"
}
case_hip_not_linked() {
    hip_sources none
    gcc "$dir/hip_main_none.o" "$dir/quick.o" -o "$dir/hip_none" $libs
    hip_says "$dir/hip_none" RF_ERR_NOT_FOUND 'not linked'
    gcc "$dir/hip_main_none.o" "$dir/hip.o" -o "$dir/hip_strong" $libs 2>&1 | grep -q 'undefined reference to .rocmforge_hip_api'
}
case_hip_stale_object() {
    hip_sources object
    gcc "$dir/hip_main_object.o" "$dir/quick.o" "$dir/hip_stale_object.o" -o "$dir/hip_object" $libs
    hip_says "$dir/hip_object" RF_ERR_DEVICE 'rebuild'
    gcc -no-pie "$dir/hip_main_object.o" "$dir/quick.o" "$dir/hip_stale_object.o" -o "$dir/hip_no_pie" $libs
    hip_says "$dir/hip_no_pie" RF_ERR_DEVICE 'rebuild'
}
# a weak reference does not pull a member of an archive, ROCMFORGE_HIP makes it strong
case_hip_stale_archive() {
    hip_sources archive
    rm -f "$dir/libstale.a"
    ar rc "$dir/libstale.a" "$dir/hip_stale_archive.o"
    gcc "$dir/hip_main_archive.o" "$dir/quick.o" "$dir/libstale.a" -o "$dir/hip_archive_weak" $libs
    hip_says "$dir/hip_archive_weak" RF_ERR_NOT_FOUND 'not linked'
    gcc "$dir/hip_main_archive.o" "$dir/hip.o" "$dir/libstale.a" -o "$dir/hip_archive" $libs
    hip_says "$dir/hip_archive" RF_ERR_DEVICE 'rebuild'
}
# nor does it keep a shared library that is linked with --as-needed
case_hip_stale_shared() {
    hip_sources shared
    gcc -shared "$dir/hip_stale_shared.o" -o "$dir/libstale.so"
    set -- -L"$dir" -lstale '-Wl,-rpath,$ORIGIN' $libs
    gcc "$dir/hip_main_shared.o" "$dir/quick.o" -o "$dir/hip_shared_unneeded" -Wl,--as-needed "$@"
    hip_says "$dir/hip_shared_unneeded" RF_ERR_NOT_FOUND 'not linked'
    gcc "$dir/hip_main_shared.o" "$dir/quick.o" -o "$dir/hip_shared_weak" -Wl,--no-as-needed "$@"
    hip_says "$dir/hip_shared_weak" RF_ERR_DEVICE 'rebuild'
    gcc "$dir/hip_main_shared.o" "$dir/hip.o" -o "$dir/hip_shared" -Wl,--as-needed "$@"
    hip_says "$dir/hip_shared" RF_ERR_DEVICE 'rebuild'
}

run_cases "$@"
