#!/usr/bin/python3
"""Writes tests/grammar_cases.h: schemas, texts, and what Python's jsonschema says of them (python3-jsonschema).
   /usr/bin/python3 tests/make_grammar_cases.py > tests/grammar_cases.h
   /usr/bin/python3 tests/make_grammar_cases.py check < LINES     lines of schema TAB text: all texts must be valid"""
import json, sys
import jsonschema

checker = jsonschema.FormatChecker(["date", "uuid", "ipv4"])


def valid(schema, text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


TREE = {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [
    {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}},
    "$ref": "#/$defs/node"}
# (schema, values): each value is written in three styles
CASES = [
    ({}, [1, -2.5, "x", None, True, [], {}, [1, "a", {"b": [None, False]}], {"a": {"b": {"c": [1, 2, [3]]}}}, 1e300, "\u00e9\U0001f600\n\\\""]),
    ({"type": "integer"}, [0, 1, -1, 10, 123456, "1", 1.5, None]),
    ({"type": "integer", "minimum": 3, "maximum": 1205}, [2, 3, 9, 10, 11, 99, 100, 999, 1000, 1199, 1204, 1205, 1206, 2000, 12050, -3, 0]),
    ({"type": "integer", "minimum": -17, "maximum": 5}, [-18, -17, -16, -10, -9, -1, 0, 1, 5, 6, 10, -170]),
    ({"type": "integer", "exclusiveMinimum": -100, "exclusiveMaximum": -7}, [-101, -100, -99, -98, -10, -9, -8, -7, -6, 0, 7]),
    ({"type": "integer", "minimum": 250}, [249, 250, 251, 300, 999, 1000, 12345678901, 25, 2, -250, 0]),
    ({"type": "integer", "maximum": -42}, [-41, -42, -43, -50, -99, -100, -4, -420, 0, 42]),
    ({"type": "integer", "minimum": 0}, [0, 1, 10, -1, -10]),
    ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, [1, 2, 3, 4]),
    ({"type": "number"}, [0, 1, 2.5, -0.125, 1e-7, 1e22, "1"]),
    ({"type": ["string", "null"]}, ["", "abc", None, 1, False]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["", "a", "ab", "abc", "abcd", "abcde", "\u00e9\u00e9", "\U0001f600\U0001f600\U0001f600\U0001f600", "\n\t", "\"\\"]),
    ({"type": "string", "minLength": 3}, ["ab", "abc", "abcdefghijkl"]),
    ({"type": "string", "pattern": "^[a-z]+-\\d{2,3}$"}, ["a-12", "abc-123", "abc-1234", "-12", "a-1", "A-12", "a-12 "]),
    ({"type": "string", "pattern": "b(c|d)?e"}, ["be", "abcef", "bde", "bcde", "b e", "xxbeyy\"", ""]),
    ({"type": "string", "pattern": "^(foo|ba[rz])$|^[ \\t]*x"}, ["foo", "bar", "baz", "bax", "x", "  xyz", " foo"]),
    ({"type": "string", "pattern": "^[^\"a-c]*$"}, ["", "def", "a", "\"", "\\", "\n", "\u20ac"]),
    ({"type": "string", "pattern": "^\\w+\\.\\w{1,3}\\$?$"}, ["a.b", "file.txt", "file.text", ".b", "a.b$"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "2024-13-01", "2024-04-31", "2024-12-31", "24-01-01", "0001-01-01", "0000-01-01"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.255.255.255", "256.0.0.1", "1.2.3", "192.168.1.99"]),
    ({"enum": ["red", "green", 3, None, [1, 2], {"a": "b"}]}, ["red", "green", "blue", 3, 4, None, [1, 2], [1], {"a": "b"}, {"a": "c"}, ""]),
    ({"const": "a\"b\u00e9"}, ["a\"b\u00e9", "a", ""]),
    ({"type": "string", "enum": ["x", 5, "y"]}, ["x", "y", 5, "z"]),
    ({"type": "array", "items": {"type": "boolean"}}, [[], [True], [True, False, True], [1], {}]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, "2"]]),
    ({"type": "array", "minItems": 1}, [[], [1], [None, "a"]]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 1}, [[], ["a"], ["a", 1], ["a", 1, 2], [1]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, [[], [1], [1, 2], [1, 2, 2], [2], [1, 1]]),
    ({"type": "array", "maxItems": 0}, [[], [1]]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
     [{}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": None}, {"b": "x", "c": None}, {"a": 1}, {"a": "1", "b": "x"}, {"b": "x", "d": 1}]),
    ({"type": "object", "properties": {"ab": {"type": "integer"}, "abc": {"type": "integer"}, "\u00e9\"": {"type": "null"}}, "additionalProperties": {"type": "string"}},
     [{}, {"ab": 1}, {"a": "x"}, {"ab": 1, "abc": 2, "abcd": "y"}, {"ab": "x"}, {"abc": "x"}, {"abd": "x"}, {"": "x"}, {"x": 1}, {"\u00e9\"": "x"}, {"\u00e9": "x", "\n": "y"}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"a": "x"}]),
    ({"type": "object"}, [{}, {"a": 1}, {"a": {"b": [1]}, "c": "d"}, [], 1]),
    ({"type": "object", "properties": {"x": False, "y": True}, "additionalProperties": False}, [{}, {"y": 1}, {"x": 1}]),
    (TREE, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}, {"v": 1}, {"v": 1, "next": 2}, None]),
    ({"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "maxLength": 1}]}, [9, 10, 11, "", "a", "ab", None]),
    ({"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"], "anyOf": [{"properties": {"k": {"maxLength": 2}, "n": {"type": "integer"}}},
      {"properties": {"k": {"minLength": 5}}}], "title": "t"}, [{"k": "ab"}, {"k": "abc"}, {"k": "abcde"}, {}, {"k": "ab", "n": 1}]),
    ({"oneOf": [{"type": "object", "properties": {"t": {"const": "a"}, "n": {"type": "integer"}}, "required": ["t"], "additionalProperties": False},
                {"type": "object", "properties": {"t": {"const": "b"}, "s": {"type": "string"}}, "required": ["t"], "additionalProperties": False}, {"type": "null"}]},
     [{"t": "a", "n": 1}, {"t": "a"}, {"t": "b", "s": "x"}, {"t": "b", "n": 1}, {"t": "c"}, None, 1]),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"], "minimum": 3}, {"maximum": 7, "minimum": 1}]}, [2, 3, 7, 8, "a", None]),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "integer"}, "a": {"minimum": 5}}, "required": ["b"]}]},
     [{"a": 5, "b": 1}, {"a": 4, "b": 1}, {"a": 5}, {"b": 1}]),
    ({"$defs": {"s": {"type": "string"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/s", "maxLength": 2, "description": "d"}}, "required": ["x"]},
     [{"x": "ab"}, {"x": "abc"}, {"x": 1}, {}]),
    ({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, [[], [[]], [[], [[], []]], [[], [], []], [1]]),
    ({"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object", "$schema": "https://json-schema.org/draft/2020-12/schema"}, [{"a": True}, {}, {"a": 0}]),
]


def c_string(text):
    out = ""
    for b in text.encode():
        out += "\\" + chr(b) if chr(b) in "\"\\" else chr(b) if 32 <= b < 127 and chr(b) != "?" else "\\%03o" % b
    return '"' + out + '"'


def main():
    if sys.argv[1:] == ["check"]:
        n = 0
        for line in sys.stdin.buffer.read().decode().split("\n"):
            if "\t" not in line:
                continue
            schema, text = line.split("\t", 1)
            n += 1
            if not valid(json.loads(schema), text):
                sys.exit("not valid: %s\nof %s" % (text, schema))
        print("%d texts are valid" % n)
        return
    print("/* Made by make_grammar_cases.py: a schema, then texts: + valid, - not valid, as jsonschema %s says. */" % jsonschema.__version__)
    print("static const char *const grammar_cases[] = {")
    for schema, values in CASES:
        print("    %s," % c_string(json.dumps(schema)))
        seen = set()
        for value in values:
            for style in ({}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}):
                text = json.dumps(value, **style)
                # a \u escape spells a character in a second way: patterns, constants and named keys take the first one
                spelled = "\\u" in text and any(k in schema for k in ("pattern", "const", "enum", "properties"))
                if text in seen or spelled:
                    continue
                seen.add(text)
                print("    %s," % c_string(("+" if valid(schema, text) else "-") + text))
    print("};")


main()
