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

# the first usable GPU is what "auto" takes
case_devices() {
    "$cli" devices | tee "$dir/devices.txt"
    grep -q '^hip:0 .*emulated GPU, waves of 32, gfx1100' "$dir/devices.txt"
    grep -q '^hip:1 .*emulated GPU, waves of 64, gfx90a' "$dir/devices.txt"
    "$cli" generate --gguf $model --prompt A --max-tokens 1 --temp 0 2>&1 | grep ' hip:0 (gfx1100)'
}

run_cases "$@"
