# mixed.py URL REQUESTS CLIENTS: requests of all kinds, drawn at random (the same ones each time), over connections that some clients
# keep and some break. Each answer has the status that its kind must have; a full queue (429) is asked again. Prints a line per failure,
# then how many there were of each kind.
import collections, http.client, json, random, socket, sys, threading, time

HOST, PORT = sys.argv[1].removeprefix('http://').split(':')
N, CLIENTS = int(sys.argv[2]), int(sys.argv[3])
TOOL = {'type': 'function', 'function': {'name': 'tell', 'parameters': {'type': 'object', 'properties': {'who': {'enum': ['Romeo', 'Juliet']}}, 'required': ['who']}}}
SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer', 'maximum': 9}, 'b': {'type': 'string', 'maxLength': 3}}, 'required': ['a', 'b'], 'additionalProperties': False}

def chat(r, **more):
    return '/v1/chat/completions', {'messages': [{'role': 'user', 'content': 'Speak of %d.' % r.randrange(50)}], 'max_tokens': r.randrange(1, 4), **more}
KINDS = {
    'chat': (200, lambda r: chat(r, top_k=r.choice([0, 40]), temperature=r.choice([0, 0.8]))),
    'stream': (200, lambda r: chat(r, stream=True, stream_options={'include_usage': True})),
    'several': (200, lambda r: chat(r, n=2, logprobs=True, top_logprobs=3, stop=['the'])),
    'penalties': (200, lambda r: chat(r, presence_penalty=1, repeat_penalty=1.1, dry_multiplier=0.8, logit_bias={'5': -3})),
    'schema': (200, lambda r: chat(r, max_tokens=12, response_format={'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': SCHEMA}})),
    'grammar': (200, lambda r: chat(r, grammar='root ::= [a-z]{%d,9}' % r.randrange(1, 5))),
    'tool': (200, lambda r: chat(r, max_tokens=24, tools=[TOOL], tool_choice='required', stream=r.random() < 0.5)),
    'text': (200, lambda r: ('/v1/completions', {'prompt': 'Who is it', 'max_tokens': 2, 'echo': r.random() < 0.5})),
    'responses': (200, lambda r: ('/v1/responses', {'input': 'Who?', 'max_output_tokens': 16, 'stream': r.random() < 0.5})),
    'messages': (200, lambda r: ('/v1/messages', {'model': 'x', 'max_tokens': 2, 'messages': [{'role': 'user', 'content': 'Who?'}], 'stream': r.random() < 0.5})),
    'tokenize': (200, lambda r: ('/tokenize', {'content': 'To be' * r.randrange(9)})),
    'models': (200, lambda r: ('/v1/models', None)),
    'metrics': (200, lambda r: ('/metrics', None)),
    'page': (200, lambda r: ('/', None)),
    'wrong type': (400, lambda r: chat(r, temperature='hot')),
    'wrong grammar': (400, lambda r: chat(r, grammar='root ::= (')),
    'wrong JSON': (400, lambda r: ('/v1/chat/completions', '{"messages": [' * r.randrange(1, 9))),
    'too long': (400, lambda r: ('/v1/completions', {'prompt': 'word ' * 2000, 'max_tokens': 1})),
    'nowhere': (404, lambda r: ('/v1/nothing', {})),
    'gone': (0, lambda r: chat(r, stream=True, max_tokens=40)), # the client leaves at once or after the first bytes
}
counts, lock, done = collections.Counter(), threading.Lock(), iter(range(N))

def leave(path, body, r):
    text = json.dumps(body).encode()
    with socket.create_connection((HOST, int(PORT)), 60) as s:
        s.sendall(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (path.encode(), len(text)))
        s.sendall(text[:r.choice([len(text) // 2, len(text)])])
        s.settimeout(0.2)
        try:
            if r.random() < 0.5: s.recv(64)
        except OSError: pass

def ask(c, path, body):
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    while True:
        c.request('POST' if text is not None else 'GET', path, text, {'Content-Type': 'application/json'})
        answer = c.getresponse()
        content = answer.read()
        if answer.status != 429: return answer.status, content
        time.sleep(0.05)

def client():
    c = http.client.HTTPConnection(HOST, int(PORT), timeout=120)
    while True:
        with lock: i = next(done, None)
        if i is None: return c.close()
        r = random.Random(i)
        kind = r.choice(list(KINDS))
        want, make = KINDS[kind]
        path, body = make(r)
        try:
            if want == 0: status, text = leave(path, body, r) or 0, b''
            else: status, text = ask(c, path, body)
            if r.random() < 0.1: c.close()
        except (OSError, http.client.HTTPException) as e: status, text = -1, repr(e).encode()
        with lock:
            counts[kind] += 1
            if status != want:
                counts['failed'] += 1
                print('%s: want %d, got %d: %s' % (kind, want, status, text[:200]))
        if status < 0: c.close()

threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
for t in threads: t.start()
for t in threads: t.join()
print(', '.join('%d %s' % (n, kind) for kind, n in sorted(counts.items()) if kind != 'failed'))
print('%d requests, %d failed' % (N, counts['failed']))
sys.exit(counts['failed'] > 0)
