"""CUDA copiers with one thing taken out each. A test that lets one pass proves nothing."""

from __future__ import annotations

from hostcache.copiers.cuda import CudaCopier, _Lane, _Task
from hostcache.tier.copying import CopyJob, Direction


class StoresDoNotWait(CudaCopier):
    """for the last writer of their pages"""

    def _after_compute(self, lane: _Lane, task: _Task) -> None:
        if lane.direction is Direction.RESTORE:
            super()._after_compute(lane, task)


class RestoresDoNotWait(CudaCopier):
    """for the last reader of their pages"""

    def _after_compute(self, lane: _Lane, task: _Task) -> None:
        if lane.direction is Direction.STORE:
            super()._after_compute(lane, task)


class ComputeDoesNotWait(CudaCopier):
    """for a copy that it was told to wait for"""

    def compute_waits_for(self, job_id: int) -> bool:
        return True


class RecordsWhenItIsIssued(CudaCopier):
    """and not at submit: a queued job then stands behind kernels that came after it"""

    def _after_compute(self, lane: _Lane, task: _Task) -> None:
        self._runtime.record(task.ready, self._runtime.compute_stream())
        super()._after_compute(lane, task)


class WaitsOnTheHost(CudaCopier):
    """until its copy is over, inside submit"""

    def submit(self, job: CopyJob) -> None:
        super().submit(job)
        self._until(lambda: bool(self._done), 0.1)
