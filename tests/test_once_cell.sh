#!/bin/sh
# test_once_cell.sh BUILD: spin checks the model of the once-cell: no error, and each of three planted bugs is found.
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

# check NAME "SPIN FLAGS" WANTED: the checker's report matches the pattern
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
# two users suffice for the planted bugs; the evictor must rest, or no state is an end state
check "the same with an evictor that rests" "-DUSERS=2 -DEVICTOR_RESTS" "errors: 0"
check "a plain look instead of a pin" "-DUSERS=2 -DPLAIN_LOAD" "^pan:1: assertion violated bytes"
check "waiters are forgotten" "-DUSERS=2 -DEVICTOR_RESTS -DFORGET_WAITERS" "^pan:1: invalid end state"
check "waiters for a broken tensor are forgotten" "-DUSERS=2 -DEVICTOR_RESTS -DFORGET_BROKEN" "^pan:1: invalid end state"
echo "test_once_cell: $passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
