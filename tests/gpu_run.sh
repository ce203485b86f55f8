#!/bin/sh
# gpu_run.sh [BUILD] [ARGUMENTS OF test_hip]: the tests that need a real GPU, in about 11 minutes with the sanitizers.
# - The emulated suites with kernels compiled by nvcc or hipcc: every op; whole models, 1,000 runs with the same bits, two sessions
#   in two threads; sessions with recurrent states; small models of many families against stored logits.
# - The shipped model: each op against the CPU, the CPU's greedy text.
# - ../shared/zoo, if it is there: its models against stored logits, as one batch and token by token; sessions that are truncated.
# - compute-sanitizer (memory, leaks, races), if it is installed, on prefill, decode, experts and attention.
# They run in parallel. The output of each is in BUILD/NAME.gpu. Exit status 77 if there is no GPU.
build=${1:-build}
[ $# -gt 0 ] && shift
mkdir -p "$build" || exit 1
set -e
if command -v nvcc >/dev/null && command -v nvidia-smi >/dev/null; then
    arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$arch" = sm_90 ] && arch=sm_90a # wgmma
    arch=${GPU_ARCH:-$arch}
    compile="nvcc -O3 -lineinfo -arch=compute_${arch#sm_} -code=$arch -x cu"
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
start=$(date +%s)
say() { echo "gpu_run: $(($(date +%s) - start)) s: $*"; }

$compile -c rocmforge_kernels.hip -o "$build/kernels_gpu.o" &
kernels=$!
${CXX:-c++} -std=c++11 -O2 -c tests/test_hip.cpp -o "$build/test_hip_gpu.o" &
suites=$!
for program in hip_model:tests/hip_model hip_goldens:tests/test_goldens hip_rewind:tests/test_rewind hip_mtp:tests/test_mtp \
    hip_recurrent:tests/test_recurrent hip_group:tests/test_group rocmforge_cli:examples/rocmforge_cli; do
    ${CC:-cc} -O2 -DRF_TEST_GPUS -I. -c "${program#*:}.c" -o "$build/${program%:*}_gpu.o" &
    suites="$suites $!"
done
# programs with their own implementation link nothing from the archive
${CC:-cc} -O2 -DROCMFORGE_IMPLEMENTATION -x c -c rocmforge.h -o "$build/rocmforge_gpu.o"
ar rc "$build/rocmforge_gpu.a" "$build/rocmforge_gpu.o"
for pid in $kernels $suites; do wait $pid; done
for program in test_hip hip_model hip_goldens hip_rewind hip_recurrent hip_mtp hip_group rocmforge_cli; do
    $link "$build/${program}_gpu.o" "$build/kernels_gpu.o" "$build/rocmforge_gpu.a" -o "$build/${program}_gpu" -lm -lpthread
done
say "compiled for $arch"

# begin NAME COMMAND...: start a test in the background
names=
rm -f "$build"/*.rc
begin() {
    name=$1
    names="$names $name"
    shift
    (
        code=0
        "$@" >"$build/$name.gpu" 2>&1 </dev/null || code=$?
        echo "$code $(($(date +%s) - start))" >"$build/$name.rc"
    ) &
}

# the shipped model: each op against the CPU, and the same greedy text
shipped() {
    "$cli" check $model --device hip:0 || return 1
    for device in cpu hip:0; do
        "$cli" generate --gguf $model --device $device --prompt "ROMEO:" --max-tokens 64 --temp 0 \
            >"$build/greedy_${device%:*}.txt" || return 1
    done
    cmp "$build/greedy_cpu.txt" "$build/greedy_hip.txt" && echo "greedy text as the CPU's"
}

# sanitizers NAME COMMAND...: no memory errors, no leaks, no races
sanitizers() {
    what=$1
    shift
    begin "memcheck_$what" sanitizer memcheck 'ERROR SUMMARY: 0 errors' --leak-check full "$@"
    begin "racecheck_$what" sanitizer racecheck 'RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' \
        --racecheck-report all "$@"
}
sanitizer() {
    tool=$1 clean=$2
    shift 2
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$@" && grep -qF "$clean" "$build/$name.gpu"
}

begin ops "$build/test_hip_gpu" "$@"
begin models "$build/hip_model_gpu"
begin shipped shipped
begin goldens "$build/hip_goldens_gpu"
begin rewind "$build/hip_rewind_gpu"
begin recurrent "$build/hip_recurrent_gpu"
begin mtp "$build/hip_mtp_gpu"
"$cli" devices | grep -q '^hip:1 ' && begin group "$build/hip_group_gpu"
begin zoo env CLI="$cli" DEVICE=hip:0 sh tests/test_zoo.sh "$build"
if command -v compute-sanitizer >/dev/null; then
    sanitizers generate "$cli" generate --max-tokens 4 --temp 0 --prompt ROMEO:ROMEO:ROMEO:ROMEO: --gguf $model --device hip:0
    sanitizers check "$cli" check $model --device hip:0
    sanitizers goldens "$build/hip_goldens_gpu"
    sanitizers experts "$build/test_hip_gpu" expert
else
    echo "gpu_run: no compute-sanitizer"
fi
wait
failed=0
for name in $names; do
    read -r code seconds <"$build/$name.rc"
    echo "gpu_run: $name, until $seconds s: $(tail -n 1 "$build/$name.gpu")"
    [ "$code" -eq 0 ] || { failed=$((failed + 1)); echo "gpu_run: FAIL $name, exit status $code"; tail -n 40 "$build/$name.gpu"; }
done
say "$failed failed"
[ $failed -eq 0 ]
