"""Outputs of models in each format, written down from what they look like, and what they say."""

from __future__ import annotations

from typing import NamedTuple

from tests.client.chat.parsed import Joined

B = "\uff5c"


class Shape(NamedTuple):
    """One output. tools, reasoning: the formats. in_reasoning: the prompt opened it."""

    name: str
    tools: str | None
    text: str
    said: Joined
    reasoning: str | None = None
    in_reasoning: bool = False


def call(name: str, arguments: str = "") -> tuple[str, ...]:
    return ("call", name, arguments)


def deepseek(words: str) -> str:
    return f"<{B}{words.replace(' ', chr(0x2581))}{B}>"


PARIS = '{"city": "Paris"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TRICKY = (
    r'{"query": "a \"}\\\" é \u00e9 </tool_call> [TOOL_CALLS] {[", "n": {"x": [1, {"y": null}]}}'
)

HERMES_SHAPES = [
    Shape("single", "hermes", HERMES, [call("get_weather", PARIS)]),
    Shape(
        "text before and parallel",
        "hermes",
        f"Let me look.\n\n{HERMES}\n{HERMES}\n",
        [("text", "Let me look."), call("get_weather", PARIS), call("get_weather", PARIS)],
    ),
    Shape(
        "marks in strings",
        "hermes",
        f'<tool_call>{{"name": "search", "arguments": {TRICKY}}}</tool_call>',
        [call("search", TRICKY)],
    ),
    Shape(
        "arguments first",
        "hermes",
        f'<tool_call>\n{{"arguments": {TRICKY}, "name": "search"}}\n</tool_call>',
        [call("search", TRICKY)],
    ),
    Shape(
        "arguments as a string",
        "hermes",
        '<tool_call>{"name": "search", "arguments": '
        '"{\\"query\\": \\"\\u00e9\\ud83d\\ude00\\n\\"}"}'
        "</tool_call>",
        [call("search", '{"query": "é😀\n"}')],
    ),
    Shape("none", "hermes", '<tool_call>{"name": "now"}</tool_call>', [call("now")]),
    Shape(
        "null", "hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [call("now")]
    ),
    Shape(
        "empty",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [call("now", "{}")],
    ),
    Shape(
        "surplus bracket, text after",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>\nDone. ',
        [call("now", "{}"), ("text", "Done. ")],
    ),
    Shape(
        "unfinished arguments",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": <1\n</tool_call>ok',
        [call("now", '{"a": <1\n'), ("text", "ok")],
    ),
    Shape(
        "line breaks in a string",
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query":\n "a\nb\t\\\nc"}}</tool_call>',
        [call("search", '{"query":\n "a\\nb\\t\\nc"}')],
    ),
    Shape(
        "malformed",
        "hermes",
        "a <tool_call>\n{name: 1}</tool_call>",
        [("text", "a <tool_call>\n{name: 1}</tool_call>")],
    ),
    Shape(
        "a call after a broken one",
        "hermes",
        f" <tool_call> <tool_call>[{HERMES}",
        [("text", " <tool_call> <tool_call>["), call("get_weather", PARIS)],
    ),
    Shape(
        "no call",
        "hermes",
        "  1 < 2 <tool <tool_cal \n\n",
        [("text", "  1 < 2 <tool <tool_cal \n\n")],
    ),
]

CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def parameters(**values: str) -> str:
    return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())


CODER_SHAPES = [
    Shape(
        "by the values that there may be",
        "qwen3_coder",
        CODER.format("get_weather", parameters(level="2", mode="5", size="1"))
        + CODER.format("get_weather", parameters(level="null", mode="x")),
        [
            call("get_weather", '{"level": 2, "mode": 5, "size": "1"}'),
            call("get_weather", '{"level": null, "mode": "x"}'),
        ],
    ),
    Shape(
        "by the schema",
        "qwen3_coder",
        "I look.\n"
        + CODER.format(
            "get_weather",
            parameters(
                city='a "b"\n\tc',
                days=" 3",
                exact="True",
                scale="2",
                filter='{"a": [1]}',
                tags="[1, 2",
                unit="null",
                limit="None",
                place='{"x": 1}',
                other="5",
            ),
        ),
        [
            ("text", "I look."),
            call(
                "get_weather",
                '{"city": "a \\"b\\"\\n\\tc", "days": 3, "exact": true, "scale": 2, '
                '"filter": {"a": [1]}, "tags": "[1, 2", "unit": null, "limit": null, '
                '"place": {"x": 1}, "other": "5"}',
            ),
        ],
    ),
    Shape(
        "parallel, without parameters",
        "qwen3_coder",
        CODER.format("now", "") + "\n" + CODER.format("search", parameters(query="x")),
        [call("now", "{}"), call("search", '{"query": "x"}')],
    ),
    Shape(
        "ends left out",
        "qwen3_coder",
        "<function=search>\n<parameter=query>\na </functio\n<parameter=n>1\n</function>\n",
        [call("search", '{"query": "a </functio", "n": "1"}')],
    ),
    Shape(
        "malformed", "qwen3_coder", "<tool_call>\n<functio n", [("text", "<tool_call>\n<functio n")]
    ),
    Shape("no name", "qwen3_coder", "<function=a<b>", [("text", "<function=a<b>")]),
    Shape(
        "truncated",
        "qwen3_coder",
        "<function=search><parameter=query>ab\n",
        [call("search", '{"query": "ab\\n')],
    ),
]

LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
LLAMA_SHAPES = [
    Shape("single", "llama3_json", LLAMA, [call("get_weather", PARIS)]),
    Shape(
        "marked, typed, parallel",
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; ' + LLAMA + "\n",
        [call("now", "{}"), call("get_weather", PARIS)],
    ),
    *(
        Shape(f"between {between!r}", "llama3_json", text, [call("get_weather", PARIS)] * 2)
        for between in ("", "\n", "; ", ", ", ",\n")
        for text in (f"{LLAMA}{between}{LLAMA}", f"<|python_tag|>{LLAMA}{between}{LLAMA}")
    ),
    *(
        Shape("list", "llama3_json", text, [call("get_weather", PARIS)] * 2)
        for text in (f"[{LLAMA}, {LLAMA}]", f" [ {LLAMA}\n,{LLAMA} ]\n", f"[{LLAMA}] {LLAMA}")
    ),
    Shape(
        "in text",
        "llama3_json",
        f"I look {{at}} [it]:\n\n{LLAMA} And then\n{LLAMA}\nDone.",
        [
            ("text", "I look {at} [it]:"),
            call("get_weather", PARIS),
            ("text", "And then"),
            call("get_weather", PARIS),
            ("text", "Done."),
        ],
    ),
    *(
        Shape("text", "llama3_json", text, [("text", text)])
        for text in (
            '{"name": "Ann", "parameters": {}}',
            '\n{"name": "get_weather"}',
            '{"answer": 1, "name": "now", "parameters": {}}',
            '<|python_tag|>brave_search.call(query="x")',
            " Hello; {} \n",
            '{"name": "no',
            'The list [1, 2] and {"name": "Ann"}',
        )
    ),
    Shape(
        "text behind", "llama3_json", LLAMA + "; {}", [call("get_weather", PARIS), ("text", "; {}")]
    ),
]

ENTRY = f'{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}'
MISTRAL_SHAPES = [
    Shape("array", "mistral", f"[TOOL_CALLS][{ENTRY}]", [call("get_weather", PARIS)]),
    Shape(
        "parallel",
        "mistral",
        f"Sure: [TOOL_CALLS] [{ENTRY}, {ENTRY}] ",
        [("text", "Sure:"), call("get_weather", PARIS), call("get_weather", PARIS)],
    ),
    Shape(
        "newer",
        "mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]search{TRICKY}",
        [call("get_weather", PARIS), call("search", TRICKY)],
    ),
    Shape("empty", "mistral", "[TOOL_CALLS]now[ARGS]{}", [call("now", "{}")]),
    *(
        Shape("text", "mistral", text, [("text", text)])
        for text in ("[1] [TOOL_CALL [TOOL_CALLS", "[TOOL_CALLS] [now]", "[TOOL_CALLS]now now")
    ),
]

PYTHONIC_SHAPES = [
    Shape(
        "values",
        "pythonic",
        "[get_weather(city='It\\'s \"x\"\\n\\x41\\u00e9 [](),', days=-3, tags=(1, 'a', ), "
        "filter={'a': None, 2: [True, False]}, scale=.5), now()]",
        [
            call(
                "get_weather",
                '{"city": "It\'s \\"x\\"\\nAé [](),", "days": -3, "tags": [1, "a"], '
                '"filter": {"a": null, "2": [true, false]}, "scale": 0.5}',
            ),
            call("now", "{}"),
        ],
    ),
    Shape(
        "marked",
        "pythonic",
        'Well. <|python_start|>[search(query="""a\nb""",n=1_0)]<|python_end|>',
        [("text", "Well."), call("search", '{"query": "a\\nb", "n": 10}')],
    ),
    Shape(
        "words",
        "pythonic",
        "[search(query = foo, n=None,)]\n",
        [call("search", '{"query": "foo", "n": null}')],
    ),
    *(
        Shape(
            f"value {value}",
            "pythonic",
            f"[search(query={value})]",
            [call("search", f'{{"query": {said}}}')],
        )
        for value, said in (
            ("'Par' 'is'", '"Paris"'),
            (r"r'a\d'", r'"a\\d"'),
            ("b'ab'", '"ab"'),
            ("f'ab'", '"ab"'),
            ("{1, 2}", "[1, 2]"),
            ("-1", "-1"),
            ("+1.5", "1.5"),
            ("0x1F", "31"),
            ("1e999", '"1e999"'),
            ("a.b(c)", '"a.b(c)"'),
            ("Paris is nice", '"Paris is nice"'),
            (r"'\ud83d\ude00\ud800'", '"😀�"'),
            ("[1, # one\n 2]", "[1, 2]"),
            ("{'a': {1: ...}, None: ()}", '{"a": {"1": "..."}, "null": []}'),
            ("'''a'b'''", '"a\'b"'),
        )
    ),
    Shape(
        "without a name",
        "pythonic",
        "[get_weather('Paris', 3), search(query: 'a', ), search('a', 'b', query='c')]",
        [
            call("get_weather", '{"city": "Paris", "days": 3}'),
            call("search", '{"query": "a"}'),
            call("search", '{"query": "a", "argument_1": "b"}'),
        ],
    ),
    Shape("truncated", "pythonic", "[search(query='ab\\", [call("search")]),
    *(
        Shape("text", "pythonic", text, [("text", text)])
        for text in ("[unknown(a=1)]", "[1, 2] \n", "Hi [now()]", " [now")
    ),
]

LFM2_SHAPES = [
    Shape(
        "with text around",
        "lfm2",
        'I look. <|tool_call_start|>[get_weather(city="Paris", days=3), now()]<|tool_call_end|>'
        "Looking.",
        [
            ("text", "I look."),
            call("get_weather", '{"city": "Paris", "days": 3}'),
            call("now", "{}"),
            ("text", "Looking."),
        ],
    ),
    Shape(
        "after reasoning",
        "lfm2",
        "<think>\nHm [now()]\n</think>\n<|tool_call_start|>[now()]<|tool_call_end|>",
        [("reasoning", "Hm [now()]"), call("now", "{}")],
        "qwen3",
    ),
    Shape("without marks", "lfm2", "[search(query='a')]", [call("search", '{"query": "a"}')]),
    Shape(
        "JSON",
        "lfm2",
        f'<|tool_call_start|>[ {{"name": "search", "arguments": {TRICKY}}}, {{"name": "now", '
        '"arguments": {}}]<|tool_call_end|>now()',
        [call("search", TRICKY), call("now", "{}"), ("text", "now()")],
    ),
    Shape("truncated", "lfm2", "<|tool_call_start|>[search(query='ab", [call("search")]),
    *(
        Shape("text", "lfm2", text, [("text", text)])
        for text in (
            "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>",
            "<|tool_call_start|>[{]<|tool_call_end|>",
            '[{"name": "now", "arguments": {}}]',
        )
    ),
]

_HEAD = deepseek("tool calls begin") + deepseek("tool call begin")
_TAIL = deepseek("tool call end") + deepseek("tool calls end")
_NEXT = deepseek("tool call end") + "\n" + deepseek("tool call begin")
DEEPSEEK_SHAPES = [
    Shape(
        "V3",
        "deepseek_v3",
        f"Ok{_HEAD}function{deepseek('tool sep')}get_weather\n```json\n{PARIS}\n```{_NEXT}"
        f"function{deepseek('tool sep')}now\n```json\n{{}}\n```{_TAIL}",
        [("text", "Ok"), call("get_weather", PARIS), call("now", "{}")],
    ),
    Shape(
        "V3.1",
        "deepseek_v31",
        f"{_HEAD}search{deepseek('tool sep')}{TRICKY}{_TAIL}",
        [call("search", TRICKY)],
    ),
    Shape("text", "deepseek_v3", f"{_HEAD}x", [("text", f"{_HEAD}x")]),
]

HARMONY_SHAPES = [
    Shape(
        "all kinds",
        "harmony",
        "<|channel|>analysis<|message|>Hm <|x.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>",
        [("reasoning", "Hm <|x."), ("text", "I look."), call("now", "{}")],
    ),
    Shape(
        "recipient first, final twice",
        "harmony",
        f" to=functions.search<|channel|>commentary<|message|>{TRICKY}<|call|><|start|>assistant"
        "<|channel|>final<|message|>a\n<|end|><|channel|>final<|message|>b<|return|>",
        [call("search", TRICKY), ("text", "a\n\nb")],
    ),
    Shape("plain", "harmony", " to be", [("text", " to be")]),
    Shape("without headers", "harmony", " a<|end|> b", [("text", " a\n b")]),
    Shape("half a header", "harmony", "<|channel|>anal", []),
]

THINK_SHAPES = [
    Shape(
        "then a call",
        "hermes",
        f"<think>\nAh <tool_call> \n\nso.\n\n</think>\n\nI look. {HERMES}",
        [
            ("reasoning", "Ah <tool_call> \n\nso."),
            ("text", "I look."),
            call("get_weather", PARIS),
        ],
        "qwen3",
    ),
    Shape("opened", None, "\nhm</thin \n</think>\nHi\n", [
        ("reasoning", "hm</thin "), ("text", "Hi\n")
    ], "deepseek_r1", True),
    Shape("opened twice", None, "\n<think>a</think>b", [
        ("reasoning", "a"), ("text", "b")
    ], "deepseek_r1", True),
    Shape("unfinished", "hermes", "<think>\na <tool_call>", [
        ("reasoning", "a <tool_call>")
    ], "qwen3"),
    Shape("empty", None, "<think>\n\n</think>\n\nHi", [("text", "Hi")], "qwen3"),
    Shape("none", None, " Hi </think> <think>", [("text", " Hi </think> <think>")], "qwen3"),
    Shape("mistral", "mistral", "[THINK]a[/THINK][TOOL_CALLS]now{}", [
        ("reasoning", "a"), call("now", "{}")
    ], "mistral"),
]  # fmt: skip

SHAPES = [
    *HERMES_SHAPES, *CODER_SHAPES, *LLAMA_SHAPES, *MISTRAL_SHAPES, *PYTHONIC_SHAPES, *LFM2_SHAPES,
    *DEEPSEEK_SHAPES, *HARMONY_SHAPES, *THINK_SHAPES,
]  # fmt: skip
