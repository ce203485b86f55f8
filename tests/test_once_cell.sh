#!/bin/sh
# test_once_cell.sh BUILD: the model of the once-cell under spin: it holds, and the checker finds the three planted bugs.
build=$1
passed=0 failed=0
if ! command -v spin >/dev/null 2>&1; then
    echo "  skip once-cell model: install spin with 'apt-get install spin' (make deps)"
    echo "test_once_cell: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
here=$(cd "$(dirname "$0")" && pwd)
dir=$build/once_cell
mkdir -p "$dir" && cd "$dir" || exit 1

# check NAME "SPIN FLAGS" WANTED: the pattern must be in the checker's report
check() {
    rm -f pan*
    if spin $2 -a "$here/once_cell.pml" >spin.log 2>&1 && cc -O2 -w -DSAFETY -DSFH -o pan pan.c && ./pan -m100000 >pan.log 2>&1 &&
        grep -q "$3" pan.log; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "  FAIL $1: want '$3' in:"
        cat spin.log pan.log
    fi
}
check "loads, failures, evictions, late failures" "" "errors: 0"
# two users are enough to find what is planted; while the evictor works no state is an end
check "the same with an evictor that rests" "-DUSERS=2 -DEVICTOR_RESTS" "errors: 0"
check "a plain look instead of a pin" "-DUSERS=2 -DPLAIN_LOAD" "^pan:1: assertion violated bytes"
check "waiters are forgotten" "-DUSERS=2 -DEVICTOR_RESTS -DFORGET_WAITERS" "^pan:1: invalid end state"
check "waiters for a broken tensor are forgotten" "-DUSERS=2 -DEVICTOR_RESTS -DFORGET_BROKEN" "^pan:1: invalid end state"
echo "test_once_cell: $passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
