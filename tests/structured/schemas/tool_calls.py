"""Arguments of functions, as assistants are told to call them."""

from __future__ import annotations

from tests.structured.schemas.notation import (
    YES_OR_NO,
    Schema,
    either,
    integer,
    many,
    maybe,
    number,
    one_of,
    record,
    ref,
    text,
)

DATE = text(format="date")
TIME = text(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$")
CURRENCY = text(pattern="^[A-Z]{3}$")
PLACE = record({"latitude": number(-90, 90), "longitude": number(-180, 180)})

TOOL_CALLS: dict[str, Schema] = {
    "weather": record({"city": text(30), "unit?": one_of("celsius", "fahrenheit")}),
    "weather-forecast": record(
        {"place": PLACE, "days": integer(1, 14), "hourly?": YES_OR_NO, "lang?": text(2, 2)}
    ),
    "add": record({"a": number(), "b": number()}),
    "add-integers": record({"a": integer(), "b": integer()}),
    "calculator": record(
        {"operation": one_of("+", "-", "*", "/"), "operands": many(number(), 2, 4)}
    ),
    "web-search": record(
        {
            "query": text(60, 1, about="What to look for"),
            "num_results?": integer(1, 20),
            "safe?": YES_OR_NO,
            "domains?": many(text(30, pattern=r"^[a-z0-9-]+\.[a-z]{2,6}$"), 0, 3),
        }
    ),
    "send-email": record(
        {
            "to": many(text(format="email"), 1, 2),
            "cc?": many(text(format="email"), 0, 1),
            "subject": text(40, 1),
            "body": text(80),
        }
    ),
    "create-event": record(
        {
            "title": text(40, 1),
            "start": text(format="date-time"),
            "end?": text(format="date-time"),
            "all_day?": YES_OR_NO,
            "attendees?": many(text(20, 1), 0, 3),
        }
    ),
    "set-alarm": record(
        {"time": TIME, "days": many(one_of("mon", "tue", "wed", "thu", "fri"), 1, 5)}
    ),
    "set-timer": record({"seconds": integer(1, 86400), "label?": text(20)}),
    "book-flight": record(
        {
            "origin": text(pattern="^[A-Z]{3}$"),
            "destination": text(pattern="^[A-Z]{3}$"),
            "departure": DATE,
            "return?": DATE,
            "passengers": integer(1, 9),
            "cabin?": one_of("economy", "premium", "business", "first"),
        }
    ),
    "book-table": record(
        {"restaurant": text(30), "people": integer(1, 12), "at": TIME, "note?": maybe(text(40))}
    ),
    "book-hotel": record(
        {
            "city": text(20, 2),
            "check_in": DATE,
            "nights": integer(1, 30),
            "guests": record({"adults": integer(1, 8), "children?": integer(0, 6)}),
        }
    ),
    "convert-currency": record({"amount": number(0), "from": CURRENCY, "to": CURRENCY}),
    "stock-price": record({"ticker": text(pattern="^[A-Z]{1,5}$"), "on?": DATE}),
    "translate": record(
        {
            "text": text(60),
            "source?": text(pattern="^[a-z]{2}(-[A-Z]{2})?$"),
            "target": text(pattern="^[a-z]{2}(-[A-Z]{2})?$"),
        }
    ),
    "run-sql": record(
        {"query": text(80, 1), "limit?": integer(1, 1000), "read_only": {"const": True}}
    ),
    "run-python": record({"code": text(), "timeout_s?": number(0.5, 60)}),
    "run-shell": record(
        {"argv": many(text(20, 1), 1, 5), "cwd?": text(pattern="^/[a-z0-9/_-]{0,30}$")}
    ),
    "read-file": record({"path": text(40, 1), "start_line?": integer(1), "end_line?": integer(1)}),
    "edit-file": record(
        {"path": text(40, 1), "edits": many(record({"old": text(30), "new": text(30)}), 1, 2)}
    ),
    "list-files": record({"folder": text(40), "recursive?": YES_OR_NO, "glob?": text(20)}),
    "git-commit": record(
        {"message": text(72, 1), "files": many(text(30, 1), 1, 4), "sign_off?": YES_OR_NO}
    ),
    "open-issue": record(
        {
            "title": text(60, 1),
            "body?": text(80),
            "labels?": many(one_of("bug", "feature", "docs", "question"), 0, 3),
            "assignee?": maybe(text(pattern="^@[a-z0-9-]{1,20}$")),
        }
    ),
    "play-music": record(
        {"track?": text(30), "artist?": text(30), "shuffle?": YES_OR_NO, "volume?": integer(0, 11)}
    ),
    "lights": record(
        {
            "room": one_of("kitchen", "bedroom", "office", "hall"),
            "state": one_of("on", "off"),
            "brightness?": integer(0, 100),
            "color?": text(pattern="^#[0-9a-fA-F]{6}$"),
        }
    ),
    "thermostat": record({"target_celsius": number(5, 30), "mode": one_of("heat", "cool", "auto")}),
    "navigate": record(
        {
            "from": either(PLACE, text(30)),
            "to": either(PLACE, text(30)),
            "mode?": one_of("walk", "bike", "drive", "transit"),
            "avoid?": many(one_of("tolls", "ferries", "highways"), 0, 3),
        }
    ),
    "send-money": record(
        {
            "to": text(pattern="^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,20}$"),
            "amount_cents": integer(1, 10_000_000),
            "currency": one_of("EUR", "USD", "GBP", "CHF", "JPY"),
            "reference?": text(35),
        }
    ),
    "split-bill": record({"total": number(0, 100000), "people": many(text(12, 1), 2, 4)}),
    "remind": record(
        {"what": text(50, 1), "when": either(text(format="date-time"), integer(1, 10080))}
    ),
    "no-arguments": record({}),
    "final-answer": record({"answer": text(100)}),
    "final-number": record({"answer": integer()}),
    "ask-user": record({"question": text(80, 1), "options?": many(text(20, 1), 2, 4)}),
    "screenshot-click": record(
        {
            "action": one_of("left_click", "right_click", "double_click"),
            "coordinate": {
                "type": "array",
                "prefixItems": [integer(0, 1919), integer(0, 1079)],
                "items": False,
                "minItems": 2,
            },
        }
    ),
    "press-keys": record({"keys": many(one_of("ctrl", "alt", "shift", "enter", "tab", "a"), 1, 3)}),
    "http-request": record(
        {
            "method": one_of("GET", "POST", "PUT", "PATCH", "DELETE"),
            "path": text(pattern="^/[a-z0-9/]{0,30}$"),
            "headers?": {"type": "object", "additionalProperties": text(20)},
            "body?": maybe(text(60)),
        }
    ),
    "vector-search": record(
        {
            "query": text(40, 1),
            "top_k": integer(1, 100),
            "filter?": record(
                {
                    "field": one_of("year", "author", "kind"),
                    "op": one_of("==", "!=", "<", ">=", "in"),
                    "value": either(text(20), number(), many(text(10), 1, 3)),
                }
            ),
        }
    ),
    "plot": record(
        {
            "kind": one_of("line", "bar", "scatter"),
            "x": many(number(), 1, 3),
            "y": many(number(), 1, 3),
            "title?": text(30),
        }
    ),
    "image": record(
        {
            "prompt": text(80, 1),
            "size": one_of("256x256", "512x512", "1024x1024"),
            "n?": integer(1, 4),
            "seed?": maybe(integer(0, 2**32 - 1)),
        }
    ),
    "plan": record({"steps": many(record({"do": text(40, 1), "done": YES_OR_NO}), 1, 4)}),
    "call-any": {
        "anyOf": [
            record({"name": {"const": "weather"}, "arguments": record({"city": text(20)})}),
            record({"name": {"const": "add"}, "arguments": record({"a": number(), "b": number()})}),
            record({"name": {"const": "stop"}, "arguments": record({})}),
        ]
    },
    "call-any-of-defs": {
        "$defs": {
            "search": record({"tool": {"const": "search"}, "query": text(40)}),
            "open": record({"tool": {"const": "open"}, "id": integer(0)}),
            "done": record({"tool": {"const": "done"}, "answer": text(60)}),
        },
        "anyOf": [ref("search"), ref("open"), ref("done")],
    },
    "parallel-calls": many(
        record(
            {"id": text(pattern="^call_[0-9a-f]{8}$"), "name": one_of("f", "g"), "x": integer()}
        ),
        1,
        3,
    ),
    "thought-and-call": record(
        {
            "thought": text(100),
            "call": either(
                record({"tool": {"const": "lookup"}, "key": text(20, 1)}),
                record({"tool": {"const": "finish"}, "result": either(text(40), number())}),
            ),
        }
    ),
    "memory-write": record(
        {
            "key": text(pattern="^[a-z_][a-z0-9_]{0,15}$"),
            "value": either(text(40), number(), YES_OR_NO),
        }
    ),
    "unit-convert": record(
        {
            "value": number(-1000000, 1000000),
            "from": one_of("m", "km", "mi", "ft"),
            "to": one_of("m", "km"),
        }
    ),
    "dice": record({"sides": one_of(4, 6, 8, 10, 12, 20), "times": integer(1, 10)}),
    "vote": record({"choice": one_of("yes", "no", "abstain"), "reason?": text(60)}),
    "move": record({"from": text(pattern="^[a-h][1-8]$"), "to": text(pattern="^[a-h][1-8]$")}),
    "queue-job": record(
        {
            "image": text(pattern=r"^[a-z]{1,12}:[0-9]{1,2}\.[0-9]{1,2}$"),
            "cpus": number(0.25, 64),
            "memory_mib": integer(128, 65536),
            "env?": {"type": "object", "additionalProperties": text(12)},
        },
    ),
    "robot-arm": record(
        {
            "joints_rad": many(number(-3.15, 3.15), 6, 6),
            "gripper": number(0, 1),
            "speed?": number(exclusiveMinimum=0, maximum=1),
        }
    ),
    "filters-optional": record(
        {
            "min_price?": number(0),
            "max_price?": number(0),
            "brand?": text(15),
            "in_stock?": YES_OR_NO,
            "sort?": one_of("price", "rating", "new"),
            "page?": integer(1, 50),
        }
    ),
}
