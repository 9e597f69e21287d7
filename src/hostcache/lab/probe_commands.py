"""`hostcache lab bridge | replay | knee | reconcile | probe …`: arguments in, text or JSON out. Decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TextIO, get_args

import numpy as np

from hostcache.client.process import terminate_like_interrupt
from hostcache.clock import WallClock, unix_time
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.folders import new_folder
from hostcache.lab.alphabets import alphabet, tokenizer_of
from hostcache.lab.certificate import read_certificate
from hostcache.lab.gap import Gap, Modelled, gap
from hostcache.lab.judging import Judged
from hostcache.lab.knee import Goal, Knee, check_ladder, compare, knee, point
from hostcache.lab.lru import Touch
from hostcache.lab.measured import Counted, check_replay
from hostcache.lab.probe import SHIPPED, read_probe
from hostcache.lab.prompts import Prompts
from hostcache.lab.reconcile import reconcile
from hostcache.lab.replay import Load, Replay, as_sent, due_times, planned, replay
from hostcache.lab.replay_worker import Manner
from hostcache.lab.replayed import ProbeVoid, Replayed
from hostcache.lab.running import Means, run_probe
from hostcache.lab.sealing import read_seal, seal, write_seal
from hostcache.lab.serving import serving
from hostcache.lab.stream import Stream, stream_of
from hostcache.lab.trace_commands import add_reading_arguments, open_asked
from hostcache.lab.verifying import verify
from hostcache.workload.bridge import Alphabet, Bridge

_PROBE = """\
examples:
  hostcache lab probe seal conversation-300 --trace conversation_trace.jsonl.gz --model smollm2
  hostcache lab probe run conversation-300 --seal conversation-300.seal.json --trace conversation_trace.jsonl.gz
  hostcache lab probe verify hostcache-probes/001/certificate.json --trace conversation_trace.jsonl.gz

A probe is written before it is run: what is asked, and what each answer would mean. `seal` binds it to the trace, the
bridge and the model's figures; `run` refuses what was edited since; `verify` needs the trace alone.
"""
_REPLAY = """\
examples:
  hostcache lab replay --trace conversation_trace.jsonl.gz --requests 100 --block-tokens 16 --url http://127.0.0.1:8000
  hostcache lab replay --trace conversation_trace.jsonl.gz --requests 100 --rate-factor 2 --processes 2 --url …
"""


PROBE_WORDS = ("bridge", "replay", "knee", "reconcile", "probe")


def add_probe_arguments(commands: Any) -> None:
    """Adds `PROBE_WORDS` to the subparsers of `hostcache lab`."""
    each = _command(commands, "bridge", "try the bridge on a trace: both gates, before anything is sent")
    _add_trace(each)
    each.add_argument("--tokenizer", required=True, metavar="SOURCE",
                      help="a server's address, a tokenizer.json, or a model as `hostcache serve` takes it")
    each.add_argument("--text", action="store_true", help="also send every prompt through the tokenizer as text")
    _add_bridge(each)
    each.add_argument("--json", action="store_true", help="one JSON object on stdout")

    each = _command(commands, "replay", "send a trace through the gated bridge to a server", _REPLAY)
    _add_sending(each)
    each.add_argument("--at-once", type=int, metavar="N",
                      help="closed: so many at a time, in the trace's order (default: 1)")
    each.add_argument("--rate-factor", type=float, metavar="X", help="open: at the trace's times, X times as fast")
    each.add_argument("--capacity-tokens", type=int, metavar="N",
                      help="the server's cache, to hold the model against it (default: what the server says)")
    each.add_argument("--touch", choices=get_args(Touch), default="tail-first",
                      help="order in which LRU hears of a prompt's blocks (default: %(default)s)")

    each = _command(commands, "knee", "a ladder of open replays: where throughput and goodput stop following the load")
    _add_sending(each)
    each.add_argument("--rate-factors", required=True, metavar="X,Y,…", help="at least two")
    each.add_argument("--against", metavar="URL", help="another server: sweeps alternate, the ratio is url ÷ against")
    each.add_argument("--pairs", type=int, default=1, metavar="N", help="sweeps of each (default: %(default)s)")
    each.add_argument("--ttft-s", type=float, metavar="S", help="a good request's first token, from its due time on")
    each.add_argument("--tpot-s", type=float, metavar="S", help="a good request's time per further token")
    each.add_argument("--share", type=float, default=0.9, help="good requests at the knee (default: %(default)s)")

    each = _command(commands, "reconcile", "an engine's rate beside the model's and the bound, and what is between")
    _add_trace(each)
    each.add_argument("--capacity-tokens", type=int, required=True, metavar="N", help="of the engine's cache")
    each.add_argument("--hits", type=float, metavar="N", help="what the engine counted …")
    each.add_argument("--queries", type=float, metavar="N", help="… of so many")
    each.add_argument("--replay", type=Path, metavar="FILE", help="or a replay.json: request by request")
    each.add_argument("--engine-block-tokens", type=int, default=16, metavar="N",
                      help="the engine's blocks (default: %(default)s)")
    each.add_argument("--max-tokens", type=int, default=4, metavar="N", help="of the answers (default: %(default)s)")
    each.add_argument("--touch", choices=get_args(Touch), default="tail-first",
                      help="order in which LRU hears of a prompt's blocks (default: %(default)s)")
    each.add_argument("--json", action="store_true", help="one JSON object on stdout")

    each = _command(commands, "probe", "a hypothesis sealed before its run, and a certificate after it", _PROBE)
    inner = each.add_subparsers(metavar="WHAT", required=True, dest="probe_what")
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    each = _command(inner, "seal", "bind a probe file to a trace, a bridge and the model's figures")
    each.add_argument("probe", type=Path, metavar="FILE", help=f"a probe file, or a shipped one: {shipped}")
    each.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the trace")
    each.add_argument("--model", metavar="SOURCE", help="takes the place of {model} in start commands")
    each.add_argument("--tokenizer", metavar="SOURCE",
                      help="a server's address, a tokenizer.json or a model (default: --model)")
    each.add_argument("--out", type=Path, metavar="FILE",
                      help="(default: name.seal.json beside the file; of a shipped one, here)")
    each = _command(inner, "run", "run what was sealed; every attempt is kept")
    each.add_argument("probe", type=Path, metavar="FILE", help="the probe file, as it was sealed")
    each.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the trace, as it was sealed")
    each.add_argument("--seal", type=Path, metavar="FILE", help="(default: where `seal` writes it)")
    each.add_argument("--out", type=Path, metavar="DIR",
                      help="folder of all attempts at this seal (default: hostcache-probes/NAME-DIGEST)")
    each.add_argument("--json", action="store_true", help="print figures and verdict as JSON")
    _add_expect(each)
    each = _command(inner, "verify", "does a certificate hold, with nothing but the trace")
    each.add_argument("certificate", type=Path, metavar="FILE", help="certificate.json of a run")
    each.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the trace, as it was sealed")
    _add_expect(each)


def run_probe_command(args: argparse.Namespace, *, out: TextIO, err: TextIO, api_key: str | None = None) -> int:
    """The exit code. `args.what` is one of the commands that `add_probe_arguments` adds."""
    ran: dict[str, Callable[[argparse.Namespace, _Desk], int]] = {
        "bridge": _bridge, "replay": _replay, "knee": _knee, "reconcile": _reconcile, "probe": _probe}
    return ran[args.what](args, _Desk(out=out, err=err, api_key=api_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    out: TextIO
    err: TextIO
    api_key: str | None

    def progress(self, text: str) -> None:
        self.err.write(f"  {text}\n")
        self.err.flush()

    def show(self, document: Mapping[str, Any], as_json: bool, rows: Sequence[tuple[str, object]]) -> None:
        if as_json:
            self.out.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
            return
        width = max(len(name) for name, _ in rows)
        self.out.write("".join(f"{name:<{width}}  {value}\n" for name, value in rows))


# Arguments ----------------------------------------------------------------------------------------------------------


def _command(commands: Any, name: str, about: str, epilog: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a trace with block ids")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests (default: all)")
    parser.add_argument("--block-tokens", type=int, metavar="N",
                        help="take the trace's blocks for full ones of N tokens (default: as they are)")
    add_reading_arguments(parser)


def _add_bridge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine-block-tokens", type=int, default=16, metavar="N",
                        help="the engine's own blocks: siblings must differ in the first (default: %(default)s)")
    parser.add_argument("--words", type=int, default=2048, metavar="N", help="of the alphabet (default: %(default)s)")
    parser.add_argument("--filler", metavar="TEXT", help="seed of the blocks' filler; a new one is a cold start on a "
                        "warm server (default: the time, written down)")


def _add_expect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--expect", metavar="VERDICT", help=f"exit code {BARS_MISSED} unless this is the verdict")


def _add_sending(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser)
    parser.add_argument("--url", required=True, metavar="URL", help="the server")
    parser.add_argument("--tokenizer", metavar="SOURCE", help="(default: the server's own)")
    parser.add_argument("--send", choices=("ids", "text"), default="ids", help="form of prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=4, metavar="N", help="of answers (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that send (default: %(default)s)")
    parser.add_argument("--drain-s", type=float, default=60.0, metavar="S",
                        help="open: after the last was due, how long answers are waited for (default: %(default)s)")
    _add_bridge(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: the next hostcache-lab/NNN)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


# Bridge, replay, knee, reconcile ------------------------------------------------------------------------------------


def _bridge(args: argparse.Namespace, desk: _Desk) -> int:
    stream = _stream(args)
    with tokenizer_of(args.tokenizer, clock=WallClock(), api_key=desk.api_key) as tokenize:
        prompts = Prompts(bridge=Bridge(alphabet=alphabet(tokenize, args.words), block_tokens=stream.block_tokens,
                                        seed=_seed(args).encode()))
        report = prompts.gates(planned(stream), engine_block_tokens=args.engine_block_tokens,
                               tokenize=tokenize if args.text else None)
    document = {"trace": args.trace.name, "digest": stream.digest, **asdict(report)}
    desk.show(document, args.json, [
        ("blocks", f"{report.blocks:,}"),
        (f"beginnings of {args.engine_block_tokens} tokens", f"{report.first_blocks:,}: each its own"),
        ("tokens that hold the id", prompts.bridge.digits),
        ("prompts through the tokenizer", f"{report.prompts:,} came back as they were" if args.text else "not tried"),
        ("alphabet", report.alphabet), ("seed", report.seed)])
    return 0


def _replay(args: argparse.Namespace, desk: _Desk) -> int:
    if args.at_once is not None and args.rate_factor is not None:
        raise ConfigError("--at-once and --rate-factor are both given; a replay is closed or open")
    at_once = 1 if args.at_once is None and args.rate_factor is None else args.at_once
    load = Load(at_once=at_once, rate_factor=args.rate_factor, drain_s=args.drain_s, processes=args.processes)
    stream = _stream(args)
    letters = _alphabet(args, desk)
    folder = new_folder(args.out, "hostcache-lab")
    seed = _seed(args)
    outcome, described = _send(args, desk, stream, letters, args.url, seed, load, folder)
    document: dict[str, Any] = {
        "version": 1, "trace": args.trace.name, "digest": stream.digest, "seed": seed, "described": described,
        "block_tokens": args.block_tokens, "max_tokens": args.max_tokens, "counted": None, **outcome.as_json()}
    _write(folder / "replay.json", document)  # what was measured stays, also where it is void
    desk.err.write(f"written: {folder}/ (replay.json)\n")
    totals = _totals(outcome, desk)
    document["counted"] = None if totals is None else asdict(totals)
    capacity = args.capacity_tokens or described.get("pool_tokens")
    found = None
    if capacity and any(each.cached_tokens is not None for each in outcome.requests):
        found = gap(stream, Modelled(block_tokens=args.engine_block_tokens, capacity_tokens=int(capacity),
                                     touch=args.touch, max_tokens=args.max_tokens,
                                     whole_prompts=outcome.opening.engine == "hostcache"), outcome.requests,
                    preemptions=None if totals is None else totals.preemptions)
        document["gap"] = found.as_json()
    _write(folder / "replay.json", document)
    desk.show(document, args.json, [*_replay_rows(outcome, totals), *([] if found is None else _gap_rows(found))])
    return 0


def _totals(outcome: Replay, desk: _Desk) -> Counted | None:
    """None where the server counts too little; a figure is then what the requests were told. Raises ProbeVoid."""
    try:
        return check_replay(outcome)
    except ProbeVoid as void:
        if void.fault != "counters_missing":
            raise
        desk.progress(str(void))
        return None


def _knee(args: argparse.Namespace, desk: _Desk) -> int:
    try:
        factors = [float(each) for each in args.rate_factors.split(",")]
    except ValueError:
        raise ConfigError(f"--rate-factors {args.rate_factors}: numbers with commas between are needed") from None
    check_ladder(factors)
    goal = Goal(ttft_s=args.ttft_s, tpot_s=args.tpot_s, share=args.share)
    urls = [args.url, *([] if args.against is None else [args.against])]
    if len({each.rstrip("/") for each in urls}) < len(urls):
        raise ConfigError(f"--against {args.against} is --url; name another server, or leave it out")
    stream = _stream(args)
    if not any(due_times(list(islice(open_asked(args), stream.requests)), 1.0)):
        raise ConfigError(f"the {stream.requests} requests all arrive at the same moment and have no rate; take more")
    letters = _alphabet(args, desk)
    folder = new_folder(args.out, "hostcache-lab")
    seed = _seed(args)
    knees: dict[str, list[Knee]] = {url: [] for url in urls}
    for pair in range(args.pairs):
        for url in urls if pair % 2 == 0 else urls[::-1]:
            points = []
            for factor in factors:
                desk.progress(f"{url}: {factor:g} times the trace's rate")
                load = Load(at_once=None, rate_factor=factor, drain_s=args.drain_s, processes=args.processes)
                outcome, _ = _send(args, desk, stream, letters, url, f"{seed}/{pair}/{url}/{factor}", load, folder)
                points.append(point(outcome.requests, rate_factor=factor, goal=goal,
                                    rng=Random(f"{seed}/{pair}/{factor}"), drained_cleanly=outcome.drained_cleanly,
                                    lateness_p99_s=outcome.lateness_p99_s))
            knees[url].append(knee(points, goal))
    document: dict[str, Any] = {"version": 1, "trace": args.trace.name, "digest": stream.digest, "seed": seed,
                                "goal": asdict(goal),
                                "knees": {url: [each.as_json() for each in found] for url, found in knees.items()}}
    ratios, none = compare(knees[urls[0]], knees[urls[1]], seed) if len(urls) > 1 else ({}, {})
    document["ratios"] = {f"{name}, url ÷ against": each.as_json() for name, each in ratios.items()}
    document["no_ratio"] = none
    _write(folder / "knee.json", document)
    desk.show(document, args.json, [
        *(row for url in urls for row in _knee_rows(url, knees[url])),
        *((f"{name}, url ÷ against",
           f"{each.median:.3f} ({each.least:.3f} … {each.most:.3f}), the median of {each.pairs}")
          for name, each in ratios.items()),
        *((f"{name}, url ÷ against", f"none: {why}") for name, why in none.items())])
    desk.err.write(f"written: {folder}/ (knee.json)\n")
    return 0


def _reconcile(args: argparse.Namespace, desk: _Desk) -> int:
    if args.replay is not None:
        if args.hits is not None or args.queries is not None:
            raise ConfigError("--replay and --hits, --queries are both given; an engine is held against one of them")
        return _reconcile_replay(args, desk)
    if args.hits is None or args.queries is None:
        raise ConfigError("give --hits and --queries, or --replay FILE")
    stream = _stream(args)
    outcome = reconcile(stream, capacity_blocks=args.capacity_tokens // stream.block_tokens, hits=args.hits,
                        queries=args.queries, touch=args.touch, progress=desk.progress)
    desk.show(outcome.as_json(), args.json, [
        ("the engine", f"{outcome.engine_hit_rate:.6f}"), ("the bound", f"{outcome.max_hit_rate:.6f}"),
        (f"LRU of {outcome.capacity_blocks:,} blocks", f"{outcome.lru_hit_rate:.6f}"), ("verdict", outcome.verdict),
        *([("cause", outcome.cause)] if outcome.cause else []), *((each.name, each.says) for each in outcome.causes)])
    return 0


def _reconcile_replay(args: argparse.Namespace, desk: _Desk) -> int:
    try:
        given = json.loads(args.replay.read_text(encoding="utf-8"))
        records = [Replayed.from_json(each) for each in given["requests"]]
        digest, preemptions = given["digest"], (given.get("counted") or {}).get("preemptions")
        max_tokens = given.get("max_tokens", args.max_tokens)
    except OSError as error:
        raise ConfigError(f"--replay {args.replay} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--replay {args.replay} is no replay.json of `hostcache lab replay`: {error}") from None
    if args.requests is None:
        args.requests = len(records)
    stream = _stream(args)
    if stream.digest != digest:
        raise ConfigError(f"--replay {args.replay} is of another workload, {digest}; the trace as it is asked for here "
                          f"is {stream.digest}: give the same --trace, --requests and --block-tokens")
    if all(each.cached_tokens is None for each in records):
        raise ConfigError(f"--replay {args.replay}: no request was told its cached tokens (vLLM tells them with "
                          "--enable-prompt-tokens-details); give --hits and --queries")
    found = gap(stream, Modelled(block_tokens=args.engine_block_tokens, capacity_tokens=args.capacity_tokens,
                                 touch=args.touch, max_tokens=max_tokens,
                                 whole_prompts=given.get("engine") == "hostcache"), records, preemptions=preemptions)
    desk.show(found.as_json(), args.json, _gap_rows(found))
    return 0


def _alphabet(args: argparse.Namespace, desk: _Desk) -> Alphabet:
    with tokenizer_of(args.tokenizer or args.url, clock=WallClock(), api_key=desk.api_key) as tokenize:
        return alphabet(tokenize, args.words)


def _send(args: argparse.Namespace, desk: _Desk, stream: Stream, letters: Alphabet, url: str, seed: str, load: Load,
          folder: Path) -> tuple[Replay, dict[str, Any]]:
    """One replay, behind the gates."""
    clock = WallClock()
    requests = planned(stream, due_s=None if load.rate_factor is None else due_times(
        list(islice(open_asked(args), stream.requests)), load.rate_factor))
    with tokenizer_of(args.tokenizer or url, clock=clock, api_key=desk.api_key) as tokenize:
        prompts = Prompts(bridge=Bridge(alphabet=letters, block_tokens=stream.block_tokens, seed=seed.encode()))
        prompts.gates(requests, engine_block_tokens=args.engine_block_tokens,
                      tokenize=tokenize if args.send == "text" else None)
    desk.progress(f"{len(requests)} prompts through the gates")

    async def send() -> tuple[Replay, dict[str, Any]]:
        async with serving(url=url, api_key=desk.api_key, log=folder / "server.log", clock=clock) as server:
            manner = Manner(url=url, api_key=desk.api_key, model=server.model, send=args.send,
                            max_tokens=args.max_tokens, ignore_eos=server.capabilities.ignore_eos)
            outcome = await replay(requests, prompts, manner, load, scrape=server.adapter.scrape, clock=clock,
                                   log_dir=folder, progress=desk.progress)
            return outcome, dict(server.described)

    return asyncio.run(send())


def _stream(args: argparse.Namespace) -> Stream:
    for flag in ("requests", "block_tokens", "engine_block_tokens", "words", "max_tokens", "capacity_tokens",
                 "processes", "pairs"):
        if (value := getattr(args, flag, None)) is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}; give 1 or more")
    return as_sent(stream_of(open_asked(args), limit=args.requests, block_tokens=args.block_tokens))


def _seed(args: argparse.Namespace) -> str:
    return str(args.filler) if args.filler is not None else f"{unix_time():.6f}"


# Probe --------------------------------------------------------------------------------------------------------------


def _probe(args: argparse.Namespace, desk: _Desk) -> int:
    ran: dict[str, Callable[[argparse.Namespace, _Desk], int]] = {
        "seal": _probe_seal, "run": _probe_run, "verify": _probe_verify}
    return ran[args.probe_what](args, desk)


def _probe_seal(args: argparse.Namespace, desk: _Desk) -> int:
    probe = read_probe(args.probe)
    path = args.out or _seal_path(args.probe)
    if path.exists():
        raise ConfigError(f"{path} exists; a seal is never replaced: give another --out, or remove it yourself")
    if (source := args.tokenizer or args.model) is None:
        raise ConfigError("the bridge needs a tokenizer: give --tokenizer SOURCE, or --model SOURCE")
    desk.progress("looking for the words that are one token each")
    with tokenizer_of(source, clock=WallClock(), api_key=desk.api_key) as tokenize:
        letters = alphabet(tokenize, probe.words)
    desk.progress("the trace's digest and the model's figures")
    document = seal(probe, args.trace, letters, model=args.model)
    write_seal(path, document)
    oracle = document["oracle"]
    desk.show(document, False, [
        ("requests", f"{probe.requests:,}"), ("prompt tokens", f"{oracle['prompt_tokens']:,}"),
        ("longest prompt", f"{oracle['longest_prompt_tokens']:,} tokens"), ("bound", f"{oracle['bound']:.6f}"),
        ("possible in the engine's blocks", f"{oracle['possible']:.6f}"),
        (f"LRU of {probe.capacity_tokens:,} tokens", f"{oracle['lru']:.6f}"),
        ("seal", document["sha256"]), ("written", path)])
    return 0


def _probe_run(args: argparse.Namespace, desk: _Desk) -> int:
    probe = read_probe(args.probe)
    sealed = read_seal(args.seal or _seal_path(args.probe))
    out = args.out or Path("hostcache-probes") / f"{probe.name}-{sealed.sha256[:12]}"

    async def run() -> tuple[Path, Judged]:
        with terminate_like_interrupt():
            return await run_probe(probe, sealed, args.trace, out, Means(clock=WallClock(), api_key=desk.api_key,
                                                                         progress=desk.progress))

    path, judged = asyncio.run(run())
    rows: list[tuple[str, object]] = [("bound", f"{judged.figures['bound']:.6f}")]
    for arm in probe.measured:
        rows += [(f"{arm.name}: hit rate", f"{judged.figures[f'{arm.name}_hit_rate']:.6f}"),
                 (f"{arm.name}: model", f"{judged.figures[f'{arm.name}_model']:.6f}"),
                 (f"{arm.name}: not explained", f"{judged.figures[f'{arm.name}_unexplained_tokens']:g} tokens")]
    rows += [("verdict", judged.verdict), *([("cause", judged.cause)] if judged.cause else []), ("certificate", path)]
    desk.show({**judged.figures_part(), **judged.verdict_part(), "certificate": str(path)}, args.json, rows)
    return _as_expected(args, judged.verdict)


def _probe_verify(args: argparse.Namespace, desk: _Desk) -> int:
    document = read_certificate(args.certificate)
    verdict = verify(document, args.trace, holds=lambda text: desk.progress(f"holds: {text}"))
    desk.out.write(f"the certificate {document['sha256'][:16]}… holds; its verdict is {verdict}\n")
    return _as_expected(args, verdict)


def _seal_path(probe: Path) -> Path:
    name = f"{probe.stem}.seal.json"
    return probe.with_name(name) if probe.exists() else Path(name)


def _as_expected(args: argparse.Namespace, verdict: str) -> int:
    return BARS_MISSED if args.expect not in (None, verdict) else 0


# Rows ---------------------------------------------------------------------------------------------------------------


def _replay_rows(outcome: Replay, totals: Counted | None) -> list[tuple[str, object]]:
    prompt = sum(each.prompt_tokens or 0 for each in outcome.requests)
    told = [each for each in outcome.requests if each.cached_tokens is not None]
    cached, of = sum(each.cached_tokens or 0 for each in told), sum(each.prompt_tokens or 0 for each in told)
    first = [each.first_token_s - each.due_s for each in outcome.requests if each.first_token_s is not None]
    rows: list[tuple[str, object]] = [
        ("requests", f"{len(outcome.requests):,}, {sum(each.outcome == 'ok' for each in outcome.requests):,} answered"),
        ("prompt tokens", f"{prompt:,}" if any(each.prompt_tokens is not None for each in outcome.requests)
         else "not told"),
        ("from a cache, as requests were told", f"{cached:,}, {cached / of:.6f}" if of else "they were told nothing"),
        ("seconds", f"{outcome.wall_s:.2f}")]
    if totals is not None:
        rows += [("counted from the device, from the host", f"{totals.device_tokens:,}, {totals.host_tokens:,}"),
                 ("hit rate, counted", f"{totals.cached_tokens / max(1, totals.prompt_tokens):.6f}")]
    if first:
        rows.append(("first token after due, p50 p99",
                     f"{np.quantile(first, 0.5):.3f} s, {np.quantile(first, 0.99):.3f} s"))
    if outcome.offered_window_s is not None:
        rows += [("offered over", f"{outcome.offered_window_s:.2f} s"),
                 ("drained cleanly", "yes" if outcome.drained_cleanly else "no"),
                 ("sent after due, p50 p99", f"{outcome.lateness_p50_s:.4f} s, {outcome.lateness_p99_s:.4f} s")]
    return rows


def _gap_rows(found: Gap) -> list[tuple[str, object]]:
    def share(tokens: int) -> str:
        return f"{tokens:,} tokens, {tokens / found.prompt_tokens:.6f}"

    return [("bound", share(found.bound)), ("possible in the engine's blocks", share(found.possible)),
            ("LRU at the capacity", share(found.model)), ("the engine", share(found.engine)),
            ("requests where both are equal", f"{found.equal:,} of {found.compared:,}"),
            *([("left out: failed, or not told", f"{found.left_out:,} requests")] if found.left_out else []),
            *((f"engine − LRU: {name}", f"{tokens:+,} tokens") for name, tokens in found.causes.items()),
            ("not explained", f"{found.unexplained:,} tokens"),
            *([("verdict", "impossible: above the bound")] if found.engine > found.bound else [])]


def _knee_rows(url: str, knees: Sequence[Knee]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for each in knees:
        for at in each.points:
            said = (f"{at.throughput_per_s:.2f}/s answered, {at.good_share:.1%} good ({at.good_low:.1%} … "
                    f"{at.good_high:.1%}), sent {at.lateness_p99_s:.3f} s late (p99)")
            rows.append((f"{url}: {at.offered_per_s:.2f}/s offered",
                         said if at.drained_cleanly else f"{said}, not drained"))
        lowest, above = each.points[0], ", the highest load: it may lie above"
        good = f"none: {lowest.good_share:.1%} good at the lowest load, {lowest.offered_per_s:.2f}/s"
        if each.goodput_per_s is not None:
            low, high = ("-" if rate is None else f"{rate:.2f}" for rate in (each.goodput_low, each.goodput_high))
            good = f"{each.goodput_per_s:.2f}/s ({low} … {high}){above if each.beyond else ''}"
        through = "none: no request was answered at any load"
        if each.throughput_per_s:
            through = (f"{each.throughput_per_s:.2f}/s ({each.throughput_low:.2f} … {each.throughput_high:.2f})"
                       f"{above if each.throughput_beyond else ''}")
        rows += [(f"{url}: goodput knee", good), (f"{url}: throughput knee", through)]
    return rows


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
