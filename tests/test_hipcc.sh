# test_hipcc.sh BUILD: the kernels file with hipcc, without a GPU: `make gpu`, all kinds of linking, and the compiler's statistics
# of the kernels. HIPCC_NEW names a hipcc >= 5.7 if `hipcc` is older (tests/make_hipcc.sh installs one).
. tests/rf_test.sh

command -v hipcc >/dev/null || { skip hipcc "install hipcc with 'apt-get install hipcc' (make deps)"; finish; }
libs="-lm -lpthread"

# linked PROGRAM, not_linked PROGRAM: the program has the kernels or not, and says why it uses no GPU.
linked() {
    "$1" devices >"$1.txt"
    cat "$1.txt"
    grep -q '^hip' "$1.txt" && ! grep -q 'not linked' "$1.txt"
    [ -e /dev/kfd ] || grep -q '^hip .*unusable: no AMD GPU driver: /dev/kfd is missing' "$1.txt"
}
not_linked() { "$1" devices | tee "$1.txt" && grep -q '^hip.*unusable.*not linked' "$1.txt"; }

# -fPIC: the object also goes into the shared library below. hip_check.sh reads the assembly and the warnings. The program is
# built without vector kernels, which take long to compile.
build_gpu() {
    make gpu B="$dir" GPU_ARCH=gfx1030 PROGRAMS=rocmforge_cli CFLAGS="-O1 -DROCMFORGE_NO_SIMD" \
        HIPCC="hipcc -fPIC -Wall -Wextra -Wno-unused-command-line-argument --save-temps=obj"
    cc -O1 -DROCMFORGE_NO_SIMD -I. -DROCMFORGE_HIP -c examples/rocmforge_cli.c -o "$dir/cli_strong.o"
    ar rc "$dir/libkernels.a" "$dir/kernels_gpu.o"
}
case_object() {
    linked "$dir/rocmforge_cli_gpu"
    printf 'CASSIUS:\nWhere is' >"$dir/prompt"
    "$dir/rocmforge_cli_gpu" generate --gguf examples/shakespeare-5m.gguf --prompt-file "$dir/prompt" --raw --max-tokens 30 \
        --temp 0 >"$dir/generated.txt"
    cmp "$dir/generated.txt" tests/expected_generate.txt
}
case_archive() {
    hipcc "$dir/rocmforge_cli.o" "$dir/libkernels.a" -o "$dir/archive_weak" $libs
    not_linked "$dir/archive_weak"
    hipcc "$dir/cli_strong.o" "$dir/libkernels.a" -o "$dir/archive_strong" $libs
    linked "$dir/archive_strong"
}
case_shared() {
    hipcc -shared "$dir/kernels_gpu.o" -o "$dir/libkernels.so"
    cc "$dir/cli_strong.o" -o "$dir/shared" -L"$dir" -lkernels '-Wl,-rpath,$ORIGIN' $libs
    linked "$dir/shared"
}
# All types' kernels without matrix units, in waves of 64 (gfx906) and of 32 (gfx1030); with them half of the types on
# each of two GPUs: MFMA on gfx90a and gfx942, WMMA on gfx1100 and gfx1201. A half has types of each family. `make
# hip-check` compiles all.
half_1=F32,Q8_0,Q4_1,Q5_1,Q5_K,Q2_K,IQ4_NL,IQ4_XS,MXFP4,IQ3_XXS,IQ3_S,IQ2_XXS,IQ1_S,TQ1_0,TQ2_0,Q1_0,Q2_0
half_2=F16,BF16,Q4_0,Q5_0,Q4_K,Q6_K,Q3_K,NVFP4,IQ2_XS,IQ2_S,IQ1_M
case_halves_are_all_types() {
    sed -n '/^#define RF_TYPE_TABLE/,/^$/p' rocmforge.h | grep -oE 'X\([A-Z0-9_]+, [^)]*, 1\)' |
        sed 's/X(\([^,]*\),.*/\1/' | sort >"$dir/types"
    [ "$(wc -l <"$dir/types")" -gt 20 ]
    echo "$half_1,$half_2" | tr , '\n' | sort | diff "$dir/types" -
}
case_kernels_gfx906() { TARGETS=gfx906 sh tests/hip_check.sh; }
case_kernels_gfx90a() { TARGETS=gfx90a TYPES=$half_1 sh tests/hip_check.sh; }
case_kernels_gfx1030() {
    grep 'warning:' "$dir/build_gpu.log" && return 1
    sh tests/hip_check.sh "$dir"/rocmforge_kernels-hip-amdgcn-amd-amdhsa-gfx1030.s
}
# a later family's: newer_gpu TARGET TYPES
newer_gpu() {
    new=${HIPCC_NEW:-hipcc}
    version=$("$new" --version | sed -n 's/^HIP version: \([0-9.]*\).*/\1/p')
    if [ "$(printf '5.7\n%s\n' "$version" | sort -V | head -n 1)" != 5.7 ]; then
        echo "no GPU compiler (hipcc>=5.7; tests/make_hipcc.sh makes one for HIPCC_NEW)"
        exit 77
    fi
    HIPCC=$new TARGETS=$1 TYPES=$2 sh tests/hip_check.sh
}
case_kernels_gfx942() { newer_gpu gfx942 "$half_2"; }
case_kernels_gfx1100() { newer_gpu gfx1100 "$half_1"; }
case_kernels_gfx1201() { newer_gpu gfx1201 "$half_2"; }

run_cases "$@"
