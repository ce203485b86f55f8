# test_zoo.sh BUILD: the small models, vocabularies and packed blocks of ../shared/zoo (or $ZOO) against llama.cpp's stored answers,
# judged by its check.py. Each file is one test: what this version supports must be right, the rest refused by name. With a
# DEVICE only the models, on that device, token by token too (which on the CPU is bit for bit the same); with a CLI by that one.
. tests/rf_test.sh

zoo=${ZOO:-../shared/zoo}
cli=${CLI:-$build/rocmforge_cli}
architectures='llama qwen2 qwen3 gemma2 gemma3 phi3 glm4 mistral3 smollm3 granite olmo2 command-r stablelm
    starcoder2 phi2 gptneox gpt2 falcon qwen3moe glm4moe granitemoe gpt-oss deepseek2'
# a choice between experts of nearly equal scores may tip with the rounding of a 16-bit cache
experts='qwen3moe glm4moe granitemoe gpt-oss'
types='f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k q2_k q3_k iq4_nl iq4_xs mxfp4 nvfp4 iq3_xxs iq3_s iq2_xxs iq2_xs
    iq2_s iq1_s iq1_m tq1_0 tq2_0 q1_0 q2_0'
vocabularies='gpt-2 gpt-neox refact llama-spm phi-3 falcon deepseek-coder bert-bge'
pre_tokenizers='default falcon llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe
    glm4 chatglm-bpe glm5 jais-2 minicpm5 qwen2 kormo f2llmv2 stablelm2 deepseek-r1-qwen hunyuan megrez
    solar-open grok-2 bailingmoe bailingmoe2 llada-moe qwen35 seed-coder laguna ufakzeka tekken gpt-4o llama4
    kanana2 talkie minimax-m2 granite-embed-multi-97m tiny_aya youtu kimi-k2 exaone-moe deepseek-v3
    hunyuan-dense joyai-llm afmoe deepseek-llm deepseek-coder smollm refact exaone starcoder mellum2 codeshell
    command-r minerva-7b gpt-2 phi-2 olmo exaone4 mellum granite-docling mpt jais trillion gigachat a.x-4.0
    modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe poro-chat bloom
    gpt3-finnish viking chameleon superbpe sarvam-moe gemma4 granite-embed-multi-311m mmbert'

[ -f "$zoo/check.py" ] || { skip zoo "zoo absent: no $zoo/check.py"; finish; }
for python in python3 /usr/bin/python3 none; do $python -c 'import numpy' 2>/dev/null && break; done
[ $python != none ] || { skip zoo "install python3-numpy with 'apt-get install python3-numpy' (make deps)"; finish; }
[ -x "$cli" ] || { fail zoo "no $cli"; finish; }

has() { case " $(echo $1) " in *" $2 "*) return 0 ;; esac; return 1; }
# check KIND COMMAND [OPTION]: check.py's lines in $dir/KIND
check() {
    $python "$zoo/check.py" "$1" --cmd "$cli $2" ${3-} >"$dir/$1" 2>"$dir/$1.err" ||
        fail "check.py $1" "$(tail -n 1 "$dir/$1.err")"
}
# refused NAME TEXT FILE ARGUMENTS...: the CLI fails with exit status 1 and names TEXT (an extended regular expression); FILE
# is a copy, $dir/refused.gguf, as its name would give the answer
refused() {
    name=$1 text=$2
    [ -z "$3" ] || cp -f "$3" "$dir/refused.gguf"
    shift 3
    "$cli" "$@" >"$dir/refused.out" 2>"$dir/refused.err" </dev/null
    rc=$?
    if [ $rc -eq 1 ] && grep -qiwE -- "$text" "$dir/refused.err"; then pass
    else fail "$name" "want it refused naming $text; exit status $rc, $(head -c 200 "$dir/refused.err")"; fi
}

# name, path, architecture, types: from the goldens
$python - "$zoo" >"$dir/models" <<'EOF'
import glob, json, os, sys
for f in sorted(glob.glob(sys.argv[1] + '/golden/*.json')):
    j = json.load(open(f))
    print(os.path.basename(f)[:-5], j['model'], j['arch'], ' '.join(j['tensor_types']).lower())
EOF
while read -r name path arch _; do has "$architectures" "$arch" && echo "${name%%-*}- $arch"; done <"$dir/models" | sort -u >"$dir/families"
# The families side by side: in $dir/KIND.FAMILY.job the options of each, its lines in .out, all lines of a kind in $dir/KIND
while read -r family arch; do
    kv=
    if has "$experts" "$arch"; then kv=' --kv f32'; fi
    echo "$kv" >"$dir/logits.$family.job"
    echo "$kv --batch 100" >"$dir/long.$family.job" # sliding windows then hold less than the prompt
    [ -z "${DEVICE-}" ] || echo "$kv --step" >"$dir/step.$family.job"
done <"$dir/families"
logits="$cli logits --gguf {model} --tokens {tokens} --out {out} --greedy {gen} --ctx {ctx}${DEVICE:+ --device $DEVICE}"
export python zoo logits dir
sh tests/in_parallel.sh '
    kind=${NAME%%.*}
    [ $kind != step ] || kind=logits
    $python "$zoo/check.py" $kind --cmd "$logits$(cat "$dir/$NAME.job")" --only "${NAME#*.}" >"$dir/$NAME.out" 2>"$dir/$NAME.err" ||
        echo "$?" >"$dir/$NAME.rc"' $(cd "$dir" && basename -s .job -- *.job)
for kind in logits long step; do cat "$dir/$kind".*.out >"$dir/$kind" 2>/dev/null; done
for rc in "$dir"/*.rc; do
    [ ! -f "$rc" ] || fail "check.py $(basename "$rc" .rc)" "$(tail -n 1 "${rc%.rc}.err")"
done

# ---- models: logits of every position, greedy text; 480-token prompts ----
while read -r name path arch file_types; do
    bad=
    for t in $file_types; do has "$types" "$t" || bad="$bad${bad:+|}$t"; done
    has "$architectures" "$arch" || bad="$arch"
    if [ -n "$bad" ]; then
        refused "$name" "$bad" "$zoo/$path" logits --gguf "$dir/refused.gguf" --tokens 1,2,3 --out "$dir/refused.f32"
        continue
    fi
    for kind in logits ${DEVICE:+step}; do
        line=$(grep "^$name " "$dir/$kind")
        case $line in
        "$name "*" A kl "*" bad 0 greedy "*" ok "*) pass ;;
        *) fail "$kind ${line:-$name: no verdict}" ;;
        esac
    done
    [ -f "$zoo/golden/long/$name.json" ] || continue
    line=$(grep "^$name " "$dir/long")
    case $line in
    "$name "*" A kl "*) pass ;;
    *) fail "long ${line:-$name: no verdict}" ;;
    esac
done <"$dir/models"
[ -z "${DEVICE-}" ] || finish

# ---- packed blocks ----
check dequant 'dequant --type {type}'
while read -r name verdict; do
    if has "$types" "$(echo "$name" | tr K k)"; then
        if [ "$verdict" = exact ]; then pass; else fail "dequant $name" "$verdict"; fi
    else refused "dequant $name" "$name" '' dequant --type "$name"
    fi
done <"$dir/dequant"

# ---- tokenizers: of the vocabularies, and the pre-tokenizers forced upon one ----
check tok 'tokenize --gguf {vocab} --hex --bos {bos} --special {special}'
grep ' equal$' "$dir/tok" >"$dir/tok.lines"
while read -r name mode equal _ all _; do
    if [ "$equal" = "$all" ]; then pass
    elif has "$vocabularies" "$name"; then fail "tok $name $mode" "$equal of $all equal"; grep -A 3 "^$name $mode" "$dir/tok" | tail -n 3
    else refused "tok $name $mode" "$name|${name%%-*}" "$zoo/vocab/$name.gguf" tokenize --gguf "$dir/refused.gguf" --hex
    fi
done <"$dir/tok.lines"

check pre 'tokenize --gguf {vocab} --hex --pre {pre} --bos {bos} --special {special}' --all
sed -n 's/^\(.*\) pre=\([^ ]*\) *\([0-9]*\) \/ \([0-9]*\) equal$/\1 \2 \3 \4/p' "$dir/pre" >"$dir/pre.lines"
while read -r vocab name equal all; do
    if [ "$equal" = "$all" ]; then pass
    elif has "$pre_tokenizers" "$name"; then fail "pre $vocab $name" "$equal of $all equal"
    else refused "pre $vocab $name" "$name" "$zoo/vocab/$vocab.gguf" tokenize --gguf "$dir/refused.gguf" --hex --pre "$name"
    fi
done <"$dir/pre.lines"
finish
