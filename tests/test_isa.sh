# test_isa.sh BUILD: kernels for instruction sets that this machine may lack. The arm64 kernels run under qemu, compiled by gcc
# and by clang; the AVX-VNNI kernels run in their AVX-512 encoding if the machine has AVX-512 VNNI.
. tests/rf_test.sh

libs="-lm -pthread"
emulated="-O2 -DEMULATED -DROCMFORGE_STATIC -static -I."

build_vnni() { gcc -O2 -DEMULATED -DROCMFORGE_STATIC -DRFI_VNNI_EVEX -I. tests/test_kernels.c -o "$dir/kernels_vnni" $libs; }
build_arm64_gcc() {
    need aarch64-linux-gnu-gcc 'gcc-aarch64-linux-gnu libc6-dev-arm64-cross'
    aarch64-linux-gnu-gcc $emulated tests/test_kernels.c -o "$dir/kernels_gcc" $libs
}
build_arm64_clang() {
    need clang clang
    need aarch64-linux-gnu-gcc 'gcc-aarch64-linux-gnu libc6-dev-arm64-cross'
    clang --target=aarch64-linux-gnu $emulated tests/test_kernels.c -o "$dir/kernels_clang" $libs
}
# clang checks that a function's target has all of its instructions; at -O0 it looks at all branches
build_arm64_clang_o0() {
    need clang clang
    need aarch64-linux-gnu-gcc 'gcc-aarch64-linux-gnu libc6-dev-arm64-cross'
    clang --target=aarch64-linux-gnu -O0 -DROCMFORGE_STATIC -I. -c tests/test_kernels.c -o "$dir/kernels_o0.o"
}

# emulate CPU PROGRAM SETS [TEST]: the tests pass on this CPU, where the program finds exactly these instruction sets
emulate() {
    need qemu-aarch64 qemu-user
    need aarch64-linux-gnu-gcc 'gcc-aarch64-linux-gnu libc6-dev-arm64-cross'
    cpu=$1 program=$2 want=$3 only=${4-}
    qemu-aarch64 -cpu "$cpu" "$dir/$program" $only >"$dir/$program.$cpu.txt"
    cat "$dir/$program.$cpu.txt"
    [ "$(sed -n 's/^  instruction set: \([a-z0-9]*\) .*/\1/p' "$dir/$program.$cpu.txt" | tr '\n' ' ')" = "$want" ]
}

case_vnni() { "$dir/kernels_vnni"; }
case_arm64_gcc() { emulate max kernels_gcc "scalar neon i8mm "; }
case_arm64_clang() {
    need clang clang
    emulate max kernels_clang "scalar neon i8mm "
}
# a Neoverse N1 has dot products but no i8mm, a Cortex A53 has neither
case_arm64_without_i8mm() { emulate neoverse-n1 kernels_gcc "scalar neon " test_find; }
case_arm64_without_dot_products() { emulate cortex-a53 kernels_gcc "scalar " test_find; }

run_cases "$@"
