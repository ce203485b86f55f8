# make_parrot.py TEMPLATE.jinja OUT.gguf: a model that says what it is told: after <A> a thought, a sentence and a tool call, after <B>
# an answer. One layer of zeros, embeddings that are unit vectors, and an output matrix that maps a token to the next of its chain.
import struct, sys

N = 288 # values of an embedding, tokens
CHAINS = [['<A>', '<think>', 'Hm,\n', 'rain?', '</think>', 'I', ' look.', '<tool_call>',
           '\n{"name": "rain", "arguments": {"city":', ' "Ulm"}}\n', '</tool_call>', '</s>'],
          ['<B>', 'It', ' rains.', '</s>']]
CHAINS = [[t.replace(' ', '\u2581') for t in chain] for chain in CHAINS]
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

def string(x):
    x = x.encode()
    return struct.pack('<Q', len(x)) + x

def vocabulary():
    tokens = [('<unk>', UNKNOWN), ('<s>', CONTROL), ('</s>', CONTROL)] + [('<0x%02X>' % i, BYTE) for i in range(256)]
    tokens += [(t, USER_DEFINED if t[0] == '<' else NORMAL) for chain in CHAINS for t in chain[:-1]]
    return tokens + [('<unused%d>' % i, UNUSED) for i in range(N - len(tokens))]

def metadata(tokens, template):
    out = []
    def put(key, kind, data): out.append(string(key) + struct.pack('<I', kind) + data)
    put('general.architecture', STRING, string('llama'))
    for key, v in (('block_count', 1), ('context_length', 512), ('embedding_length', N), ('feed_forward_length', 32),
                   ('attention.head_count', 9)):
        put('llama.' + key, U32, struct.pack('<I', v))
    put('llama.attention.layer_norm_rms_epsilon', F32, struct.pack('<f', 1e-5))
    put('general.sampling.temp', F32, struct.pack('<f', 0))
    put('tokenizer.ggml.model', STRING, string('llama'))
    put('tokenizer.ggml.tokens', ARRAY, struct.pack('<IQ', STRING, N) + b''.join(string(t) for t, _ in tokens))
    put('tokenizer.ggml.scores', ARRAY, struct.pack('<IQ', F32, N) + struct.pack('<%df' % N, *range(0, -N, -1)))
    put('tokenizer.ggml.token_type', ARRAY, struct.pack('<IQ', I32, N) + struct.pack('<%di' % N, *(k for _, k in tokens)))
    for key, v in (('bos', 1), ('eos', 2), ('unknown', 0)):
        put('tokenizer.ggml.%s_token_id' % key, U32, struct.pack('<I', v))
    put('tokenizer.ggml.add_space_prefix', BOOL, b'\0')
    put('tokenizer.chat_template', STRING, string(template))
    return len(out), b''.join(out)

def tensors(tokens):
    index = {t: i for i, (t, _) in enumerate(tokens)}
    unit, following = [0] * (N * N), [0] * (N * N)
    for i in range(N): unit[i * N + i] = 1
    for chain in CHAINS:
        for a, b in zip(chain, chain[1:]): following[index[b] * N + index[a]] = 1
    yield 'token_embd', (N, N), unit
    yield 'output', (N, N), following
    yield 'output_norm', (N,), [1] * N
    for name, shape in (('attn_norm', (N,)), ('attn_q', (N, N)), ('attn_k', (N, N)), ('attn_v', (N, N)), ('attn_output', (N, N)),
                        ('ffn_norm', (N,)), ('ffn_gate', (N, 32)), ('ffn_up', (N, 32)), ('ffn_down', (32, N))):
        yield 'blk.0.' + name, shape, [0] * (shape[0] * (shape + (1,))[1])

def main(template, out):
    tokens = vocabulary()
    n_keys, keys = metadata(tokens, open(template).read())
    table, data, n = b'', b'', 0
    for name, shape, values in tensors(tokens):
        table += string(name + '.weight') + struct.pack('<I%dQ' % len(shape), len(shape), *shape) + struct.pack('<IQ', 0, len(data))
        data += struct.pack('<%df' % len(values), *values)
        data += bytes(-len(data) % 32)
        n += 1
    head = struct.pack('<4sIQQ', b'GGUF', 3, n, n_keys) + keys + table
    open(out, 'wb').write(head + bytes(-len(head) % 32) + data)

main(*sys.argv[1:])
