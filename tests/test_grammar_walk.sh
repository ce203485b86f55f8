# test_grammar_walk.sh BUILD: random texts that the masks of JSON schemas allow are valid, as Python's jsonschema judges them.
. tests/rf_test.sh

for python in python3 /usr/bin/python3 none; do $python -c 'import jsonschema' 2>/dev/null && break; done
[ $python != none ] || { skip walks "install python3-jsonschema with 'apt-get install python3-jsonschema' (make deps)"; finish; }

for seed in 1 2 3; do
    if "$build/test_grammar" walk $seed >"$dir/$seed" && [ "$(wc -l <"$dir/$seed")" -gt 100 ] &&
        $python tests/make_grammar_cases.py check <"$dir/$seed" >"$dir/$seed.log" 2>&1; then
        pass
    else
        fail "seed $seed" "$(tail -n 2 "$dir/$seed.log")"
    fi
done
finish
