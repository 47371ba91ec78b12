"""The flags of `nanocore bench serve`: those of `vllm bench serve`, and a few of ours.

Ours are --engine-endpoint and --curve-dir for an engine's own wire, and --html.
"""

from __future__ import annotations

import argparse
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nanocore.bench.arrivals import Ramp, Traffic
from nanocore.bench.dataset_flags import add_dataset_flags, dataset_options
from nanocore.bench.dataset_options import RANDOM, TRACES, DatasetOptions
from nanocore.bench.parser import (
    BenchParser,
    above_zero,
    any_number,
    at_least,
    json_object,
    pairs,
    percentiles,
)
from nanocore.bench.serve_options import (
    BACKENDS,
    NANOCORE,
    OPENAI,
    PATHS,
    Asked,
    Destination,
    Report,
    ServeOptions,
)
from nanocore.protocol.errors import ConfigError

METRICS: Final = (
    "ttft",
    "tpot",
    "itl",
    "e2el",
    "client_queue_time",
    "e2el_including_client_queue",
)
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


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = BenchParser(
        prog="nanocore bench serve",
        description="Send requests to an engine, or to a server of OpenAI's API, and measure when "
        "tokens come.",
        allow_abbrev=False,
    )
    _add_destination(parser)
    _add_load(parser)
    add_dataset_flags(parser)
    _add_asked(parser)
    _add_report(parser)
    return parser


def parse(arguments: list[str]) -> ServeOptions:
    """What the command line asks for.

    Raises:
        ConfigError: a flag or a value that cannot be.
        SystemExit: --help.
    """
    given = build_parser().parse_args(arguments)
    dataset = dataset_options(given)
    if given.self_timed is not None and dataset.dataset_name not in TRACES:
        raise ConfigError(f"--self-timed is for traces: --dataset-name {', '.join(TRACES)}")
    is_trace = dataset.dataset_name in TRACES
    return ServeOptions(
        destination=_destination(given),
        dataset=dataset,
        traffic=_traffic(given),
        asked=_asked(given, dataset),
        report=_report(given),
        self_timed=is_trace and given.self_timed is not False,
        max_concurrency=given.max_concurrency,
        num_warmups=given.num_warmups,
        ready_timeout_s=given.ready_check_timeout_sec,
        has_progress_bar=not given.disable_tqdm,
    )


def _add_destination(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("destination").add_argument
    add("--backend", choices=BACKENDS, help="an engine's own wire, completions (by both names), or "
        "chat completions (default: nanocore with --engine-endpoint, else openai)")  # fmt: skip
    add("--engine-endpoint", metavar="ENDPOINT",
        help="of the engine, as ipc://PATH (default: the user's own one); with the other backends "
        "its tokenizer is used")  # fmt: skip
    add("--curve-dir", metavar="DIR", help="with tcp://: keys of nanocore-keygen")
    add("--base-url", metavar="URL", help="of the server, instead of --host and --port")
    add("--host", help="of the server (default: 127.0.0.1)")
    add("--port", type=at_least(1), help="of the server (default: 8000)")
    add("--endpoint", metavar="PATH", help="of the API (default: the backend's)")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="of every request; "
        "OPENAI_API_KEY of the environment is sent as a bearer's")  # fmt: skip
    add("--insecure", action="store_true", help="do not verify the server's certificate")
    add("--model", help="its name, or its folder (default: the server's first one)")
    add("--served-model-name", metavar="NAME", help="of requests (default: --model)")
    add("--tokenizer", metavar="PATH", help="folder, or tokenizer.json (default: the engine's; "
        "over HTTP that of --model, or of the server's model, if it is a folder here)")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=above_zero, metavar="RPS",
        help="requests per second (default: inf, all at once)")  # fmt: skip
    add("--burstiness", type=above_zero, default=1.0, metavar="X",
        help="shape of the gamma distribution of gaps; 1 is a Poisson process, less is burstier, "
        "inf is even (default: 1)")  # fmt: skip
    add("--ramp-up-strategy", choices=("linear", "exponential"),
        help="instead of --request-rate, one that grows")  # fmt: skip
    add("--ramp-up-start-rps", type=above_zero, metavar="RPS", help="rate at the first request")
    add("--ramp-up-end-rps", type=above_zero, metavar="RPS", help="rate at the last one")
    add("--self-timed", action=argparse.BooleanOptionalAction,
        help="requests arrive when the trace says (default with a trace)")  # fmt: skip
    add(
        "--max-concurrency",
        type=at_least(1),
        metavar="N",
        help="requests in flight at once (default: any)",
    )
    add("--num-warmups", type=at_least(0), default=0, metavar="N",
        help="requests before, which do not count (default: 0)")  # fmt: skip
    add("--ready-check-timeout-sec", type=at_least(0), default=0, metavar="S",
        help="wait until a first request succeeds (default: 0, it is not sent)")  # fmt: skip


def _add_asked(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action="store_true",
        help="answers are as long as asked for; so it is with random and traces")  # fmt: skip
    add(
        "--logprobs",
        type=at_least(0),
        metavar="N",
        help="ask for the N most likely tokens of each place, too",
    )
    for name, kind in _SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X",
            help="sampling parameter of every request (default: the model's)")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON",
        help="fields of every request over HTTP")  # fmt: skip
    add("--request-id-prefix", metavar="TEXT", help="what ids begin with (default: bench-, and a "
        "random name)")  # fmt: skip


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES",
        help=f"what is summarized, by commas: of {', '.join(METRICS)} "
        "(default: ttft,tpot,itl)")  # fmt: skip
    add("--metric-percentiles", type=percentiles, default=(99.0,), metavar="NUMBERS",
        help="percentiles of these, by commas (default: 99)")  # fmt: skip
    add("--goodput", nargs="+", default=[], metavar="NAME:MS",
        help=f"count requests within all of these; {', '.join(GOODPUT_METRICS)}")  # fmt: skip
    add("--save-result", action="store_true", help="write the figures as JSON into a file")
    add(
        "--save-detailed",
        action="store_true",
        help="with --save-result: those of each request, too",
    )
    add(
        "--append-result",
        action="store_true",
        help="with --save-result: as a further line of the file",
    )
    add("--result-dir", metavar="DIR", help="where the file is written (default: here)")
    add("--result-filename", metavar="FILE", help="the file's name (default: made of what "
        "was measured)")  # fmt: skip
    add("--label", help="of the result's file name (default: the backend)")
    add(
        "--metadata",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="what else the JSON is to say",
    )
    add("--html", metavar="FILE", help="write a report with plots, a page that needs no other file")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _destination(given: argparse.Namespace) -> Destination:
    backend = given.backend or (OPENAI if given.engine_endpoint is None else NANOCORE)
    if given.curve_dir is not None and given.engine_endpoint is None:
        raise ConfigError(f"--curve-dir {given.curve_dir}: keys are for --engine-endpoint tcp://")
    if backend == NANOCORE:
        for flag in ("base_url", "host", "port", "endpoint", "served_model_name"):
            if getattr(given, flag) is not None:
                raise ConfigError(
                    f"--{flag.replace('_', '-')} is for HTTP; an engine is found by "
                    "--engine-endpoint"
                )
        if given.header or given.extra_body:
            raise ConfigError("--header and --extra-body are for HTTP, and not for an engine")
    elif given.base_url is not None and (given.host, given.port) != (None, None):
        raise ConfigError("--base-url names host and port already: leave --host and --port out")
    elif given.base_url is not None and not given.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {given.base_url}: write http://HOST:PORT, or https://")
    host = given.host or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    headers = pairs("--header", given.header, "=")
    if "OPENAI_API_KEY" in os.environ:
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **headers}
    return Destination(
        backend=backend,
        engine_endpoint=given.engine_endpoint,
        curve_dir=given.curve_dir,
        base_url=(given.base_url or f"http://{host}:{given.port or 8000}").rstrip("/"),
        path=given.endpoint or PATHS.get(backend, ""),
        headers=headers,
        insecure=given.insecure,
        model=given.served_model_name or given.model,
        model_id=given.model,
        tokenizer=given.tokenizer,
    )


def _traffic(given: argparse.Namespace) -> Traffic:
    ends = given.ramp_up_start_rps, given.ramp_up_end_rps
    if given.ramp_up_strategy is None:
        if ends != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        rate = math.inf if given.request_rate is None else given.request_rate
        return Traffic(rate, given.burstiness)
    if given.request_rate is not None:
        raise ConfigError("--request-rate is one rate, and --ramp-up-strategy another: choose")
    if None in ends or ends[0] > ends[1] or math.isinf(ends[1]):
        raise ConfigError(
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, which is not less"
        )
    return Traffic(math.inf, given.burstiness, Ramp(given.ramp_up_strategy, *ends))


def _asked(given: argparse.Namespace, dataset: DatasetOptions) -> Asked:
    sampling = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    prefix = given.request_id_prefix
    return Asked(
        ignore_eos=given.ignore_eos or dataset.dataset_name in (RANDOM, *TRACES),
        logprobs=given.logprobs,
        sampling=sampling,
        extra_body=given.extra_body,
        request_id_prefix=f"bench-{uuid.uuid4().hex[:8]}-" if prefix is None else prefix,
    )


def _report(given: argparse.Namespace) -> Report:
    metrics = tuple(given.percentile_metrics.split(","))
    if unknown := [name for name in metrics if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics {unknown[0]}: there are {', '.join(METRICS)}")
    goodput = {}
    for name, text in pairs("--goodput", given.goodput, ":").items():
        if name not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput {name}: there are {', '.join(GOODPUT_METRICS)}")
        try:
            goodput[name] = any_number(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--goodput {name}: {error} of milliseconds") from None
    keeps = given.save_result or given.append_result
    if given.save_detailed and not keeps:
        raise ConfigError("--save-detailed says what --save-result keeps: give that, too")
    folder = Path(given.result_dir or "")
    if keeps and folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--result-dir {folder} is no folder that can be written to")
    return Report(
        label=given.label,
        percentile_metrics=metrics,
        percentiles=given.metric_percentiles,
        goodput_ms=goodput,
        save_result=given.save_result,
        save_detailed=given.save_detailed,
        append_result=given.append_result,
        result_dir=given.result_dir,
        result_filename=given.result_filename,
        metadata=pairs("--metadata", given.metadata, "="),
        html=given.html,
    )
