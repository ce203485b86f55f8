#!/usr/bin/env python3
"""make_unicode.py - the character class table of rocmforge.h (section 13), from Python's unicodedata.

 make_unicode.py                 print the table as C
 make_unicode.py --check FILE    say whether FILE holds it; exit 1 if not (also if this Python has another Unicode version)
"""
import sys
import unicodedata

# Codes of the table; their meaning in C is the array in rfi_unicode_class.
CODES = {'L': 1, 'N': 2, 'P': 3, 'S': 4, 'M': 5}
SPACE, CONTROL = 6, 7
WHITE_SPACE = set([*range(0x09, 0x0e), 0x20, 0x85, 0xa0, 0x1680, *range(0x2000, 0x200b), 0x2028, 0x2029, 0x202f,
                   0x205f, 0x3000])     # property White_Space: stable since Unicode 6.3


def code(c):
    category = unicodedata.category(chr(c))
    if category[0] == 'C' and category != 'Cn':
        return SPACE if c in WHITE_SPACE else CONTROL
    return SPACE if c in WHITE_SPACE else CODES.get(category[0], 0)


def table():
    """First character of every run of one class, shifted by 3, with the class below."""
    out, last = [], None
    for c in range(0x110000):
        k = code(c)
        if k != last:
            out.append(c << 3 | k)
            last = k
    return out


def blocks(t):
    """Of every 256 characters below U+10000 the run that the first one is in, and the run of U+10000."""
    return [max(i for i, v in enumerate(t) if v >> 3 <= c) for c in range(0, 0x10001, 256)]


def lower():
    """Runs of capitals: first, how many, their distance, what to add for the first letter of the small one."""
    pairs = [(c, ord(chr(c).lower()[0]) - c) for c in range(0x110000) if chr(c).lower()[0] != chr(c)]
    runs = []
    for c, add in pairs:
        if runs and runs[-1][3] == add and runs[-1][1] > 1 and c == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        elif runs and runs[-1][3] == add and runs[-1][1] == 1 and c - runs[-1][0] <= 2:
            runs[-1][1:3] = 2, c - runs[-1][0]
        else:
            runs.append([c, 1, 1, add])
    return runs


def bases():
    """Letters with accents as (letter << 16 | base), those below U+F900: what decomposes, but Hangul, whose rule is known."""
    out = []
    for c in range(0x80, 0xf900):
        base = ord(unicodedata.normalize('NFD', chr(c))[0])
        if base != c and not 0xac00 <= c < 0xd7a4:
            out.append(c << 16 | base)
    return out


def array(name, c_type, values, show):
    lines, line = [f'static const {c_type} {name}[{len(values)}] = {{'], '   '
    for v in values:
        item = f' {show(v)},'
        if len(line) + len(item) > 120:
            lines.append(line)
            line = '   '
        line += item
    return lines + [line, '};']


def text():
    t = table()
    b = blocks(t)
    small, base = lower(), bases()
    n_bytes = 4 * len(t) + 2 * len(b) + 12 * len(small) + 4 * len(base)
    lines = [f'/* Unicode {unicodedata.unidata_version}, {n_bytes} bytes. */']
    lines += array('rfi_unicode_runs', 'uint32_t', t, str)
    lines += array('rfi_unicode_blocks', 'uint16_t', b, str)
    lines += array('rfi_unicode_lower', 'rfi_lower', small, lambda r: '{%d, %d, %d, %d}' % tuple(r))
    lines += array('rfi_unicode_bases', 'uint32_t', base, str)
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    if sys.argv[1:2] == ['--check']:
        same = text() in open(sys.argv[2], encoding='utf-8').read()
        print('equal' if same else 'different')
        sys.exit(not same)
    sys.stdout.write(text())
