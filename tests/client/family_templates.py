"""Chat templates in the manner of public model families: each with the jinja its family needs.

Written for these tests; the real ones are longer, with other marks, and of the same build.

chatml: One expression per turn, no control of spaces.
reasoning: Qwen: a tools branch, the last question searched backwards, reasoning split off, runs of
  results.
dated: Llama 3.1 and 3.2: names that may be undefined, the date, one call at a time, results of any
  kind.
alternating: Llama 2: roles must alternate, the instructions go into the first turn, all on one
  line.
selecting: Mistral v0.3: messages selected and compared, counters over loops, JSON cut open, ids
  checked.
parts: Gemma and Mistral Small: content in parts, roles renamed, newlines inside strings, the date.
keys: Phi: further keys of a message, an else for the generation prompt.
macros: gpt-oss: macros that call themselves, types written out, turns that look ahead, thinking.
flags: DeepSeek: flags in one namespace, set and read over the whole text, marks that are not ASCII.
marked: SmolLM 3: what the model wrote is marked for training, switches are in the instructions.
documents: Granite: documents and controls that nobody gives, the generation prompt inside the loop.
loops: Command-R: neighbours in the loop, break and continue, JSON laid out, blocks that are
  filtered.
filters: Of no family: filters, tests, globals and names, as many as possible.
hermes: Qwen2.5 (Hermes): tools as JSON lines in the system turn, calls and results between tags.
hermes_thinking: Qwen3: thoughts of the turns after the last question stay, an empty thought
  switches them off.
python_tag: Llama 3.1 and 3.2: tools in the first question, built-in ones behind a python tag,
  dates.
brackets: Mistral v0.3: tools in a list before the last question, calls in a list, with ids of nine
  letters.
bracket_marks: Newer Mistral: system prompt and tools between marks of their own, names and
  arguments apart.
model_role: Gemma: no system role, the assistant is called model, turns must alternate.
role_marks: Phi-4-mini: roles are written into the marks, tools follow the system turn.
channels: gpt-oss: channels, a developer turn, tools written as TypeScript by macros that call
  themselves.
wide_bars: DeepSeek R1: marks with full-width bars, the answer begins with a thought, old thoughts
  are cut.
wide_bars_switched: DeepSeek V3.1: thinking is a switch, tools are described in Markdown, a prefix
  may be continued.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("families")
FAMILIES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
