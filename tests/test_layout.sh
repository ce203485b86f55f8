# test_layout.sh BUILD: the shape of the repository: sections, line and function lengths, words the library must not use.
. tests/rf_test.sh

columns=120 lines=80 parameters=7
library="rocmforge.h rocmforge_kernels.hip"
code="$library $(ls examples/*.c)"
tests="$(ls tests/*.c tests/*.cpp tests/*.h tests/*.sh)"

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

# sections FILE: the table of sections in the head of the file lists its banners ("number tag"), and under each banner stands a
# paragraph that says what the section owns.
sections() {
    awk '
        !/^( \*|\/\*)/ { exit }
        / Sections / { on = 1; next }
        on && /^ \*$/ { exit }
        on { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+$/) n = $i; else if (sub(/^>>/, "", $i)) print n, $i }' "$1" |
        sort -n -s -k 1,1 >"$dir/$1.table"
    sed -n 's,^/\* ==== \([0-9]*\)[a-z]* .* =* >>\([a-z-]*\)$,\1 \2,p' "$1" >"$dir/$1.banners"
    grep -c . "$dir/$1.table"
    diff "$dir/$1.table" "$dir/$1.banners"
    awk '/^\/\* ==== .*>>/ { getline; if ($0 !~ /^ \* [A-Za-z]/) { print FILENAME ":" FNR ": no paragraph under the banner"; bad = 1 } }
         END { exit bad }' "$1"
}
case_sections_of_the_header() {
    sections rocmforge.h
    grep -q '^1 api$' "$dir/rocmforge.h.banners"
    grep -q ' public$' "$dir/rocmforge.h.banners"
}
# the recipes and rules on the first page name functions and fields that there are
case_names_of_the_first_page() {
    awk '/\*\/$/ { exit } { print }' rocmforge.h | grep -oE '\brf_[a-z0-9_]+' | sort -u >"$dir/names"
    grep -q rf_session_eval "$dir/names"
    awk 'body; /\*\/$/ { body = 1 }' rocmforge.h | grep -oE '\brf_[a-z0-9_]+' | sort -u >"$dir/known"
    ! comm -23 "$dir/names" "$dir/known" | grep .
}
# one rule each: the error comes last, a close says whether it closed
case_public_calls() {
    sed -n '/>>api$/,/>>base$/p' rocmforge.h | awk '/^ROCMFORGE_API/ { d = "" } { d = d $0 } /;$/ { if (d ~ /^ROCMFORGE_API/) print d; d = "" }' |
        sed 's/  */ /g' >"$dir/calls"
    [ "$(wc -l <"$dir/calls")" -gt 40 ]
    ! grep '^ROCMFORGE_API rf_result ' "$dir/calls" | grep -v ', rf_error \*err);$'
    ! grep '_close(' "$dir/calls" | grep -v '^ROCMFORGE_API rf_result rf_[a-z_]*_close(rf_[a-z_]* \*[a-z]*, rf_error \*err);$'
}
# below -O2 gcc 13 forgets the target of a function with array parameters
case_targets() {
    ! awk '/^(RFI_INLINE|static) .*RFI_(256|512) / { f = $0; while (f !~ /[{;]/ && (getline l) > 0) f = f l
            sub(/[{;].*/, "", f); gsub(/\(\*[a-z_]*\)(\[[^]]*\])+/, "", f); if (f ~ /\[/) { print FNR ": " f; bad = 1 } }
        END { exit !bad }' rocmforge.h
}
case_sections_of_the_kernels() { sections rocmforge_kernels.hip; }
case_stop_here() { [ "$(grep -c 'Stop here if you only call the library' rocmforge.h)" -eq 1 ]; }
case_columns() {
    awk -v max=$columns 'length($0) > max { print FILENAME ":" FNR ": " length($0) " columns"; bad = 1 } END { exit bad }' $code
}
case_white_space() {
    tab=$(printf '\t')
    ! grep -n -e " \$" -e "$tab" $code $tests README.md
}
case_ascii() {
    for f in $code $(ls tests/*.c tests/*.cpp tests/*.h); do
        strip strings "$f" | LC_ALL=C grep -n '[^ -~]' | sed "s,^,$f:," | grep . && return 1
    done
    return 0
}
# Lines and parameters of functions and function-like macros (not of X-macro tables). A macro in a parameter list is expanded.
case_functions() {
    need ctags universal-ctags
    ctags --version | grep -q 'Universal Ctags' || { echo "install universal-ctags with 'apt-get install universal-ctags' (make deps)"; exit 77; }
    rm -f "$dir/long"
    for f in $code; do
        language=C
        [ "$f" = "${f%.hip}" ] || language=C++
        # names in capitals are macros, not functions
        macros=$(sed -n 's/^#define \([A-Z][A-Z0-9_]*\)(.*/\1+/p' "$f" | sort -u | paste -s -d , -)
        ctags --language-force=$language -I "none,$macros" --kinds-$language=df --fields=+neSK -f - "$f" >"$dir/tags"
        awk -F'\t' -v max_lines=$lines -v max_parameters=$parameters '
        function commas(text,    i, c, depth, n) {
            for (i = 1; i <= length(text); i++) {
                c = substr(text, i, 1)
                if (c ~ /[(<{]/) depth++
                if (c ~ /[)>}]/) depth--
                if (c == "," && depth == 0) n++
            }
            return n + 0
        }
        function judge(line, name, n_lines, n) {
            if (file == "examples/rocmforge_server.c" && name == "handle") n-- # libmicrohttpd wants eight
            if (n_lines > max_lines) { print file ":" line ": " name " has " n_lines " lines"; bad = 1 }
            if (n > max_parameters) { print file ":" line ": " name " has " n " parameters"; bad = 1 }
        }
        NR == FNR { # the file itself: macros with their bodies
            file = FILENAME
            if (!in_macro && match($0, /^[ \t]*#[ \t]*define[ \t]+[A-Za-z0-9_]+/)) {
                macro = substr($0, RSTART, RLENGTH); sub(/.*[ \t]/, "", macro)
                body[macro] = substr($0, RSTART + RLENGTH); macro_line = FNR; in_macro = 1
            } else if (in_macro) body[macro] = body[macro] " " $0
            if (in_macro && !/\\$/) {
                if (body[macro] ~ /^\(/ && body[macro] !~ /^\(X\)/) { macros++; judge(macro_line, macro, FNR - macro_line + 1, 1) }
                in_macro = 0
            }
            next
        }
        {
            kind = $4; from = to = 0; signature = ""
            for (i = 5; i <= NF; i++) {
                if (sub(/^line:/, "", $i)) from = $i
                else if (sub(/^end:/, "", $i)) to = $i
                else if (sub(/^signature:/, "", $i)) signature = $i
            }
            if (signature == "") next
            sub(/^\(/, "", signature); sub(/\)[^)]*$/, "", signature)
            n = 1 + commas(signature)
            if (kind ~ /^f/) {
                functions++
                if ($1 !~ /[a-z]/) { print file ":" from ": " $1 ": a macro that ctags took for a function: its definition is not found"; bad = 1 }
                words = split(signature, word, /[^A-Za-z0-9_]+/)
                for (i = 1; i <= words; i++) if (word[i] in body && body[word[i]] !~ /^\(/) n += commas(body[word[i]])
            }
            judge(from, $1, kind ~ /^f/ ? to - from + 1 : 1, n)
        }
        END { print file ": " functions " functions, " macros + 0 " macros"; exit bad || !functions }' "$f" "$dir/tags" || echo "$f" >>"$dir/long"
    done
    [ ! -e "$dir/long" ]
}
# The library does not end the process, print, read the environment or use unbounded string functions, and includes no HIP header.
case_forbidden_words() {
    words='abort exit _exit _Exit quick_exit assert getenv setenv printf fprintf vprintf puts putchar perror sprintf vsprintf
        strcpy strcat gets atoi atol atof alloca system popen fork signal sigaction setlocale rand srand strtok longjmp setjmp'
    strip comments rocmforge.h | sed 's/__attribute__((format(printf/__attribute__((format(/' >"$dir/code.h"
    bad=0
    for w in $words; do
        if grep -nE "(^|[^A-Za-z0-9_.>])$w *\(" "$dir/code.h" | sed "s/^/rocmforge.h:/" | grep .; then bad=1; fi
    done
    if grep -n '#include.*hip' "$dir/code.h"; then bad=1; fi
    # macros must have our prefixes
    if grep -nE '#[[:space:]]*define[[:space:]]+' "$dir/code.h" | grep -vE 'define[[:space:]]+(ROCMFORGE_|RF_|RFI_|rfi_|_GNU_SOURCE)'; then bad=1; fi
    return $bad
}
case_top_level() {
    list_files | sed 's,/.*,,' | sort -u |
        grep -vxE 'rocmforge\.h|rocmforge_kernels\.hip|examples|tests|Makefile|README\.md|LICENSE|\.gitignore|\.ci' && return 1
    for f in rocmforge.h examples tests Makefile README.md LICENSE .gitignore .ci/run; do [ -e $f ]; done
}
# the first line of each example is the command that builds it
case_example_commands() {
    for f in examples/*.c; do
        line=$(head -n 1 "$f" | sed -n 's,^/[/*] *\(cc .*pthread\).*,\1,p')
        case $line in
        "cc -O2 "*" $f "*" -lm -pthread") ;;
        *) echo "$f:1: want its build command (cc -O2 -I. $f -o ... -lm -pthread), found: $(head -n 1 "$f")"; return 1 ;;
        esac
        case $line in # headers of Debian packages
        *-lmicrohttpd*) echo '#include <microhttpd.h>' | cc -fsyntax-only -x c - 2>/dev/null || continue ;;
        esac
        sh -c "$line -fsyntax-only"
    done
}
case_file_sizes() {
    list_files | while read -r f; do find "$f" -size +4096k -print; done | grep . && return 1
    return 0
}
# no paths of the machine that it was written on
case_no_machine_paths() {
    list_files | grep -vE '\.(gguf|f32|bin|raw)$' | xargs grep -nIE '(^|[^A-Za-z0-9_.])/([w]ork|[r]oot|[h]ome|[t]mp/[A-Za-z0-9_])' | grep -v 'XXXXXX' | grep . && return 1
    return 0
}
case_licence() {
    grep -q 'MIT License' LICENSE
    grep -q 'MIT License' rocmforge.h
}

run_cases "$@"
