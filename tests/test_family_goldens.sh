# test_family_goldens.sh BUILD: the models and answers in tests/family are what make_family_goldens.py makes.
. tests/rf_test.sh

case_made_again() {
    for python in python3 /usr/bin/python3 none; do $python -c 'import numpy' 2>/dev/null && break; done
    [ $python != none ] || { echo "install python3-numpy with 'apt-get install python3-numpy' (make deps)"; exit 77; }
    $python tests/make_family_goldens.py --check tests/family
}
# each model is one that test_goldens runs
case_all_are_tested() {
    for f in tests/family/*.gguf; do
        name=$(basename "$f" .gguf)
        grep -q "\"$name\"" tests/test_goldens.c || { echo "tests/test_goldens.c does not list $name"; exit 1; }
    done
}

run_cases "$@"
