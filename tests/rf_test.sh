# rf_test.sh: the test frame of the shell suites. A suite sources it, defines functions case_NAME and ends with
#     run_cases "$@"
# `sh tests/test_X.sh BUILD` runs all cases in parallel: as many at a time as there are cores (or as the make above says).
# `sh tests/test_X.sh BUILD NAME` runs one function and shows its output. A suite may name slow functions in $slow: then BUILD slow
# runs these and BUILD quick the others.
# A case is a process of its own under `set -e`: exit status 0 passes, 77 skips (the last line of its output says why), anything
# else fails. Functions build_NAME are cases that run before all others and leave files in $dir. A suite may instead call pass, fail
# and skip itself and end with `finish`.
build=${1:-build}
suite=$(basename "$0" .sh)
dir=$build/$suite.d
passed=0 failed=0 skipped=0
slow=
case ${2-} in '' | quick | slow) rm -rf "$dir" ;; esac
mkdir -p "$dir"

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "  FAIL $1${2:+: $2}"; }
skip() { skipped=$((skipped + 1)); echo "  skip $1: $2"; }
finish() {
    echo "$suite: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

# need TOOL PACKAGE: leave the case as skipped if TOOL is missing.
need() {
    command -v "$1" >/dev/null 2>&1 && return
    echo "install $1 with 'apt-get install $2' (make deps)"
    exit 77
}

# run_cases BUILD [NAME|quick|slow]
run_cases() {
    part=${2-all}
    case $part in
    all | quick | slow) ;;
    *) set -e; "$part"; exit ;;
    esac
    for name in $slow; do grep -q "^$name() " "$0" || fail "$name" "in \$slow, but no function"; done
    suite_file=$0
    export suite_file build dir
    for kind in build case; do
        names=
        for name in $(sed -n "s/^\(${kind}_[a-z0-9_]*\)() .*/\1/p" "$0"); do
            case " $(echo $slow) " in *" $name "*) speed=slow ;; *) speed=quick ;; esac
            case $part in all | $speed) names="$names $name" ;; esac
        done
        [ -z "$names" ] || sh tests/in_parallel.sh '
            sh "$suite_file" "$build" "$NAME" >"$dir/$NAME.log" 2>&1 </dev/null
            echo $? >"$dir/$NAME.rc"' $names
        for name in $names; do
            case $(cat "$dir/$name.rc") in
            0) pass ;;
            77) skip "${name#*_}" "$(tail -n 1 "$dir/$name.log")" ;;
            *) fail "${name#*_}"; head -n 20 "$dir/$name.log" | cut -c 1-300 | sed 's/^/    /' ;;
            esac
        done
    done
    finish
}

# Files of the repository, those not committed yet included; all files where there is no git.
list_files() {
    git ls-files --cached --others --exclude-standard 2>/dev/null | sort -u | while read -r f; do [ -f "$f" ] && echo "$f"; done |
        grep . || find . -name .git -prune -o -path ./build -prune -o -type f -print | sed 's,^\./,,'
}
