# test_unigram.sh BUILD: UGM tokenizers against SentencePiece, on models that it trains from the texts of this repository.
. tests/rf_test.sh

case_sentencepiece() {
    for python in python3 /usr/bin/python3 none; do $python -c 'import sentencepiece' 2>/dev/null && break; done
    [ $python != none ] || { echo "install python3-sentencepiece with 'apt-get install python3-sentencepiece' (make deps)"; exit 77; }
    $python tests/check_unigram.py "$dir" "$build/rocmforge_cli" README.md LICENSE
}

run_cases "$@"
