"""The flags of `nanocore bench serve`: those of `vllm bench serve`.

In addition there are --engine-endpoint and --curve-dir, for an engine's own wire.
"""

from __future__ import annotations

import argparse
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nanocore.bench.dataset_options import (
    RANDOM,
    TIMED_TRACE,
    DatasetOptions,
    above_zero,
    add_dataset_flags,
    any_number,
    dataset_options,
)
from nanocore.bench.load import Traffic
from nanocore.bench.targets import BACKENDS, NANOCORE, OPENAI, PATHS, Destination, RequestFields
from nanocore.protocol.errors import ConfigError
from nanocore.system.flags import FlagParser, at_least, json_object, server_url, values_of
from nanocore.system.running import find_one
from nanocore.system.standard_streams import complain

METRIC_NAMES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
_SAMPLING: Final[dict[str, Callable[[str], float]]] = {
    "temperature": any_number,
    "top_p": any_number,
    "top_k": int,
    "min_p": any_number,
    "frequency_penalty": any_number,
    "presence_penalty": any_number,
    "repetition_penalty": any_number,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """self_timed: requests arrive at their trace's times. goodput_ms: limits by metric."""

    destination: Destination
    dataset: DatasetOptions
    traffic: Traffic
    fields: RequestFields
    self_timed: bool
    max_concurrency: int | None
    num_warmups: int
    ready_timeout_s: float
    has_progress_bar: bool
    label: str | None
    percentile_metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    save_result: bool
    save_detailed: bool
    append_result: bool
    result_dir: str | None
    result_filename: str | None
    metadata: Mapping[str, str]


def build_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore bench serve",
        "Send requests to an engine, or to a server of OpenAI's API, and measure latencies and "
        "throughput.",
    )
    _add_destination(parser)
    _add_load(parser)
    add_dataset_flags(parser)
    _add_fields(parser)
    _add_result(parser)
    return parser


def parse(arguments: list[str]) -> LoadOptions:
    """Read the command line.

    Raises:
        ConfigError: an invalid flag or value.
        SystemExit: --help.
    """
    given = build_parser().parse_args(arguments)
    dataset = dataset_options(given)
    is_trace = dataset.dataset_name == TIMED_TRACE
    if given.self_timed is not None and not is_trace:
        raise ConfigError("--self-timed is for a trace: --dataset-name timed_trace")
    keeps = given.save_result or given.append_result
    if given.save_detailed and not keeps:
        raise ConfigError("--save-detailed needs --save-result")
    folder = Path(given.result_dir or "")
    if keeps and folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--result-dir {folder} is not a writable folder")
    values = values_of(LoadOptions, given) | {
        "self_timed": is_trace and given.self_timed is not False,
        "has_progress_bar": not given.disable_tqdm,
        "percentile_metrics": _metrics(given.percentile_metrics),
        "goodput_ms": _goodput(given.goodput_ms),
        "metadata": _pairs("--metadata", given.metadata, "="),
    }
    return LoadOptions(
        destination=_destination(given),
        dataset=dataset,
        traffic=Traffic(given.request_rate, given.burstiness),
        fields=_fields(given, dataset),
        **values,
    )


def _add_destination(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("destination").add_argument
    add("--backend", choices=BACKENDS, help="nanocore: an engine's own wire; openai, vllm: "
        "completions; openai-chat: chat completions (default: nanocore with --engine-endpoint, "
        "else openai)")  # fmt: skip
    add("--engine-endpoint", metavar="ENDPOINT",
        help="an engine's, such as ipc://PATH; other backends use its tokenizer (default: the "
        "engine or server of this user that is running)")  # fmt: skip
    add("--curve-dir", metavar="DIR", help="with tcp://: keys of nanocore-keygen")
    add("--base-url", "--url", type=server_url, metavar="URL",
        help="URL of the server, instead of --host and --port")  # fmt: skip
    add("--host", help="host of the server (default: 127.0.0.1, if none is running)")
    add("--port", type=at_least(1), help="port of the server (default: 8000)")
    add("--endpoint", metavar="PATH", help="path of the API (default: the backend's)")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of every request; "
        "OPENAI_API_KEY in the environment is sent as a bearer token")  # fmt: skip
    add("--insecure", action="store_true", help="do not verify the server's certificate")
    add("--model", help="name or folder (default: the server's first model)")
    add("--served-model-name", metavar="NAME", help="model in requests (default: --model)")
    add("--tokenizer", metavar="PATH", help="folder, tokenizer.json or GGUF file (default: that of "
        "the engine or server; of another project's server, that of --model or of its first model, "
        "if it is a local folder)")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=above_zero, default=math.inf, metavar="RPS",
        help="requests per second (default: inf, all at once)")  # fmt: skip
    add("--burstiness", type=above_zero, default=1.0, metavar="X",
        help="shape of the gamma distribution of gaps; 1: Poisson process, less: burstier, "
        "inf: even (default: 1)")  # fmt: skip
    add("--self-timed", action=argparse.BooleanOptionalAction,
        help="requests arrive at the trace's times (default for timed_trace)")  # fmt: skip
    add("--max-concurrency", type=at_least(1), metavar="N",
        help="requests in flight at once (default: no limit)")  # fmt: skip
    add("--num-warmups", type=at_least(0), default=0, metavar="N",
        help="warm-up requests, not measured (default: 0)")  # fmt: skip
    add("--ready-check-timeout-sec", dest="ready_timeout_s", type=at_least(0), default=0,
        metavar="S",
        help="seconds to wait for a first successful request (default: 0, none is sent)",
    )  # fmt: skip


def _add_fields(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action="store_true",
        help="ignore EOS so outputs reach the requested length (always on for random and "
        "timed_trace)")  # fmt: skip
    add("--logprobs", type=at_least(0), metavar="N", help="request the top N logprobs, too")
    for name, kind in _SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X",
            help="sampling parameter of every request (default: the model's)")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON",
        help="extra fields of every HTTP request")  # fmt: skip
    add("--request-id-prefix", metavar="TEXT",
        help="prefix of request ids (default: bench- and random characters)")  # fmt: skip


def _add_result(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES",
        help=f"metrics to report, separated by commas: {', '.join(METRIC_NAMES)} "
        "(default: ttft,tpot,itl)")  # fmt: skip
    add("--metric-percentiles", dest="percentiles", type=_percentiles, default=(99.0,),
        metavar="NUMBERS",
        help="percentiles to report, separated by commas (default: 99)")  # fmt: skip
    add("--goodput", dest="goodput_ms", nargs="+", default=[], metavar="NAME:MS",
        help=f"count requests within all these limits; {', '.join(GOODPUT_METRICS)}")  # fmt: skip
    add("--save-result", action="store_true", help="write the results to a JSON file")
    add("--save-detailed", action="store_true",
        help="with --save-result: include values of each request")  # fmt: skip
    add("--append-result", action="store_true",
        help="with --save-result: append a line to the file")  # fmt: skip
    add("--result-dir", metavar="DIR", help="folder of the file (default: the working directory)")
    add("--result-filename", metavar="FILE", help="its name (default: from the configuration)")
    add("--label", help="prefix of the default file name (default: the backend)")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE",
        help="extra keys for the result JSON")  # fmt: skip
    add("--disable-tqdm", action="store_true", help="do not show a progress bar")


def _find(given: argparse.Namespace) -> None:
    """Name the engine or server of this user that is running, if no flag names one."""
    of_http = given.endpoint, given.served_model_name, given.header, given.extra_body
    is_http = given.backend not in (None, NANOCORE) or any(of_http)
    named = given.engine_endpoint, given.curve_dir, given.base_url, given.host, given.port
    if named != (None,) * len(named):
        return
    found = find_one(endpoint_flag="--engine-endpoint")
    if found is None:
        return
    if found.address.startswith("http") and given.backend != NANOCORE:
        given.base_url = found.address
    elif not is_http:
        given.engine_endpoint, given.curve_dir = found.endpoints[0], found.curve_dir
    else:
        return
    complain(f"measuring the {found}")


def _destination(given: argparse.Namespace) -> Destination:
    _find(given)
    backend = given.backend or (OPENAI if given.engine_endpoint is None else NANOCORE)
    if given.curve_dir is not None and given.engine_endpoint is None:
        raise ConfigError(f"--curve-dir {given.curve_dir}: keys are for --engine-endpoint tcp://")
    if backend == NANOCORE:
        for flag in ("base_url", "host", "port", "endpoint", "served_model_name"):
            if getattr(given, flag) is not None:
                raise ConfigError(
                    f"--{flag.replace('_', '-')} is for HTTP; for an engine, use --engine-endpoint"
                )
        if given.header or given.extra_body:
            raise ConfigError("--header and --extra-body are for HTTP, not for an engine")
    elif given.base_url is not None and (given.host, given.port) != (None, None):
        raise ConfigError("--base-url contains host and port: leave --host and --port out")
    host = given.host or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    headers = _pairs("--header", given.header, "=")
    if "OPENAI_API_KEY" in os.environ:
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **headers}
    values = values_of(Destination, given) | {
        "backend": backend,
        "base_url": given.base_url or f"http://{host}:{given.port or 8000}",
        "model": given.served_model_name or given.model,
    }
    path = given.endpoint or PATHS.get(backend, "")
    return Destination(path=path, headers=headers, model_id=given.model, **values)


def _fields(given: argparse.Namespace, dataset: DatasetOptions) -> RequestFields:
    sampling = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    prefix = given.request_id_prefix
    return RequestFields(
        ignore_eos=given.ignore_eos or dataset.dataset_name in (RANDOM, TIMED_TRACE),
        logprobs=given.logprobs,
        sampling=sampling,
        extra_body=given.extra_body,
        request_id_prefix=f"bench-{uuid.uuid4().hex[:8]}-" if prefix is None else prefix,
    )


def _metrics(names: str) -> tuple[str, ...]:
    metrics = tuple(names.split(","))
    if unknown := [name for name in metrics if name not in METRIC_NAMES]:
        known = ", ".join(METRIC_NAMES)
        raise ConfigError(f"--percentile-metrics {unknown[0]}: choose from {known}")
    return metrics


def _goodput(texts: Sequence[str]) -> dict[str, float]:
    limits = {}
    for name, text in _pairs("--goodput", texts, ":").items():
        if name not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput {name}: choose from {', '.join(GOODPUT_METRICS)}")
        try:
            limits[name] = any_number(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--goodput {name}: {error} of milliseconds") from None
    return limits


def _percentiles(text: str) -> tuple[float, ...]:
    numbers = tuple(any_number(part) for part in text.split(","))
    if all(0 <= number <= 100 for number in numbers):
        return numbers
    raise argparse.ArgumentTypeError(f"{text!r}: percentiles are from 0 to 100")


def _pairs(flag: str, texts: Sequence[str], separator: str) -> dict[str, str]:
    """Split KEY<separator>VALUE; raises ConfigError if a key or the separator is missing."""
    split = [text.partition(separator) for text in texts]
    for key, found, _ in split:
        if not key or not found:
            raise ConfigError(f"{flag} {key}: write KEY{separator}VALUE")
    return {key.strip(): value.strip() for key, _, value in split}
