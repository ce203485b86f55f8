#!/usr/bin/env python3
"""make_template_goldens.py: writes tests/template_goldens.h: templates, and what Jinja2 makes of them when it is set up as
chat templates are run (a sandbox, trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes, raise_exception,
strftime_now). Run by hand: python3 tests/make_template_goldens.py (Debian: python3-jinja2, 3.1)."""
import datetime, json, os
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 3, 5, 7, 8, 9)

DATA = {'s': 'Hello World', 'u': 'Gr\u00fc\u00dfe \u4f60\u597d \U0001f600 \u00c9t\u00e9', 'w': '  two  words \n', 'n': 7, 'neg': -7,
        'f': 2.5, 'big': 1e22, 'small': 1.5e-7, 't': True, 'none': None, 'l': [3, 1, 2], 'words': ['b', 'A', 'c', 'a'], 'empty': [],
        'd': {'b': 1, 'a': [1, 2.0, None, True, 'x\'y"z'], 'C': {'k': 'v'}}, 'quote': 'it\'s', 'html': '<a href="x">&\'</a>',
        'people': [{'name': 'Ann', 'age': 30, 'pet': {'kind': 'cat'}}, {'name': 'bob', 'age': 25, 'pet': {'kind': 'dog'}},
                   {'name': 'Cy', 'age': 30}], 'lines': 'one\ntwo\n\nthree\n', 'tree': [{'v': 1, 'c': [{'v': 2, 'c': []}]}, {'v': 3, 'c': []}]}

EXPRESSIONS = r"""
1 + 2 * 3 - 4 ;; 7 // 2 ;; -7 // 2 ;; 7 % 3 ;; -7 % 3 ;; 7 % -3 ;; 7 / 2 ;; 6 / 3 ;; 2 ** 10 ;; 2 ** -1 ;; -2 ** 2
7.5 // 2 ;; -7.5 % 2 ;; 1e3 ;; 1_000 ;; 0x1f ;; 0b101 ;; 0o17 ;; 1.5e3 ;; 10 ** 18 ;; 0.1 + 0.2 ;; 1e16 ;; 1e15
123456789.0 ;; big ;; small ;; 1e-5 ;; 0.0001 ;; -0.0 ;; 1.0 ;; 3.14159 ;; 1e100 ;; true + 1 ;; t ;; none ;; None
not t ;; not none ;; not not s ;; t and n ;; none or s ;; none and n ;; t or n ;; '' or [] or 0 or 'x' ;; n == 7
n != 7 ;; n < 8 <= 8 ;; 1 < 2 < 3 ;; 1 < 3 < 2 ;; 1 == 1.0 ;; 1 == true ;; 'a' < 'b' ;; [1, 2] < [1, 3]
(1, 2) == (1, 2) ;; [1] == (1,) ;; {'a': 1} == {'a': 1.0} ;; 'x' == 1 ;; 'ell' in s ;; 'z' not in s ;; 2 in l
'a' in d ;; 'z' in d ;; 1 not in l ;; '' in s ;; none in [none] ;; s ~ n ~ none ~ f ;; 'a' 'b' ;; 'a' * 3
3 * 'ab' ;; [1] * 3 ;; 'a' * -1 ;; [1] + [2] ;; (1,) + (2,) ;; s + '!' ;; [] ;; () ;; (1,) ;; (1, 2) ;; {}
{'a': 1, 2: 'b'} ;; [1, 'a', none, true, 1.5] ;; d ;; d.a ;; d['a'][4] ;; d.C.k ;; d.nope ;; d['nope'] ;; d.C['k']
l[0] ;; l[-1] ;; l[5] ;; s[0] ;; s[-1] ;; s[99] ;; u[6] ;; u[-3] ;; s[1:4] ;; s[:3] ;; s[-3:] ;; s[::2] ;; s[::-1]
s[8:2:-2] ;; u[2:8] ;; u[::-1] ;; l[1:] ;; l[::-1] ;; l[:-1] ;; l[5:] ;; l[-2:][0] ;; (1, 2, 3)[1:] ;; s[2:2]
s[5:1] ;; s[-99:99] ;; w[1:-1] ;; s.upper() ;; s.lower() ;; u.upper() ;; u.lower() ;; u | length ;; u | upper
'ab cd'.title() ;; "it's a-b c" | title ;; "it's a-b c".title() ;; 'hELLO wORLD'.capitalize() ;; 'Ab'.swapcase()
w.strip() ~ '|' ;; w.lstrip() ~ '|' ;; w.rstrip() ~ '|' ;; 'xxaxx'.strip('x') ;; 'xyaxy'.lstrip('yx')
'abc'.rstrip('c') ;; w.split() ;; w.split(' ') ;; 'a,b,,c'.split(',') ;; 'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1) ;; ' a b  c '.split(none, 1) ;; ' a b  c '.rsplit(none, 1) ;; ''.split() ;; ''.split(',')
'a--b--c'.split('--') ;; 'a b c'.split(maxsplit=1) ;; 'a b c'.rsplit() ;; lines.splitlines()
'a\r\nb\rc'.splitlines() ;; 'a\nb'.splitlines(true) ;; s.startswith('He') ;; s.startswith(('x', 'H'))
s.endswith('ld') ;; s.endswith('x') ;; s.replace('l', 'L') ;; s.replace('l', 'L', 1) ;; 'aaa'.replace('aa', 'b')
'abc'.replace('', '-') ;; s.find('o') ;; s.rfind('o') ;; s.find('zz') ;; s.index('W') ;; s.count('l')
'aaa'.count('aa') ;; s.find('o', 5) ;; u.find('\u597d') ;; ', '.join(words) ;; ''.join([]) ;; '5'.zfill(3)
'-5'.zfill(4) ;; 'a'.ljust(3) ~ '|' ;; 'a'.rjust(3, '*') ;; 'a'.center(4, '-') ;; 'ab'.center(5, '-')
'12'.isdigit() ;; 'a1'.isdigit() ;; ''.isdigit() ;; 'ab'.isalpha() ;; 'a1'.isalnum() ;; ' \t'.isspace()
'AB'.isupper() ;; 'ab'.islower() ;; 'Ab'.islower() ;; '1'.isupper() ;; 'a=b=c'.partition('=')
'a=b=c'.rpartition('=') ;; 'abc'.partition('x') ;; 'abc'.rpartition('x') ;; 'abc'.removeprefix('a')
'abc'.removesuffix('c') ;; 'abc'.removeprefix('x') ;; '{} {}'.format(1, 'a') ;; '{1} {0} {x}'.format(1, 2, x=3)
'{:>5}|{:<5}|{:^5}|'.format('a', 'b', 'c') ;; '{:05.2f}'.format(3.14159) ;; '{:,}'.format(1234567)
'{:x} {:X} {:o} {:b}'.format(255, 255, 8, 5) ;; '{:+d}'.format(3) ;; '{:.3}'.format('abcdef')
'{!r}'.format('a') ;; '{{}}'.format() ;; '{:e}'.format(12345.678) ;; '{:g}'.format(0.00001) ;; '{:%}'.format(0.25)
'{:*^9}'.format('mid') ;; '%s and %s' % ('a', 1) ;; '%d%%' % 5 ;; '%5.1f|' % 2.25 ;; '%-5s|' % 'a' ;; '%05d' % 42
'%x' % 255 ;; '%(a)s %(b)d' % {'a': 'x', 'b': 2} ;; '%r' % 'q' ;; '%s' % none ;; '%+d' % 3 ;; '%s' % [1]
'%.2e' % 12345.6789 ;; '%c' % 65 ;; '%s %s' | format('a', 2) ;; '%5s|' | format(s[:2]) ;; '%i' % 3.9
'%g' % 1e20 ;; '%#x' % 255 ;; l.index(1) ;; words.count('a') ;; d.get('a') ;; d.get('z') ;; d.get('z', 5)
d.keys() ;; d.keys() | list ;; d.values() | list ;; d.items() | list ;; d.items() ;; (1, 2).count(1)
range(3) | list ;; range(1, 4) | list ;; range(5, 0, -2) | list ;; range(3) | length ;; range(0) | list
dict(a=1, b='x') ;; dict({'a': 1}, b=2) ;; dict([('k', 'v')]) ;; 'x' if t else 'y' ;; 'x' if none else 'y'
'x' if none ;; ('a' if f else 'b') ~ 'c' ;; 'a' if none else 'b' if none else 'c' ;; n is defined
nope is defined ;; nope is undefined ;; nope is not defined ;; none is none ;; n is none ;; n is not none
s is string ;; n is string ;; n is number ;; f is number ;; t is number ;; t is boolean ;; n is boolean
n is integer ;; t is integer ;; f is float ;; d is mapping ;; l is mapping ;; l is sequence ;; s is sequence
d is sequence ;; n is sequence ;; l is iterable ;; n is iterable ;; s is iterable ;; nope is iterable
(l | map('string')) is sequence ;; (l | map('string')) is iterable ;; n is odd ;; n is even ;; n is divisibleby 7
n is divisibleby(2) ;; t is true ;; t is false ;; 1 is true ;; s is upper ;; 'A' is upper ;; 'a' is lower
n is in([7]) ;; n is eq 7 ;; n is equalto(7) ;; n is ne 8 ;; n is gt 6 ;; n is lt 6 ;; n is ge 7 ;; n is le 7
n is sameas n ;; none is sameas none ;; range is callable ;; n is callable ;; 'upper' is filter ;; 'zz' is filter
'odd' is test ;; s is escaped ;; not n is odd ;; n is not odd ;; n is string or t ;; -5 | abs ;; -5.5 | abs
neg | abs ;; [1, 2, 3, 4, 5] | batch(2) | list ;; [1, 2, 3] | batch(2, 0) | list
[1, 2, 3, 4, 5] | slice(3) | list ;; [1, 2, 3, 4] | slice(3, 0) | list ;; 'hELLO' | capitalize
'ab' | center(6) ~ '|' ;; l | count ;; nope | default('x') ;; d.nope | d('y') ;; none | default('x')
none | default('x', true) ;; '' | default('x', boolean=true) ;; nope | default ;; 'a' | default('b')
d | dictsort ;; d | dictsort(true) ;; d | dictsort(reverse=true) ;; {'a': 2, 'b': 1} | dictsort(by='value')
html | e ;; html | escape ;; l | first ;; l | last ;; [] | first ;; s | first ;; u | last ;; '3.5' | float
'x' | float ;; 'x' | float(1.5) ;; n | float ;; ' 12 ' | int ;; '3.9' | int ;; 'x' | int ;; 'x' | int(5)
'ff' | int(0, 16) ;; '0x1A' | int(0, 16) ;; 2.9 | int ;; -2.9 | int ;; '-12' | int ;; t | int ;; '1_000' | int
people | groupby('age') | map('first') | list
people | groupby('pet.kind', default='-') | map(attribute='grouper') | list
(people | groupby('age'))[0].list | length ;; (people | groupby('age') | last).grouper ;; lines | indent
lines | indent(2, true) ;; lines | indent(2, blank=true) ;; lines | indent('> ') ;; d | items | list
nope | items | list ;; words | join ;; words | join(', ') ;; l | join('-') ;; people | join(',', 'name')
people | join(',', attribute='age') ;; s | list ;; l | length ;; d | length ;; s | length ;; 'ABC' | lower
people | map(attribute='name') | list ;; people | map(attribute='pet.kind') | list
people | map(attribute='pet.kind', default='?') | list ;; words | map('upper') | join ;; l | map('string') | join
['1', 'x'] | map('int', 5) | list ;; l | max ;; l | min ;; words | max ;; words | min(case_sensitive=true)
people | max(attribute='age') ;; [] | max ;; l | reject('odd') | list ;; l | select('odd') | list
l | select | list ;; [0, '', 1] | select | list ;; [0, 1] | reject | list ;; l | select('gt', 1) | list
l | select('>', 1) | list ;; people | selectattr('pet') | map(attribute='name') | list
people | selectattr('age', 'equalto', 30) | map(attribute='name') | list
people | rejectattr('age', '==', 30) | list | length ;; people | selectattr('name', 'in', ['Cy']) | list
none | select | list ;; none | map('upper') | list ;; 'abc' | replace('b', 'x') ;; 'aaa' | replace('a', 'b', 2)
l | reverse | list ;; 'abc' | reverse ;; 2.5 | round ;; 3.5 | round ;; 2.675 | round(2) ;; 7 | round
2.1 | round(method='ceil') ;; 2.9 | round(method='floor') ;; 1234.5 | round(-2) ;; 2.345 | round(2, 'floor')
l | sort ;; l | sort(reverse=true) ;; words | sort ;; words | sort(case_sensitive=true)
people | sort(attribute='age') | map(attribute='name') | list
people | sort(attribute='age,name') | map(attribute='name') | list
people | sort(attribute='age', reverse=true) | map(attribute='name') | list ;; n | string ~ 1 ;; l | sum
people | sum(attribute='age') ;; l | sum(start=10) ;; [1.5, 2] | sum ;; d | tojson ;; d | tojson(indent=2)
d | tojson(sort_keys=true) ;; d | tojson(separators=(',', ':')) ;; u | tojson ;; u | tojson(ensure_ascii=true)
html | tojson ;; none | tojson ;; '\x01\x7f\t' | tojson ;; [] | tojson(indent=2) ;; {} | tojson
[1, [2, {}]] | tojson(indent=1) ;; (1, 2) | tojson ;; {1: 2, none: 3, true: 4, 1.5: 5} | tojson ;; 1e16 | tojson
d | tojson(indent='--') ;; w | trim ~ '|' ;; 'xxaxx' | trim('x') ;; s | truncate(8) ;; s | truncate(8, true)
s | truncate(6, true, '..', 0) ;; 'short' | truncate ;; words | unique | list ;; words | unique(true) | list
[1, 2, 1] | unique | list ;; 'a b&c/d\u00e9' | urlencode ;; "one two, it's" | wordcount ;; 'abc' | upper | lower
(1, 2, 3) | join ;; 'a' | string | length ;; quote | list | first ;; [quote] ;; ['"', '\'"', '\n\\']
["\u00e9\u200b\x00"] ;; '\x41\u00e9\101\q' ;; 'tab\there' ;; "d\"q" ;; nope | length ;; nope | join
nope | upper ;; nope | list ;; nope | string ;; nope == nope2 ;; nope | tojson is string if none else 'ok'
l | string ;; s | attr('upper') is callable ;; d | attr('a') ;; [[1, 2], [3]] | sum(start=[]) ;; n.__class__
s.__init__ ;; d.items | first if none else 1 ;; '%s' % html | safe ;; '<' + (html | safe) ;; (html | safe) + '<'
(html | safe) ~ '<' ;; [1, 2] == [1, 2.0] ;; {'a': [1]}['a'][0] ;; {'b': 2}.b ;; [1, 2, 3][-2] ;; 'abc'[1]
1.5 is integer ;; 5 | d(1) ;; '' is none ;; 'a' ~ 1 + 2 ;; 1 + 2 ~ 'a' ;; 2 * 3 ~ 4 ;; not 1 == 2
'a' in 'abc' and 'b' in 'abc' ;; 1 if 0 else 2 if 0 else 3 ;; [1 if t else 2, 3] ;; {'k': 1 if none else 2}
l | map('default', 1) | list ;; strftime_now('%Y-%m-%d')
strftime_now('%d %b %Y, %H:%M:%S %p %A %j %y %B %a %I %% %U %w') ;; strftime_now('%F %T %D %e')
'x'.join(['a', 'b'])|upper ;; l|length > 2 ;; n|string|length == 1 ;; words[1:]|join('+')
(l|first)|string + 'x' ;; s.split(' ')[-1] ;; s.split(' ')[0].lower().strip('h') ;; d.a[4].replace("'", '-')
people[0].pet.kind|upper ;; people[2].pet ;; people[2].pet is defined ;; "\u00df".upper() ;; "\u0130".lower()
'STRASSE'.casefold() ;; '\u0434\u0430'.upper() ;; '\u03a3\u0391'.lower() ;; 'x\u00a0'.strip() ~ '|'
'\u3000x\u2003' | trim ;; 1 < 2 and 2 < 1 or 3 > 2
"""

BLOCKS = [
    '{% if n > 5 %}a{% elif n %}b{% else %}c{% endif %}', '{% if nope %}a{% elif n == 7 %}b{% else %}c{% endif %}', '{% if none %}a{% elif nope %}b{% else %}c{% endif %}',
    '{% for i in l %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %}', '{% for i in empty %}{{ i }}{% else %}none{% endfor %}',
    '{% for i in l if i > 1 %}{{ loop.index }}:{{ i }} {% endfor %}', '{% for i in l if i > 5 %}x{% else %}none{% endfor %}',
    '{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}', '{% for k in d %}{{ k }}{% endfor %}', '{% for c in "h\u00e9y" %}[{{ c }}]{% endfor %}',
    '{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}',
    '{% for i in l %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {% endfor %}', '{% for i in l %}{{ loop.cycle("a", "b") }}{% endfor %}',
    '{% for i in [1, 1, 2, 2, 1] %}{{ loop.changed(i) }} {% endfor %}', '{% for i in l %}{% for j in l %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}',
    '{% for x in tree recursive %}{{ loop.depth }}:{{ x.v }}{% if x.c %}({{ loop(x.c) }}){% endif %}{% endfor %}', '{% for i in range(10) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 6 %}{% break %}{% endif %}{{ i }}{% endfor %}',
    '{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}', '{% set ns = namespace(x=1, y="a") %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}',
    '{% set a, b = 1, 2 %}{{ a }}{{ b }}', '{% set (a, b) = (1, [2]) %}{{ a }}{{ b }}', '{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}', '{% set x %}a{{ n }}b{% endset %}{{ x }}|{{ x | length }}',
    '{% set x | upper | replace("A", "z") %}a{{ n }}b{% endset %}{{ x }}', '{% if true %}{% set x = 5 %}{% endif %}{{ x }}', '{% for i in [1] %}{% set y = 5 %}{% endfor %}{{ y }}',
    '{% macro m(a, b=2, c=none) %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c=4) }}{{ m(b=1, a=0) }}{{ m() }}', '{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}',
    '{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(1) %}body{% endcall %}', '{% macro m(l) %}{% for i in l %}{{ caller(i, loop.index) }}{% endfor %}{% endmacro %}{% call(x, k) m(l) %}<{{ x }}{{ k }}>{% endcall %}',
    '{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}', '{% macro fact(k) %}{% if k < 2 %}1{% else %}{{ k * fact(k - 1) | int }}{% endif %}{% endmacro %}{{ fact(10) }}', '{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m("x") | upper }}{{ m("y") ~ "z" }}{{ m(1) | length }}',
    '{% macro a(x) %}{{ x }}{% endmacro %}{% macro b(x) %}({{ a(x) }}){% endmacro %}{{ b(1) }}', '{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}', '{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(1) }}', '{% macro m(x) %}{% set x = x + 1 %}{{ x }}{% endmacro %}{{ m(1) }}{{ x }}',
    '{% filter upper %}abc {{ s }}{% endfilter %}', '{% filter replace("a", "b") | upper %}aXa{% endfilter %}', '{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a }}', '{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q }}',
    '{% generation %}x{{ n }}{% endgeneration %}', '{% raw %}{{ x }} {% if %} {# #}{% endraw %}', 'a\n  {%- raw -%}  b  {%- endraw -%}  c', '{# comment #}a{# {{ x }} #}b', 'a {#- c -#} b', 'a {#- c #} b', 'a\n  {# c #}\nb',
    'a\n  {% if t %}\n    b\n  {% endif %}\nc', 'a  {%- if t %}  b  {%- endif %}  c', 'a  {%- if t -%}  b  {%- endif -%}  c', 'a {{- n -}} b', 'a {{ n -}} b', '  {{ n }}\n{{ n }}\n', '  {%+ if t %}x{% endif %}\n', '{% if t +%}\nx{% endif %}', 'a\n{% if t %}\n\nb{% endif %}\n\n',
    'x {% if t %} y {% endif %} z', '   {% if t %}   \n   y{% endif %}', 'a\r\nb\rc\n\n', '{% for i in l %}\n{{ i }}\n{% endfor %}\n', '{% for i in l -%}\n  {{ i }}\n{%- endfor %}', '{{ "a" }}{# c #}\n{{ "b" }}', '\t{% set x = 1 %}\t{{ x }}', '{{ 1, 2 }}', '{{ (1) }}{{ ((2)) }}',
    '{{ {"a": {"b": 1}}}}', '{{ "}}" }}{{ "%}" }}', "{{ '{{' }}", '{% set x = "%}" %}{{ x }}', '{{ d.items()|list|length }}', '{%if t%}a{%endif%}', '{{n}}{{-n-}}{{n}}', '{% set _ = none %}{{ _ }}', '{{ raise_exception("no: " ~ n) }}', '{% if t %}{{ raise_exception("Bad \\"q\\"") }}{% endif %}',
    '{{ nope.x }}', '{{ nope() }}', '{{ d.nope.x }}', '{{ none.x }}', '{{ none.x.y }}', '{{ l.x.y }}', '{{ none + 1 }}', '{{ "a" + 1 }}', '{{ 1 + "a" }}', '{{ "a" + l }}', '{{ 1 / 0 }}', '{{ 1 // 0 }}', '{{ 1 % 0 }}', '{{ n() }}', '{{ "a" < 1 }}', '{{ none < 1 }}', '{{ none | length }}', '{{ 1 in 5 }}', '{{ 1 in "a" }}', '{% for x in none %}{% endfor %}', '{% for x in 5 %}{% endfor %}', '{% set a, b = [1] %}',
    '{% set a, b = [1, 2, 3] %}', '{{ nope + 1 }}', '{{ "a" + nope }}', '{{ -nope }}', '{{ nope[0] }}', '{{ l[nope] }}', '{{ l["x"] }}', '{{ [1, "a"] | sort }}', '{{ "a" | items | list }}', '{{ d.update(x=1) }}', '{{ d.pop("a") }}', '{% set d.x = 1 %}', '{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}', '{% macro m(a) %}{% endmacro %}{{ m(z=1) }}',
    '{{ "abc".index("z") }}', '{{ "%d" % "x" }}', '{{ "%s %s" % "a" }}', '{{ "x".split("") }}', '{{ [] | sum + nope }}', '{{ range(200000) }}', '{{ nope | tojson }}', '{{ (l | map("upper")) | tojson }}', '{{ ([1] | map("string") | list) | tojson }}', '{{ l | map("upper") | list }}',
    '{% if %}{% endif %}', '{% if t %}', '{{ 1 +', '{{ (1 }}', '{% for x l %}{% endfor %}', '{% endif %}', '{% frob %}', '{{ 1 | nope }}', '{{ 1 is nope }}', "{{ 'abc }}", '{% include "x" %}', '{% import "x" as y %}', '{% extends "x" %}', '{{ }}', '{% set %}', '{# no end', '{% raw %} no end', '{% break %}', '{{ a b }}', '{{ 1 ! 2 }}', '{% macro %}{% endmacro %}', '{% else %}', '{{ [1, 2 }}', '{{ {1: } }}',
    '{% for m in people %}{{ "<|" + m.name|lower + "|>\\n" }}{{ m.age }}{% if loop.nextitem is defined and loop.nextitem.age != m.age %}!{% endif %}{% endfor %}', '{% set x = l | map("string") %}{{ x | join }}{{ x | join }}', '{% set o = [] %}{% for g in people | groupby("age") %}{{ g.grouper }}:{% for p in g.list %}{{ p.name }}{% endfor %} {% endfor %}',
    '{%- for key, items in people|groupby("age") -%}{{ key }}{{ items|length }}{%- endfor -%}', '{% for i in range(3) %}{% set x = i %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}', '{% for i in l %}{% for j in [1] %}{% set i = 9 %}{% endfor %}{{ i }}{% endfor %}', '{% set ns = namespace() %}{% set ns.a = [] %}{% set ns.a = ns.a + [1] %}{{ ns.a }}{{ ns.b }}', '{{ loop }}', '{% for i in l %}{{ loop.nope }}{% endfor %}',
    '{% for i in [3] %}{% if i is divisibleby 3 and not i is even %}ok{% endif %}{% endfor %}', '{% set x = namespace(v=none) %}{{ x.v }}{% set x.v = "z" %}{{ x.v }}', '{% for a in l %}{% else %}{% endfor %}.', '{% if l %}{% if not empty %}y{% endif %}{% endif %}', '{% for i in "ab" %}{{ loop.length }}{% endfor %}', '{{ dict(d, z=1).z }}{{ d.z }}', '{{ d.copy() == d }}', '{{ "a"\n~ "b" }}',
]

class Generation(Extension):
    tags = {'generation'}
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
        return nodes.CallBlock(self.call_method('body'), [], [], body).set_lineno(line)
    def body(self, caller): return caller()

class Raised(Exception): pass

def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', Generation])
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    def raise_exception(message): raise Raised(message)
    env.filters['tojson'] = tojson
    env.globals['raise_exception'] = raise_exception
    env.globals['strftime_now'] = NOW.strftime
    return env

def quoted(text):
    out = ''
    for b in text.encode('utf-8'):
        if b in b'"\\': out += '\\' + chr(b)
        elif b == 10: out += '\\n'
        elif b == 63: out += '\\?'
        elif 32 <= b < 127: out += chr(b)
        else: out += '\\%03o' % b
    return '"' + out + '"'

def literal(text, indent):
    """The C literal in lines of at most 120 columns."""
    pieces, piece = [], ''
    for c in text:
        if len(quoted(piece + c)) > 110 - indent: pieces.append(piece); piece = ''
        piece += c
    return ('\n' + ' ' * indent).join(quoted(p) for p in pieces + [piece])

def main():
    rows = []
    for source in ['{{ ' + e + ' }}' for e in EXPRESSIONS.strip().replace('\n', ' ;; ').split(' ;; ')] + BLOCKS:
        try: kind, text = 'TEXT', environment().from_string(source).render(json.loads(json.dumps(DATA)))
        except Raised as e: kind, text = 'RAISES', str(e)
        except Exception as e: kind, text = 'FAILS', str(e).split('\n')[0][:100]
        rows.append('    {GOLDEN_%s,\n     %s,\n     %s},\n' % (kind, literal(source, 5), literal(text, 5)))
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'template_goldens.h')
    with open(path, 'w') as f:
        f.write('/* template_goldens.h, written by tests/make_template_goldens.py: what Jinja2 makes of templates. Not to be edited. */\n\n')
        f.write('static const char golden_variables[] =\n    %s;\n\n' % literal(json.dumps(DATA, ensure_ascii=False), 4))
        f.write('enum { GOLDEN_TEXT, GOLDEN_RAISES, GOLDEN_FAILS };\n\nstatic const struct golden {\n    int kind;\n    const char *source, *text; /* the output, or the message */\n} goldens[] = {\n')
        f.write(''.join(rows) + '};\n')
    print(len(rows), 'templates,', sum('GOLDEN_TEXT' in r for r in rows), 'texts')

main()
