"""The process in which a chat template runs: foreign code, confined by limits of the kernel.

It is started by path, with its limits as arguments, so that nothing but jinja2 is imported.
`renderer` talks to it over the socket that is its stdin, in frames: four bytes of length, then the
content. The process sends an empty frame when it is ready, receives the template once, and then
requests as JSON. Replies are a status byte (t: text, e: an error's text, o: too much output, m: too
much memory) and the text. It ends when the parent closes the socket.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

# After the standard library: a user's folder may have modules of the same names.
sys.path += os.environ.pop("NANOCORE_SYS_PATH", "").split(os.pathsep)

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.utils import Namespace

_LENGTH: Final = struct.Struct("!I")
_MAX_ERROR_CHARS: Final = 1 << 18
_USUAL_SIZE: Final = 256 << 20
"""Upper bound of the address space of Python and jinja2."""


def compile_template(text: str, now: Callable[[], datetime]) -> jinja2.Template:
    """Compile a template in a sandbox, with the filters and globals that transformers defines.

    now: clock for the template's date.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the model's text for training; it has no effect
    here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text_of")
        return [jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)]

    def _text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global `dict`: templates can call it, but get no access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The global `namespace`, without names that begin with an underscore: they expose Python's
    internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name, too
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace is unsafe")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Server:
    """One template, and requests to render it, one after another."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._template: jinja2.Template | None = None
        self._now = datetime.min

    def answer(self, frame: bytearray) -> tuple[bytes, str]:
        try:
            request = json.loads(frame)
            self._now = datetime.fromisoformat(request["now"])
            if self._template is None:
                self._template = compile_template(self._text, lambda: self._now)
            return self._render(request["variables"], request["max_chars"])
        except MemoryError:
            return b"m", ""
        except Exception as error:  # the template is foreign code: report whatever it raises
            return b"e", f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]

    def _render(self, variables: dict[str, Any], max_chars: int) -> tuple[bytes, str]:
        assert self._template is not None
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                return b"o", ""
            pieces.append(piece)
        return b"t", "".join(pieces)


def _read(stream: Any) -> bytearray | None:
    """Read one frame; None once the parent has closed the socket."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    frame = bytearray(length)
    if stream.readinto(frame) < length:
        return None
    return frame


def _limit(max_memory: int) -> None:
    """Forbid files, processes and memory beyond this, and end the process when its CPU time is
    over."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        size = _USUAL_SIZE  # there is no /proc
    resource.setrlimit(resource.RLIMIT_AS, (size + max_memory, size + max_memory))


def main(max_cpu_s: float, max_memory: int) -> None:
    """Serve until the parent is gone.

    max_cpu_s: per rendering; compiling the template counts as part of the first. max_memory: bytes
    in addition to those at the process's start.
    """
    parent = socket.socket(fileno=0)
    stream = parent.makefile("rb")
    _limit(max_memory)
    os.dup2(1, 2)  # errors from here on are sent in frames
    parent.sendall(_LENGTH.pack(0))
    text = _read(stream)
    if text is None:
        return
    server = _Server(text.decode("utf-8", "surrogatepass"))
    while (frame := _read(stream)) is not None:
        # A timer of this process's CPU time: it ends even code that never returns to Python, and
        # does not depend on the machine's load.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        status, answer = server.answer(frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        content = status + answer.encode("utf-8", "surrogatepass")
        parent.sendall(_LENGTH.pack(len(content)) + content)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
