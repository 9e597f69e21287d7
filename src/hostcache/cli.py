"""The command line: parses, settles, builds the concrete things, joins them, and prints. Decides nothing else.

Errors end in one line on stderr, `hostcache: error: …`, and the exit code of their class; see errors.py.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hostcache import __version__
from hostcache.clock import WallClock
from hostcache.errors import ConfigError, HostCacheError, MissingDependency
from hostcache.settings import SETTINGS, Settings, Settled, as_json, settle
from hostcache.sizes import format_size

if TYPE_CHECKING:
    from hostcache.bench.oracle_speed import Curves

INTERRUPTED = 130
NOTHING_RESTORED = 1

_OVERVIEW = """\
examples:
  hostcache serve                          the small chat model, fetched when it is not there, on 127.0.0.1:8000
  hostcache serve ./model --host-cache-bytes 24GiB
  hostcache vllm serve MODEL               the tier inside vLLM; what stands after -- is vLLM's
  hostcache doctor                         is this machine fit, and does a small server restore what it evicted?
  hostcache demo                           tier off against tier on, with the real engine (about five minutes)
  hostcache bench agents                   agent loops against a server on 127.0.0.1:8000, any that speaks OpenAI's API
  hostcache lab oracle --trace FILE        what any cache could have held of a trace
  hostcache config show                    every setting, its value and where it came from

Every setting is a flag (--host-cache-bytes), an environment variable (HOSTCACHE_HOST_CACHE_BYTES) and a key in
hostcache.toml (host_cache_bytes); the first of these three that is given wins.

exit codes: 0 done, 1 failed, 2 a setting or flag is wrong, 3 a bar was missed (--strict), 4 the model,
            5 memory, 6 the address or the server, 7 an extra is not installed, 130 interrupted
"""
_SERVE = """\
examples:
  hostcache serve
  hostcache serve ./SmolLM2-360M-Instruct --concurrency 8 --max-context 4096
  hostcache serve model.gguf --host-cache-bytes 24GiB --pool-tokens 16000
  HOSTCACHE_API_KEY=secret hostcache serve --host 0.0.0.0
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

SIGTERM drains: new generation requests get 429, running ones have --drain-s to finish, the exit code is 0.
"""
_DOCTOR = """\
examples:
  hostcache doctor                              starts a small server of its own with random weights
  hostcache doctor --url http://127.0.0.1:8000  asks a running one (sends it a few dozen short prompts)

Exit code 1 says that nothing was restored; the line before says why.
"""
_MODEL = """\
examples:
  hostcache model get smollm2                   prints the path of the file, fetched when it is not there
  hostcache model export smollm2 --hf DIR       a Hugging Face directory that transformers and vLLM load
"""


_VLLM = """\
examples:
  hostcache vllm serve Qwen/Qwen3-8B --host-cache-bytes 24GiB
  hostcache vllm serve Qwen/Qwen3-8B --host-cache-bytes 24GiB --front-door -- --max-model-len 32768 --host 0.0.0.0
  hostcache vllm serve ./model --dry-run -- --tensor-parallel-size 2

What stands after -- goes to `vllm serve` unchanged. Needs vLLM 0.32 beside hostcache; docs/vllm.md.
"""


class _Parser(argparse.ArgumentParser):
    """argparse with one line an error, and no guessing of abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flag = unknown.split()[0]
            near = difflib.get_close_matches(flag.split("=")[0], self._all_flags(), n=1)
            message = f"{flag} is not an argument here" + (f"; did you mean {near[0]}?" if near else "")
        raise ConfigError(f"{message}; see {self.prog} --help" if "?" not in message else message)

    def _all_flags(self) -> set[str]:
        flags: set[str] = set()
        for action in self._actions:
            flags.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags |= parser._all_flags()
        return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Reads sys.argv when `argv` is None."""
    arguments, foreign = list(sys.argv[1:] if argv is None else argv), []
    if arguments[:1] == ["vllm"] and "--" in arguments:  # what stands after the -- is vLLM's
        cut = arguments.index("--")
        arguments, foreign = arguments[:cut], arguments[cut + 1:]
    try:
        args = _parser(arguments).parse_args(arguments)
        args.vllm_flags = foreign
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except HostCacheError as error:
        print(f"hostcache: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has gone (`| head`): the interpreter must not complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as refused:  # a full disk, a file that may not be written: the system's word, with the file's name
        where = f"{refused.filename}: " if refused.filename else ""
        print(f"hostcache: error: {where}{refused.strerror or refused}", file=sys.stderr)
        return HostCacheError.exit_code
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0


def _parser(arguments: Sequence[str]) -> _Parser:
    parser = _Parser(prog="hostcache", epilog=_OVERVIEW,
                     description="A write-back host-RAM tier for the KV cache of LLM conversations.")
    parser.add_argument("--version", action="version", version=f"hostcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve a model over OpenAI's API", epilog=_SERVE,
                                description="Serve a model over OpenAI's API, with the tier behind it.")
    serve.add_argument("MODEL", nargs="?", help="the same as --model")
    _add_settings(serve)
    serve.set_defaults(run=_serve)

    vllm = commands.add_parser("vllm", help="the tier inside vLLM").add_subparsers(metavar="WHAT", required=True)
    inside = vllm.add_parser("serve", help="run `vllm serve` with the tier in it", epilog=_VLLM,
                             description="Compose the command line of `vllm serve` with the tier in it, and become it.")
    inside.add_argument("MODEL", help="what `vllm serve` takes: a name on the Hub or a directory")
    inside.add_argument("--front-door", action="store_true",
                        help="bound the requests inside: the others wait, then get 429 with Retry-After")
    inside.add_argument("--dry-run", action="store_true", help="print the command line and end")
    _add_settings(inside, prefixes=("host_cache_", "front_door_"))
    inside.set_defaults(run=_vllm_serve)

    doctor = commands.add_parser("doctor", help="check machine, settings and a running server", epilog=_DOCTOR,
                                 description="Check the machine, the settings and a server (fill, evict, return).")
    doctor.add_argument("--url", help="a running server; without it a small one is started and stopped")
    _add_settings(doctor)
    doctor.set_defaults(run=_doctor)

    config = commands.add_parser("config", help="show the settled settings")
    show = config.add_subparsers(metavar="WHAT", required=True).add_parser(
        "show", help="every setting, its value and where it came from")
    show.add_argument("--json", action="store_true", help="as JSON, values in bytes, seconds and shares")
    _add_settings(show)
    show.set_defaults(run=_config_show)

    model = commands.add_parser("model", help="fetch and export models with a short name", epilog=_MODEL)
    what = model.add_subparsers(metavar="WHAT", required=True)
    get = what.add_parser("get", help="fetch a model; prints its path")
    get.add_argument("NAME", help="for example smollm2")
    get.set_defaults(run=_model_get)
    export = what.add_parser("export", help="write a model as a Hugging Face directory")
    export.add_argument("NAME", help="for example smollm2")
    export.add_argument("--hf", type=Path, required=True, metavar="DIR", help="directory to write")
    export.set_defaults(run=_model_export)

    asked = next((each for each in arguments if not each.startswith("-")), None)
    for name, module, text in (
        ("demo", "hostcache.bench.demo", "tier off against tier on, with the real engine"),
        ("bench", "hostcache.bench.cli", "measure any OpenAI server with a prefix cache, and our own parts"),
        ("sim", "hostcache.sim.commands", "simulate: plan a host size, re-play the published fleet, hunt for faults"),
        ("lab", "hostcache.lab.commands", "reconcile: what a cache could have held of a trace, and what an engine did"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        ran = {"bench": _bench, "sim": _sim, "lab": _lab}.get(name)
        command.set_defaults(run=_demo if ran is None else partial(ran, argv=arguments))
        if asked == name:  # its own module knows its arguments; the others need not load it
            with _needs("all"):
                importlib.import_module(module).add_arguments(command)
    return parser


def _add_settings(parser: _Parser, prefixes: tuple[str, ...] = ("",)) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="a TOML file of settings (default: hostcache.toml where there is one)")
    group = parser.add_argument_group("settings")
    for each in SETTINGS:
        if not each.name.startswith(prefixes):
            continue
        default = each.default_text.replace("%", "%%")
        group.add_argument(each.flag, dest=f"set_{each.name}", metavar=(each.unit or each.name.split("_")[-1]).upper(),
                           help=f"{each.help.replace('%', '%%')} (default: {default})")


def _settled(args: argparse.Namespace) -> Settled:
    flags: dict[str, Any] = {each.name: getattr(args, f"set_{each.name}", None) for each in SETTINGS}
    named = getattr(args, "MODEL", None)
    if named is not None:
        if flags["model"] not in (None, named):
            raise ConfigError(f"MODEL is {named!r} and --model is {flags['model']!r}; give one of them")
        flags["model"] = named
    return settle(flags, config=args.config)


@contextlib.contextmanager
def _needs(extra: str) -> Iterator[None]:
    """A missing package becomes one line that names the extra which brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "hostcache"):
            raise
        raise MissingDependency(f"the package {package} is not installed; pip install 'hostcache[{extra}]'") from error


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _model_dir(settings: Settings) -> Path | None:
    return Path(settings.model_dir).expanduser() if settings.model_dir else None


# -- the commands ----------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from hostcache.engine import server

    settings = _settled(args).settings
    server.refuse_open_door(settings)
    with contextlib.closing(server.bind(settings)) as sock, _needs("engine"):
        # The address first: a port in use is told in a moment, not after a model was loaded.
        from hostcache.engine.build import build_engine
        from hostcache.engine.models import MODELS
        from hostcache.engine.models import get as get_model

        if settings.model in MODELS:
            get_model(settings.model, cache_dir=_model_dir(settings), progress=_tell)
        clock, log = WallClock(), server.JsonLog(sys.stderr, settings.log_level)
        engine = build_engine(settings, clock, log)
        # Libraries and weights stay for good: the collector need not walk them, which would cost a step each time.
        gc.collect()
        gc.freeze()

        def ready(url: str) -> None:
            tier = ("host cache off" if engine.stats().get("host_cache") is None else
                    f"host cache {format_size(settings.host_cache_bytes)}, {settings.host_cache_mode}")
            _tell(f"serving {engine.model_id} on {url} (context {engine.max_context} tokens, {engine.slots} slots, "
                  f"{tier}{', key needed' if settings.api_keys else ''})")

        interrupted = server.run(engine, sock, settings=settings, clock=clock, log=log, on_ready=ready)
    return INTERRUPTED if interrupted else 0


def _vllm_serve(args: argparse.Namespace) -> int:
    from hostcache.vllm_plugin.launch import compose

    made = compose(args.MODEL, _settled(args), args.vllm_flags, front_door=args.front_door, environ=os.environ)
    for note in made.notes:
        _tell(note)
    if args.dry_run:
        print(made.shown())
        return 0
    _tell(made.shown())
    made.start(os.environ)


def _doctor(args: argparse.Namespace) -> int:
    from hostcache import doctor

    settled = _settled(args)
    settings = settled.settings
    print("machine")
    for line in doctor.machine():
        print(f"  {line}")
    print("settings (that differ from the defaults; `hostcache config show` has all)")
    changed = [row for row in _rows(settled) if row[2] != "default"]
    for row in changed or [("none", "", "")]:
        print("  " + "  ".join(row).rstrip())
    refusal = doctor.quota(settings)
    print(f"  host cache: {refusal or 'the quota of ' + format_size(settings.host_cache_bytes) + ' can be met'}")
    print("smoke test", flush=True)
    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            url = stack.enter_context(doctor.small_server(settings))
        print(f"  server   {url}{'' if args.url else ' (a small one, started for this)'}", flush=True)
        key = settings.api_keys[0] if settings.api_keys else None
        result = doctor.smoke(doctor.http_ask(url, key), seed=settings.seed,
                              say=lambda line: print(f"  {line}", flush=True))
    if result.why:
        print(f"  nothing was restored: {result.why}")
        return NOTHING_RESTORED
    print(f"  restored {result.restored_tokens} of {result.possible_tokens} tokens: the tier works")
    if refusal:
        from hostcache.errors import MemoryRefused

        raise MemoryRefused(refusal)
    return 0


def _config_show(args: argparse.Namespace) -> int:
    settled = _settled(args)
    if args.json:
        print(json.dumps(as_json(settled), indent=2))
        return 0
    rows = [("setting", "value", "from"), *_rows(settled)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0


def _rows(settled: Settled) -> list[tuple[str, str, str]]:
    return [(each.name, each.show(getattr(settled.settings, each.name)) + _unit(each.unit, each.name, settled),
             settled.origins[each.name]) for each in SETTINGS]


def _unit(unit: str, name: str, settled: Settled) -> str:
    return f" {unit}" if unit not in ("", "bytes") and getattr(settled.settings, name) is not None else ""


def _model_get(args: argparse.Namespace) -> int:
    with _needs("engine"):
        from hostcache.engine.models import get
    print(get(args.NAME, cache_dir=_model_dir(settle().settings), progress=_tell))
    return 0


def _model_export(args: argparse.Namespace) -> int:
    with _needs("engine"):
        from hostcache.engine.models import export

        print(export(args.NAME, args.hf, cache_dir=_model_dir(settle().settings), progress=_tell))
    return 0


def _demo(args: argparse.Namespace) -> int:
    with _needs("all"):
        from hostcache.bench import demo
        from hostcache.report.demo_page import demo_html, demo_text

        return demo.run(args, out=sys.stdout, err=sys.stderr, tables=demo_text, page=demo_html)


def _bench(args: argparse.Namespace, argv: Sequence[str]) -> int:
    with _needs("all"):
        from hostcache.bench import cli as bench
        from hostcache.bench.tools import Pages
        from hostcache.report.bench_page import bench_html, bench_markdown, bench_text
        from hostcache.sim.published import published_document

        pages = Pages(text=bench_text, markdown=bench_markdown, html=bench_html, published=published_document())
        return bench.run(args, out=sys.stdout, err=sys.stderr, pages=pages, curves=_curves,
                         argv=["hostcache", *argv])


def _curves() -> Curves:
    """The laboratory's, for who measures them: bench and lab do not know each other."""
    from hostcache.bench.oracle_speed import Curves
    from hostcache.lab.compiled import HAVE_NUMBA
    from hostcache.lab.lru import stack_distances
    from hostcache.lab.oracle import lru_curve, opt_curve
    from hostcache.lab.stream import stream_of
    from hostcache.workload.traces import open_trace

    script = ("import sys; from hostcache.lab.oracle import lru_curve; from hostcache.lab.stream import stream_of; "
              "from hostcache.workload.traces import open_trace; lru_curve(stream_of(open_trace(sys.argv[1])))")
    return Curves(read=lambda path: stream_of(open_trace(path)), lru=lru_curve,
                  optimum=lambda stream, bypass: opt_curve(stream, bypass=bypass), compiled=HAVE_NUMBA, script=script,
                  distances=lambda ids, distinct, compiled: stack_distances(ids, distinct, loops=compiled))


def _sim(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from hostcache.report.plan_page import plan_html, plan_text
    from hostcache.report.twin_page import twin_html, twin_text
    from hostcache.sim import commands

    pages = commands.Pages(plan_text=plan_text, plan_html=plan_html, twin_text=twin_text, twin_html=twin_html)
    return commands.run(args, out=sys.stdout, err=sys.stderr, pages=pages, argv=argv)


def _lab(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from hostcache.lab import commands
    from hostcache.report.oracle_page import oracle_html, oracle_text

    pages = commands.Pages(oracle_text=oracle_text, oracle_html=oracle_html)
    keys = settle().settings.api_keys
    with _needs("all"):
        return commands.run(args, out=sys.stdout, err=sys.stderr, pages=pages, argv=argv,
                            api_key=keys[0] if keys else None)
