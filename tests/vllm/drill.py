"""The connector with faults that a test asks for, one copy after the other. Loaded by vLLM under its module's name."""

from __future__ import annotations

from typing import Any

from hostcache.copiers import Fail, FaultAction, fault_at
from hostcache.tier import CopyJob, Direction
from hostcache.vllm_plugin.connector import HostCacheConnector
from hostcache.vllm_plugin.worker_side import WorkerSide

PLAN: list[tuple[Direction, FaultAction | BaseException]] = []
"""What happens to the next copies of a direction, in order."""


def fault(job: CopyJob) -> FaultAction | None:
    for at, (direction, action) in enumerate(PLAN):
        if direction is job.direction:
            del PLAN[at]
            if isinstance(action, BaseException):
                raise action
            return action
    return None


class DrillConnector(HostCacheConnector):
    fault = staticmethod(fault)


class NoMemoryConnector(HostCacheConnector):
    """Its rank gets no host memory, which the scheduler does not know when it starts."""

    def make_worker(self, kv_caches: dict[str, Any]) -> WorkerSide:
        return WorkerSide(copier=None, clock=self.clock, copy_budget_s=1.0, off="the machine has none left")


class Mistaken:
    """What a side works with, but that one of its calls raises, once."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name: str | None = name

    @property
    def sprung(self) -> bool:
        return self._name is None

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._name = None
            raise RuntimeError("nobody thought of this")
        return getattr(self._inner, name)


class SecondRankFailsOnce(HostCacheConnector):
    """Under tensor parallel: on rank 1 the second restore ends with an error, of which rank 0 knows nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() == 1:
            type(self).fault = fault_at(1, Fail(after_pages=1), direction=Direction.RESTORE)
        super().register_kv_caches(kv_caches)
