# test_emu.sh BUILD: the command line program with the GPU kernels emulated on the CPU (waves of 32 lanes and of 64).
. tests/rf_test.sh

cli=$build/rocmforge_cli_emu
model=examples/shakespeare-5m.gguf
[ -x "$cli" ] || { skip emulation "install g++ with 'apt-get install g++' (make deps), then make test-emu"; finish; }

greedy() {
    "$cli" generate --gguf $model --device "$1" --prompt "ROMEO:" --max-tokens 16 --temp 0 >"$dir/$1.txt" 2>"$dir/$1.err"
    cat "$dir/$1.txt" "$dir/$1.err"
    [ -s "$dir/$1.txt" ] && grep -q " $1 (" "$dir/$1.err"
}
build_greedy_cpu() { greedy cpu; }
case_greedy_wave32() { greedy hip:0 && cmp "$dir/cpu.txt" "$dir/hip:0.txt"; }
case_greedy_wave64() { greedy hip:1 && cmp "$dir/cpu.txt" "$dir/hip:1.txt"; }

# ROCMFORGE_TYPES for the kernels alone: the same text if the model's types are listed, a refusal by tensor and type if not
types() {
    ${CXX:-c++} -std=c++11 -O0 -x c++ -DROCMFORGE_HIP_EMU -DROCMFORGE_TYPES="$2" -include tests/hip_emu.h -c rocmforge_kernels.hip \
        -o "$dir/$1.o" && ${CXX:-c++} "$build/rocmforge_cli_emu.o" "$dir/$1.o" "$build/rocmforge.a" -o "$dir/$1" -lm -pthread
}
build_types_used() { types types_used Q4_K,Q6_K; }
build_types_other() { types types_other Q6_K,F16; }
case_types() {
    "$dir/types_used" generate --gguf $model --device hip:0 --prompt "ROMEO:" --max-tokens 4 --temp 0 >"$dir/used.txt" &&
        head -c "$(wc -c <"$dir/used.txt")" "$dir/cpu.txt" | cmp - "$dir/used.txt" || return 1
    ! "$dir/types_other" generate --gguf $model --device hip:0 --prompt "ROMEO:" --max-tokens 1 2>"$dir/other.txt" || return 1
    cat "$dir/other.txt"
    grep -q 'hip: op [0-9]* .*weight is of type q4_K, which is not among ROCMFORGE_TYPES' "$dir/other.txt"
}

# the first usable GPU is what "auto" takes
case_devices() {
    "$cli" devices | tee "$dir/devices.txt"
    grep -q '^hip:0 .*emulated GPU, waves of 32, gfx1100' "$dir/devices.txt"
    grep -q '^hip:1 .*emulated GPU, waves of 64, gfx90a' "$dir/devices.txt"
    "$cli" generate --gguf $model --prompt A --max-tokens 1 --temp 0 2>&1 | grep ' hip:0 (gfx1100)'
}

# pooled hidden states of the emulated GPU are close to the CPU's
embed_near() {
    for device in cpu "$1"; do
        "$cli" embed --gguf $model --device $device --prompt "ROMEO: who is there" --pooling "$2" >"$dir/$1-$device.json"
        tr -d '[] ' <"$dir/$1-$device.json" | tr ',' '\n' >"$dir/$1-$device.txt"
    done
    paste "$dir/$1-cpu.txt" "$dir/$1-$1.txt" |
        awk '{ d = $1 - $2; if (d > 0.02 || d < -0.02) bad++ } END { print NR, bad + 0; exit bad > 0 || NR < 100 }'
}
case_embed_wave32() { embed_near hip:0 mean; }
case_embed_wave64() { embed_near hip:1 last; }

# two processes, each with a GPU and half of the layers: rank 0 writes what one process would, rank 1 nothing
case_ranks() {
    "$build/ranks_emu" 1 0 "$dir/id1" $model >"$dir/rank.txt" || return 1
    "$build/ranks_emu" 2 1 "$dir/id2" $model >"$dir/rank1.txt" 2>&1 &
    "$build/ranks_emu" 2 0 "$dir/id2" $model >"$dir/rank0.txt" && wait $! || return 1
    [ -s "$dir/rank.txt" ] && cmp "$dir/rank.txt" "$dir/rank0.txt" && [ ! -s "$dir/rank1.txt" ] && [ ! -e "$dir/id2" ]
}
# the kernels file of case_types has no RCCL
case_ranks_without_rccl() {
    ${CXX:-c++} "$build/ranks_emu.o" "$dir/types_used.o" "$build/rocmforge.a" -o "$dir/ranks" -lm -pthread || return 1
    ! "$dir/ranks" 2 0 "$dir/id3" $model 2>"$dir/ranks.err" || return 1
    grep 'rocmforge_kernels.hip was compiled without -DROCMFORGE_RCCL' "$dir/ranks.err"
}

# with drafts of the file's MTP head the text is the same
mtp() {
    for draft in "" "--draft mtp --draft-max 2"; do
        "$cli" generate --gguf tests/family/qwen35-mtp.gguf --device "$1" --prompt ABC --max-tokens 16 --temp 0 $draft \
            >"$dir/mtp-$1$draft.txt" 2>"$dir/mtp-$1.err" || { cat "$dir/mtp-$1.err"; return 1; }
    done
    cat "$dir/mtp-$1.err"
    grep -q 'drafts [0-9]* of [1-9][0-9]* right' "$dir/mtp-$1.err" && cmp "$dir/mtp-$1.txt" "$dir/mtp-$1$draft.txt"
}
case_mtp_wave32() { mtp hip:0; }
case_mtp_wave64() { mtp hip:1; }

# A decode step launches 35 kernels: step values, embedding, rope angles; in each of 6 layers norm + q, k, v; rope + KV store +
# attention; attention output; norm + gate, up and GLU; down; at last norm + output, and argmax. All but the first are one graph.
# Launch configs are timed before that.
launches() {
    "$cli" bench $model --device "$1" -p 0 -n 2 -r 1 -d 3 --peak 1M | tee "$dir/$1.bench"
    grep '^ *3 .* 35[.]0  *2[.]0$' "$dir/$1.bench"
    grep "^launch_config *in flight [12], blocks per CU [12] ($2: [0-9.]* us\(; [12], [12]: [0-9.]* us\)\{3\})$" "$dir/$1.bench"
}
case_launches_wave32() { launches hip:0 "1, 1"; }
case_launches_wave64() { launches hip:1 "2, 1"; }
case_way_untimed() {
    "$cli" bench $model --device hip:0 -p 0 -n 1 -r 1 --budget 2M --peak 0 | grep '^launch_config *in flight 1, blocks per CU 1 (not timed)$'
    "$cli" bench $model --device hip:1 -p 0 -n 1 -r 1 --budget 2M --peak 0 --json |
        grep '"launch_configs": \[{"in_flight": 2, "blocks_per_cu": 1, "us": [0-9.]*}, .*], "launch_config": null, '
}

# ---- check --device: op by op against the CPU ----

case_check_wave32() { "$cli" check $model --device hip:0 | tee "$dir/check.txt" && grep -q '^ok: hip:0 as the CPU: [0-9]* ops' "$dir/check.txt"; }
case_check_wave64() { "$cli" check $model --device hip:1 | grep '^ok: hip:1 as the CPU: [0-9]* ops'; }
# matrix units that compute something else: the device notices, says so and computes without them
case_check_wrong_units() {
    HIP_EMU_WRONG_UNITS=3 "$cli" check $model --device hip:0 | tee "$dir/units.txt"
    grep '^ok: hip:0 as the CPU: [0-9]* ops' "$dir/units.txt"
    grep '^hip:0: matrix units give wrong products of bytes and halves here: dot products are used instead$' "$dir/units.txt"
    HIP_EMU_WRONG_UNITS=1 "$cli" bench --gguf $model --device hip:1 -p 12 -n 1 -r 1 --peak 1M | tee "$dir/units.txt"
    grep '^device_note *"matrix units give wrong products of bytes here' "$dir/units.txt"
}
# one flipped bit in the n-th kernel: `check` names the op; later kernels belong to later ops
case_check_wrong_kernel() {
    : >"$dir/wrong"
    for n in 2 3 5 7 10 14 19 25 32 40; do
        HIP_EMU_FLIP=$n "$cli" check $model --device hip:0 2>&1 >"$dir/wrong.out" | tee -a "$dir/wrong"
        [ -s "$dir/wrong.out" ] && [ "$(wc -l <"$dir/wrong.out")" -eq 1 ]
    done
    cat "$dir/wrong"
    [ "$(grep -c '^rocmforge_cli check: hip:0 and the CPU differ: op [0-9]* of layer -*[0-9]* ([a-z_]*.*), 12 rows: by ' "$dir/wrong")" -eq 10 ]
    sed 's/.*differ: op \([0-9]*\) .*/\1/' "$dir/wrong" | sort -n -c
    grep -q '(embed token_embd.weight)' "$dir/wrong"
    grep -q '(matmul blk.1.[a-z_]*.weight)' "$dir/wrong"
}

run_cases "$@"
