# test_readme.sh BUILD [quick|slow]: every command and program of README.md works. It runs in a copy of the tree, block after block in
# the order of the page: ```sh blocks as scripts that stop at the first failure (make test and make deps only as make -n). A ```c or
# ```cpp block must pass the compiler's warnings; a complete program becomes example.c or example.cpp, and a later block must build
# and run it. A ```cmake block becomes CMakeLists.txt.
# `<!-- needs: ITEM... -->` above a block names what it needs: a tool, tool>=version, a system header, or a file of the repository. HIPCC_NEW
# may name the hipcc for blocks that want a version of it (tests/make_hipcc.sh). Blocks that need a GPU's compiler are slow.
. tests/rf_test.sh

[ -f README.md ] || { fail README.md "there is none"; finish; }
rm -rf "$dir"
mkdir -p "$dir/tree" "$dir/blocks"
list_files | tar -cf - -T - | tar -xf - -C "$dir/tree"
mkdir -p "$dir/tree/build"
find "$build" -maxdepth 1 -type f \( -perm -u+x -o -name '*.a' \) -exec cp -p {} "$dir/tree/build/" \;

part=${2-all}
quick=cc # where any compiler will do: at -O0 clang takes a third of gcc's time
command -v clang >/dev/null && quick=clang
# blocks/NN.sh, NN.c, NN.cpp, NN.cmake; their needs in NN.needs, their place in NN.line
awk -v out="$dir/blocks/" '
    /^<!-- needs: .* -->$/ { needs = $0; sub(/^<!-- needs: /, "", needs); sub(/ -->$/, "", needs); next }
    /^```(sh|c|cpp|cmake)$/ { name = sprintf("%s%02d", out, ++n); file = name "." substr($0, 4)
                    print needs >(name ".needs"); print FNR >(name ".line"); printf "" >file; next }
    /^```/ { if (file) close(file); file = ""; needs = ""; next }
    file { print >file; next }
    NF { needs = "" }' README.md
# missing ITEM: print why the item is not there
missing() {
    tool=${1%%>=*}
    command=$tool
    case $1 in hipcc\>=*) command=${HIPCC_NEW:-hipcc} ;; esac
    [ ! -e "$dir/tree/$tool" ] || return 1
    case $tool in
    *.h)
        echo "#include <$tool>" | cc -fsyntax-only -x c - 2>/dev/null && return 1
        name="install the package that has $tool (make deps)"
        ;;
    hipcc | nvcc) name="no GPU compiler ($1)" ;;
    c++) name="install g++ with 'apt-get install g++'" ;;
    *) name="install $tool with 'apt-get install $tool'" ;;
    esac
    if command -v "$command" >/dev/null 2>&1; then
        [ "$1" != "$tool" ] || return 1
        have=$("$command" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
        [ "$(printf '%s\n' "${1#*>=}" "$have" | sort -V | head -n 1)" != "${1#*>=}" ] || return 1
    fi
    echo "$name"
}

# compiler COMMAND PROGRAM OPTION...: in the blocks COMMAND means PROGRAM with options that make it quick. This suite
# tests that the commands work; other suites test optimized code, vector kernels and GPU code. hipcc compiles host
# code only, so that its programs lack one symbol (test_hipcc.sh compiles the GPU code). An example that becomes a
# program takes the implementation that the other suites link: test_layout.sh has the compiler read each whole, and
# here the page's own program, which is hello.c, is compiled whole.
compiler() {
    command=$1 program=$(command -v "$2") || return
    shift 2
    cat >"$dir/bin/$command" <<EOF
#!/bin/sh
case " \$* " in
*" -c "*) ;;
*" examples/"*.c" "*)
    set -- -DROCMFORGE_IMPLEMENTATION_DONE -Wl,--whole-archive build/rocmforge.a -Wl,--no-whole-archive "\$@" ;;
esac
exec "$program" "\$@" $*
EOF
    chmod +x "$dir/bin/$command"
}
# run LABEL SCRIPT: in the copy, with empty stdin: a chat ends at once
run() {
    rm -rf "$dir/bin"
    mkdir "$dir/bin"
    hipcc=hipcc
    case $(cat "$block.needs") in *hipcc\>=*) hipcc=${HIPCC_NEW:-hipcc} ;; esac
    compiler cc "$quick" -O0 -DROCMFORGE_NO_SIMD
    compiler hipcc "$hipcc" -O0 -DROCMFORGE_NO_SIMD --cuda-host-only -Wl,--warn-unresolved-symbols
    fast="-Xcicc -O1 -Xptxas -O1" # of an nvcc that has no -Ofc
    case $(nvcc --help 2>/dev/null) in *-Ofc*) fast="-Ofc max" ;; esac
    compiler nvcc nvcc -O0 -DROCMFORGE_NO_SIMD $fast
    bin=$(cd "$dir/bin" && pwd)
    if (cd "$dir/tree" && PATH=$bin:$PATH sh -ex "$OLDPWD/$2") </dev/null >"$2.log" 2>&1 &&
        ! grep -E 'undefined (reference|symbol)' "$2.log" | grep -qv __hip_fatbin; then pass
    else fail "$1" "$(grep '^+ ' "$2.log" | tail -n 1)"; tail -n 15 "$2.log" | sed 's/^/    /'
    fi
}

# one program, three times: the header's first page, README.md, examples/hello.c after its build line
header_program() { sed -n '/A complete program/,/^ \* Recipes/s/^ \*     //p' rocmforge.h; }
sed 1d examples/hello.c | grep . >"$dir/hello"
header_program | cmp - "$dir/hello" && pass || fail rocmforge.h "its program is not examples/hello.c"
cat "$dir"/blocks/*.c | awk '/^#define ROCMFORGE_IMPL/, 0; /^int main/ { last = 1 } last && /^}/ { exit }' | grep . | cmp - "$dir/hello" && pass ||
    fail README.md "its program is not examples/hello.c"

commands=0 programs=0
for line_file in "$dir"/blocks/*.line; do
    block=${line_file%.line}
    label="README.md:$(cat "$line_file")"
    why= speed=quick
    case $(cat "$block.needs") in *hipcc* | *nvcc*) speed=slow ;; esac
    case $part in all | $speed) ;; *) speed=other ;; esac
    for item in $(cat "$block.needs"); do [ -n "$why" ] || why=$(missing "$item") || why=; done
    if [ -n "$why" ]; then [ $speed = other ] || skip "$label" "$why"; continue; fi
    for file in example.c:c example.cpp:cpp CMakeLists.txt:cmake; do
        source=$block.${file#*:}
        if [ -f "$source" ] && { [ "${file#*:}" = cmake ] || grep -q 'int main' "$source"; }; then
            sed 's/\.max_tokens = 64/.max_tokens = 16/' "$source" >"$dir/tree/${file%:*}"
        fi
    done
    [ $speed != other ] || continue
    if [ -f "$block.sh" ]; then
        commands=$((commands + 1))
        # commands that would recurse or install are only checked for existence
        # and the server listens to a port that others hardly use
        # generating takes long at -O0
        sed -e 's/-d 0,256 -p 32 -n 8/-d 0,16 -p 4 -n 2/' -e 's/ -n 40\b/ -n 8/' -e "s/\b8080\b/$((20000 + $$ % 20000))/" -e 's/^make \(test\|test-all\|check-c\|deps\)/make -n \1/' -e 's|^\(\./\)*\.ci/run|test -x .ci/run|' "$block.sh" >"$block.run"
        run "$label" "$block.run"
    elif [ -f "$block.cmake" ]; then
        if grep -q '^cmake --build' "$dir"/blocks/*.sh; then pass; else fail "$label" "no commands build it"; fi
    elif grep -q 'int main' "$block".c*; then
        programs=$((programs + 1))
        example=example.c cc=cc
        [ -f "$block.c" ] || { example=example.cpp; cc=c++; }
        echo "$cc -O2 -I. -Wall -Wextra -Werror -fsyntax-only $example" >"$block.run"
        run "$label" "$block.run"
        if cat "$dir"/blocks/*.sh | grep -A 5 "^$cc -O2 .*$example .*-lm -pthread" | grep -q '^\./[a-z._]* examples/shakespeare-5m.gguf'
        then pass
        else fail "$label" "no commands build $example and run it on examples/shakespeare-5m.gguf"
        fi
    else
        cp "$block.c" "$dir/tree/fragment.c"
        echo 'cc -O2 -I. -Wall -Werror -include rocmforge.h -include stdio.h -fsyntax-only fragment.c' >"$block.run"
        run "$label" "$block.run"
    fi
done
if [ $part = slow ] || { [ $commands -gt 0 ] && [ $programs -gt 0 ]; }; then pass
else fail README.md "$commands sh blocks and $programs complete programs; want some of both"
fi
finish
