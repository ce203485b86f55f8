# test_table.sh BUILD: every promise of promises.txt has tests, and every test that it names exists and runs.
. tests/rf_test.sh

case_promises_are_all_there() {
    seq 1 26 | sed 's/^/P/' >"$dir/want"
    sed -n 's/^\(P[0-9]*\) .*/\1/p' tests/promises.txt | diff "$dir/want" -
}
case_every_promise_has_a_test() {
    awk '/^P[0-9]/ { if (promise && !n) { print promise " has no test"; bad = 1 } promise = $1; n = 0; next }
         /^[a-z]/ { n++ }
         END { exit bad || !n }' tests/promises.txt
}
case_every_test_exists() {
    grep '^[a-z]' tests/promises.txt | while read -r suite name; do
        case $name in
        test_*) grep -qE "RUN(_IF|_SLOW)?\\((.*, *)?$name[,)]" "tests/$suite" ;;
        case_*) grep -q "^$name()" "tests/$suite" ;;
        *) text=${name#?}; grep -qF -- "${text%?}" "tests/$suite" ;;
        esac || { echo "tests/$suite has no $name"; exit 1; }
    done
}

run_cases "$@"
