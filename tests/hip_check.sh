#!/bin/sh
# hip_check.sh [FILE.hip|FILE.s]: compile the kernels for every GPU that the installed hipcc knows, and check the
# compiler's statistics of each kernel: no spilled vector registers (prefill attention: 32 at most), no dynamic stack, no private
# memory (prefill may have some). Needs hipcc, no GPU. HIPCC and TARGETS override the compiler and the list of GPUs; TYPES: kernels
# of these types alone (ROCMFORGE_TYPES). FILE.s: check this assembly (hipcc --save-temps) instead of compiling.
file=${1:-rocmforge_kernels.hip}
hipcc=${HIPCC:-hipcc}
all="gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1151 gfx1200 gfx1201"
must="gfx906 gfx90a gfx1030" # every hipcc since 5.0 knows these
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
command -v "$hipcc" >/dev/null || { echo "hip_check: $hipcc is not installed"; exit 77; }

# "name vgpr_spills sgpr_spills private_bytes dynamic_stack" of every kernel, from the metadata that ends the assembly
kernels() {
    awk '
    /^amdhsa.kernels:/ { on = 1; next }
    on && /^(amdhsa|\.\.\.)/ { on = 0 }
    on && /^  - / { flush() }
    on {
        for (i = 1; i < NF; i++) {
            if ($i == ".name:" && $0 ~ /^    \.name:/) name = $(i + 1)
            if ($i == ".vgpr_spill_count:") v = $(i + 1)
            if ($i == ".sgpr_spill_count:") s = $(i + 1)
            if ($i == ".private_segment_fixed_size:") p = $(i + 1)
            if ($i == ".uses_dynamic_stack:") d = $(i + 1)
        }
    }
    function flush() { if (name != "") print name, v, s, p, d; name = ""; v = s = p = "?"; d = "false" }
    END { flush() }' "$1"
}

printf '#include <hip/hip_runtime.h>\n__global__ void k() {}\n' >"$dir/probe.hip"
options="-x hip --cuda-device-only -O3 -S -Wall -Wextra -Wno-unused-command-line-argument"
options="$options${TYPES:+ -DROCMFORGE_TYPES=$TYPES}"

bad=0 checked=0
# check TARGET FILE.s: check the statistics of each kernel in the assembly
check() {
    kernels "$2" >"$dir/$1"
    n=$(grep -c . "$dir/$1")
    checked=$((checked + n))
    [ "$n" -gt 0 ] || { echo "hip_check: $1: no kernels in the assembly"; bad=1; }
    awk -v t="$1" '
        { prompt = $1 ~ /rfk_matmul|rfk_flash/; limit = $1 ~ /rfk_flash/ ? 32 : 0 } # of 256 registers
        $4 != 0 && prompt { tiles++ } # costs prefill little: only reported
        $2 > limit || ($4 != 0 && !prompt) || $5 != "false" {
            print "hip_check: " t ": " $1 ": vgpr spills " $2 ", private bytes " $4 ", dynamic stack " $5
            bad = 1
        }
        $3 != 0 { sgpr++ }
        END {
            print t ": " NR " kernels, " sgpr + 0 " with sgpr spills, " tiles + 0 " prompt kernels with private memory"
            exit bad
        }' "$dir/$1" || bad=1
}

case $file in
*.s) all= TARGETS= && check "$(sed -n 's/^[[:space:]]*\.amdgcn_target ".*--\(gfx[0-9a-f]*\).*"/\1/p' "$file")" "$file" ;;
esac
for target in ${TARGETS:-$all}; do
    if ! "$hipcc" $options --offload-arch="$target" -o "$dir/probe.s" "$dir/probe.hip" >/dev/null 2>&1; then
        echo "$target: not known to this hipcc"
        case " $must " in *" $target "*) bad=1 ;; esac
        continue
    fi
    if ! "$hipcc" $options --offload-arch="$target" -o "$dir/$target.s" "$file" 2>"$dir/log"; then
        grep -v -e Traceback -e '^  ' -e rocm_agent_enumerator "$dir/log"
        echo "hip_check: $target: does not compile"
        bad=1
        continue
    fi
    grep -A3 'warning:' "$dir/log" && bad=1
    check "$target" "$dir/$target.s"
done
echo "hip_check: $checked kernels checked"
[ "$checked" -gt 0 ] && [ "$bad" -eq 0 ]
