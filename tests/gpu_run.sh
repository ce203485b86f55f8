#!/bin/sh
# gpu_run.sh [BUILD] [ARGUMENTS OF test_hip]: all that needs a real GPU, in under four minutes. The suites that also run
# under emulation, with the kernels compiled by nvcc or hipcc: every op; whole models, 1,000 runs bit for bit alike, two
# sessions in two threads; small models of many families against their answers. The shipped model: each op against the
# CPU, the CPU's greedy text, and compute-sanitizer (memory, leaks, races) where it is installed. Exit status 77 without
# a GPU.
build=${1:-build}
[ $# -gt 0 ] && shift
mkdir -p "$build" || exit 1
set -e
if command -v nvcc >/dev/null && command -v nvidia-smi >/dev/null; then
    arch=${GPU_ARCH:-sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
    compile="nvcc -O3 -lineinfo -arch=$arch -x cu"
    link="nvcc -arch=$arch"
elif command -v hipcc >/dev/null && [ -e /dev/kfd ]; then
    arch=${GPU_ARCH:-$(rocminfo | sed -n 's/^ *Name: *\(gfx[0-9a-f]*\)$/\1/p' | head -1)}
    compile="hipcc -O3 --offload-arch=$arch"
    link=hipcc
else
    echo "gpu_run: no GPU, or no nvcc or hipcc for it"
    exit 77
fi
model=examples/shakespeare-5m.gguf
cli=$build/rocmforge_cli_gpu
say() { echo "gpu_run: $(($(date +%s) - start)) s: $*"; }
start=$(date +%s)

$compile -c rocmforge_kernels.hip -o "$build/kernels_gpu.o" &
${CXX:-c++} -std=c++11 -O2 -c tests/test_hip.cpp -o "$build/test_hip_gpu.o"
${CC:-cc} -O2 -I. -c tests/hip_model.c -o "$build/hip_model_gpu.o"
${CC:-cc} -O2 -I. -c tests/test_goldens.c -o "$build/hip_goldens_gpu.o"
${CC:-cc} -O2 -I. -c examples/rocmforge_cli.c -o "$build/cli_gpu.o"
wait $!
for program in test_hip hip_model hip_goldens cli; do
    $link "$build/${program}_gpu.o" "$build/kernels_gpu.o" -o "$build/${program}_gpu" -lm -lpthread
done
mv "$build/cli_gpu" "$cli"
say "compiled for $arch"
"$build/test_hip_gpu" "$@"
say "every op"
"$build/hip_model_gpu"
say "whole models, repeats, threads"
"$cli" check $model --device hip:0
for device in cpu hip:0; do
    "$cli" generate --gguf $model --device $device --prompt "ROMEO:" --max-tokens 64 --temp 0 \
        >"$build/greedy_${device%:*}.txt"
done
cmp "$build/greedy_cpu.txt" "$build/greedy_hip.txt"
say "the shipped model: ops and greedy text equal to the CPU's"
"$build/hip_goldens_gpu"
say "answers in float64 for small models of many families"

# sanitizer TOOL PATTERN OPTIONS: a prompt and some tokens, and each op alone, both with a clean summary
sanitizer() {
    tool=$1 pattern=$2
    shift 2
    for run in "generate --max-tokens 4 --temp 0 --prompt ROMEO:ROMEO:ROMEO:ROMEO: --gguf $model --device hip:0" \
        "check $model --device hip:0"; do
        log=$build/$tool.txt
        compute-sanitizer --tool "$tool" "$@" "$cli" $run >"$log" 2>&1 && grep "$pattern" "$log" ||
            { tail -n 40 "$log"; exit 1; }
    done
    say "compute-sanitizer $tool"
}
if command -v compute-sanitizer >/dev/null; then
    sanitizer memcheck 'ERROR SUMMARY: 0 errors' --leak-check full --error-exitcode 1
    sanitizer racecheck 'RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' --racecheck-report all
else
    echo "gpu_run: no compute-sanitizer"
fi
say "all passed"
