"""Structured outputs that were made to break an engine: deep, huge, ambiguous, or just wrong.

Each is (kind, text). None is too large for the wire.
"""

from __future__ import annotations

import json
from typing import Any, Final


def _chain(rules: int, body: str) -> str:
    """Rules, each of which names the next: recursion as deep as there are."""
    lines = (f"r{i}: {body} r{(i + 1) % rules}?" for i in range(rules))
    return "start: r0\n" + "\n".join(lines)


def _nested(depth: int, open_: str, inner: str, close: str) -> str:
    return open_ * depth + inner + close * depth


def _alternatives(count: int) -> Any:
    """2 to the power of count objects, if one multiplies out."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"a{i}": {"type": "string"}}},
                    {"properties": {f"b{i}": {"type": "integer"}}},
                ]
            }
            for i in range(count)
        ]
    }


_SCHEMAS: dict[str, Any] = {
    "ref_to_itself": {"$ref": "#"},
    "refs_in_a_circle": {
        "$defs": {
            "a": {"allOf": [{"$ref": "#/$defs/b"}]},
            "b": {"allOf": [{"$ref": "#/$defs/a"}]},
        },
        "$ref": "#/$defs/a",
    },
    "recursive_any_of": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"$ref": "#"}]},
    "alternatives_20": _alternatives(20),
    "alternatives_300": _alternatives(300),
    "one_of_300": {
        "oneOf": [
            {"type": "object", "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]}
            for i in range(300)
        ]
    },
    "all_of_types_40": {"allOf": [{"type": ["string", "integer", "object"]} for _ in range(1500)]},
    "pattern_properties": {
        "patternProperties": {
            f"^{chr(97 + i)}.*x{{0,1000}}$": {"type": "string"} for i in range(26)
        }
    },
    "overlapping_patterns": {
        "patternProperties": {
            f"{chr(97 + i)}.{{{i}}}$": {"type": "string", "pattern": f".*{i}.{{50}}"}
            for i in range(20)
        }
    },
    "multiple_of_tiny": {"type": "number", "multipleOf": 1e-9, "minimum": 0, "maximum": 1e300},
    "multiple_of_prime": {
        "type": "integer",
        "multipleOf": 7919,
        "minimum": 0,
        "maximum": 99999999999,
    },
    "multiple_of_large": {"type": "integer", "multipleOf": 999999937},
    "multiples_of_all": {"allOf": [{"type": "integer", "multipleOf": p} for p in range(2, 60)]},
    "integer_bounds_float": {"type": "integer", "minimum": -1e308, "maximum": 1e308},
    "integer_bounds_long": {
        "type": "integer",
        "minimum": 123456789012345678901234567890,
        "maximum": 1234567890123456789012345678901,
    },
    "integer_bounds_endless": {"type": "integer", "maximum": 10**4000},
    "min_items_nested": {
        "type": "array",
        "minItems": 10**6,
        "items": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 1e6}},
    },
    "min_items_huge": {"type": "array", "minItems": 2**31, "maxItems": 2**32 + 3},
    "max_items_huger": {"type": "array", "minItems": 2**63, "maxItems": 2**64},
    "min_length_huge": {"type": "string", "minLength": 2**31 - 1, "maxLength": 2**32 - 6},
    "max_length_million": {"type": "string", "maxLength": 10**6},
    "min_length_negative": {"type": "string", "minLength": -1},
    "min_length_above_max": {"type": "string", "minLength": 5, "maxLength": 2},
    "pattern_and_length": {"type": "string", "pattern": "^(a|aa|aaa)*$", "maxLength": 60000},
    "patterns_intersected": {
        "allOf": [{"type": "string", "pattern": f"{c}.{{30}}{c}"} for c in "abcdefghijklmnop"]
    },
    "array_of_patterns": {
        "type": "array",
        "minItems": 1000,
        "maxItems": 100000,
        "items": {"type": "string", "pattern": "^[a-z]{3,100}$"},
    },
    "enum_5000": {"enum": [f"value{i}" for i in range(5000)]},
    "properties_3000": {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(1800)},
    },
    "properties_optional_1800": {"properties": {f"p{i}": {} for i in range(3000)}},
    "min_properties_of_many": {
        "properties": {f"p{i}": {} for i in range(2000)},
        "minProperties": 1000,
    },
    "refs_chained": {
        "$ref": "#/$defs/r0",
        "$defs": {
            f"r{i}": {"properties": {"n": {"$ref": f"#/$defs/r{i + 1}"}}} for i in range(1000)
        }
        | {"r1000": {}},
    },
    "refs_chained_bare": {
        "$ref": "#/$defs/r0",
        "$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(1500)} | {"r1500": {}},
    },
    "refs_doubling": {
        "$ref": "#/$defs/r0",
        "$defs": {
            f"r{i}": {"allOf": [{"$ref": f"#/$defs/r{i + 1}"}, {"$ref": f"#/$defs/r{i + 1}"}]}
            for i in range(60)
        }
        | {"r60": {"type": "object"}},
    },
    "prefix_items_doubling": {
        "$ref": "#/$defs/r0",
        "$defs": {
            f"r{i}": {
                "type": "array",
                "prefixItems": [{"$ref": f"#/$defs/r{i + 1}"}] * 2,
                "minItems": 2,
            }
            for i in range(60)
        }
        | {"r60": {"type": "null"}},
    },
    "all_formats": {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "string", "format": one}
                for one in (
                    "date-time", "uri", "email", "ipv4", "ipv6", "hostname", "uuid", "duration",
                    "time", "date",
                )
            ]
        },
    },
    "nul_and_controls": {"properties": {"\x00\x1f": {"const": "\x00\u2028\x7f"}}},
    "guidance_lenient": {"x-guidance": {"lenient": True}, "not": {}},
    "guidance_separator": {"x-guidance": {"item_separator": "x{99999}"}, "type": "array"},
    "guidance_no_object": {"x-guidance": 5},
    "deep_64": json.loads(_nested(30, '{"items":[', "{}", "]}").replace('"items":[', '"allOf":[')),
}  # fmt: skip

_REGEXES: dict[str, str] = {
    "groups_30000": _nested(30000, "(", "a", ")"),
    "groups_200": _nested(200, "(", "a", ")"),
    "stars_200": _nested(200, "(", "a", ")*"),
    "classes_30000": _nested(30000, "[", "a", "]"),
    "counts_300": "a" + "{2}" * 300,
    "counts_nested_7": "((((((a{100}){100}){100}){100}){100}){100}){100}",
    "counts_nested_3": "((a{1000}){1000}){1000}",
    "count_huge": "a{1000000000}",
    "count_beyond": "a{99999999999999999999}",
    "alternatives_9000": "|".join(f"a{i}" for i in range(9000)),
    "alternatives_of_words": "|".join(f"{'ab' * (i % 7)}{i}.*" for i in range(5000)),
    "suffix_300": "(.*a.{300})",
    "suffixes": "(.*a.{15}){3}",
    "suffix_both": "(a|b)*a(a|b){60}",
    "overlapping_counts": "(a|b|ab|ba){1,2000}(x|xy|yx){0,3000}z",
    "optional_5000": "a?" * 5000 + "a" * 5000,
    "optional_dots": ".?" * 20000,
    "unicode_5000": "\\p{L}{1,5000}",
    "unicode_classes": "[\\p{L}&&[^\\p{Lu}]]{1,900}" * 20,
    "case_folded": "(?i)" + "äöüßéΣ" * 5000,
    "nothing": "[^\\s\\S]",
    "empty": "",
    "lookahead": "(?=a)b",
    "backreference": "(a)\\1",
    "lone_backslash": "abc\\",
    "slashes": "/" * 60000,
    "nul": "\x00{3}",
    "long_text": "a" * 65000,
    "dots_60000": "." * 60000,
}

_LARKS: dict[str, str] = {
    "parentheses_30000": "start: " + _nested(30000, "(", '"a"', ")"),
    "parentheses_100": "start: " + _nested(100, "(", '"a"', ")"),
    "left_recursion": 'start: start start | "a" | ',
    "ambiguous": 'start: s\ns: s s s | s s | "a" | ""',
    "ambiguous_two": 'start: s\ns: s s | "a" | "b" | ""',
    "nullable": 'start: a*\na: b*\nb: c*\nc: ""',
    "counts": 'start: ("a"{1,100000}){1,100000}',
    "counts_nested": "start: " + _nested(6, "(", '"a" | "aa"', "){1,1000}"),
    "rules_chained_2000": _chain(2000, '"x"'),
    "rules_chained_3700": _chain(3700, '"x"'),
    "rules_in_a_row": "start: " + " ".join(f"r{i}" for i in range(2300)) + "\n"
    + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 2300}?' for i in range(2300)),
    "rules_overlapping": "start: " + " | ".join(f"r{i}" for i in range(2000)) + "\n"
    + "\n".join(f'r{i}: "x{i % 7}" r{(i + 1) % 2000}?' for i in range(2000)),
    "rules_renamed": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
    + '\nr5000: "a"',
    "terminals_renamed": "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(5000))
    + '\nR5000: "a"',
    "terminals_doubling": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60))
    + '\nR60: "a"',
    "rules_doubling": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60))
    + '\nr60: "a"',
    "rules_nullable": "start: r0\n"
    + "\n".join(f"r{i}: r{i + 1} r{i + 1} |" for i in range(60)) + '\nr60: "a"',
    "terminal_in_itself": 'start: A\nA: "a" A',
    "alternatives_of_rules": "start: s\ns: " + " | ".join(f's "{i}" s' for i in range(3000)),
    "single_characters": "start: a+\na: b+\nb: /[a-z]/ | /[a-y]/ | /[a-x]/",
    "intersection": "start: A\nA: /.*/ & ~/a{1,5000}/ & ~/(b.*){20}/",
    "negations": "start: A\nA: /(.*a.{12}){2}/ & ~/(.*b.{12}){2}/",
    "negations_nested": "start: A\nA: " + "~(" * 100 + "/a.*b{1,9}/" + ")" * 100,
    "substring": "start: A\nA: %regex " + json.dumps({"substring_chars": "abcab" * 4000}),
    "json_unfinished": 'start: %json {"type":"object"',
    "json_deep": "start: %json " + '{"items":' * 2000 + "{}" + "}" * 2000,
    "json_deep_100": "start: %json " + '{"items":' * 100 + "{}" + "}" * 100,
    "surrogate": 'start: "\\ud800"',
    "nul": 'start: "\\u0000"+',
    "empty": "",
    "comment": "# nothing",
    "token_range": "start: <[0-99999999]>",
    "token_any": "start: <[*]>*",
    "token_unknown": "start: <|nosuch|>",
    "grammar_unknown": "start: @other",
    "grammar_itself": "start: @tag | @0",
    "lark_nested": "start: " + "%lark { start: " * 50 + '"a"' + " }" * 50,
    "grammar_list": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    "import_all": "%import common (INT, WORD, NUMBER)\nstart: (INT | WORD | NUMBER)*",
    "ignored_everything": "%ignore /.*/\nstart: A*\nA: /[a-z]+/",
    "max_tokens": "start: a\na[max_tokens=2]: /.*/",
    "stop": 'start: a "x"\na[stop="y"]: /.*/',
    "parametric": 'start: p::0\np::_: "a" p::incr(_) | ""',
}  # fmt: skip

EVIL_INPUTS: Final[dict[str, tuple[str, str]]] = (
    {f"json_{name}": ("json", json.dumps(schema)) for name, schema in _SCHEMAS.items()}
    | {f"regex_{name}": ("regex", text) for name, text in _REGEXES.items()}
    | {f"grammar_{name}": ("grammar", text) for name, text in _LARKS.items()}
    | {
        "json_array_200": ("json", _nested(200, '{"items":', "{}", "}")),
        "json_array_30000": ("json", "[" * 30000),
        "json_lone_surrogate": ("json", '{"const":"\\ud800"}'),
        "json_infinite": ("json", '{"maximum":1e999}'),
        "json_nan": ("json", '{"maximum":NaN}'),
        "json_digits_5000": ("json", '{"maximum":' + "9" * 5000 + "}"),
        "json_unfinished": ("json", '{"type":'),
    }
)
