#!/bin/sh
# run.sh BUILD SUITE...: run each suite (a program, or a script that takes BUILD) from the repository root and add up their
# last lines "name: N passed, N failed, N skipped". A suite that ends otherwise counts as one failure.
build=$1
shift
passed=0 failed=0 skipped=0
for suite in "$@"; do
    log=$build/$(basename "$suite").log
    case $suite in
    *.sh) sh "$suite" "$build" >"$log" 2>&1 ;;
    *) "./$suite" >"$log" 2>&1 ;;
    esac
    rc=$?
    line=$(tail -n 1 "$log")
    counts=$(echo "$line" | sed -n 's/^.*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ -z "$counts" ] || { [ $rc -ne 0 ] && [ "${counts#* 0 }" != "$counts" ]; }; then
        echo "FAIL $suite: exit status $rc, last lines:"
        tail -n 15 "$log" | sed 's/^/    /'
        failed=$((failed + 1))
        continue
    fi
    set_counts() { p=$1 f=$2 s=$3; }
    set_counts $counts
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    [ "$f" -eq 0 ] || grep -v "^$line\$" "$log" | tail -n 40
    grep '^  skip ' "$log"
    echo "$line"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
