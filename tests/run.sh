#!/bin/sh
# run.sh BUILD SUITE...: run the suites from the repository root and add up their last lines "name: N passed, N failed, N skipped".
# A suite is a program, or a script that takes BUILD; SUITE@ARGUMENT gives it one more argument. As many run at a time as there are
# cores (or as the make above says); those that are given as +SUITE mostly wait, and run beside the others from the start. A suite that ends otherwise counts as one failure. Its output is kept in BUILD/NAME.log;
# failures and skips are shown, with the seconds that it took by the clock and by the processors.
build=$1
shift
export build

# explain LOG: why a suite failed: the first 40 lines of a sanitizer's first report, and the last lines.
explain() {
    awk '/(WARNING|ERROR): [A-Za-z]*Sanitizer|: runtime error: / { n = 40 } n > 0 { print "    " $0; if (--n == 0) exit }' "$1" |
        cut -c 1-300
    echo "    last lines:"
    tail -n 15 "$1" | sed 's/^/    /'
}
run='
    log=$build/$(basename "$NAME").log suite=${NAME%%@*} argument=
    [ "$suite" = "$NAME" ] || argument=${NAME#*@}
    start=$(date +%s)
    case $suite in
    *.sh) sh "$suite" "$build" $argument ;;
    *) "./$suite" $argument ;;
    esac >"$log" 2>&1 </dev/null
    echo "$? $(($(date +%s) - start))" >"$log.rc"
    times >"$log.times"'
others=
for suite in "$@"; do
    case $suite in
    +*) NAME=${suite#+} sh -c "$run" & ;;
    *) others="$others $suite" ;;
    esac
done
sh tests/in_parallel.sh "$run" $others
wait
passed=0 failed=0 skipped=0
for suite in "$@"; do
    suite=${suite#+}
    log=$build/$(basename "$suite").log
    read -r rc seconds <"$log.rc"
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%.0f", 60 * ($1 + $3) + $2 + $4 }' "$log.times")
    line=$(tail -n 1 "$log")
    set -- $(echo "$line" | sed -n 's/^.*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ $# -eq 0 ] || { [ "$rc" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "FAIL $suite: exit status $rc"
        explain "$log"
        failed=$((failed + 1))
        continue
    fi
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ "$2" -eq 0 ]; then grep '^  skip ' "$log"
    else sed '$d' "$log" | tail -n 60
    fi
    echo "$line ($seconds s, cpu $cpu s)"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
