"""A chat template that uses as much of jinja2 as possible."""

from __future__ import annotations

# Of no family: filters, tests, globals and names, as many as possible.
FILTERS = r"""
{%- for m in messages %}
{{ loop.index }}/{{ loop.length }} {{ loop.cycle('odd', 'even') }} {{ m | tojson }}
{{ m.items() | list | length }} {{ m | dictsort | first | last }} {{ m.keys() | sort | join(',') }}
{{ m.get('name', 'nobody') | title }} {{ m | tojson(separators=(',', ':'), sort_keys=true) }}
{{ m.role | upper | replace('S', '$') | e }} {{ m.content | string | reverse }} {{ m }}
{{ (m.content | default('no content', true) | string)[:9] }} {{ "%s!" | format(m.role) }}
{%- if m.unheard_of is not defined %} {{ m.unheard_of }}{{ m['more'] | default('-') }}{% endif %}
{%- if m.content is none %} none{% endif %}
{%- endfor %}
{{ [messages|length, 1.5, true, none, "<'&é中\u2028>"] | tojson }}
{{ {'b': 1, 'a': [1, {'x': none}]} | tojson(indent=2) }} {{ tojson is defined }}
{{ messages | map(attribute='role') | unique | join(' ') }} {{ range(3) | sum }} {{ 7 // 2 }}
{{ messages | groupby('role') | map('first') | join(' ') }} {{ [3, 1] | sort }} {{ 'abc'[::-1] }}
{{ messages | rejectattr('role', 'in', ['user', 'system']) | list | count }}
{{ tools is defined }} {{ tools is none }} {{ documents is defined }} {{ documents is none }}
{{ bos_token }} {{ eos_token }} {{ pad_token is defined }} {{ unk_token | default('no unk') }}
{{ image_token }} {{ add_generation_prompt }} {{ enable_thinking is defined }} {{ chat_template }}
{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %A %j') }} {{ strftime_now(format='%y') }}
{{ joiner is defined }} {{ cycler is defined }} {{ lipsum is defined }} {{ namespace is defined }}
{% set ns = namespace({'a': 1}, b=2, self=3) %}{% set ns.c = ns.a + ns.b %}{{ ns.c + ns.self }}
{{ dict(a=1, **{'b': 2}) }} {{ dict.fromkeys('ab', 0) }} {{ dict([('k', 'v')]).k }} {{ [1] + [2] }}
{% raw %}{{ raw }}{% endraw %} {{ "\n\t" }}|{{- " x " -}}|  {{ 'a' 'b' }} {{ '{}'.format('<') }}
{{ "é".encode('utf-8') | length }} {{ "&<>" | escape }} {{ "<b>x</b>" | striptags | wordcount }}
    {% if true %}
  indented
    {% endif %}
"""
