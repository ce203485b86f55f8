# test_http.py BINARY MODEL PARROT [long]: the server's HTTP and APIs, with nothing but Python's own modules. PARROT is a model that thinks,
# speaks and calls a tool (make_parrot.py). Prints one line per failure; the last line has the counts.
import base64, http.client, json, os, re, signal, socket, struct, subprocess, sys, threading, time

BINARY, MODEL, PARROT = sys.argv[1:4]
LONG = 'long' in sys.argv[4:]
passed = failed = 0

def check(ok, text):
    global passed, failed
    if ok: passed += 1
    else:
        failed += 1
        print('FAIL ' + text[:400])

class Server:
    def __init__(self, model, *options, port=0):
        self.process = subprocess.Popen([BINARY, model, '--port', str(port), '--device', 'cpu', '--threads', '1', *options], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline().rsplit(':', 1)[1])
    def __enter__(self): return self
    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        check(self.process.wait(60) == 0, 'exit status after SIGTERM: %s' % self.process.returncode)
    def connect(self, timeout=60):
        return socket.create_connection(('127.0.0.1', self.port), timeout)
    def raw(self, method, path, body=None, headers={}):
        c = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        c.request(method, path, data, {'Content-Type': 'application/json', **headers})
        r = c.getresponse()
        text = r.read()
        c.close()
        return r, text
    def post(self, path, body, **headers):
        r, text = self.raw('POST', path, body, headers)
        return r.status, json.loads(text)
    def get(self, path, **headers):
        r, text = self.raw('GET', path, None, headers)
        return r.status, text.decode()
    def events(self, path, body):
        r, text = self.raw('POST', path, body)
        check(r.status == 200 and r.getheader('Content-Type') == 'text/event-stream', '%s: %s %s' % (path, r.status, text))
        return [json.loads(e.split('data: ', 1)[1]) for e in text.decode().split('\n\n') if 'data: {' in e]
    def metric(self, name):
        return float(re.search(r'^rocmforge_%s (\S+)$' % name, self.get('/metrics')[1], re.M)[1])
    def wait(self, name, value):
        for _ in range(500):
            if self.metric(name) == value: return True
            time.sleep(0.02)
        return False

def say(text, **more): return {'messages': [{'role': 'user', 'content': text}], 'temperature': 0, **more}

def test_chat(s):
    status, whole = s.post('/v1/chat/completions', say('Where is Romeo?', max_tokens=20))
    text = whole['choices'][0]['message']['content']
    check(status == 200 and len(text) > 20 and whole['choices'][0]['finish_reason'] == 'length', 'chat: %s' % whole)
    check(whole['usage']['completion_tokens'] == 20 and whole['usage']['total_tokens'] == whole['usage']['prompt_tokens'] + 20, 'usage: %s' % whole['usage'])
    events = s.events('/v1/chat/completions', say('Where is Romeo?', max_tokens=20, stream=True, stream_options={'include_usage': True}))
    streamed = ''.join(e['choices'][0]['delta'].get('content') or '' for e in events if e['choices'])
    check(streamed == text, 'stream: %r is not %r' % (streamed, text))
    check(events[-1]['choices'] == [] and events[-1]['usage']['completion_tokens'] == 20, 'usage at the end: %s' % events[-1])
    check(events[-2]['choices'][0]['finish_reason'] == 'length', 'finish: %s' % events[-2])
    check(events[-1]['usage']['prompt_tokens_details']['cached_tokens'] > 10, 'the prompt is known the second time: %s' % events[-1])
    cold = s.post('/v1/chat/completions', say('Where is Romeo?', max_tokens=20, cache_prompt=False))[1]
    check(cold['usage']['prompt_tokens_details']['cached_tokens'] == 0 and cold['choices'][0]['message']['content'] == text, 'cache_prompt: %s' % cold)
    word = text.split()[2]
    stopped = s.post('/v1/chat/completions', say('Where is Romeo?', max_tokens=20, stop=[word]))[1]['choices'][0]
    check(stopped['finish_reason'] == 'stop' and stopped['message']['content'] == text[:text.index(word)], 'stop: %s' % stopped)
    parts = {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'Where is '}, {'type': 'text', 'text': 'Romeo?'}]}], 'temperature': 0, 'max_tokens': 20}
    check(s.post('/v1/chat/completions', parts)[1]['choices'][0]['message']['content'] == text, 'parts')
    two = s.post('/v1/chat/completions', say('Where?', n=2, max_tokens=12, temperature=1, seed=7))[1]
    again = s.post('/v1/chat/completions', say('Where?', n=2, max_tokens=12, temperature=1, seed=7))[1]
    texts = [c['message']['content'] for c in two['choices']]
    check(len(texts) == 2 and texts[0] != texts[1] and texts == [c['message']['content'] for c in again['choices']], 'n, seed: %s' % texts)
    lp = s.post('/v1/chat/completions', say('Where?', max_tokens=3, logprobs=True, top_logprobs=3))[1]['choices'][0]['logprobs']['content']
    check(len(lp) == 3 and all(len(t['top_logprobs']) == 3 and t['top_logprobs'][0]['logprob'] == t['logprob'] <= 0 and
          bytes(t['bytes']).decode() == t['token'] for t in lp), 'logprobs: %s' % lp)
    first = s.post('/tokenize', {'content': lp[0]['token']})[1]['tokens'][0]
    banned = s.post('/v1/chat/completions', say('Where?', max_tokens=1, logprobs=True, logit_bias={str(first): -100}))[1]
    check(banned['choices'][0]['logprobs']['content'][0]['token'] == lp[1 - 1]['top_logprobs'][1]['token'], 'logit_bias: %s' % banned)

def test_penalties(s):
    texts = [s.post('/v1/completions', {'prompt': 'the king, the king, the king, the', 'max_tokens': 24, 'temperature': 0, **more})[1]['choices'][0]['text']
             for more in ({}, {'frequency_penalty': 2}, {'presence_penalty': 2}, {'repeat_penalty': 1.5}, {'repeat_penalty': 1})]
    check(len(set(texts[:4])) >= 3 and texts[4] == texts[0], 'penalties: %s' % texts)

def test_completions(s):
    status, r = s.post('/v1/completions', {'prompt': ['ROMEO:', 'JULIET:'], 'max_tokens': 8, 'temperature': 0, 'logprobs': 2})
    check(status == 200 and len(r['choices']) == 2 and len(r['choices'][1]['logprobs']['tokens']) == 8, 'completions: %s' % r)
    ids = s.post('/tokenize', {'content': 'ROMEO:', 'add_special': True})[1]['tokens']
    other = s.post('/v1/completions', {'prompt': ids, 'max_tokens': 8, 'temperature': 0})[1]
    check(other['choices'][0]['text'] == r['choices'][0]['text'], 'token ids as a prompt')
    check(s.post('/detokenize', {'tokens': ids})[1]['content'].endswith('ROMEO:'), 'detokenize')
    events = s.events('/v1/completions', {'prompt': 'ROMEO:', 'max_tokens': 8, 'temperature': 0, 'stream': True})
    check(''.join(e['choices'][0]['text'] for e in events) == r['choices'][0]['text'], 'completions, streaming')
    echo = s.post('/v1/completions', {'prompt': 'ROMEO:', 'max_tokens': 8, 'temperature': 0, 'echo': True})[1]['choices'][0]['text']
    check(echo.strip() == ('ROMEO:' + r['choices'][0]['text']).strip(), 'echo: %r' % echo)

# A small model that may write white space writes nothing else: without line breaks it cannot.
NO_BREAKS = {'198': -100, '197': -100}
SCHEMA = {'type': 'object', 'properties': {'who': {'enum': ['Romeo', 'Juliet']}, 'n': {'type': 'integer', 'minimum': 0, 'maximum': 99}, 'ok': {'type': 'boolean'}},
          'required': ['who', 'n', 'ok'], 'additionalProperties': False}

def test_structure(s):
    form = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': SCHEMA}}
    for seed in range(3):
        r = s.post('/v1/chat/completions', say('Who?', response_format=form, max_tokens=300, temperature=1, seed=seed, logit_bias=NO_BREAKS))[1]['choices'][0]
        x = json.loads(r['message']['content'])
        check(r['finish_reason'] == 'stop' and list(x) == ['who', 'n', 'ok'] and x['who'] in ('Romeo', 'Juliet') and 0 <= x['n'] <= 99, 'schema: %s' % r)
    r = s.post('/v1/completions', {'prompt': 'Who?', 'grammar': 'root ::= "yes" | "no"', 'max_tokens': 9})[1]['choices'][0]
    check(r['text'] in ('yes', 'no'), 'grammar: %s' % r)
    for body, field in ((say('x', grammar='root ::= ('), 'grammar'),
                        (say('x', response_format={'type': 'json_schema', 'json_schema': {'schema': {'type': 'object', 'uniqueItems': True}}}), 'response_format')):
        status, r = s.post('/v1/chat/completions', body)
        check(status == 400 and r['error']['param'] == field, 'bad form: %s' % r)
    tools = [{'type': 'function', 'function': {'name': 'rain', 'parameters': {'type': 'object', 'properties': {'city': {'enum': ['Ulm', 'Rome']}}, 'required': ['city']}}}]
    for choice in ('required', {'type': 'function', 'function': {'name': 'rain'}}):
        r = s.post('/v1/chat/completions', say('Rain?', tools=tools, tool_choice=choice, max_tokens=300, logit_bias=NO_BREAKS))[1]['choices'][0]
        call = (r['message'].get('tool_calls') or [{'function': {'name': '', 'arguments': '{}'}}])[0]['function']
        check(r['finish_reason'] == 'tool_calls' and call['name'] == 'rain' and json.loads(call['arguments'])['city'] in ('Ulm', 'Rome'), 'tool_choice: %s' % r)
    deltas = [c['delta'] for e in s.events('/v1/chat/completions', say('Rain?', tools=tools, tool_choice='required', max_tokens=300, logit_bias=NO_BREAKS, stream=True)) for c in e['choices']]
    parts = [c for d in deltas for c in d.get('tool_calls', [])]
    check(not any(d.get('content') for d in deltas) and [p['function']['name'] for p in parts if 'id' in p] == ['rain'] and
          json.loads(''.join(p['function'].get('arguments', '') for p in parts))['city'] in ('Ulm', 'Rome'), 'a required call, streamed: %s' % deltas)
    check(len(parts) > 3 and parts[0]['function']['arguments'] == '' and not any('id' in p or 'name' in p['function'] for p in parts[1:]), 'its arguments in pieces: %s' % parts)
    args = {'type': 'object', 'properties': {'q"}': {'enum': ['a\\"]}, {\u00e4', '{"']}, 'n': {'type': 'array', 'items': {'enum': [{'a': []}, 7]}, 'minItems': 2, 'maxItems': 2}}, 'required': ['q"}', 'n'], 'additionalProperties': False}
    odd = [{'type': 'function', 'function': {'name': 'odd', 'parameters': args}}, {'type': 'function', 'function': {'name': 'empty', 'parameters': {'type': 'object', 'properties': {}, 'additionalProperties': False}}}]
    for name in ('odd', 'empty'): # brackets and quotes within strings, nothing within brackets
        ask = dict(tools=odd, tool_choice={'type': 'function', 'function': {'name': name}}, max_tokens=400, logit_bias=NO_BREAKS)
        whole = s.post('/v1/chat/completions', say('Odd?', **ask))[1]['choices'][0]['message']['tool_calls'][0]['function']
        parts = [p for e in s.events('/v1/chat/completions', say('Odd?', stream=True, **ask)) for c in e['choices'] for p in c['delta'].get('tool_calls', [])]
        check(whole == {'name': name, 'arguments': ''.join(p['function']['arguments'] for p in parts)} and (len(json.loads(whole['arguments'])['n']) == 2 if name == 'odd' else json.loads(whole['arguments']) == {}), '%s: %s' % (name, whole))
    plain = [{'type': 'function', **tools[0]['function']}]
    for most in (200, 100): # the second is cut off within the arguments
        e = s.events('/v1/responses', {'input': 'Rain?', 'temperature': 0, 'tools': plain, 'tool_choice': 'required', 'max_output_tokens': most, 'stream': True, 'logit_bias': NO_BREAKS})
        pieces = [x['delta'] for x in e if x['type'].endswith('arguments.delta')]
        done = [x['arguments'] for x in e if x['type'].endswith('arguments.done')]
        items = [x['item'] for x in e if x['type'] == 'response.output_item.done']
        check(len(pieces) > 2, 'responses: arguments in pieces: %s' % pieces)
        check(done == [''.join(pieces)] and [i['arguments'] for i in items] == done and e[-1]['response']['output'] == items and
              all(i['status'] == ('completed' if most == 200 else 'incomplete') for i in items), 'responses: a required call, streamed: %s' % e[-1])
        own = [{'name': 'rain', 'input_schema': tools[0]['function']['parameters']}]
        e = s.events('/v1/messages', {'messages': [{'role': 'user', 'content': 'Rain?'}], 'temperature': 0, 'tools': own, 'tool_choice': {'type': 'any'}, 'max_tokens': most, 'stream': True, 'logit_bias': NO_BREAKS})
        pieces = [x['delta']['partial_json'] for x in e if x['type'] == 'content_block_delta']
        kinds = [x['type'] for x in e]
        check(kinds.count('content_block_start') == kinds.count('content_block_stop') == 1, 'messages: blocks end: %s' % kinds)
        check(len(pieces) > 2 and (most == 100 or json.loads(''.join(pieces))['city'] in ('Ulm', 'Rome')), 'messages: a required call, streamed: %s' % pieces)
    comma = s.post('/tokenize', {'content': ','})[1]['tokens'][-1] # another call follows where it may, until the tokens end
    r = s.post('/v1/chat/completions', say('Rain?', tools=tools, tool_choice='required', max_tokens=300, logit_bias=dict(NO_BREAKS, **{str(comma): 90})))[1]['choices'][0]
    calls = r['message'].get('tool_calls') or []
    check(len(calls) > 1 and all(json.loads(c['function']['arguments'])['city'] in ('Ulm', 'Rome') for c in calls) and
          len({c['id'] for c in calls}) == len(calls), 'several required calls: %s' % r)
    r = s.post('/v1/chat/completions', say('Rain?', tools=tools, tool_choice='required', max_tokens=300, parallel_tool_calls=False, logit_bias=NO_BREAKS))[1]['choices'][0]
    check(len(r['message']['tool_calls']) == 1, 'one required call: %s' % r)

def test_embeddings(s):
    status, r = s.post('/v1/embeddings', {'input': ['one text', 'another']})
    v = r['data'][0]['embedding']
    check(status == 200 and len(r['data']) == 2 and abs(sum(x * x for x in v) - 1) < 1e-3, 'embeddings: %s' % status)
    packed = s.post('/v1/embeddings', {'input': 'one text', 'encoding_format': 'base64'})[1]['data'][0]['embedding']
    raw = base64.b64decode(packed)
    check(max(abs(a - b) for a, b in zip(v, struct.unpack('<%df' % len(v), raw))) < 1e-6, 'base64')

def test_errors(s):
    cases = [({'messages': 7}, 'messages'), ({'messages': []}, 'messages'), ({'messages': [{'role': 'user', 'content': 7}]}, 'messages[0].content'),
             ({'messages': [{'role': 'king', 'content': 'x'}]}, 'messages[0].role'), (say('x', temperature='hot'), 'temperature'), (say('x', temperature=-1), 'temperature'),
             (say('x', max_tokens=1.5), 'max_tokens'), (say('x', stream='yes'), 'stream'), (say('x', n=0), 'n'), (say('x', stop=['']), 'stop'), (say('x', stop=7), 'stop'),
             (say('x', logit_bias={'x': 1}), 'logit_bias'), (say('x', logit_bias={'99999': 1}), 'logit_bias'), (say('x', tools={}), 'tools'), (say('x', tools=[{'type': 'x'}]), 'tools[0].type'),
             (say('x', tool_choice='often'), 'tool_choice'), (say('x', tool_choice='required'), 'tool_choice'), (say('x', response_format=7), 'response_format'),
             (say('x', top_logprobs=2), 'top_logprobs'), (say('x', seed='a'), 'seed'), (say('x', stream_options={'include_usage': 1}), 'stream_options.include_usage'),
             (say('word ' * 3000), 'messages'), ({'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'file:///etc/passwd'}}]}]}, 'messages[0].content')]
    for body, field in cases:
        status, r = s.post('/v1/chat/completions', body)
        check(status == 400 and r['error']['param'] == field and r['error']['type'] == 'invalid_request_error', '%s: %s %s' % (field, status, r))
    check(s.post('/v1/chat/completions', say('word ' * 3000))[1]['error']['code'] == 'context_length_exceeded', 'context_length_exceeded')
    check(s.post('/v1/chat/completions', say('x', max_tokens=1, no_such_field={'a': [1]}))[0] == 200, 'unknown fields are ignored')
    for path, body, field in (('/v1/completions', {'prompt': 7}, 'prompt'), ('/v1/completions', {'prompt': [99999]}, 'prompt'), ('/v1/embeddings', {}, 'input'),
                              ('/v1/embeddings', {'input': 'x', 'dimensions': 3}, 'dimensions'), ('/v1/responses', {'input': 7}, 'input'), ('/tokenize', {}, 'content'),
                              ('/v1/responses', {'input': 'x', 'previous_response_id': 'r'}, 'previous_response_id'), ('/detokenize', {'tokens': [-1]}, 'tokens')):
        status, r = s.post(path, body)
        check(status == 400 and r['error']['param'] == field, '%s: %s %s' % (path, status, r))
    status, r = s.post('/v1/messages', {'messages': [{'role': 'user', 'content': 'x'}]})
    check(status == 400 and r['type'] == 'error' and 'max_tokens' in r['error']['message'], 'messages: %s' % r)
    for body in (b'', b'{', b'[]', b'{"a":1}x', b'\xff\xfe', b'{"messages":' + b'[' * 100 + b']' * 100 + b'}', b'{"a":' * 100000):
        check(s.post('/v1/chat/completions', body)[0] == 400, 'body %r' % body[:20])
    check(s.get('/nothing')[0] == 404 and s.get('/v1/chat/completions')[0] == 405 and s.get('/../../etc/passwd')[0] == 404, 'paths')
    check(s.post('/v1/chat/completions', b'{"a":"' + b'x' * (5 << 20) + b'"}')[0] == 413, 'a body that is too large')
    check(s.raw('GET', '/v1/models', None, {'Sec-Fetch-Site': 'cross-site'})[0].status == 403, 'another site')
    check(s.raw('GET', '/v1/models')[0].getheader('Access-Control-Allow-Origin') is None, 'no CORS unless asked')

def test_others(s):
    check(s.get('/health') == (200, '{"status":"ok"}'), 'health')
    models = json.loads(s.get('/v1/models')[1])['data']
    check(models[0]['id'] == 'shakespeare-5m.gguf' and s.get('/v1/models/shakespeare-5m.gguf')[0] == 200, 'models: %s' % models)
    page = s.raw('GET', '/')
    check(page[0].status == 200 and b'<title>rocmforge' in page[1] and "default-src 'none'" in page[0].getheader('Content-Security-Policy'), 'page')
    check(re.search(rb'(src|href)="(http|//)', page[1]) is None and b'innerHTML' not in page[1], 'the page loads nothing else')
    text = s.get('/metrics')[1]
    check('rocmforge_requests_total{api="chat_completions"}' in text and all(re.match(r'(# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? [-+0-9.e]+(Inf)?)$', l) for l in text.splitlines()), 'metrics')

def test_responses(s):
    r = s.post('/v1/responses', {'input': 'Where is Romeo?', 'instructions': 'Be brief.', 'max_output_tokens': 8, 'temperature': 0})[1]
    text = r['output'][0]['content'][0]['text']
    check(r['status'] == 'incomplete' and r['usage']['output_tokens'] == 8 and len(text) > 5, 'responses: %s' % r)
    events = s.events('/v1/responses', {'input': [{'role': 'user', 'content': 'Where is Romeo?'}], 'instructions': 'Be brief.', 'max_output_tokens': 8, 'temperature': 0, 'stream': True})
    check(''.join(e['delta'] for e in events if e['type'] == 'response.output_text.delta') == text, 'responses, streaming')
    check([e['sequence_number'] for e in events] == list(range(len(events))) and events[-1]['type'] == 'response.incomplete', 'responses: events')

# What the parrot says, in every API: a thought, a sentence, a call; the result goes back, and it answers.
def test_parrot():
    f = {'name': 'rain', 'description': 'x', 'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}}}
    with Server(PARROT) as s:
        ask = say('Does it rain?', tools=[{'type': 'function', 'function': f}])
        m = s.post('/v1/chat/completions', ask)[1]['choices'][0]
        check(m['finish_reason'] == 'tool_calls' and m['message']['reasoning_content'] == 'Hm,\nrain?' and m['message']['content'] == 'I look.', 'parrot: %s' % m)
        call = m['message']['tool_calls'][0]
        check(call['function'] == {'name': 'rain', 'arguments': '{"city": "Ulm"}'}, 'call: %s' % call)
        ask['messages'] += [m['message'], {'role': 'tool', 'tool_call_id': call['id'], 'content': 'yes'}]
        m = s.post('/v1/chat/completions', ask)[1]['choices'][0]
        check(m['finish_reason'] == 'stop' and m['message']['content'] == 'It rains.', 'the result: %s' % m)
        r = s.post('/v1/messages', {'max_tokens': 50, 'messages': say('x')['messages'], 'tools': [{'name': 'rain', 'input_schema': f['parameters']}]})[1]
        check([b['type'] for b in r['content']] == ['thinking', 'text', 'tool_use'] and r['content'][2]['input'] == {'city': 'Ulm'} and r['stop_reason'] == 'tool_use', 'messages: %s' % r)
        r = s.post('/v1/messages', {'max_tokens': 50, 'messages': [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': r['content']},
                   {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': r['content'][2]['id'], 'content': 'yes'}]}]})[1]
        check(r['content'] == [{'type': 'text', 'text': 'It rains.'}] and r['stop_reason'] == 'end_turn', 'messages, the result: %s' % r)
        r = s.post('/v1/responses', {'input': 'x', 'tools': [{'type': 'function', **f}]})[1]
        check([o['type'] for o in r['output']] == ['reasoning', 'message', 'function_call'] and r['status'] == 'completed', 'responses: %s' % r)
        check(r['tools'][0]['name'] == 'rain' and 0 < r['usage']['output_tokens_details']['reasoning_tokens'] < r['usage']['output_tokens'], 'responses: %s' % r)
        call = r['output'][2]
        r = s.post('/v1/responses', {'input': [{'role': 'user', 'content': 'x'}, call, {'type': 'function_call_output', 'call_id': call['call_id'], 'output': 'yes'}]})[1]
        check(r['output'][0]['content'][0]['text'] == 'It rains.', 'responses, the result: %s' % r)
        m = s.post('/v1/chat/completions', say('x', chat_template_kwargs={'enable_thinking': False}))[1]['choices'][0]['message']
        check('reasoning_content' not in m and m['content'] == 'It rains.', 'thinking off: %s' % m)
        check(s.post('/v1/messages/count_tokens', {'messages': say('x')['messages']})[1]['input_tokens'] > 3, 'count_tokens')

# Many at once: nobody starves, and everybody gets the text that he gets alone. They have a beginning in common: it is evaluated once.
def test_many(n):
    shared = 'We few, we happy few, we band of brothers; for he today that sheds his blood with me shall be my brother. '
    with Server(MODEL, '--parallel', '16', '--queue', '256') as s:
        bodies = [say(shared + 'Speak, number %d' % i, max_tokens=12, stream=bool(i % 2)) for i in range(n)]
        alone = [s.post('/v1/chat/completions', {**b, 'stream': False, 'cache_prompt': False})[1]['choices'][0]['message']['content'] for b in bodies]
        before, total = s.metric('reused_tokens_total'), s.metric('prompt_tokens_total')
        got = [None] * n
        def work(i):
            if bodies[i]['stream']: got[i] = ''.join(e['choices'][0]['delta'].get('content') or '' for e in s.events('/v1/chat/completions', bodies[i]))
            else: got[i] = s.post('/v1/chat/completions', bodies[i])[1]['choices'][0]['message']['content']
        threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
        for t in threads: t.start()
        for t in threads: t.join()
        check(got == alone, '%d clients get the texts of each alone: %d differ' % (n, sum(a != b for a, b in zip(got, alone))))
        reused = (s.metric('reused_tokens_total') - before) / (s.metric('prompt_tokens_total') - total)
        check(reused > 0.6, 'of %d prompts with the same beginning %.0f %% is reused' % (n, 100 * reused))

# Drafts: the same greedy texts, alone and several at once, and some of the drafts are right.
def test_drafts():
    bodies = [say('the king, the queen, the king, the queen, the king, %s' % w, max_tokens=40) for w in ('the', 'and', 'of', 'the queen, the')]
    bodies.append({**bodies[0], 'temperature': 0.8, 'seed': 7})
    answers = {}
    for options in ((), ('--draft', 'ngram'), ('--draft', MODEL, '--draft-max', '3')):
        with Server(MODEL, '--parallel', '4', *options) as s:
            got = [s.post('/v1/chat/completions', b)[1] for b in bodies]
            together = [None] * len(bodies)
            def work(i): together[i] = s.post('/v1/chat/completions', bodies[i])[1]
            threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
            for t in threads: t.start()
            for t in threads: t.join()
            texts = [[r['choices'][0]['message']['content'] for r in rs] for rs in (got, together)]
            check(texts[0] == texts[1] == answers.setdefault('texts', texts[0]), '%s: %s and %s, without drafts %s' % (options, *texts, answers['texts']))
            details = [r['usage']['completion_tokens_details'] for r in got + together]
            check(('accepted_prediction_tokens' in details[0]) == bool(options), '%s: %s' % (options, details[0]))
            accepted = sum(d.get('accepted_prediction_tokens', 0) for d in details)
            drafted = accepted + sum(d.get('rejected_prediction_tokens', 0) for d in details)
            check(bool(options) <= (accepted > 0), '%s: no draft is right' % (options,))
            check((s.metric('drafted_tokens_total'), s.metric('accepted_drafts_total')) == (drafted, accepted), '%s: metrics and usage differ' % (options,))
            steps, gain = s.metric('draft_steps_total'), s.metric('draft_gain')
            check((steps > 0) == (gain > 0) == bool(options) and steps <= s.metric('generated_tokens_total'), '%s: %s steps, gain %s' % (options, steps, gain))

# Drafts of a file's own MTP head: the same texts.
def test_mtp():
    texts = []
    for options in ((), ('--draft', 'mtp', '--draft-max', '2')):
        with Server('tests/family/qwen35-mtp.gguf', '--parallel', '2', *options) as s:
            bodies = [{'prompt': p, 'max_tokens': 40, 'temperature': 0} for p in ('ABC', 'QRST', 'ABCD')]
            texts.append([s.post('/v1/completions', b)[1]['choices'][0]['text'] for b in bodies])
            check((s.metric('drafted_tokens_total') > 0) == bool(options), '%s: drafts' % (options,))
    check(texts[0] == texts[1] and texts[0][0], 'with drafts of an MTP head %s, without %s' % (texts[1], texts[0]))

def request_bytes(body, path='/v1/chat/completions'):
    data = json.dumps(body).encode()
    return b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (path.encode(), len(data)) + data

def test_limits():
    long = say('Speak', max_tokens=400, ignore_eos=True)
    with Server(MODEL, '--parallel', '1', '--queue', '1', '--api-key', 'secret', '--drain', '0', '--cors', 'https://a.example') as s:
        key = {'Authorization': 'Bearer secret'}
        check(s.post('/v1/chat/completions', say('x'))[0] == 401 and s.post('/v1/chat/completions', say('x'), Authorization='Bearer secreT')[0] == 401 and
              s.post('/v1/chat/completions', say('x', max_tokens=1), **key)[0] == 200 and s.raw('GET', '/v1/models', None, {'x-api-key': 'secret'})[0].status == 200 and
              s.get('/metrics')[0] == 401 and s.get('/health')[0] == 200, 'API keys')
        r = s.raw('OPTIONS', '/v1/chat/completions', None, {'Origin': 'https://a.example', 'Access-Control-Request-Method': 'POST'})[0]
        check(r.status in (200, 204) and r.getheader('Access-Control-Allow-Origin') == 'https://a.example', 'CORS: %s' % r.status)
    with Server(MODEL, '--parallel', '1', '--queue', '1') as s:
        # clients that go away: one that runs, one that waits
        streams = []
        for i in range(2):
            c = s.connect()
            c.sendall(request_bytes({**long, 'stream': i == 0, 'n': 1}))
            streams.append(c)
            s.wait('requests_active', i + 1)
        r, text = s.raw('POST', '/v1/chat/completions', {**long, 'max_tokens': 1})
        full = r.status == 429 and r.getheader('Retry-After') == '1' and json.loads(text)['error']['type'] == 'rate_limit_error'
        gone_early = s.metric('requests_active') < 2 # a fast machine has written the answers already
        check(full or gone_early, 'a full queue: %s' % r.status)
        for c in streams: c.close()
        check(s.wait('requests_active', 0), 'clients that are gone free their places')
        # broken ones
        for data in (b'\x16\x03\x01\x02\x00', b'GET / HTTP/9.9\r\n\r\n', b'POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n', b'A' * 100000 + b'\r\n\r\n',
                     b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"', b'POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n'):
            c = s.connect()
            try:
                c.sendall(data)
                c.shutdown(socket.SHUT_WR)
                c.settimeout(5)
                while c.recv(4096): pass
            except OSError: pass
            c.close()
        check(s.get('/health')[0] == 200, 'after broken clients')
        idle = [s.connect() for _ in range(1000 if LONG else 200)]
        check(s.post('/v1/chat/completions', say('x', max_tokens=2))[0] == 200, 'beside %d connections' % len(idle))
        for c in idle: c.close()

def test_drain():
    s = Server(MODEL, '--parallel', '1', '--queue', '4')
    c = s.connect()
    c.sendall(request_bytes(say('Speak', max_tokens=300, ignore_eos=True, stream=True)))
    text = c.recv(4096)
    s.process.send_signal(signal.SIGTERM)
    while True:
        more = c.recv(65536)
        text += more
        if not more or b'[DONE]' in text: break
    check(b'[DONE]' in text and s.process.wait(60) == 0, 'SIGTERM lets an answer end: %r' % text[-100:])

with Server(MODEL) as s:
    for test in (test_chat, test_completions, test_penalties, test_structure, test_embeddings, test_errors, test_others, test_responses):
        try: test(s)
        except Exception as e: check(False, '%s: %r' % (test.__name__, e))
for test in (test_parrot, lambda: test_many(64 if LONG else 24), test_drafts, test_mtp, test_limits, test_drain):
    try: test()
    except Exception as e: check(False, '%s: %r' % (test, e))
print('http: %d passed, %d failed' % (passed, failed))
sys.exit(failed > 0)
