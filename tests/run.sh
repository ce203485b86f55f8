#!/bin/sh
# run.sh BUILD SUITE...: run each suite (a program, or a script that takes BUILD) from the repository root and add up their
# last lines "name: N passed, N failed, N skipped". A suite that ends otherwise counts as one failure. What a suite printed
# is kept in BUILD/NAME.log; failures and skips are shown.
build=$1
shift
passed=0 failed=0 skipped=0
set_counts() { p=$1 f=$2 s=$3; }
for suite in "$@"; do
    log=$build/$(basename "$suite").log
    case $suite in
    *.sh) sh "$suite" "$build" >"$log" 2>&1 ;;
    *) "./$suite" >"$log" 2>&1 ;;
    esac
    rc=$?
    line=$(tail -n 1 "$log")
    counts=$(echo "$line" | sed -n 's/^.*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    set_counts $counts
    if [ -z "$counts" ] || { [ $rc -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "FAIL $suite: exit status $rc, last lines:"
        tail -n 15 "$log" | sed 's/^/    /'
        failed=$((failed + 1))
        continue
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$f" -eq 0 ]; then grep '^  skip ' "$log"
    else sed '$d' "$log" | tail -n 60
    fi
    echo "$line"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
