"""Chat templates with tools, in the manner of public families, written for these tests."""

from __future__ import annotations

# Qwen2.5 (Hermes): tools as JSON lines in the system turn, calls and results between tags.
HERMES = r"""
{%- set given = messages[0].content if messages[0].role == 'system' else 'A model am I.' %}
{%- if tools %}
    {{- '<|im_start|>system\n' + given + '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\nCalls: <tool_call>{"name": <n>, "arguments": <a>}</tool_call><|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\n' + given + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first)
           or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{- '\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Qwen3: thoughts of the turns after the last question stay, an empty thought switches them off.
HERMES_THINKING = r"""
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{- part.text if part.type == 'text' else '' }}{%- endfor %}
    {%- else %}{{- '' }}{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\n\n' }}{%- endif %}
    {{- "<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + text_of(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(seeking=true, question=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set text = text_of(m.content) %}
    {%- if ns.seeking and m.role == "user" and not text.startswith('<tool_response>') %}
        {%- set ns.seeking = false %}
        {%- set ns.question = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = text_of(m.content) %}
    {%- if m.role == "user" or (m.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
    {%- elif m.role == "assistant" %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question or preserve_thinking %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- ('\n' if text or not loop.first else '') + '<tool_call>\n{"name": "' }}
            {{- call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == "tool" %}
        {%- if loop.previtem is undefined or loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {%- if loop.nextitem is undefined or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Llama 3.1 and 3.2: tools in the first question, built-in ones behind a python tag, dates.
PYTHON_TAG = r"""
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set lead = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set lead = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if builtin_tools is defined or tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\n' }}
{%- endif %}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{{- lead + '<|eot_id|>' }}
{%- if tools_in_user_message and tools is not none %}
    {%- if messages | length == 0 %}
        {{- raise_exception('No question to put the tools into') }}
    {%- endif %}
    {%- set question = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nYour functions:\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- question + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role in ['ipython', 'tool'] or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls|length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- '<|python_tag|>' + call.name + '.call(' }}
            {%- for name, value in call.arguments | items %}
                {{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ')<|eom_id|>' }}
        {%- else %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}
            {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping or m.content is iterable and m.content is not string %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# Mistral v0.3: tools in a list before the last question, calls in a list, with ids of nine letters.
BRACKETS = r"""
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set f = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in f.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value|tojson }}{%- endif %}
                    {{- ', ' if not loop.last else '}' }}
                {%- endfor %}
                {{- '}' if loop.last else '}, ' }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and messages[0].role == 'system' %}
            {{- '[INST] ' + messages[0].content + '\n\n' + m.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m.content + '[/INST]' }}
        {%- endif %}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have nine letters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('an unknown role: ' + m.role) }}
    {%- endif %}
{%- endfor %}
"""

# Newer Mistral: system prompt and tools between marks of their own, names and arguments apart.
MARKS = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' -}}
    {%- if messages[0].content is string %}{{- messages[0].content }}
    {%- else %}{%- for p in messages[0].content %}{{- p.text }}{%- endfor %}{%- endif %}
    {{- '[/SYSTEM_PROMPT]' }}
    {%- set turns = messages[1:] %}
{%- else %}
    {{- '[SYSTEM_PROMPT]It is ' + strftime_now('%Y-%m-%d') + '.[/SYSTEM_PROMPT]' }}
    {%- set turns = messages %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {{- '[INST]' }}
        {%- if m.content is string %}{{- m.content }}
        {%- else %}
            {%- for p in m.content %}
                {%- if p.type == 'text' %}{{- p.text }}
                {%- elif p.type in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('text and images only') }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- given if given is string else given | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool, please: ' + m.role) }}
    {%- endif %}
{%- endfor %}
"""

# Gemma: no system role, the assistant is called model, turns must alternate.
MODEL_ROLE = r"""
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {{- raise_exception('There is no system role') -}}
{%- endif -%}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles alternate: user, assistant, user, ...') -}}
    {%- endif -%}
    {%- set role = 'model' if m.role == 'assistant' else m.role -%}
    {{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# Phi-4-mini: roles are written into the marks, tools follow the system turn.
ROLE_MARKS = (
    "{% set ns = namespace(told=false) %}{% for m in messages %}"
    "{% if m['role'] == 'system' and tools and not ns.told %}{% set ns.told = true %}"
    "{{ '<|system|>' + m['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|>' + '<|end|>' }}"
    "{% elif m['role'] == 'assistant' and m['tool_calls'] %}{{ '<|assistant|>' }}"
    "{% for c in m['tool_calls'] %}{{ '<|tool_call|>' + (c['function'] | tojson) + "
    "'<|/tool_call|>' }}{% endfor %}{{ '<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + (m['content'] | string) + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}"
    "{% endif %}"
)

TOOL_FAMILIES = {
    "hermes": HERMES, "hermes_thinking": HERMES_THINKING, "python_tag": PYTHON_TAG,
    "brackets": BRACKETS, "bracket_marks": MARKS, "model_role": MODEL_ROLE,
    "role_marks": ROLE_MARKS,
}  # fmt: skip
