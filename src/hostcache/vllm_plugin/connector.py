"""HostCacheConnector, the class vLLM loads: hands each call of vLLM to the wall before the side that answers it.

vLLM builds it once beside the scheduler and once in each worker; where /metrics is shown only class methods are used.
With `_why_not` every call is answered as if there were no tier: nothing is found, nothing moves, the engine serves.
Only a wrong setting ends the start of vLLM, and no exception of ours ends anything after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hostcache.clock import Clock, WallClock
from hostcache.copiers import Fault
from hostcache.errors import HostCacheError
from hostcache.tier.stats import LATENCY_BOUNDS_S
from hostcache.vllm_plugin import build, stats, support, wall
from hostcache.vllm_plugin.config import from_extra
from hostcache.vllm_plugin.wall import SchedulerWall, WorkerWall
from hostcache.vllm_plugin.wire import Orders, RankReport
from hostcache.vllm_plugin.wishes import WHERE
from hostcache.vllm_plugin.worker_side import WorkerSide

_logger = init_logger("vllm.hostcache")


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    orders: Orders


@dataclass
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    reports: tuple[RankReport, ...]

    def aggregate(self, other: Reports) -> Reports:
        return Reports(reports=self.reports + other.reports)


class HostCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. `SupportsHMA` is there so that vLLM treats a model with several cache groups as it does without
    us; such a model runs without the tier."""

    _cache_hit_source = CacheHitSource.HOST
    requires_kv_delivery = False
    """A cache may lose what it likes: nothing of a preempted request is owed to it."""

    fault: ClassVar[Fault | None] = None
    """For drills: asked by the CPU copier for each job."""
    clock: ClassVar[Clock] = WallClock()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._vllm_config, self._cache_config = vllm_config, kv_cache_config
        self._settings = from_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._why_not: str | None
        try:
            self._why_not = support.why_not(vllm_config, kv_cache_config, self._settings)
        except Exception as mistake:
            self._why_not = _alarming(mistake)
        self.scheduler: SchedulerWall | None = None
        self.worker: WorkerWall | None = None
        if role is not KVConnectorRole.SCHEDULER:
            return
        for line in support.repair(vllm_config):
            _logger.warning("hostcache: %s", line)
        try:
            self._why_not = self._why_not or build.why_too_large(self._settings)
            if self._why_not is None:
                self._start_scheduler()
        except HostCacheError as refusal:
            self._why_not = str(refusal)
        except Exception as mistake:
            self._why_not = _alarming(mistake)
        if self._why_not is not None:
            _logger.warning("hostcache: vLLM runs without the tier: %s", self._why_not)

    def _start_scheduler(self) -> None:
        side = build.scheduler_side(self._settings, self._vllm_config, self._cache_config, clock=self.clock,
                                    say=_logger.warning)
        self.scheduler = SchedulerWall(side, clock=self.clock, say=_logger.warning, alarm=_alarm)
        _logger.info("hostcache: the tier holds up to %d blocks, mode %s", side.config.frames,
                     self._settings.mode.value)

    # ---- in the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._why_not is None:
            side = self.make_worker(kv_caches)
            self.worker = WorkerWall(side, clock=self.clock, say=_logger.warning, alarm=_alarm)

    def make_worker(self, kv_caches: dict[str, Any]) -> WorkerSide:
        """The bytes of this rank. For drills: a subclass may make one that fails."""
        try:
            return build.worker_side(self._settings, self._vllm_config, self._cache_config, kv_caches,
                                     clock=self.clock, say=_logger.warning, fault=type(self).fault)
        except Exception as mistake:
            return WorkerSide(copier=None, clock=self.clock, copy_budget_s=0.0, off=_alarming(mistake))

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        if self.worker is not None:
            self.worker.before_forward(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.after_forward(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called for every layer of every step; loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Called for every layer of every step; saves are of whole blocks, before they are reused."""

    def wait_for_save(self) -> None:
        """Nothing is saved in a forward pass."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = (set(), set()) if self.worker is None else self.worker.finished()
        return KVConnectorTransferResults(finished_sending=set(), finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> Reports | None:
        report = None if self.worker is None else self.worker.report()
        return None if report is None else Reports(reports=(report,))

    # ---- beside the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self.scheduler is None:
            return
        try:
            reason = support.why_not_pool(gpu_block_pool)
        except Exception as mistake:
            reason = _alarming(mistake)
        if reason is None:
            self.scheduler.bind(gpu_block_pool)
        else:
            _logger.warning("hostcache: vLLM runs without the tier: %s", reason)
            self.scheduler = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = 0 if self.scheduler is None else self.scheduler.match(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler is not None:
            self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return StepOrders(Orders(step=0) if self.scheduler is None else self.scheduler.build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        if self.scheduler is not None and reports is not None:
            self.scheduler.heard(reports.reports)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        told = None
        if self.scheduler is not None:
            told = self.scheduler.finished(request, aborted=request.status.name == "FINISHED_ABORTED")
        return False, None if told is None else {WHERE: told}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy

    def reset_cache(self) -> bool | None:
        return None if self.scheduler is None else self.scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        """What the tier holds, for whoever listens to vLLM's own events: medium CPU, hashes as vLLM's."""
        for restorable, run in groupby(() if self.scheduler is None else self.scheduler.take_events(), itemgetter(0)):
            hashes = [maybe_convert_block_hash(block_hash) for _, block_hash in run]
            if restorable:
                spec = self._cache_config.kv_cache_groups[0].kv_cache_spec
                yield BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=[],
                                  block_size=spec.block_size, lora_id=None, medium="CPU", lora_name=None)
            else:
                yield BlockRemoved(block_hashes=hashes, medium="CPU")

    # ---- on either side

    def get_kv_connector_stats(self) -> HostCacheStats | None:
        told = {} if self.scheduler is None else self.scheduler.take_statistics()
        return HostCacheStats(data=told) if told else None

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close(timeout_s=1.0)

    # ---- of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU blocks that are contiguous over all layers: one copy a block. vLLM drops the wish where it must."""
        return "BLHNC" if str(vllm_config.device_config.device_type) == "cuda" else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HostCacheStats:
        return HostCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: Any) -> HostCachePromMetrics:
        return HostCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@dataclass
class HostCacheStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: a record of `stats.Changes`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> HostCacheStats:
        self.data = stats.merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's own log line: what moved."""
        shown = ("restore_bytes", "store_bytes", "restores", "evicted_pages", "evicted_saved_pages")
        return {name: self.data.get(f"hostcache_{name}", 0) for name in shown}

    def is_empty(self) -> bool:
        return not self.data


class HostCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        _unregister({family.name for family in stats.known()})
        for family in stats.known():
            names = [*labelnames, family.label] if family.label else labelnames
            if family.kind == "histogram":
                metric = self._histogram_cls(name=family.name, documentation=family.text, labelnames=labelnames,
                                             buckets=LATENCY_BOUNDS_S)
                for engine, values in per_engine_labelvalues.items():
                    self._series[engine][family.name] = metric.labels(*values)
                continue
            if family.kind == "counter":
                metric = self._counter_cls(name=family.name, documentation=family.text, labelnames=names)
            else:
                metric = self._gauge_cls(name=family.name, documentation=family.text, labelnames=names,
                                         multiprocess_mode="mostrecent")
            for engine, values in per_engine_labelvalues.items():
                for label in family.samples:
                    name = f"{family.name}|{label}" if label else family.name
                    self._series[engine][name] = metric.labels(*values, *([label] if family.label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """vLLM's output handler, which feeds every client, ends when this raises: a number that cannot be shown is left
        out."""
        for name, value in transfer_stats_data.items():
            family, _, observed = name.partition("|")
            series = self._series.get(engine_idx, {})
            one = series.get(name) or series.get(family)
            if one is None:
                continue
            try:
                if stats.is_gauge(name):
                    one.set(value)
                elif stats.is_histogram(name):
                    for _ in range(int(value)):
                        one.observe(float(observed))
                else:
                    one.inc(value)
            except Exception:
                _alarm()


def _alarm() -> None:
    _logger.exception("hostcache: this is a bug; please report it")


def _alarming(mistake: Exception) -> str:
    _alarm()
    return wall.bug(mistake)


def _unregister(names: set[str]) -> None:
    """A second engine in a process registers its metrics anew, as vLLM does with its own."""
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in names:
            REGISTRY.unregister(collector)
