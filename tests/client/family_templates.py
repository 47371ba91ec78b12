"""Chat templates in the manner of public model families: each with the jinja its family needs.

Written for these tests; the real ones are longer, with other marks, and of the same build.
"""

from __future__ import annotations

from tests.client.filter_template import FILTERS
from tests.client.thinking_families import THINKING_FAMILIES
from tests.client.tool_families import TOOL_FAMILIES

# One expression per turn, no control of spaces.
CHATML = """{% for m in messages %}\
{{ '<|' + m['role'] + '>\\n' + m['content'] | trim + '<end>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant>\\n' }}{% endif %}"""

# Qwen: a tools branch, the last question searched backwards, reasoning split off, runs of results.
REASONING = r"""
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- elif messages[0].role == 'system' %}
    {{- '<sys>' + messages[0]['content'] + '</sys>\n' }}
{%- else %}
    {{- '<sys>default</sys>\n' }}
{%- endif %}
{%- set found = namespace(open=true, at=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- if found.open and m.role == "user" and m.content is string
           and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}
        {%- set found.open = false %}
        {%- set found.at = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {%- set text = m.content if m.content is string else '' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<a>' }}
        {%- if loop.index0 > found.at and (loop.last or thought) %}
            {{- '(' + thought.strip('\n') + ')' + text }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if call.arguments is string %}{{- call.name + call.arguments }}
            {%- else %}{{- call.name + (call.arguments | tojson) }}{%- endif %}
        {%- endfor %}
        {{- '</a>\n' }}
    {%- elif m.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<t>' }}{%- endif %}
        {{- '<r>' + m.content + '</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '</t>' }}{%- endif %}
    {%- elif not (m.role == "system" and loop.first) %}
        {{- '<' ~ m.role ~ '>' ~ m.content|string ~ '</>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<a>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '()' }}{%- endif %}
{%- endif %}
"""

# Llama 3.1 and 3.2: names that may be undefined, the date, one call at a time, results of any kind.
DATED = r"""
{{- bos_token }}
{%- if my_tools is defined %}{%- set tools = my_tools %}{%- endif %}
{%- if not today is defined %}
    {%- if strftime_now is defined %}{%- set today = strftime_now("%d %b %Y") %}
    {%- else %}{%- set today = "some day" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instructions = "" %}
{%- endif %}
{{- "<h>system</h>\n\n" }}
{%- if builtin is defined or tools is not none %}{{- "with tools\n" }}{%- endif %}
{{- "Today: " + today + "\n\n" + instructions + eos_token }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time, please!") }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<h>assistant</h>' -}}
        {{- '{"' + call.name + '": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {%- for name, value in call.arguments | items %}
            {{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
    {%- elif m.role in ("tool", "ipython") %}
        {{- "<h>result</h>" }}
        {%- if m.content is mapping or (m.content is iterable and m.content is not string) %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
    {%- else %}
        {{- '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\n\n' }}{%- endif %}
"""

# Llama 2: roles must alternate, the instructions go into the first turn, all on one line.
ALTERNATING = """{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}\
{% set turns = messages[1:] %}{% else %}{% set first = false %}{% set turns = messages %}\
{% endif %}\
{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must take turns: ' ~ loop.index) }}{% endif %}\
{% set text = '{' + first + '}\\n' + m['content'] if loop.index0 == 0 and first != false \
else m['content'] %}{% if m['role'] == 'user' %}{{ bos_token + '[' + text.strip() + ']' }}\
{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

# Mistral v0.3: messages selected and compared, counters over loops, JSON cut open, ids checked.
SELECTING = r"""
{%- set system = messages[0]["content"] if messages[0]["role"] == "system" else none %}
{%- set turns = messages if system is none else messages[1:] %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set count = namespace() %}
{%- set count.n = 0 %}
{%- for m in turns %}
    {%- if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (count.n % 2 == 0) %}
            {{- raise_exception("User and assistant take turns, after an optional system!") }}
        {%- endif %}
        {%- set count.n = count.n + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and (m == asked[-1]) %}{{- "[TOOLS]" }}{%- endif %}
        {{- "[I]" }}
        {%- if m == asked[-1] and system is not none %}{{- system + "\n\n" }}{%- endif %}
        {{- m["content"] + "[/I]" }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {%- for call in m.tool_calls %}
            {%- set json = call.function|tojson %}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception("an id has nine letters") }}
            {%- endif %}
            {{- json[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif m["role"] == "assistant" %}
        {{- " " + m["content"]|trim + eos_token}}
    {%- elif m["role"] == "tool" %}
        {%- set text = m.content.content if m.content is defined and m.content.content is defined
                       else m.content %}
        {{- '{"content": ' + text|string + ', "id": "' + m.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception("unknown role " + m["role"]) }}
    {%- endif %}
{%- endfor %}
"""

# Gemma and Mistral Small: content in parts, roles renamed, newlines inside strings, the date.
PARTS = r"""{{ bos_token }}
{%- set today = strftime_now("%Y-%m-%d") -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "It is " + today -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for m in turns -%}
    {%- set role = "model" if m['role'] == 'assistant' else m['role'] -%}
    {{ '<turn>' + role + '
' + (prefix if loop.first else "") }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}
            {%- if part['type'] in ['image', 'image_url'] -%}
                {{ '<image>' }}
            {%- elif part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- else -%}
                {{ raise_exception('Only text and images!') }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Content of no kind") }}
    {%- endif -%}
    {{ '</turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn>model
'}}
{%- endif -%}
"""

# Phi: further keys of a message, an else for the generation prompt.
KEYS = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}\
{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}{{ m['tools'] }}\
{% endif %}\
{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}\
{{ eos_token }}{% endif %}"""

# gpt-oss: macros that call themselves, types written out, turns that look ahead, thinking.
MACROS = r"""
{%- macro kind(spec, nullable=false) -%}
    {%- if spec.type == "array" -%}{{- kind(spec['items']) + "[]" if spec['items'] else 'any' }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string
             and spec.type is not mapping -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}{{- spec.type }}{%- endif -%}
    {%- if nullable %}{{- " | null" }}{%- endif -%}
{%- endmacro -%}
{%- macro header() -%}
    {%- if identity is not defined %}{%- set identity = "A model." %}{%- endif %}
    {{- identity + "\n" + strftime_now("%Y-%m-%d") + "\n" }}
    {%- for name, spec in {"a": {"type": "array", "items": {"type": ["x", "y"]}},
                           "b": {"enum": ["p", "q"]}, "c": {"type": "z"}}.items() %}
        {{- name + "?: " + kind(spec, loop.last) + ",\n" }}
    {%- endfor %}
{%- endmacro -%}
{{- "<s>system<m>" }}{{- header() }}{{- "<e>" }}
{%- set lead = messages[0].content if messages[0].role in ["developer", "system"] else "" %}
{%- set turns = messages[1:] if lead else messages %}
{%- if lead or tools %}{{- "<s>developer<m>" + lead + "<e>" }}{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for m in turns -%}
    {%- if m.role == 'assistant' and "tool_calls" in m -%}
        {%- set ahead = namespace(answered=false) %}
        {%- for later in turns[loop.index:] %}
            {%- if later.role == 'assistant' and "tool_calls" not in later %}
                {%- set ahead.answered = true %}
            {%- endif %}
        {%- endfor %}
        {%- if m.thinking and not ahead.answered %}{{- "<think>" + m.thinking }}{%- endif %}
        {%- set call = m.tool_calls[0] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- "<s>to=" + call.name }}
        {{- (call.content_type if call.content_type is defined else "json") + "<m>" }}
        {{- call.arguments|tojson }}
        {%- set last_call.name = call.name %}
    {%- elif m.role == 'assistant' -%}
        {%- if loop.last and not add_generation_prompt and "thinking" in m %}
            {{- "<think>" + m.thinking }}
        {%- endif %}
        {{- "<s>assistant<m>" + m.content }}
        {%- set last_call.name = none %}
    {%- elif m.role == 'tool' -%}
        {%- if last_call.name is none %}
            {{- raise_exception("A result of no call!") }}
        {%- endif %}
        {{- "<s>" + last_call.name + "<m>" + m.content|tojson }}
    {%- else -%}
        {{- "<s>" + m.role + "<m>" + m.content }}
    {%- endif -%}
    {{- "<e>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<s>assistant{%- endif -%}
"""

# DeepSeek: flags in one namespace, set and read over the whole text, marks that are not ASCII.
FLAGS = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = 1 %}\
{% endif %}\
{% set ns = namespace(called=false, results=false, system='') %}\
{%- for m in messages if m['role'] == 'system' %}\
{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m['content'] %}{%- endfor %}\
{{ bos_token }}{{ ns.system }}{%- for m in messages %}{%- if m['role'] == 'user' %}\
{%- set ns.results = false -%}{{'<¦U¦>' + m['content']}}{%- endif %}\
{%- if m['role'] == 'assistant' and 'tool_calls' in m %}{%- for call in m['tool_calls'] %}\
{%- if not ns.called %}{{'<¦calls▁begin¦>' + call['type'] + '\\n```json\\n' \
+ call['function']['arguments']|tojson + '\\n```'}}{%- set ns.called = true -%}\
{%- else %}{{'\\n' + call['function']['name']}}{%- endif %}{%- endfor %}{%- endif %}\
{%- if m['role'] == 'assistant' and 'tool_calls' not in m %}{% set text = m['content'] %}\
{% if '</think>' in text %}{% set text = text.split('</think>') | last %}{% endif %}\
{{ ('<¦results▁end¦>' if ns.results else '<¦A¦>') + text + eos_token}}\
{%- set ns.results = false -%}{%- endif %}{%- if m['role'] == 'tool' %}\
{{ ('\\n' if ns.results else '<¦results▁begin¦>') + m['content']}}{%- set ns.results = true -%}\
{%- endif %}{%- endfor -%}\
{% if add_generation_prompt and not ns.results %}{{'<¦A¦>'}}{% endif %}"""

# SmolLM 3: what the model wrote is marked for training, switches are in the instructions.
MARKED = r"""
{#- switches #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- if "/no_think" in messages[0].content -%}{%- set mode = "/no_think" -%}{%- endif -%}
    {%- set lead = messages[0].content.replace("/no_think", "").rstrip() -%}
{%- endif -%}
{{- "Today: " ~ strftime_now("%d %B %Y") ~ "\nMode: " + mode + "\n\n" -}}
{%- if lead -%}{{- lead + "\n\n" -}}{%- endif -%}
{%- if xml_tools or python_tools -%}{{- "### Tools\n" -}}{%- endif -%}
{%- for m in messages -%}
    {%- set text = m.content if m.content is string else "" -%}
    {%- if m.role == "assistant" -%}
        {% generation %}
        {%- set text = "<think></think>\n" ~ text if mode == "/no_think" else text -%}
            {{ "<a>" + text.lstrip("\n") + "</a>\n" }}
        {% endgeneration %}
        {{ text | length }}
        {%- generation -%} x {%- endgeneration -%}
    {%- else -%}
        {{ "<" + m.role + ">" + text + "\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<a>" }}{%- endif -%}
"""

# Granite: documents and controls that nobody gives, the generation prompt inside the loop.
DOCUMENTS = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set lead = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set lead = strftime_now('%B %d, %Y') + "." %}
    {%- if tools and documents %}{%- set lead = lead + " Both." %}
    {%- elif tools is not none %}{%- set lead = lead + " Tools." %}
    {%- elif documents is not none %}{%- set lead = lead + " Documents." %}
    {%- elif thinking is defined and thinking %}{%- set lead = lead + " Think." %}{%- endif %}
    {%- if controls and 'length' in controls %}{%- set lead = lead + controls.length %}{% endif %}
    {%- set turns = messages %}
{%- endif %}
{{- '<r>system</r>' + lead + '\n' }}
{%- for m in turns %}
    {{- '<r>' + m['role'] + '</r>' + (m['content'] or '') + '\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<r>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '</r>' }}
    {%- endif %}
{%- endfor %}
"""

# Command-R: neighbours in the loop, break and continue, JSON laid out, blocks that are filtered.
LOOPS = r"""
{%- macro pages(documents) -%}
{%- for page in documents %}{{ loop.index0 }}: {{ page | tojson(indent=2) }}{% endfor %}
{%- endmacro -%}
{%- macro listed(calls) -%}
[
{%- for call in calls %}
    {"id": "{{ loop.index0 }}", "name": "{{ call['function']['name'] }}", "parameters":
     {{ call['function']['arguments']|tojson }}}{% if not loop.last %},{% endif %}
{%- endfor %}
]
{%- endmacro -%}
{{ bos_token }}
{%- set roles = dict(user="USER", assistant="CHATBOT", system="SYSTEM") %}
{%- set seen = namespace(results=[]) %}
{%- if documents %}{{ pages(documents) }}{%- endif %}
{%- for m in messages %}
    {%- if m.role|lower == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}<results>{% endif %}
        {%- set seen.results = seen.results + [m.content] %}
        {{- {"results": m.content, "id": m.tool_call_id}
            | tojson(indent=4, ensure_ascii=True, sort_keys=True) }}
        {%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}</>{% endif %}
        {%- continue %}
    {%- endif %}
    {%- if m.role not in roles %}{% break %}{% endif %}
    {{- '<|' ~ roles[m.role] ~ '|>' }}
    {%- if m.tool_calls %}{{ listed(m.tool_calls) }}{% endif %}
    {%- if m.content is defined %}{{ m.content }}{% endif %}
{%- endfor %}
{%- filter upper %}{{ seen.results | map('string') | join('|') }}{% endfilter %}
{%- if add_generation_prompt %}{{ '<|CHATBOT|>' }}{%- endif %}
"""

FAMILIES: dict[str, str] = {
    "chatml": CHATML, "reasoning": REASONING, "dated": DATED, "alternating": ALTERNATING,
    "selecting": SELECTING, "parts": PARTS, "keys": KEYS, "macros": MACROS, "flags": FLAGS,
    "marked": MARKED, "documents": DOCUMENTS, "loops": LOOPS, "filters": FILTERS,
    **TOOL_FAMILIES, **THINKING_FAMILIES,
}  # fmt: skip
