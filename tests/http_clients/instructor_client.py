"""instructor: an object of a class in all modes that ask by tools or by a response format."""

from __future__ import annotations

import instructor
from expected import BASE_URL, JSON_QUESTION, MODEL, QUESTION, SUM, ask
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


MODES = {
    instructor.Mode.TOOLS: QUESTION,
    instructor.Mode.TOOLS_STRICT: QUESTION,
    instructor.Mode.JSON_SCHEMA: QUESTION,
}
for mode, question in MODES.items():
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=ask(question), response_model=Sum, temperature=0, max_retries=0
    )
    assert found.sum == SUM, (mode, found)
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=ask(question), response_model=Sum, temperature=0, max_retries=0
    )
    assert last.sum == SUM, (mode, last)

for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none"), mode=mode)
    raw = client.chat.completions.create(
        model=MODEL, messages=ask(JSON_QUESTION), response_model=Sum, temperature=0, max_retries=0
    )
    assert isinstance(raw.sum, int), (mode, raw)
