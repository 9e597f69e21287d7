"""A real vLLM engine in this process, with the plugin or without, and a look at both of its sides. Not a test."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hostcache.clock import WallClock
from hostcache.vllm_plugin.rates import Rates

VOCABULARY = (3, 259)
BLOCK = 32


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that mean something to the tiny models, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(*VOCABULARY) for _ in range(tokens)]


PROMPTS = [prompt(seed, 400 + 13 * seed) for seed in range(20)]
SETTINGS: dict[str, Any] = {"host_cache_bytes": "64MiB", "host_cache_restore_budget_ms": 20_000,
                            "host_cache_copy_budget_ms": 20_000}
PATIENCE_S = 240.0
"""Anything that happens at all has happened by then, on a machine that others use too."""
POOL = 60
"""Blocks: three of the prompts fill it."""


@cache
def cold_answers(model: Path) -> list[list[int]]:
    """What vLLM answers to PROMPTS without any cache. Before another engine starts: there is room for one."""
    engine = Engine(model, blocks=1000, extra=None, enable_prefix_caching=False)
    answers = engine.answers(PROMPTS)
    engine.close()
    return answers


class AlwaysWorthIt(Rates):
    """A tiny model computes faster than a busy machine copies in the same process; here bytes are tested, not time."""

    def dearer(self, *, tokens: int, copied_bytes: int, bytes_ahead: int) -> bool:
        return False


class Engine:
    """`blocks`: of vLLM's pool. `extra` None: without any connector. One at a time in a process: `close` it."""

    def __init__(self, model: Path, *, blocks: int, extra: dict[str, Any] | None, max_len: int = 1200, chunk: int = 256,
                 seqs: int = 8, connector: str = "HostCacheConnector",
                 module: str = "hostcache.vllm_plugin.connector", policy: str | None = None, **options: Any) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM

        if extra is not None:
            given = {} if policy is None else {"kv_load_failure_policy": policy}
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both",
                kv_connector_extra_config=extra, **given)
        self.llm = LLM(
            model=str(model), dtype="float32", enforce_eager=True, block_size=BLOCK, num_gpu_blocks_override=blocks,
            max_model_len=max_len, max_num_batched_tokens=chunk, max_num_seqs=seqs, disable_log_stats=False,
            **{"enable_prefix_caching": True, **options})
        if extra is not None and self.side is not None:
            self.side.rates = AlwaysWorthIt()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """Beside the scheduler."""
        return self.core.scheduler.connector

    @property
    def wall(self) -> Any:
        """None where the tier never started."""
        return self.connector.scheduler

    @property
    def side(self) -> Any:
        """None where the tier never started, or ended by a mistake."""
        return self.wall and self.wall.side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **sampling)
        return list(self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False))

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in self.ask(prompts, tokens)]

    def metric(self, name: str, **labels: str) -> float:
        """A counter's or gauge's value, summed over whatever labels are not given."""
        found = [m for m in self.llm.get_metrics() if m.name == name]
        assert found, f"no metric {name}"
        return float(sum(m.value for m in found if all(m.labels.get(k) == v for k, v in labels.items())))

    @staticmethod
    def shown(name: str, **labels: str) -> float:
        """What /metrics of this process would show for one of our own."""
        from prometheus_client import REGISTRY

        samples = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]
        assert samples, f"no metric {name}"
        return float(sum(s.value for s in samples if all(s.labels.get(k) == v for k, v in labels.items())))

    def press(self, first: int = 0, last: int = 20) -> None:
        """Serve these prompts one after the other, so that most of what they leave is evicted."""
        for tokens in PROMPTS[first:last]:
            self.ask([tokens])

    def step_until(self, reached: Callable[[], bool], what: str) -> None:
        """However many steps that takes: a test may not depend on how fast the machine is."""
        clock = WallClock()
        give_up_s = clock.now() + PATIENCE_S
        while not reached():
            assert clock.now() < give_up_s, f"not within {PATIENCE_S} s: {what}"
            self.llm.llm_engine.step()

    def idle(self) -> None:
        """Steps until the engine has nothing left to do."""
        self.step_until(lambda: not self.core.scheduler.has_requests(), "the engine comes to rest")

    def at_rest(self, *, mistaken: bool = False) -> None:
        """Nothing is held: no pin, no block, no request. `mistaken`: the tier has ended by a mistake of its own."""
        self.idle()
        wall = self.wall
        why_off = wall.why_off or wall.side.off_reason or ""
        assert why_off.startswith("a bug") is mistaken, why_off
        if wall.side is not None:
            wall.side.check()
        assert wall.held == 0, vars(wall)
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
