#!/bin/sh
# sh tests/test_cli.sh BUILD_DIR: test BUILD_DIR/rocmforge_cli; run from the repository root. Generated text is compared
# with that of a float64 reference (make_expected.py), numbers with values worked out by hand.

. tests/rf_test.sh

cli=$build/rocmforge_cli
model=examples/shakespeare-5m.gguf
t=$dir
esc=$(printf '\033')

bad() {
    fail "$1"
    [ ! -s "$t/err" ] || sed 's/^/       stderr: /' "$t/err" | head -3
}
# verdict NAME COMMAND...: the test passes if the command succeeds
verdict() { name=$1; shift; if "$@"; then pass; else bad "$name"; fi; }
have() { command -v "$1" >/dev/null 2>&1; }

# expect CODE NAME ARGUMENTS...: run the CLI, want exit status CODE; a failure prints one line on stderr and nothing on stdout
expect() {
    code=$1 name=$2
    shift 2
    "$cli" "$@" >"$t/out" 2>"$t/err" <"${input:-/dev/null}"
    got=$?
    unset input # some shells keep an assignment before a function's name
    if [ $got -ne "$code" ]; then bad "$name: want exit $code, got $got"; return 1; fi
    if [ "$code" -eq 0 ]; then pass; return 0; fi
    if [ "$(wc -l <"$t/err")" -ne 1 ] || [ ! -s "$t/err" ]; then bad "$name: want one line on stderr"; return 1; fi
    if [ -s "$t/out" ]; then bad "$name: want nothing on stdout"; return 1; fi
    pass
}
says() { verdict "$1: stderr names $2" grep -qF -- "$2" "$t/err"; }

# ---- command line ----

expect 0 version --version
verdict "version on stdout" grep -q '^rocmforge_cli [0-9]' "$t/out"
for words in help -h; do
    expect 0 "$words" $words
    verdict "$words lists commands" grep -q '^  generate ' "$t/out"
done
expect 0 "help COMMAND" help embed
verdict "help COMMAND: its options" grep -q '^  --pooling default|mean|cls|last' "$t/out"
verdict "help COMMAND: no others" sh -c "! grep -e --temp '$t/out'"
expect 0 "run is chat" help run
verdict "run is chat" grep -q '^rocmforge_cli chat: ' "$t/out"
expect 0 help --help
commands=$(sed -n 's/^  \([a-z][a-z]*\) .*/\1/p' "$t/out")
for c in chat generate inspect plan check tokenize dequant embed logits bench; do
    verdict "--help lists $c" sh -c "printf '%s\n' '$commands' | tr ' ' '\n' | grep -qx $c"
    expect 0 "$c --help" $c --help
    verdict "$c --help on stdout only" [ -s "$t/out" ] && verdict "$c --help: stderr" [ ! -s "$t/err" ]
done
expect 2 "no command" && says "no command" "want a command"
expect 2 "unknown command" frobnicate && says "unknown command" frobnicate
expect 2 "help of an unknown command" help frobnicate && says "help of an unknown command" frobnicate
expect 2 "mistyped command" genrate && says "mistyped command" "did you mean generate?"
expect 2 "unknown option" generate --gguf $model --prompt a --frobnicate && says "unknown option" --frobnicate
expect 2 "mistyped option" generate $model --promt a && says "mistyped option" "did you mean --prompt?"
expect 2 "shortened option" bench $model --expert-pre && says "shortened option" "did you mean --expert-prefetch?"
expect 2 "option of another command" inspect $model --temp 1 && says "option of another command" "--temp is no option of inspect"
expect 2 "missing value" generate --gguf $model --prompt && says "missing value" --prompt
expect 2 "missing model" generate --prompt a && says "missing model" "want a model"
expect 2 "missing option" logits $model --out "$t/l" && says "missing option" --tokens
expect 2 "missing prompt" generate --gguf $model && says "missing prompt" --prompt-file
expect 2 "two prompts" generate --gguf $model --prompt a --prompt-file b
expect 2 "switch with a value" inspect $model --json=1 && says "switch with a value" --json
expect 2 "second model" inspect $model $model
for v in "" x 1x 1.5 -2 +1 " 1" 0x10 99999999999999999999; do
    expect 2 "max-tokens '$v'" generate --gguf $model --prompt a --max-tokens "$v" && says "max-tokens '$v'" "\"$v\""
done
for v in "" x 1x -1 nan inf 0x1p1 1e9 " 1"; do
    expect 2 "temp '$v'" generate --gguf $model --prompt a --temp "$v" && says "temp '$v'" --temp
done
for v in "" x 1 1+ +1 -1+1 1+x 1+nan 1x2 99999999999999999999+1; do
    expect 2 "logit bias '$v'" generate --gguf $model --prompt a --logit-bias "$v" && says "logit bias '$v'" "\"$v\""
done
expect 1 "logit bias of no token" generate --gguf $model --prompt a --logit-bias 1024+1 && says "logit bias of no token" 1024
(ulimit -v 8000000 && exec "$cli" generate $model a --ctx 16777216) >"$t/out" 2>"$t/err" </dev/null
verdict "ctx without memory" [ $? -eq 1 ] && says "ctx without memory" "rocmforge_cli generate: --ctx 16777216: "
expect 2 "threads 257" generate --gguf $model --prompt a --threads 257 && says "threads 257" --threads
expect 2 "ctx 0" generate --gguf $model --prompt a --ctx=0 && says "ctx 0" --ctx
expect 2 "kv f64" generate --gguf $model --prompt a --kv f64 && says "kv f64" "f16|f32"
expect 2 "bos 2" tokenize --gguf $model --bos 2 && says "bos 2" --bos
for v in "" "1," ",1" 1,,2 1x a -1 2147483648 "[1" "1]"; do
    expect 2 "tokens '$v'" logits --gguf $model --tokens "$v" --out "$t/l" && says "tokens '$v'" "\"$v\""
done
expect 2 "line breaks in a value" generate --gguf $model --prompt a --seed "$(printf '1\n2\033[31m')"
verdict "values are escaped" sh -c "! grep -q '$esc' '$t/err'"
expect 2 "dequant: unknown type" dequant --type q9_9 && says "dequant: unknown type" q9_9

# ---- files that are not models ----

head -c 1000 $model >"$t/cut-metadata.gguf"
head -c 1000000 $model >"$t/cut-data.gguf"
: >"$t/empty.gguf"
printf 'GGML\003\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000' >"$t/magic.gguf"
mkdir "$t/directory.gguf"
name=$(printf 'm\303\274ller.gguf')
expect 1 "a name in UTF-8" inspect "$t/$name" && says "a name in UTF-8" 'm\xc3\xbcller.gguf: '
for b in missing directory cut-metadata cut-data magic empty; do
    b=$b.gguf f=$t/$b.gguf
    expect 1 "generate $b" generate --gguf "$f" --prompt a && says "generate $b" "$b"
    expect 1 "inspect $b" inspect "$f" && says "inspect $b" "$b"
    expect 1 "check $b" check "$f" && says "check $b" "$b"
    expect 1 "tokenize $b" tokenize --gguf "$f" && says "tokenize $b" "$b"
    expect 1 "logits $b" logits --gguf "$f" --tokens 1 --out "$t/none.f32" && says "logits $b" "$b"
done
verdict "no output file after a failure" [ ! -e "$t/none.f32" ]
expect 1 "missing prompt file" generate --gguf $model --prompt-file "$t/missing" && says "missing prompt file" missing
expect 1 "prompt file is a directory" generate --gguf $model --prompt-file "$t"
expect 1 "unknown device" generate --gguf $model --prompt a --device gpu9 && says "unknown device" gpu9
expect 1 "absent GPU" generate --gguf $model --prompt a --device hip:63
expect 1 "unknown instruction set" generate --gguf $model --prompt a --isa mmx && says "unknown instruction set" mmx
expect 1 "token id out of range" logits --gguf $model --tokens 1,1024 --out "$t/l" && says "token id" 1024
expect 1 "logits beyond the context" logits --gguf $model --tokens 1,2,3 --out "$t/l" --ctx 4 --greedy 2
expect 1 "prompt beyond the context" generate --gguf $model --prompt "To be or not to be" --ctx 3
expect 1 "missing template" generate --gguf $model --prompt a --jinja frobnicate && says "missing template" frobnicate
echo '{% frobnicate %}' >"$t/bad.jinja"
expect 1 "bad template" generate --gguf $model --prompt a --jinja "$t/bad.jinja" && says "bad template" "line 1: unknown tag 'frobnicate'"
expect 1 "chat without a template" chat $model && says "chat without a template" "no chat template"

# ---- generated text ----

# expected_generate.txt and these ids come from make_expected.py
prompt_ids=1022,644,50,50,505,268,761,330
greedy_ids=267,261,1012,367,44,376,34,505,268,40,459,725,292,11,513,11,513,288,44,376,34,505,268,40
greedy_ids=$greedy_ids,459,725,292,11,513,11
printf 'CASSIUS:\nWhere is' >"$t/prompt"

for flags in "" "--threads 1" "--batch 4" "--kv f32" "--swa-full" "--isa scalar"; do
    expect 0 "generate $flags" generate --gguf $model --prompt-file "$t/prompt" --raw --max-tokens 30 --temp 0 $flags
    verdict "generate $flags: the golden text, nothing else" cmp "$t/out" tests/expected_generate.txt
    verdict "generate $flags: one timing line" grep -q '^open .* first token .* decode 30 tokens' "$t/err"
    verdict "generate $flags: no escape codes" sh -c "! cat '$t/out' '$t/err' | grep -q '$esc'"
done
# what `make run` writes, with each instruction set that this machine has
run_command=$(make -n -s --no-print-directory run B="$build" | sed -n '/^printf/,$p')
for isa in scalar avx2 avxvnni avx512 neon i8mm; do
    "$cli" generate --gguf $model --prompt a --max-tokens 1 --isa $isa >"$t/out" 2>"$t/err" || continue
    sh -c "$run_command --isa $isa" >"$t/out" 2>"$t/err"
    verdict "make run, $isa: the text, after its prompt" cmp "$t/out" tests/expected_run.txt
    verdict "make run, $isa: one line of figures" [ "$(grep -c '^open .* decode 89 tokens' "$t/err")" -eq "$(wc -l <"$t/err")" ]
done
for n in 0 -1; do
    expect 0 "generate -n $n" generate $model a -n $n --ctx 40 --temp 0
    verdict "generate -n $n fills the context" grep -q 'decode 39 tokens .* stopped: context full' "$t/err"
done
# the same prompt in other words
set -- -n 30 --temperature 0
for words in "-m $model -f $t/prompt --raw" "$model --raw" "$model --raw -f -" "--model=$model --raw --prompt-file=$t/prompt -t 1 -c 300 -b 3 -s 7"; do
    input=$t/prompt expect 0 "generate $words" generate $words "$@"
    verdict "generate $words: the golden text" cmp "$t/out" tests/expected_generate.txt
done
input=$t/prompt expect 0 "generate MODEL PROMPT" generate $model "$(cat "$t/prompt")" "$@"
verdict "generate MODEL PROMPT: the golden text" cmp "$t/out" tests/expected_generate.txt
printf '%s\n' "$(cat "$t/prompt")" >"$t/prompt-line"
input=$t/prompt-line expect 0 "generate from a pipe" generate $model "$@"
verdict "generate from a pipe: its last newline is no text" cmp "$t/out" tests/expected_generate.txt
# without a seed: another text each time, again with the seed that was printed
expect 0 "no seed" generate $model "$(cat "$t/prompt")" -n 30
cp "$t/out" "$t/unseeded"
seed=$(sed -n 's/^open .*, seed \([0-9]*\), stopped: .*/\1/p' "$t/err")
verdict "no seed: it is printed" [ -n "$seed" ]
expect 0 "that seed" generate $model "$(cat "$t/prompt")" -n 30 --seed "$seed" --top-p 0.95 --min-p 0.05 --temp 0.8
verdict "that seed and the defaults: the same text" cmp "$t/out" "$t/unseeded"
verdict "that seed: it is not printed" sh -c "! grep -q 'seed' '$t/err'"
expect 0 "another seed" generate $model "$(cat "$t/prompt")" -n 30
verdict "another seed: another text" sh -c "! cmp -s '$t/out' '$t/unseeded'"
expect 0 "penalties" generate $model "$(cat "$t/prompt")" "$@" --frequency-penalty 2 --presence-penalty 1 --repeat-last-n 8
verdict "penalties: another text" sh -c "! cmp -s '$t/out' tests/expected_generate.txt"
# the ids of the golden text come further below: 267 is its first, 261 its second
expect 0 "stop" generate $model "$(cat "$t/prompt")" "$@" --stop frobnicate --stop MARCIUS
sed '/MARCIUS/,$d' tests/expected_generate.txt >"$t/want"
verdict "stop: the text before it" cmp "$t/out" "$t/want"
verdict "stop: why" grep -q 'stopped: stop text' "$t/err"
for words in "--dry-multiplier 0.8" "--dry-multiplier 2 --dry-base 1.5 --dry-allowed-length 1 --dry-penalty-last-n 20 --dry-sequence-breaker x" \
    "--repeat-penalty 1.2 --repeat-last-n 400" "--xtc-probability 1 --xtc-threshold 0.05 --temp 1 -s 1" "--mirostat 1 -s 1 --temp 1" \
    "--mirostat 2 --mirostat-ent 2 --mirostat-lr 0.5 --temp 1 -s 1"; do
    expect 0 "$words" generate $model "$(cat "$t/prompt")" "$@" $words
    cp "$t/out" "$t/first"
    verdict "$words: another text" sh -c "! cmp -s '$t/out' tests/expected_generate.txt"
    expect 0 "$words again" generate $model "$(cat "$t/prompt")" "$@" $words
    verdict "$words: the same text again" cmp "$t/out" "$t/first"
done
printf '%s\n' '# a name' 'root ::= [A-Z] [a-z]{2,8} "."' >"$t/name.gbnf"
expect 0 "grammar" generate $model "$(cat "$t/prompt")" --temp 0 --grammar "$t/name.gbnf"
verdict "grammar: the text" grep -qxE '[A-Z][a-z]{2,8}\.' "$t/out"
expect 0 "JSON schema" generate $model "$(cat "$t/prompt")" --temp 0 --json-schema '{"enum": ["yes", "no"]}'
verdict "JSON schema: the text" grep -qxE '"(yes|no)"' "$t/out"
expect 1 "a grammar with an error" generate $model a --json-schema '{"type": "strin"}' && says "a grammar with an error" "#/type"
expect 2 "two grammars" generate $model a --grammar "$t/name.gbnf" --json-schema '{}' && says "two grammars" "not both"
expect 0 "no drafts" generate $model "the king, the queen, the king, the queen, the king," -n 40 --temp 0 && cp "$t/out" "$t/plain"
for drafts in ngram examples/shakespeare-5m.gguf; do
    expect 0 "drafts: $drafts" generate $model "the king, the queen, the king, the queen, the king," -n 40 --temp 0 --draft $drafts --draft-max 5
    verdict "drafts: $drafts: the same text" cmp -s "$t/out" "$t/plain"
    verdict "drafts: $drafts: some are right" grep -q 'drafts [1-9][0-9]* of [0-9]* right' "$t/err"
done
mtp=tests/family/qwen35-mtp.gguf
expect 0 "no drafts of an MTP head" generate $mtp ABC -n 30 --temp 0 && cp "$t/out" "$t/plain"
expect 0 "drafts: mtp" generate $mtp ABC -n 30 --temp 0 --draft mtp --draft-max 2
verdict "drafts: mtp: the same text" cmp -s "$t/out" "$t/plain"
verdict "drafts: mtp: some" grep -q 'drafts [0-9]* of [1-9][0-9]* right' "$t/err"
expect 1 "no MTP head" generate $model a --draft mtp && says "no MTP head" "MTP head"
expect 1 "a draft model with other tokens" generate $model a --draft tests/family/gemma4.gguf && says "a draft model with other tokens" "64 tokens"
expect 0 "logit bias" generate $model "$(cat "$t/prompt")" -n 1 --temp 0 --logit-bias 267-inf --logit-bias 261+1000
verdict "logit bias: the token that has it" [ "$(cat "$t/out")" = "$(echo '[261]' | "$cli" tokenize $model --decode)" ]
expect 0 "context full" generate --gguf $model --prompt-file "$t/prompt" --ctx 20 --max-tokens 30
verdict "context full is said" grep -q 'stopped: context full' "$t/err"
expect 0 "echo" generate --gguf $model --prompt-file "$t/prompt" --raw --max-tokens 30 --temp 0 --echo
{ cat "$t/prompt" tests/expected_generate.txt; echo; } >"$t/want"
verdict "echo: the prompt, the text, a newline" cmp "$t/out" "$t/want"
for seed in 1 1 2; do
    expect 0 "seed $seed" generate --gguf $model --prompt-file "$t/prompt" --temp 1 --top-k 40 --top-p 0.95 \
        --min-p 0.02 --seed $seed --max-tokens 32
    cat "$t/out" >>"$t/seed-$seed"
done
n=$(wc -c <"$t/seed-1")
head -c $((n / 2)) "$t/seed-1" >"$t/first" && tail -c $((n / 2)) "$t/seed-1" >"$t/second"
verdict "the same seed gives the same text" cmp "$t/first" "$t/second"
verdict "another seed gives another text" sh -c "! cmp -s '$t/first' '$t/seed-2'"

expect 0 "logits at once" logits --gguf $model --tokens $prompt_ids --out "$t/once.f32" --greedy 30
verdict "logits: golden greedy ids on stdout" [ "$(cat "$t/out")" = "[$greedy_ids]" ]
expect 0 "logits by steps" logits --gguf $model --tokens "[$prompt_ids]" --out "$t/step.f32" --step
verdict "logits: no ids without --greedy" [ ! -s "$t/out" ]
verdict "logits: 8 rows of 1024" [ "$(wc -c <"$t/once.f32")" -eq 32768 ]
ids=1022
while [ ${#ids} -lt 400 ]; do ids=$ids,40,459; done
expect 0 "logits of a long prompt" logits --gguf $model --tokens $ids --out "$t/long.f32" --batch 32
n=$(printf '%s' "$ids" | tr ',' '\n' | grep -c .)
verdict "logits: a row for each of $n" [ "$(wc -c <"$t/long.f32")" -eq $((n * 4096)) ]
if have python3; then
    # Only the order of float32 additions differs: sums of 768 terms of at most 20 agree within 1e-3.
    cat >"$t/compare.py" <<'PY'
import array, sys
a, b = array.array('f'), array.array('f')
a.frombytes(open(sys.argv[1], 'rb').read()); b.frombytes(open(sys.argv[2], 'rb').read())
d = max(abs(x - y) for x, y in zip(a, b))
sys.exit(len(a) != len(b) or not d < 1e-3 or max(a) == min(a))
PY
    verdict "logits: by steps as at once" python3 "$t/compare.py" "$t/once.f32" "$t/step.f32"
    expect 0 "logits of a long prompt by steps" logits --gguf $model --tokens $ids --out "$t/long-step.f32" --step
    verdict "logits: pieces in order" python3 "$t/compare.py" "$t/long.f32" "$t/long-step.f32"
else
    skip "logits by steps as at once" "no python3"
fi

{
    printf '%s' '{% for m in messages %}{% if m.role == "system" %}{{ m.content }}{{ "\n\n" }}{% elif m.role == "user" %}'
    printf '%s' 'User: {{ m.content }}{{ "\n" }}{% else %}Assistant: {{ m.content }}{{ "\n" }}{% endif %}{% endfor %}Assistant:'
} >"$t/plain.jinja"
printf 'Good night\n/reset\nGood night\n/quit\nnot read\n' >"$t/talk"
input=$t/talk expect 0 "chat" chat --gguf $model --jinja "$t/plain.jinja" --max-tokens 12 --ctx 100 --stats --temp 0
n=$(wc -c <"$t/out")
head -c $((n / 2)) "$t/out" >"$t/first" && tail -c $((n / 2)) "$t/out" >"$t/second"
verdict "chat answers" [ "$n" -gt 8 ]
verdict "chat: after /reset the same answer" cmp "$t/first" "$t/second"
verdict "chat: what the session holds is not evaluated again" [ "$(grep -c 'prefill 1 tokens' "$t/err")" -eq 1 ]
printf 'Good night\nGood night\n' >"$t/talk"
input=$t/talk expect 0 "chat goes on" run $model --jinja "$t/plain.jinja" --max-tokens 12 --ctx 100
verdict "chat: no escape codes" sh -c "! cat '$t/out' '$t/err' | grep -q '$esc'"
verdict "chat: figures on request only" sh -c "! grep -q '^open' '$t/err'"
# /regen and /load give the messages of the first turn again, so that the answer is the same
{
    printf '/system You are \303\274ber\nGood night\n/save %s\n/regen\n' "$t/saved.json"
    printf '/undo\n/clear\n/system\n/load %s\n/regen\n/save %s\n' "$t/saved.json" "$t/again.json"
} >"$t/talk"
input=$t/talk expect 0 "chat commands" chat $model --jinja "$t/plain.jinja" -n 12 -c 200 --temp 0
n=$(($(wc -c <"$t/out") / 3))
head -c $n "$t/out" >"$t/first"
{ cat "$t/first" "$t/first" "$t/first"; } >"$t/want"
verdict "chat: three times the same answer" [ $n -gt 2 ] && verdict "chat: the same answer" cmp "$t/out" "$t/want"
verdict "chat: /load and /save" cmp "$t/saved.json" "$t/again.json"
verdict "chat: /save as JSON" grep -q '^\[{"role": "system", "content": "You are \\u00fcber"},$' "$t/saved.json"
# hostile files: one line that says where, and the conversation stays
printf '%s' '[{"role": "user", "content": "\ud83d\ude00 \u00e9\n\u0000 \ud800x"}]' >"$t/escapes.json"
printf '/load %s\n/save %s\n' "$t/escapes.json" "$t/again.json" >"$t/talk"
input=$t/talk expect 0 "chat: escapes" chat $model --jinja "$t/plain.jinja"
verdict "chat: escapes" grep -qxF '[{"role": "user", "content": "\ud83d\ude00 \u00e9\u000a  \ufffdx"}]' "$t/again.json"
n=0
for text in '' '{' '[' '[{}]' '[1]' '[{"content": ""}]' '[{"role": "user", "content": 1}]' '[{"role": "a", "role": "b"}]' '[{"role": "user", "x": }]' \
    '[{"role": "user", "x": [}]' '[{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]' '[{"role": "user", "x": @}]' \
    '[{"role": "user", "content": "' '[{"role": "user", "content": "\x"}]' '[{"role": "user", "content": "\u12"}]' \
    '[{"role": "user", "content": ""}' '[{"role": "user", "content": ""}] x' '[{"role" "user"}]' '[{"": "user"}]' '[,]'; do
    n=$((n + 1))
    printf '%s' "$text" >"$t/bad$n.json"
    printf '/load %s\n' "$t/bad$n.json" >"$t/talk"
    input=$t/talk expect 1 "chat: /load '$text'" chat $model --jinja "$t/plain.jinja" && says "chat: /load '$text'" "bad$n.json: byte "
done
for line in /frobnicate /save "/undo 1"; do
    echo "$line" >"$t/talk"
    input=$t/talk expect 2 "chat: $line" chat $model --jinja "$t/plain.jinja" && says "chat: $line" "${line%% *}"
done
echo /frobnicate >"$t/talk"
input=$t/talk expect 2 "chat: unknown command" chat $model --jinja "$t/plain.jinja" && says "chat: unknown command" "/help /bye /system"
for line in /undo /regen "/load $t/missing" "/save $t/missing/x"; do
    echo "$line" >"$t/talk"
    input=$t/talk expect 1 "chat: $line" chat $model --jinja "$t/plain.jinja" && says "chat: $line" "${line#* }"
done
expect 1 "chat without a template" chat $model && says "chat without a template" "no chat template: --jinja FILE"
# a tool's round trip: each result belongs to the next call without one
printf '%s' '[{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": null, "reasoning_content": "Hm", "x": [{"y": "]"}],
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "rain", "arguments": {"city": "Ulm"}}},
    {"name": "snow", "arguments": "{}"}]}]' >"$t/calls.json"
printf '%s' '{% for m in messages %}{{ m.role }}: {{ m.content }}{{ "\n" }}{% endfor %}' >"$t/roles.jinja"
printf '/load %s\n/result No\n/result Yes\n/save %s\n' "$t/calls.json" "$t/results.json" >"$t/talk"
input=$t/talk expect 0 "chat: results of tools" chat $model --jinja "$t/roles.jinja" --temp 0 -n 3
head -n 4 "$t/results.json" >"$t/got"
cat >"$t/want" <<'JSON'
[{"role": "user", "content": "Rain?"},
 {"role": "assistant", "reasoning_content": "Hm", "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "rain", "arguments": "{\"city\": \"Ulm\"}"}}, {"type": "function", "function": {"name": "snow", "arguments": "{}"}}]},
 {"role": "tool", "content": "No", "name": "rain", "tool_call_id": "c1"},
 {"role": "tool", "content": "Yes", "name": "snow"},
JSON
verdict "chat: results of tools" cmp "$t/got" "$t/want"
verdict "chat: then it answers" grep -q '^ {"role": "assistant", "content": "..*"}\]$' "$t/results.json"
for line in "/result x"; do
    echo "$line" >"$t/talk"
    input=$t/talk expect 1 "chat: $line" chat $model --jinja "$t/roles.jinja" && says "chat: $line" "${line%% *}"
done
expect 1 "tools that are not there" chat $model --jinja "$t/roles.jinja" --tools "$t/missing" && says "tools that are not there" missing
echo '{"x": ' >"$t/tools.json"
echo Hello >"$t/talk"
input=$t/talk expect 1 "tools that are no JSON" chat $model --jinja "$t/roles.jinja" --tools "$t/tools.json"
# what the prompt has opened is a thought until the model ends it: no part of the result
printf '%s' '{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}' >"$t/think.jinja"
expect 0 "a thought" generate $model "Good night" --jinja "$t/think.jinja" -n 8 --temp 0
verdict "a thought is no answer" [ ! -s "$t/out" ]
expect 0 "no thought" generate $model "Good night" --jinja "$t/think.jinja" -n 8 --temp 0 --think off
verdict "no thought: an answer" [ -s "$t/out" ]
expect 2 "think" generate $model a --think maybe && says "think" "on|off|hide"
# a context of 40 tokens is soon full: the oldest messages are left out
{ for i in 1 2 3 4 5 6; do echo "Good night, good night number $i"; done; echo /stats; echo Last; } >"$t/talk"
input=$t/talk expect 0 "chat: a full context" chat $model --jinja "$t/roles.jinja" --temp 0 -n 8 -c 40
verdict "chat: a full context: it goes on" [ "$(grep -c 'stopped: ' "$t/err")" -eq 1 ]
verdict "chat: a full context: what is left out is said" grep -q 'the oldest [0-9]* messages are left out' "$t/err"
printf '"""/bye\n"""\n/etc/hosts\n/bye\nnot read\n' >"$t/talk"
input=$t/talk expect 0 "chat: no commands" chat $model --jinja "$t/plain.jinja" -n 1 -c 200
verdict "chat: no commands, but messages" [ "$(wc -l <"$t/out")" -ge 2 ]

# a model that thinks, speaks and calls a tool, and answers when it has the result
if have python3; then
    cat >"$t/parrot.jinja" <<'JINJA'
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if messages[-1].role == 'tool' or not (enable_thinking | default(true)) %}<B>{% else %}<A>{% endif %}{#- <think></think> -#}
JINJA
    python3 tests/make_parrot.py "$t/parrot.jinja" "$t/parrot.gguf"
    expect 0 "parrot" generate "$t/parrot.gguf" "Does it rain?"
    cp "$t/out" "$t/said"
    printf 'I look.\n{"name": "rain", "arguments": {"city": "Ulm"}}\n' >"$t/want"
    verdict "parrot: answer and call, no thought" cmp "$t/said" "$t/want"
    verdict "parrot: it names temperature 0, so that no seed is drawn" sh -c "! grep -q seed '$t/err'"
    verdict "parrot: why it stopped" grep -q 'stopped: tool call$' "$t/err"
    expect 0 "parrot, --think off" generate "$t/parrot.gguf" "Does it rain?" --think off
    verdict "parrot, --think off: no thought" [ "$(cat "$t/out")" = "It rains." ]
    expect 0 "parrot, --template-args" generate "$t/parrot.gguf" "Does it rain?" --template-args '{"enable_thinking": false}'
    verdict "parrot, --template-args: no thought" [ "$(cat "$t/out")" = "It rains." ]
    expect 1 "parrot, --template-args that are no JSON" generate "$t/parrot.gguf" "Does it rain?" --template-args '{'
    printf 'Does it rain?\n/result Yes\n/save %s\n' "$t/saved.json" >"$t/talk"
    input=$t/talk expect 0 "parrot, chat" chat "$t/parrot.gguf" --stats
    { cat "$t/said"; echo "It rains."; } >"$t/want"
    verdict "parrot, chat: after the result it answers" cmp "$t/out" "$t/want"
    cat >"$t/want" <<'JSON'
[{"role": "user", "content": "Does it rain?"},
 {"role": "assistant", "content": "I look.", "reasoning_content": "Hm,\u000arain?", "tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": "{\"city\": \"Ulm\"}"}}]},
 {"role": "tool", "content": "Yes", "name": "rain"},
 {"role": "assistant", "content": "It rains."}]
JSON
    verdict "parrot, chat: what is saved" cmp "$t/saved.json" "$t/want"
fi

# on a terminal: (what to wait for, what to type then)..., the exit status, what is seen, what is not
if have python3; then
    cat >"$t/terminal.py" <<'PY'
import os, pty, sys, termios, time
edits = True
# The line editor prints its prompt before it takes the terminal: what is typed in between is echoed twice, at best.
def wait_for_editor(fd, environment):
    global edits
    end = time.time() + 2
    while edits and 'TERM' not in environment and termios.tcgetattr(fd)[3] & termios.ICANON:
        edits = time.time() < end # else it was built without
        time.sleep(0.01)
def talk(arguments, steps, status, seen=(), unseen=(), **environment):
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({'TERM': 'xterm'}, **environment)
        os.execv(sys.argv[1], [sys.argv[1], chat] + arguments)
    out, start = b'', 0
    for step in list(steps) + [(None, b'')]:
        while step[0] is None or step[0] not in out[start:]:
            try: data = os.read(fd, 65536)
            except OSError: data = b''
            if not data: break
            out += data
            print(repr(data), flush=True)
        if step[0]: start = out.index(step[0], start) + len(step[0])
        if step[0] in (b'> ', b'. '): wait_for_editor(fd, environment)
        if step[1]: os.write(fd, step[1])
    code = os.waitpid(pid, 0)[1]
    assert code == status << 8, (code, out)
    for text in seen: assert text in out, (text, out)
    for text in unseen: assert text not in out, (text, out)
chat, model, parrot, jinja = sys.argv[2:6]
plain = [model, '--jinja', jinja]
again = b'Ctrl-C again or /bye leaves'
talk(plain + ['-n', '4', '--temp', '0'], [(b'> ', b'Hello\n'), (b'> ', b'/frobnicate\n'), (b'> ', b'"""a\n'), (b'. ', b'b"""\n'), (b'> ', b'/bye\n')],
     0, [b'/help lists commands', b'/frobnicate is no command; there are /help /bye'], [b'open '])
# an answer of many tokens is stopped, the chat goes on; twice ends it
many = plain + ['-c', '65536', '--temp', '0', '--logit-bias', '267+90']
talk(many, [(b'> ', b'Hello\n'), (b' the the the', b'\3'), (again, b''), (b'> ', b'/stats\n'), (b'> ', b'/bye\n')], 0, [b'statistics are on'])
talk(many, [(b'> ', b'Hello\n'), (b' the the the', b'\3'), (again, b''), (b'> ', b'\3')], 130)
# thoughts are dimmed, or folded into one line
ask = [(b'> ', b'Rain?\n'), (b'> ', b'/bye\n')]
talk(['-m', parrot], ask, 0, [b'\033[2mHm,\r\nrain?\033[0m\r\n\r\nI look.\r\n{"name": "rain"'])
talk(['-m', parrot, '--think', 'hide'], ask[:1] + [(b'> ', b'/think\n')] + ask[1:], 0,
     [b'(thinking ... 0', b's)\r\n\r\nI look.', b'/think: want'], [b'Hm', b'\033[2m'])
for environment in {'NO_COLOR': '1'}, {'TERM': 'dumb'}:
    talk(plain + ['-n', '4'], [(b'> ', b'/bye\n')], 0, [], [b'\033[1', b'\033[2'], **environment)
PY
    if TERM=xterm timeout 60 python3 "$t/terminal.py" "$cli" chat $model "$t/parrot.gguf" "$t/plain.jinja" >"$t/terminal.log" 2>&1; then pass
    else bad "chat on a terminal"; tail -n 5 "$t/terminal.log"; fi
else
    skip "chat on a terminal" "no python3"
fi

# ---- tokens ----

hex=524f4d454f3a0a57686174206c69676874206973207468697320746861742062726561
hex=${hex}6b732075706f6e20746865206e696768743f0a0a4a554c4945543a0a
printf '%s\n\n' $hex >"$t/hex"
input=$t/hex expect 0 "tokenize --hex" tokenize --gguf $model --hex --bos 1 --special 0
verdict "tokenize: golden ids" [ "$(head -1 "$t/out")" = \
    "[1022,846,268,477,364,355,330,370,327,770,584,82,605,267,869,367,996,268]" ]
verdict "tokenize: an empty line" [ "$(sed -n 2p "$t/out")" = "[1022]" ]
verdict "tokenize: a line each" [ "$(wc -l <"$t/out")" -eq 2 ]
cp "$t/out" "$t/ids"
input=$t/ids expect 0 "tokenize --decode --hex" tokenize --decode --hex --gguf $model
verdict "decode: the text again" [ "$(head -1 "$t/out")" = $hex ]
{
    printf 'Friends, Romans, countrymen, lend me your ears;\n'
    printf '\303\274ber \377\376 \360\237\230\200 <eos>  x\n\nlast'
} >"$t/text"
for bos in 0 1; do
    input=$t/text expect 0 "tokenize, bos $bos" tokenize --gguf $model --bos $bos
    cp "$t/out" "$t/ids"
    input=$t/ids expect 0 "decode, bos $bos" tokenize --decode --gguf $model
    sed 1p -n "$t/text" >"$t/want"; sed 1p -n "$t/out" >"$t/got"
    verdict "round trip of ASCII, bos $bos" cmp "$t/want" "$t/got"
    verdict "round trip of the last line, bos $bos" [ "$(tail -1 "$t/out")" = last ]
done
for line in x '[1' '[1,]' '1 2' '[1]]' '[99999]' '[-1]'; do
    printf '%s\n' "$line" >"$t/ids"
    input=$t/ids expect 1 "decode '$line'" tokenize --decode --gguf $model
done
for line in 4 4g 0x44; do
    printf '%s\n' "$line" >"$t/hex"
    input=$t/hex expect 1 "hex '$line'" tokenize --hex --gguf $model
done
: >"$t/hex"
input=$t/hex expect 1 "unknown pre-tokenizer" tokenize --gguf $model --pre frobnicate && says pre frobnicate

# ---- inspect, plan, check, dequant, bench ----

expect 0 "inspect" inspect $model
verdict "inspect: metadata" grep -q '^general.architecture  string  "llama"$' "$t/out"
verdict "inspect: long arrays are cut" grep -q '^tokenizer.ggml.tokens  string\[1024\]  \[.*, \.\.\.\]$' "$t/out"
offset=$(sed -n 's/^blk.0.ffn_norm.weight  f32  ne={256}  1024 bytes in file 0 at \([0-9]*\)$/\1/p' "$t/out")
verdict "inspect: tensors" [ -n "$offset" ]
# one key each with hostile bytes, NaN, 2^64 - 1 and -inf in an array
{
    printf 'GGUF\003\000\000\000\000\000\000\000\000\000\000\000\004\000\000\000\000\000\000\000'
    printf '\007\000\000\000\000\000\000\000a.bytes\010\000\000\000\015\000\000\000\000\000\000\000'
    printf '\377\000"\\\033[31m\n\303\274\200'
    printf '\005\000\000\000\000\000\000\000a.nan\006\000\000\000\000\000\300\177'
    printf '\005\000\000\000\000\000\000\000a.big\012\000\000\000\377\377\377\377\377\377\377\377'
    printf '\005\000\000\000\000\000\000\000a.inf\011\000\000\000'
    printf '\006\000\000\000\001\000\000\000\000\000\000\000\000\000\200\377'
} >"$t/odd.gguf"
expect 0 "inspect of odd values" inspect "$t/odd.gguf"
verdict "inspect escapes" sh -c "! grep -q '$esc' '$t/out'"
for f in $model "$t/odd.gguf"; do
    expect 0 "inspect --json ${f##*/}" inspect "$f" --json
    if have python3; then
        cat >"$t/inspect.py" <<'PY'
import json, sys
def refuse(x): raise ValueError(x)
j = json.load(open(sys.argv[1], encoding='ascii'), parse_constant=refuse)
kv = {e['key']: e for e in j['metadata']}
if 'a.bytes' in kv:
    assert kv['a.bytes']['value'] == '\ufffd\0"\\\033[31m\n\u00fc\ufffd', kv['a.bytes']
    assert kv['a.big']['value'] == 2**64 - 1 and kv['a.nan']['value'] is None and kv['a.inf']['value'] == [None]
else:
    assert kv['llama.block_count']['value'] == 6 and kv['tokenizer.ggml.tokens']['count'] == 1024
    assert kv['tokenizer.ggml.add_bos_token']['value'] is True
    assert {t['name']: t['ne'] for t in j['tensors']}['token_embd.weight'] == [256, 1024]
    assert j['support']['runs'] is True and j['support']['reason'] is None and j['support']['weight_bytes'] > 0
PY
        verdict "inspect --json ${f##*/} is right" python3 "$t/inspect.py" "$t/out"
    else
        skip "inspect --json" "no python3"
    fi
done

# whether a file can be run, and if not, why
expect 0 "inspect a model" inspect $model --ctx 256
verdict "inspect: it runs" grep -q '^supported  *yes$' "$t/out"
verdict "inspect: tokenizer" grep -q '^pre_tokenizer  *llama-bpe$' "$t/out"
verdict "inspect: no template" grep -q '^template  *-$' "$t/out"
verdict "inspect: memory" grep -q '^kv_bytes  *786432$' "$t/out" # 6 layers, 256 tokens, 4 heads of 32, keys and values, f16
{
    printf 'GGUF\003\000\000\000\001\000\000\000\000\000\000\000\002\000\000\000\000\000\000\000'
    printf '\024\000\000\000\000\000\000\000general.architecture\010\000\000\000\005\000\000\000\000\000\000\000qwert'
    printf '\027\000\000\000\000\000\000\000tokenizer.chat_template\010\000\000\000\001\000\000\000\000\000\000\000?'
    printf '\001\000\000\000\000\000\000\000x\001\000\000\000\040\000\000\000\000\000\000\000\030\000\000\000'
    printf '\000\000\000\000\000\000\000\000'
    head -c 64 /dev/zero
} >"$t/unsupported.gguf"
expect 0 "inspect an unsupported file" inspect "$t/unsupported.gguf"
verdict "inspect: it does not run" grep -q '^supported  *no$' "$t/out"
verdict "inspect: why" grep -q "^reason  .*general.architecture .*'qwert' is not supported" "$t/out"
verdict "inspect: the architecture" grep -q '^architecture  *qwert$' "$t/out"
verdict "inspect: types" grep -q '^unsupported_types  *i8 (1)$' "$t/out"
verdict "inspect: a template" grep -q '^template  *jinja$' "$t/out"
verdict "inspect: no tokenizer" grep -q '^tokenizer_error  .*tokenizer.ggml.model is missing' "$t/out"

# ---- template ----

printf '%s\n' '{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{{ strftime_now(" %Y-%m-%d %H:%M") }};{% endfor %}' >"$t/a.jinja"
echo '{"messages": [{"role": "user", "content": "h\u00e9"}], "bos_token": "<s>"}' >"$t/a.json"
expect 0 "template" template --jinja "$t/a.jinja" --input "$t/a.json" --now 2026-11-22T12:34:56
verdict "template: the text" [ "$(cat "$t/out")" = "<s>user: H$(printf '\303\211') 2026-11-22 12:34;" ]
expect 2 "template: no input" template --jinja "$t/a.jinja" && says "template: no input" --input
expect 2 "template: nothing" template && says "template: nothing" --jinja
expect 2 "template: a bad time" template --jinja "$t/a.jinja" --input "$t/a.json" --now noon && says "template: a bad time" "want 2026-"
expect 1 "template: bad JSON" template --jinja "$t/a.jinja" --input "$t/a.jinja" && says "template: bad JSON" "byte 1: want"
echo '{{ raise_exception("not like this") }}' >"$t/b.jinja"
expect 1 "template: it raises" template --jinja "$t/b.jinja" --input "$t/a.json" && says "template: it raises" "line 1: not like this"
expect 0 "template of a model" template "$t/unsupported.gguf" && verdict "template of a model" [ "$(cat "$t/out")" = "?" ]
expect 0 "template of a model, run" template "$t/unsupported.gguf" --input "$t/a.json" && verdict "template of a model, run" [ "$(cat "$t/out")" = "?" ]
expect 1 "template of a model without one" template $model && says "template of a model without one" "chat_template"

# ---- embed ----

expect 0 "embed" embed --gguf $model --prompt "ROMEO: who is there"
verdict "embed: a vector of 256" [ "$(tr -cd , <"$t/out" | wc -c)" -eq 255 ]
cp "$t/out" "$t/mean"
expect 0 "embed --batch" embed --gguf $model --prompt "ROMEO: who is there" --batch 2
verdict "embed: whatever the batch size" cmp "$t/out" "$t/mean"
expect 0 "embed --pooling last" embed --gguf $model --prompt "ROMEO: who is there" --pooling last
verdict "embed: another pooling, another vector" sh -c "! cmp -s '$t/out' '$t/mean'"
expect 2 "embed --pooling" embed --gguf $model --prompt a --pooling sum && says "embed --pooling" sum
expect 0 "embed --normalize" embed --gguf $model --prompt "ROMEO: who is there" --normalize
verdict "embed: length 1" awk -F'[][, ]+' '{ for (i = 2; i < NF; i++) s += $i * $i; exit !(s > 0.9999 && s < 1.0001) }' "$t/out"
expect 1 "embed --rank" embed --gguf $model --prompt a --rank b && says "embed --rank" "no classifier"
expect 1 "embed nothing" embed --gguf $model --prompt "" --bos 0
expect 0 "embed: a reranker's text" embed --gguf tests/family/bert.gguf --prompt "ABC DEF"
verdict "embed: a reranker has two scores and no vector" [ "$(tr -cd , <"$t/out" | wc -c)" -eq 1 ]
cp "$t/out" "$t/scores"
expect 0 "embed --rank" embed --gguf tests/family/bert.gguf --prompt "ABC DEF" --rank ""
verdict "embed --rank: a pair without a query is a text" cmp "$t/out" "$t/scores"

expect 0 "plan" plan $model
verdict "plan: matrices" grep -q ' matmul .* blk.5.ffn_down.weight [a-zA-Z0-9_]* \[256,768\]' "$t/out"
verdict "plan: attention" grep -q ' attention .* heads 8 kv heads 4' "$t/out"
verdict "plan: totals" grep -q '^llama: 6 layers, n_embd 256, n_vocab 1024, 8 heads of 32, 4 kv heads' "$t/out"
# The bytes of all ops add up to those of a token, without the embedding's row: tied output counts that matrix already.
sum=$(sed -n '/ embed /d; s/^ *[0-9].*  \([0-9]*\) bytes$/\1/p' "$t/out" | awk '{s += $1} END {printf "%d", s}')
verdict "plan: bytes of the ops are those of a token" grep -q "a token reads $sum bytes" "$t/out"

expect 0 "check" check $model
verdict "check says ok" grep -q '^ok: ' "$t/out"
if [ -n "$offset" ]; then
    cp $model "$t/nan.gguf"
    printf '\000\000\300\177' | dd of="$t/nan.gguf" bs=1 seek=$((offset + 28)) conv=notrunc 2>/dev/null
    "$cli" check "$t/nan.gguf" >"$t/out" 2>"$t/err"
    verdict "check: NaN, exit 1" [ $? -eq 1 ]
    verdict "check names tensor and index" grep -q 'blk.0.ffn_norm.weight (f32): value 7 .* NaN' "$t/err"
    verdict "check: one line" [ "$(wc -l <"$t/err")" -eq 1 ]
fi

# q8_0: scale 0.5 as f16, then 1, -1, 127, -128 and zeros
{ printf '\000\070\001\377\177\200'; head -c 28 /dev/zero; } >"$t/block"
input=$t/block expect 0 "dequant" dequant --type Q8_0
want=' 3f000000 bf000000 427e0000 c2800000'
while [ ${#want} -lt 288 ]; do want="$want 00000000"; done
verdict "dequant: 0.5 -0.5 63.5 -64 0..." [ "$(od -An -v -tx4 -w128 "$t/out")" = "$want" ]
head -c 33 "$t/block" >"$t/part"
input=$t/part expect 1 "dequant: part of a block" dequant --type q8_0
expect 0 "dequant: nothing" dequant --type q4_K
expect 1 "dequant: a type that does not run" dequant --type q8_K

expect 0 "bench" bench --gguf $model -p 8 -n 4 -r 2 --peak 1M
verdict "bench: the columns" grep -q '^depth  prompt_tok_s  prompt_tflop_s  decode_tok_s  decode_ms  decode_bytes  ' "$t/out"
verdict "bench: a line" grep -q '^    0  *[0-9.]*[1-9][0-9.]*  *[0-9][0-9]*\.[0-9]*  *[0-9.]*[1-9][0-9.]*  *[0-9.]*[1-9]' "$t/out"
verdict "bench: the peak" grep -q '^peak_gb_s  *[0-9.]*[1-9][0-9.]*$' "$t/out"
expect 0 "bench -d" bench --gguf $model -p 0 -n 2 -r 1 -d 5,0,520 --peak 0
verdict "bench -d: a line for each" [ "$(grep -c '^ *[0-9][0-9]*  *-  *-  *[0-9]' "$t/out")" -eq 3 ]
verdict "bench -d: no peak" grep -q '^peak_gb_s  *not measured$' "$t/out"
says "bench -d: more than it was trained for" "above the 512 tokens"
expect 0 "bench on a group" bench --gguf $model -p 8 -n 2 -r 1 --peak 0 --device cpu,cpu
verdict "bench on a group: its name" grep -q "cpu,cpu" "$t/out"
for v in "" x 1, 1,x -1 16777217 "1 2" "[]"; do
    expect 2 "bench -d '$v'" bench --gguf $model -d "$v" && says "bench -d '$v'" "\"$v\""
done
for v in "" x G 1T 1.5G -1 20000000000G; do
    expect 2 "bench --budget '$v'" bench --gguf $model --budget "$v" && says "bench --budget '$v'" "\"$v\""
done
expect 0 "bench --parallel" bench --gguf $model --parallel 1,3 -n 2 -r 1 --device cpu
verdict "bench --parallel: a line for each" grep -q '^        3  *[0-9.]*[1-9][0-9.]*  *[0-9.]*[1-9][0-9.]*  *[0-9.]*[1-9]' "$t/out"
expect 0 "bench --parallel -d" bench --gguf $model --parallel 2 -d 300 -n 2 -r 2 --device cpu
expect 0 "bench --parallel -d 0" bench --gguf $model --parallel 2 -d 0 -n 2 -r 2 --device cpu
expect 2 "bench --parallel -d 0,1" bench --gguf $model --parallel 2 -d 0,1 && says "bench --parallel -d 0,1" "\"0,1\""
expect 1 "bench --parallel -d beyond --ctx" bench --gguf $model --parallel 2 -d 300 -n 4 --ctx 303 && says "bench --parallel -d beyond --ctx" "304 tokens"
for v in "" x 0 1, 1025; do
    expect 2 "bench --parallel '$v'" bench --gguf $model --parallel "$v" && says "bench --parallel '$v'" "\"$v\""
done
expect 0 "bench --draft" bench --gguf $model --draft 75 --draft-max 2 -n 8 -r 1 --device cpu
verdict "bench --draft: a line for each" test "$(grep -c '^ *75  *[1-2a].*  yes$' "$t/out")" = 3
expect 2 "bench --draft -d 0" bench --gguf $model --draft 75 -d 0 && says "bench --draft -d 0" "-d above 0"
expect 1 "bench --draft -d beyond --ctx" bench --gguf $model --draft 75 -d 300 -n 4 --ctx 303 && says "bench --draft -d beyond --ctx" "304 tokens"
expect 0 "bench --draft mtp" bench --gguf $mtp --draft 50,mtp --draft-max 1 -n 8 -r 1 --ctx 300 --device cpu
verdict "bench --draft mtp: lines of both" test "$(grep -c '^ *\(50\|mtp\)  *[1a].*  yes$' "$t/out")" = 4
expect 1 "bench --draft mtp, no head" bench --gguf $model --draft mtp && says "bench --draft mtp, no head" "no MTP head"
for v in x 101 -1 mtp,5 xmtp; do
    expect 2 "bench --draft '$v'" bench --gguf $model --draft "$v" && says "bench --draft '$v'" "\"$v\""
done
expect 1 "bench --parallel beyond --ctx" bench --gguf $model --parallel 2 -n 4 --ctx 259 && says "bench --parallel beyond --ctx" "260 tokens"
expect 2 "bench of nothing" bench --gguf $model -p 0 -n 0
expect 1 "bench beyond --ctx" bench --gguf $model -d 100 -p 8 -n 4 --ctx 111 --peak 0 && says "bench beyond --ctx" "112 tokens"
if have python3; then
    # by hand: 6 layers with 8 heads of 32 and 4 of keys and values, n_embd 256, feed forward 768, 1024 tokens
    cat >"$t/bench.py" <<'PY'
import json, sys
j = json.load(open(sys.argv[1]))
null, head_bytes = j['device'] == 'null', int(sys.argv[2])
def near(a, b, digit): return abs(a - b) <= 0.01 * abs(b) + digit
assert [r['depth'] for r in j['results']] == [0, 40], j
assert j['n_ctx'] == 60 and j['n_ctx_train'] == 512 and j['n_prompt'] == 16 and j['n_decode'] == 4
assert (j['peak_gb_s'] is None) == null
assert j['launch_configs'] == [] and j['launch_config'] is None # only GPUs have launch configs
for r in j['results']:
    seen = sum(range(r['depth'] + 17, r['depth'] + 21)) / 4
    assert r['decode_bytes'] == round(j['token_bytes'] + seen * 6 * 2 * 4 * head_bytes), r
    # all matrices of the layers for 16 tokens, the output matrix for the last one; attention: scores and values
    flop = 2 * (16 * 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768) + 256 * 1024)
    flop += 2 * 6 * 8 * (32 + 32) * sum(range(r['depth'] + 1, r['depth'] + 17))
    assert r['launches'] is None and r['submissions'] is None and 'expert_hits' not in r
    if null: continue
    assert near(r['prompt_tflop_s'], flop / 16 * r['prompt_tok_s'] / 1e12, 6e-5), (r, flop)
    assert near(r['decode_tok_s'] * r['decode_ms'], 1000, 0.1 * r['decode_ms']), r
    assert near(r['decode_gb_s'], r['decode_bytes'] / r['decode_ms'] / 1e6, 6e-4), r
    assert near(r['peak_percent'], 100 * r['decode_gb_s'] / j['peak_gb_s'], 0.2), r
PY
    for kv in "f16 64" "f32 128" "q8_0 34"; do
        expect 0 "bench --json ${kv% *}" bench --gguf $model -d 0,40 -p 16 -n 4 -r 1 --json --peak 16M --device cpu --kv "${kv% *}"
        verdict "bench --json ${kv% *} is right" python3 "$t/bench.py" "$t/out" "${kv#* }"
    done
    expect 0 "bench --json null" bench --gguf $model -d 0,40 -p 16 -n 4 -r 1 --json --device null
    verdict "bench --json null is right" python3 "$t/bench.py" "$t/out" 64
    expect 0 "bench --parallel --json" bench --gguf $model --parallel 2 -n 2 -r 1 --json --device cpu
    verdict "bench --parallel --json is right" python3 -c '
import json, sys
r, = json.load(open(sys.argv[1]))["results"]
assert r["sequences"] == 2 and abs(r["step_ms"] * r["sequence_tok_s"] / 1000 - 1) < 0.01, r
assert abs(r["all_tok_s"] / r["sequence_tok_s"] - 2) < 0.01, r' "$t/out"
    # 2 layers with 3 experts per token: 6 hits and misses per token
    expect 0 "bench of experts" bench tests/family/olmoe.gguf -p 4 -n 8 -r 2 --json --peak 0 --device cpu --budget 55k --expert-budget 30k
    verdict "bench of experts: the numbers" python3 -c '
import json, sys
r = json.load(open(sys.argv[1]))["results"][0]
assert abs(r["expert_hits"] + r["expert_misses"] - 6) < 0.02 and r["expert_misses"] > 0 and r["expert_mb"] > 0, r' "$t/out"
else
    skip "bench --json" "no python3"
fi
expect 0 "inspect --device" inspect $model --device cpu --ctx 256
verdict "inspect --device: workspaces" grep -q '^plan_bytes  *[1-9][0-9]*$' "$t/out"

# ---- output that cannot be written, Ctrl-C ----

if [ -e /dev/full ]; then
    expect 1 "logits to a full disk" logits --gguf $model --tokens 1,2 --out /dev/full
    for c in "generate --gguf $model --prompt a --max-tokens 4" "inspect $model" "plan $model" \
        "check $model" --help; do
        "$cli" $c >/dev/full 2>"$t/err"
        verdict "$c to a full disk: exit 1" [ $? -eq 1 ]
        verdict "$c to a full disk: one line" [ "$(wc -l <"$t/err")" -eq 1 ]
    done
else
    skip "full disk" "no /dev/full"
fi
"$cli" inspect $model >&- 2>"$t/err"
verdict "closed stdout: exit 1" [ $? -eq 1 ]
{
    while (trap '' PIPE; echo) 2>/dev/null; do sleep 0.1; done # until the pipe has no reader
    "$cli" generate --gguf $model --prompt a --max-tokens 4 2>"$t/err"
    echo $? >"$t/code"
} | :
verdict "closed pipe: ended by SIGPIPE" [ "$(cat "$t/code")" = 141 ]
verdict "closed pipe: not a word" [ ! -s "$t/err" ]

if have timeout && timeout --foreground 5 true 2>/dev/null; then
    interrupt="timeout --foreground --preserve-status -k 20 -s INT"
    for seconds in 3 15 60; do # a busy machine may not have written the first word yet
        $interrupt $seconds "$cli" generate --gguf $model --prompt-file "$t/prompt" --raw --max-tokens 60000 --ctx 65536 --temp 0 \
            >"$t/out" 2>"$t/err"
        code=$?
        [ ! -s "$t/out" ] || break
    done
    verdict "Ctrl-C: exit 130" [ $code -eq 130 ]
    n=$(wc -c <"$t/out") # a slow machine or build may have written little
    [ "$n" -lt "$(wc -c <tests/expected_generate.txt)" ] || n=$(wc -c <tests/expected_generate.txt)
    head -c "$n" tests/expected_generate.txt >"$t/want" && head -c "$n" "$t/out" >"$t/got"
    verdict "Ctrl-C: what there was is printed" [ "$n" -gt 0 ] && verdict "Ctrl-C: the text" cmp "$t/got" "$t/want"
    verdict "Ctrl-C: the timing line" grep -q '^open .*stopped: interrupted$' "$t/err"
    $interrupt 3 "$cli" bench --gguf $model -p 8 -n 60000 >"$t/out" 2>"$t/err"
    verdict "Ctrl-C of bench: exit 130" [ $? -eq 130 ]
    verdict "Ctrl-C of bench: one line" [ "$(wc -l <"$t/err")" -eq 1 ]
else
    skip "Ctrl-C" "no timeout"
fi

finish
