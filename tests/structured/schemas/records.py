"""What is drawn out of texts: people, papers, bills, symptoms, and what they are about."""

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
YEAR = integer(1500, 2100)
NAME = text(25, 1)
ADDRESS = record(
    {
        "street": text(30),
        "number?": text(6),
        "postcode": text(pattern="^[0-9]{5}$"),
        "city": text(20),
    }
)
MONEY = record({"amount": number(0, 1e9), "currency": text(pattern="^[A-Z]{3}$")})

RECORDS: dict[str, Schema] = {
    "person": record({"name": NAME, "age": integer(0, 150)}),
    "person-open": record({"name": NAME, "age?": integer(0, 150)}, rest=None),
    "person-full": record(
        {
            "first_name": NAME,
            "last_name": NAME,
            "born?": DATE,
            "email?": maybe(text(format="email")),
            "address?": ADDRESS,
            "married?": maybe(YES_OR_NO),
        }
    ),
    "people": record({"people": many(record({"name": NAME, "role?": text(15)}), 0, 4)}),
    "address": ADDRESS,
    "sentiment": record(
        {"sentiment": one_of("positive", "neutral", "negative"), "confidence": number(0, 1)}
    ),
    "sentiment-aspects": record(
        {
            "aspects": many(
                record({"aspect": text(15, 1), "polarity": one_of(-1, 0, 1), "quote?": text(40)}),
                0,
                3,
            )
        }
    ),
    "topics": record({"topics": many(one_of("politics", "sports", "science", "arts"), 1, 4)}),
    "language": record({"language": text(pattern="^[a-z]{2,3}$"), "script?": text(4, 4)}),
    "toxicity": record(
        {"toxic": YES_OR_NO, "categories": many(one_of("hate", "threat", "spam"), 0, 3)}
    ),
    "summary": record({"summary": text(120, 1), "keywords": many(text(12, 1), 1, 5)}),
    "entities": many(
        record(
            {
                "text": text(20, 1),
                "label": one_of("PER", "ORG", "LOC", "MISC"),
                "start": integer(0, 100000),
                "end": integer(0, 100000),
            }
        ),
        0,
        3,
    ),
    "triples": many(
        {"type": "array", "prefixItems": [NAME, NAME, NAME], "items": False, "minItems": 3}, 1, 3
    ),
    "invoice": record(
        {
            "number": text(pattern="^(INV|RE)-[0-9]{4}-[0-9]{3,5}$"),
            "issued": DATE,
            "due?": maybe(DATE),
            "seller": record({"name": NAME, "vat_id?": text(pattern="^[A-Z]{2}[0-9]{8,12}$")}),
            "lines": many(
                record({"what": text(25, 1), "quantity": number(0, 1000), "price": MONEY}), 1, 2
            ),
            "total": MONEY,
        }
    ),
    "receipt": record(
        {
            "shop": text(20),
            "at": text(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}$"),
            "items": many(record({"name": text(20, 1), "cents": integer(0, 1000000)}), 1, 4),
            "paid_by": one_of("cash", "card", "other"),
        }
    ),
    "paper": record(
        {
            "title": text(80, 1),
            "authors": many(NAME, 1, 3),
            "year": YEAR,
            "doi?": text(pattern=r"^10\.[0-9]{4,9}/[a-z0-9.]{1,20}$"),
            "venue?": maybe(text(30)),
        }
    ),
    "citation": record(
        {"key": text(pattern="^[a-z]+[0-9]{4}[a-z]?$"), "pages?": text(pattern="^[0-9]+-[0-9]+$")}
    ),
    "book": record(
        {
            "title": text(50, 1),
            "isbn": text(pattern="^97[89]-?[0-9]{10}$"),
            "pages?": integer(1, 5000),
        }
    ),
    "film": record(
        {"title": text(40, 1), "year": YEAR, "rating?": number(0, 10), "cast": many(NAME, 0, 3)}
    ),
    "recipe": record(
        {
            "name": text(40, 1),
            "serves": integer(1, 20),
            "ingredients": many(
                record(
                    {"item": text(20, 1), "amount": number(0, 5000), "unit": one_of("g", "ml", "x")}
                ),
                1,
                3,
            ),
            "steps": many(text(50, 1), 1, 3),
        }
    ),
    "medication": record(
        {
            "drug": text(25, 1),
            "dose_mg": number(0, 10000),
            "frequency": one_of("daily", "twice daily", "weekly", "as needed"),
            "route?": one_of("oral", "iv", "im", "topical"),
        }
    ),
    "symptoms": record(
        {
            "symptoms": many(
                record({"name": text(20, 1), "days?": integer(0, 365), "severity": integer(1, 10)}),
                1,
                3,
            ),
            "urgent": YES_OR_NO,
        }
    ),
    "lab-values": {
        "type": "object",
        "additionalProperties": record({"value": number(0, 10000), "unit": text(8)}),
    },
    "job-ad": record(
        {
            "title": text(40, 1),
            "company": text(30, 1),
            "remote": either(YES_OR_NO, one_of("hybrid")),
            "salary?": record({"min": integer(0, 10**7), "max": integer(0, 10**7)}),
            "skills": many(text(15, 1), 1, 4),
        }
    ),
    "resume": record(
        {
            "name": NAME,
            "jobs": many(
                record(
                    {"employer": text(20, 1), "from": YEAR, "to": either(YEAR, {"const": "today"})}
                ),
                0,
                2,
            ),
            "degrees?": many(one_of("BSc", "MSc", "PhD"), 0, 3),
        }
    ),
    "meeting": record(
        {
            "date": DATE,
            "present": many(NAME, 1, 3),
            "actions": many(record({"who": NAME, "what": text(40, 1), "by?": maybe(DATE)}), 0, 2),
        }
    ),
    "contract": record(
        {
            "parties": many(NAME, 2, 2),
            "effective": DATE,
            "term_months": either(integer(1, 600), {"const": "indefinite"}),
            "governing_law?": text(30),
        }
    ),
    "crime-report": record(
        {
            "case": text(pattern="^[A-Z]{2}[0-9]{6}$"),
            "at": text(format="date-time"),
            "weapons": many(text(12), 0, 2),
        }
    ),
    "quiz": record(
        {
            "question": text(60, 1),
            "options": many(text(20, 1), 4, 4),
            "correct": integer(0, 3),
        }
    ),
    "grade": record({"score": integer(0, 100), "feedback": text(100), "passed": YES_OR_NO}),
    "review": record({"stars": integer(1, 5), "title?": text(30), "verified": YES_OR_NO}),
    "math-steps": record(
        {
            "steps": many(record({"explanation": text(50), "output": text(25)}), 1, 3),
            "final": text(20),
        }
    ),
    "sum": record({"a": integer(0, 999), "b": integer(0, 999), "sum": integer(0, 1998)}),
    "weather-report": record(
        {
            "station": text(pattern="^[A-Z]{4}$"),
            "celsius": number(-90, 60),
            "wind": record({"knots": integer(0, 200), "from": integer(0, 359)}),
            "clouds": many(one_of("FEW", "SCT", "BKN", "OVC"), 0, 4),
        }
    ),
    "chemical": record(
        {
            "name": text(25, 1),
            "formula": text(pattern="^([A-Z][a-z]?[0-9]{0,2}){1,6}$"),
            "cas?": text(pattern="^[0-9]{2,7}-[0-9]{2}-[0-9]$"),
        }
    ),
    "dna": record({"sequence": text(pattern="^[ACGT]{8,40}$"), "strand": one_of("+", "-")}),
    "phone-numbers": many(text(pattern=r"^\+[1-9][0-9]{6,14}$"), 1, 3),
    "coordinates": record({"points": many(many(number(-180, 180), 2, 2), 1, 4)}),
    "event-log": many(
        record(
            {"t": number(0), "level": one_of("debug", "info", "warn", "error"), "msg": text(40)}
        ),
        1,
        3,
    ),
    "family": {
        "$defs": {
            "person": record({"name": text(12, 1), "children": many(ref("person"), 0, 2)}),
        },
        "$ref": "#/$defs/person",
    },
    "table": record(
        {
            "columns": many(text(10, 1), 2, 2),
            "rows": many(many(either(text(8), number(), {"type": "null"}), 2, 2), 0, 3),
        }
    ),
    "yes-no-unknown": one_of(True, False, None),
    "label-only": one_of("spam", "ham"),
    "score-only": integer(0, 10),
    "unicode-names": record(
        {"имя": text(15), "年齢": integer(0, 150), "größe_cm?": number(0, 300)}
    ),
    "spaced-names": record({"Full Name": text(20), "Date of Birth": DATE, "Is Active?": YES_OR_NO}),
}
