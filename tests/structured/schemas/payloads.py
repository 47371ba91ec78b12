"""Bodies of requests and answers, events, documents, and files of settings."""

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

UUID = text(format="uuid")
STAMP = text(format="date-time")
SLUG = text(pattern="^[a-z0-9]+(-[a-z0-9]+){0,3}$")
PORT = integer(1, 65535)
TEXTS = {"type": "object", "additionalProperties": text(15)}
ERROR = record({"code": integer(400, 599), "message": text(40), "details?": many(text(30), 0, 2)})

PAYLOADS: dict[str, Schema] = {
    "user": record({"id": UUID, "handle": SLUG, "created": STAMP, "admin?": YES_OR_NO}),
    "user-patch": record(
        {"handle?": SLUG, "email?": maybe(text(format="email")), "admin?": YES_OR_NO},
        minProperties=1,
    ),
    "error": ERROR,
    "result-or-error": either(
        record({"ok": {"const": True}, "value": text(40)}), record({"error": ERROR})
    ),
    "page": record(
        {
            "items": many(record({"id": integer(1), "name": text(20)}), 0, 3),
            "next?": maybe(text(20)),
        }
    ),
    "json-rpc": record(
        {
            "jsonrpc": {"const": "2.0"},
            "id": either(integer(), text(12), {"type": "null"}),
            "method": text(pattern=r"^[a-z]+(\.[a-z]+){0,2}$"),
            "params?": either(many(number(), 0, 3), TEXTS),
        }
    ),
    "webhook": record(
        {
            "event": one_of("push", "pull_request", "release"),
            "delivery": UUID,
            "payload": {"type": "object"},
        }
    ),
    "order": record(
        {
            "id": text(pattern="^ord_[a-z0-9]{10}$"),
            "status": one_of("pending", "paid", "shipped", "cancelled"),
            "lines": many(
                record({"sku": text(pattern="^[A-Z0-9]{6,10}$"), "quantity": integer(1, 99)}), 1, 3
            ),
            "coupon?": maybe(text(10)),
        }
    ),
    "payment": {
        "oneOf": [
            record({"method": {"const": "card"}, "last4": text(pattern="^[0-9]{4}$")}),
            record(
                {
                    "method": {"const": "iban"},
                    "iban": text(pattern="^[A-Z]{2}[0-9]{2}[A-Z0-9]{10,16}$"),
                }
            ),
            record({"method": {"const": "cash"}}),
        ]
    },
    "product": record(
        {
            "sku": text(pattern="^[A-Z]{3}-[0-9]{4}$"),
            "title": text(40, 1),
            "price": number(0, 100000),
            "tags": many(text(10, 1), 0, 4),
            "dimensions?": record(
                {"w": number(0, 1000), "h": number(0, 1000), "d": number(0, 1000)}
            ),
            "variants?": many(record({"color": text(10), "stock": integer(0, 9999)}), 0, 2),
        }
    ),
    "cart": record({"items": many(record({"p": integer(1, 99999), "n": integer(1, 9)}), 0, 5)}),
    "shipping": record(
        {
            "carrier": one_of("dhl", "ups", "fedex"),
            "weight_kg": number(0, 70),
            "insured?": YES_OR_NO,
        }
    ),
    "comment-thread": {
        "$defs": {
            "comment": record(
                {"author": text(12, 1), "text": text(30), "replies?": many(ref("comment"), 0, 2)}
            )
        },
        "type": "object",
        "properties": {"post": integer(1), "comments": many(ref("comment"), 0, 2)},
        "required": ["post", "comments"],
        "additionalProperties": False,
    },
    "chat-message": record(
        {
            "role": one_of("system", "user", "assistant", "tool"),
            "content": either(
                text(60), many(record({"type": {"const": "text"}, "text": text(30)}), 1, 2)
            ),
            "name?": text(pattern="^[a-zA-Z0-9_-]{1,16}$"),
        }
    ),
    "notification": record(
        {
            "channel": one_of("email", "sms", "push"),
            "to": text(30, 1),
            "at?": STAMP,
            "silent?": YES_OR_NO,
        }
    ),
    "feature-flags": {"type": "object", "additionalProperties": YES_OR_NO},
    "translations": {
        "type": "object",
        "patternProperties": {"^[a-z]{2}$": text(20)},
        "additionalProperties": False,
    },
    "metrics": record(
        {
            "name": text(pattern="^[a-z_]{1,20}$"),
            "points": many(
                {
                    "type": "array",
                    "prefixItems": [integer(0), number()],
                    "items": False,
                    "minItems": 2,
                },
                0,
                3,
            ),
            "labels?": TEXTS,
        }
    ),
    "geojson-point": record(
        {"type": {"const": "Point"}, "coordinates": many(number(-180, 180), 2, 3)}
    ),
    "geojson": {
        "$defs": {
            "position": many(number(-180, 180), 2, 2),
            "geometry": either(
                record({"type": {"const": "Point"}, "coordinates": ref("position")}),
                record(
                    {"type": {"const": "LineString"}, "coordinates": many(ref("position"), 2, 3)}
                ),
            ),
        },
        **record(
            {
                "type": {"const": "Feature"},
                "geometry": maybe(ref("geometry")),
                "properties": maybe(TEXTS),
            }
        ),
    },
    "json-patch": many(
        either(
            record({"op": one_of("add", "replace", "test"), "path": text(20), "value": text(20)}),
            record({"op": {"const": "remove"}, "path": text(20)}),
            record({"op": one_of("move", "copy"), "from": text(20), "path": text(20)}),
        ),
        0,
        3,
    ),
    "oauth-token": record(
        {
            "access_token": text(pattern="^[A-Za-z0-9_-]{20,40}$"),
            "token_type": {"const": "Bearer"},
            "expires_in?": integer(0, 86400),
            "scope?": text(30),
        }
    ),
    "jwt-claims": record(
        {"sub": text(20), "exp": integer(0, 2**31), "aud?": either(text(15), many(text(15), 1, 2))},
        rest=None,
    ),
    "ipam": record(
        {
            "v4": many(text(format="ipv4"), 0, 2),
            "v6?": text(format="ipv6"),
            "gateway?": text(format="ipv4"),
        }
    ),
    "dns-record": record(
        {
            "type": one_of("A", "AAAA", "CNAME", "TXT", "MX"),
            "name": text(format="hostname"),
            "ttl?": integer(60, 86400),
            "value": text(40, 1),
        }
    ),
    "server-config": record(
        {
            "host?": text(30),
            "port": PORT,
            "tls?": record(
                {"cert": text(30), "key": text(30), "min_version?": one_of("1.2", "1.3")}
            ),
            "workers?": either(integer(1, 64), {"const": "auto"}),
        }
    ),
    "database-config": record(
        {
            "url": text(pattern="^postgres://[a-z]{1,10}@[a-z]{1,10}:[0-9]{2,5}/[a-z]{1,10}$"),
            "pool?": record(
                {"min": integer(0, 10), "max": integer(1, 100), "idle_s?": number(0, 3600)}
            ),
            "ssl": one_of("disable", "require", "verify-full"),
        }
    ),
    "logging-config": record(
        {
            "level": one_of("DEBUG", "INFO", "WARNING", "ERROR"),
            "handlers": many(
                either(
                    record({"kind": {"const": "console"}, "color": YES_OR_NO}),
                    record(
                        {
                            "kind": {"const": "file"},
                            "path": text(30, 1),
                            "max_mb?": integer(1, 1024),
                        }
                    ),
                ),
                1,
                2,
            ),
        }
    ),
    "ci-pipeline": record(
        {
            "stages": many(text(10, 1), 1, 3),
            "jobs": {
                "type": "object",
                "additionalProperties": record(
                    {
                        "stage": text(10),
                        "script": many(text(25, 1), 1, 2),
                        "allow_failure?": YES_OR_NO,
                    }
                ),
            },
        }
    ),
    "compose-file": record(
        {
            "version?": one_of("3", "3.8"),
            "services": {
                "type": "object",
                "additionalProperties": record(
                    {
                        "image": text(20, 1),
                        "ports?": many(text(pattern="^[0-9]{2,5}:[0-9]{2,5}$"), 0, 2),
                        "environment?": TEXTS,
                    }
                ),
            },
        }
    ),
    "package-file": record(
        {
            "name": SLUG,
            "version": text(
                pattern=r"^[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(-(alpha|beta|rc)\.[0-9])?$"
            ),
            "private?": YES_OR_NO,
            "scripts?": TEXTS,
            "dependencies?": {
                "type": "object",
                "additionalProperties": text(pattern=r"^[~^]?[0-9]{1,2}\.[0-9]{1,2}$"),
            },
        },
        rest=None,
    ),
    "editor-settings": record(
        {
            "editor.fontSize": integer(6, 72),
            "editor.rulers?": many(integer(1, 200), 0, 3),
            "files.exclude?": {"type": "object", "additionalProperties": YES_OR_NO},
            "workbench.theme?": one_of("light", "dark", "high-contrast"),
        }
    ),
    "training-config": record(
        {
            "model": text(30, 1),
            "learning_rate": number(exclusiveMinimum=0, maximum=1),
            "batch_size": one_of(*(2**i for i in range(11))),
            "optimizer": one_of("adamw", "sgd", "lion"),
            "betas?": {
                "type": "array",
                "prefixItems": [number(0, 1), number(0, 1)],
                "items": False,
                "minItems": 2,
            },
            "warmup_steps?": integer(0, 10000),
        }
    ),
    "cron": record(
        {
            "schedule": text(pattern=r"^(\*|[0-5]?[0-9]) (\*|1?[0-9]|2[0-3]) \* \* \*$"),
            "job": text(20, 1),
        }
    ),
    "firewall-rule": record(
        {
            "action": one_of("allow", "deny"),
            "ports": many(either(PORT, record({"from": PORT, "to": PORT})), 1, 2),
            "source": text(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}$"),
        }
    ),
    "k8s-resource": record(
        {
            "apiVersion": one_of("v1", "apps/v1"),
            "kind": one_of("Pod", "Service", "Deployment"),
            "metadata": record({"name": SLUG, "labels?": TEXTS}),
            "spec": {"type": "object"},
        }
    ),
    "feature-collection": record(
        {"features": many(record({"id": integer(0), "bbox": many(number(), 4, 4)}), 0, 2)}
    ),
    "form": record(
        {
            "fields": many(
                either(
                    record(
                        {
                            "type": {"const": "text"},
                            "label": text(15, 1),
                            "maxLength?": integer(1, 999),
                        }
                    ),
                    record(
                        {
                            "type": {"const": "choice"},
                            "label": text(15, 1),
                            "options": many(text(10, 1), 2, 3),
                        }
                    ),
                    record(
                        {"type": {"const": "check"}, "label": text(15, 1), "default": YES_OR_NO}
                    ),
                ),
                1,
                3,
            )
        }
    ),
    "dashboard": {
        "$defs": {
            "panel": record({"title": text(15, 1), "span": integer(1, 12)}),
            "row": record({"panels": many(ref("panel"), 1, 3), "height?": integer(1, 20)}),
        },
        **record({"title": text(20), "rows": many(ref("row"), 1, 2)}),
    },
    "ui-tree": {
        "$defs": {
            "node": either(
                record({"tag": {"const": "text"}, "value": text(15)}),
                record({"tag": one_of("div", "p", "ul"), "children": many(ref("node"), 0, 2)}),
            )
        },
        "$ref": "#/$defs/node",
    },
    "menu": {
        "$defs": {
            "item": record(
                {"label": text(10, 1), "href?": text(15), "items?": many(ref("item"), 0, 2)}
            )
        },
        "type": "array",
        "items": ref("item"),
        "maxItems": 2,
    },
    "expression": {
        "$defs": {
            "term": either(
                number(-1000, 1000),
                text(pattern="^[a-z]$"),
                record({"op": one_of("+", "-", "*"), "left": ref("term"), "right": ref("term")}),
            )
        },
        "$ref": "#/$defs/term",
    },
    "linked-list": {
        "$defs": {"node": record({"value": integer(0, 99), "next": maybe(ref("node"))})},
        "$ref": "#/$defs/node",
    },
    "search-tree": {
        "$defs": {
            "node": record({"key": integer(0, 999), "left?": ref("node"), "right?": ref("node")})
        },
        "$ref": "#/$defs/node",
    },
    "file-tree": {
        "$defs": {
            "file": record({"name": text(8, 1), "bytes": integer(0)}),
            "folder": record(
                {"name": text(8, 1), "entries": many(either(ref("file"), ref("folder")), 0, 2)}
            ),
        },
        "$ref": "#/$defs/folder",
    },
    "query-filter": {
        "$defs": {
            "filter": either(
                record({"field": text(8, 1), "equals": either(text(10), number(), YES_OR_NO)}),
                record({"not": ref("filter")}),
                record({"and": many(ref("filter"), 1, 2)}),
            )
        },
        "$ref": "#/$defs/filter",
    },
    "any-json": True,
    "any-object": {"type": "object"},
    "any-array": {"type": "array", "maxItems": 3},
    "settings-open": record(
        {"theme?": one_of("light", "dark"), "zoom?": number(0.5, 3)}, rest=True
    ),
}
