#!/bin/sh
# gpu_run.sh [BUILD] [ARGUMENTS OF test_hip]: build the op suite for the GPU of this machine and run it: the same
# tests as under emulation, with the kernels compiled by nvcc or hipcc. Then the shipped model: its greedy text must
# be the CPU's. Needs a GPU; exit 77 without one.
build=${1:-build}
[ $# -gt 0 ] && shift
mkdir -p "$build" || exit 1
set -e
if command -v nvcc >/dev/null && command -v nvidia-smi >/dev/null; then
    arch=${GPU_ARCH:-sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
    nvcc -O3 -arch="$arch" -x cu -c rocmforge_kernels.hip -o "$build/kernels_gpu.o"
    link="nvcc -arch=$arch"
    threads=
elif command -v hipcc >/dev/null && [ -e /dev/kfd ]; then
    arch=${GPU_ARCH:-$(rocminfo | sed -n 's/^ *Name: *\(gfx[0-9a-f]*\)$/\1/p' | head -1)}
    hipcc -O3 --offload-arch="$arch" -c rocmforge_kernels.hip -o "$build/kernels_gpu.o"
    link=hipcc
    threads=-pthread
else
    echo "gpu_run: no GPU, or no nvcc or hipcc for it"
    exit 77
fi
${CXX:-c++} -std=c++11 -O2 -c tests/test_hip.cpp -o "$build/test_hip_gpu.o"
$link "$build/test_hip_gpu.o" "$build/kernels_gpu.o" -o "$build/test_hip_gpu" $threads
"$build/test_hip_gpu" "$@"
${CC:-cc} -O2 -I. -c examples/rocmforge_cli.c -o "$build/cli_gpu.o"
$link "$build/cli_gpu.o" "$build/kernels_gpu.o" -o "$build/rocmforge_cli_gpu" -lm $threads
for device in cpu hip:0; do
    "$build/rocmforge_cli_gpu" generate --gguf examples/shakespeare-5m.gguf --device $device --prompt "ROMEO:" \
        --max-tokens 64 --temp 0 >"$build/greedy_${device%:*}.txt"
done
cmp "$build/greedy_cpu.txt" "$build/greedy_hip.txt"
echo "gpu_run: greedy text equal to the CPU's"
