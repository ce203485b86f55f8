# test_layout.sh BUILD: the shape of the repository: sections, line and function lengths, words the library must not use.
. tests/rf_test.sh

columns=120 lines=120 parameters=8
code="rocmforge.h $(ls examples/*.c)"
tests="$(ls tests/*.c tests/*.h tests/*.sh)"

# strip comments|strings FILE: the file without (comments and) what its string and character literals hold; same lines
strip() {
    awk -v keep="$([ "$1" = strings ] && echo 1)" '
    {
        out = ""
        n = length($0)
        for (i = 1; i <= n; i++) {
            c = substr($0, i, 1); two = substr($0, i, 2)
            if (in_comment) {
                if (two == "*/") { in_comment = 0; i++; if (keep) out = out two }
                else if (keep) out = out c
            } else if (quote != "") {
                if (c == "\\") i++
                else if (c == quote) { quote = ""; out = out c }
            } else if (two == "/*") { in_comment = 1; i++; if (keep) out = out two }
            else if (two == "//") { if (keep) out = out substr($0, i); break }
            else { if (c == "\"" || c == "\047") quote = c; out = out c }
        }
        quote = ""
        print out
    }' "$2"
}

# "number tag" of every section: as the table in the head promises, and as the banners say
case_sections() {
    sed -n '1,/^#ifndef ROCMFORGE_H/p' rocmforge.h | awk '
        / Sections / { on = 1; next }
        on && /^ \*$/ { exit }
        on { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+$/) n = $i; else if (sub(/^>>/, "", $i)) print n, $i }' |
        sort -n -s -k 1,1 >"$dir/table"
    sed -n 's,^/\* ==== \([0-9]*\)[a-z]* .* =* >>\([a-z-]*\)$,\1 \2,p' rocmforge.h >"$dir/banners"
    grep -c . "$dir/table"
    diff "$dir/table" "$dir/banners"
    grep -q '^1 api$' "$dir/banners"
    grep -q ' public$' "$dir/banners"
    # under each banner a paragraph: what the section owns, and why
    awk '/^\/\* ==== .*>>/ { getline; if ($0 !~ /^ \* [A-Z]/) { print FILENAME ":" FNR ": no paragraph under the banner"; bad = 1 } }
         END { exit bad }' rocmforge.h
}
case_stop_here() { [ "$(grep -c 'Stop here if you only call the library' rocmforge.h)" -eq 1 ]; }
case_columns() {
    awk -v max=$columns 'length($0) > max { print FILENAME ":" FNR ": " length($0) " columns"; bad = 1 } END { exit bad }' $code
}
case_white_space() {
    tab=$(printf '\t')
    ! grep -n -e " \$" -e "$tab" $code $tests README.md
}
case_ascii() {
    for f in $code $(ls tests/*.c tests/*.h); do
        strip strings "$f" | LC_ALL=C grep -n '[^ -~]' | sed "s,^,$f:," | grep . && return 1
    done
    return 0
}
case_functions() {
    need ctags universal-ctags
    ctags --version | grep -q 'Universal Ctags' || { echo "install universal-ctags with 'apt-get install universal-ctags' (make deps)"; exit 77; }
    ctags --language-force=C --kinds-C=f --fields=+neS -f - $code | awk -F'\t' -v lines=$lines -v parameters=$parameters '
    {
        from = to = 0; signature = ""
        for (i = 4; i <= NF; i++) {
            if (sub(/^line:/, "", $i)) from = $i
            else if (sub(/^end:/, "", $i)) to = $i
            else if (sub(/^signature:/, "", $i)) signature = $i
        }
        n = 1; depth = 0
        for (i = 1; i <= length(signature); i++) {
            c = substr(signature, i, 1)
            if (c == "(") depth++
            if (c == ")") depth--
            if (c == "," && depth == 1) n++
        }
        count++
        if (to - from >= lines) { print $2 ":" from ": " $1 " has " to - from + 1 " lines"; bad = 1 }
        if (n > parameters) { print $2 ":" from ": " $1 " has " n " parameters"; bad = 1 }
    }
    END { print count " functions"; exit bad || count < 100 }'
}
# The library neither ends the process nor prints, reads the environment or uses unbounded string functions; libc headers
# of the implementation come before it, HIP headers never.
case_forbidden_words() {
    words='abort exit _exit _Exit quick_exit assert getenv setenv printf fprintf vprintf puts putchar perror sprintf vsprintf
        strcpy strcat gets atoi atol atof alloca system popen fork signal sigaction setlocale rand srand strtok longjmp setjmp'
    strip comments rocmforge.h | sed 's/__attribute__((format(printf/__attribute__((format(/' >"$dir/code.h"
    bad=0
    for w in $words; do
        if grep -nE "(^|[^A-Za-z0-9_.>])$w *\(" "$dir/code.h" | sed "s/^/rocmforge.h:/" | grep .; then bad=1; fi
    done
    if grep -n '#include.*hip' "$dir/code.h"; then bad=1; fi
    # names that C and POSIX reserve, or that are not ours
    if grep -nE '#[[:space:]]*define[[:space:]]+' "$dir/code.h" | grep -vE 'define[[:space:]]+(ROCMFORGE_|RF_|RFI_|rfi_|_GNU_SOURCE)'; then bad=1; fi
    return $bad
}
case_top_level() {
    list_files | sed 's,/.*,,' | sort -u |
        grep -vxE 'rocmforge\.h|rocmforge_kernels\.hip|examples|tests|Makefile|README\.md|LICENSE|\.gitignore|\.ci' && return 1
    for f in rocmforge.h examples tests Makefile README.md LICENSE .gitignore .ci/run; do [ -e $f ]; done
}
# the first line of each example is the exact command that builds it
case_example_commands() {
    for f in examples/*.c; do
        line=$(head -n 1 "$f" | sed -n 's,^/[/*] *\(cc .*pthread\).*,\1,p')
        case $line in
        "cc -O2 "*" $f "*" -lm -pthread") ;;
        *) echo "$f:1: want its build command (cc -O2 -I. $f -o ... -lm -pthread), found: $(head -n 1 "$f")"; return 1 ;;
        esac
        sh -c "$line -fsyntax-only"
    done
}
case_file_sizes() {
    list_files | while read -r f; do find "$f" -size +4096k -print; done | grep . && return 1
    return 0
}
# no path of the machine it was written on
case_no_machine_paths() {
    list_files | grep -vE '\.(gguf|f32|bin|raw)$' | xargs grep -nIE '(^|[^A-Za-z0-9_.])/([w]ork|[r]oot|[h]ome|[t]mp/[A-Za-z0-9_])' | grep -v 'XXXXXX' | grep . && return 1
    return 0
}
case_licence() {
    grep -q 'MIT License' LICENSE
    grep -q 'MIT License' rocmforge.h
}

run_cases "$@"
