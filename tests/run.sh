#!/bin/sh
# run.sh BUILD SUITE...: run the suites (programs, or scripts that take BUILD) from the repository root, as many at a time as
# there are cores, and add up their last lines "name: N passed, N failed, N skipped". A suite that ends otherwise counts as
# one failure. What a suite printed is kept in BUILD/NAME.log; failures and skips are shown.
build=$1
shift
printf '%s\n' "$@" | xargs -P "$(getconf _NPROCESSORS_ONLN)" -I SUITE sh -c '
    log=$0/$(basename "$1").log
    start=$(date +%s)
    case $1 in
    *.sh) sh "$1" "$0" ;;
    *) "./$1" ;;
    esac >"$log" 2>&1 </dev/null
    echo "$? $(($(date +%s) - start))" >"$log.rc"' "$build" SUITE
passed=0 failed=0 skipped=0
for suite in "$@"; do
    log=$build/$(basename "$suite").log
    read -r rc seconds <"$log.rc"
    line=$(tail -n 1 "$log")
    set -- $(echo "$line" | sed -n 's/^.*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ $# -eq 0 ] || { [ "$rc" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "FAIL $suite: exit status $rc, last lines:"
        tail -n 15 "$log" | sed 's/^/    /'
        failed=$((failed + 1))
        continue
    fi
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ "$2" -eq 0 ]; then grep '^  skip ' "$log"
    else sed '$d' "$log" | tail -n 60
    fi
    echo "$line ($seconds s)"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
