"""Chat templates of models that think in channels, in the manner of public families.

Written for these tests, as those of `tool_families`.
"""

# ruff: noqa: RUF001

from __future__ import annotations

# gpt-oss: channels, a developer turn, tools written as TypeScript by macros that call themselves.
CHANNELS = r"""
{%- macro type_of(spec, required=[], level=1) -%}
    {%- if spec.type == 'array' -%}
        {{- type_of(spec['items'], [], level) + '[]' if spec['items'] else 'any[]' }}
    {%- elif spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{- spec.type | join(' | ') }}
    {%- elif spec.oneOf or spec.anyOf -%}
        {%- for option in spec.oneOf or spec.anyOf -%}
            {{- type_of(option, [], level) }}{{- ' | ' if not loop.last }}
        {%- endfor -%}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type in ['integer', 'number'] -%}{{- 'number' }}
    {%- elif spec.type == 'object' and spec.properties -%}
        {{- '{\n' }}
        {%- for name, inner in spec.properties.items() -%}
            {%- if inner.description -%}{{- '// ' + inner.description + '\n' }}{%- endif -%}
            {{- name + ('' if name in (spec.required or []) else '?') + ': ' }}
            {{- type_of(inner, [], level + 1) }}
            {%- if inner.default is defined -%}
                {{- ', // default: ' + (inner.default | tojson if inner.default is not string
                                        else inner.default) }}
            {%- else -%}{{- ',' }}{%- endif -%}
            {{- '\n' }}
        {%- endfor -%}
        {{- '}' }}
    {%- else -%}{{- spec.type or 'any' }}{%- endif -%}
    {%- if spec.nullable -%}{{- ' | null' }}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- '## ' + name + '\n\nnamespace ' + name + ' {\n\n' }}
    {%- for tool in tools -%}
        {%- set f = tool.function -%}
        {{- '// ' + (f.description or '') + '\ntype ' + f.name + ' = (' }}
        {%- if f.parameters and f.parameters.properties -%}
            {{- '_: ' + type_of(f.parameters) }}
        {%- endif -%}
        {{- ') => any;\n\n' }}
    {%- endfor -%}
    {{- '} // namespace ' + name }}
{%- endmacro -%}
{{- '<|start|>system<|message|>' + (model_identity or 'A model of text.') }}
{{- '\nToday: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '\n\n' }}
{%- if builtin_tools %}{{- '# Tools: ' + builtin_tools | join(', ') + '\n\n' }}{%- endif -%}
{{- '# Channels: analysis, commentary, final.' }}
{%- if tools -%}{{- '\nCalls go to the commentary channel.' }}{%- endif -%}
{{- '<|end|>' }}
{%- set lead = messages[0].content if messages[0].role in ['developer', 'system'] else '' %}
{%- set turns = messages[1:] if lead else messages %}
{%- if lead or tools -%}
    {{- '<|start|>developer<|message|>' }}
    {%- if lead -%}{{- '# Instructions\n\n' + lead + '\n\n' }}{%- endif -%}
    {%- if tools -%}{{- '# Tools\n\n' + namespace_of('functions', tools) }}{%- endif -%}
    {{- '<|end|>' }}
{%- endif -%}
{%- set last = namespace(call=none) -%}
{%- for m in turns -%}
    {%- if m.role == 'assistant' -%}
        {%- if m.content and ('<|channel|>analysis' in m.content) -%}
            {{- raise_exception('Channels belong into fields of the message') }}
        {%- endif -%}
        {%- if m.tool_calls -%}
            {%- set later = namespace(final=false) -%}
            {%- for n in turns[loop.index:] if n.role == 'assistant' and not n.tool_calls -%}
                {%- set later.final = true -%}
            {%- endfor -%}
            {%- if m.content and m.thinking -%}{{- raise_exception('one of both') }}
            {%- elif (m.content or m.thinking) and not later.final -%}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
                {{- (m.content or m.thinking) + '<|end|>' }}
            {%- endif -%}
            {%- set call = m.tool_calls[0].function or m.tool_calls[0] -%}
            {{- '<|start|>assistant to=functions.' + call.name }}
            {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set last.call = call.name -%}
        {%- else -%}
            {%- if loop.last and not add_generation_prompt and m.thinking -%}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
            {%- set last.call = none -%}
        {%- endif -%}
    {%- elif m.role == 'tool' -%}
        {%- if last.call is none -%}{{- raise_exception('Nobody has called') }}{%- endif -%}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'user' -%}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}
"""

# DeepSeek R1: marks with full-width bars, the answer begins with a thought, old thoughts are cut.
WIDE_BARS = r"""
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(lead='', first_call=true, after_tool=false) %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.lead = ns.lead + ('\n\n' if ns.lead else '') + m.content %}
{%- endfor %}
{{- bos_token }}{{- ns.lead }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.after_tool = false %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + (call.type or '') }}
            {{- '<｜tool▁sep｜>' + call.function.name + '\n```json\n' -}}
            {{- call.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {%- set text = m.content %}
        {%- if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}
        {{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' }}
        {{- text + '<｜end▁of▁sentence｜>' }}
        {%- set ns.after_tool = false %}
    {%- elif m.role == 'tool' %}
        {{- '\n' if ns.after_tool else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.after_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""

# DeepSeek V3.1: thinking is a switch, tools are described in Markdown, a prefix may be continued.
WIDE_BARS_SWITCHED = r"""
{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{%- set ns = namespace(lead='', open=false) %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.lead = ns.lead ~ ('' if loop.first else '\n\n') ~ m.content %}
{%- endfor %}
{%- if tools %}
    {%- set ns.lead = ns.lead ~ '\n\n## Tools\n' %}
    {%- for tool in tools %}
        {%- set ns.lead = ns.lead ~ '\n### ' ~ tool.function.name ~ '\nDescription: '
            ~ tool.function.description ~ '\n\nParameters: '
            ~ (tool.function.parameters | tojson) ~ '\n' %}
    {%- endfor %}
{%- endif %}
{{- bos_token ~ ns.lead }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.open = true %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if ns.open %}
            {{- '<｜Assistant｜>' + ('<think>' if m.prefix and thinking else '</think>') }}
        {%- endif %}
        {%- set ns.open = false %}
        {%- if m.content %}
            {%- set parts = m.content.split('</think>', 1) %}
            {{- parts[1] if parts | length == 2 else parts[0] }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.open %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

THINKING_FAMILIES = {
    "channels": CHANNELS, "wide_bars": WIDE_BARS, "wide_bars_switched": WIDE_BARS_SWITCHED,
}  # fmt: skip
