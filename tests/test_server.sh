# test_server.sh BUILD [quick|slow]: the HTTP server. Quick: its HTTP and APIs, many clients, limits, JSON bodies of all kinds, the load
# program. Slow: the clients `openai` and `@anthropic-ai/sdk` from npm, the page in headless Chromium, 1,000 connections, leaks, data races.
. tests/rf_test.sh
slow="case_npm_clients case_page case_proxy case_long case_leaks case_races"

model=examples/shakespeare-5m.gguf
server=$build/rocmforge_server
libraries="-lmicrohttpd -ljansson -lm -pthread"

# need_server: leave the case as skipped without the server's libraries.
need_server() {
    [ -x "$server" ] && return
    echo "install libmicrohttpd-dev and libjansson-dev with 'apt-get install' (make deps), then make server"
    exit 77
}
# start MODEL [OPTION...]: start a server; its URL in $url, its number in $pid.
start() {
    : >"$dir/$name.server" # before it is read
    "$server" "$@" --port 0 --device cpu --threads 1 >"$dir/$name.server" 2>&1 &
    pid=$!
    trap 'kill $pids $pid 2>/dev/null || true' EXIT
    for _ in $(seq 100); do
        url=$(sed -n 's/.*: \(http:.*\)$/\1/p' "$dir/$name.server")
        [ -z "$url" ] || return 0
        sleep 0.1
    done
    cat "$dir/$name.server"
    return 1
}
name=$2 pids=

# a model that says what it is told
make_parrot() {
    need python3 python3
    parrot=$dir/parrot_$name.gguf
    python3 tests/make_parrot.py tests/server/parrot.jinja "$parrot"
}
case_http() {
    need_server
    make_parrot
    python3 tests/server/test_http.py "$server" $model "$parrot"
}
# one line of curl, as README.md has it
case_curl() {
    need_server
    need curl curl
    start $model
    curl -sSf "$url/v1/chat/completions" -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 8, "stream": true}' >"$dir/curl.out"
    grep -q '^data: \[DONE\]' "$dir/curl.out"
    [ "$(grep -c '"delta":{"content"' "$dir/curl.out")" -ge 4 ]
    curl -sS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{"messages": 1}' | grep -q '"param":"messages"'
}
case_command_line() {
    need_server
    "$server" --help | grep -q -- '--api-key'
    for wrong in '' '--port x model' '--no-such-option model' 'a b' "--host nowhere $model" "--tls-cert $model $model" \
        "--draft ngram --prefixes 2 $model"; do
        rc=0
        "$server" $wrong >"$dir/wrong" 2>&1 || rc=$?
        [ $rc -eq 2 ] || { echo "$wrong: exit status $rc"; cat "$dir/wrong"; return 1; }
    done
    grep -q -- '--prefixes 2 with --draft' "$dir/wrong"
    rc=0
    "$server" README.md >"$dir/wrong" 2>&1 || rc=$?
    [ $rc -eq 1 ] && grep -q 'README.md' "$dir/wrong"
}
case_load() {
    need_server
    cc -O1 -Wall -Wextra -Werror -o "$dir/load" tests/server/load.c -lm -pthread
    start $model --parallel 8
    "$dir/load" "$url" 4 12 50 8 >"$dir/load.out"
    cat "$dir/load.out"
    grep -q '12 requests, 0 failed' "$dir/load.out"
}
# bodies of all kinds, mutated: none may crash; with sanitizers in `make test-all` and under libFuzzer with `make fuzz-server`
case_bodies() {
    need_server
    cc -g -O1 -DROCMFORGE_IMPLEMENTATION_DONE -I. tests/server/fuzz_bodies.c "$build/rocmforge.a" -o "$dir/fuzz_bodies" $libraries
    "$dir/fuzz_bodies" 4000
}
case_long() {
    need_server
    make_parrot
    python3 tests/server/test_http.py "$server" $model "$parrot" long
}
case_npm_clients() {
    need_server
    need npm npm
    make_parrot
    mkdir -p "$dir/npm"
    cp tests/server/clients.mjs "$dir/npm/"
    echo '{"private": true}' >"$dir/npm/package.json"
    (cd "$dir/npm" && npm install --no-audit --no-fund --loglevel=error openai@7 @anthropic-ai/sdk@1) || { echo "no npm registry"; exit 77; }
    start $model
    pids=$pid first=$url name=$name.parrot
    start "$parrot"
    node "$dir/npm/clients.mjs" "$first" "$url"
    block js | sed "s,http://127.0.0.1:8080,$first," >"$dir/npm/readme.mjs"
    [ "$(node "$dir/npm/readme.mjs" | wc -c)" -gt 20 ]
}
# block LANGUAGE: what README.md has in it
block() { awk -v want="\`\`\`$1" '$0 == want { on = 1; next } /^```/ { on = 0 } on' README.md; }
# two servers behind nginx, as README.md has it: streams go through, and one that is gone is left out
case_proxy() {
    need_server
    need nginx nginx-light
    need curl curl
    start $model
    pids=$pid first=${url##*:} name=$name.second
    start $model
    port=$((20000 + $$ % 10000)) # below those that systems choose
    at=$(mkdir -p "$dir/nginx" && cd "$dir/nginx" && pwd)
    {
        echo "daemon off; error_log stderr; pid $at/pid; events {}"
        echo "http { access_log off; client_body_temp_path $at/b; proxy_temp_path $at/p; fastcgi_temp_path $at/f; uwsgi_temp_path $at/u; scgi_temp_path $at/s;"
        block nginx | sed "s/8080/$port/; s/8081/$first/; s/8082/${url##*:}/"
        echo "}"
    } >"$at/nginx.conf"
    nginx -p "$at" -c "$at/nginx.conf" 2>"$at/log" &
    pids="$pids $!"
    for _ in 1 2 3; do
        curl -sSf --retry 9 --retry-connrefused "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
            -d '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": true}' | grep -q '^data: \[DONE\]'
        kill $pid 2>/dev/null || true
    done
}
case_page() {
    need_server
    need chromedriver chromium-driver
    need chromium chromium
    make_parrot
    mkdir -p "$dir/page"
    python3 tests/server/test_page.py "$server" $model "$parrot" "$dir/page"
}
# 1,000 requests of all kinds, and bodies, with the server under sanitizers and the library as it is built: leaks of either are found when
# the server ends (the library's own sanitizer builds are test_sanitizers.sh's). `make leak-server`: LEAK_REQUESTS=10000, and the library
# under sanitizers, too
case_leaks() {
    need_server
    need python3 python3
    sanitize="-g1 -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=address,undefined"
    [ -z "$LEAK_REQUESTS" ] && library="-DROCMFORGE_IMPLEMENTATION_DONE $build/rocmforge.a" || library=-DROCMFORGE_NO_SIMD
    cc $sanitize -I. examples/rocmforge_server.c $library -o "$dir/server_asan" $libraries
    cc $sanitize -DROCMFORGE_IMPLEMENTATION_DONE -I. tests/server/fuzz_bodies.c "$build/rocmforge.a" -o "$dir/fuzz_asan" $libraries
    "$dir/fuzz_asan" 20000
    server=$dir/server_asan
    start $model --parallel 4 -c 256
    python3 tests/server/mixed.py "$url" "${LEAK_REQUESTS:-1000}" 8
    kill -TERM $pid
    wait $pid
}
# the server's threads under the thread sanitizer, the library as it is built: its HTTP and APIs, and many clients that come and end
case_races() {
    need_server
    make_parrot
    cc -g1 -O1 -fsanitize=thread -DROCMFORGE_IMPLEMENTATION_DONE -I. examples/rocmforge_server.c "$build/rocmforge.a" -o "$dir/server_tsan" $libraries
    cc -O1 -o "$dir/load_tsan" tests/server/load.c -lm -pthread
    TSAN_OPTIONS=halt_on_error=1 python3 tests/server/test_http.py "$dir/server_tsan" $model "$parrot"
    server=$dir/server_tsan
    start $model --parallel 8
    "$dir/load_tsan" "$url" 16 160 0 6 | tee "$dir/races.out"
    grep -q '160 requests, 0 failed' "$dir/races.out"
    kill -TERM $pid
    wait $pid
}

run_cases "$@"
